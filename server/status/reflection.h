// Tells clients such as grpcurl and ghz what the server offers. gRPC's own reflection service
// occupies a thread for every open stream, and cannot be disabled once it is linked.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "server/rpc/stream_call.h"

namespace tessera {

// The services grpc.reflection.v1 and v1alpha, which differ only in their names. They serve at most
// 128 streams at the same time (RESOURCE_EXHAUSTED) and accept requests of at most 64 KiB
// (INVALID_ARGUMENT). Thread safe. It must outlive the server.
class Reflection {
 public:
  // `services` are the full names of the services to list, in this order. Their descriptors must be
  // linked.
  explicit Reflection(std::vector<std::string> services);
  ~Reflection();

  // Begins to serve a call if its method is one of reflection, and returns false otherwise.
  // `method` is in the form /package.Service/Method.
  bool Serve(std::string_view method, StreamExchange& exchange);

  // Ends streams on which no request has arrived for a minute. They end with DEADLINE_EXCEEDED.
  void EndIdleStreams(absl::Time now);

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
