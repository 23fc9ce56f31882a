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

// Thread safe. It outlives the server, with which it is registered.
class Health final : public HealthServiceBase {
 public:
  // Sets whether the service of this name, or with "" the server as a whole, is serving. Clients
  // that watch it are told.
  void Set(const std::string& service, bool serving);

  // Serves Check; called once the server has been built. Watch needs no token, and lasts as long as
  // the client likes, so the number of calls at the same time is limited: to a few for each
  // connection, and to most_watches for all Unix sockets together. Further ones end with
  // RESOURCE_EXHAUSTED. answers: the list in which responses of Check wait for their clients;
  // outlives the queues.
  void Serve(CallQueues& queues, std::size_t most_watches, Answers& answers);
  // Begins to serve a call of Watch. method: as in /package.Service/Method. Returns false if it is
  // another method.
  bool ServeStream(std::string_view method, StreamExchange& exchange);

 private:
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;
  class WatchCall;

  // The caller holds the mutex.
  Status StatusOf(const std::string& service) const;

  std::mutex mutex_;
  std::map<std::string, bool> serving_;
  std::map<WatchCall*, std::string> watchers_;  // that have said what they watch
  std::map<std::string, std::size_t> watches_;  // calls of Watch, by peer
  std::size_t most_watches_ = 0;
};

}  // namespace tessera
