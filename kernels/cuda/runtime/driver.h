// Looks up functions of the CUDA driver through the runtime, because nothing links against the
// driver. Only .cu files include this header.
#pragma once

#include <cuda.h>  // types

#include <string>

#include "kernels/cuda/runtime/cuda.h"

namespace tessera {

// Looks up a driver function by name. Throws kUnsupported if this driver does not have the
// function. `version` is the CUDA version that introduced the function.
template <class Function>
Function DriverFunction(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess)
    throw DeviceError(DeviceError::Kind::kUnsupported, name, std::string(name) + " is missing");
  return reinterpret_cast<Function>(function);
}

}  // namespace tessera
