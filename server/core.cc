#include "server/core.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "server/clock.h"

namespace tessera {
namespace {

// One thread would not be enough, because allocating memory on the CPU device takes about as long
// as receiving the bytes for it.
constexpr int kChoreThreads = 4;
// How many chores of one tenant may wait. Most chores take microseconds, so even this many are done
// quickly. The devices' queues do not delay them.
constexpr std::size_t kWaitingChores = 1024;

// Returns how much of a device's memory is available for buffers. CPU devices share the host's
// memory with each other and, if --memory-limit is a percentage, with messages, clients' regions
// and the rest of the process.
std::uint64_t FreeBytes(const Device& device, const Devices::List& devices,
                        const Options& options) {
  std::uint64_t free = device.FreeBytes();
  if (device.info().backend != Backend::kCpu) return free;
  if (options.memory_limit.bytes == 0) free = options.LeftOfHost(free);
  const auto sharing = std::count_if(devices.begin(), devices.end(), [](const auto& other) {
    return other->info().backend == Backend::kCpu;
  });
  return free / static_cast<std::uint64_t>(sharing);
}

// Returns how much memory the buffers of each device may take, or INVALID_ARGUMENT /
// BAD_MEMORY_LIMIT if a device has too little.
absl::StatusOr<std::vector<BufferStore::DeviceLimit>> BufferLimits(const Devices::List& devices,
                                                                   const Options& options) {
  std::vector<BufferStore::DeviceLimit> limits;
  for (const std::unique_ptr<Device>& device : devices) {
    const std::uint64_t free = FreeBytes(*device, devices, options);
    const std::uint64_t limit = options.memory_limit.Resolve(free);
    if (limit == 0) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "BAD_MEMORY_LIMIT",
          absl::StrCat("no memory is left for buffers on device ", device->info().name, ": ",
                       device->FreeBytes(), " bytes of its memory are free",
                       device->info().backend == Backend::kCpu
                           ? ", but --host-memory and --shared-memory-limit use all of them"
                           : ""),
          {{"field", "memory-limit"}, {"limit", "0"}});
    }
    if (limit > free) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_MEMORY_LIMIT",
                       absl::StrCat("--memory-limit is ", limit, " bytes, but device ",
                                    device->info().name, " has ", free, " free"),
                       {{"field", "memory-limit"},
                        {"value", absl::StrCat(limit)},
                        {"limit", absl::StrCat(free)}});
    }
    limits.push_back({device.get(), limit});
  }
  return limits;
}

std::vector<Device*> Pointers(const Devices::List& devices) {
  std::vector<Device*> pointers;
  for (const std::unique_ptr<Device>& device : devices) pointers.push_back(device.get());
  return pointers;
}

}  // namespace

Core::Core(const Options& server_options, Devices::List list,
           const std::vector<BufferStore::DeviceLimit>& buffer_limits)
    : options(server_options),
      start_time(SteadyNow()),
      device_list(std::move(list)),
      tenants(buffer_limits,
              {.default_ttl = options.default_ttl,
               .max_ttl = options.max_ttl,
               .idle_draft = options.transfer_timeout,
               .buffers = options.MaxBuffers(),
               .ranges = options.max_ranges,
               .foreign = options.ring.empty()
                              ? std::function<absl::Status(std::string_view)>()
                              : [this](std::string_view name) { return home->Check(name); }}),
      limits(options, tenants, device_list.size()),
      regions(Pointers(device_list), limits.shared_memory(), limits.shared_regions()),
      records(options, ListStrategies(Pointers(device_list))),
      chores(kChoreThreads, kWaitingChores) {}

absl::StatusOr<std::unique_ptr<Core>> Core::Make(const Options& options, Devices::List list) {
  static_cast<void>(HostMemoryError());  // allocated now, while there is memory
  // The loops that are measured here are too small to share among threads.
  for (const std::unique_ptr<Device>& device : list) PrepareThread(*device, /*shares_loops=*/false);
  const auto buffer_limits = BufferLimits(list, options);
  if (!buffer_limits.ok()) return buffer_limits.status();
  std::unique_ptr<Core> core(new Core(options, std::move(list), *buffer_limits));
  ASSIGN_OR_RETURN(core->access, Access::Open(options.tokens, core->tenants));
  if (!options.ring.empty()) {
    ASSIGN_OR_RETURN(core->home, Home::Open(options.ring, options.ring_name));
  }
  ASSIGN_OR_RETURN(core->devices, Devices::Start(core->options, core->device_list, *buffer_limits));
  if (!options.data_dir.empty()) {
    ASSIGN_OR_RETURN(core->snapshots, Snapshots::Open(options.data_dir, options.snapshot_interval,
                                                      *core->devices, core->tenants));
  }
  return core;
}

}  // namespace tessera
