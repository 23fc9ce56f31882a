#include "client/bench/serve.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <deque>
#include <fstream>

#include "client/bench/channels.h"
#include "grpcpp/health_check_service_interface.h"

namespace tessera::bench {

std::unique_ptr<grpc::Server> Serve(std::vector<std::string>& addresses,
                                    const std::vector<grpc::Service*>& services) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  std::deque<int> ports(addresses.size());
  for (std::size_t i = 0; i < addresses.size(); ++i)
    builder.AddListeningPort(addresses[i], grpc::InsecureServerCredentials(), &ports[i]);
  for (grpc::Service* service : services) builder.RegisterService(service);
  builder.SetMaxReceiveMessageSize(8 << 20);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (server == nullptr || ports[i] == 0) Die("cannot listen on " + addresses[i]);
    if (!IsUnix(addresses[i]))
      addresses[i] = addresses[i].substr(0, addresses[i].rfind(':') + 1) + std::to_string(ports[i]);
  }
  return server;
}

ServerProcess::ServerProcess(const Start& start) {
  int ends[2];
  if (pipe(ends) != 0) Die("pipe failed");
  pid_ = fork();
  if (pid_ < 0) Die("fork failed");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::FILE* out = fdopen(ends[1], "w");
    for (const std::string& address : start()) std::fprintf(out, "%s\n", address.c_str());
    std::fclose(out);
    for (;;) pause();
  }
  close(ends[1]);
  std::ifstream in("/dev/fd/" + std::to_string(ends[0]));
  for (std::string address; std::getline(in, address);) addresses_.push_back(address);
  close(ends[0]);
  if (addresses_.empty()) Die("a server process did not start");
}

ServerProcess::~ServerProcess() {
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

}  // namespace tessera::bench
