// Code that the subcommands of `tessera` share: sessions, option values and interrupts.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <csignal>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/output.h"
#include "client/client.h"

namespace tessera {

// The state of a subcommand. If json is set, the subcommand prints nothing and fills the document
// instead.
struct Session {
  Client& client;
  bool json = false;
  Json document = Json::object();

  // Returns the server's limits. They are requested only once.
  absl::StatusOr<v1::Limits> Limits() {
    if (!limits) {
      const auto info = client.GetServerInfo();
      if (!info.ok()) return info.status();
      limits = info->limits();
    }
    return *limits;
  }
  std::optional<v1::Limits> limits = std::nullopt;
};

using Clock = std::chrono::steady_clock;

inline absl::Duration Since(Clock::time_point start) {
  return absl::FromChrono(Clock::now() - start);
}

using Command = std::function<absl::Status(Session&)>;

// Returns the error for a combination of options that the parser cannot reject.
absl::Status BadOption(std::string_view what);

// Returns the protocol's name for a command's operation, such as "top_k" for "topk".
std::string OperationName(const std::string& command);

// Returns the ttl for a temporary buffer, which this process deletes itself unless it ends first.
// The ttl is one hour, or the server's maximum if that is shorter.
absl::Duration TemporaryTtl(const v1::Limits& limits);

// --- Values of options ---------------------------------------------------------------------------

// Parses a duration such as "90" (seconds), "90s", "10m", "1h30m" or "inf". Returns nullopt unless
// it is above 0.
std::optional<absl::Duration> ParseDuration(const std::string& text);

// Checks that a text is a duration. endless: whether "inf" is accepted.
CLI::Validator DurationCheck(bool endless = false);

// Rejects whole numbers that do not fit in T, a 64-bit type. The parser would replace them with
// other numbers.
template <class T>
CLI::Validator Fits() {
  static_assert(sizeof(T) == sizeof(long long));
  return CLI::Validator(
      [](std::string& text) -> std::string {
        errno = 0;
        if constexpr (std::is_signed_v<T>) {
          std::strtoll(text.c_str(), nullptr, 0);
        } else {
          if (text.find('-') != text.npos)
            return "'" + text + "' is not a whole number of 0 or more";
          std::strtoull(text.c_str(), nullptr, 0);
        }
        return errno == ERANGE ? "'" + text + "' does not fit into 64 bits" : "";
      },
      "");
}

// Returns the names of kAllDTypes, kArrayDTypes or kAllReduceOps.
template <class Values>
std::vector<std::string> NamesOf(const Values& values) {
  std::vector<std::string> names;
  for (const auto value : values) names.emplace_back(Name(value));
  return names;
}

// REQUIRES: text is one of NamesOf(values).
template <class Values>
auto Parse(const Values& values, std::string_view text) {
  return *std::find_if(values.begin(), values.end(), [&](auto v) { return Name(v) == text; });
}

// Sets an option as if the value were on the command line. Throws CLI::ParseError if the value is
// invalid.
inline void SetOption(CLI::Option& option, const std::string& value) {
  option.clear();
  option.add_result(value);
  option.run_callback();
}

// --- Interrupts ----------------------------------------------------------------------------------

// While an instance exists, the first SIGINT, SIGTERM or SIGHUP cancels the calls that have its
// token and undoes their transfers. The second signal kills the process. Only one instance may
// exist at a time.
class InterruptScope {
 public:
  InterruptScope() {
    if (::pipe2(pipe_.data(), O_CLOEXEC) != 0) pipe_ = {-1, -1};
    signalled_ = pipe_[1];
    watcher_ = std::thread([this] { Watch(); });
    struct sigaction action {};
    action.sa_handler = [](int) {
      const int error = errno;
      if (::write(signalled_, "s", 1) < 0) {  // a handler has no way to report this
      }
      errno = error;
    };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], nullptr, &before_[i]);
      // Signals that are already ignored, for example because of nohup, stay ignored.
      if (before_[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
    }
  }
  ~InterruptScope() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], &before_[i], nullptr);
    }
    ::close(pipe_[1]);
    watcher_.join();
    ::close(pipe_[0]);
  }
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  // Returns the token for CallOptions::cancel and for the same field in other options.
  static std::stop_token token() { return interrupted_.get_token(); }
  static absl::Status Check() {
    return interrupted_.stop_requested() ? absl::CancelledError("interrupted") : absl::OkStatus();
  }

 private:
  void Watch() {
    char signal = 0;
    ssize_t n = 0;
    do n = ::read(pipe_[0], &signal, 1);
    while (n < 0 && errno == EINTR);
    if (n > 0) interrupted_.request_stop();
  }

  static inline volatile std::sig_atomic_t signalled_ = -1;  // the write end of the pipe
  std::array<int, 2> pipe_{};
  static inline std::stop_source interrupted_;
  std::thread watcher_;
  static constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

// --- Subcommands ---------------------------------------------------------------------------------

// Each of these functions adds one or more subcommands. The subcommand on the command line sets
// `chosen` to the function to run.
void AddPut(CLI::App& app, Command& chosen);
void AddGet(CLI::App& app, Command& chosen);
void AddLs(CLI::App& app, Command& chosen);
void AddRm(CLI::App& app, Command& chosen);
void AddCp(CLI::App& app, Command& chosen);
void AddImport(CLI::App& app, Command& chosen);
void AddInfo(CLI::App& app, Command& chosen);
void AddOperations(CLI::App& app, Command& chosen);
void AddSearch(CLI::App& app, Command& chosen);
void AddMap(CLI::App& app, Command& chosen);
void AddRun(CLI::App& app, Command& chosen);
void AddStrategies(CLI::App& app, Command& chosen);
void AddBench(CLI::App& app, Command& chosen);
void AddHealth(CLI::App& app, Command& chosen);
void AddTop(CLI::App& app, Command& chosen);
void AddToken(CLI::App& app, Command& chosen);
void AddCompletion(CLI::App& app, Command& chosen);

}  // namespace tessera
