// The server's options. Flags take precedence over TESSERA_* environment variables, which take
// precedence over a TOML file.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tessera {

// An amount of memory, or a fraction of what is free when the server starts.
struct MemoryLimit {
  std::uint64_t bytes = 0;
  double fraction = 0.9;  // used when bytes is 0
  std::uint64_t Resolve(std::uint64_t free_bytes) const;
};

// Parses an amount such as "4Gi", "500M", "1073741824" or "80%". The suffixes K M G T are powers of
// 1000, and Ki Mi Gi Ti are powers of 1024. A final B is allowed.
absl::StatusOr<MemoryLimit> ParseMemoryLimit(std::string_view text);

struct Options {
  std::vector<std::string> listen = {"127.0.0.1:50051"};  // host:port or unix:/path
  std::vector<std::string> devices = {"auto"};            // names for OpenDevice

  // PEM files; empty means none.
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;  // CAs that sign clients' certificates
  bool insecure = false;      // whether other hosts may connect without TLS
  std::string tokens;         // file of callers (server/access/access.h); all may call if empty
  std::string socket_group;   // group that may use unix sockets, as for ListenUnix

  // The servers from which buffers may be imported: host:port, which may contain `*`.
  std::vector<std::string> import_from;
  // The PEM file of the CAs that sign those servers' certificates; empty means no TLS.
  std::string import_tls_ca;
  // The file of the servers that share names; if it is empty, all names belong to this server.
  std::string ring;
  std::string ring_name;  // this server's name in the file

  // Budgets. Sizes are in bytes.
  MemoryLimit memory_limit;         // for the buffers of each device
  std::uint64_t scratch_limit = 0;  // for each device; for 0, see ScratchLimit
  // For messages, in addition to the buffers. ParseOptions lowers the defaults of host_memory and
  // of shared_memory_limit to a quarter of the memory of the host or cgroup.
  std::uint64_t host_memory = 1ull << 30;
  std::uint64_t max_transfers = 128;     // simultaneous uploads; also simultaneous downloads
  std::uint32_t max_connections = 4096;  // fewer if there are too few descriptors
  int max_streams = 1024;                // simultaneous calls on a connection
  std::uint32_t queue = 1024;            // operations that may wait for each device
  double max_operation_seconds = 30;     // limit on estimates for the default strategy
  int workers = 4;                       // simultaneous operations on each device

  absl::Duration default_ttl = absl::InfiniteDuration();
  absl::Duration max_ttl = absl::InfiniteDuration();
  absl::Duration transfer_timeout = absl::Seconds(60);
  absl::Duration drain_delay = absl::ZeroDuration();
  std::string ready_file;  // the server is ready once this file exists, or immediately if empty
  absl::Duration drain_timeout = absl::Seconds(30);
  std::string metrics_listen;  // host:port for metrics over HTTP; empty means none
  std::string log_level = "info";
  bool log_json = false;
  absl::Duration slow_call = absl::InfiniteDuration();  // calls that take longer are logged
  std::string spans;  // file for sampled calls' spans; empty means none

  std::string data_dir;  // folder for snapshots; empty means none
  absl::Duration snapshot_interval = absl::InfiniteDuration();

  std::string shared_memory;                       // path of a socket; empty means none
  std::uint64_t shared_memory_limit = 4ull << 30;  // bytes, for all regions together
  bool warm_up = true;

  // These have no flags; tests set other values.
  int transfer_workers = 2;                      // simultaneous copies of transfers on each device
  std::size_t max_ranges = 4096;                 // maximum in one draft
  std::uint64_t max_message = 4160ull << 10;     // 4 MiB of data and the rest of a message
  absl::Duration handshake = absl::Seconds(10);  // limit for HTTP/2 and TLS handshakes
  absl::Duration connection_idle = absl::Minutes(30);  // limit for a connection without calls
  // How long a worker may be busy, or a device silent, before the health service reports
  // NOT_SERVING. ParseOptions raises it to four times the longest allowed estimate.
  absl::Duration watchdog = absl::Minutes(2);

  // Environment variables TESSERA_* that have no effect.
  std::vector<std::string> unknown_variables;

  // Returns how long a worker may be busy with one task, or a device may leave a probe unanswered,
  // before the device counts as lost. That is `watchdog`, plus four times the longest allowed
  // estimate of an operation for each worker of each device, because operations on a shared device
  // may run one after another or wait for each other.
  absl::Duration HangLimit(std::size_t device_count) const;
  // Returns the maximum number of buffers, including drafts. Each takes up to 1.4 KiB of host
  // memory. Together they take at most a seventh of --host-memory, in addition to it.
  std::uint64_t MaxBuffers() const { return std::max<std::uint64_t>(16, host_memory / (10 << 10)); }
  // Returns the limit on estimates for a strategy that is not the default for its problem. This
  // limit is lower, because a caller that names such a strategy can hold a worker without need.
  double MaxSlowSeconds() const { return max_operation_seconds / 6; }
  // Returns the part of the host's free memory that remains after messages, clients' regions and a
  // twentieth for the process.
  std::uint64_t LeftOfHost(std::uint64_t free_bytes) const;
  // Returns the scratch memory of a device whose buffers may take `buffers` bytes: --scratch-limit,
  // or a sixteenth of `buffers` and at least 64 MiB.
  std::uint64_t ScratchLimit(std::uint64_t buffers) const;
};

// Reads the command line, the environment and the file. Returns nothing if the process should exit
// with *exit_code; in that case help, the version or the error has been written to out or err.
std::optional<Options> ParseOptions(int argc, const char* const* argv, std::ostream& out,
                                    std::ostream& err, int* exit_code);

}  // namespace tessera
