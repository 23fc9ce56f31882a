// Answers that are on their way to clients who may not read them.
#pragma once

#include <map>
#include <mutex>

#include "absl/time/time.h"
#include "grpcpp/server_context.h"

namespace tessera {

// Thread safe.
class Answers {
 public:
  // From a call's Finish until it is done.
  void Add(grpc::CallbackServerContext& context);
  void Remove(grpc::CallbackServerContext& context);

  // Breaks off the calls whose answers nobody has taken for longer than limit.
  void CancelUnread(absl::Time now, absl::Duration limit);

 private:
  std::mutex mutex_;
  std::map<grpc::CallbackServerContext*, absl::Time> since_;
};

}  // namespace tessera
