// The Download method.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/core.h"
#include "server/live_calls.h"
#include "tessera/v1/buffer.grpc.pb.h"

namespace tessera {

// One stream of data out of a buffer. A chunk leaves the device only when the one before is on its
// way.
class DownloadCall final : public grpc::ServerWriteReactor<v1::DownloadResponse>, private Task {
 public:
  DownloadCall(Core& core, LiveCalls<DownloadCall>& live, grpc::CallbackServerContext& context,
               const v1::DownloadRequest& request)
      : core_(core), live_(live), context_(context), request_(request) {}

  // Once the service knows the call.
  void Begin();

  void OnWriteDone(bool ok) override;

  void OnCancel() override;

  void OnDone() override;

  // Safe at any time. gRPC ends the write, and thereby the call.
  void EndIfIdle(absl::Time now);

 private:
  absl::Status Open();

  void Next();

  void Run(Stream& stream) override;

  void Refuse(const absl::Status& status) override { End(status); }

  absl::Status Fill(Stream& stream);

  void End(const absl::Status& status);

  Core& core_;
  LiveCalls<DownloadCall>& live_;
  grpc::CallbackServerContext& context_;
  const v1::DownloadRequest& request_;
  Admission::Ticket ticket_;
  Charge stream_;
  Charge memory_;
  Executor* executor_ = nullptr;
  std::shared_ptr<const Buffer> buffer_;
  std::uint64_t position_ = 0;
  std::uint64_t end_ = 0;
  v1::DownloadResponse message_;
  // Nanoseconds of SteadyNow while gRPC sends a message, else 0.
  std::atomic<std::int64_t> writing_since_{0};
  std::atomic<bool> given_up_{false};
};

}  // namespace tessera
