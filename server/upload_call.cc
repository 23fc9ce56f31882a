#include "server/upload_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/util/message_differencer.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/error.h"
#include "server/buffer_messages.h"
#include "server/convert.h"
#include "server/log.h"

namespace tessera {

using absl::StatusCode;

void UploadCall::Begin() {
  const absl::Status status = Guarded([&]() -> absl::Status {
    absl::StatusOr<Admission::Ticket> ticket = core_.admission().Enter();
    if (!ticket.ok()) return ticket.status();
    ticket_ = *std::move(ticket);
    absl::StatusOr<Charge> stream =
        Charge::TakeOne(core_.uploads(), "TOO_MANY_UPLOADS",
                        "as many uploads are in progress as the server accepts");
    if (!stream.ok()) return stream.status();
    stream_ = *std::move(stream);
    absl::StatusOr<Charge> memory =
        Charge::Take(core_.host_memory(), core_.options().max_message, "HOST_MEMORY_EXHAUSTED",
                     "there is no memory for another stream of messages");
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    return absl::OkStatus();
  });
  if (status.ok()) {
    Read();
  } else {
    End(status);
  }
}

void UploadCall::OnReadDone(bool ok) {
  if (reading_since_.exchange(0) == 0) return;  // timed out, and ended
  if (!ok) {
    // The end of the client's data, of the client, or of what gRPC accepts: in all cases but the
    // first gRPC has cancelled the call before, and cannot send metadata any more.
    StartSendInitialMetadata();
    return;
  }
  const absl::Status status = Guarded([&] { return Accept(); });
  if (!status.ok()) End(status);
}

void UploadCall::OnSendInitialMetadataDone(bool ok) {
  if (!ok || context_.IsCancelled()) {
    End(MakeError(StatusCode::kCancelled, "CANCELLED", "the client broke the upload off"));
    return;
  }
  // What is replaced may be freed.
  const absl::Status status =
      core_.chores().Submit([this] { End(Guarded([&] { return Close(); })); });
  if (!status.ok()) End(status);
}

void UploadCall::OnDone() { live_.Remove(*this); }

void UploadCall::EndIfIdle(absl::Time now) {
  std::int64_t since = reading_since_.load();
  if (since == 0) return;
  absl::Status status = absl::OkStatus();
  if (now - absl::FromUnixNanos(since) > core_.options().upload_timeout) {
    status = MakeError(StatusCode::kDeadlineExceeded, "UPLOAD_IDLE",
                       "no message has come for longer than the server waits",
                       {{"limit", absl::FormatDuration(core_.options().upload_timeout)}});
  } else if (const std::shared_ptr<Draft> draft = this->draft(); draft != nullptr) {
    status = core_.store().CheckOpen(*draft);
  }
  if (!status.ok() && reading_since_.compare_exchange_strong(since, 0)) End(status);
}

void UploadCall::Read() {
  message_.reset();
  reading_since_ = absl::ToUnixNanos(SteadyNow());
  StartRead(&bytes_);
}

absl::Status UploadCall::Accept() {
  absl::Status status = core_.CheckSize(bytes_.Length());
  message_.emplace();
  const bool parsed =
      status.ok() &&
      grpc::SerializationTraits<v1::UploadRequest>::Deserialize(&bytes_, &*message_).ok();
  bytes_.Clear();
  if (!status.ok()) return status;
  if (!parsed) {
    return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                     "a message is no valid UploadRequest", {{"field", "message"}});
  }
  if (draft() == nullptr) {
    // Memory may have to be found.
    return core_.chores().Submit([this] {
      absl::Status proceeded = Guarded([&]() -> absl::Status {
        absl::Status opened = Open();
        return opened.ok() ? Proceed() : opened;
      });
      if (!proceeded.ok()) End(proceeded);
    });
  }
  const bool same_name = message_->name().empty() || message_->name() == name_;
  const bool same_version = message_->version() == 0 || message_->version() == version_;
  const bool same_spec =
      !message_->has_spec() ||
      (creates_ && google::protobuf::util::MessageDifferencer::Equals(message_->spec(), spec_));
  if (!same_name || !same_version || !same_spec) {
    return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                     "a later message of an upload names another buffer, version or spec",
                     {{"field", !same_name      ? "name"
                                : !same_version ? "version"
                                                : "spec"},
                      {"value", !same_name ? message_->name() : absl::StrCat(message_->version())},
                      {"expected", !same_name ? name_ : absl::StrCat(version_)}});
  }
  return Proceed();
}

absl::Status UploadCall::Open() {
  name_ = message_->name();
  version_ = message_->version();
  creates_ = message_->has_spec();
  if (creates_ && version_ != 0) {
    return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                     "an upload that creates a buffer gets its version from the server",
                     {{"field", "version"}, {"value", absl::StrCat(version_)}, {"expected", "0"}});
  }
  absl::StatusOr<std::shared_ptr<Draft>> draft;
  if (creates_) {
    spec_ = message_->spec();
    absl::StatusOr<BufferSpec> spec = MakeSpec(name_, spec_, core_);
    if (!spec.ok()) return spec.status();
    spec->kind = Draft::Kind::kStream;
    draft = core_.store().Create(*spec);
  } else {
    draft = core_.store().FindDraft(name_, version_);
  }
  if (!draft.ok()) return draft.status();
  const std::lock_guard lock(draft_mutex_);
  draft_ = *std::move(draft);
  return absl::OkStatus();
}

absl::Status UploadCall::Proceed() {
  if (message_->has_offset()) position_ = message_->offset();
  if (message_->has_buffer_crc32c()) {
    if (!creates_) {
      return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                       "only an upload that creates the buffer checks all of it; SealBuffer does "
                       "for the others",
                       {{"field", "buffer_crc32c"}});
    }
    buffer_checksum_ = message_->buffer_crc32c();
  }
  if (message_->data().empty()) {
    size_ = 0;
    std::optional<std::uint32_t> checksum;
    absl::Status status = CheckChecksum(checksum);
    if (status.ok()) status = core_.store().CheckOpen(*draft_);
    if (status.ok()) Read();
    return status;
  }
  size_ = message_->data().size();
  absl::StatusOr<void*> memory = core_.store().BeginWrite(*draft_, position_, size_);
  if (!memory.ok()) return memory.status();
  memory_of_data_ = *memory;
  absl::Status status = core_.transfers(draft_->buffer().device()).Submit(*this);
  if (!status.ok()) core_.store().AbandonWrite(*draft_);
  return status;
}

void UploadCall::Run(Stream& stream) {
  std::optional<std::uint32_t> checksum;
  if (absl::Status wrong = CheckChecksum(checksum); !wrong.ok()) {
    core_.store().AbandonWrite(*draft_);
    End(wrong);
    return;
  }
  absl::Status status = CopyToDevice(stream, memory_of_data_, message_->data().data(), size_);
  // Also after a copy that failed: part of it may still be under way to memory that is about to
  // be freed.
  const absl::Status arrived = Synchronize(stream);
  if (status.ok()) status = arrived;
  core_.store().EndWrite(*draft_, position_, size_, status.ok(), checksum);
  if (!status.ok()) {
    End(status);
    return;
  }
  position_ += size_;
  received_ += size_;
  Read();
}

void UploadCall::Refuse(const absl::Status& status) {
  core_.store().AbandonWrite(*draft_);
  End(status);
}

absl::Status UploadCall::CheckChecksum(std::optional<std::uint32_t>& checksum) const {
  if (!message_->has_crc32c()) return absl::OkStatus();
  checksum = Crc32c(message_->data().data(), size_);
  if (*checksum == message_->crc32c()) return absl::OkStatus();
  return MakeError(StatusCode::kDataLoss, "BAD_CHECKSUM",
                   "the data of a message has another CRC-32C than the message says",
                   {{"field", "crc32c"},
                    {"offset", absl::StrCat(position_)},
                    {"expected", absl::StrCat(message_->crc32c())},
                    {"actual", absl::StrCat(*checksum)}});
}

absl::Status UploadCall::Close() {
  if (draft_ == nullptr) {
    return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                     "an upload needs a message with a name", {{"field", "name"}});
  }
  BufferInfo info;
  if (creates_) {
    info = core_.store().Describe(*draft_);
    if (!info.missing.empty()) {
      return MakeError(StatusCode::kInvalidArgument, "MISSING_DATA",
                       "the stream ended before the buffer was full",
                       {{"name", name_},
                        {"size", absl::StrCat(info.buffer->type().bytes())},
                        {"missing", ToString(info.missing)}});
    }
    absl::StatusOr<BufferInfo> sealed = core_.store().Seal(*draft_, buffer_checksum_);
    if (!sealed.ok()) {
      absl::Status status = sealed.status();
      if (absl::IsDataLoss(status)) SetErrorMetadata(status, "field", "buffer_crc32c");
      return status;
    }
    info = *std::move(sealed);
  } else {
    if (absl::Status status = core_.store().CheckOpen(*draft_); !status.ok()) return status;
    info = core_.store().Describe(*draft_);
  }
  v1::UploadResponse response;
  SetBuffer(info, response.mutable_buffer());
  response.set_received_bytes(received_);
  bool owned = false;
  grpc::SerializationTraits<v1::UploadResponse>::Serialize(response, &response_, &owned);
  return absl::OkStatus();
}

std::shared_ptr<Draft> UploadCall::draft() {
  const std::lock_guard lock(draft_mutex_);
  return draft_;
}

void UploadCall::End(const absl::Status& status) {
  if (!status.ok()) LogFailedCall("Upload", context_.peer(), status);
  message_.reset();
  std::shared_ptr<Draft> draft;
  {
    const std::lock_guard lock(draft_mutex_);
    draft = std::move(draft_);
  }
  if (draft != nullptr) {
    if (!status.ok() && creates_) core_.store().Discard(*draft);
    core_.chores().Release(std::move(draft));
  }
  stream_ = Charge();
  memory_ = Charge();
  Finish(ToGrpc(status));
}

}  // namespace tessera
