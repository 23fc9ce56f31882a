// Waits until other threads have nothing to do, for tests of something that must not happen.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/time/clock.h"

namespace tessera {

// Returns how often each thread other than the caller's has slept, or nothing if one of them is
// running or runnable.
inline std::optional<std::map<std::string, std::string>> Sleeps() {
  std::map<std::string, std::string> sleeps;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    const std::string name = thread.path().filename();
    if (name == std::to_string(gettid())) continue;
    std::ifstream status(thread.path() / "status");  // cannot be read once the thread has ended
    for (std::string line; std::getline(status, line);) {
      if (absl::StartsWith(line, "State:\tR")) return std::nullopt;
      if (absl::StartsWith(line, "voluntary_ctxt_switches:")) sleeps[name] = line;
    }
  }
  return sleeps;
}

// Returns when all other threads sleep. By then, everything that was triggered and does not wait
// for a time has happened.
inline void AwaitQuiet() {
  for (auto before = Sleeps();; absl::SleepFor(absl::Milliseconds(1))) {
    auto now = Sleeps();
    if (now.has_value() && now == before) return;
    before = std::move(now);
  }
}

}  // namespace tessera
