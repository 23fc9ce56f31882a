#include "server/download_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/error.h"
#include "server/buffer_messages.h"
#include "server/convert.h"
#include "server/device_call.h"
#include "server/log.h"

namespace tessera {
namespace {

using absl::StatusCode;

constexpr std::uint64_t kDownloadChunk = 1 << 20;

}  // namespace

void DownloadCall::Begin() {
  const absl::Status status = Guarded([&] { return Open(); });
  if (status.ok()) {
    Next();
  } else {
    End(status);
  }
}

void DownloadCall::OnWriteDone(bool ok) {
  const std::int64_t since = writing_since_.exchange(0);
  if (!ok) {
    const absl::Duration limit = core_.options().download_timeout;
    End(SteadyNow() - absl::FromUnixNanos(since) > limit
            ? MakeError(StatusCode::kDeadlineExceeded, "DOWNLOAD_IDLE",
                        "nothing was read for longer than the server waits",
                        {{"limit", absl::FormatDuration(limit)}})
            : MakeError(StatusCode::kCancelled, "CANCELLED", "the client broke the download off"));
  } else if (position_ == end_) {
    End(absl::OkStatus());
  } else {
    message_.clear_buffer();
    Next();
  }
}

void DownloadCall::OnCancel() {
  if (executor_ != nullptr && executor_->Cancel(*this)) End(CallerLeft());
}

void DownloadCall::OnDone() { live_.Remove(*this); }

void DownloadCall::EndIfIdle(absl::Time now) {
  const std::int64_t since = writing_since_.load();
  if (since == 0 || now - absl::FromUnixNanos(since) <= core_.options().download_timeout) return;
  if (!given_up_.exchange(true)) context_.TryCancel();
}

absl::Status DownloadCall::Open() {
  absl::StatusOr<Admission::Ticket> ticket = core_.admission().Enter();
  if (!ticket.ok()) return ticket.status();
  ticket_ = *std::move(ticket);
  absl::StatusOr<Charge> stream =
      Charge::TakeOne(core_.downloads(), "TOO_MANY_DOWNLOADS",
                      "as many downloads are in progress as the server accepts");
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  // A chunk, and the chunk as gRPC sends it.
  absl::StatusOr<Charge> memory =
      Charge::Take(core_.host_memory(), 2 * kDownloadChunk, "HOST_MEMORY_EXHAUSTED",
                   "there is no memory for another stream of messages");
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  absl::StatusOr<BufferInfo> info = core_.store().Find(request_.name(), request_.version());
  if (!info.ok()) return info.status();
  buffer_ = info->buffer;
  const std::uint64_t size = buffer_->type().bytes();
  if (request_.offset() > size) {
    return MakeError(StatusCode::kInvalidArgument, "BAD_RANGE",
                     "the download begins beyond the end of the buffer",
                     {{"offset", absl::StrCat(request_.offset())}, {"limit", absl::StrCat(size)}});
  }
  position_ = request_.offset();
  const std::uint64_t rest = size - position_;
  end_ = position_ + (request_.limit() == 0 ? rest : std::min(request_.limit(), rest));
  SetBuffer(*info, message_.mutable_buffer());
  executor_ = &core_.transfers(buffer_->device());
  return absl::OkStatus();
}

void DownloadCall::Next() {
  absl::Status status = executor_->Submit(*this);
  if (!status.ok()) End(status);
}

void DownloadCall::Run(Stream& stream) {
  const absl::Status status = Guarded([&] { return Fill(stream); });
  if (!status.ok()) {
    End(status);
    return;
  }
  writing_since_ = absl::ToUnixNanos(SteadyNow());
  StartWrite(&message_);
}

absl::Status DownloadCall::Fill(Stream& stream) {
  const std::uint64_t size = std::min(end_ - position_, kDownloadChunk);
  std::string& data = *message_.mutable_data();
  message_.set_offset(position_);
  data.resize(size);
  absl::Status status =
      CopyToHost(stream, data.data(), static_cast<const char*>(buffer_->data()) + position_, size);
  if (request_.checksums()) message_.set_crc32c(Crc32c(data.data(), size));
  position_ += size;
  return status;
}

void DownloadCall::End(const absl::Status& status) {
  if (!status.ok()) LogFailedCall("Download", context_.peer(), status);
  core_.chores().Release(std::move(buffer_));
  message_ = v1::DownloadResponse();
  stream_ = Charge();
  memory_ = Charge();
  Finish(ToGrpc(status));
}

}  // namespace tessera
