// Tells clients such as grpcurl and ghz what the server offers. gRPC's own service of this kind
// takes a thread for every open stream, and cannot be left out once it is linked.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "server/rpc/stream_call.h"

namespace tessera {

// The services grpc.reflection.v1 and v1alpha, which differ in their names. They serve at most 128
// streams at once (RESOURCE_EXHAUSTED) and take requests of at most 64 KiB (INVALID_ARGUMENT).
// Thread safe; outlives the server.
class Reflection {
 public:
  // services: full names, in the order in which they are listed; their descriptors are linked.
  explicit Reflection(std::vector<std::string> services);
  ~Reflection();

  // Begins to serve a call of reflection. method: as in /package.Service/Method. Returns false if
  // it is another method.
  bool Serve(std::string_view method, StreamExchange& exchange);

  // Ends streams on which no request has arrived for a minute, with DEADLINE_EXCEEDED.
  void EndIdleStreams(absl::Time now);

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
