// Transfers through memory that clients on this host share with the server.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/calls/unary_exchange.h"
#include "server/core.h"
#include "server/shared_memory/region_listener.h"
#include "tessera/v1/shared_memory.grpc.pb.h"

namespace tessera {

using SharedMemoryServiceBase = v1::SharedMemoryService::WithRawMethod_GetSharedMemory<
    v1::SharedMemoryService::WithRawMethod_UploadShared<
        v1::SharedMemoryService::WithRawMethod_DownloadShared<v1::SharedMemoryService::Service>>>;

// Thread safe. The core must outlive the service, and the service must outlive its calls.
class SharedMemoryService final : public SharedMemoryServiceBase {
 public:
  // Accepts regions at --shared-memory. Returns UNAVAILABLE / CANNOT_LISTEN {address} if it cannot
  // listen there.
  static absl::StatusOr<std::unique_ptr<SharedMemoryService>> Open(Core& core);

  // Called once the server has been built.
  void Serve(CallQueues& queues);

  // Accepts no more regions, and removes the socket.
  void Close() { listener_->Close(); }
  // Removes the socket for a process that ends without Close.
  void RemoveSocketFile() { listener_->RemoveSocketFile(); }

 private:
  SharedMemoryService(Core& core, std::unique_ptr<RegionListener> listener)
      : core_(core), listener_(std::move(listener)) {}

  Core& core_;
  const std::unique_ptr<RegionListener> listener_;
};

}  // namespace tessera
