// Asks a device again and again whether it still answers, on a thread of its own: so that one that
// is lost, or hangs, while nobody uses it is noticed, whatever other devices do.
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
  // Waits for an answer that is due.
  ~DeviceProbe();
  DeviceProbe(const DeviceProbe&) = delete;
  DeviceProbe& operator=(const DeviceProbe&) = delete;

  // For how long the device has owed an answer; zero: it owes none.
  std::chrono::steady_clock::duration Waiting() const;

 private:
  void Ask();

  Device& device_;
  // When it was asked what it has not answered, in ticks of the steady clock; 0: nothing is due.
  std::atomic<std::int64_t> asked_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tessera
