// The CUDA devices of this machine. Standard library only. Thread safe.
#pragma once

#include <memory>
#include <string>

#include "kernels/device/device.h"

namespace tessera {

// How many GPUs there are; 0 without a driver.
int CudaDeviceCount() noexcept;

// Why CudaDeviceCount() is 0; empty when it is not.
std::string CudaUnavailableReason();

// The device "cuda:<ordinal>". Throws DeviceError.
std::unique_ptr<Device> OpenCudaDevice(int ordinal);

}  // namespace tessera
