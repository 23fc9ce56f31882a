// What uploads and downloads share. Internal to the library.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {

// Checks that the given bytes suffice for the array. exact: whether additional bytes are an error.
inline absl::Status CheckSize(std::uint64_t needed, std::uint64_t given, bool exact) {
  if (exact ? given == needed : given >= needed) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RANGE",
                   absl::StrCat("the array needs ", needed, " bytes, but ", given, " were given"),
                   {{"needed", absl::StrCat(needed)}, {"given", absl::StrCat(given)}});
}

// Returns the number of connections that a transfer uses, at most 64.
inline std::uint64_t StreamsOf(int wanted) {
  return static_cast<std::uint64_t>(std::clamp(wanted, 1, 64));
}

// Runs run(i) for each stream i on its own thread. Calls stop() on the first error; returns it.
template <class Run, class Stop>
absl::Status InParallel(std::uint64_t streams, const Run& run, const Stop& stop) {
  std::mutex mutex;
  absl::Status failure;  // guarded by mutex
  std::vector<std::jthread> threads;
  for (std::uint64_t i = 0; i < streams; ++i) {
    threads.emplace_back([&, i] {
      absl::Status status = run(i);
      const std::lock_guard lock(mutex);
      if (status.ok() || !failure.ok()) return;
      failure = std::move(status);
      stop();
    });
  }
  threads.clear();  // waits for all
  return failure;
}

}  // namespace tessera
