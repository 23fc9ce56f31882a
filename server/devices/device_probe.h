// Probes a device regularly on a separate thread. A device that is lost or hangs is therefore
// noticed even if nothing uses it, and even if other devices hang.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "kernels/compute.h"

namespace tessera {

// Thread safe. A loss is latched in the device, which must outlive the probe.
class DeviceProbe {
 public:
  explicit DeviceProbe(Device& device);
  // Waits for the current probe to be answered.
  ~DeviceProbe();
  DeviceProbe(const DeviceProbe&) = delete;
  DeviceProbe& operator=(const DeviceProbe&) = delete;

  // Returns how long the current probe has been unanswered, or zero if there is none.
  std::chrono::steady_clock::duration Waiting() const;

 private:
  void Ask();

  Device& device_;
  // When the current probe began, in ticks of the steady clock, or 0 if there is none.
  std::atomic<std::int64_t> asked_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tessera
