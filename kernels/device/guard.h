// The one place where an exception of a device becomes a Status.
#pragma once

#include <cstdint>
#include <exception>
#include <new>

#include "absl/status/status.h"
#include "kernels/base/error.h"
#include "kernels/device/device.h"

namespace tessera {

// RESOURCE_EXHAUSTED / SCRATCH_EXHAUSTED {requested, free, total}.
absl::Status ScratchExhausted(const Device& device, std::uint64_t requested, std::uint64_t free,
                              std::uint64_t total);

// What the exception in flight means, of this device unless it names another one; marks the device
// lost when it is.
absl::Status CurrentExceptionStatus(Device& at);

// The Status of f(), which may throw DeviceError.
template <class F>
absl::Status Guard(Device& device, F&& f) {
  try {
    f();
    return absl::OkStatus();
  } catch (...) {
    return CurrentExceptionStatus(device);
  }
}

}  // namespace tessera
