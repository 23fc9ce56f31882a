// The service grpc.health.v1.Health.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "grpc/health/v1/health.pb.h"
#include "server/stream_call.h"

namespace tessera {

// Thread safe; outlives the server.
class Health {
 public:
  // A service of this name, or with "" the server as a whole, is or is not serving: those who watch
  // it are told.
  void Set(const std::string& service, bool serving);

  // Begins to serve a call of a method of the health service, named as in /package.Service/Method;
  // whether there is one.
  bool Serve(std::string_view method, StreamExchange& exchange);

 private:
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;
  class HealthCall;

  // With the mutex.
  Status StatusOf(const std::string& service) const;

  std::mutex mutex_;
  std::map<std::string, bool> serving_;
  std::map<HealthCall*, std::string> watchers_;
};

}  // namespace tessera
