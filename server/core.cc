#include "server/core.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/error.h"
#include "server/convert.h"
#include "server/log.h"

namespace tessera {
namespace {

// Long enough for the next request of a caller who waits for each answer, short enough not to
// matter when idle.
constexpr std::chrono::microseconds kSpin{40};

// Two copies at once keep a PCIe link busy; the streams of more uploads take turns.
constexpr int kTransferWorkers = 2;

std::vector<BufferStore::Place> Places(const std::vector<std::unique_ptr<Device>>& devices,
                                       const MemoryLimit& limit) {
  std::vector<BufferStore::Place> places;
  for (const std::unique_ptr<Device>& device : devices) {
    places.push_back({device.get(), limit.Resolve(device->FreeBytes())});
  }
  return places;
}

}  // namespace

Core::Core(const Options& options, std::vector<std::unique_ptr<Device>> devices)
    : options_(options),
      devices_(std::move(devices)),
      store_(Places(devices_, options_.memory_limit), {.default_ttl = options_.default_ttl,
                                                       .max_ttl = options_.max_ttl,
                                                       .idle_draft = options_.upload_timeout}) {}

absl::StatusOr<std::unique_ptr<Core>> Core::Make(const Options& options,
                                                 std::vector<std::unique_ptr<Device>> devices) {
  std::unique_ptr<Core> core(new Core(options, std::move(devices)));
  for (const std::unique_ptr<Device>& device : core->devices_) {
    absl::StatusOr<Device*> first = core->FindDevice(device->info().name);
    if (!first.ok()) return first.status();
    if (*first != device.get()) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_DEVICE",
                       absl::StrCat("device ", device->info().name, " is named twice"));
    }
    auto compute = Executor::Start(*device, options.workers, options.queue, kSpin);
    if (!compute.ok()) return compute.status();
    auto transfers =
        Executor::Start(*device, kTransferWorkers, std::numeric_limits<std::size_t>::max(),
                        std::chrono::microseconds(0));
    if (!transfers.ok()) return transfers.status();
    core->workers_[device.get()] = {*std::move(compute), *std::move(transfers)};
  }
  return core;
}

absl::StatusOr<Device*> Core::FindDevice(std::string_view name) const {
  for (const std::unique_ptr<Device>& device : devices_) {
    if (!name.empty() && device->info().name != name) continue;
    if (device->lost()) return DeviceLostError(*device);
    return device.get();
  }
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_DEVICE", "this server has no such device",
      {{"field", "device"},
       {"value", std::string(name)},
       {"valid",
        absl::StrJoin(devices_, ", ", [](std::string* out, const std::unique_ptr<Device>& device) {
          *out += device->info().name;
        })}});
}

absl::Status Core::CheckSize(const google::protobuf::Message& message) const {
  const std::size_t size = message.ByteSizeLong();
  if (size <= options_.max_message) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_MESSAGE",
                   "the message is larger than this server accepts",
                   {{"field", "message"},
                    {"value", absl::StrCat(size)},
                    {"limit", absl::StrCat(options_.max_message)}});
}

void Finish(std::string_view method, grpc::CallbackServerContext& context,
            grpc::ServerUnaryReactor& reactor, const absl::Status& status) {
  if (!status.ok()) LogFailedCall(method, context.peer(), status);
  reactor.Finish(ToGrpc(status));
}

absl::Status HostMemoryError() {
  return MakeError(absl::StatusCode::kResourceExhausted, "HOST_MEMORY_EXHAUSTED",
                   "the server's host memory is exhausted");
}

}  // namespace tessera
