#include "client/bench/options.h"

#include <cstdint>
#include <limits>
#include <set>
#include <string_view>

#include "client/bench/operations.h"

namespace tessera::bench {
namespace {

std::vector<std::string> OperationNames() {
  std::vector<std::string> names;
  for (const Operation& operation : Operations()) names.emplace_back(operation.name);
  return names;
}

std::string Joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

// Parses NAME=ADDRESS, or only an address, which is then also the name.
Target ParseTarget(const std::string& text) {
  const std::size_t equals = text.find('=');
  const Target target = equals == std::string::npos
                            ? Target{text, text}
                            : Target{text.substr(0, equals), text.substr(equals + 1)};
  if (target.name.empty() || target.address.empty())
    throw CLI::ValidationError("--target", "\"" + text + "\" is not NAME=ADDRESS");
  if (target.name.starts_with("bare gRPC") || target.name.starts_with("naive gRPC"))
    throw CLI::ValidationError("--target", "the name \"" + target.name + "\" is taken");
  return target;
}

std::vector<Target> ParseTargets(const std::vector<std::string>& texts) {
  std::vector<Target> targets;
  std::set<std::string> names;
  for (const std::string& text : texts) {
    targets.push_back(ParseTarget(text));
    if (!names.insert(targets.back().name).second)
      throw CLI::ValidationError("--target",
                                 "two targets are named \"" + targets.back().name + "\"");
  }
  return targets;
}

// Parses OPERATION:CALLERS.
Beside ParseBeside(const std::string& text) {
  const std::size_t colon = text.find(':');
  Beside beside{.operation = text.substr(0, colon)};
  const std::string names = Joined(OperationNames());
  if ((", " + names + ",").find(", " + beside.operation + ",") == std::string::npos)
    throw CLI::ValidationError("--beside", "\"" + beside.operation + "\" is not one of " + names);
  if (colon == std::string::npos ||
      !CLI::detail::lexical_cast(text.substr(colon + 1), beside.callers) || beside.callers < 1 ||
      beside.callers > 4096)
    throw CLI::ValidationError("--beside",
                               "\"" + text + "\" needs 1 to 4096 callers, for example upload:16");
  return beside;
}

// Adds an option for a comma-separated list of numbers from `least` to `most`.
template <class T, class Bound>
void AddList(CLI::App& app, const std::string& flag, std::vector<T>& values,
             const std::string& help, Bound least, Bound most) {
  app.add_option(flag, values, help)->delimiter(',')->check(CLI::Range(least, most));
}

}  // namespace

void AddOptions(CLI::App& app, Options& options) {
  const auto add_text = [&](const std::string& flag, const std::string& help, auto set) {
    return app.add_option_function<std::vector<std::string>>(flag, set, help);
  };
  add_text("--target", "ADDRESS or NAME=ADDRESS, an ADDRESS as host:port or unix:/path; repeatable",
           [&](const std::vector<std::string>& texts) { options.targets = ParseTargets(texts); });
  app.add_option("--bare", options.bare, "a bare server that runs elsewhere; repeatable");
  app.add_flag("--naive", options.naive, "measure a naive server as well");
  const std::vector<std::string> names = OperationNames();
  app.add_option("--operations", options.operations, Joined(names))
      ->delimiter(',')
      ->check(CLI::IsMember(names));
  AddList(app, "--callers", options.callers, "concurrent calls", 1, 4096);
  AddList(app, "--elements", options.elements, "f32 elements in each vector", 1, 1 << 30);
  AddList(app, "--side", options.side, "rows and columns of the f32 matrices in a product", 1,
          1 << 15);
  AddList(app, "--steps", options.steps, "steps in a program of Dots", 1, 4096);
  AddList(app, "--transfer-mib", options.transfer_mib, "MiB in one upload or download", 1, 1 << 16);
  AddList(app, "--rate", options.rate, "open loop: this many calls per second", 0.1, 1e7);
  AddList(app, "--load", options.load,
          "open loop: this fraction of the rate of closed loops, which are measured as well", 0.01,
          10.0);
  AddList(app, "--rest", options.rest, "the first call after this many seconds without calls", 0.0,
          3600.0);
  add_text("--beside", "OPERATION:CALLERS that run during the measurements, such as upload:16",
           [&](const std::vector<std::string>& texts) { options.beside = ParseBeside(texts[0]); })
      ->expected(1);
  app.add_option("--seconds", options.seconds, "duration of a measurement")
      ->check(CLI::Range(0.01, 600.0));
  app.add_option("--rounds", options.rounds, "measurements of each target, interleaved")
      ->check(CLI::Range(1, 1000));
  app.add_option("--seed", options.seed, "seed for the order of targets and for open loops")
      ->check(CLI::Range(std::numeric_limits<std::int64_t>::max()));
  app.add_option("--json", options.json,
                 "file for the results, written again after each kind of measurement");
}

}  // namespace tessera::bench
