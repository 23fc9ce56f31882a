// Probes a device regularly on a separate thread, so that a device that is lost or hangs is noticed
// even if nothing uses it, and whatever other devices do.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "kernels/compute.h"

namespace tessera {

// Thread safe. A loss is latched in the device, which outlives the probe.
class DeviceProbe {
 public:
  explicit DeviceProbe(Device& device);
  // Waits for an answer that is outstanding.
  ~DeviceProbe();
  DeviceProbe(const DeviceProbe&) = delete;
  DeviceProbe& operator=(const DeviceProbe&) = delete;

  // Returns how long the device has owed an answer, or zero if it owes none.
  std::chrono::steady_clock::duration Waiting() const;

 private:
  void Ask();

  Device& device_;
  // When the unanswered probe began, in ticks of the steady clock; 0: no answer is outstanding.
  std::atomic<std::int64_t> asked_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tessera
