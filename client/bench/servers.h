// The servers of a run: those on the command line, and those that this program starts.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "client/bench/channels.h"
#include "client/bench/options.h"
#include "client/bench/serve.h"

namespace tessera::bench {

// These start a server that lives as long as the process and return the addresses on which it
// listens, with the chosen ports. Each may be called at most once.
std::vector<std::string> KeepBare(const std::vector<std::string>& addresses);
std::vector<std::string> KeepNaive(const std::vector<std::string>& addresses);

// Must be made before this process uses gRPC. Ends the process if a server does not start, or if a
// target has no bare server with which it can be compared.
class Servers {
 public:
  explicit Servers(const Options& options);

  // The bare servers, the naive ones, and those on the command line.
  const std::vector<Target>& targets() const { return targets_; }

  // Returns the index of the bare server with the same transport.
  std::size_t PeerOf(const Target& target) const;

 private:
  using Keep = std::vector<std::string>(const std::vector<std::string>&);
  // Starts a process that keeps a server on TCP, on a Unix socket, or on both.
  void Start(Keep& keep, bool tcp, bool unix_socket, const std::string& name, Target::Kind kind);
  void Add(const std::vector<std::string>& addresses, const std::string& name, Target::Kind kind);

  std::vector<std::unique_ptr<ServerProcess>> processes_;
  std::vector<Target> targets_;
};

}  // namespace tessera::bench
