#include "server/devices/device_probe.h"

namespace tessera {
namespace {

using std::chrono::steady_clock;

// The pause between probes. A loss must be noticed within a second, and a probe takes microseconds.
constexpr std::chrono::milliseconds kInterval{200};

std::int64_t ClockTicks() { return steady_clock::now().time_since_epoch().count(); }

}  // namespace

DeviceProbe::DeviceProbe(Device& device) : device_(device), thread_(&DeviceProbe::Ask, this) {}

DeviceProbe::~DeviceProbe() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

steady_clock::duration DeviceProbe::Waiting() const {
  const std::int64_t asked = asked_.load(std::memory_order_relaxed);
  return steady_clock::duration(asked == 0 ? 0 : ClockTicks() - asked);
}

void DeviceProbe::Ask() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kInterval, [this] { return stopping_; }) && !device_.lost()) {
    lock.unlock();
    asked_.store(ClockTicks(), std::memory_order_relaxed);
    Probe(device_).IgnoreError();  // a loss is recorded in the device
    asked_.store(0, std::memory_order_relaxed);
    lock.lock();
  }
}

}  // namespace tessera
