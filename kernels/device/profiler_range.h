// Ranges that a profiler shows next to the GPU's work (NVTX): what a thread does, and for which
// call.
#pragma once

#include <string_view>

namespace tessera {

// While it lives, the calling thread is in a range of this name. The ranges of a thread end in the
// reverse order of their beginnings. Whether a profiler listens is settled when the first range
// begins; without one, a range costs a few nanoseconds.
class ProfilerRange {
 public:
  explicit ProfilerRange(std::string_view name) noexcept;
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace tessera
