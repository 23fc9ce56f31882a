// Starts the servers of service_bench, and processes for them.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "grpcpp/grpcpp.h"

namespace tessera::bench {

// Starts a server of these services and of gRPC's health service, with gRPC's defaults except for
// messages of up to 8 MiB. Replaces port 0 with the port that was chosen. Ends the process if it
// cannot listen.
std::unique_ptr<grpc::Server> Serve(std::vector<std::string>& addresses,
                                    const std::vector<grpc::Service*>& services);

// A server in a separate process, which ends with this one. Must be made before this process uses
// gRPC.
class ServerProcess {
 public:
  // Runs in the new process: starts a server there, keeps it, and returns the addresses on which it
  // listens.
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
