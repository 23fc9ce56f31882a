// A server that answers the calls of service_bench and does nothing else. It shows the cost of gRPC
// itself.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "tessera/v1/buffer.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera::bench {

// Uses gRPC's callback API. Dot and Reduce return 0, Execute returns zeros, Matmul returns no
// product, and Health is gRPC's own. Uploads are read and discarded. Downloads send one message of
// 1 MiB repeatedly. Thread safe.
class BareServer {
 public:
  // With port 0, chooses a free port. Ends the process if the server cannot listen.
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
