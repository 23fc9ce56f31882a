#include "tests/fake_nvml.h"

#include <chrono>
#include <thread>

// The functions that server/gpu_monitor.cc uses, with the types of nvml.h.
namespace {

tessera::FakeNvml& State() {
  static auto* state = new tessera::FakeNvml;  // outlives whoever is blocked in it
  return *state;
}

constexpr int kNotFound = 6, kInvalidArgument = 2;

// Stores the value, unless the function is to fail.
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
  if (State().bus_id != bus_id) return kNotFound;
  *device = &State();
  return 0;
}
int nvmlDeviceGetUtilizationRates(void*, Utilization* out) {
  return Tell("utilization", {State().busy, 12}, out);
}
int nvmlDeviceGetMemoryInfo_v2(void*, Memory* out) {
  if (out->version != (sizeof(Memory) | 2u << 24)) return kInvalidArgument;
  return Tell("memory", {out->version, 80ull << 30, 1ull << 30, 9ull << 30, State().memory_used},
              out);
}
int nvmlDeviceGetTemperature(void*, int sensor, unsigned* out) {
  return sensor != 0 ? kInvalidArgument : Tell("temperature", State().celsius, out);
}
int nvmlDeviceGetPowerUsage(void*, unsigned* out) { return Tell("power", State().milliwatts, out); }
int nvmlDeviceGetEnforcedPowerLimit(void*, unsigned* out) {
  return Tell("power limit", State().limit_milliwatts, out);
}
int nvmlDeviceGetClockInfo(void*, int clock, unsigned* out) {
  return clock != 1 ? kInvalidArgument : Tell("clock", State().mhz, out);
}
int nvmlDeviceGetCurrentClocksEventReasons(void*, unsigned long long* out) {
  return Tell("slowdowns", State().slowdowns, out);
}
int nvmlDeviceGetTotalEccErrors(void*, int kind, int counter, unsigned long long* out) {
  if (counter != 0) return kInvalidArgument;
  return Tell("errors", kind == 0 ? State().corrected : State().uncorrected, out);
}

}  // extern "C"
