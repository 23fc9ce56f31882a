// Responses that are on their way to clients, which may not read them.
#pragma once

#include <mutex>

#include "absl/time/time.h"

struct grpc_call;

namespace tessera {

// Thread safe.
class Answers {
 public:
  // The list entry of a call. It belongs to Answers between Add and Remove.
  struct Entry {
    grpc_call* call = nullptr;
    absl::Time since;
    Entry* before = nullptr;
    Entry* behind = nullptr;
  };

  // Add is called when the call's response is about to be sent, and Remove when the call is done.
  void Add(Entry& entry, grpc_call* call, absl::Time now);
  void Remove(Entry& entry);

  // Cancels the calls whose responses have not been read for longer than limit.
  void CancelUnread(absl::Time now, absl::Duration limit);

 private:
  void Append(Entry& entry);
  void Unlink(Entry& entry);

  std::mutex mutex_;
  // In order of time, with the oldest entry first. The order is only approximate, because a little
  // time passes between reading the clock and Add.
  Entry* first_ = nullptr;
  Entry* last_ = nullptr;
};

}  // namespace tessera
