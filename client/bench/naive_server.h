// A server as a beginner would write it: synchronous gRPC, with one thread and one kernel per call.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/bench/naive_device.h"
#include "grpcpp/grpcpp.h"

namespace tessera::bench {

// Serves Upload for f32, Dot for two buffers, Health, and GetServerInfo, which names the device.
// Keeps every array until another one replaces it. Thread safe.
class NaiveServer {
 public:
  // Uses the first GPU if there is one. Ends the process if it cannot listen.
  explicit NaiveServer(std::vector<std::string> addresses);
  ~NaiveServer();
  const std::vector<std::string>& addresses() const { return addresses_; }

 private:
  class Arrays;
  class Compute;
  class Buffers;
  std::unique_ptr<NaiveDevice> device_;
  std::unique_ptr<Arrays> arrays_;
  std::unique_ptr<Compute> compute_;
  std::unique_ptr<Buffers> buffers_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::string> addresses_;
};

}  // namespace tessera::bench
