// Copies and casts, on a device and between devices.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/choose/map_range.h"
#include "kernels/compute.h"
#include "kernels/run/execute.h"
#include "kernels/run/pieces.h"
#include "kernels/run/stage.h"

namespace tessera {

namespace {

// `streams` are the streams that run the copy. The estimate is added to their expected seconds.
absl::Status CheckCopySeconds(std::initializer_list<Stream*> streams, const View& view, DType dtype,
                              const RunOptions& options) {
  if (options.pace == nullptr) return absl::OkStatus();
  const double estimate = options.pace->EstimateCopy(view, dtype);
  if (estimate > options.max_seconds) {
    options.pace->ForgetCopy(view, dtype);
    return TooLong("the copy", "", estimate, options.max_seconds, "");
  }
  for (Stream* const stream : streams) stream->Expect(estimate);
  return absl::OkStatus();
}

// Converts n contiguous elements to another type. Throws DeviceError.
void ConvertOn(Stream& stream, const void* in, DType from, void* out, DType to, std::int64_t n) {
  if (IsComputed(from) && IsComputed(to)) return stream.Convert(in, from, out, to, n);
  const Expression identity = Identity();
  MapProblem cast{.dtype = to, .n = n, .program = *identity.Compile({from}, to)};
  cast.operands[0] = {.data = in, .dtype = from, .shape = {.rank = 1, .dims = {n}}, .strides = {1}};
  LaunchMapRange(cast, 0, n, out, stream);
}

}  // namespace

absl::Status RunCopy(Stream& stream, const View& view, DType dtype, const Output& to,
                     const RunOptions& options) {
  RETURN_IF_ERROR(CheckCopySeconds({&stream}, view, dtype, options));
  ASSIGN_OR_RETURN(void* const out, to.Get());
  const Stopwatch watch;
  absl::Status status = Finished(stream, [&] {
    if (dtype == view.dtype) return stream.Gather(view, out);
    if (!HasGaps(view))
      return ConvertOn(stream, view.data, view.dtype, out, dtype, view.elements());
    const std::int64_t most =
        std::min(view.elements(), PieceElements(stream, SizeOf(view.dtype), /*copies=*/1));
    void* const copy = stream.Scratch(static_cast<std::size_t>(most) * SizeOf(view.dtype));
    ForPieces(view.shape, most, [&](const Piece& piece) {
      stream.Gather(piece.Of(view), copy);
      ConvertOn(stream, copy, view.dtype, At(out, piece.first, dtype), dtype,
                piece.shape.elements());
      return !stream.stopped();
    });
  });
  const double seconds = watch.seconds();
  if (options.pace != nullptr &&
      Teaches(status, stream, seconds, options.pace->EstimateCopy(view, dtype)))
    options.pace->LearnCopy(view, dtype, seconds);
  return status;
}

absl::Status RunCopyAcross(Stream& from, const View& view, DType dtype, Stream& to, void* out,
                           const RunOptions& options) {
  RETURN_IF_ERROR(CheckCopySeconds({&from, &to}, view, dtype, options));
  if (view.elements() == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const bool direct, Guard(from.device(), [&] { return from.ReachesPeer(to); }));
  const bool converts = dtype != view.dtype, gathers = HasGaps(view);
  const std::size_t size = std::max(SizeOf(view.dtype), SizeOf(dtype));
  // The number of bytes copied between two checks of Stream::stopped(). At each check, the link
  // between two GPUs is idle for a tenth of a millisecond. Copying this many bytes takes about 3 ms
  // over NVLink, and a few tenths of a millisecond over a GPU's bus to the host. Elements that are
  // gathered or converted on the way must fit in scratch memory.
  const std::int64_t piece_bytes = std::int64_t{direct ? 1024 : 4} << 20;
  std::int64_t most = std::min(view.elements(), piece_bytes / static_cast<std::int64_t>(size));
  if (!direct || converts || gathers)
    most = std::min(most, PieceElements(from, size, /*copies=*/2));
  absl::Status sent;
  absl::Status status = Finished(from, [&] {
    const auto scratch = [&](bool wanted, DType of) {
      return wanted ? from.Scratch(static_cast<std::size_t>(most) * SizeOf(of)) : nullptr;
    };
    void* const gathered = scratch(gathers, view.dtype);
    void* const converted = scratch(converts, dtype);
    std::vector<char> chunk(direct ? 0 : static_cast<std::size_t>(most) * SizeOf(dtype));
    ForPieces(view.shape, most, [&](const Piece& piece) {
      const View part = piece.Of(view);
      const std::int64_t n = piece.shape.elements();
      const void* source = part.data;
      if (gathers) {
        from.Gather(part, gathered);
        source = gathered;
      }
      if (converts) {
        ConvertOn(from, source, view.dtype, converted, dtype, n);
        source = converted;
      }
      const std::size_t bytes = static_cast<std::size_t>(n) * SizeOf(dtype);
      void* const place = At(out, piece.first, dtype);
      if (direct) {
        from.CopyToPeer(to, place, source, bytes);
        from.Synchronize();
      } else {
        from.CopyToHost(chunk.data(), source, bytes);
        sent = CopyToDevice(to, place, chunk.data(), bytes);
      }
      return sent.ok() && !from.stopped() && !to.stopped();
    });
  });
  // Work in flight may still write to out.
  sent.Update(Guard(to.device(), [&] { to.Synchronize(); }));
  return sent.ok() ? status : sent;
}

}  // namespace tessera
