// The CUDA devices of this machine. Uses only the standard library. Thread safe.
#pragma once

#include <memory>
#include <string>

#include "kernels/device/device.h"

namespace tessera {

// Returns the number of GPUs, or 0 if there is no driver.
int CudaDeviceCount() noexcept;

// Returns why CudaDeviceCount() is 0, or an empty string if it is not 0.
std::string CudaUnavailableReason();

// Opens the device "cuda:<ordinal>". Throws DeviceError.
std::unique_ptr<Device> OpenCudaDevice(int ordinal);

}  // namespace tessera
