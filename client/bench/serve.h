// How the servers of service_bench listen, and processes for them.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "grpcpp/grpcpp.h"

namespace tessera::bench {

// Starts a server of these services and of gRPC's health service, with what gRPC has by default but
// for messages of up to 8 MiB. Puts the port that was chosen in place of port 0. Ends the process
// where it cannot listen.
std::unique_ptr<grpc::Server> Serve(std::vector<std::string>& addresses,
                                    const std::vector<grpc::Service*>& services);

// A server in a process of its own, which ends with this one. To be made before this process uses
// gRPC.
class ServerProcess {
 public:
  // In the new process: starts a server there, gives the addresses it listens on, and keeps it.
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
