// Ranges that a profiler shows beside the GPU's work (NVTX): what a thread does, for which call.
#pragma once

#include <string_view>

namespace tessera {

// While it lives the calling thread is in a range of this name. Ranges of a thread end in the
// reverse of the order in which they began. Where no profiler listens, which is settled when the
// first range begins, one costs a few nanoseconds.
class ProfilerRange {
 public:
  explicit ProfilerRange(std::string_view name) noexcept;
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace tessera
