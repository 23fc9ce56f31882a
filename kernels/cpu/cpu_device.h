// The CPU as a device: host memory, and streams whose calls finish before they return.
#pragma once

#include <memory>

#include "kernels/device.h"

namespace tessera {

std::unique_ptr<Device> OpenCpuDevice();

}  // namespace tessera
