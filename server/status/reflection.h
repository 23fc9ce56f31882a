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
  // services: full names, in the order in which they are told; their descriptors are linked.
  explicit Reflection(std::vector<std::string> services);
  ~Reflection();

  // Begins to serve a call of a method of reflection, named as in /package.Service/Method; whether
  // it is one.
  bool Serve(std::string_view method, StreamExchange& exchange);

  // Ends the streams on which nothing has been asked for a minute, with DEADLINE_EXCEEDED.
  void EndIdleStreams(absl::Time now);

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
