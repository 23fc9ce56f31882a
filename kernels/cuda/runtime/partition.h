// Most of a GPU's SMs, for work that would fill all of them for long, so that other work always
// finds some free (CUDA driver API, "Green Contexts"). Included by .cu files only.
#pragma once

#include <cuda.h>  // types

#include "kernels/cuda/runtime/cuda.h"

namespace tessera {

// What of the GPU is left to others: the fewest SMs that can be set apart on all GPUs that are
// known.
inline constexpr unsigned kRoomMultiprocessors = 8;

class Partition {
 public:
  // Of the current device all SMs but kRoomMultiprocessors. Throws DeviceError: where the driver
  // cannot, and where the GPU has no more than these.
  explicit Partition(int ordinal);
  // REQUIRES: its streams are gone.
  ~Partition();
  Partition(const Partition&) = delete;
  Partition& operator=(const Partition&) = delete;

  int multiprocessors() const { return multiprocessors_; }
  // A stream whose kernels run on these SMs alone, and otherwise like those of MakeStreamHandle.
  StreamHandle MakeStream() const;

 private:
  CUgreenCtx context_ = nullptr;
  int multiprocessors_ = 0;
};

}  // namespace tessera
