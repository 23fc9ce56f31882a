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
#include "client/transfers/received.h"
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

// Checks that the given bytes suffice for the array. `exact` says whether additional bytes are an
// error.
absl::Status CheckSize(std::uint64_t needed, std::uint64_t given, bool exact) {
  if (exact ? given == needed : given >= needed) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RANGE",
                   absl::StrCat("the array needs ", needed, " bytes, but ", given, " were given"),
                   {{"needed", absl::StrCat(needed)}, {"given", absl::StrCat(given)}});
}

// Checks that the memory holds `size` bytes starting at `offset`. The memory consists of whole
// pages and may be larger than needed.
absl::Status CheckShared(const SharedMemory& memory, std::size_t offset, std::uint64_t size) {
  const std::size_t bytes = memory.bytes().size();
  return CheckSize(size, bytes - std::min(offset, bytes), /*exact=*/false);
}

// Returns the number of connections that a transfer uses, at most 64.
std::uint64_t StreamsOf(int wanted) {
  return static_cast<std::uint64_t>(std::clamp(wanted, 1, 64));
}

// Runs run(i) for each stream i on its own thread. Calls stop() on the first error, and returns it.
template <class Run, class Stop>
absl::Status InParallel(std::uint64_t streams, const Run& run, const Stop& stop) {
  std::mutex mutex;
  absl::Status failure;  // guarded by mutex
  std::vector<std::jthread> threads;
  for (std::uint64_t i = 0; i < streams; ++i) {
    threads.emplace_back([&, i] {
      absl::Status status = run(i);
      const std::lock_guard lock(mutex);
      if (status.ok() || !failure.ok()) return;
      failure = std::move(status);
      stop();
    });
  }
  threads.clear();  // waits for all
  return failure;
}

}  // namespace

class Client::Impl : public Connection {
 public:
  using Connection::Connection;

  SharedTransfers& shared() { return shared_; }

  // Creates, fills and seals the buffer over one stream.
  absl::StatusOr<v1::Buffer> UploadWhole(const v1::CreateBufferRequest& create, std::uint64_t size,
                                         const Source& source, const UploadOptions& options);
  // Creates a draft, fills ranges of it over several streams, and seals it.
  absl::StatusOr<v1::Buffer> UploadRanges(const v1::CreateBufferRequest& create, std::uint64_t size,
                                          const Source& source, const UploadOptions& options);
  // Implements Client::DownloadRanges. The sink must not throw.
  absl::StatusOr<v1::Buffer> DownloadRanges(const std::string& name, const RangeSink& sink,
                                            const DownloadOptions& options);
  // Downloads in order, through shared memory as far as possible, and otherwise over one stream.
  // `route` says to which servers the stream may go. If the options request checksums and
  // `checksum` is not null, *checksum receives the CRC-32C of the bytes.
  absl::StatusOr<v1::Buffer> Download(const std::string& name, const RangeSink& sink,
                                      const DownloadOptions& options, const Route& route = {},
                                      std::uint32_t* checksum = nullptr);
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

  // Returns the plan for the attempts of a transfer with the options.
  template <class Options>
  Attempts::Plan PlanOfTransfer(const std::string& name, const Options& transfer) const {
    return {.timeout = transfer.timeout.value_or(absl::InfiniteDuration()),
            .patience = options().stall_timeout,
            .buffer_route = RouteOfBuffer(name),
            .cancel = transfer.cancel};
  }
  // Makes one attempt to send the bytes of the range. `request` becomes the first message. Advances
  // range.begin to the first byte that gRPC has not accepted. REQUIRES: range.begin is a multiple
  // of the chunk size.
  absl::StatusOr<v1::UploadResponse> SendRange(Transfer& transfer, Attempts& attempts,
                                               v1::UploadRequest request, Range& range);
  // Repeats SendRange after transient failures, from the first byte that the server lacks.
  absl::Status SendRangeResuming(Transfer& transfer, std::size_t i, Range range);
  // Returns the first byte of the range that the draft may lack, or range.end if it lacks none.
  absl::StatusOr<std::uint64_t> FirstMissing(const Transfer& transfer, Range range);
  absl::StatusOr<v1::Buffer> Seal(const Transfer& transfer);

  SharedTransfers shared_{*this};
};

// --- Uploads -------------------------------------------------------------------------------------

absl::StatusOr<v1::UploadResponse> Client::Impl::SendRange(Transfer& transfer, Attempts& attempts,
                                                           v1::UploadRequest request,
                                                           Range& range) {
  const absl::StatusOr<Lease> channel = Connect(attempts);
  if (!channel.ok()) return channel.status();
  const bool creates = request.has_spec();
  grpc::ClientContext context;
  attempts.Begin(**channel, context);
  v1::UploadResponse response;
  StallGuard guard(&context, options().stall_timeout, transfer.options.cancel);
  const auto writer = (*channel)->stub<v1::BufferService>().Upload(&context, &response);

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
  const absl::Status status = guard.Explain(FromGrpc(writer->Finish()));
  if (!source_error.ok()) return source_error;
  if (!status.ok()) return status;
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
  // An upload is not idempotent: if the connection breaks, the client cannot know whether the
  // buffer exists. After a refusal or a checksum mismatch, the buffer does not exist.
  Attempts::Plan plan = PlanOfTransfer(create.name(), upload);
  plan.refused = CheckMessage(create.ByteSizeLong());
  Attempts attempts(*this, std::move(plan));
  for (;;) {
    Range range{0, size};
    v1::UploadRequest first;
    first.set_name(create.name());
    *first.mutable_spec() = create.spec();
    absl::StatusOr<v1::UploadResponse> response =
        SendRange(transfer, attempts, std::move(first), range);
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
  Attempts::Plan plan = PlanOfTransfer(transfer.name, transfer.options);
  plan.idempotent = true;
  plan.route = {.only = transfer.server, .channel = i};
  Attempts attempts(*this, std::move(plan));
  for (;;) {
    auto first = BufferRequest<v1::UploadRequest>(transfer.name, transfer.version);
    first.set_offset(range.begin);
    absl::Status status = SendRange(transfer, attempts, std::move(first), range).status();
    if (status.ok() || transfer.abandoned || absl::IsCancelled(status)) return status;
    // gRPC accepts the first bytes of a stream even if the server refuses the stream. These bytes
    // are not progress.
    if (range.begin > stored && !absl::IsResourceExhausted(status)) attempts.Moved();
    if (!attempts.Wait(status)) return status;
    transfer.resumed = true;
    const absl::StatusOr<std::uint64_t> missing = FirstMissing(transfer, whole);
    if (!missing.ok()) return missing.status();
    status = transfer.Report(static_cast<std::int64_t>(*missing) -
                             static_cast<std::int64_t>(range.begin));
    if (!status.ok()) return status;
    if (*missing > stored) attempts.Progress();
    stored = range.begin = *missing;
    if (range.begin == range.end) return absl::OkStatus();
  }
}

absl::StatusOr<v1::Buffer> Client::Impl::Seal(const Transfer& transfer) {
  auto request = BufferRequest<v1::SealBufferRequest>(transfer.name, transfer.version);
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
    // The version is higher if the server has renumbered the draft, which it does if a newer draft
    // was sealed first.
    if (buffer.state() == v1::Buffer::STATE_READY && buffer.version() >= transfer.version &&
        buffer.size_bytes() == transfer.size) {
      return std::move(buffer);
    }
    return VersionMismatch(transfer.name, transfer.version, buffer.version());
  }
  // The connection may have broken after the draft was sealed.
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
  const std::uint64_t streams = std::min(StreamsOf(upload.streams), chunks);
  const auto bound = [&](std::uint64_t i) {
    return std::min(size, chunks * i / streams * upload.chunk_bytes);
  };
  absl::Status failure = InParallel(
      streams,
      [&](std::uint64_t i) {
        return SendRangeResuming(transfer, i, {bound(i), bound(i + 1)});
      },
      [&] { transfer.abandoned = true; });
  if (failure.ok()) {
    absl::StatusOr<v1::Buffer> sealed = Seal(transfer);
    if (sealed.ok()) return sealed;
    failure = sealed.status();
  }
  failure = ExplainMissing(failure, transfer.server);  // A restart loses the draft.
  // If the server does not respond, it will discard the draft itself, so the client does not wait
  // for the server again.
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
  return Call(BufferRequest<v1::GetBufferRequest>(name, version), call, server);
}

absl::Status Client::Impl::Delete(const std::string& name, std::uint64_t version,
                                  const CallOptions& call, std::optional<std::size_t> server) {
  if (version != 0) {
    // A server that does not support versions would delete everything with this name.
    const auto found = Get(name, version, call, server);
    if (!found.ok()) return found.status();
    if (const std::uint64_t actual = found->buffer().version(); actual != version) {
      return VersionMismatch(name, version, actual);
    }
  }
  Route route;
  absl::Status status =
      Call(BufferRequest<v1::DeleteBufferRequest>(name, version), call, server, &route).status();
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

namespace {

v1::BufferSpec Spec(DType dtype, absl::Span<const std::int64_t> shape,
                    const UploadOptions& options) {
  v1::BufferSpec spec;
  spec.set_dtype(ToMessage(dtype));
  spec.mutable_shape()->Add(shape.begin(), shape.end());
  spec.set_device(options.device);
  SetTarget(options, spec);
  return spec;
}

}  // namespace

absl::StatusOr<v1::Buffer> Client::Upload(const std::string& name, DType dtype,
                                          absl::Span<const std::int64_t> shape,
                                          const Source& source, const UploadOptions& options) {
  const absl::StatusOr<std::uint64_t> size = ArrayBytes(dtype, shape);
  if (!size.ok()) return size.status();
  if (absl::Status status = source.Check(*size); !status.ok()) return status;
  CallersError error;
  const Source kept = [&](std::uint64_t offset, absl::Span<char> out) {
    return error.Call([&] { return source(offset, out); });
  };
  if (options.chunk_bytes == 0 || options.chunk_bytes % 64 != 0 ||
      options.chunk_bytes > kMaxChunk) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPTION",
                     absl::StrCat("chunk_bytes is ", options.chunk_bytes,
                                  ", not a positive multiple of 64 of at most ", kMaxChunk));
  }
  v1::CreateBufferRequest create;
  create.set_name(name);
  *create.mutable_spec() = Spec(dtype, shape, options);
  if (auto done = impl().shared().TryUpload(create, *size, kept, options))
    return error.Or(*std::move(done));
  return error.Or(options.streams > 1 && *size > options.chunk_bytes
                      ? impl().UploadRanges(create, *size, kept, options)
                      : impl().UploadWhole(create, *size, kept, options));
}

absl::StatusOr<SharedMemory> Client::MakeSharedMemory(std::size_t bytes) {
  return impl().shared().MakeMemory(bytes, TransferLimit(impl(), {}, {}));
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
  return TakeBuffer(TransferLimit(impl(), {}, options.cancel).Call(request));
}

// --- Downloads -----------------------------------------------------------------------------------

absl::StatusOr<v1::DownloadSharedResponse> Client::DownloadShared(
    const std::string& name, const SharedMemory& memory, std::size_t offset, std::size_t size,
    std::uint64_t begin, std::uint64_t version) {
  if (absl::Status status = CheckShared(memory, offset, size); !status.ok()) return status;
  auto request = BufferRequest<v1::DownloadSharedRequest>(name, version);
  request.set_offset(begin);
  request.mutable_target()->set_region(memory.region());
  request.mutable_target()->set_offset(offset);
  request.mutable_target()->set_size(size);
  return TransferLimit(impl(), {}, {}).Call(request);
}

namespace {

absl::Status NoSink() {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPTION", "the download's sink is null");
}

}  // namespace

absl::StatusOr<v1::Buffer> Client::Impl::Download(const std::string& name, const RangeSink& sink,
                                                  const DownloadOptions& download,
                                                  const Route& route, std::uint32_t* checksum) {
  auto request = BufferRequest<v1::DownloadRequest>(name, download.version);
  request.set_checksums(download.checksums);
  tessera::Received received(name, sink, download);
  Attempts::Plan plan = PlanOfTransfer(name, download);
  plan.idempotent = true;
  plan.route = route;
  plan.refused = CheckMessage(request.ByteSizeLong());
  Attempts attempts(*this, std::move(plan));
  if (auto done = shared_.TryDownload(received, name, download, checksum)) return *std::move(done);
  attempts.Moved();
  for (;;) {
    const std::optional<v1::Buffer>& buffer = received.buffer();
    request.set_offset(download.offset + received.bytes());
    // The limit is never 0 here, because a download that has all bytes has ended.
    if (download.limit > 0) request.set_limit(download.limit - received.bytes());
    if (buffer) request.set_version(buffer->version());
    const absl::StatusOr<Lease> channel = Connect(attempts);
    if (!channel.ok()) return channel.status();
    grpc::ClientContext context;
    attempts.Begin(**channel, context);
    context.set_deadline(attempts.deadline());
    CountSent(request.ByteSizeLong());
    StallGuard guard(&context, options().stall_timeout, download.cancel);
    const auto reader = (*channel)->stub<v1::BufferService>().Download(&context, request);
    v1::DownloadResponse response;
    absl::Status refused;  // the error of the sink or of a check
    while (refused.ok() && reader->Read(&response)) {
      Received((*channel)->server, response);
      const std::uint64_t before = received.bytes();
      if (response.has_buffer()) refused = received.Take(response.buffer());
      if (refused.ok() && !response.data().empty()) {
        refused =
            received.Take(response.offset(), response.data(),
                          response.has_crc32c() ? std::optional(response.crc32c()) : std::nullopt);
      }
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
    if (received.IsChange(status)) return received.Changed();
    if (buffer) attempts.Stay();
    if (!attempts.Wait(status)) return ExplainMissing(status, attempts.route().server);
  }
}

absl::StatusOr<v1::Buffer> Client::Download(const std::string& name, const Sink& sink,
                                            const DownloadOptions& options) {
  if (!sink) return NoSink();
  const auto next = [&](const v1::Buffer& buffer, std::uint64_t, std::string_view bytes) {
    return sink(buffer, bytes);
  };
  DownloadOptions in_order = options;
  in_order.streams = 1;
  return DownloadRanges(name, next, in_order);
}

absl::StatusOr<v1::Buffer> Client::DownloadRanges(const std::string& name, const RangeSink& sink,
                                                  const DownloadOptions& options) {
  if (!sink) return NoSink();
  CallersError error;
  const auto kept = [&](const v1::Buffer& buffer, std::uint64_t offset, std::string_view bytes) {
    return error.Call([&] { return sink(buffer, offset, bytes); });
  };
  return error.Or(impl().DownloadRanges(name, kept, options));
}

absl::StatusOr<v1::Buffer> Client::Impl::DownloadRanges(const std::string& name,
                                                        const RangeSink& sink,
                                                        const DownloadOptions& options) {
  if (options.streams <= 1) return Download(name, sink, options);
  Route route;
  const auto found = Call(BufferRequest<v1::GetBufferRequest>(name, options.version),
                          {.cancel = options.cancel}, std::nullopt, &route);
  if (!found.ok()) return ExplainMissing(found.status(), route.server);
  const v1::Buffer& buffer = found->buffer();
  const std::uint64_t begin = std::min(options.offset, buffer.size_bytes());
  const std::uint64_t bytes = WantedBytes(buffer, options);
  constexpr std::uint64_t kLeast = std::uint64_t{8} << 20;  // minimum bytes per stream
  const std::uint64_t streams = std::min(StreamsOf(options.streams), bytes / kLeast);
  if (streams <= 1 || buffer.state() != v1::Buffer::STATE_READY)
    return Download(name, sink, options);
  if (absl::Status status = sink(buffer, begin, {}); !status.ok()) return status;

  // Ends all streams when the caller cancels the download or one of them fails.
  std::stop_source end;
  const std::stop_callback cancelled(options.cancel, [&] { end.request_stop(); });
  const auto bound = [&](std::uint64_t i) {
    return i == streams ? bytes : bytes / kLeast * i / streams * kLeast;
  };
  const auto place = [&](const v1::Buffer& from, std::uint64_t offset, std::string_view data) {
    return data.empty() ? absl::OkStatus() : sink(from, offset, data);
  };
  std::vector<std::uint32_t> checksums(streams);  // one per range
  const absl::Status failure = InParallel(
      streams,
      [&](std::uint64_t i) {
        DownloadOptions part = options;
        part.offset = begin + bound(i);
        part.limit = bound(i + 1) - bound(i);
        part.version = buffer.version();
        part.cancel = end.get_token();
        const Route only = {.only = route.server, .channel = i};
        return Download(name, place, part, only, &checksums[i]).status();
      },
      [&] { end.request_stop(); });
  if (options.cancel.stop_requested()) return Cancelled();
  if (options.version == 0 && ErrorReason(failure) == "VERSION_MISMATCH")
    return tessera::Received(name, sink, options).Changed();
  if (!failure.ok()) return failure;
  std::uint32_t checksum = 0;
  for (std::uint64_t i = 0; i < streams; ++i)
    checksum = Crc32cCombine(checksum, checksums[i], bound(i + 1) - bound(i));
  if (options.checksums && bytes == buffer.size_bytes() && buffer.has_crc32c() &&
      checksum != buffer.crc32c())
    return BadChecksum(name, "buffer.crc32c", buffer.crc32c(), checksum);
  return buffer;
}

absl::StatusOr<v1::Buffer> Client::Download(const std::string& name, absl::Span<char> out,
                                            const DownloadOptions& options) {
  std::atomic<std::size_t> filled = 0;
  const auto mismatch = [&](const v1::Buffer& buffer) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RANGE",
                     absl::StrCat("the requested range does not fill the destination's ",
                                  out.size(), " bytes exactly; the buffer '", name, "' has ",
                                  buffer.size_bytes(), " bytes"));
  };
  const auto fill = [&](const v1::Buffer& from, std::uint64_t offset, std::string_view bytes) {
    offset -= options.offset;
    if (offset > out.size() || bytes.size() > out.size() - offset) return mismatch(from);
    if (!bytes.empty()) std::memcpy(out.data() + offset, bytes.data(), bytes.size());
    filled += bytes.size();
    return absl::OkStatus();
  };
  absl::StatusOr<v1::Buffer> buffer = DownloadRanges(name, fill, options);
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
  return TakeBuffer(impl().Call(request, call));
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
  return TakeBuffer(impl().Call(BufferRequest<v1::SealBufferRequest>(name, version), call));
}

absl::StatusOr<v1::Buffer> Client::UpdateBuffer(const std::string& name,
                                                std::optional<absl::Duration> ttl,
                                                const CallOptions& call) {
  v1::UpdateBufferRequest request;
  request.set_name(name);
  if (ttl && *ttl != absl::InfiniteDuration()) *request.mutable_ttl() = ToMessage(*ttl);
  return TakeBuffer(impl().Call(request, call));
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
  return TakeBuffer(impl().Call(*request, call));
}

absl::StatusOr<v1::Buffer> Client::LinkBuffer(const std::string& source, const ResultBuffer& target,
                                              std::uint64_t version, const CallOptions& call) {
  Operand operand(source);
  operand.version = version;
  auto request = CopyRequest(operand, target, std::nullopt, {});
  request->set_link(true);
  return TakeBuffer(impl().Call(*request, call));
}

absl::StatusOr<v1::ImportBufferResponse> Client::ImportBuffer(
    const std::string& server, const std::string& source, const ResultBuffer& target,
    std::uint64_t version, const std::string& device, const CallOptions& call) {
  v1::ImportBufferRequest request;
  request.set_source(server);
  request.set_source_name(source);
  request.set_source_version(version);
  SetTarget(target, request);
  request.set_device(device);
  return impl().Call(
      request, {.timeout = call.timeout.value_or(absl::InfiniteDuration()), .cancel = call.cancel});
}

absl::StatusOr<v1::SnapshotResponse> Client::Snapshot(const CallOptions& call) {
  return impl().Call(
      v1::SnapshotRequest(),
      {.timeout = call.timeout.value_or(absl::InfiniteDuration()), .cancel = call.cancel});
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
  return impl().Call(program.request(), call);
}

absl::Status Client::StatusOf(const v1::StepResult& result) {
  if (!result.has_error()) return absl::OkStatus();
  const v1::StepError& error = result.error();
  return ErrorOf(static_cast<absl::StatusCode>(error.code()), error.message(), error);
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
  if (absl::IsNotFound(response.status())) {
    return MakeError(absl::StatusCode::kNotFound, "UNKNOWN_SERVICE",
                     absl::StrCat("the server has no service '", service, "'"),
                     {{"service", service}});
  }
  if (!response.ok()) return response.status();
  return response->status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

}  // namespace tessera
