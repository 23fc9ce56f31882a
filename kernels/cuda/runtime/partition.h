// A partition that contains most of a GPU's SMs. Work that would occupy all SMs for a long time
// runs in the partition, so that other work always finds free SMs (CUDA driver API, "Green
// Contexts"). Only .cu files include this header.
#pragma once

#include <cuda.h>  // types

#include "kernels/cuda/runtime/cuda.h"

namespace tessera {

// The number of SMs outside the partition: the smallest number that every known GPU can reserve.
inline constexpr unsigned kRoomMultiprocessors = 8;

class Partition {
 public:
  // Takes all SMs of the current device except kRoomMultiprocessors. Throws DeviceError if the
  // driver cannot partition the device, or if the GPU has at most kRoomMultiprocessors SMs.
  explicit Partition(int ordinal);
  // REQUIRES: its streams have been destroyed.
  ~Partition();
  Partition(const Partition&) = delete;
  Partition& operator=(const Partition&) = delete;

  int multiprocessors() const { return multiprocessors_; }
  // Creates a stream whose kernels run only on the partition's SMs. In all other respects it is
  // like a stream from MakeStreamHandle.
  StreamHandle MakeStream() const;

 private:
  CUgreenCtx context_ = nullptr;
  int multiprocessors_ = 0;
};

}  // namespace tessera
