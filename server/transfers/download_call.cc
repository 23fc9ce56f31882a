#include "server/transfers/download_call.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "grpc/grpc.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "kernels/client_and_server/crc32c.h"
#include "kernels/device/profiler_range.h"
#include "server/calls/buffer_messages.h"
#include "server/rpc/convert.h"
#include "server/rpc/message_memory.h"

namespace tessera {
namespace {

using absl::StatusCode;

// The number of slots: one that gRPC is sending, one that is waiting to be sent, and one that the
// device is filling.
constexpr int kSlots = 3;

// How many chunks a stream fetches before it lets other streams run.
constexpr int kChunksARun = 16;

// Serialises a DownloadResponse up to the bytes of the field `data`, which is the last one.
std::string WithDataOf(const v1::DownloadResponse& header, std::uint64_t size) {
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  google::protobuf::io::CodedOutputStream out(&stream);
  header.SerializeToCodedStream(&out);
  constexpr std::uint32_t kLengthDelimited = 2;
  out.WriteTag(v1::DownloadResponse::kDataFieldNumber << 3 | kLengthDelimited);
  out.WriteVarint64(size);
  out.Trim();
  return bytes;
}

}  // namespace

struct DownloadCall::Lease {
  Lease(std::weak_ptr<DownloadCall> c, Slot s) : call(std::move(c)), slot(std::move(s)) {}
  static void End(void* lease) {
    const std::weak_ptr<DownloadCall> call = static_cast<Lease*>(lease)->call;
    delete static_cast<Lease*>(lease);
    if (const std::shared_ptr<DownloadCall> alive = call.lock()) alive->OnSlotFree();
  }
  const std::weak_ptr<DownloadCall> call;
  const Slot slot;
};

void DownloadCall::OnReadDone(bool ok) {
  absl::Status status = Guarded([&]() -> absl::Status {
    if (ok) RETURN_IF_ERROR(parts_.limits.CheckSize(message_.Length()));
    const std::optional<MessageBound> header =
        ok ? MessageLayout::Of<v1::DownloadRequest>().Bound(message_) : std::nullopt;
    if (header.has_value()) RETURN_IF_ERROR(parts_.limits.CheckHeader(header->bytes));
    if (!header.has_value() ||
        !grpc::SerializationTraits<v1::DownloadRequest>::Deserialize(&message_, &request_).ok()) {
      return NoMessage("Download");
    }
    return Open();
  });
  const bool waits = status.ok() && !awaited_.empty();
  Step step;
  {
    const std::lock_guard lock(mutex_);
    opening_ = false;
    fetching_ = waits;
    if (!broken_) {
      done_ = !status.ok();
      status_ = std::move(status);
    }
    step = Decide();
  }
  if (waits) {
    awaited_.Then(
        [self = shared_from_this()](const absl::Status& arrived) { self->Arrived(arrived); });
  } else {
    Do(step);
  }
}

void DownloadCall::Arrived(const absl::Status& status) {
  Step step;
  {
    const std::lock_guard lock(mutex_);
    fetching_ = false;
    if (!status.ok() && !broken_) {
      done_ = true;
      status_ = status;
    }
    step = Decide();
  }
  Do(step);
}

void DownloadCall::OnWriteDone(bool ok) {
  message_.Clear();
  Step step;
  {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    moved_ = SteadyNow();
    if (ok) step = Decide();
  }
  if (ok) {
    Do(step);
  } else {
    Break();
  }
}

void DownloadCall::OnCancel() { Break(); }

void DownloadCall::OnDone() {
  accepted_ = {};  // a slot that gRPC still has may make the call outlive the server
  live_.Remove(*this);
}

void DownloadCall::EndIfIdle(absl::Time now) {
  grpc_call* call = nullptr;
  {
    const std::lock_guard lock(mutex_);
    // A call with neither a write nor a fetch is waiting for gRPC to release a slot.
    const bool waits = !over_ && (writing_ || !fetching_);
    if (!waits || !given_up_.ok()) return;
    given_up_ =
        parts_.limits.CheckPause(now - moved_, "DOWNLOAD_IDLE",
                                 "the client has read nothing for longer than the server waits");
    if (given_up_.ok()) return;
    call = context().c_call();
    grpc_call_ref(call);
  }
  // The mutex is not held, because gRPC may call back into this call. From here on, the call and
  // its context may end at any time.
  grpc_call_cancel(call, nullptr);
  grpc_call_unref(call);
}

absl::Status DownloadCall::Open() {
  ASSIGN_OR_RETURN(accepted_, parts_.limits.Accept(tenant_));
  ASSIGN_OR_RETURN(place_,
                   parts_.limits.TakeStream(StreamKind::kDownload, tenant_, kSlots * Slot::kBytes));
  ASSIGN_OR_RETURN(BufferInfo info,
                   tenant_.store().Find(request_.name(), request_.version(), &awaited_));
  buffer_ = info.buffer;
  const std::uint64_t size = buffer_->type().bytes();
  if (request_.offset() > size) {
    return MakeError(StatusCode::kInvalidArgument, "BAD_RANGE",
                     "the download begins beyond the end of the buffer",
                     {{"offset", absl::StrCat(request_.offset())}, {"limit", absl::StrCat(size)}});
  }
  position_ = request_.offset();
  const std::uint64_t rest = size - position_;
  end_ = position_ + (request_.limit() == 0 ? rest : std::min(request_.limit(), rest));
  SetBuffer(info, header_.mutable_buffer());
  executor_ = &devices_.transfers(buffer_->device());
  return absl::OkStatus();
}

DownloadCall::Step DownloadCall::Decide() {
  Step step;
  if (over_ || opening_) return step;
  if (!writing_ && !fetched_.empty()) {
    message_.Swap(&fetched_.front());
    fetched_.erase(fetched_.begin());
    writing_ = step.write = true;
    moved_ = SteadyNow();
  }
  if (!fetching_ && !done_ && slots_ < kSlots) fetching_ = step.fetch = true;
  if (!fetching_ && !writing_ && done_) over_ = step.end = true;
  return step;
}

void DownloadCall::Do(Step step) {
  if (step.fetch) {
    submitted_ = SteadyNow();
    if (const absl::Status status = executor_->Submit(*this); !status.ok()) {
      grpc::ByteBuffer none;
      step.end = Fetched(status, none).end;
    }
  }
  if (step.write) StartWrite(&message_);
  if (step.end) End();
}

void DownloadCall::Run(Stream& stream) {
  const ProfilerRange range("Download");
  record_.waited += SteadyNow() - submitted_;
  bool fetch = true;
  for (int chunk = 1; fetch; ++chunk) {
    grpc::ByteBuffer message;
    const absl::Status status = Guarded([&] { return Fetch(stream, message); });
    Step step = Fetched(status, message);
    fetch = step.fetch && chunk < kChunksARun && executor_->waiting() == 0;
    if (fetch) step.fetch = false;
    // If nothing is left to do, another thread may have ended the call.
    if (!step.nothing()) Do(step);
  }
}

void DownloadCall::Refuse(const absl::Status& status) {
  grpc::ByteBuffer none;
  const Step step = Fetched(status, none);
  if (!step.nothing()) Do(step);
}

absl::Status DownloadCall::Fetch(Stream& stream, grpc::ByteBuffer& message) {
  const std::uint64_t size = std::min<std::uint64_t>(end_ - position_, Slot::kBytes);
  header_.set_offset(position_);
  if (size > 0) {
    ASSIGN_OR_RETURN(Slot slot, devices_.slots(buffer_->device()).Take());
    std::unique_ptr<Lease, void (*)(void*)> lease(new Lease(weak_from_this(), std::move(slot)),
                                                  &Lease::End);
    {
      const std::lock_guard lock(mutex_);
      ++slots_;
    }
    char* data = lease->slot.data();
    const absl::Time begin = SteadyNow();
    RETURN_IF_ERROR(
        CopyToHost(stream, data, static_cast<const char*>(buffer_->data()) + position_, size));
    const absl::Duration copy = SteadyNow() - begin;
    record_.copies += copy;
    parts_.records.metrics().CountTransfer(Metrics::Direction::kDownload, Metrics::Way::kStream,
                                           size, copy);
    if (request_.checksums()) header_.set_crc32c(Crc32c(data, size));
    const grpc::Slice slices[] = {grpc::Slice(WithDataOf(header_, size)),
                                  grpc::Slice(data, size, &Lease::End, lease.release())};
    message = grpc::ByteBuffer(slices, 2);
  } else {
    if (request_.checksums()) header_.set_crc32c(Crc32c(nullptr, 0));
    const grpc::Slice slice(header_.SerializeAsString());
    message = grpc::ByteBuffer(&slice, 1);
  }
  position_ += size;
  header_.clear_buffer();
  return absl::OkStatus();
}

DownloadCall::Step DownloadCall::Fetched(const absl::Status& status, grpc::ByteBuffer& message) {
  const std::lock_guard lock(mutex_);
  fetching_ = false;
  if (!status.ok()) {
    done_ = true;
    if (status_.ok()) status_ = status;
  } else if (!broken_) {
    done_ = position_ == end_;
    fetched_.emplace_back();
    fetched_.back().Swap(&message);
  }
  return Decide();
}

void DownloadCall::Break() {
  std::vector<grpc::ByteBuffer> dropped;  // destroyed after the lock is released
  bool fetching = false;
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    broken_ = done_ = true;
    if (status_.ok()) status_ = given_up_;
    if (status_.ok())
      status_ = MakeError(StatusCode::kCancelled, "CANCELLED", "the client cancelled the download");
    dropped.swap(fetched_);
    fetching = fetching_;
  }
  const bool recalled = fetching && (awaited_.Cancel() || executor_->Cancel(*this));
  Step step;
  {
    const std::lock_guard lock(mutex_);
    if (recalled) fetching_ = false;
    step = Decide();
  }
  Do(step);
}

void DownloadCall::OnSlotFree() {
  Step step;
  {
    const std::lock_guard lock(mutex_);
    --slots_;
    step = Decide();
  }
  Do(step);
}

void DownloadCall::End() {
  record_.ended = SteadyNow();
  parts_.records.Add(record_, status_, [this] { return peer_; });
  parts_.chores.Release(std::move(buffer_));
  accepted_.call = Charge();
  place_ = {};
  Finish(ToGrpc(status_, sees_all_));
}

}  // namespace tessera
