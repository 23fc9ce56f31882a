// Answers that are on their way to clients, who may not read them.
#pragma once

#include <mutex>

#include "absl/time/time.h"

struct grpc_call;

namespace tessera {

// Thread safe.
class Answers {
 public:
  // The place of a call in the list. Belongs to Answers between Add and Remove.
  struct Entry {
    grpc_call* call = nullptr;
    absl::Time since;
    Entry* before = nullptr;
    Entry* behind = nullptr;
  };

  // From the moment at which a call has its answer until it is done.
  void Add(Entry& entry, grpc_call* call, absl::Time now);
  void Remove(Entry& entry);

  // Breaks off the calls whose answers have not been taken for longer than limit.
  void CancelUnread(absl::Time now, absl::Duration limit);

 private:
  void Append(Entry& entry);
  void Unlink(Entry& entry);

  std::mutex mutex_;
  // By time, but for the moments between a clock's reading and Add; the oldest first.
  Entry* first_ = nullptr;
  Entry* last_ = nullptr;
};

}  // namespace tessera
