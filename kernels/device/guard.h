// The only place that converts a device's exception to a Status.
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/error.h"
#include "kernels/device/device.h"

namespace tessera {

// Returns RESOURCE_EXHAUSTED / SCRATCH_EXHAUSTED {requested, free, total}.
absl::Status ScratchExhausted(const Device& device, std::uint64_t requested, std::uint64_t free,
                              std::uint64_t total);

// Converts the exception in flight to a Status. The exception concerns the device `at` unless it
// names another one. If its kind is kLost, marks the device that it concerns as lost.
absl::Status CurrentExceptionStatus(Device& at);

// Calls f(), which may throw DeviceError, and returns the outcome as a Status, or as a StatusOr if
// f returns a value.
template <class F, class Value = std::invoke_result_t<F>>
std::conditional_t<std::is_void_v<Value>, absl::Status, absl::StatusOr<Value>> Guard(Device& device,
                                                                                     const F& f) {
  try {
    if constexpr (!std::is_void_v<Value>) {
      return f();
    } else {
      f();
      return absl::OkStatus();
    }
  } catch (...) {
    return CurrentExceptionStatus(device);
  }
}

}  // namespace tessera
