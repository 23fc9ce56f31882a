// The Upload method.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/calls/call_parts.h"
#include "server/devices/devices.h"
#include "server/rpc/live_calls.h"
#include "server/rpc/stream_call.h"
#include "server/transfers/upload_message.h"
#include "tessera/v1/buffer.grpc.pb.h"

namespace tessera {

// One stream of data into a draft. At most one thread at a time has the turn: it works on one
// message, the message in hand, while gRPC reads the next one. A stream holds at most two messages.
// It holds a second message only while there is host memory for that message, and holds no message
// while it is waiting for the client.
class UploadCall final : public StreamCall, private Task {
 public:
  UploadCall(const CallParts& parts, const Devices& devices, const Caller& caller,
             LiveCalls<UploadCall>& live, StreamExchange& exchange)
      : StreamCall(exchange),
        Task(caller.tenant->number()),
        parts_(parts),
        devices_(devices),
        tenant_(*caller.tenant),
        sees_all_(caller.sees_all()),
        live_(live),
        peer_(context().peer()),
        record_{.method = "Upload",
                .strategy = "",
                .tenant = &tenant_,
                .trace = trace(),
                .accepted = SteadyNow()} {}

  // Called once the service has registered the call.
  void Begin();
  void OnReadDone(bool ok) override;
  void OnSendInitialMetadataDone(bool ok) override;
  void OnDone() override;
  // Ends the call if it has been idle for too long. Safe at any time, because nothing else ends a
  // call that is waiting for a message.
  void EndIfIdle(absl::Time now);

 private:
  // The state of the message after the one in hand.
  enum class Next { kNone, kReading, kHere, kNoMore };

  // The following functions are only for the thread that has the turn.

  // Returns the errors of CallLimits::CheckPause.
  absl::Status CheckPause(absl::Time now) const;
  // Finishes the message in hand. Continues with the next one if it is here; otherwise gives the
  // turn back.
  void PassOn();
  // Begins work on the next message, or ends the stream if there is none.
  void GoOn();
  // Whether the next message is here.
  bool IsHere();
  // Makes the next message the one in hand. REQUIRES: it is here.
  absl::Status Take();
  // Lets gRPC read the next message while there is one in hand, unless host memory is getting
  // short.
  void ReadAhead();
  // Finds or makes the buffer that the first message names.
  absl::Status Open();
  // Sends the message in hand to the device's workers.
  absl::Status Hand();
  // Copies the message in hand to the device, and then those that have arrived in the meantime.
  void Run(Stream& stream) override;
  void Refuse(const absl::Status& status) override { End(status); }
  // Checks that the message in hand belongs to this upload, except for its data.
  absl::Status CheckTarget() const;
  // Checks the message in hand and begins to copy its data to the device.
  absl::Status Copy(Stream& stream);
  // Checks the bytes of the message in hand, and adds their checksum to the current write's.
  absl::Status CheckData();
  absl::Status CheckChecksum(std::optional<std::uint32_t>& checksum) const;
  // Waits until the copies have arrived, and counts their bytes as written.
  absl::Status EndWrite(Stream& stream);
  // Completes the upload once the client has sent everything.
  absl::Status Close();
  // Called once. The call may be destroyed before this returns.
  void End(const absl::Status& status);

  const CallParts& parts_;
  const Devices& devices_;
  Tenant& tenant_;
  const bool sees_all_;
  LiveCalls<UploadCall>& live_;
  const std::string peer_;  // kept, because gRPC forgets it when the connection breaks
  CallRecord record_;
  grpc::ByteBuffer response_;
  CallLimits::Accepted accepted_;
  CallLimits::StreamPlace place_;  // memory: for the message in hand, or the one being awaited
  Charge ahead_;                   // for the next message

  std::mutex mutex_;
  // Whether a thread has the turn. Once the call has ended, the turn is never given back.
  bool busy_ = true;
  Next next_ = Next::kNone;
  // When data last arrived or could have arrived, plus the time for which the server has made
  // messages wait since then. Only the thread that has the turn uses it. While no thread has the
  // turn, it is guarded by the mutex.
  absl::Time moved_ = SteadyNow();

  // Only the thread that has the turn uses these. While gRPC is reading, bytes_ belongs to gRPC.
  grpc::ByteBuffer bytes_;
  UploadMessage message_;  // the message in hand
  std::string name_;
  std::uint64_t version_ = 0;
  v1::BufferSpec spec_;
  bool creates_ = false;
  std::shared_ptr<Draft> draft_;
  std::uint64_t position_ = 0;  // where data without an offset goes
  std::uint64_t received_ = 0;
  std::optional<std::uint32_t> buffer_checksum_;
  // The data of consecutive messages, which Run copies as one write of the store.
  struct Write {
    std::uint64_t begin = 0;
    std::uint64_t size = 0;
    std::optional<std::uint32_t> checksum;
    bool failed = false;
  };
  std::optional<Write> write_;
  std::uint64_t arrived_ = 0;  // bytes that Run has copied to the device
  absl::Time submitted_;       // when the call last began to wait for a worker
};

}  // namespace tessera
