// GPU metrics from the driver: load, memory, temperature, power and errors. They come from NVML,
// which is part of the driver and is loaded at run time. A host without NVML has no such metrics. A
// dozen functions of NVML are declared by hand, because its header is part of the toolkit, which
// the CPU image lacks. When a scrape needs the metrics, a separate thread gets them, because calls
// to the driver may hang.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "kernels/device/device.h"

namespace tessera {

// Metrics of one GPU as a whole, for all processes that use it. A metric that the driver does not
// report has no value.
struct GpuFigures {
  // Reasons why clocks are lower than they could be, as NVML's bits (nvmlClocksEventReasons).
  static constexpr std::uint64_t kPowerCap = 0x4;          // the power limit
  static constexpr std::uint64_t kThermalSoftware = 0x20;  // the driver's temperature limit
  static constexpr std::uint64_t kThermalHardware =
      0x40;  // the hardware's temperature limit: clocks are at least halved
  static constexpr std::uint64_t kPowerBrake = 0x80;  // requested by the power supply

  std::string device;          // "cuda:0"
  std::optional<double> busy;  // fraction of the last sample (up to 1 s) in which a kernel ran
  std::optional<std::uint64_t> memory_used;  // bytes
  std::optional<double> celsius;
  std::optional<double> watts;
  std::optional<double> watts_limit;
  std::optional<double> sm_hertz;
  std::optional<std::uint64_t> slowdowns;
  // Memory errors since the driver was loaded.
  std::optional<std::uint64_t> corrected_errors;
  std::optional<std::uint64_t> uncorrected_errors;
};

// Thread safe. Reads metrics only on request, and starts no thread if no device is a GPU.
class GpuMonitor {
 public:
  explicit GpuMonitor(const std::vector<std::unique_ptr<Device>>& devices);
  ~GpuMonitor();
  GpuMonitor(const GpuMonitor&) = delete;
  GpuMonitor& operator=(const GpuMonitor&) = delete;

  // Returns the current metrics of the GPUs that the driver knows. The result is empty if the
  // driver takes longer than the limit, for example because a GPU has fallen off the bus.
  std::vector<GpuFigures> Read(absl::Duration limit);

 private:
  struct Shared;
  // Shared with the thread that calls the driver. The thread outlives this object if a call hangs.
  std::shared_ptr<Shared> shared_;  // null if there is no GPU
};

}  // namespace tessera
