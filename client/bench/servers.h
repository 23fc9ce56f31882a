// The servers of a run: those of the command line, and those that this program starts.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "client/bench/channels.h"
#include "client/bench/options.h"
#include "client/bench/serve.h"

namespace tessera::bench {

// Start a server that lives as long as the process. Give the addresses it listens on, with the
// ports that were chosen. To be called once.
std::vector<std::string> KeepBare(const std::vector<std::string>& addresses);
std::vector<std::string> KeepNaive(const std::vector<std::string>& addresses);

// To be made before this process uses gRPC. Ends the process where a server does not start, or a
// target has no bare server to be compared with.
class Servers {
 public:
  explicit Servers(const Options& options);

  // The bare ones, the naive ones, and those of the command line.
  const std::vector<Target>& targets() const { return targets_; }

  // The index of the bare server of the same transport.
  std::size_t PeerOf(const Target& target) const;

 private:
  using Keep = std::vector<std::string>(const std::vector<std::string>&);
  // A process that keeps a server on TCP, on a unix socket, or on both.
  void Start(Keep& keep, bool tcp, bool unix_socket, const std::string& name, Target::Kind kind);
  void Add(const std::vector<std::string>& addresses, const std::string& name, Target::Kind kind);

  std::vector<std::unique_ptr<ServerProcess>> processes_;
  std::vector<Target> targets_;
};

}  // namespace tessera::bench
