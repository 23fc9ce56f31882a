#include "server/rpc/answers.h"

#include <vector>

#include "grpc/grpc.h"

namespace tessera {

void Answers::Append(Entry& entry) {
  entry.before = last_;
  entry.behind = nullptr;
  (last_ == nullptr ? first_ : last_->behind) = &entry;
  last_ = &entry;
}

void Answers::Unlink(Entry& entry) {
  (entry.before == nullptr ? first_ : entry.before->behind) = entry.behind;
  (entry.behind == nullptr ? last_ : entry.behind->before) = entry.before;
}

void Answers::Add(Entry& entry, grpc_call* call, absl::Time now) {
  const std::lock_guard lock(mutex_);
  entry.call = call;
  entry.since = now;
  Append(entry);
}

void Answers::Remove(Entry& entry) {
  const std::lock_guard lock(mutex_);
  Unlink(entry);
}

void Answers::CancelUnread(absl::Time now, absl::Duration limit) {
  std::vector<grpc_call*> unread;
  {
    const std::lock_guard lock(mutex_);
    while (first_ != nullptr && now - first_->since > limit) {
      Entry& entry = *first_;
      grpc_call_ref(entry.call);
      unread.push_back(entry.call);
      // Cancelling once is nearly always enough; if not, it is tried again after the limit.
      Unlink(entry);
      entry.since = now;
      Append(entry);
    }
  }
  // The mutex is not held here, because a cancelled call may end in this thread and remove its
  // entry.
  for (grpc_call* call : unread) {
    grpc_call_cancel(call, nullptr);
    grpc_call_unref(call);
  }
}

}  // namespace tessera
