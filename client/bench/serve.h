// Starts the servers of service_bench, and processes for them.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "grpcpp/grpcpp.h"

namespace tessera::bench {

// Starts a server with these services and gRPC's health service. It uses gRPC's defaults, except
// that messages may have up to 8 MiB. Replaces port 0 with the port that was chosen. Ends the
// process if the server cannot listen.
std::unique_ptr<grpc::Server> Serve(std::vector<std::string>& addresses,
                                    const std::vector<grpc::Service*>& services);

// A server in a separate process, which ends with this one. Must be made before this process uses
// gRPC.
class ServerProcess {
 public:
  // Runs in the new process. Must start a server, keep it alive, and return the addresses on which
  // it listens.
  using Start = std::function<std::vector<std::string>()>;
  explicit ServerProcess(const Start& start);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;
  const std::vector<std::string>& addresses() const { return addresses_; }

 private:
  pid_t pid_ = 0;
  std::vector<std::string> addresses_;
};

}  // namespace tessera::bench
