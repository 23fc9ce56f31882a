#include "server/answers.h"

#include "server/clock.h"

namespace tessera {

void Answers::Add(grpc::CallbackServerContext& context) {
  const std::lock_guard lock(mutex_);
  since_.emplace(&context, SteadyNow());
}

void Answers::Remove(grpc::CallbackServerContext& context) {
  const std::lock_guard lock(mutex_);
  since_.erase(&context);
}

void Answers::CancelUnread(absl::Time now, absl::Duration limit) {
  const std::lock_guard lock(mutex_);
  for (auto& [context, since] : since_) {
    if (now - since <= limit) continue;
    context->TryCancel();
    since = now;  // once is enough, but for the unlikely
  }
}

}  // namespace tessera
