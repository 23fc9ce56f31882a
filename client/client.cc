#include "client/client.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/async.h"
#include "client/npy.h"
#include "client/resident_buffer.h"
#include "client/rpc/connection.h"
#include "client/rpc/event_loop.h"
#include "client/rpc/guarded.h"
#include "client/rpc/requests.h"
#include "client/transfers/shared_transfers.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/crc32c.h"

namespace tessera {
namespace {

absl::Status VersionMismatch(const std::string& name, std::uint64_t expected,
                             std::uint64_t actual) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "VERSION_MISMATCH",
                   absl::StrCat("'", name, "' has version ", actual, " and not ", expected),
                   {{"expected", absl::StrCat(expected)}, {"actual", absl::StrCat(actual)}});
}

// field: the message field that holds the checksum.
absl::Status BadChecksum(const std::string& name, std::string_view field, std::uint32_t expected,
                         std::uint32_t actual) {
  return MakeError(absl::StatusCode::kDataLoss, "BAD_CHECKSUM",
                   absl::StrCat("bytes of '", name, "' were damaged in transit: their checksum is ",
                                absl::Hex(actual, absl::kZeroPad8), " and not ",
                                absl::Hex(expected, absl::kZeroPad8)),
                   {{"field", std::string(field)},
                    {"expected", absl::StrCat(absl::Hex(expected, absl::kZeroPad8))},
                    {"actual", absl::StrCat(absl::Hex(actual, absl::kZeroPad8))}});
}

// Checks that the given bytes suffice for the array. exact: whether additional bytes are an error.
absl::Status CheckSize(std::uint64_t needed, std::uint64_t given, bool exact) {
  if (exact ? given == needed : given >= needed) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RANGE",
                   absl::StrCat("the array needs ", needed, " bytes, but ", given, " were given"),
                   {{"needed", absl::StrCat(needed)}, {"given", absl::StrCat(given)}});
}

// Checks that the memory holds `size` bytes from `offset` on. The memory consists of whole pages
// and may be larger than needed.
absl::Status CheckShared(const SharedMemory& memory, std::size_t offset, std::uint64_t size) {
  const std::size_t bytes = memory.bytes().size();
  return CheckSize(size, bytes - std::min(offset, bytes), /*exact=*/false);
}

// Returns the number of connections that a transfer uses, at most 64.
int StreamsOf(int wanted) { return std::clamp(wanted, 1, 64); }

}  // namespace

class Client::Impl : public Connection {
 public:
  using Connection::Connection;

  // A connection to one server.
  struct Place {
    std::size_t server;
    std::size_t channel;
  };

  SharedTransfers& shared() { return shared_; }

  // Creates, fills and seals the buffer over one stream.
  absl::StatusOr<v1::Buffer> UploadWhole(const v1::CreateBufferRequest& create, std::uint64_t size,
                                         const Source& source, const UploadOptions& options);
  // Creates a draft, fills ranges of it over several streams, and seals it.
  absl::StatusOr<v1::Buffer> UploadRanges(const v1::CreateBufferRequest& create, std::uint64_t size,
                                          const Source& source, const UploadOptions& options);
  // Downloads over one stream, in order, through the given connection, or through any if none is
  // given. If the options request checksums and `checksum` is not null, *checksum receives the
  // CRC-32C of the bytes.
  absl::StatusOr<v1::Buffer> DownloadStream(const std::string& name, const Sink& sink,
                                            const DownloadOptions& download,
                                            std::optional<Place> place, std::uint32_t* checksum);
  // Returns the buffer or draft with this name and version. Version 0 means any.
  absl::StatusOr<v1::GetBufferResponse> Get(const std::string& name, std::uint64_t version,
                                            const CallOptions& call,
                                            std::optional<std::size_t> server = std::nullopt);
  absl::Status Delete(const std::string& name, std::uint64_t version, const CallOptions& call,
                      std::optional<std::size_t> server = std::nullopt);

 private:
  struct Range {
    std::uint64_t begin;
    std::uint64_t end;
  };
  // State that the streams of one upload share.
  struct Transfer {
    Transfer(const std::string& buffer, std::uint64_t bytes, const Source& from,
             const UploadOptions& how)
        : name(buffer), size(bytes), source(from), options(how) {}

    const std::string& name;
    const std::uint64_t size;
    const Source& source;
    const UploadOptions& options;
    const gpr_timespec deadline = After(options.timeout.value_or(absl::InfiniteDuration()));
    std::size_t server = 0;     // the server that has the draft
    std::uint64_t version = 0;  // the draft's version; 0 if the stream creates the buffer
    // Entry i is the checksum of chunk i, written by the stream that sends the chunk. With several
    // streams, all entries exist from the beginning. With one stream, an entry is added for each
    // chunk that is sent.
    std::vector<std::uint32_t> checksums = {};
    std::mutex mutex = {};
    std::uint64_t sent = 0;              // guarded by mutex
    std::atomic<bool> abandoned{false};  // whether a stream has failed permanently
    std::atomic<bool> resumed{false};    // whether a stream has been restarted

    std::uint64_t chunks() const {
      return std::max<std::uint64_t>(
          1, size / options.chunk_bytes + (size % options.chunk_bytes != 0 ? 1 : 0));
    }
    // Adds to the progress. `bytes` is negative if bytes were lost when a connection broke. Returns
    // the error of the caller's progress function.
    absl::Status Report(std::int64_t bytes) {
      const std::lock_guard lock(mutex);
      sent += static_cast<std::uint64_t>(bytes);
      if (!options.progress) return absl::OkStatus();
      return Guarded([&] { options.progress(sent); });
    }
    // Returns the checksum of the whole array. Every chunk must have been sent.
    std::uint32_t Checksum() const {
      std::uint32_t crc = 0;
      for (std::size_t i = 0; i < checksums.size(); ++i) {
        const std::uint64_t begin = i * options.chunk_bytes;
        crc = Crc32cCombine(crc, checksums[i],
                            std::min<std::uint64_t>(options.chunk_bytes, size - begin));
      }
      return crc;
    }
  };

  // Sends the bytes of the range through the channel. `request` becomes the first message. Advances
  // range.begin to the first byte that gRPC has not accepted. REQUIRES: range.begin is a multiple
  // of the chunk size.
  absl::StatusOr<v1::UploadResponse> SendRange(Transfer& transfer,
                                               const absl::StatusOr<Lease>& channel,
                                               v1::UploadRequest request, Range& range);
  // Repeats SendRange after transient failures, from the first byte that the server lacks.
  absl::Status SendRangeResuming(Transfer& transfer, std::size_t i, Range range);
  // Returns the first byte of the range that the draft lacks.
  absl::StatusOr<std::uint64_t> FirstMissing(const Transfer& transfer, Range range);
  absl::StatusOr<v1::Buffer> Seal(const Transfer& transfer);

  SharedTransfers shared_{*this};
};

// --- Uploads -------------------------------------------------------------------------------------

absl::StatusOr<v1::UploadResponse> Client::Impl::SendRange(Transfer& transfer,
                                                           const absl::StatusOr<Lease>& channel,
                                                           v1::UploadRequest request,
                                                           Range& range) {
  if (!channel.ok()) return channel.status();
  const bool creates = request.has_spec();
  grpc::ClientContext context;
  Authorize(context);
  AddRoute(context, request.name());
  context.set_deadline(transfer.deadline);
  v1::UploadResponse response;
  StallGuard guard(&context, options().stall_timeout, transfer.options.cancel);
  const auto writer = (*channel)->buffers->Upload(&context, &response);

  absl::Status source_error;
  do {
    const std::size_t chunk = static_cast<std::size_t>(
        std::min<std::uint64_t>(transfer.options.chunk_bytes, range.end - range.begin));
    std::string* data = request.mutable_data();
    data->resize(chunk);
    source_error = transfer.source(range.begin, absl::MakeSpan(*data));
    if (!source_error.ok() || transfer.abandoned) {
      context.TryCancel();
      break;
    }
    if (transfer.options.checksums) {
      const std::uint32_t crc = Crc32c(data->data(), chunk);
      request.set_crc32c(crc);
      const std::size_t number = range.begin / transfer.options.chunk_bytes;
      if (creates && number >= transfer.checksums.size()) transfer.checksums.resize(number + 1);
      transfer.checksums[number] = crc;
      if (creates && range.begin + chunk == range.end) {
        request.set_buffer_crc32c(transfer.Checksum());
      }
    }
    CountSent(request.ByteSizeLong());
    if (!writer->Write(request)) break;  // Finish returns the reason
    guard.Progress();
    range.begin += chunk;
    source_error = transfer.Report(static_cast<std::int64_t>(chunk));
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
  absl::Status status = guard.Explain(FromGrpc(writer->Finish()));
  if (!source_error.ok()) return source_error;
  if (!status.ok())
    return WithDeadline(std::move(status),
                        transfer.options.timeout.value_or(absl::InfiniteDuration()));
  Received((*channel)->server, response);
  const std::uint64_t version = response.buffer().version();
  if (!creates && version != transfer.version) {
    return VersionMismatch(transfer.name, transfer.version, version);
  }
  return response;
}

absl::StatusOr<v1::Buffer> Client::Impl::UploadWhole(const v1::CreateBufferRequest& create,
                                                     std::uint64_t size, const Source& source,
                                                     const UploadOptions& upload) {
  Transfer transfer(create.name(), size, source, upload);
  // An upload is not idempotent, because the client does not know whether the buffer exists if the
  // connection breaks. It does know if the server refused the buffer or computed another checksum.
  Attempts attempts(*this, {.timeout = upload.timeout.value_or(absl::InfiniteDuration()),
                            .patience = options().stall_timeout,
                            .cancel = upload.cancel});
  for (;;) {
    Range range{0, size};
    v1::UploadRequest first;
    first.set_name(create.name());
    *first.mutable_spec() = create.spec();
    const absl::StatusOr<Lease> channel = Connect(attempts);
    if (channel.ok()) attempts.Begin(**channel);
    absl::StatusOr<v1::UploadResponse> response =
        SendRange(transfer, channel, std::move(first), range);
    if (response.ok()) return std::move(*response->mutable_buffer());
    absl::Status status = response.status();
    if (!attempts.Wait(status)) return status;
    status = transfer.Report(-static_cast<std::int64_t>(range.begin));
    if (!status.ok()) return status;
  }
}

absl::StatusOr<std::uint64_t> Client::Impl::FirstMissing(const Transfer& transfer, Range range) {
  const auto response = Get(transfer.name, transfer.version, {}, transfer.server);
  if (!response.ok()) return response.status();
  const v1::Buffer& buffer = response->buffer();
  if (buffer.version() != transfer.version) {
    // A server that does not support versions returns the buffer that the draft will replace.
    if (buffer.state() == v1::Buffer::STATE_READY && buffer.version() < transfer.version) {
      return range.begin;
    }
    return VersionMismatch(transfer.name, transfer.version, buffer.version());
  }
  for (const v1::ByteRange& missing : response->missing()) {
    if (missing.end() <= range.begin) continue;
    const std::uint64_t begin = std::min(std::max(missing.begin(), range.begin), range.end);
    return begin == range.end ? begin : begin - begin % transfer.options.chunk_bytes;
  }
  // The server lists at most 100 missing ranges. If there are fewer, the list is complete, and no
  // byte of this range is missing.
  return response->missing_size() < 100 ? range.end : range.begin;
}

absl::Status Client::Impl::SendRangeResuming(Transfer& transfer, std::size_t i, Range range) {
  const Range whole = range;
  std::uint64_t stored = range.begin;  // the first byte that the server lacked at the last failure
  Retry retry(options(), true, options().stall_timeout);
  for (;;) {
    v1::UploadRequest first;
    first.set_name(transfer.name);
    first.set_version(transfer.version);
    first.set_offset(range.begin);
    absl::Status status =
        SendRange(transfer, Connect(transfer.server, i, transfer.deadline, transfer.options.cancel),
                  std::move(first), range)
            .status();
    if (status.ok() || transfer.abandoned || absl::IsCancelled(status)) return status;
    // gRPC accepts the first bytes of a stream even if the server refuses the stream. These bytes
    // are not progress.
    if (range.begin > stored && !absl::IsResourceExhausted(status)) retry.Moved();
    if (!retry.Wait(status, transfer.options.cancel)) return status;
    transfer.resumed = true;
    const absl::StatusOr<std::uint64_t> missing = FirstMissing(transfer, whole);
    if (!missing.ok()) return missing.status();
    status = transfer.Report(static_cast<std::int64_t>(*missing) -
                             static_cast<std::int64_t>(range.begin));
    if (!status.ok()) return status;
    if (*missing > stored) retry.Progress();
    stored = range.begin = *missing;
    if (range.begin == range.end) return absl::OkStatus();
  }
}

absl::StatusOr<v1::Buffer> Client::Impl::Seal(const Transfer& transfer) {
  v1::SealBufferRequest request;
  request.set_name(transfer.name);
  request.set_version(transfer.version);
  if (transfer.options.checksums) request.set_crc32c(transfer.Checksum());
  auto response = Call(request, {.cancel = transfer.options.cancel}, transfer.server);
  if (ErrorReason(response.status()) == "CHECKSUM_UNKNOWN" && transfer.resumed) {
    // The last message of a broken stream arrived after the server had listed its missing ranges,
    // so the same bytes were sent twice. Each copy was checked against its own checksum.
    request.clear_crc32c();
    response = Call(request, {.cancel = transfer.options.cancel}, transfer.server);
  }
  absl::Status status = response.status();
  if (status.ok()) {
    v1::Buffer& buffer = *response->mutable_buffer();
    // The version is higher if the server has renumbered the draft, which it does when a draft is
    // sealed after a newer one.
    if (buffer.state() == v1::Buffer::STATE_READY && buffer.version() >= transfer.version &&
        buffer.size_bytes() == transfer.size) {
      return std::move(buffer);
    }
    return VersionMismatch(transfer.name, transfer.version, buffer.version());
  }
  // The connection may have broken after the draft had been sealed.
  if (auto now =
          Get(transfer.name, transfer.version, {.timeout = absl::Seconds(5)}, transfer.server);
      now.ok() && now->buffer().version() == transfer.version &&
      now->buffer().state() == v1::Buffer::STATE_READY) {
    return std::move(*now->mutable_buffer());
  }
  return status;
}

absl::StatusOr<v1::Buffer> Client::Impl::UploadRanges(const v1::CreateBufferRequest& create,
                                                      std::uint64_t size, const Source& source,
                                                      const UploadOptions& upload) {
  Route route;
  const auto created = Call(create, {.cancel = upload.cancel}, std::nullopt, &route);
  if (!created.ok()) return created.status();

  Transfer transfer(create.name(), size, source, upload);
  transfer.server = route.server;
  transfer.version = created->buffer().version();
  const std::uint64_t chunks = transfer.chunks();
  transfer.checksums.resize(chunks);
  const std::uint64_t streams =
      std::min<std::uint64_t>(static_cast<std::uint64_t>(StreamsOf(upload.streams)), chunks);
  const auto bound = [&](std::uint64_t i) {
    return std::min(size, chunks * i / streams * upload.chunk_bytes);
  };
  absl::Status failure;
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t i = 0; i < streams; ++i) {
      threads.emplace_back([&, i] {
        absl::Status status = SendRangeResuming(transfer, i, {bound(i), bound(i + 1)});
        if (status.ok()) return;
        const std::lock_guard lock(transfer.mutex);
        if (!transfer.abandoned.exchange(true)) failure = std::move(status);
      });
    }
  }
  if (failure.ok()) {
    absl::StatusOr<v1::Buffer> sealed = Seal(transfer);
    if (sealed.ok()) return sealed;
    failure = sealed.status();
  }
  // If the server does not respond, it will discard the draft itself, so the client does not wait
  // for it again.
  const std::string reason = ErrorReason(failure);
  if (reason != "STALLED" && reason != "UNREACHABLE") {
    Delete(create.name(), transfer.version, {.timeout = absl::Seconds(5)}, transfer.server)
        .IgnoreError();
  }
  return failure;
}

absl::StatusOr<v1::GetBufferResponse> Client::Impl::Get(const std::string& name,
                                                        std::uint64_t version,
                                                        const CallOptions& call,
                                                        std::optional<std::size_t> server) {
  v1::GetBufferRequest request;
  request.set_name(name);
  request.set_version(version);
  return Call(request, call, server);
}

absl::Status Client::Impl::Delete(const std::string& name, std::uint64_t version,
                                  const CallOptions& call, std::optional<std::size_t> server) {
  v1::DeleteBufferRequest request;
  request.set_name(name);
  request.set_version(version);
  if (version != 0) {
    // A server that does not support versions would delete everything with this name.
    const auto found = Get(name, version, call, server);
    if (!found.ok()) return found.status();
    if (const std::uint64_t actual = found->buffer().version(); actual != version) {
      return VersionMismatch(name, version, actual);
    }
  }
  Route route;
  absl::Status status = Call(request, call, server, &route).status();
  // The buffer existed before the call, so an earlier attempt, whose response was lost, has deleted
  // it.
  if (route.attempts > 1 && version != 0 && ErrorReason(status) == "BUFFER_NOT_FOUND") {
    return absl::OkStatus();
  }
  return status;
}

absl::Status Source::Check(std::uint64_t array_bytes) const {
  if (!function_) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPTION",
                     "the upload's source is null");
  }
  return CheckSize(array_bytes, bytes_.value_or(array_bytes), /*exact=*/true);
}

absl::Status Source::operator()(std::uint64_t offset, absl::Span<char> out) const {
  return Guarded([&] { return function_(offset, out); });
}

Source FromMemory(std::string_view bytes) {
  return {[bytes](std::uint64_t offset, absl::Span<char> out) {
            if (offset > bytes.size() || out.size() > bytes.size() - offset) {
              return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RANGE",
                               absl::StrCat("bytes ", offset, " to ", offset + out.size(),
                                            " of an array of ", bytes.size()));
            }
            if (!out.empty()) std::memcpy(out.data(), bytes.data() + offset, out.size());
            return absl::OkStatus();
          },
          bytes.size()};
}

namespace {

v1::BufferSpec Spec(DType dtype, absl::Span<const std::int64_t> shape,
                    const UploadOptions& options) {
  v1::BufferSpec spec;
  spec.set_dtype(ToMessage(dtype));
  spec.mutable_shape()->Add(shape.begin(), shape.end());
  if (options.ttl) *spec.mutable_ttl() = ToMessage(*options.ttl);
  spec.set_replace(options.replace);
  spec.set_device(options.device);
  for (const std::string& device : options.placement) spec.add_placement(device);
  return spec;
}

}  // namespace

absl::StatusOr<v1::Buffer> Client::Upload(const std::string& name, DType dtype,
                                          absl::Span<const std::int64_t> shape,
                                          const Source& source, const UploadOptions& options) {
  const absl::StatusOr<std::uint64_t> size = ArrayBytes(dtype, shape);
  if (!size.ok()) return size.status();
  if (absl::Status status = source.Check(*size); !status.ok()) return status;
  if (options.chunk_bytes == 0 || options.chunk_bytes % 64 != 0) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_OPTION",
        absl::StrCat("chunk_bytes is ", options.chunk_bytes, ", not a positive multiple of 64"));
  }
  v1::CreateBufferRequest create;
  create.set_name(name);
  *create.mutable_spec() = Spec(dtype, shape, options);
  if (auto done = impl().shared().TryUpload(create, *size, source, options))
    return *std::move(done);
  if (options.streams > 1 && *size > options.chunk_bytes) {
    return impl().UploadRanges(create, *size, source, options);
  }
  return impl().UploadWhole(create, *size, source, options);
}

absl::StatusOr<SharedMemory> Client::MakeSharedMemory(std::size_t bytes) {
  return impl().shared().MakeMemory(bytes);
}

absl::StatusOr<v1::Buffer> Client::UploadShared(const std::string& name, DType dtype,
                                                absl::Span<const std::int64_t> shape,
                                                const SharedMemory& memory, std::size_t offset,
                                                const UploadOptions& options) {
  const absl::StatusOr<std::uint64_t> size = ArrayBytes(dtype, shape);
  if (!size.ok()) return size.status();
  if (absl::Status status = CheckShared(memory, offset, *size); !status.ok()) return status;
  v1::UploadSharedRequest request;
  request.set_name(name);
  *request.mutable_spec() = Spec(dtype, shape, options);
  request.mutable_source()->set_region(memory.region());
  request.mutable_source()->set_offset(offset);
  request.mutable_source()->set_size(*size);
  return impl().shared().Upload(request, options.cancel);
}

// --- Downloads -----------------------------------------------------------------------------------

absl::StatusOr<v1::DownloadSharedResponse> Client::DownloadShared(
    const std::string& name, const SharedMemory& memory, std::size_t offset, std::size_t size,
    std::uint64_t begin, std::uint64_t version) {
  if (absl::Status status = CheckShared(memory, offset, size); !status.ok()) return status;
  v1::DownloadSharedRequest request;
  request.set_name(name);
  request.set_version(version);
  request.set_offset(begin);
  request.mutable_target()->set_region(memory.region());
  request.mutable_target()->set_offset(offset);
  request.mutable_target()->set_size(size);
  return impl().shared().Download(request, {});
}

namespace {

absl::Status BufferChanged(const std::string& name, std::string_view how) {
  return MakeError(absl::StatusCode::kAborted, "BUFFER_CHANGED",
                   absl::StrCat("'", name, "'", Absl(how)));
}

absl::Status NoSink() {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPTION", "the download's sink is null");
}

// The progress of a download, over any number of attempts.
class Received {
 public:
  // All arguments must outlive this object.
  Received(const std::string& name, const Sink& sink, const DownloadOptions& options)
      : name_(name), sink_(sink), options_(options) {}

  // The buffer as described by the first message.
  std::optional<v1::Buffer>& buffer() { return buffer_; }
  std::uint64_t bytes() const { return bytes_; }

  // Passes a message's content to the sink.
  absl::Status Take(const v1::DownloadResponse& response) {
    if (response.has_buffer()) {
      if (!buffer_) {
        buffer_ = response.buffer();
        if (absl::Status status = sink_(*buffer_, {}); !status.ok()) return status;
      } else if (buffer_->version() != response.buffer().version()) {
        return Changed();
      }
    }
    if (response.data().empty()) return absl::OkStatus();
    if (!buffer_ || response.offset() != options_.offset + bytes_)
      return absl::InternalError("the messages of a download are not contiguous");
    if (options_.checksums) {
      const std::uint32_t crc = Crc32c(response.data().data(), response.data().size());
      if (response.has_crc32c() && crc != response.crc32c())
        return BadChecksum(name_, "crc32c", response.crc32c(), crc);
      checksum_ = Crc32cCombine(checksum_, crc, response.data().size());
    }
    bytes_ += response.data().size();
    return sink_(*buffer_, response.data());
  }

  bool IsAll() const { return buffer_ && bytes_ == Wanted(); }

  // Returns what is wrong with the download once the server has ended it, or OK.
  absl::Status Check() const {
    if (!buffer_) return absl::InternalError("the download ended without a response");
    if (bytes_ != Wanted()) return absl::InternalError("the download ended early");
    if (options_.checksums && bytes_ == buffer_->size_bytes() && buffer_->has_crc32c() &&
        checksum_ != buffer_->crc32c())
      return BadChecksum(name_, "buffer.crc32c", buffer_->crc32c(), checksum_);
    return absl::OkStatus();
  }

  absl::Status Changed() const {
    return BufferChanged(name_, " was replaced while its download was interrupted");
  }
  std::uint32_t checksum() const { return checksum_; }

 private:
  std::uint64_t Wanted() const {
    const std::uint64_t rest = buffer_->size_bytes() - options_.offset;
    return options_.limit > 0 ? std::min(options_.limit, rest) : rest;
  }

  const std::string& name_;
  const Sink& sink_;
  const DownloadOptions& options_;
  std::optional<v1::Buffer> buffer_;
  std::uint64_t bytes_ = 0;
  std::uint32_t checksum_ = 0;  // checksum of the bytes received so far
};

}  // namespace

absl::StatusOr<v1::Buffer> Client::Impl::DownloadStream(const std::string& name, const Sink& sink,
                                                        const DownloadOptions& download,
                                                        std::optional<Place> place,
                                                        std::uint32_t* checksum) {
  v1::DownloadRequest request;
  request.set_name(name);
  request.set_version(download.version);
  request.set_offset(download.offset);
  request.set_limit(download.limit);
  request.set_checksums(download.checksums);
  tessera::Received received(name, sink, download);
  Attempts attempts(*this, {.timeout = download.timeout.value_or(absl::InfiniteDuration()),
                            .patience = options().stall_timeout,
                            .idempotent = true,
                            .only = place ? std::optional(place->server) : std::nullopt,
                            .cancel = download.cancel});
  for (;;) {
    const absl::StatusOr<Lease> channel =
        place ? Connect(place->server, place->channel, attempts.deadline(), download.cancel)
              : Connect(attempts);
    if (!channel.ok()) return channel.status();
    attempts.Begin(**channel);
    grpc::ClientContext context;
    Authorize(context);
    AddRoute(context, name);
    context.set_deadline(attempts.deadline());
    CountSent(request.ByteSizeLong());
    StallGuard guard(&context, options().stall_timeout, download.cancel);
    const auto reader = (*channel)->buffers->Download(&context, request);
    v1::DownloadResponse response;
    absl::Status refused;  // the error of the sink or of a check
    while (refused.ok() && reader->Read(&response)) {
      CountReceived(response.ByteSizeLong());
      const std::uint64_t before = received.bytes();
      refused = received.Take(response);
      if (received.bytes() > before) attempts.Progress();
      guard.Progress();
    }
    if (!refused.ok()) context.TryCancel();
    absl::Status status = guard.Explain(FromGrpc(reader->Finish()));
    if (!refused.ok()) status = refused;
    // If the connection broke only after the last byte, the download is complete.
    if (status.ok() || (refused.ok() && received.IsAll())) {
      if (absl::Status wrong = received.Check(); !wrong.ok()) return wrong;
      if (checksum != nullptr) *checksum = received.checksum();
      return *std::move(received.buffer());
    }
    const std::optional<v1::Buffer>& buffer = received.buffer();
    if (buffer && ErrorReason(status) == "VERSION_MISMATCH") return received.Changed();
    if (buffer) attempts.Stay();
    if (!attempts.Wait(status)) return ExplainMissing(status, attempts.route().server);
    request.set_offset(download.offset + received.bytes());
    request.set_limit(download.limit > 0 ? download.limit - received.bytes() : 0);
    if (buffer) request.set_version(buffer->version());
  }
}

absl::StatusOr<v1::Buffer> Client::Download(const std::string& name, const Sink& sink,
                                            const DownloadOptions& options) {
  if (!sink) return NoSink();
  const Sink guarded = [&](const v1::Buffer& buffer, std::string_view bytes) {
    return Guarded([&] { return sink(buffer, bytes); });
  };
  if (auto done = impl().shared().TryDownload(name, guarded, options, nullptr))
    return *std::move(done);
  return impl().DownloadStream(name, guarded, options, std::nullopt, nullptr);
}

absl::StatusOr<v1::Buffer> Client::DownloadRanges(const std::string& name, const RangeSink& sink,
                                                  const DownloadOptions& options) {
  if (!sink) return NoSink();
  const auto place = [&](const v1::Buffer& buffer, std::uint64_t offset, std::string_view bytes) {
    return Guarded([&] { return sink(buffer, offset, bytes); });
  };
  v1::GetBufferRequest find;
  find.set_name(name);
  find.set_version(options.version);
  Route route;
  const auto found = impl().Call(find, {.cancel = options.cancel}, std::nullopt, &route);
  if (!found.ok()) return impl().ExplainMissing(found.status(), route.server);
  const v1::Buffer& buffer = found->buffer();
  const std::uint64_t size = buffer.size_bytes();
  const std::uint64_t begin = std::min(options.offset, size);
  const std::uint64_t bytes =
      options.limit > 0 ? std::min(options.limit, size - begin) : size - begin;
  constexpr std::uint64_t kLeast = std::uint64_t{8} << 20;  // minimum bytes per stream
  const std::uint64_t streams = std::min<std::uint64_t>(
      static_cast<std::uint64_t>(StreamsOf(options.streams)), bytes / kLeast);
  if (streams <= 1 || buffer.state() != v1::Buffer::STATE_READY) {
    std::uint64_t done = options.offset;
    return Download(
        name,
        [&](const v1::Buffer& from, std::string_view part) {
          done += part.size();
          return sink(from, done - part.size(), part);
        },
        options);
  }
  if (absl::Status status = place(buffer, begin, {}); !status.ok()) return status;

  // Ends all streams when the caller cancels the download or one of them fails.
  std::stop_source end;
  const std::stop_callback cancelled(options.cancel, [&] { end.request_stop(); });
  const auto bound = [&](std::uint64_t i) {
    return i == streams ? bytes : bytes / kLeast * i / streams * kLeast;
  };
  std::mutex mutex;
  absl::Status failure;                           // guarded by mutex
  std::vector<std::uint32_t> checksums(streams);  // one per range
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t i = 0; i < streams; ++i) {
      threads.emplace_back([&, i] {
        DownloadOptions part = options;
        part.offset = begin + bound(i);
        part.limit = bound(i + 1) - bound(i);
        part.version = buffer.version();
        part.cancel = end.get_token();
        std::uint64_t next = part.offset;
        const Sink range = [&](const v1::Buffer& from, std::string_view data) {
          if (data.empty()) return absl::OkStatus();
          next += data.size();
          return place(from, next - data.size(), data);
        };
        auto done = impl().shared().TryDownload(name, range, part, &checksums[i]);
        if (!done)
          done =
              impl().DownloadStream(name, range, part, Impl::Place{route.server, i}, &checksums[i]);
        const absl::Status& status = done->status();
        if (status.ok()) return;
        const std::lock_guard lock(mutex);
        if (!end.request_stop()) return;
        failure = status;
      });
    }
  }
  if (options.cancel.stop_requested()) return Cancelled();
  if (!failure.ok()) {
    const std::string reason = ErrorReason(failure);
    if (options.version == 0 && (reason == "VERSION_MISMATCH" || reason == "BUFFER_NOT_FOUND"))
      return BufferChanged(name, " was replaced during its download");
    return failure;
  }
  std::uint32_t checksum = 0;
  for (std::uint64_t i = 0; i < streams; ++i)
    checksum = Crc32cCombine(checksum, checksums[i], bound(i + 1) - bound(i));
  if (options.checksums && bytes == size && buffer.has_crc32c() && checksum != buffer.crc32c())
    return BadChecksum(name, "buffer.crc32c", buffer.crc32c(), checksum);
  return buffer;
}

absl::StatusOr<v1::Buffer> Client::Download(const std::string& name, absl::Span<char> out,
                                            const DownloadOptions& options) {
  std::atomic<std::size_t> filled = 0;
  const auto mismatch = [&](const v1::Buffer& buffer) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_RANGE",
        absl::StrCat("the requested range of '", name, "', which has ", buffer.size_bytes(),
                     " bytes, does not fill the destination's ", out.size(), " bytes exactly"));
  };
  const auto fill = [&](const v1::Buffer& from, std::uint64_t offset, std::string_view bytes) {
    offset -= options.offset;
    if (offset > out.size() || bytes.size() > out.size() - offset) return mismatch(from);
    if (!bytes.empty()) std::memcpy(out.data() + offset, bytes.data(), bytes.size());
    filled += bytes.size();
    return absl::OkStatus();
  };
  std::uint64_t next = options.offset;
  absl::StatusOr<v1::Buffer> buffer =
      options.streams > 1 ? DownloadRanges(name, fill, options)
                          : Download(
                                name,
                                [&](const v1::Buffer& from, std::string_view bytes) {
                                  next += bytes.size();
                                  return fill(from, next - bytes.size(), bytes);
                                },
                                options);
  if (buffer.ok() && filled != out.size()) return mismatch(*buffer);
  return buffer;
}

absl::StatusOr<v1::Buffer> Client::Download(const ResidentBuffer& buffer, const Sink& sink,
                                            DownloadOptions options) {
  options.version = buffer.version();
  return Download(buffer.name(), sink, options);
}

absl::StatusOr<v1::Buffer> Client::Download(const ResidentBuffer& buffer, absl::Span<char> out,
                                            DownloadOptions options) {
  options.version = buffer.version();
  return Download(buffer.name(), out, options);
}

// --- Buffers -------------------------------------------------------------------------------------

Client::Client(ClientOptions options) : impl_(std::make_shared<Impl>(std::move(options))) {}

Client::Client(Client&& other) noexcept : impl_(std::move(other.impl_)) {}

Client& Client::operator=(Client&& other) noexcept {
  if (this != &other) {
    End();
    impl_ = std::move(other.impl_);
  }
  return *this;
}

Client::~Client() { End(); }

void Client::End() {
  if (impl_ != nullptr) impl_->events().CancelAll();
}

Client::Impl& Client::impl() const {
  if (impl_ != nullptr) return *impl_;
  static Impl& none = *new Impl({}, MovedFrom());
  return none;
}

AsyncClient Client::Async() { return AsyncClient(&impl()); }

ResidentBuffer Client::Hold(v1::Buffer buffer, const HoldOptions& options) {
  return {impl_, std::move(buffer), options};
}

Traffic Client::traffic() const { return impl().traffic(); }

absl::StatusOr<v1::Buffer> Client::CreateBuffer(const std::string& name, const v1::BufferSpec& spec,
                                                const CallOptions& call) {
  v1::CreateBufferRequest request;
  request.set_name(name);
  *request.mutable_spec() = spec;
  auto response = impl().Call(request, call);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_buffer());
}

absl::StatusOr<v1::GetBufferResponse> Client::GetBuffer(const std::string& name,
                                                        std::uint64_t version,
                                                        const CallOptions& call) {
  return impl().Get(name, version, call);
}

absl::StatusOr<std::vector<v1::Buffer>> Client::ListBuffers(const std::string& prefix,
                                                            const CallOptions& call) {
  std::vector<v1::Buffer> buffers;
  v1::ListBuffersRequest request;
  request.set_page_size(1000);
  request.set_prefix(prefix);
  do {
    auto page = impl().Call(request, call);
    if (!page.ok()) return page.status();
    for (v1::Buffer& buffer : *page->mutable_buffers()) buffers.push_back(std::move(buffer));
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return buffers;
}

absl::StatusOr<v1::Buffer> Client::SealBuffer(const std::string& name, std::uint64_t version,
                                              const CallOptions& call) {
  v1::SealBufferRequest request;
  request.set_name(name);
  request.set_version(version);
  auto response = impl().Call(request, call);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_buffer());
}

absl::StatusOr<v1::Buffer> Client::UpdateBuffer(const std::string& name,
                                                std::optional<absl::Duration> ttl,
                                                const CallOptions& call) {
  v1::UpdateBufferRequest request;
  request.set_name(name);
  if (ttl) *request.mutable_ttl() = ToMessage(*ttl);
  auto response = impl().Call(request, call);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_buffer());
}

absl::Status Client::DeleteBuffer(const std::string& name, std::uint64_t version,
                                  const CallOptions& call) {
  return impl().Delete(name, version, call);
}

absl::StatusOr<v1::Buffer> Client::CopyBuffer(const Operand& source, const ResultBuffer& target,
                                              std::optional<DType> dtype, const std::string& device,
                                              const CallOptions& call) {
  const auto request = CopyRequest(source, target, dtype, device);
  if (!request.ok()) return request.status();
  auto response = impl().Call(*request, call);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_buffer());
}

absl::StatusOr<v1::Buffer> Client::LinkBuffer(const std::string& source, const ResultBuffer& target,
                                              std::uint64_t version, const CallOptions& call) {
  v1::CopyBufferRequest request;
  request.set_source(source);
  request.set_source_version(version);
  request.set_name(target.name);
  if (target.ttl) *request.mutable_ttl() = ToMessage(*target.ttl);
  request.set_replace(target.replace);
  request.set_link(true);
  auto response = impl().Call(request, call);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_buffer());
}

absl::StatusOr<v1::ImportBufferResponse> Client::ImportBuffer(
    const std::string& server, const std::string& source, const ResultBuffer& target,
    std::uint64_t version, const std::string& device, const CallOptions& call) {
  v1::ImportBufferRequest request;
  request.set_source(server);
  request.set_source_name(source);
  request.set_source_version(version);
  request.set_name(target.name);
  if (target.ttl) *request.mutable_ttl() = ToMessage(*target.ttl);
  request.set_replace(target.replace);
  request.set_device(device);
  return impl().Call(
      request, {.timeout = call.timeout.value_or(absl::InfiniteDuration()), .cancel = call.cancel});
}

// --- Operations ----------------------------------------------------------------------------------

template <class Request>
absl::StatusOr<ResponseTo<Request>> Client::Send(const Request& request,
                                                 const OperationOptions& options) {
  return impl().Call(request, {.timeout = options.timeout, .cancel = options.cancel});
}
#define TESSERA_SEND(Name, field)                                                            \
  template absl::StatusOr<v1::Name##Response> Client::Send(const v1::Name##Request& request, \
                                                           const OperationOptions& options);
TESSERA_OPERATION_METHODS(TESSERA_SEND)
#undef TESSERA_SEND

absl::StatusOr<v1::ExecuteResponse> Client::Execute(const Program& program,
                                                    const CallOptions& call) {
  auto response = impl().Call(program.request(), call);
  absl::Status status = CheckAnswer(program.request().steps_size(), response);
  if (!status.ok()) return status;
  return response;
}

absl::Status Client::StatusOf(const v1::StepResult& result) {
  if (!result.has_error()) return absl::OkStatus();
  const v1::StepError& error = result.error();
  absl::Status status =
      MakeError(static_cast<absl::StatusCode>(error.code()), error.reason(), error.message());
  for (const auto& [key, value] : error.metadata()) SetErrorMetadata(status, key, value);
  return status;
}

// --- The server ----------------------------------------------------------------------------------

absl::StatusOr<std::vector<v1::Strategy>> Client::ListStrategies(const std::string& operation,
                                                                 const std::string& backend,
                                                                 const CallOptions& call) {
  v1::ListStrategiesRequest request;
  request.set_operation(operation);
  request.set_backend(backend);
  auto response = impl().Call(request, call);
  if (!response.ok()) return response.status();
  return std::vector<v1::Strategy>(response->strategies().begin(), response->strategies().end());
}

absl::StatusOr<v1::GetServerInfoResponse> Client::GetServerInfo(const CallOptions& call) {
  return impl().Call(v1::GetServerInfoRequest(), call);
}

absl::StatusOr<bool> Client::CheckHealth(const std::string& service, const CallOptions& call) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  const auto response = impl().Call(request, call);
  if (!response.ok()) return response.status();
  return response->status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

}  // namespace tessera
