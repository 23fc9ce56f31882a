// How a server is to run, and where that is said: flags, then TESSERA_* environment variables, then
// a TOML file.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tessera {

// An amount of memory, or a part of what is free when the server starts.
struct MemoryLimit {
  std::uint64_t bytes = 0;
  double fraction = 0.9;  // used when bytes is 0
  std::uint64_t Resolve(std::uint64_t free_bytes) const;
};

// "4Gi", "500M", "1073741824", "80%". Suffixes K M G T are powers of 1000, Ki Mi Gi Ti of 1024; a
// final B is allowed.
absl::StatusOr<MemoryLimit> ParseMemoryLimit(std::string_view text);

struct Options {
  std::vector<std::string> listen = {"127.0.0.1:50051"};  // host:port or unix:/path
  std::vector<std::string> devices = {"auto"};            // names for OpenDevice
  MemoryLimit memory_limit;                               // of the buffers of each device
  std::uint32_t queue = 1024;                             // operations that may wait, each device
  int workers = 4;  // operations that run at once, each device
  std::uint64_t max_message =
      (4 << 20) + (64 << 10);            // bytes; 4 MiB of data and the rest of a message
  std::uint32_t max_connections = 4096;  // fewer when the process may not have the descriptors
  int max_streams = 1024;                // calls at once on a connection
  absl::Duration connection_idle = absl::Minutes(30);  // without calls; infinite: for ever
  absl::Duration default_ttl = absl::InfiniteDuration();
  absl::Duration max_ttl = absl::InfiniteDuration();
  absl::Duration upload_timeout = absl::Seconds(60);
  absl::Duration drain_delay = absl::ZeroDuration();
  absl::Duration drain_timeout = absl::Seconds(30);
  std::string log_level = "info";
  bool log_json = false;
  bool reflection = true;
};

// Reads the command line, the environment and the file. Nothing: the process is done, with
// *exit_code, and what there was to say (help, version, what is wrong) is on out or err.
std::optional<Options> ParseOptions(int argc, const char* const* argv, std::ostream& out,
                                    std::ostream& err, int* exit_code);

}  // namespace tessera
