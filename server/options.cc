#include "server/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kLargestMessage = 1ull << 30;

std::string EnvironmentName(std::string flag) {
  std::replace(flag.begin(), flag.end(), '-', '_');
  return "TESSERA_" + absl::AsciiStrToUpper(flag);
}

// CLI11 lets a file win over the environment. Here the environment wins: what it sets, the file
// does not.
class BelowEnvironment : public CLI::ConfigTOML {
 public:
  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    std::vector<CLI::ConfigItem> found = CLI::ConfigTOML::from_config(input);
    std::erase_if(found, [](const CLI::ConfigItem& item) {
      const char* value = std::getenv(EnvironmentName(item.name).c_str());
      return value != nullptr && *value != '\0';
    });
    return found;
  }
};

// Makes --flag with its environment variable; set takes the text and says what is wrong with it, or
// nothing.
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

// none_at_zero: whether "0" means without end.
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

}  // namespace

std::uint64_t MemoryLimit::Resolve(std::uint64_t free_bytes) const {
  return bytes != 0 ? bytes
                    : static_cast<std::uint64_t>(fraction * static_cast<double>(free_bytes));
}

absl::StatusOr<MemoryLimit> ParseMemoryLimit(std::string_view text) {
  const absl::Status bad =
      MakeError(absl::StatusCode::kInvalidArgument, "BAD_MEMORY_LIMIT",
                absl::StrCat("'", absl::string_view(text.data(), text.size()),
                             "' is not an amount of memory such as 4Gi, 500M or 80%"));
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

std::optional<Options> ParseOptions(int argc, const char* const* argv, std::ostream& out,
                                    std::ostream& err, int* exit_code) {
  Options options;
  CLI::App app("Keeps arrays in GPU memory and computes on them for gRPC clients.",
               "tessera-server");
  app.get_formatter()->column_width(36);
  app.option_defaults()->always_capture_default();
  app.set_version_flag("--version", "tessera-server " TESSERA_VERSION);
  app.footer(
      "Every option is also an environment variable: --memory-limit is TESSERA_MEMORY_LIMIT; "
      "lists\n"
      "are separated by commas. Flags win over the environment, and that over the file.\n"
      "SIGTERM and SIGINT stop the server gracefully, a second one at once.\n"
      "Exit codes: 0 stopped, 1 could not start, 70 a device failed for good.");

  const char* file = std::getenv("TESSERA_CONFIG");
  const bool has_file = file != nullptr && *file != '\0';
  app.set_config("--config", has_file ? file : "", "TOML file with these options", has_file)
      ->type_name("FILE");
  app.config_formatter(std::make_shared<BelowEnvironment>());
  app.allow_config_extras(CLI::config_extras_mode::error);

  app.add_option("--listen", options.listen,
                 "host:port or unix:/path to serve on; port 0 takes a free one; repeatable")
      ->type_name("ADDRESS")
      ->delimiter(',')
      ->take_all()
      ->envname(EnvironmentName("listen"));
  app.add_option("--device", options.devices,
                 "auto, cuda, cuda:N or cpu; repeatable; the first is where buffers go by default")
      ->type_name("DEVICE")
      ->delimiter(',')
      ->take_all()
      ->envname(EnvironmentName("device"));
  AddText(app, "memory-limit", "BYTES|%", "90%",
          "memory for the buffers of a device: 4Gi, 500M, or a part of what is free at the start",
          [&options](const std::string& text) -> std::string {
            absl::StatusOr<MemoryLimit> limit = ParseMemoryLimit(text);
            if (!limit.ok()) return std::string(limit.status().message());
            options.memory_limit = *limit;
            return "";
          });
  app.add_option("--queue", options.queue, "operations that may wait for a device")
      ->type_name("N")
      ->check(CLI::Range(std::uint32_t{1}, std::uint32_t{1} << 20))
      ->envname(EnvironmentName("queue"));
  app.add_option("--workers", options.workers, "operations that run at once on a device")
      ->type_name("N")
      ->check(CLI::Range(1, 64))
      ->envname(EnvironmentName("workers"));
  AddText(app, "max-message", "BYTES", "4160Ki", "size of the largest message a client may send",
          [&options](const std::string& text) -> std::string {
            absl::StatusOr<MemoryLimit> size = ParseMemoryLimit(text);
            if (!size.ok() || size->bytes < 1024 || size->bytes > kLargestMessage) {
              return "'" + text + "' is not a size from 1Ki to 1Gi";
            }
            options.max_message = size->bytes;
            return "";
          });
  app.add_option("--max-connections", options.max_connections,
                 "connections at once; further ones are closed as they come")
      ->type_name("N")
      ->check(CLI::Range(std::uint32_t{1}, std::uint32_t{1} << 20))
      ->envname(EnvironmentName("max-connections"));
  app.add_option("--max-streams", options.max_streams, "calls at once on a connection")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20))
      ->envname(EnvironmentName("max-streams"));
  AddDuration(app, "connection-idle", "30m",
              "a connection without calls for so long is closed; 0: never", true,
              options.connection_idle);
  AddDuration(app, "default-ttl", "0", "life of a buffer whose creator names no ttl; 0: for ever",
              true, options.default_ttl);
  AddDuration(app, "max-ttl", "0", "longest ttl a client may ask for; 0: no limit", true,
              options.max_ttl);
  AddDuration(app, "upload-timeout", "60s", "an upload without data for so long ends; 0: never",
              true, options.upload_timeout);
  AddDuration(app, "drain-delay", "0s",
              "how long to go on serving after a stop signal, not ready in the health service",
              false, options.drain_delay);
  AddDuration(app, "drain-timeout", "30s", "how long calls in progress may take to end after that",
              false, options.drain_timeout);
  app.add_option("--log-level", options.log_level, "trace, debug, info, warn, error or off")
      ->type_name("LEVEL")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}))
      ->envname(EnvironmentName("log-level"));
  AddText(app, "log-format", "FORMAT", "text", "text or json (one object a line)",
          [&options](const std::string& text) -> std::string {
            options.log_json = text == "json";
            return text == "text" || text == "json" ? ""
                                                    : "'" + text + "' is neither text nor json";
          });
  bool no_reflection = false;
  app.add_flag("--no-reflection", no_reflection, "do not describe the services to clients")
      ->envname(EnvironmentName("no-reflection"));

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    *exit_code = app.exit(error, out, err) == 0 ? 0 : 1;
    return std::nullopt;
  }
  options.reflection = !no_reflection;
  return options;
}

}  // namespace tessera
