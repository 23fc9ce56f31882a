// The only place where a device's exception becomes a Status.
#pragma once

#include <cstdint>
#include <exception>
#include <new>

#include "absl/status/status.h"
#include "kernels/base/error.h"
#include "kernels/device/device.h"

namespace tessera {

// Returns RESOURCE_EXHAUSTED / SCRATCH_EXHAUSTED {requested, free, total}.
absl::Status ScratchExhausted(const Device& device, std::uint64_t requested, std::uint64_t free,
                              std::uint64_t total);

// Returns the Status of the exception in flight, which concerns this device unless it names another
// one. Marks the device lost if the exception says so.
absl::Status CurrentExceptionStatus(Device& at);

// Returns the Status of f(), which may throw DeviceError.
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
