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

absl::StatusOr<std::unique_ptr<SharedMemoryService>> SharedMemoryService::Open(
    const CallParts& parts, const Devices& devices, const Tenants& tenants, SharedRegions& regions,
    const Options& options) {
  const Access& access = parts.access;
  absl::StatusOr<std::unique_ptr<RegionListener>> listener = RegionListener::Open(
      options.shared_memory, options.socket_group, kMaxSharedRegions + kHandshakes,
      {.admits = [&access](uid_t user) { return access.KnowsUser(user); },
       .shares = [&tenants](uid_t user) { return tenants.several() && !IsOwnUser(user); },
       .sees_all = !access.restricted()},
      regions, parts.chores);
  if (!listener.ok()) return listener.status();
  return std::unique_ptr<SharedMemoryService>(
      new SharedMemoryService(parts, devices, regions, *std::move(listener)));
}

void SharedMemoryService::Serve(CallQueues& queues) {
  AnswerCalls(queues, parts_, *this, &SharedMemoryService::RequestGetSharedMemory,
              "GetSharedMemory", Effect::kNone, Thread::kQueue,
              &SharedMemoryService::GetSharedMemory);
  AcceptUnary<v1::UploadSharedRequest, v1::UploadSharedResponse>(
      queues, *this, &SharedMemoryService::RequestUploadShared, AdmitTo(parts_, "UploadShared"),
      [this](auto& exchange) {
        exchange.Serve(std::make_unique<SharedUpload>(parts_, devices_, regions_, exchange))
            .Start(exchange.request().source(), StreamKind::kUpload);
      });
  AcceptUnary<v1::DownloadSharedRequest, v1::DownloadSharedResponse>(
      queues, *this, &SharedMemoryService::RequestDownloadShared, AdmitTo(parts_, "DownloadShared"),
      [this](auto& exchange) {
        exchange.Serve(std::make_unique<SharedDownload>(parts_, devices_, regions_, exchange))
            .Start(exchange.request().target(), StreamKind::kDownload);
      });
}

absl::Status SharedMemoryService::GetSharedMemory(const Caller& caller,
                                                  const v1::GetSharedMemoryRequest&,
                                                  v1::GetSharedMemoryResponse& response) {
  response.set_socket_path(listener_->path());
  response.set_limit_bytes(parts_.limits.shared_memory().limit());
  // Only an admin sees what other tenants use.
  if (caller.sees_all()) response.set_used_bytes(parts_.limits.shared_memory().used());
  return absl::OkStatus();
}

}  // namespace tessera
