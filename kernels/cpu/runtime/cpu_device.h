// The CPU as a device: host memory, and streams whose calls finish before they return.
#pragma once

#include <memory>
#include <string>

#include "kernels/device/device.h"

namespace tessera {

// `name` is the device's name in requests. All CPU devices of a process share the host's memory and
// cores.
std::unique_ptr<Device> OpenCpuDevice(std::string name = "cpu");

}  // namespace tessera
