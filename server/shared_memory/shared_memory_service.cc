#include "server/shared_memory/shared_memory_service.h"

#include <utility>

#include "server/calls/unary_call.h"
#include "server/net/unix_socket.h"
#include "server/shared_memory/shared_transfer.h"

namespace tessera {
namespace {

// The maximum number of connections that are registering a region, in addition to those that have
// one.
constexpr std::size_t kHandshakes = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMemoryService>> SharedMemoryService::Open(Core& core) {
  const Options& options = core.options();
  absl::StatusOr<std::unique_ptr<RegionListener>> listener = RegionListener::Open(
      options.shared_memory, options.socket_group, kMaxSharedRegions + kHandshakes,
      {.admits = [&core](uid_t user) { return core.access().KnowsUser(user); },
       .shares = [&core](uid_t user) { return core.tenants().several() && !IsOwnUser(user); },
       .sees_all = !core.access().restricted()},
      core.regions(), core.chores());
  if (!listener.ok()) return listener.status();
  return std::unique_ptr<SharedMemoryService>(new SharedMemoryService(core, *std::move(listener)));
}

void SharedMemoryService::Serve(CallQueues& queues) {
  AcceptUnary<v1::GetSharedMemoryRequest, v1::GetSharedMemoryResponse>(
      queues, *this, &SharedMemoryService::RequestGetSharedMemory,
      AdmitTo(core_, "GetSharedMemory"), [this](auto& exchange) {
        Answer(core_, "GetSharedMemory", Effect::kNone, exchange, [&](const Caller& caller) {
          v1::GetSharedMemoryResponse& answer = exchange.response();
          answer.set_socket_path(listener_->path());
          answer.set_limit_bytes(core_.shared_memory().limit());
          // Only an admin sees what other tenants use.
          if (caller.sees_all()) answer.set_used_bytes(core_.shared_memory().used());
          return absl::OkStatus();
        });
      });
  AcceptUnary<v1::UploadSharedRequest, v1::UploadSharedResponse>(
      queues, *this, &SharedMemoryService::RequestUploadShared, AdmitTo(core_, "UploadShared"),
      [this](auto& exchange) {
        auto call = std::make_unique<SharedUpload>(core_, exchange);
        SharedUpload& started = *call;
        exchange.Serve(std::move(call));
        started.Start(exchange.request().source(), StreamKind::kUpload);
      });
  AcceptUnary<v1::DownloadSharedRequest, v1::DownloadSharedResponse>(
      queues, *this, &SharedMemoryService::RequestDownloadShared, AdmitTo(core_, "DownloadShared"),
      [this](auto& exchange) {
        auto call = std::make_unique<SharedDownload>(core_, exchange);
        SharedDownload& started = *call;
        exchange.Serve(std::move(call));
        started.Start(exchange.request().target(), StreamKind::kDownload);
      });
}

}  // namespace tessera
