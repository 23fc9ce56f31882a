// The exception that devices and their streams throw. Uses only the standard library.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "kernels/device/budget.h"

namespace tessera {

class Device;

// A failed call to the device's runtime. It is thrown only inside kernels/; kernels/run/ converts
// it to a Status.
class DeviceError : public std::exception {
 public:
  enum class Kind {
    kOutOfMemory,      // device memory
    kOutOfHostMemory,  // host memory, page-locked or ordinary
    kOutOfScratch,     // the stream's scratch budget is used up; nothing was allocated
    kUnsupported,      // the device, or the machine that it belongs to, cannot do this
    kFailed,           // this call failed; the device still works
    kLost,             // the device is lost: every later call fails too
  };
  DeviceError(Kind kind, std::string call, std::string error, std::uint64_t requested = 0)
      : kind_(kind),
        call_(std::move(call)),
        error_(std::move(error)),
        requested_(requested),
        what_(call_ + ": " + error_) {}
  // Makes an error of kind kOutOfScratch.
  DeviceError(std::uint64_t requested, const Budget& budget)
      : DeviceError(Kind::kOutOfScratch, "Stream::Scratch", "out of scratch memory", requested) {
    free_ = budget.free();
    total_ = budget.limit();
  }

  Kind kind() const { return kind_; }
  const std::string& call() const { return call_; }       // the expression that failed
  const std::string& error() const { return error_; }     // the runtime's name for the error
  std::uint64_t requested() const { return requested_; }  // bytes, when out of memory
  // The budget's free and total bytes, for kOutOfScratch.
  std::uint64_t free() const { return free_; }
  std::uint64_t total() const { return total_; }
  const char* what() const noexcept override { return what_.c_str(); }

  // The device whose call failed, or null if it must be the device that the work is for.
  Device* device() const { return device_; }
  void SetDevice(Device& device) { device_ = &device; }

 private:
  Kind kind_;
  std::string call_;
  std::string error_;
  std::uint64_t requested_;
  std::uint64_t free_ = 0;
  std::uint64_t total_ = 0;
  Device* device_ = nullptr;
  std::string what_;
};

}  // namespace tessera
