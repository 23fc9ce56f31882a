// What gRPC itself takes: a server that answers the calls of service_bench and does nothing else.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "tessera/v1/buffer.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera::bench {

// A callback server: Dot and Reduce answer 0, Execute as many zeros, Matmul answers without a
// product, Health is gRPC's own, uploads are read and forgotten, downloads send one message of 1
// MiB again and again. Thread safe.
class BareServer {
 public:
  // Port 0 picks one. Ends the process where it cannot listen.
  explicit BareServer(std::vector<std::string> addresses);
  ~BareServer();
  const std::vector<std::string>& addresses() const { return addresses_; }

 private:
  class Compute;
  class Buffers;
  std::unique_ptr<Compute> compute_;
  std::unique_ptr<Buffers> buffers_;
  std::vector<std::string> addresses_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace tessera::bench
