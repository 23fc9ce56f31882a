#include "tests/fake_nvml.h"

#include <chrono>
#include <thread>

// The functions that server/devices/gpu_monitor.cc uses, with the types of nvml.h.
namespace {

tessera::FakeNvml& State() {
  static auto* state = new tessera::FakeNvml;  // It outlives the threads that block in it.
  return *state;
}

constexpr int kNotFound = 6, kInvalidArgument = 2;

// Stores the value unless the function is supposed to fail.
template <class T>
int Tell(const char* function, T value, T* out) {
  tessera::FakeNvml& state = State();
  ++state.calls;
  while (state.blocked) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const std::lock_guard lock(state.mutex);
  if (const auto found = state.results.find(function); found != state.results.end())
    return found->second;
  *out = value;
  return 0;
}

struct Utilization {
  unsigned gpu, memory;
};
struct Memory {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

}  // namespace

extern "C" {

tessera::FakeNvml* FakeNvmlState() { return &State(); }

int nvmlInit_v2() {
  ++State().calls;
  return State().init_result;
}
const char* nvmlErrorString(int) { return "Driver/library version mismatch"; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device) {
  if (bus_id != std::string("0000:65:00.0")) return kNotFound;
  *device = &State();
  return 0;
}
int nvmlDeviceGetUtilizationRates(void*, Utilization* out) {
  return Tell("utilization", {87, 12}, out);
}
int nvmlDeviceGetMemoryInfo_v2(void*, Memory* out) {
  if (out->version != (sizeof(Memory) | 2u << 24)) return kInvalidArgument;
  return Tell("memory", {out->version, 80ull << 30, 1ull << 30, 9ull << 30, 70ull << 30}, out);
}
int nvmlDeviceGetTemperature(void*, int sensor, unsigned* out) {
  return sensor != 0 ? kInvalidArgument : Tell("temperature", 61u, out);
}
int nvmlDeviceGetPowerUsage(void*, unsigned* out) { return Tell("power", 512'345u, out); }
int nvmlDeviceGetEnforcedPowerLimit(void*, unsigned* out) {
  return Tell("power limit", 700'000u, out);
}
int nvmlDeviceGetClockInfo(void*, int clock, unsigned* out) {
  return clock != 1 ? kInvalidArgument : Tell("clock", 1755u, out);
}
int nvmlDeviceGetCurrentClocksEventReasons(void*, unsigned long long* out) {
  return Tell("slowdowns", State().slowdowns, out);
}
int nvmlDeviceGetTotalEccErrors(void*, int kind, int counter, unsigned long long* out) {
  if (counter != 0) return kInvalidArgument;
  return Tell("errors", kind == 0 ? 3ull : 0ull, out);
}

}  // extern "C"
