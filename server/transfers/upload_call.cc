#include "server/transfers/upload_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/util/message_differencer.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "kernels/client_and_server/crc32c.h"
#include "kernels/device/profiler_range.h"
#include "server/calls/buffer_messages.h"
#include "server/rpc/convert.h"

namespace tessera {
namespace {

using absl::StatusCode;

// How many messages a stream copies before it waits for its copies to arrive and lets other streams
// run.
constexpr int kMessagesARun = 16;

absl::Status NoName() {
  return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                   "an upload needs a message with a name", {{"field", "name"}});
}

}  // namespace

void UploadCall::Begin() {
  const absl::Status status = Guarded([&]() -> absl::Status {
    ASSIGN_OR_RETURN(accepted_, parts_.limits.Accept(tenant_));
    ASSIGN_OR_RETURN(place_, parts_.limits.TakeStream(StreamKind::kUpload, tenant_,
                                                      parts_.limits.max_message()));
    return absl::OkStatus();
  });
  if (!status.ok()) {
    End(status);
    return;
  }
  PassOn();
}

void UploadCall::OnReadDone(bool ok) {
  {
    const std::lock_guard lock(mutex_);
    // kNoMore: the client has sent everything or has left, or gRPC accepts no more.
    next_ = ok ? Next::kHere : Next::kNoMore;
    if (busy_) return;
    busy_ = true;
  }
  GoOn();
}

void UploadCall::OnSendInitialMetadataDone(bool ok) {
  if (!ok || context().IsCancelled()) {
    End(MakeError(StatusCode::kCancelled, "CANCELLED", "the client cancelled the upload"));
    return;
  }
  // Close may free the buffer that the new buffer replaces.
  const absl::Status status =
      parts_.chores.Submit([this] { End(Guarded([&] { return Close(); })); }, tenant_.number());
  if (!status.ok()) End(status);
}

void UploadCall::OnDone() { live_.Remove(*this); }

void UploadCall::EndIfIdle(absl::Time now) {
  absl::Status status = absl::OkStatus();
  {
    const std::lock_guard lock(mutex_);
    if (busy_) return;
    status = CheckPause(now);
    if (status.ok() && draft_ != nullptr) status = tenant_.store().CheckOpen(*draft_);
    if (status.ok()) return;
    busy_ = true;
  }
  End(status);
}

absl::Status UploadCall::CheckPause(absl::Time now) const {
  return parts_.limits.CheckPause(now - moved_, "UPLOAD_IDLE",
                                  "no data has arrived for longer than the server waits");
}

void UploadCall::PassOn() {
  message_.Clear();
  // This is checked here as well, because there may always be a message in hand if a client keeps
  // sending messages without data.
  if (const absl::Status status = CheckPause(SteadyNow()); !status.ok()) return End(status);
  bool read = false;
  {
    const std::lock_guard lock(mutex_);
    read = next_ == Next::kNone;
    if (read) next_ = Next::kReading;
  }
  if (read) StartRead(&bytes_);
  {
    const std::lock_guard lock(mutex_);
    if (next_ == Next::kReading) {
      // The message being read takes the place of the one that was in hand.
      ahead_ = Charge();
      busy_ = false;
      return;
    }
  }
  GoOn();
}

void UploadCall::GoOn() {
  if (!IsHere()) {
    // gRPC reports the end of the client's data and a failed stream in the same way. In the second
    // case it has already cancelled the call, so this attempt to send metadata fails.
    StartSendInitialMetadata();
    return;
  }
  absl::Status status = Guarded([&] { return Take(); });
  if (status.ok()) {
    if (draft_ == nullptr) {
      // Open may allocate memory.
      status = parts_.chores.Submit(
          [this] {
            absl::Status opened = Guarded([&] { return Open(); });
            if (opened.ok()) opened = Hand();
            if (!opened.ok()) End(opened);
          },
          tenant_.number());
    } else {
      status = Hand();
    }
  }
  if (!status.ok()) End(status);
}

bool UploadCall::IsHere() {
  const std::lock_guard lock(mutex_);
  return next_ == Next::kHere;
}

absl::Status UploadCall::Take() {
  absl::Status status = parts_.limits.CheckSize(bytes_.Length());
  if (status.ok() && !message_.Parse(bytes_, CallLimits::kMostHeader)) {
    status =
        MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                  "a message is not a valid UploadRequest, or fields other than data are too large",
                  {{"field", "message"}, {"method", "Upload"}});
  }
  if (status.ok()) {
    const v1::UploadRequest& header = message_.header();
    status = parts_.limits.CheckHeader(header.SpaceUsedLong() - header.data().size());
  }
  if (!status.ok()) message_.Clear();
  bytes_.Clear();
  const std::lock_guard lock(mutex_);
  next_ = Next::kNone;
  return status;
}

void UploadCall::ReadAhead() {
  const Budget& memory = parts_.limits.host_memory();
  if (memory.free() < memory.limit() / 2) return;
  if (ahead_.amount() == 0) {
    absl::StatusOr<Charge> ahead = parts_.limits.TakeHostMemory(parts_.limits.max_message(), "");
    if (!ahead.ok()) return;
    ahead_ = *std::move(ahead);
  }
  {
    const std::lock_guard lock(mutex_);
    next_ = Next::kReading;
  }
  StartRead(&bytes_);
}

absl::Status UploadCall::Hand() {
  // The executor of the device to which the bytes go.
  Executor& transfers = devices_.transfers(draft_->buffer().DeviceOf(position_));
  ReadAhead();
  submitted_ = SteadyNow();
  return transfers.Submit(*this);
}

absl::Status UploadCall::Open() {
  const v1::UploadRequest& header = message_.header();
  name_ = header.name();
  version_ = header.version();
  creates_ = header.has_spec();
  if (creates_ && version_ != 0) {
    return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                     "an upload that creates a buffer cannot choose its version",
                     {{"field", "version"}, {"value", absl::StrCat(version_)}, {"expected", "0"}});
  }
  if (!creates_ && name_.empty()) return NoName();
  absl::StatusOr<std::shared_ptr<Draft>> draft;
  if (creates_) {
    spec_ = header.spec();
    ASSIGN_OR_RETURN(BufferSpec spec, MakeSpec(name_, spec_, devices_));
    spec.kind = Draft::Kind::kStream;
    draft = tenant_.store().Create(spec);
  } else {
    draft = tenant_.store().FindDraft(name_, version_);
  }
  if (!draft.ok()) return draft.status();
  draft_ = *std::move(draft);
  moved_ = SteadyNow();
  return absl::OkStatus();
}

void UploadCall::Run(Stream& stream) {
  const ProfilerRange range("Upload");
  const Executor& transfers = devices_.transfers(stream.device());
  const absl::Time begin = SteadyNow();
  record_.waited += begin - submitted_;
  moved_ += begin - submitted_;  // the client did not cause this wait
  arrived_ = 0;
  absl::Status status;
  for (int message = 1;; ++message) {
    status = Guarded([&] { return Copy(stream); });
    if (!status.ok() || message == kMessagesARun || transfers.waiting() > 0 || !IsHere()) break;
    status = Guarded([&] { return Take(); });
    if (!status.ok()) break;
    ReadAhead();
  }
  const absl::Status ended = EndWrite(stream);
  if (status.ok()) status = ended;
  const absl::Time end = SteadyNow();
  if (arrived_ > 0) moved_ = end;
  const absl::Duration copy = end - begin;
  record_.copies += copy;
  parts_.records.metrics().CountTransfer(Metrics::Direction::kUpload, Metrics::Way::kStream,
                                         arrived_, copy);
  if (status.ok()) {
    PassOn();
  } else {
    End(status);
  }
}

absl::Status UploadCall::CheckTarget() const {
  const v1::UploadRequest& header = message_.header();
  const bool same_name = header.name().empty() || header.name() == name_;
  const bool same_version = header.version() == 0 || header.version() == version_;
  const bool same_spec =
      !header.has_spec() ||
      (creates_ && google::protobuf::util::MessageDifferencer::Equals(header.spec(), spec_));
  const bool same_checksum = !header.has_buffer_crc32c() || !buffer_checksum_.has_value() ||
                             header.buffer_crc32c() == *buffer_checksum_;
  if (!same_name || !same_version || !same_spec || !same_checksum) {
    absl::Status status = MakeError(
        StatusCode::kInvalidArgument, "BAD_MESSAGE",
        "a later message of the upload gives another name, version, spec or buffer_crc32c",
        {{"field", !same_name      ? "name"
                   : !same_version ? "version"
                   : !same_spec    ? "spec"
                                   : "buffer_crc32c"}});
    if (!same_name || !same_version) {  // a spec may be long
      SetErrorMetadata(status, "value",
                       !same_name ? header.name() : absl::StrCat(header.version()));
      SetErrorMetadata(status, "expected", !same_name ? name_ : absl::StrCat(version_));
    }
    return status;
  }
  if (!header.has_buffer_crc32c() || creates_) return absl::OkStatus();
  return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                   "only an upload that creates the buffer can check all of it; for other "
                   "uploads, set the checksum in SealBuffer",
                   {{"field", "buffer_crc32c"}});
}

absl::Status UploadCall::Copy(Stream& stream) {
  RETURN_IF_ERROR(CheckTarget());
  const v1::UploadRequest& header = message_.header();
  if (header.has_offset()) position_ = header.offset();
  if (header.has_buffer_crc32c()) buffer_checksum_ = header.buffer_crc32c();
  const std::uint64_t size = message_.data_size();
  if (size == 0) {
    std::optional<std::uint32_t> checksum;
    absl::Status status = CheckChecksum(checksum);
    return status.ok() ? tenant_.store().CheckWrite(*draft_, position_, 0) : status;
  }
  const bool follows = write_.has_value() && write_->begin + write_->size == position_;
  if (!follows) RETURN_IF_ERROR(EndWrite(stream));
  ASSIGN_OR_RETURN(void* memory, follows ? tenant_.store().ExtendWrite(*draft_, position_, size)
                                         : tenant_.store().BeginWrite(*draft_, position_, size));
  if (!follows) write_ = Write{.begin = position_};
  RETURN_IF_ERROR(CheckData());
  write_->size += size;
  absl::Status status = CopyToDevice(stream, memory, message_.data());
  write_->failed = !status.ok();
  position_ += size;
  received_ += size;
  return status;
}

absl::Status UploadCall::CheckData() {
  std::optional<std::uint32_t> checksum;
  RETURN_IF_ERROR(CheckChecksum(checksum));
  std::uint64_t at = position_;
  for (const HostBytes& piece : message_.data()) {
    RETURN_IF_ERROR(CheckElements(draft_->buffer().type().dtype, piece, at));
    at += piece.size;
  }
  if (write_->size > 0) {
    if (checksum.has_value() && write_->checksum.has_value()) {
      checksum = Crc32cCombine(*write_->checksum, *checksum, message_.data_size());
    } else {
      checksum.reset();
    }
  }
  write_->checksum = checksum;
  return absl::OkStatus();
}

absl::Status UploadCall::CheckChecksum(std::optional<std::uint32_t>& checksum) const {
  const v1::UploadRequest& header = message_.header();
  if (!header.has_crc32c()) return absl::OkStatus();
  checksum = 0;
  for (const HostBytes& piece : message_.data()) {
    checksum = Crc32cExtend(*checksum, piece.data, piece.size);
  }
  if (*checksum == header.crc32c()) return absl::OkStatus();
  return MakeError(StatusCode::kDataLoss, "BAD_CHECKSUM",
                   "the data of a message does not match the message's CRC-32C",
                   {{"field", "crc32c"},
                    {"offset", absl::StrCat(position_)},
                    {"expected", absl::StrCat(header.crc32c())},
                    {"actual", absl::StrCat(*checksum)}});
}

absl::Status UploadCall::EndWrite(Stream& stream) {
  if (!write_.has_value()) return absl::OkStatus();
  const Write write = *write_;
  write_.reset();
  if (write.size == 0) {
    tenant_.store().AbandonWrite(*draft_);
    return absl::OkStatus();
  }
  // This is also needed after a failed copy, part of which may still be writing to memory that is
  // about to be freed.
  absl::Status arrived = Synchronize(stream);
  const bool done = arrived.ok() && !write.failed;
  tenant_.store().EndWrite(*draft_, write.begin, write.size, done, write.checksum);
  if (done) arrived_ += write.size;
  return arrived;
}

absl::Status UploadCall::Close() {
  if (draft_ == nullptr) return NoName();
  BufferInfo info;
  if (creates_) {
    info = tenant_.store().Describe(*draft_);
    if (!info.missing.empty()) {
      return MakeError(StatusCode::kInvalidArgument, "MISSING_DATA",
                       "the stream ended before the buffer was full",
                       {{"name", name_},
                        {"size", absl::StrCat(info.buffer->type().bytes())},
                        {"missing", ToString(info.missing)}});
    }
    absl::StatusOr<BufferInfo> sealed = tenant_.store().Seal(*draft_, buffer_checksum_);
    if (!sealed.ok()) {
      absl::Status status = sealed.status();
      if (absl::IsDataLoss(status)) SetErrorMetadata(status, "field", "buffer_crc32c");
      return status;
    }
    info = *std::move(sealed);
  } else {
    RETURN_IF_ERROR(tenant_.store().CheckOpen(*draft_));
    info = tenant_.store().Describe(*draft_);
  }
  v1::UploadResponse response;
  SetBuffer(info, response.mutable_buffer());
  response.set_received_bytes(received_);
  bool owned = false;
  grpc::SerializationTraits<v1::UploadResponse>::Serialize(response, &response_, &owned);
  return absl::OkStatus();
}

void UploadCall::End(const absl::Status& status) {
  record_.ended = SteadyNow();
  parts_.records.Add(record_, status, [this] { return peer_; });
  message_.Clear();
  if (draft_ != nullptr) {
    if (!status.ok() && creates_) tenant_.store().Discard(*draft_);
    parts_.chores.Release(std::move(draft_));
  }
  accepted_.call = Charge();
  place_ = {};
  ahead_ = Charge();
  if (status.ok()) {
    FinishWith(response_);
  } else {
    Finish(ToGrpc(status, sees_all_));
  }
}

}  // namespace tessera
