// The service grpc.health.v1.Health.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "grpc/health/v1/health.grpc.pb.h"
#include "server/rpc/stream_call.h"

namespace tessera {

// Watch is left to the server's generic service.
using HealthServiceBase = grpc::health::v1::Health::WithGenericMethod_Watch<
    grpc::health::v1::Health::WithRawMethod_Check<grpc::health::v1::Health::Service>>;

// Thread safe. It must outlive the server with which it is registered.
class Health final : public HealthServiceBase {
 public:
  // Sets whether a service is serving. The name "" means the server as a whole. Clients that watch
  // the service are notified.
  void Set(const std::string& service, bool serving);

  // Serves Check; called once the server has been built. A call of Watch needs no token and lasts
  // as long as the client likes. The number of simultaneous calls is therefore limited to a few per
  // connection, and to most_watches for all unix sockets together. Further calls end with
  // RESOURCE_EXHAUSTED.
  void Serve(CallQueues& queues, std::size_t most_watches);
  // Begins to serve a call if its method is Watch, and returns false otherwise. `method` is in the
  // form /package.Service/Method.
  bool ServeStream(std::string_view method, StreamExchange& exchange);

 private:
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;
  class WatchCall;

  // The caller holds the mutex.
  Status StatusOf(const std::string& service) const;

  std::mutex mutex_;
  std::map<std::string, bool> serving_;
  std::map<WatchCall*, std::string> watchers_;  // calls whose request has arrived
  std::map<std::string, std::size_t> watches_;  // calls of Watch, by peer
  std::size_t most_watches_ = 0;
};

}  // namespace tessera
