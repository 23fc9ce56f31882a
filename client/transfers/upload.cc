// Uploads over streams of messages.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/guarded.h"
#include "client/npy.h"
#include "client/rpc/connection.h"
#include "client/transfers/parallel.h"
#include "client/transfers/shared_transfers.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/crc32c.h"

namespace tessera {
namespace {

class UploadTransfer {
 public:
  UploadTransfer(ClientConnection& connection, const v1::CreateBufferRequest& create,
                 std::uint64_t size, const Source& source, const UploadOptions& options)
      : connection_(connection),
        create_(create),
        name_(create.name()),
        size_(size),
        source_(source),
        options_(options) {}

  // Creates, fills and seals the buffer over one stream.
  absl::StatusOr<v1::Buffer> Whole();
  // Creates a draft, fills ranges of it over several streams, and seals it.
  absl::StatusOr<v1::Buffer> Ranges();

 private:
  struct Range {
    std::uint64_t begin;
    std::uint64_t end;
  };

  // Adds to the progress. `bytes` is negative if bytes were lost when a connection broke. Returns
  // the error of the caller's progress function.
  absl::Status Report(std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    sent_ += static_cast<std::uint64_t>(bytes);
    if (!options_.progress) return absl::OkStatus();
    return CallGuarded([&] { options_.progress(sent_); });
  }
  // Returns the checksum of the whole array. Every chunk must have been sent.
  std::uint32_t Checksum() const {
    std::uint32_t crc = 0;
    for (std::size_t i = 0; i < checksums_.size(); ++i) {
      const std::uint64_t rest = size_ - i * options_.chunk_bytes;
      crc = Crc32cCombine(crc, checksums_[i], std::min<std::uint64_t>(options_.chunk_bytes, rest));
    }
    return crc;
  }
  // Makes one attempt to send the bytes of the range. `request` becomes the first message. Advances
  // range.begin to the first byte that gRPC has not accepted. REQUIRES: range.begin is a multiple
  // of the chunk size.
  absl::StatusOr<v1::UploadResponse> SendRange(Attempts& attempts, v1::UploadRequest request,
                                               Range& range);
  // Repeats SendRange after transient failures, from the first byte that the server lacks.
  absl::Status SendRangeResuming(std::size_t i, Range range);
  // Returns the first byte of the range that the draft may lack, or range.end if it lacks none.
  absl::StatusOr<std::uint64_t> FirstMissing(Range range);
  absl::StatusOr<v1::Buffer> Seal();

  ClientConnection& connection_;
  const v1::CreateBufferRequest& create_;
  const std::string& name_;
  const std::uint64_t size_;
  const Source& source_;
  const UploadOptions& options_;
  std::size_t server_ = 0;     // the server that has the draft
  std::uint64_t version_ = 0;  // the draft's version; 0 if the stream creates the buffer
  // Entry i is the checksum of chunk i, written by the stream that sends the chunk. With several
  // streams, all entries exist from the beginning. With one stream, an entry is added for each
  // chunk that is sent.
  std::vector<std::uint32_t> checksums_;
  std::mutex mutex_;
  std::uint64_t sent_ = 0;              // guarded by mutex_
  std::atomic<bool> abandoned_{false};  // whether a stream has failed permanently
  std::atomic<bool> resumed_{false};    // whether a stream has been restarted
};

absl::StatusOr<v1::UploadResponse> UploadTransfer::SendRange(Attempts& attempts,
                                                             v1::UploadRequest request,
                                                             Range& range) {
  const absl::StatusOr<Lease> channel = connection_.Connect(attempts);
  if (!channel.ok()) return channel.status();
  const bool creates = request.has_spec();
  grpc::ClientContext context;
  attempts.Begin(**channel, context);
  v1::UploadResponse response;
  StallGuard guard(&context, connection_.options().stall_timeout, options_.cancel);
  const auto writer = (*channel)->stub<v1::BufferService>().Upload(&context, &response);

  absl::Status source_error;
  do {
    const std::size_t chunk = static_cast<std::size_t>(
        std::min<std::uint64_t>(options_.chunk_bytes, range.end - range.begin));
    std::string* data = request.mutable_data();
    data->resize(chunk);
    source_error = source_(range.begin, absl::MakeSpan(*data));
    if (!source_error.ok() || abandoned_) {
      context.TryCancel();
      break;
    }
    if (options_.checksums) {
      const std::uint32_t crc = Crc32c(data->data(), chunk);
      request.set_crc32c(crc);
      const std::size_t number = range.begin / options_.chunk_bytes;
      if (creates && number >= checksums_.size()) checksums_.resize(number + 1);
      checksums_[number] = crc;
      if (creates && range.begin + chunk == range.end) request.set_buffer_crc32c(Checksum());
    }
    connection_.CountSent(request.ByteSizeLong());
    if (!writer->Write(request)) break;  // Finish returns the reason
    guard.Progress();
    range.begin += chunk;
    source_error = Report(static_cast<std::int64_t>(chunk));
    if (!source_error.ok()) {
      context.TryCancel();
      break;
    }
    // These fields are set only in the first message.
    request.clear_spec();
    request.clear_offset();
    request.clear_name();
    request.clear_version();
  } while (range.begin < range.end);

  if (range.begin == range.end) writer->WritesDone();
  const absl::Status status = guard.Explain(FromGrpc(writer->Finish()));
  if (!source_error.ok()) return source_error;
  if (!status.ok()) return status;
  connection_.Received((*channel)->server, response);
  const std::uint64_t version = response.buffer().version();
  if (!creates && version != version_) return VersionMismatch(name_, version_, version);
  return response;
}

absl::StatusOr<v1::Buffer> UploadTransfer::Whole() {
  // An upload is not idempotent, because the client does not know whether the buffer exists if the
  // connection breaks. It does know if the server refused the buffer or computed another checksum.
  Attempts attempts(connection_, connection_.PlanOfTransfer(name_, options_));
  for (;;) {
    Range range{0, size_};
    v1::UploadRequest first;
    first.set_name(name_);
    *first.mutable_spec() = create_.spec();
    absl::StatusOr<v1::UploadResponse> response = SendRange(attempts, std::move(first), range);
    if (response.ok()) return std::move(*response->mutable_buffer());
    absl::Status status = response.status();
    if (!attempts.Wait(status)) return status;
    status = Report(-static_cast<std::int64_t>(range.begin));
    if (!status.ok()) return status;
  }
}

absl::StatusOr<std::uint64_t> UploadTransfer::FirstMissing(Range range) {
  const auto response =
      connection_.Call(BufferRequest<v1::GetBufferRequest>(name_, version_), {}, server_);
  if (!response.ok()) return response.status();
  const v1::Buffer& buffer = response->buffer();
  if (buffer.version() != version_) {
    // A server that does not support versions returns the buffer that the draft will replace.
    if (buffer.state() == v1::Buffer::STATE_READY && buffer.version() < version_)
      return range.begin;
    return VersionMismatch(name_, version_, buffer.version());
  }
  for (const v1::ByteRange& missing : response->missing()) {
    if (missing.end() <= range.begin) continue;
    const std::uint64_t begin = std::min(std::max(missing.begin(), range.begin), range.end);
    return begin == range.end ? begin : begin - begin % options_.chunk_bytes;
  }
  // The server lists at most 100 missing ranges. If there are fewer, the list is complete, and no
  // byte of this range is missing.
  return response->missing_size() < 100 ? range.end : range.begin;
}

absl::Status UploadTransfer::SendRangeResuming(std::size_t i, Range range) {
  const Range whole = range;
  std::uint64_t stored = range.begin;  // the first byte that the server lacked at the last failure
  Attempts::Plan plan = connection_.PlanOfTransfer(name_, options_);
  plan.idempotent = true;
  plan.route = {.only = server_, .channel = i};
  Attempts attempts(connection_, std::move(plan));
  for (;;) {
    auto first = BufferRequest<v1::UploadRequest>(name_, version_);
    first.set_offset(range.begin);
    absl::Status status = SendRange(attempts, std::move(first), range).status();
    if (status.ok() || abandoned_ || absl::IsCancelled(status)) return status;
    // gRPC accepts the first bytes of a stream even if the server refuses the stream. These bytes
    // are not progress.
    if (range.begin > stored && !absl::IsResourceExhausted(status)) attempts.Moved();
    if (!attempts.Wait(status)) return status;
    resumed_ = true;
    const absl::StatusOr<std::uint64_t> missing = FirstMissing(whole);
    if (!missing.ok()) return missing.status();
    status = Report(static_cast<std::int64_t>(*missing) - static_cast<std::int64_t>(range.begin));
    if (!status.ok()) return status;
    if (*missing > stored) attempts.Progress();
    stored = range.begin = *missing;
    if (range.begin == range.end) return absl::OkStatus();
  }
}

absl::StatusOr<v1::Buffer> UploadTransfer::Seal() {
  auto request = BufferRequest<v1::SealBufferRequest>(name_, version_);
  if (options_.checksums) request.set_crc32c(Checksum());
  const CallOptions call = {.cancel = options_.cancel, .metadata = options_.metadata};
  auto response = connection_.Call(request, call, server_);
  if (ErrorReason(response.status()) == "CHECKSUM_UNKNOWN" && resumed_) {
    // The last message of a broken stream arrived after the server had listed its missing ranges,
    // so the same bytes were sent twice. Each copy was checked against its own checksum.
    request.clear_crc32c();
    response = connection_.Call(request, call, server_);
  }
  if (response.ok()) {
    v1::Buffer& buffer = *response->mutable_buffer();
    // The version is higher if the server has renumbered the draft, which it does when a draft is
    // sealed after a newer one.
    if (buffer.state() == v1::Buffer::STATE_READY && buffer.version() >= version_ &&
        buffer.size_bytes() == size_)
      return std::move(buffer);
    return VersionMismatch(name_, version_, buffer.version());
  }
  // The connection may have broken after the draft was sealed.
  auto now = connection_.Call(BufferRequest<v1::GetBufferRequest>(name_, version_),
                              {.timeout = absl::Seconds(5)}, server_);
  if (now.ok() && now->buffer().version() == version_ &&
      now->buffer().state() == v1::Buffer::STATE_READY)
    return std::move(*now->mutable_buffer());
  return response.status();
}

absl::StatusOr<v1::Buffer> UploadTransfer::Ranges() {
  Route route;
  const auto created = connection_.Call(
      create_, {.cancel = options_.cancel, .metadata = options_.metadata}, std::nullopt, &route);
  if (!created.ok()) return created.status();
  server_ = route.server;
  version_ = created->buffer().version();
  const std::uint64_t chunks = (size_ - 1) / options_.chunk_bytes + 1;
  checksums_.resize(chunks);
  const std::uint64_t streams = std::min(StreamsOf(options_.streams), chunks);
  const auto bound = [&](std::uint64_t i) {
    return std::min(size_, chunks * i / streams * options_.chunk_bytes);
  };
  absl::Status failure = InParallel(
      streams,
      [&](std::uint64_t i) {
        return SendRangeResuming(i, {bound(i), bound(i + 1)});
      },
      [&] { abandoned_ = true; });
  if (failure.ok()) {
    absl::StatusOr<v1::Buffer> sealed = Seal();
    if (sealed.ok()) return sealed;
    failure = sealed.status();
  }
  // If the server does not respond, it will discard the draft itself, so the client does not wait
  // for it again.
  const std::string reason = ErrorReason(failure);
  if (reason != "STALLED" && reason != "UNREACHABLE")
    connection_.Delete(name_, version_, {.timeout = absl::Seconds(5)}, server_).IgnoreError();
  return failure;
}

}  // namespace

absl::Status Source::Check(std::uint64_t array_bytes) const {
  if (!function_) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPTION",
                     "the upload's source is null");
  }
  return CheckSize(array_bytes, bytes_.value_or(array_bytes), /*exact=*/true);
}

absl::Status Source::operator()(std::uint64_t offset, absl::Span<char> out) const {
  return CallGuarded([&] { return function_(offset, out); });
}

Source FromMemory(std::string_view bytes) {
  return {[bytes](std::uint64_t offset, absl::Span<char> out) {
            if (offset > bytes.size() || out.size() > bytes.size() - offset) {
              return MakeError(
                  absl::StatusCode::kInvalidArgument, "BAD_RANGE",
                  absl::StrCat("bytes ", offset, " to ", offset + out.size(),
                               " are beyond the end of the source; its size in bytes is ",
                               bytes.size()));
            }
            if (!out.empty()) std::memcpy(out.data(), bytes.data() + offset, out.size());
            return absl::OkStatus();
          },
          bytes.size()};
}

absl::StatusOr<v1::Buffer> UploadFrom(ClientConnection& connection, const std::string& name,
                                      DType dtype, absl::Span<const std::int64_t> shape,
                                      const Source& source, const UploadOptions& options) {
  const absl::StatusOr<std::uint64_t> size = ArrayBytes(dtype, shape);
  if (!size.ok()) return size.status();
  if (absl::Status status = source.Check(*size); !status.ok()) return status;
  if (options.chunk_bytes == 0 || options.chunk_bytes % 64 != 0) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_OPTION",
        absl::StrCat("chunk_bytes is ", options.chunk_bytes, ", not a positive multiple of 64"));
  }
  const v1::CreateBufferRequest create = CreateRequest(name, SpecOf(dtype, shape, options));
  if (auto done = connection.shared().TryUpload(create, *size, source, options))
    return *std::move(done);
  UploadTransfer upload(connection, create, *size, source, options);
  return options.streams > 1 && *size > options.chunk_bytes ? upload.Ranges() : upload.Whole();
}

}  // namespace tessera
