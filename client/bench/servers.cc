#include "client/bench/servers.h"

#include <unistd.h>

#include <algorithm>

#include "client/bench/bare_server.h"
#include "client/bench/naive_server.h"

namespace tessera::bench {

std::vector<std::string> KeepBare(const std::vector<std::string>& addresses) {
  static const BareServer server(addresses);
  return server.addresses();
}

std::vector<std::string> KeepNaive(const std::vector<std::string>& addresses) {
  static const NaiveServer server(addresses);
  return server.addresses();
}

Servers::Servers(const Options& options) {
  const std::vector<Target>& given = options.targets;
  const auto is_unix = [](const Target& target) { return IsUnix(target.address); };
  const bool unix_socket = std::any_of(given.begin(), given.end(), is_unix);
  const bool tcp = given.empty() || !std::all_of(given.begin(), given.end(), is_unix);
  if (options.bare.empty()) {
    Start(KeepBare, tcp, unix_socket, "bare gRPC", Target::Kind::kBare);
  } else {
    Add(options.bare, "bare gRPC", Target::Kind::kBare);
  }
  if (options.naive) Start(KeepNaive, tcp, unix_socket, "naive gRPC", Target::Kind::kNaive);
  targets_.insert(targets_.end(), given.begin(), given.end());
  for (const Target& target : targets_) PeerOf(target);
}

std::size_t Servers::PeerOf(const Target& target) const {
  const auto peer = std::find_if(targets_.begin(), targets_.end(), [&](const Target& t) {
    return t.kind == Target::Kind::kBare && IsUnix(t.address) == IsUnix(target.address);
  });
  if (peer == targets_.end()) Die("no bare server has the transport of " + target.address);
  return static_cast<std::size_t>(peer - targets_.begin());
}

void Servers::Start(Keep& keep, bool tcp, bool unix_socket, const std::string& name,
                    Target::Kind kind) {
  std::vector<std::string> addresses;
  if (tcp) addresses.emplace_back("127.0.0.1:0");
  if (unix_socket)
    addresses.push_back("unix-abstract:service_bench." + std::to_string(getpid()) + "." +
                        std::to_string(processes_.size()));
  processes_.push_back(
      std::make_unique<ServerProcess>([&keep, addresses] { return keep(addresses); }));
  Add(processes_.back()->addresses(), name, kind);
}

void Servers::Add(const std::vector<std::string>& addresses, const std::string& name,
                  Target::Kind kind) {
  for (const std::string& address : addresses)
    targets_.push_back({IsUnix(address) ? name + " unix" : name, address, kind});
}

}  // namespace tessera::bench
