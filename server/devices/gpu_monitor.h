// What the driver tells of the GPUs: load, memory, temperature, power, errors. By NVML, which comes
// with the driver and is loaded when the process runs: a host without it has no such figures. A
// dozen of its functions are declared by hand, because its header is part of the toolkit, which the
// CPU image lacks. A thread asks the driver when a scrape wants to know, because calls of the
// driver may hang.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "kernels/device/device.h"

namespace tessera {

// Of one GPU as a whole, whoever uses it. What the driver does not tell has no value.
struct GpuFigures {
  // Why clocks are lower than they could be, as bits of NVML (nvmlClocksEventReasons).
  static constexpr std::uint64_t kPowerCap = 0x4;          // the limit of power is reached
  static constexpr std::uint64_t kThermalSoftware = 0x20;  // the driver's limit of temperature is
  static constexpr std::uint64_t kThermalHardware =
      0x40;  // the hardware's is: clocks are halved at least
  static constexpr std::uint64_t kPowerBrake = 0x80;  // the power supply asks for it

  std::string device;          // "cuda:0"
  std::optional<double> busy;  // part of the last sample, up to a second, in which a kernel ran
  std::optional<std::uint64_t> memory_used;  // bytes
  std::optional<double> celsius;
  std::optional<double> watts;
  std::optional<double> watts_limit;
  std::optional<double> sm_hertz;
  std::optional<std::uint64_t> slowdowns;
  // Of memory, since the driver was loaded.
  std::optional<std::uint64_t> corrected_errors;
  std::optional<std::uint64_t> uncorrected_errors;
};

// Thread safe. Does nothing until it is asked, and nothing at all where no device is a GPU.
class GpuMonitor {
 public:
  explicit GpuMonitor(const std::vector<std::unique_ptr<Device>>& devices);
  ~GpuMonitor();
  GpuMonitor(const GpuMonitor&) = delete;
  GpuMonitor& operator=(const GpuMonitor&) = delete;

  // The figures now, of the GPUs that the driver knows. Empty if it has not told them within the
  // limit, as when one has fallen off the bus.
  std::vector<GpuFigures> Read(absl::Duration limit);

 private:
  struct Shared;
  // With a thread of its own, which a driver that does not come back keeps.
  std::shared_ptr<Shared> shared_;  // null: there is no GPU
};

}  // namespace tessera
