// What gRPC itself takes: a server that answers the calls of service_bench and does nothing else.
#pragma once

#include <memory>
#include <string>

#include "grpcpp/grpcpp.h"
#include "tessera/v1/buffer.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera::bench {

// A callback server: Dot and Reduce answer 0, uploads are read and forgotten, downloads send one
// message of 1 MiB again and again. Thread safe.
class BareServer {
 public:
  // address: "127.0.0.1:0" picks a port. Ends the process where it cannot listen.
  explicit BareServer(const std::string& address);
  ~BareServer();
  const std::string& address() const { return address_; }

 private:
  class Compute;
  class Buffers;
  std::unique_ptr<Compute> compute_;
  std::unique_ptr<Buffers> buffers_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

}  // namespace tessera::bench
