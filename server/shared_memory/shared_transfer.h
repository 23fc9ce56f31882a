// Unary calls that move bytes between a device and a region of shared memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/buffers/arrival.h"
#include "server/buffers/shared_region.h"
#include "server/calls/unary_call.h"
#include "server/devices/devices.h"
#include "tessera/v1/shared_memory.pb.h"

namespace tessera {

// A transfer in pieces on the device's transfer workers. Between pieces, the transfer ends if its
// client has left, and lets other transfers run. The region stays mapped until the transfer ends,
// even if the region's connection closes.
class SharedTransfer : public UnaryCall, private Task {
 public:
  SharedTransfer(const CallParts& parts, const Devices& devices, const SharedRegions& regions,
                 std::string_view method, UnaryExchange& exchange, Metrics::Direction direction)
      : UnaryCall(parts, method, exchange),
        Task(exchange.caller().tenant->number()),
        devices_(devices),
        regions_(regions),
        direction_(direction) {}
  // Called once, on the thread on which the call arrived. The transfer counts as a stream of this
  // kind.
  void Start(const v1::RegionRange& range, StreamKind kind);

 protected:
  // The device, and the number of bytes to be moved.
  struct Extent {
    Device* device;
    std::uint64_t size;
  };
  const Devices& devices() const { return devices_; }
  // The beginning of the range that was passed to Start.
  char* memory() const { return memory_; }
  // The arrivals of the buffer's bytes, to which Open adds those that it needs.
  Awaited& awaited() { return awaited_; }

 private:
  // Whether Open and Close allocate or free memory. If so, they run on a thread of the chores.
  virtual bool Allocates() const = 0;
  // Finds or makes the buffer.
  virtual absl::StatusOr<Extent> Open() = 0;
  // Moves bytes [begin, begin + size) of the range.
  virtual absl::Status Move(Stream& stream, std::uint64_t begin, std::uint64_t size) = 0;
  // Called when every byte has been moved: completes the response.
  virtual absl::Status Close() { return absl::OkStatus(); }
  // Called last: releases the buffer.
  virtual void Release(const absl::Status& status) = 0;

  absl::Status Check(const v1::RegionRange& range, StreamKind kind);
  void Begin();
  // Hands the transfer to the device's workers.
  void Queue();
  void Run(Stream& stream) final;
  void Refuse(const absl::Status& status) final { Conclude(status); }
  void Finish() {
    Conclude(Guarded([&] { return Close(); }));
  }
  // The call may be destroyed before this returns. The same is true of Begin, Run and Finish.
  void Conclude(const absl::Status& status);
  void OnCancel() final;

  const Devices& devices_;
  const SharedRegions& regions_;
  const Metrics::Direction direction_;
  Awaited awaited_;
  CallLimits::StreamPlace stream_;
  std::shared_ptr<const SharedRegion> region_;
  char* memory_ = nullptr;
  std::uint64_t size_ = 0;
  std::uint64_t moved_ = 0;
  absl::Time submitted_;  // when the call last began to wait for a worker
  std::atomic<Executor*> executor_{nullptr};
  std::atomic<bool> cancelled_{false};
};

// UploadShared.
class SharedUpload final : public SharedTransfer {
 public:
  SharedUpload(const CallParts& parts, const Devices& devices, const SharedRegions& regions,
               UnaryExchangeOf<v1::UploadSharedRequest, v1::UploadSharedResponse>& exchange)
      : SharedTransfer(parts, devices, regions, "UploadShared", exchange,
                       Metrics::Direction::kUpload),
        request_(exchange.request()),
        response_(exchange.response()) {}

 private:
  bool Allocates() const override { return request_.has_spec(); }
  absl::StatusOr<Extent> Open() override;
  absl::Status Move(Stream& stream, std::uint64_t begin, std::uint64_t size) override;
  // Copies elements of BOOL. The client may change its memory at any time, so the elements are
  // checked in a copy of the server's.
  static absl::Status CopyBools(Stream& stream, std::byte* to, const char* from, std::uint64_t size,
                                std::uint64_t offset);
  absl::Status Close() override;
  void Release(const absl::Status& status) override;

  const v1::UploadSharedRequest& request_;
  v1::UploadSharedResponse& response_;
  std::shared_ptr<Draft> draft_;
};

// DownloadShared.
class SharedDownload final : public SharedTransfer {
 public:
  SharedDownload(const CallParts& parts, const Devices& devices, const SharedRegions& regions,
                 UnaryExchangeOf<v1::DownloadSharedRequest, v1::DownloadSharedResponse>& exchange)
      : SharedTransfer(parts, devices, regions, "DownloadShared", exchange,
                       Metrics::Direction::kDownload),
        request_(exchange.request()),
        response_(exchange.response()) {}

 private:
  bool Allocates() const override { return false; }
  absl::StatusOr<Extent> Open() override;
  absl::Status Move(Stream& stream, std::uint64_t begin, std::uint64_t size) override;
  void Release(const absl::Status& status) override;

  const v1::DownloadSharedRequest& request_;
  v1::DownloadSharedResponse& response_;
  std::shared_ptr<const Buffer> buffer_;
};

}  // namespace tessera
