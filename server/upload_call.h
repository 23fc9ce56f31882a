// The Upload method.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/core.h"
#include "server/live_calls.h"
#include "tessera/v1/buffer.grpc.pb.h"

namespace tessera {

// One stream of data into a draft. gRPC, the chores and the transfer worker take turns with it: a
// message is read, copied by the worker, and only then the next one is read, so that a stream never
// holds more than one message, and none while it waits.
class UploadCall final : public grpc::ServerReadReactor<grpc::ByteBuffer>, private Task {
 public:
  UploadCall(Core& core, LiveCalls<UploadCall>& live, grpc::CallbackServerContext& context,
             grpc::ByteBuffer& response)
      : core_(core), live_(live), context_(context), response_(response) {}

  // Once the service knows the call.
  void Begin();

  void OnReadDone(bool ok) override;

  void OnSendInitialMetadataDone(bool ok) override;

  void OnDone() override;

  // Safe at any time: while a call waits for a message no one else ends it.
  void EndIfIdle(absl::Time now);

 private:
  void Read();

  // Parses and checks a message and sends it on its way; the first one opens the buffer.
  absl::Status Accept();

  absl::Status Open();

  // A message whose buffer is known: its data goes to the device.
  absl::Status Proceed();

  void Run(Stream& stream) override;

  void Refuse(const absl::Status& status) override;

  absl::Status CheckChecksum(std::optional<std::uint32_t>& checksum) const;

  // The client has sent all it wants to send.
  absl::Status Close();

  std::shared_ptr<Draft> draft();

  // By the one who has the turn, once. The call may be gone on return.
  void End(const absl::Status& status);

  Core& core_;
  LiveCalls<UploadCall>& live_;
  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer& response_;
  Admission::Ticket ticket_;
  Charge stream_;
  Charge memory_;
  // Nanoseconds of SteadyNow while gRPC reads a message, else 0. Whoever sets it to 0 has the turn.
  std::atomic<std::int64_t> reading_since_{0};

  // All of these belong to the one who has the turn, bytes_ to gRPC while it reads; draft_ may be
  // read by others, with its mutex.
  grpc::ByteBuffer bytes_;
  std::optional<v1::UploadRequest> message_;
  std::string name_;
  std::uint64_t version_ = 0;
  v1::BufferSpec spec_;
  bool creates_ = false;
  std::mutex draft_mutex_;
  std::shared_ptr<Draft> draft_;
  std::uint64_t position_ = 0;
  std::uint64_t size_ = 0;  // of the message's data
  void* memory_of_data_ = nullptr;
  std::uint64_t received_ = 0;
  std::optional<std::uint32_t> buffer_checksum_;
};

}  // namespace tessera
