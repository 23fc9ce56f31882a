// The service grpc.health.v1.Health.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "grpc/health/v1/health.grpc.pb.h"
#include "server/rpc/answers.h"
#include "server/rpc/stream_call.h"

namespace tessera {

// Watch is left to the server's generic service.
using HealthServiceBase = grpc::health::v1::Health::WithGenericMethod_Watch<
    grpc::health::v1::Health::WithRawMethod_Check<grpc::health::v1::Health::Service>>;

// Thread safe; outlives the server, with which it is registered.
class Health final : public HealthServiceBase {
 public:
  // A service of this name, or with "" the server as a whole, is or is not serving: those who watch
  // it are told.
  void Set(const std::string& service, bool serving);

  // Check, once the server has been built. Watch needs no token, and lasts for as long as the
  // client likes: of each connection, or of all Unix sockets together, a few, or most_watches,
  // calls are served at once. Further ones end with RESOURCE_EXHAUSTED. answers: the list in which
  // answers of Check wait for their clients; outlives the queues.
  void Serve(CallQueues& queues, std::size_t most_watches, Answers& answers);
  // Begins to serve a call of Watch, named as in /package.Service/Method; whether it is one.
  bool ServeStream(std::string_view method, StreamExchange& exchange);

 private:
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;
  class WatchCall;

  // With the mutex.
  Status StatusOf(const std::string& service) const;

  std::mutex mutex_;
  std::map<std::string, bool> serving_;
  std::map<WatchCall*, std::string> watchers_;  // that have said what they watch
  std::map<std::string, std::size_t> watches_;  // calls of Watch, by peer
  std::size_t most_watches_ = 0;
};

}  // namespace tessera
