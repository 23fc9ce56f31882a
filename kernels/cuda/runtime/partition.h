// Most of a GPU's SMs, for work that would fill all of them for long, so that other work always
// finds some free (CUDA driver API, "Green Contexts"). Included by .cu files only.
#pragma once

#include <cuda.h>  // types

#include "kernels/cuda/runtime/cuda.h"

namespace tessera {

// SMs that are left to other work: the smallest number that can be set apart on every known GPU.
inline constexpr unsigned kRoomMultiprocessors = 8;

class Partition {
 public:
  // Takes all SMs of the current device but kRoomMultiprocessors. Throws DeviceError if the driver
  // cannot partition, or if the GPU has no more SMs than these.
  explicit Partition(int ordinal);
  // REQUIRES: its streams have been destroyed.
  ~Partition();
  Partition(const Partition&) = delete;
  Partition& operator=(const Partition&) = delete;

  int multiprocessors() const { return multiprocessors_; }
  // A stream whose kernels run only on these SMs. In all else it is like a stream of
  // MakeStreamHandle.
  StreamHandle MakeStream() const;

 private:
  CUgreenCtx context_ = nullptr;
  int multiprocessors_ = 0;
};

}  // namespace tessera
