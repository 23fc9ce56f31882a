// Downloads over streams of messages.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/guarded.h"
#include "client/rpc/connection.h"
#include "client/transfers/parallel.h"
#include "client/transfers/received.h"
#include "client/transfers/shared_transfers.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/crc32c.h"

namespace tessera {
namespace {

// Downloads in order, through shared memory if possible, and otherwise over one stream. route:
// where the stream may go. If the options request checksums and `checksum` is not null, *checksum
// receives the CRC-32C of the bytes.
absl::StatusOr<v1::Buffer> InOrder(ClientConnection& connection, const std::string& name,
                                   const RangeSink& sink, const DownloadOptions& download,
                                   const Route& route = {}, std::uint32_t* checksum = nullptr) {
  if (auto done = connection.shared().TryDownload(name, sink, download, checksum))
    return *std::move(done);
  auto request = BufferRequest<v1::DownloadRequest>(name, download.version);
  request.set_offset(download.offset);
  request.set_limit(download.limit);
  request.set_checksums(download.checksums);
  Received received(name, sink, download);
  Attempts::Plan plan = connection.PlanOfTransfer(name, download);
  plan.idempotent = true;
  plan.route = route;
  Attempts attempts(connection, std::move(plan));
  for (;;) {
    const absl::StatusOr<Lease> channel = connection.Connect(attempts);
    if (!channel.ok()) return channel.status();
    grpc::ClientContext context;
    attempts.Begin(**channel, context);
    context.set_deadline(attempts.deadline());
    connection.CountSent(request.ByteSizeLong());
    StallGuard guard(&context, connection.options().stall_timeout, download.cancel);
    const auto reader = (*channel)->stub<v1::BufferService>().Download(&context, request);
    v1::DownloadResponse response;
    absl::Status refused;  // the error of the sink or of a check
    while (refused.ok() && reader->Read(&response)) {
      connection.CountReceived(response.ByteSizeLong());
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
    if (status.ok() || (refused.ok() && received.IsAll())) return received.Finish(checksum);
    if (received.IsChange(status)) return Changed(name);
    const std::optional<v1::Buffer>& buffer = received.buffer();
    if (buffer) attempts.Stay();
    if (!attempts.Wait(status)) return connection.ExplainMissing(status, attempts.route().server);
    request.set_offset(download.offset + received.bytes());
    request.set_limit(download.limit > 0 ? download.limit - received.bytes() : 0);
    if (buffer) request.set_version(buffer->version());
  }
}

}  // namespace

absl::StatusOr<v1::Buffer> DownloadTo(ClientConnection& connection, const BufferRef& ref,
                                      const RangeSink& sink, bool in_order,
                                      DownloadOptions options) {
  if (!sink) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPTION",
                     "the download's sink is null");
  }
  if (ref.version != 0) options.version = ref.version;
  const std::string& name = ref.name;
  if (in_order || options.streams <= 1) return InOrder(connection, name, sink, options);
  Route route;
  const auto found = connection.Call(BufferRequest<v1::GetBufferRequest>(name, options.version),
                                     {.cancel = options.cancel, .metadata = options.metadata},
                                     std::nullopt, &route);
  if (!found.ok()) return connection.ExplainMissing(found.status(), route.server);
  const v1::Buffer& buffer = found->buffer();
  const std::uint64_t begin = std::min(options.offset, buffer.size_bytes());
  const std::uint64_t bytes = WantedBytes(buffer, options);
  constexpr std::uint64_t kLeast = std::uint64_t{8} << 20;  // minimum bytes per stream
  const std::uint64_t streams = std::min(StreamsOf(options.streams), bytes / kLeast);
  if (streams <= 1 || buffer.state() != v1::Buffer::STATE_READY)
    return InOrder(connection, name, sink, options);
  if (absl::Status status = CallGuarded([&] { return sink(buffer, begin, {}); }); !status.ok())
    return status;

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
        return InOrder(connection, name, place, part, only, &checksums[i]).status();
      },
      [&] { end.request_stop(); });
  if (options.cancel.stop_requested()) return Cancelled();
  if (!failure.ok()) {
    const std::string reason = ErrorReason(failure);
    if (options.version == 0 && (reason == "VERSION_MISMATCH" || reason == "BUFFER_NOT_FOUND"))
      return Changed(name);
    return failure;
  }
  std::uint32_t checksum = 0;
  for (std::uint64_t i = 0; i < streams; ++i)
    checksum = Crc32cCombine(checksum, checksums[i], bound(i + 1) - bound(i));
  if (absl::Status wrong = CheckWhole(buffer, options, bytes, checksum); !wrong.ok()) return wrong;
  return buffer;
}

absl::StatusOr<v1::Buffer> DownloadInto(
    ClientConnection& connection, const BufferRef& ref, std::optional<DType> dtype,
    const std::function<absl::Span<char>(std::uint64_t bytes)>& memory,
    const DownloadOptions& options) {
  const std::size_t element = dtype ? SizeOf(*dtype) : 1;
  if (options.offset % element != 0 || options.limit % element != 0) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_RANGE",
        absl::StrCat("the range does not consist of whole elements of ", element, " bytes"),
        {{"offset", absl::StrCat(options.offset)},
         {"limit", absl::StrCat(options.limit)},
         {"element", absl::StrCat(element)}});
  }
  absl::Span<char> out;
  const auto fill = [&](const v1::Buffer& from, std::uint64_t offset, std::string_view bytes) {
    if (!bytes.empty()) {
      std::memcpy(out.data() + (offset - options.offset), bytes.data(), bytes.size());
      return absl::OkStatus();
    }
    if (dtype)
      if (absl::Status status = CheckDType(*dtype, from.dtype()); !status.ok()) return status;
    const std::uint64_t wanted = WantedBytes(from, options);
    out = memory(wanted);
    return CheckSize(wanted, out.size(), /*exact=*/true);
  };
  return DownloadTo(connection, ref, fill, /*in_order=*/false, options);
}

}  // namespace tessera
