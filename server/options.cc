#include "server/options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/word_lines.h"
#include "kernels/device/host_memory.h"
#include "server/net/port.h"

namespace tessera {
namespace {

constexpr std::uint64_t kLeastScratch = 64ull << 20;
constexpr std::uint64_t kLeastHostMemory = 16ull << 20;
constexpr double kMostSeconds = 1e9;  // limit on an operation's estimate
constexpr std::size_t kLargestFile = 1 << 20;
// On a CPU whose cores other processes also use, an operation may take this many times its
// estimate.
constexpr double kMostOfEstimate = 4;

std::string EnvironmentName(std::string flag) {
  std::replace(flag.begin(), flag.end(), '-', '_');
  return "TESSERA_" + absl::AsciiStrToUpper(flag);
}

// Returns an item's name as the file's author wrote it. CLI11 calls the beginning and the end of a
// section "++" and "--".
std::string LineName(const CLI::ConfigItem& item) {
  const bool section = item.name == "++" || item.name == "--";
  return section ? absl::StrCat("[", absl::StrJoin(item.parents, "."), "]") : item.fullname();
}

// CLI11 gives a file precedence over the environment. This class gives the environment precedence:
// it drops options from the file that the environment sets.
class BelowEnvironment : public CLI::ConfigTOML {
 public:
  // The file may set the options of the app, which must outlive this object.
  explicit BelowEnvironment(const CLI::App& app) : app_(app) {}

  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    std::string bytes(kLargestFile + 1, '\0');
    input.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    bytes.resize(static_cast<std::size_t>(input.gcount()));
    if (bytes.size() > kLargestFile)
      throw CLI::ConfigError("the configuration file is larger than 1 MiB");
    if (bytes.find('\0') != bytes.npos)
      throw CLI::ConfigError("the configuration file contains a zero byte");
    std::istringstream text{std::string(BehindByteOrderMark(bytes))};
    std::vector<CLI::ConfigItem> found = CLI::ConfigTOML::from_config(text);
    for (const CLI::ConfigItem& item : found) {
      if (item.parents.empty() && app_.get_option_no_throw("--" + item.name) != nullptr) continue;
      throw CLI::ConfigError("'" + LineName(item) + "' of the configuration file is not an option");
    }
    std::erase_if(found, [](const CLI::ConfigItem& item) {
      const char* value = std::getenv(EnvironmentName(item.name).c_str());
      // CLI11 cannot read an empty list.
      return item.inputs.empty() || (value != nullptr && *value != '\0');
    });
    return found;
  }

 private:
  const CLI::App& app_;
};

// Adds the option --flag with its environment variable. `set` takes the text, and returns what is
// wrong with the text, or "".
template <class Set>
CLI::Option* AddText(CLI::App& app, const std::string& flag, const std::string& type,
                     const std::string& default_text, const std::string& help, Set set) {
  return app
      .add_option_function<std::string>(
          "--" + flag,
          [flag, set](const std::string& text) {
            if (std::string wrong = set(text); !wrong.empty()) {
              throw CLI::ValidationError("--" + flag, wrong);
            }
          },
          help)
      ->type_name(type)
      ->default_str(default_text)
      ->envname(EnvironmentName(flag));
}

CLI::Option* AddFile(CLI::App& app, const std::string& flag, const std::string& help,
                     std::string& out) {
  return app.add_option("--" + flag, out, help)
      ->type_name("FILE")
      ->check([](const std::string& path) -> std::string {
        return path.empty() ? "the name of the file is empty" : "";
      })
      ->envname(EnvironmentName(flag));
}

// Adds an option for a number of bytes from least to most.
CLI::Option* AddBytes(CLI::App& app, const std::string& flag, const std::string& default_text,
                      const std::string& help, std::uint64_t least, std::uint64_t most,
                      const std::string& range, std::uint64_t& out) {
  return AddText(app, flag, "BYTES", default_text, help,
                 [&out, least, most, range](const std::string& text) -> std::string {
                   absl::StatusOr<MemoryLimit> size = ParseMemoryLimit(text);
                   if (!size.ok() || size->bytes < least || size->bytes > most) {
                     return "'" + text + "' is not a size " + range;
                   }
                   out = size->bytes;
                   return "";
                 });
}

template <class T>
CLI::Option* AddCount(CLI::App& app, const std::string& flag, const std::string& help, T least,
                      T most, T& out) {
  // Read as an unsigned number, -18446744073709551615 would be 1.
  return app.add_option("--" + flag, out, help)
      ->type_name(absl::StrCat("N in [", least, " - ", most, "]"))
      ->check(CLI::Range(static_cast<std::int64_t>(least), static_cast<std::int64_t>(most))
                  .description(""))
      ->envname(EnvironmentName(flag));
}

// `none_at_zero` says whether "0" means no limit.
CLI::Option* AddDuration(CLI::App& app, const std::string& flag, const std::string& default_text,
                         const std::string& help, bool none_at_zero, absl::Duration& out) {
  return AddText(app, flag, "TIME", default_text, help,
                 [&out, none_at_zero](const std::string& text) -> std::string {
                   absl::Duration value;
                   if (!absl::ParseDuration(text, &value) || value < absl::ZeroDuration() ||
                       value == absl::InfiniteDuration()) {
                     return "'" + text + "' is not a time such as 500ms, 30s, 10m or 2h";
                   }
                   const bool none = none_at_zero && value == absl::ZeroDuration();
                   out = none ? absl::InfiniteDuration() : value;
                   return "";
                 });
}

// Returns what is wrong with the port of an address to listen on, or "" if nothing is.
std::string CheckPort(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  const bool tcp = !address.empty() && address.rfind("unix:", 0) != 0;
  if (!tcp || (colon != address.npos && IsPort(address.substr(colon + 1)))) return "";
  return "'" + address + "' has no port from 0 to 65535";
}

// Returns what is wrong with a pattern of servers, or "" if it matches some host:port.
std::string CheckPattern(const std::string& pattern) {
  std::size_t at = pattern.rfind(':');
  if (at == pattern.npos) at = pattern.rfind('*');  // the * may match the colon too
  const std::string port = at == pattern.npos ? "" : pattern.substr(at);
  const bool good = port.find('*') != port.npos
                        ? port.find_first_not_of(":*0123456789") == port.npos
                        : at > 0 && port.size() > 1 && IsPort(port.substr(1));
  // The colons of an IPv6 address are inside brackets.
  const bool whole = pattern.find(':') >= at || pattern[at - 1] == ']' || pattern[at - 1] == '*';
  return good && whole
             ? ""
             : "'" + pattern + "' matches no host:port, because it has neither a port nor a *";
}

}  // namespace

std::uint64_t MemoryLimit::Resolve(std::uint64_t free_bytes) const {
  return bytes != 0 ? bytes
                    : static_cast<std::uint64_t>(fraction * static_cast<double>(free_bytes));
}

std::uint64_t Options::LeftOfHost(std::uint64_t free_bytes) const {
  const std::uint64_t regions = shared_memory.empty() ? 0 : shared_memory_limit;
  const std::uint64_t others = free_bytes / 20 + host_memory + regions;
  return free_bytes - std::min(free_bytes, others);
}

std::uint64_t Options::ScratchLimit(std::uint64_t buffers) const {
  return scratch_limit != 0 ? scratch_limit : std::max(buffers / 16, kLeastScratch);
}

absl::Duration Options::HangLimit(std::size_t device_count) const {
  return watchdog + absl::Seconds(kMostOfEstimate * max_operation_seconds * workers *
                                  static_cast<double>(device_count));
}

absl::StatusOr<MemoryLimit> ParseMemoryLimit(std::string_view text) {
  const absl::Status bad =
      MakeError(absl::StatusCode::kInvalidArgument, "BAD_MEMORY_LIMIT",
                absl::StrCat("'", absl::string_view(text.data(), text.size()),
                             "' is not an amount of memory from 1 byte to 4194304Ti, such as 4Gi, "
                             "500M or 80%"));
  absl::string_view rest(text.data(), text.size());
  double value = 0;
  if (absl::ConsumeSuffix(&rest, "%")) {
    if (!absl::SimpleAtod(rest, &value) || !(value > 0 && value <= 100)) return bad;
    return MemoryLimit{.bytes = 0, .fraction = value / 100};
  }
  absl::ConsumeSuffix(&rest, "B");
  const double base = absl::ConsumeSuffix(&rest, "i") ? 1024 : 1000;
  double factor = 1;
  constexpr std::string_view kPrefixes = "KMGT";
  const std::size_t power = rest.empty() ? kPrefixes.npos : kPrefixes.find(rest.back());
  if (power != kPrefixes.npos) {
    rest.remove_suffix(1);
    for (std::size_t i = 0; i <= power; ++i) factor *= base;
  } else if (base == 1024) {
    return bad;
  }
  if (!absl::SimpleAtod(rest, &value) || !(value > 0) || value * factor < 1 ||
      value * factor > 0x1p62) {
    return bad;
  }
  return MemoryLimit{.bytes = static_cast<std::uint64_t>(value * factor), .fraction = 0};
}

namespace {

// These functions are in the order in which --help shows their options.

// Adds the options for the addresses to serve on, and for the devices.
void AddAddresses(CLI::App& app, Options& options) {
  app.add_option("--listen", options.listen,
                 "host:port or unix:/path to listen on; port 0 picks a free port; repeatable")
      ->type_name("ADDRESS")
      ->delimiter(',')
      ->take_all()
      ->check(CheckPort)
      ->envname(EnvironmentName("listen"));
  app.add_option("--socket-group", options.socket_group,
                 "name or number of the group whose users may connect to unix sockets; * means all "
                 "users of the host; by default, only the server's own user and root may connect")
      ->type_name("GROUP")
      ->envname(EnvironmentName("socket-group"));
  app.add_option(
         "--device", options.devices,
         "auto, cuda, cuda:N, cpu or cpu:N; repeatable; buffers go to the first device by default")
      ->type_name("DEVICE")
      ->delimiter(',')
      ->take_all()
      ->envname(EnvironmentName("device"));
}

// Adds the options for TLS, callers, and the servers from which buffers may be imported.
void AddTrust(CLI::App& app, Options& options) {
  AddFile(app, "tls-cert",
          "the server's certificate and any intermediate certificates, in PEM; enables TLS; the "
          "file is read again when it changes",
          options.tls_cert);
  AddFile(app, "tls-key", "the key of --tls-cert, in PEM, without a password", options.tls_key);
  AddFile(app, "tls-client-ca", "CAs, in PEM; clients need a certificate signed by one of them",
          options.tls_client_ca);
  app.add_flag(
         "--insecure", options.insecure,
         "serve other hosts without TLS: any host that reaches the address can read and delete "
         "everything, and with --tokens any observer of the traffic can read the tokens")
      ->envname(EnvironmentName("insecure"));
  AddFile(app, "tokens",
          "serve only the callers in this file; each line has a caller (a token's SHA-256; cn:, "
          "dns: or uri: with a name from a client's certificate; or uid: with the number of a user "
          "of this host), a role (read, write, admin), a tenant, and quotas (bytes=, buffers=, "
          "calls=); the file is read again when it changes",
          options.tokens);
  app.add_option("--import-from", options.import_from,
                 "host:port of servers from which buffers may be imported; * stands for any "
                 "characters; repeatable; by default no server is allowed")
      ->type_name("PATTERN")
      ->delimiter(',')
      ->take_all()
      ->check(CheckPattern)
      ->envname(EnvironmentName("import-from"));
  AddFile(app, "import-tls-ca",
          "CAs, in PEM, that sign the certificates of the servers to import from; imports then use "
          "TLS, and present the certificate of --tls-cert if it is given",
          options.import_tls_ca);
}

// Adds the options for a server that shares names with others.
void AddRing(CLI::App& app, Options& options) {
  AddFile(app, "ring",
          "serve only the names whose home is this server; the file has a line for each server: "
          "its name, and its host:port for clients",
          options.ring);
  app.add_option("--ring-name", options.ring_name, "this server's name in the file of --ring")
      ->type_name("NAME")
      ->envname(EnvironmentName("ring-name"));
}

// Adds the options for the limits on memory, buffers and streams.
void AddLimits(CLI::App& app, Options& options) {
  AddText(app, "memory-limit", "BYTES|%", "90%",
          "memory for the buffers of a device: 4Gi, 500M, or a percentage of the memory that is "
          "free at the start; on the CPU, --host-memory, --shared-memory-limit and a twentieth of "
          "the free memory are subtracted first",
          [&options](const std::string& text) -> std::string {
            absl::StatusOr<MemoryLimit> limit = ParseMemoryLimit(text);
            if (!limit.ok()) return std::string(limit.status().message());
            options.memory_limit = *limit;
            return "";
          });
  AddBytes(app, "scratch-limit", "",
           "memory on each device for running operations: copies of strided operands, inline "
           "results, workspaces; by default a sixteenth of --memory-limit, but at least 64Mi",
           1 << 20, 1ull << 62, "from 1Mi to 4194304Ti", options.scratch_limit);
  AddBytes(
      app, "host-memory", "1Gi",
      "memory for messages: requests, uploads, responses; also sets the maximum number of stored "
      "buffers, one per 10Ki; by default a quarter of the memory of the host or cgroup, but at "
      "most 1Gi",
      kLeastHostMemory, 1ull << 62, "from 16Mi to 4194304Ti", options.host_memory);
  AddCount(app, "max-transfers",
           "maximum number of simultaneous uploads, and of simultaneous downloads",
           std::uint64_t{1}, std::uint64_t{1} << 20, options.max_transfers);
}

// Adds the options for the limits on operations.
void AddWork(CLI::App& app, Options& options) {
  AddCount(app, "queue", "maximum number of operations that wait for a device", std::uint32_t{1},
           std::uint32_t{1} << 20, options.queue);
  AddCount(app, "workers", "maximum number of operations that run on a device at the same time", 1,
           64, options.workers);
  AddText(app, "max-operation-seconds", "SECONDS", "30",
          "limit on the estimated time of one operation; for a strategy that is not the default "
          "for its problem, a sixth of this limit applies; a worker that is busy for four times "
          "the limit, and at least 2m, makes the health service report NOT_SERVING; 1e9, the "
          "maximum, means no limit in practice",
          [&options](const std::string& text) -> std::string {
            double seconds = 0;
            if (!absl::SimpleAtod(text, &seconds) || !(seconds > 0 && seconds <= kMostSeconds))
              return "'" + text + "' is not a number of seconds above 0 and up to 1e9";
            options.max_operation_seconds = seconds;
            return "";
          });
}

// Adds the options for the limits on connections.
void AddConnections(CLI::App& app, Options& options) {
  AddCount(app, "max-connections",
           "maximum number of connections; further connections are closed when they arrive",
           std::uint32_t{1}, std::uint32_t{1} << 20, options.max_connections);
  AddCount(app, "max-streams", "maximum number of simultaneous calls on a connection", 1, 1 << 20,
           options.max_streams);
}

// Adds the options for times to live and timeouts.
void AddTimes(CLI::App& app, Options& options) {
  AddDuration(app, "default-ttl", "0",
              "time to live of a buffer that is created without a ttl; 0: no limit", true,
              options.default_ttl);
  AddDuration(app, "max-ttl", "0", "longest ttl that a client may request; 0: no limit", true,
              options.max_ttl);
  AddDuration(app, "transfer-timeout", "60s",
              "an upload that receives no data for this long ends, and so does a download whose "
              "client reads nothing for this long; 0: never",
              true, options.transfer_timeout);
  AddFile(app, "ready-file",
          "the health service does not report ready until this file is created or written to after "
          "the start; create it once the buffers are loaded",
          options.ready_file);
  AddDuration(app, "drain-delay", "0s",
              "how long to keep serving after a stop signal; during this time the health service "
              "reports that the server is not ready",
              false, options.drain_delay);
  AddDuration(app, "drain-timeout", "30s",
              "how long calls in progress may take to end after --drain-delay; transfers that make "
              "no progress and responses that are not read end after five seconds",
              false, options.drain_timeout);
}

// Adds the options for metrics, log and spans.
void AddObservation(CLI::App& app, Options& options) {
  app.add_option(
         "--metrics-listen", options.metrics_listen,
         "host:port for metrics over HTTP: /metrics for Prometheus, /healthz, and a status page "
         "for browsers; without TLS; port 0 picks a free port")
      ->type_name("ADDRESS")
      ->check(CheckPort)
      ->envname(EnvironmentName("metrics-listen"));
  app.add_option("--log-level", options.log_level, "trace, debug, info, warn, error or off")
      ->type_name("LEVEL")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}).description(""))
      ->envname(EnvironmentName("log-level"));
  AddText(app, "log-format", "FORMAT", "text", "text or json (one object per line)",
          [&options](const std::string& text) -> std::string {
            options.log_json = text == "json";
            return text == "text" || text == "json" ? ""
                                                    : "'" + text + "' is neither text nor json";
          });
  AddDuration(app, "slow-call", "0",
              "log calls that take longer than this, and where their time went; 0: none", true,
              options.slow_call);
  AddFile(app, "spans",
          "append the spans of sampled calls (traceparent) to this file, as lines of JSON",
          options.spans);
}

// Adds the options for arrays that outlive the server.
void AddSnapshots(CLI::App& app, Options& options) {
  AddFile(app, "data-dir",
          "folder where snapshots of the buffers are kept, and from which the server restores them "
          "when it starts; one server at a time may use it; a snapshot is taken by 'tessera "
          "snapshot', every --snapshot-interval, and when the server stops",
          options.data_dir)
      ->type_name("PATH");
  AddDuration(app, "snapshot-interval", "0",
              "time between snapshots of all buffers; 0: only on request and when the server stops",
              true, options.snapshot_interval);
}

// Adds the options for memory that clients share with the server.
void AddSharedMemory(CLI::App& app, Options& options) {
  app.add_option("--shared-memory", options.shared_memory,
                 "path of a socket where processes on this host share memory with the server, for "
                 "transfers that need no messages")
      ->type_name("PATH")
      ->envname(EnvironmentName("shared-memory"));
  AddBytes(
      app, "shared-memory-limit", "4Gi",
      "memory that all clients may share with the server; by default a quarter of the memory of "
      "the host or cgroup, but at most 4Gi",
      4096, 1ull << 62, "from 4Ki to 4194304Ti", options.shared_memory_limit);
}

// Returns the environment variables TESSERA_* that are neither options of the server or its clients
// nor variables with which Kubernetes describes a service to its pods.
std::vector<std::string> UnknownVariables(const CLI::App& app) {
  std::set<std::string> known = {"TESSERA_CONFIG", "TESSERA_SERVER", "TESSERA_TOKEN",
                                 "TESSERA_TOKEN_FILE"};
  for (const CLI::Option* option : app.get_options()) known.insert(option->get_envname());
  std::vector<std::string> unknown;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(*variable, absl::MaxSplits('=', 1));
    const auto& [name, value] = parts;
    const bool of_pods = absl::StrContains(name, "_SERVICE_HOST") ||
                         absl::StrContains(name, "_SERVICE_PORT") ||
                         absl::StrContains(name, "_PORT_") || absl::StartsWith(value, "tcp://");
    if (absl::StartsWith(name, "TESSERA_") && !absl::StartsWith(name, "TESSERA_CLIENT_") &&
        !of_pods && known.count(name) == 0)
      unknown.push_back(name);
  }
  return unknown;
}

// Returns what is wrong with the combination of options, or "" if nothing is.
std::string Conflict(const Options& options) {
  const bool pair = options.tls_cert.empty() == options.tls_key.empty();
  if (!pair || (options.tls_cert.empty() && !options.tls_client_ca.empty()))
    return "--tls-cert and --tls-key go together, and --tls-client-ca needs both";
  if (!options.import_from.empty() && !options.tokens.empty() && options.import_tls_ca.empty() &&
      !options.insecure) {
    return "with --tokens, --import-from needs --import-tls-ca or --insecure, because an import "
           "sends its caller's token to the other server";
  }
  if (options.ring.empty() != options.ring_name.empty())
    return "--ring and --ring-name go together";
  if (options.default_ttl != absl::InfiniteDuration() && options.default_ttl > options.max_ttl)
    return "--default-ttl is longer than --max-ttl";
  if (options.data_dir.empty() && options.snapshot_interval != absl::InfiniteDuration())
    return "--snapshot-interval needs --data-dir";
  return "";
}

// Sets the text around the options in the help.
void Describe(CLI::App& app) {
  app.get_formatter()->column_width(36);
  app.option_defaults()->always_capture_default();
  app.set_version_flag("--version", "tessera-server " TESSERA_VERSION);
  app.footer(
      R"(Every option is also an environment variable: --memory-limit is TESSERA_MEMORY_LIMIT; lists
are separated by commas. Flags take precedence over the environment, and the environment over the
file.
SIGTERM and SIGINT stop the server gracefully, a second one immediately. On SIGHUP, it reads the
files of --tls-cert, --tls-key, --tls-client-ca, --tokens and --ring again and logs the result; it
also checks them every second. On SIGUSR1 an attached profiler begins to record
(cudaProfilerStart), and on the next one it stops (cudaProfilerStop).
Exit codes: 0 stopped, 1 could not start, 70 all devices failed for good or hang, 74 the last
snapshot failed, 75 calls were cut off by --drain-timeout, 128 + N a second signal N.)");
}

// Sets the values that depend on other options and on the host.
void SetDefaults(const CLI::App& app, Options& options) {
  options.watchdog =
      std::max(options.watchdog, absl::Seconds(kMostOfEstimate * options.max_operation_seconds));
  // A small host or cgroup lowers these two defaults.
  const std::uint64_t quarter = std::max(ReadHostMemory().total / 4, kLeastHostMemory);
  if (app.count("--host-memory") == 0) options.host_memory = std::min(options.host_memory, quarter);
  if (app.count("--shared-memory-limit") == 0)
    options.shared_memory_limit = std::min(options.shared_memory_limit, quarter);
}

}  // namespace

std::optional<Options> ParseOptions(int argc, const char* const* argv, std::ostream& out,
                                    std::ostream& err, int* exit_code) {
  Options options;
  CLI::App app("Keeps arrays in GPU memory and computes on them for gRPC clients.",
               "tessera-server");
  Describe(app);
  const char* variable = std::getenv("TESSERA_CONFIG");
  const std::string file = Trimmed(variable == nullptr ? "" : variable);
  app.set_config("--config", file, "TOML file with these options",
                 /*config_required=*/!file.empty())
      ->type_name("FILE");
  app.config_formatter(std::make_shared<BelowEnvironment>(app));
  app.allow_config_extras(CLI::config_extras_mode::error);

  AddAddresses(app, options);
  AddTrust(app, options);
  AddRing(app, options);
  AddLimits(app, options);
  AddWork(app, options);
  AddConnections(app, options);
  AddTimes(app, options);
  AddObservation(app, options);
  AddSnapshots(app, options);
  AddSharedMemory(app, options);
  bool no_warm_up = false;
  app.add_flag("--no-warm-up", no_warm_up,
               "report ready before kernels are loaded and rates are measured")
      ->envname(EnvironmentName("no-warm-up"));
  // Every value, and every element of a list.
  for (CLI::Option* option : app.get_options())
    option->transform([](const std::string& text) { return Trimmed(text); });

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    *exit_code = app.exit(error, out, err) == 0 ? 0 : 1;
    if (!out.flush()) {
      err << "standard output cannot be written\n";
      *exit_code = 1;
    }
    return std::nullopt;
  }
  if (const std::string wrong = Conflict(options); !wrong.empty()) {
    err << wrong << '\n';
    *exit_code = 1;
    return std::nullopt;
  }
  SetDefaults(app, options);
  options.unknown_variables = UnknownVariables(app);
  options.warm_up = !no_warm_up;
  return options;
}

}  // namespace tessera
