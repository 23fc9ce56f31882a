// Transfers through memory that clients on this host share with the server.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/calls/call_parts.h"
#include "server/calls/unary_exchange.h"
#include "server/devices/devices.h"
#include "server/shared_memory/region_listener.h"
#include "tessera/v1/shared_memory.grpc.pb.h"

namespace tessera {

using SharedMemoryServiceBase = v1::SharedMemoryService::WithRawMethod_GetSharedMemory<
    v1::SharedMemoryService::WithRawMethod_UploadShared<
        v1::SharedMemoryService::WithRawMethod_DownloadShared<v1::SharedMemoryService::Service>>>;

// Thread safe. The parts of the server must outlive the service, and the service must outlive its
// calls.
class SharedMemoryService final : public SharedMemoryServiceBase {
 public:
  // Accepts regions at --shared-memory. Returns UNAVAILABLE / CANNOT_LISTEN {address} if it cannot
  // listen there.
  static absl::StatusOr<std::unique_ptr<SharedMemoryService>> Open(const CallParts& parts,
                                                                   const Devices& devices,
                                                                   const Tenants& tenants,
                                                                   SharedRegions& regions,
                                                                   const Options& options);

  // Called once the server has been built.
  void Serve(CallQueues& queues);

  // Accepts no more regions, and removes the socket.
  void Close() { listener_->Close(); }
  // Removes the socket for a process that ends without Close.
  void RemoveSocketFile() { listener_->RemoveSocketFile(); }

 private:
  absl::Status GetSharedMemory(const Caller& caller, const v1::GetSharedMemoryRequest& request,
                               v1::GetSharedMemoryResponse& response);

  SharedMemoryService(const CallParts& parts, const Devices& devices, SharedRegions& regions,
                      std::unique_ptr<RegionListener> listener)
      : parts_(parts), devices_(devices), regions_(regions), listener_(std::move(listener)) {}

  const CallParts parts_;
  const Devices& devices_;
  SharedRegions& regions_;
  const std::unique_ptr<RegionListener> listener_;
};

}  // namespace tessera
