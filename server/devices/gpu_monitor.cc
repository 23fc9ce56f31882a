#include "server/devices/gpu_monitor.h"

#include <dlfcn.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

constexpr char kLibrary[] = "libnvidia-ml.so.1";

// From nvml.h, which is part of the toolkit and not of the driver.
using NvmlResult = int;  // 0 means success
using NvmlDevice = struct NvmlDeviceOpaque*;
struct NvmlUtilization {
  unsigned gpu;     // per cent
  unsigned memory;  // per cent
};
struct NvmlMemory {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
constexpr unsigned kMemoryVersion = sizeof(NvmlMemory) | 2u << 24;
constexpr int kTemperatureGpu = 0, kClockSm = 1;
constexpr int kErrorsCorrected = 0, kErrorsUncorrected = 1, kErrorsSinceLoad = 0;

// The functions of the library. A function that an older driver lacks is null.
struct Nvml {
  NvmlResult (*init)();
  const char* (*error_string)(NvmlResult);
  NvmlResult (*handle_by_bus_id)(const char*, NvmlDevice*);
  NvmlResult (*utilization)(NvmlDevice, NvmlUtilization*);
  NvmlResult (*memory)(NvmlDevice, NvmlMemory*);
  NvmlResult (*temperature)(NvmlDevice, int, unsigned*);
  NvmlResult (*power)(NvmlDevice, unsigned*);
  NvmlResult (*power_limit)(NvmlDevice, unsigned*);
  NvmlResult (*clock)(NvmlDevice, int, unsigned*);
  NvmlResult (*slowdowns)(NvmlDevice, unsigned long long*);
  NvmlResult (*errors)(NvmlDevice, int, int, unsigned long long*);
};

// Loads and initialises NVML. If that fails, logs why and returns nothing.
std::optional<Nvml> Load() {
  // The library is never closed. Like a linked library, it stays loaded for as long as the process
  // runs.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    spdlog::warn("no GPU metrics: {}", dlerror());
    return std::nullopt;
  }
  Nvml nvml{};
  const auto find = [library](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
  };
  find("nvmlInit_v2", nvml.init);
  find("nvmlErrorString", nvml.error_string);
  find("nvmlDeviceGetHandleByPciBusId_v2", nvml.handle_by_bus_id);
  find("nvmlDeviceGetUtilizationRates", nvml.utilization);
  find("nvmlDeviceGetMemoryInfo_v2", nvml.memory);
  find("nvmlDeviceGetTemperature", nvml.temperature);
  find("nvmlDeviceGetPowerUsage", nvml.power);
  find("nvmlDeviceGetEnforcedPowerLimit", nvml.power_limit);
  find("nvmlDeviceGetClockInfo", nvml.clock);
  find("nvmlDeviceGetCurrentClocksEventReasons", nvml.slowdowns);
  find("nvmlDeviceGetTotalEccErrors", nvml.errors);
  if (nvml.init == nullptr || nvml.error_string == nullptr || nvml.handle_by_bus_id == nullptr) {
    spdlog::warn("no GPU metrics: {} lacks required functions", kLibrary);
    return std::nullopt;
  }
  if (const NvmlResult result = nvml.init(); result != 0) {
    spdlog::warn("no GPU metrics: nvmlInit: {}", nvml.error_string(result));
    return std::nullopt;
  }
  return nvml;
}

// Returns what function(arguments..., &value) stores, or nothing if it fails or is missing.
template <class Value, class Function, class... Arguments>
std::optional<Value> Ask(Function function, Arguments... arguments) {
  Value value{};
  if (function == nullptr || function(arguments..., &value) != 0) return std::nullopt;
  return value;
}

// Returns the value times `unit`.
std::optional<double> Scaled(std::optional<unsigned> value, double unit) {
  if (!value.has_value()) return std::nullopt;
  return *value * unit;
}

GpuFigures FiguresOf(const Nvml& nvml, NvmlDevice gpu) {
  GpuFigures figures;
  if (const auto rates = Ask<NvmlUtilization>(nvml.utilization, gpu); rates.has_value())
    figures.busy = rates->gpu * 0.01;
  NvmlMemory memory{.version = kMemoryVersion};
  if (nvml.memory != nullptr && nvml.memory(gpu, &memory) == 0) figures.memory_used = memory.used;
  figures.celsius = Scaled(Ask<unsigned>(nvml.temperature, gpu, kTemperatureGpu), 1);
  figures.watts = Scaled(Ask<unsigned>(nvml.power, gpu), 1e-3);
  figures.watts_limit = Scaled(Ask<unsigned>(nvml.power_limit, gpu), 1e-3);
  figures.sm_hertz = Scaled(Ask<unsigned>(nvml.clock, gpu, kClockSm), 1e6);
  figures.slowdowns = Ask<unsigned long long>(nvml.slowdowns, gpu);
  figures.corrected_errors =
      Ask<unsigned long long>(nvml.errors, gpu, kErrorsCorrected, kErrorsSinceLoad);
  figures.uncorrected_errors =
      Ask<unsigned long long>(nvml.errors, gpu, kErrorsUncorrected, kErrorsSinceLoad);
  return figures;
}

}  // namespace

struct GpuMonitor::Shared {
  struct Gpu {
    std::string device;
    std::string bus_id;
    NvmlDevice handle = nullptr;  // only used by the thread; null until it is found
  };
  std::vector<Gpu> gpus;

  std::mutex mutex;
  std::condition_variable changed;
  bool wanted = false;
  bool stop = false;
  std::uint64_t readings = 0;
  std::vector<GpuFigures> figures;  // from the last reading

  void Run() {
    const std::optional<Nvml> nvml = Load();
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return wanted || stop; });
      if (stop) return;
      lock.unlock();
      std::vector<GpuFigures> found;
      for (Gpu& gpu : gpus) {
        if (!nvml.has_value() ||
            (gpu.handle == nullptr && nvml->handle_by_bus_id(gpu.bus_id.c_str(), &gpu.handle) != 0))
          continue;
        found.push_back(FiguresOf(*nvml, gpu.handle));
        found.back().device = gpu.device;
      }
      lock.lock();
      figures = std::move(found);
      wanted = false;
      ++readings;
      changed.notify_all();
    }
  }
};

GpuMonitor::GpuMonitor(const std::vector<std::unique_ptr<Device>>& devices) {
  auto shared = std::make_shared<Shared>();
  for (const std::unique_ptr<Device>& device : devices) {
    const DeviceInfo& info = device->info();
    if (!info.pci_bus_id.empty()) shared->gpus.push_back({info.name, info.pci_bus_id});
  }
  if (shared->gpus.empty()) return;
  shared_ = shared;
  std::thread([shared = std::move(shared)] { shared->Run(); }).detach();
}

GpuMonitor::~GpuMonitor() {
  if (shared_ == nullptr) return;
  const std::lock_guard lock(shared_->mutex);
  shared_->stop = true;
  shared_->changed.notify_all();
}

std::vector<GpuFigures> GpuMonitor::Read(absl::Duration limit) {
  if (shared_ == nullptr) return {};
  std::unique_lock lock(shared_->mutex);
  shared_->wanted = true;
  shared_->changed.notify_all();
  const std::uint64_t before = shared_->readings;
  const bool read = shared_->changed.wait_for(lock, absl::ToChronoNanoseconds(limit),
                                              [&] { return shared_->readings != before; });
  return read ? shared_->figures : std::vector<GpuFigures>();
}

}  // namespace tessera
