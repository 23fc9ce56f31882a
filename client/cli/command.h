// Code that the subcommands of `tessera` share: errors, sessions, options and interrupts.
#pragma once

#include <semaphore.h>

#include <csignal>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/output.h"
#include "client/client.h"

namespace tessera {

// An error that ends a subcommand. main.cc catches and prints it.
struct CommandError : std::exception {
  explicit CommandError(absl::Status error) : status(std::move(error)) {}
  absl::Status status;
};

// Returns the value, or throws the error as a CommandError.
inline void OrThrow(const absl::Status& status) {
  if (!status.ok()) throw CommandError(status);
}
template <class T>
T OrThrow(absl::StatusOr<T> result) {
  OrThrow(result.status());
  return *std::move(result);
}

// The state of a subcommand. If json is set, the subcommand prints nothing and fills the document
// instead.
struct Session {
  Client& client;
  bool json = false;
  Json document = Json::object();

  // Returns the server's limits. They are requested only once.
  const v1::Limits& Limits() {
    if (!limits) limits = OrThrow(client.GetServerInfo()).limits();
    return *limits;
  }
  std::optional<v1::Limits> limits = std::nullopt;
};

using Clock = std::chrono::steady_clock;

inline absl::Duration Since(Clock::time_point start) {
  return absl::FromChrono(Clock::now() - start);
}

// Runs the chosen subcommand. Throws CommandError.
using Command = std::function<void(Session&)>;

// Adds a subcommand that calls `run` with the flags. The caller adds the options. `prepare` is
// called after the command line has been parsed, before there is a session.
template <class Flags>
std::pair<CLI::App*, Flags*> AddCommand(CLI::App& app, Command& chosen, const std::string& name,
                                        const std::string& description,
                                        void (*run)(Session&, const Flags&),
                                        const std::function<void(const Flags&)>& prepare = {}) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(name, description);
  command->callback([=, &chosen] {
    if (prepare) prepare(*flags);
    chosen = [=](Session& session) { run(session, *flags); };
  });
  return {command, flags.get()};
}

[[noreturn]] void ThrowInvalid(std::string_view reason, std::string_view message);
// Throws the error for a combination of options that the parser cannot reject.
[[noreturn]] void ThrowBadOption(std::string_view what);

// Returns the protocol's name for a command's operation, such as "top_k" for "topk".
std::string OperationName(const std::string& command);

// Returns the ttl for a temporary buffer, which this process deletes itself unless it ends early.
// The ttl is one hour, or the server's maximum if that is shorter.
absl::Duration TemporaryTtl(const v1::Limits& limits);

// --- Values of options ---------------------------------------------------------------------------

// Parses a duration such as "90" (seconds), "90s", "10m", "1h30m" or "inf". Returns nullopt unless
// it is above 0.
std::optional<absl::Duration> ParseDuration(const std::string& text);

// Adds --ttl, the time for which a buffer lives.
CLI::Option* AddTtl(CLI::App& command, std::string& ttl, const std::string& description);

// Checks that a text is a duration. `endless` says whether "inf" is accepted.
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
// token, and undoes transfers. The second signal kills the process. Only one instance may
// exist at a time.
class InterruptScope {
 public:
  InterruptScope() {
    ::sem_init(&woken_, 0, 0);
    watcher_ = std::jthread([](const std::stop_token& ended) {
      while (::sem_wait(&woken_) != 0) {  // interrupted by a signal
      }
      if (!ended.stop_requested()) interrupted_.request_stop();
    });
    struct sigaction action {};
    action.sa_handler = [](int) { ::sem_post(&woken_); };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], nullptr, &before_[i]);
      // Signals that are already ignored, for example because of nohup, stay ignored.
      if (before_[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
    }
  }
  ~InterruptScope() {
    for (std::size_t i = 0; i < kSignals.size(); ++i)
      ::sigaction(kSignals[i], &before_[i], nullptr);
    watcher_.request_stop();
    ::sem_post(&woken_);
    watcher_.join();
    ::sem_destroy(&woken_);
  }
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  // Returns the token for CallOptions::cancel and for the same field in other options.
  static std::stop_token token() { return interrupted_.get_token(); }
  static absl::Status Check() {
    return interrupted_.stop_requested() ? absl::CancelledError("interrupted") : absl::OkStatus();
  }

 private:
  static inline sem_t woken_;  // a signal handler may post it
  static inline std::stop_source interrupted_;
  std::jthread watcher_;
  static constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

// --- Subcommands ---------------------------------------------------------------------------------

// Each of these functions adds one or more subcommands. The subcommand on the command line sets
// `chosen` to the function to run.
void AddBuffers(CLI::App& app, Command& chosen);
void AddInfo(CLI::App& app, Command& chosen);
void AddOperations(CLI::App& app, Command& chosen);
void AddSearch(CLI::App& app, Command& chosen);
void AddRun(CLI::App& app, Command& chosen);
void AddStrategies(CLI::App& app, Command& chosen);
void AddBench(CLI::App& app, Command& chosen);
void AddHealth(CLI::App& app, Command& chosen);
void AddTop(CLI::App& app, Command& chosen);
void AddToken(CLI::App& app, Command& chosen);
void AddCompletion(CLI::App& app, Command& chosen);

}  // namespace tessera
