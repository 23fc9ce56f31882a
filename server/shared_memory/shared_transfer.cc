#include "server/shared_memory/shared_transfer.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "kernels/device/profiler_range.h"
#include "server/calls/buffer_messages.h"
#include "server/calls/device_call.h"
#include "server/rpc/convert.h"

namespace tessera {
namespace {

using absl::StatusCode;

// The size of a piece. A PCIe 5 link moves a piece in a millisecond, and the gap before the next
// piece takes a hundredth of that time.
constexpr std::uint64_t kPiece = std::uint64_t{64} << 20;

// How many pieces a call moves before it lets other transfers run.
constexpr int kPiecesARun = 16;

absl::Status BadMessage(std::string_view field, std::uint64_t value) {
  return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                   "an upload that creates a buffer must fill all of it, and cannot choose the "
                   "version",
                   {{"field", std::string(field)}, {"value", absl::StrCat(value)}});
}

}  // namespace

// --- SharedTransfer ----------------------------------------------------------------------------

void SharedTransfer::Start(const v1::RegionRange& range, StreamKind kind) {
  const bool allocates = Allocates();
  const absl::Status status = Guarded([&] {
    absl::Status checked = Check(range, kind);
    if (!checked.ok() || !allocates) return checked;
    return parts().chores.Submit([this] { Begin(); }, caller().tenant->number());
  });
  if (!status.ok()) {
    Conclude(status);
  } else if (!allocates) {
    Begin();
  }
}

absl::Status SharedTransfer::Check(const v1::RegionRange& range, StreamKind kind) {
  RETURN_IF_ERROR(Accept());
  // This is charged before anything is moved or created.
  RETURN_IF_ERROR(ChargeDescription());
  ASSIGN_OR_RETURN(stream_, parts().limits.TakeStream(kind, *caller().tenant));
  ASSIGN_OR_RETURN(region_, regions_.Find(range.region(), caller().tenant));
  memory_ = region_->At(range.offset(), range.size());
  if (memory_ == nullptr) {
    return MakeError(StatusCode::kInvalidArgument, "BAD_RANGE",
                     "the range is not inside its region",
                     {{"field", "region"},
                      {"offset", absl::StrCat(range.offset())},
                      {"size", absl::StrCat(range.size())},
                      {"limit", absl::StrCat(region_->size())}});
  }
  return absl::OkStatus();
}

void SharedTransfer::Begin() {
  const absl::Status status = Guarded([&]() -> absl::Status {
    if (cancelled_) return CallerLeft();
    const absl::StatusOr<Extent> extent = Open();
    if (!extent.ok()) return extent.status();
    size_ = extent->size;
    executor_ = &devices_.transfers(*extent->device);
    return absl::OkStatus();
  });
  if (!status.ok()) return Conclude(status);
  if (size_ == 0) return Finish();
  if (awaited_.empty()) return Queue();
  awaited_.Then([this](const absl::Status& arrived) {
    if (arrived.ok()) return Queue();
    Conclude(arrived);
  });
}

void SharedTransfer::Queue() {
  submitted_ = SteadyNow();
  if (const absl::Status queued = executor_.load()->Submit(*this); !queued.ok()) Conclude(queued);
}

void SharedTransfer::Run(Stream& stream) {
  const ProfilerRange range(method());
  absl::Status status;
  Executor& executor = *executor_;
  NoteWait(SteadyNow() - submitted_);
  for (int piece = 1; status.ok() && moved_ < size_; ++piece) {
    const std::uint64_t size = std::min(kPiece, size_ - moved_);
    const absl::Time begin = SteadyNow();
    status = cancelled_ ? CallerLeft() : Guarded([&] { return Move(stream, moved_, size); });
    if (status.ok()) {
      const absl::Duration copy = SteadyNow() - begin;
      NoteCopy(copy);
      parts().records.metrics().CountTransfer(direction_, Metrics::Way::kShared, size, copy);
    }
    moved_ += size;
    if (status.ok() && moved_ < size_ && (piece == kPiecesARun || executor.waiting() > 0)) {
      submitted_ = SteadyNow();
      status = executor.Submit(*this);
      if (status.ok()) return;
    }
  }
  if (status.ok() && !Allocates()) return Finish();
  if (status.ok()) {
    status = parts().chores.Submit([this] { Finish(); }, caller().tenant->number());
    if (status.ok()) return;
  }
  Conclude(status);
}

void SharedTransfer::Conclude(const absl::Status& status) {
  Release(status);
  parts().chores.Release(std::move(region_));
  stream_ = {};
  End(status);
}

void SharedTransfer::OnCancel() {
  cancelled_ = true;
  if (awaited_.Cancel()) return Conclude(CallerLeft());
  Executor* const executor = executor_;
  if (executor != nullptr && executor->Cancel(*this)) Conclude(CallerLeft());
}

// --- SharedUpload ------------------------------------------------------------------------------

absl::StatusOr<SharedTransfer::Extent> SharedUpload::Open() {
  const std::uint64_t size = request_.source().size();
  absl::StatusOr<std::shared_ptr<Draft>> draft;
  if (request_.has_spec()) {
    if (request_.version() != 0) return BadMessage("version", request_.version());
    if (request_.offset() != 0) return BadMessage("offset", request_.offset());
    ASSIGN_OR_RETURN(BufferSpec spec, MakeSpec(request_.name(), request_.spec(), devices()));
    if (spec.type.bytes() != size) {
      return MakeError(StatusCode::kInvalidArgument, "BAD_RANGE",
                       "the range does not have the size of the buffer that it fills",
                       {{"field", "source.size"},
                        {"size", absl::StrCat(size)},
                        {"expected", absl::StrCat(spec.type.bytes())}});
    }
    spec.kind = Draft::Kind::kStream;
    draft = store().Create(spec);
  } else {
    draft = store().FindDraft(request_.name(), request_.version());
  }
  if (!draft.ok()) return draft.status();
  draft_ = *std::move(draft);
  RETURN_IF_ERROR(store().CheckWrite(*draft_, request_.offset(), size));
  return Extent{&draft_->buffer().device(), size};
}

absl::Status SharedUpload::CopyBools(Stream& stream, std::byte* to, const char* from,
                                     std::uint64_t size, std::uint64_t offset) {
  constexpr std::uint64_t kCopy = std::uint64_t{1} << 20;
  std::vector<char> copy(static_cast<std::size_t>(std::min(kCopy, size)));
  for (std::uint64_t at = 0; at < size; at += kCopy) {
    const HostBytes bytes{copy.data(), static_cast<std::size_t>(std::min(kCopy, size - at))};
    std::memcpy(copy.data(), from + at, bytes.size);
    RETURN_IF_ERROR(CheckElements(DType::kBool, bytes, offset + at));
    RETURN_IF_ERROR(CopyToDevice(stream, to + at, bytes.data, bytes.size));
  }
  return absl::OkStatus();
}

absl::Status SharedUpload::Move(Stream& stream, std::uint64_t begin, std::uint64_t size) {
  const std::uint64_t offset = request_.offset() + begin;
  absl::StatusOr<void*> to = store().BeginWrite(*draft_, offset, size);
  if (!to.ok()) return to.status();
  const bool bools = draft_->buffer().type().dtype == DType::kBool;
  const absl::Status copied =
      bools ? CopyBools(stream, static_cast<std::byte*>(*to), memory() + begin, size, offset)
            : CopyPinnedToDevice(stream, *to, memory() + begin, size);
  // This is also needed after a failed copy, part of which may still be writing to memory that is
  // about to be freed.
  const absl::Status arrived = Synchronize(stream);
  store().EndWrite(*draft_, offset, size, copied.ok() && arrived.ok());
  return copied.ok() ? arrived : copied;
}

absl::Status SharedUpload::Close() {
  if (!request_.has_spec()) {
    RETURN_IF_ERROR(store().CheckOpen(*draft_));
    SetBuffer(store().Describe(*draft_), response_.mutable_buffer());
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(BufferInfo info, store().Seal(*draft_));
  SetBuffer(info, response_.mutable_buffer());
  return absl::OkStatus();
}

void SharedUpload::Release(const absl::Status& status) {
  if (draft_ == nullptr) return;
  if (!status.ok() && request_.has_spec()) store().Discard(*draft_);
  parts().chores.Release(std::move(draft_));
}

// --- SharedDownload ----------------------------------------------------------------------------

absl::StatusOr<SharedTransfer::Extent> SharedDownload::Open() {
  ASSIGN_OR_RETURN(BufferInfo info, store().Find(request_.name(), request_.version(), &awaited()));
  buffer_ = info.buffer;
  const std::uint64_t size = buffer_->type().bytes();
  if (request_.offset() > size) {
    return MakeError(StatusCode::kInvalidArgument, "BAD_RANGE",
                     "the download begins beyond the end of the buffer",
                     {{"field", "offset"},
                      {"offset", absl::StrCat(request_.offset())},
                      {"size", absl::StrCat(request_.target().size())},
                      {"limit", absl::StrCat(size)}});
  }
  response_.set_size(std::min(request_.target().size(), size - request_.offset()));
  SetBuffer(info, response_.mutable_buffer());
  return Extent{&buffer_->device(), response_.size()};
}

absl::Status SharedDownload::Move(Stream& stream, std::uint64_t begin, std::uint64_t size) {
  return CopyToHost(stream, memory() + begin,
                    static_cast<const char*>(buffer_->data()) + request_.offset() + begin, size);
}

void SharedDownload::Release(const absl::Status&) { parts().chores.Release(std::move(buffer_)); }

}  // namespace tessera
