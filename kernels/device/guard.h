// The only place that converts a device's exception to a Status.
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

// Converts the exception in flight to a Status. The exception concerns the device `at` unless it
// names another one. If its kind is kLost, marks the device that it concerns as lost.
absl::Status CurrentExceptionStatus(Device& at);

// Calls f(), which may throw DeviceError, and returns the outcome as a Status.
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
