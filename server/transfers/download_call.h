// The Download method.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/buffers/arrival.h"
#include "server/buffers/slots.h"
#include "server/calls/call_parts.h"
#include "server/devices/devices.h"
#include "server/rpc/live_calls.h"
#include "server/rpc/stream_call.h"
#include "tessera/v1/buffer.grpc.pb.h"

namespace tessera {

// One stream of data from a buffer. The device copies a chunk into a slot, and gRPC sends it from
// there while the next chunks fill the other slots. A slot is not filled again until gRPC has
// released it. The slots therefore bound the data that is on its way to the client. Host memory is
// charged for them.
class DownloadCall final : public StreamCall,
                           public std::enable_shared_from_this<DownloadCall>,
                           private Task {
 public:
  DownloadCall(const CallParts& parts, const Devices& devices, const Caller& caller,
               LiveCalls<DownloadCall>& live, StreamExchange& exchange)
      : StreamCall(exchange),
        Task(caller.tenant->number()),
        parts_(parts),
        devices_(devices),
        tenant_(*caller.tenant),
        sees_all_(caller.sees_all()),
        live_(live),
        peer_(context().peer()),
        record_{.method = "Download",
                .strategy = "",
                .tenant = &tenant_,
                .trace = trace(),
                .accepted = SteadyNow()} {}

  // Called once the service has registered the call.
  void Begin() { StartRead(&message_); }
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;
  // Ends the call if it has been idle for too long. Safe at any time: gRPC ends the current write,
  // which ends the call.
  void EndIfIdle(absl::Time now);

 private:
  // The next action of the thread that has called Decide.
  struct Step {
    bool fetch = false;
    bool write = false;
    bool end = false;
    bool nothing() const { return !fetch && !write && !end; }
  };
  // A slot in use, until gRPC has released it.
  struct Lease;
  absl::Status Open();
  // REQUIRES: mutex_ is held.
  Step Decide();
  // The call may be destroyed before this returns.
  void Do(Step step);
  // Fetches chunks.
  void Run(Stream& stream) override;
  void Refuse(const absl::Status& status) override;
  // Fetches the next chunk as a message.
  absl::Status Fetch(Stream& stream, grpc::ByteBuffer& message);
  // Called when the bytes of a restored buffer have arrived.
  void Arrived(const absl::Status& status);
  // Called when a fetch has ended.
  Step Fetched(const absl::Status& status, grpc::ByteBuffer& message);
  // Called when the client accepts no more messages.
  void Break();
  // Called when gRPC has released a slot.
  void OnSlotFree();
  void End();

  const CallParts& parts_;
  const Devices& devices_;
  Tenant& tenant_;
  const bool sees_all_;
  LiveCalls<DownloadCall>& live_;
  const std::string peer_;  // kept, because gRPC forgets it when the connection breaks
  CallRecord record_;
  v1::DownloadRequest request_;
  CallLimits::Accepted accepted_;
  CallLimits::StreamPlace place_;
  Executor* executor_ = nullptr;
  std::shared_ptr<const Buffer> buffer_;
  Awaited awaited_;
  std::uint64_t end_ = 0;

  // Used only by the fetching thread.
  v1::DownloadResponse header_;  // header of the next message
  std::uint64_t position_ = 0;
  absl::Time submitted_;  // when the call last began to wait for a worker

  grpc::ByteBuffer message_;  // used by gRPC during a read or write

  std::mutex mutex_;
  bool opening_ = true;    // true until Open has found the data to fetch
  bool fetching_ = false;  // the device's workers are fetching, or the buffer's bytes are awaited
  bool writing_ = false;   // gRPC is writing
  bool done_ = false;      // nothing is left to fetch
  bool broken_ = false;    // the client accepts no more messages
  bool over_ = false;
  int slots_ = 0;                          // number of slots in use
  absl::Time moved_ = SteadyNow();         // when a write last began or ended
  absl::Status status_;                    // the status with which the call ends
  absl::Status given_up_;                  // the error if the client reads nothing for too long
  std::vector<grpc::ByteBuffer> fetched_;  // chunks to write, in order
};

}  // namespace tessera
