// Ranges that a profiler shows alongside the GPU's work (NVTX). They tell what a thread is doing,
// and for which call.
#pragma once

#include <string_view>

namespace tessera {

// While the object exists, the calling thread is in a range with this name. The ranges of a thread
// must end in the reverse order of their beginnings. Only a profiler that is listening when the
// first range begins receives ranges; without one, a range costs a few nanoseconds.
class ProfilerRange {
 public:
  explicit ProfilerRange(std::string_view name) noexcept;
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace tessera
