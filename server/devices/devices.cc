#include "server/devices/devices.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"

namespace tessera {
namespace {

// An idle worker polls for twice the mean interval between recent operations if that is at most
// this long; otherwise it sleeps immediately.
constexpr std::chrono::microseconds kSpin{200};

// How many slots each device always keeps; two downloads need no more.
constexpr std::size_t kLeastSlots = 6;

}  // namespace

absl::StatusOr<std::unique_ptr<Devices>> Devices::Start(
    const Options& options, const List& list, const std::vector<BufferStore::DeviceLimit>& limits) {
  std::unique_ptr<Devices> devices(new Devices(options, list));
  for (const auto& [device, bytes] : limits) RETURN_IF_ERROR(devices->Add(*device, bytes));
  return devices;
}

absl::Status Devices::Add(Device& device, std::uint64_t buffer_limit) {
  ASSIGN_OR_RETURN(Device* const first, Find(device.info().name));
  if (first != &device) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_DEVICE",
                     absl::StrCat("device ", device.info().name, " is named twice"));
  }
  auto state = std::make_unique<State>(options_.ScratchLimit(buffer_limit), device);
  ASSIGN_OR_RETURN(state->compute, StartCompute(device, *state));
  const Executor::Settings transfers{.workers = options_.transfer_workers,
                                     .queue_length = std::numeric_limits<std::size_t>::max()};
  ASSIGN_OR_RETURN(state->transfers, Executor::Start(device, transfers));
  ASSIGN_OR_RETURN(state->team, MakeLargeStream(device));
  ASSIGN_OR_RETURN(state->slots, SlotPool::Make(device, kLeastSlots));
  state->team->SetScratchBudget(&state->scratch);
  state->probe = std::make_unique<DeviceProbe>(device);
  states_[&device] = std::move(state);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Executor>> Devices::StartCompute(Device& device,
                                                                State& state) const {
  const bool reserve = !options_.tokens.empty();
  if (reserve) RETURN_IF_ERROR(KeepRoom(device));
  const bool cpu = device.info().backend == Backend::kCpu;
  const auto overrun =
      cpu ? absl::Seconds(options_.max_operation_seconds) : absl::InfiniteDuration();
  bool first_stream = true;
  return Executor::Start(device,
                         {.workers = options_.workers,
                          .reserve = reserve,
                          .queue_length = options_.queue,
                          .spin = kSpin,
                          .scratch = &state.scratch,
                          .shares_loops = true,
                          .overrun = overrun},
                         [&](Stream& stream) -> absl::Status {
                           if (!options_.warm_up) return absl::OkStatus();
                           return WarmUp(stream, state.pace, std::exchange(first_stream, false));
                         });
}

Device& Devices::First() const {
  const auto first =
      std::find_if(list_.begin(), list_.end(), [](const auto& device) { return !device->lost(); });
  return first == list_.end() ? *list_.front() : **first;
}

absl::StatusOr<Device*> Devices::Find(std::string_view name) const {
  const auto usable = [](Device& device) -> absl::StatusOr<Device*> {
    if (device.lost()) return DeviceLostError(device);
    return &device;
  };
  if (name.empty()) return usable(First());
  for (const std::unique_ptr<Device>& device : list_)
    if (device->info().name == name) return usable(*device);
  const auto append_name = [](std::string* out, const std::unique_ptr<Device>& device) {
    *out += device->info().name;
  };
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_DEVICE",
                   "this server has no such device",
                   {{"field", "device"},
                    {"value", std::string(name)},
                    {"valid", absl::StrJoin(list_, ", ", append_name)}});
}

void Devices::TrimSlots() {
  for (const auto& [device, state] : states_) state->slots->Trim();
}

absl::StatusOr<Devices::Bridge> Devices::BridgeTo(Device& device) const {
  State& state = *states_.at(&device);
  std::unique_ptr<Stream> stream;
  if (const std::lock_guard lock(state.bridges_mutex); !state.bridges.empty()) {
    stream = std::move(state.bridges.back());
    state.bridges.pop_back();
  }
  if (stream == nullptr) {
    ASSIGN_OR_RETURN(stream, MakeStream(device));
  }
  return Bridge(stream.release(), [&state](Stream* used) {
    std::unique_ptr<Stream> owned(used);
    const std::lock_guard lock(state.bridges_mutex);
    try {
      state.bridges.push_back(std::move(owned));
    } catch (const std::bad_alloc&) {  // the stream is not kept
    }
  });
}

Devices::Member Devices::TeamStream(const Device& device) const {
  State& state = *states_.at(&device);
  return {std::unique_lock(state.team_mutex), *state.team};
}

void Devices::SetLimits(const Device& device, RunOptions& options) const {
  options.pace = &states_.at(&device)->pace;
  options.max_seconds = options_.max_operation_seconds;
  options.max_slow_seconds = options_.MaxSlowSeconds();
}

absl::Duration Devices::LongestWait(const Device& device, Executor::Counts counts) const {
  if (device.lost()) return absl::ZeroDuration();
  const State& state = *states_.at(&device);
  return std::max({state.compute->StopOverdue(counts),
                   counts(absl::FromChrono(state.transfers->LongestRun())),
                   counts(absl::FromChrono(state.probe->Waiting()))});
}

bool Devices::IsAnswering(const Device& device) const {
  constexpr std::chrono::seconds kOverdue{1};
  return states_.at(&device)->probe->Waiting() < kOverdue;
}

}  // namespace tessera
