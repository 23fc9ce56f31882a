#include "server/core.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/error.h"
#include "server/observe/log.h"
#include "server/rpc/convert.h"

namespace tessera {
namespace {

// How long a draining server waits for a client. A message of 4 MiB takes 3 s at 10 Mbit/s.
constexpr absl::Duration kDrainPause = absl::Seconds(5);

// An idle worker polls for twice the mean interval between recent operations if that is at most
// this long; otherwise it sleeps immediately.
constexpr std::chrono::microseconds kSpin{200};

// How many slots each device always keeps; two downloads need no more.
constexpr std::size_t kLeastSlots = 6;

// One thread would not be enough, because allocating memory on the CPU device takes about as long
// as receiving the bytes for it.
constexpr int kChoreThreads = 4;
// How many chores of one tenant may wait. Most chores take microseconds, so even this many are done
// quickly. The devices' queues do not delay them.
constexpr std::size_t kWaitingChores = 1024;

// Returns how much of a device's memory is available for buffers. CPU devices share the host's
// memory with each other and, if --memory-limit is a percentage, with messages, clients' regions
// and the rest of the process.
std::uint64_t FreeBytes(const Device& device, const std::vector<std::unique_ptr<Device>>& devices,
                        const Options& options) {
  std::uint64_t free = device.FreeBytes();
  if (device.info().backend != Backend::kCpu) return free;
  if (options.memory_limit.bytes == 0) free = options.LeftOfHost(free);
  const auto sharing = std::count_if(devices.begin(), devices.end(), [](const auto& other) {
    return other->info().backend == Backend::kCpu;
  });
  return free / static_cast<std::uint64_t>(sharing);
}

std::vector<BufferStore::DeviceLimit> DeviceLimits(
    const std::vector<std::unique_ptr<Device>>& devices, const Options& options) {
  std::vector<BufferStore::DeviceLimit> limits;
  for (const std::unique_ptr<Device>& device : devices) {
    limits.push_back(
        {device.get(), options.memory_limit.Resolve(FreeBytes(*device, devices, options))});
  }
  return limits;
}

std::vector<Device*> Pointers(const std::vector<std::unique_ptr<Device>>& devices) {
  std::vector<Device*> pointers;
  for (const std::unique_ptr<Device>& device : devices) pointers.push_back(device.get());
  return pointers;
}

}  // namespace

Core::Core(const Options& options, std::vector<std::unique_ptr<Device>> devices)
    : options_(options),
      devices_(std::move(devices)),
      host_memory_(options_.host_memory),
      streams_{Budget(options_.max_transfers), Budget(options_.max_transfers), Budget(kMaxImports)},
      shared_memory_(options_.shared_memory_limit),
      shared_regions_(kMaxSharedRegions),
      regions_(Pointers(devices_), shared_memory_, shared_regions_),
      tenants_(DeviceLimits(devices_, options_), {.default_ttl = options_.default_ttl,
                                                  .max_ttl = options_.max_ttl,
                                                  .idle_draft = options_.transfer_timeout,
                                                  .buffers = options_.MaxBuffers(),
                                                  .ranges = options_.max_ranges,
                                                  .foreign = Foreign()}),
      metrics_(ListStrategies(Pointers(devices_))),
      chores_(kChoreThreads, kWaitingChores) {}

std::function<absl::Status(std::string_view)> Core::Foreign() {
  if (options_.ring.empty()) return {};
  return [this](std::string_view name) { return home_->Check(name); };
}

absl::StatusOr<std::unique_ptr<Core>> Core::Make(const Options& options,
                                                 std::vector<std::unique_ptr<Device>> devices) {
  static_cast<void>(HostMemoryError());  // allocated now, while there is memory
  // The loops that are measured here are too small to share among threads.
  for (const std::unique_ptr<Device>& device : devices)
    PrepareThread(*device, /*shares_loops=*/false);
  for (const std::unique_ptr<Device>& device : devices) {
    const std::uint64_t free = FreeBytes(*device, devices, options);
    const std::uint64_t limit = options.memory_limit.Resolve(free);
    if (limit == 0) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "BAD_MEMORY_LIMIT",
          absl::StrCat("nothing is left for buffers of device ", device->info().name, ": ",
                       device->FreeBytes(), " bytes of its memory are free",
                       device->info().backend == Backend::kCpu
                           ? ", but --host-memory and --shared-memory-limit need all of them"
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
  }
  std::unique_ptr<Core> core(new Core(options, std::move(devices)));
  absl::StatusOr<std::unique_ptr<Access>> access = Access::Open(options.tokens, core->tenants_);
  if (!access.ok()) return access.status();
  core->access_ = *std::move(access);
  if (!options.ring.empty()) {
    absl::StatusOr<std::unique_ptr<Home>> home = Home::Open(options.ring, options.ring_name);
    if (!home.ok()) return home.status();
    core->home_ = *std::move(home);
  }
  if (!options.spans.empty())
    core->spans_ = std::make_unique<SpanFile>(options.spans, core->metrics_);
  for (const std::unique_ptr<Device>& device : core->devices_) {
    absl::StatusOr<Device*> first = core->FindDevice(device->info().name);
    if (!first.ok()) return first.status();
    if (*first != device.get()) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_DEVICE",
                       absl::StrCat("device ", device->info().name, " is named twice"));
    }
    const bool reserve = !options.tokens.empty();
    if (reserve) {
      if (absl::Status status = KeepRoom(*device); !status.ok()) return status;
    }
    auto state = std::make_unique<DeviceState>(
        options.ScratchLimit(core->tenants_.budget(*device).limit()), *device);
    bool first_stream = true;
    auto compute =
        Executor::Start(*device,
                        {.workers = options.workers,
                         .reserve = reserve,
                         .queue_length = options.queue,
                         .spin = kSpin,
                         .scratch = &state->scratch,
                         .shares_loops = true,
                         .overrun = device->info().backend == Backend::kCpu
                                        ? absl::Seconds(options.max_operation_seconds)
                                        : absl::InfiniteDuration()},
                        [&](Stream& stream) -> absl::Status {
                          if (!options.warm_up) return absl::OkStatus();
                          return WarmUp(stream, state->pace, std::exchange(first_stream, false));
                        });
    if (!compute.ok()) return compute.status();
    auto transfers =
        Executor::Start(*device, {.workers = options.transfer_workers,
                                  .queue_length = std::numeric_limits<std::size_t>::max()});
    if (!transfers.ok()) return transfers.status();
    absl::StatusOr<std::unique_ptr<Stream>> bridge = MakeStream(*device);
    if (!bridge.ok()) return bridge.status();
    absl::StatusOr<std::unique_ptr<Stream>> team = MakeLargeStream(*device);
    if (!team.ok()) return team.status();
    (*team)->SetScratchBudget(&state->scratch);
    absl::StatusOr<std::shared_ptr<SlotPool>> slots = SlotPool::Make(*device, kLeastSlots);
    if (!slots.ok()) return slots.status();
    state->slots = *std::move(slots);
    state->bridge = *std::move(bridge);
    state->team = *std::move(team);
    state->compute = *std::move(compute);
    state->transfers = *std::move(transfers);
    state->probe = std::make_unique<DeviceProbe>(*device);
    core->states_[device.get()] = std::move(state);
  }
  return core;
}

Device& Core::FirstDevice() const {
  const auto first = std::find_if(devices_.begin(), devices_.end(),
                                  [](const auto& device) { return !device->lost(); });
  return first == devices_.end() ? *devices_.front() : **first;
}

absl::StatusOr<Device*> Core::FindDevice(std::string_view name) const {
  const auto usable = [](Device& device) -> absl::StatusOr<Device*> {
    if (device.lost()) return DeviceLostError(device);
    return &device;
  };
  if (name.empty()) return usable(FirstDevice());
  for (const std::unique_ptr<Device>& device : devices_)
    if (device->info().name == name) return usable(*device);
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_DEVICE", "this server has no such device",
      {{"field", "device"},
       {"value", std::string(name)},
       {"valid",
        absl::StrJoin(devices_, ", ", [](std::string* out, const std::unique_ptr<Device>& device) {
          *out += device->info().name;
        })}});
}

void Core::Conclude(const CallRecord& call, const absl::Status& status,
                    absl::FunctionRef<std::string()> peer) try {
  metrics_.Count({.rpc = call.method,
                  .strategy = call.strategy,
                  .total = call.total(),
                  .begun = call.has_begun(),
                  .queue = call.queue(),
                  .run = call.run()},
                 status);
  if (call.tenant != nullptr) call.tenant->CountCall(absl::IsResourceExhausted(status));
  if (!status.ok()) LogFailedCall(call, peer(), status);
  if (call.total() > options_.slow_call) {
    metrics_.CountSlow(call.method);
    LogSlowCall(call, peer(), status.code());
  }
  if (call.trace.sampled && spans_ != nullptr) spans_->Add(call, status);
} catch (const std::bad_alloc&) {
  // The record of the call is lost for lack of memory; the call still ends.
}

void Core::FlushSpans(absl::Duration limit) {
  if (spans_ != nullptr) spans_->Flush(limit);
}

void Core::TrimSlots() {
  for (const auto& [device, state] : states_) state->slots->Trim();
}

Core::Bridge Core::BridgeTo(const Device& device) {
  DeviceState& state = *states_.at(&device);
  return {std::unique_lock(state.bridge_mutex), *state.bridge};
}

Core::Bridge Core::TeamStream(const Device& device) {
  DeviceState& state = *states_.at(&device);
  return {std::unique_lock(state.team_mutex), *state.team};
}

absl::Status Core::CheckSize(std::uint64_t bytes) const {
  if (bytes <= options_.max_message) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_MESSAGE",
                   "the message is larger than this server accepts",
                   {{"field", "message"},
                    {"value", absl::StrCat(bytes)},
                    {"limit", absl::StrCat(options_.max_message)}});
}

absl::Status Core::CheckHeader(std::size_t bytes) const {
  if (bytes <= kMostHeader) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_MESSAGE",
      "the message's fields other than data are too large",
      {{"field", "message"}, {"value", absl::StrCat(bytes)}, {"limit", absl::StrCat(kMostHeader)}});
}

absl::StatusOr<Charge> Core::TakeHostMemory(std::uint64_t bytes, std::string_view message,
                                            std::uint64_t held) {
  if (bytes > host_memory_.limit() - held)
    message = "the call needs more memory for its messages than the server has for all messages";
  return Charge::Take(host_memory_, bytes, "HOST_MEMORY_EXHAUSTED", message, held);
}

absl::StatusOr<Core::Accepted> Core::Accept(Tenant& tenant) {
  absl::StatusOr<Admission::Ticket> ticket = admission_.Enter();
  if (!ticket.ok()) return ticket.status();
  absl::StatusOr<Charge> call = tenant.BeginCall();
  if (!call.ok()) return call.status();
  return Accepted{*std::move(ticket), *std::move(call)};
}

absl::StatusOr<Core::StreamPlace> Core::TakeStream(StreamKind kind, Tenant& tenant) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, kStreamKinds> kTooMany = {{
      {"TOO_MANY_UPLOADS", "as many uploads are in progress as the server accepts"},
      {"TOO_MANY_DOWNLOADS", "as many downloads are in progress as the server accepts"},
      {"TOO_MANY_IMPORTS", "as many imports are in progress as the server accepts"},
  }};
  const auto& [reason, message] = kTooMany[static_cast<std::size_t>(kind)];
  Budget& streams = streams_[static_cast<std::size_t>(kind)];
  const std::uint64_t most =
      tenants_.several() ? std::max<std::uint64_t>(1, streams.limit() / 2) : kUnlimited;
  absl::StatusOr<Charge> own = tenant.BeginStream(kind, most, reason);
  if (!own.ok()) return own.status();
  absl::StatusOr<Charge> all = Charge::TakeOne(streams, reason, message);
  if (!all.ok()) return all.status();
  return StreamPlace{*std::move(own), *std::move(all)};
}

absl::StatusOr<Core::TransferPlace> Core::TakeTransfer(StreamKind kind, Tenant& tenant,
                                                       std::uint64_t memory) {
  absl::StatusOr<Charge> call = tenant.BeginCall();
  if (!call.ok()) return call.status();
  absl::StatusOr<StreamPlace> stream = TakeStream(kind, tenant);
  if (!stream.ok()) return stream.status();
  absl::StatusOr<Charge> messages =
      TakeHostMemory(memory, "there is no memory for another stream of messages");
  if (!messages.ok()) return messages.status();
  return TransferPlace{*std::move(call), *std::move(stream), *std::move(messages)};
}

absl::Duration Core::Patience(absl::Duration limit) const {
  return admission_.closed() ? std::min(limit, kDrainPause) : limit;
}

absl::Status Core::CheckPause(absl::Duration pause, absl::Duration limit, std::string_view reason,
                              std::string_view message) const {
  const absl::Duration patience = Patience(limit);
  if (pause <= patience) return absl::OkStatus();
  const std::string figure = absl::FormatDuration(patience);
  if (admission_.closed()) {
    return MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                     absl::StrCat("the server is stopping, and waits no longer than ", figure,
                                  " for a stream that makes no progress"),
                     {{"limit", figure}});
  }
  return MakeError(absl::StatusCode::kDeadlineExceeded, reason, message, {{"limit", figure}});
}

std::map<std::string_view, Core::Usage> Core::Budgets() const {
  const auto streams = [&](StreamKind kind) -> const Budget& {
    return streams_[static_cast<std::size_t>(kind)];
  };
  const auto usage = [](const Budget& budget) { return Usage{budget.limit(), budget.used()}; };
  std::map<std::string_view, Usage> budgets = {{"buffers", usage(tenants_.count())},
                                               {"downloads", usage(streams(StreamKind::kDownload))},
                                               {"host_memory", usage(host_memory_)},
                                               {"uploads", usage(streams(StreamKind::kUpload))}};
  if (!options_.shared_memory.empty()) {
    budgets["shared_memory"] = usage(shared_memory_);
    budgets["shared_regions"] = usage(shared_regions_);
  }
  if (!options_.import_from.empty()) budgets["imports"] = usage(streams(StreamKind::kImport));
  if (ConnectionTable* const all = connections_; all != nullptr)
    budgets["connections"] = {all->limit(), all->open()};
  return budgets;
}

absl::Duration Core::LongestWait(const Device& device, Executor::Counts counts) {
  if (device.lost()) return absl::ZeroDuration();
  const DeviceState& state = *states_.at(&device);
  return std::max({state.compute->StopOverdue(counts),
                   counts(absl::FromChrono(state.transfers->LongestRun())),
                   counts(absl::FromChrono(state.probe->Waiting()))});
}

bool Core::IsAnswering(const Device& device) const {
  constexpr std::chrono::seconds kOverdue{1};
  return states_.at(&device)->probe->Waiting() < kOverdue;
}

absl::Status HostMemoryError() {
  // Copying the status allocates nothing.
  static const absl::Status error =
      MakeError(absl::StatusCode::kResourceExhausted, "HOST_MEMORY_EXHAUSTED",
                "the server's host memory is exhausted");
  return error;
}

}  // namespace tessera
