#include "kernels/cuda/team/shares.cuh"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/shards.h"

namespace tessera {
namespace {

// A piece has at most about 1 / kMostPart of all columns. This also limits the additional memory
// that a strategy needs for a piece of b.
constexpr std::int64_t kMostPart = 2;
// The rate of copies from another GPU in bytes per second: nine tenths of the rate measured between
// two H200s.
constexpr double kCopyRate = 350e9;
// A piece has at most this many times the columns of the previous piece, because the expected rates
// are only estimates.
constexpr double kMostGrowth = 8;
// The number of columns in a piece is a multiple of every strategy's tile size.
constexpr std::int64_t kPieceUnit = 256;
// The rows of the copy are aligned to lines of the L2 cache. This alignment also satisfies TMA.
constexpr std::int64_t kLine = 128;
// The largest pitch that cudaMemcpy2DAsync accepts.
constexpr std::int64_t kMostPitch = (std::int64_t{1} << 31) - 1;

// Unused copy streams by GPU. They are kept because creating a stream takes as long as a small
// product.
class CopyStreams {
 public:
  // REQUIRES: the device is current.
  CopyStream Take(int ordinal, cudaStream_t work) {
    {
      const std::lock_guard lock(mutex_);
      if (auto& free = free_[ordinal]; !free.empty()) {
        CopyStream copies = std::move(free.back());
        free.pop_back();
        copies.work = work;
        return copies;
      }
    }
    return {MakeStreamHandle(), MakeEvent(/*timed=*/false), ordinal, work};
  }
  void Return(CopyStream copies) {
    const std::lock_guard lock(mutex_);
    free_[copies.ordinal].push_back(std::move(copies));
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<CopyStream>> free_;
};

// Never destroyed, because at process exit the driver may be unloaded first.
CopyStreams& TheCopyStreams() {
  static CopyStreams& streams = *new CopyStreams;
  return streams;
}

// Returns the ordinal of the GPU that has the memory. REQUIRES: the memory is not sharded.
int OrdinalOf(const void* data) {
  cudaPointerAttributes attributes{};
  CUDA_CHECK(cudaPointerGetAttributes(&attributes, data));
  return attributes.device;
}

// Returns how many of the bytes are on GPUs other than `here`. `otherwise` is the GPU that has the
// bytes if they are not sharded.
std::size_t BytesElsewhere(int here, const void* data, std::size_t bytes, int otherwise) {
  const auto* at = static_cast<const char*>(data);
  std::size_t elsewhere = 0;
  while (bytes > 0) {
    const CudaShardPart part = ShardPartAt(at, bytes, otherwise);
    if (part.ordinal != here) elsewhere += part.bytes;
    at += part.bytes;
    bytes -= part.bytes;
  }
  return elsewhere;
}

// Rows of `width` bytes each, or a part of one row, all on one GPU.
struct RowsOnGpu {
  char* to;
  const char* from;
  std::size_t width;
  std::size_t count;
  int ordinal;
};

// Returns the rows in pieces that are each on one GPU. For `otherwise`, see BytesElsewhere.
std::vector<RowsOnGpu> RowsByGpu(void* out, std::size_t out_pitch, const void* data,
                                 std::size_t pitch, std::size_t width, std::size_t rows,
                                 int otherwise) {
  if (pitch == width && out_pitch == width) {
    width *= rows;
    rows = 1;
  }
  std::vector<RowsOnGpu> parts;
  auto* to = static_cast<char*>(out);
  const auto* from = static_cast<const char*>(data);
  while (rows > 0) {
    const CudaShardPart part = ShardPartAt(from, (rows - 1) * pitch + width, otherwise);
    std::size_t count = 1;
    if (part.bytes < width) {  // a row on several GPUs
      for (std::size_t at = 0; at < width;) {
        const CudaShardPart some = ShardPartAt(from + at, width - at, otherwise);
        parts.push_back({to + at, from + at, some.bytes, 1, some.ordinal});
        at += some.bytes;
      }
    } else {
      count = (part.bytes - width) / pitch + 1;
      parts.push_back({to, from, width, count, part.ordinal});
    }
    to += count * out_pitch;
    from += count * pitch;
    rows -= count;
  }
  return parts;
}

// `round` is the number of elements of c that the GPU computes at a time. `rate` is the number of
// multiply-adds per second. `elsewhere` is the fraction of b that is on other GPUs.
PieceSizes SizesOf(const MatmulProblem& part, std::int64_t round, double rate, double elsewhere) {
  const std::int64_t columns = std::max<std::int64_t>(1, round / part.m / kPieceUnit) * kPieceUnit;
  const double multiply = static_cast<double>(part.m) / rate;
  const double copy = elsewhere * static_cast<double>(SizeOf(part.dtype)) / kCopyRate;
  return {.round = columns,
          .most = std::max<std::int64_t>(1, part.n / kMostPart / columns) * columns,
          .growth = std::clamp(multiply / copy, 1.0, kMostGrowth)};
}

// The work of a strategy that computes all columns in one launch.
class WholeWork {
 public:
  WholeWork(const ProductShare& share, const Strategy<MatmulProblem>& strategy)
      : share_(share), strategy_(strategy) {}
  static constexpr double kRate = 1;
  static std::int64_t Round(const MatmulProblem&, int) { return 0; }
  void Multiply(const ProductPiece&) { strategy_.launch(share_.problem(), share_.stream()); }
  void Finish() {}

 private:
  const ProductShare& share_;
  const Strategy<MatmulProblem>& strategy_;
};

}  // namespace

void CopyStreamEnd::operator()(CopyStream* copies) const noexcept {
  const std::unique_ptr<CopyStream> owned(copies);
  if (cudaSetDevice(copies->ordinal) != cudaSuccess ||
      cudaEventRecord(copies->event.get(), copies->stream.get()) != cudaSuccess ||
      cudaStreamWaitEvent(copies->work, copies->event.get(), 0) != cudaSuccess)
    cudaGetLastError();
  TheCopyStreams().Return(std::move(*copies));
}

void LaunchGathered(const Strategy<MatmulProblem>& strategy, const MatmulProblem& p,
                    std::span<const TeamShare> shares) {
  EnqueueProductShares<WholeWork>(p, shares, strategy);
}

ProductShare::ProductShare(const MatmulProblem& p, const TeamShare& share, std::int64_t round,
                           double rate, std::size_t index, std::size_t count)
    : stream_(Cuda(*share.stream)),
      problem_(RowsOf(p, share)),
      sizes_{.round = p.n, .most = p.n, .growth = 1},
      left_(p.n) {
  const double elsewhere = TakeCopy(p);
  if (elsewhere > 0 && round > 0) {
    sizes_ = SizesOf(problem_, round, rate, elsewhere);
    at_ = p.n * static_cast<std::int64_t>(index) / static_cast<std::int64_t>(count) / kPieceUnit *
          kPieceUnit;
  }
  Fetch();
}

double ProductShare::TakeCopy(const MatmulProblem& p) {
  const std::int64_t size = static_cast<std::int64_t>(SizeOf(p.dtype));
  const auto [rows, columns] = p.transpose_b ? std::pair(p.n, p.k) : std::pair(p.k, p.n);
  const auto bytes = static_cast<std::size_t>(((rows - 1) * p.ldb + columns) * size);
  source_ordinal_ = OrdinalOf(p.b);
  const std::size_t elsewhere =
      BytesElsewhere(stream_.device().ordinal(), p.b, bytes, source_ordinal_);
  if (p.ldb * size > kMostPitch || elsewhere == 0) return 0;
  const std::int64_t pitch = CeilDiv(columns * size, kLine) * kLine;
  try {
    problem_.b = stream_.Scratch(static_cast<std::size_t>(rows * pitch));
  } catch (const DeviceError& error) {
    if (error.kind() != DeviceError::Kind::kOutOfScratch &&
        error.kind() != DeviceError::Kind::kOutOfMemory)
      throw;
    return 0;
  }
  problem_.ldb = pitch / size;
  source_ = p.b;
  source_pitch_ = p.ldb;
  from_others_ = TakeCopyStream();
  if (elsewhere < bytes) from_here_ = TakeCopyStream();
  return static_cast<double>(elsewhere) / static_cast<double>(bytes);
}

std::unique_ptr<CopyStream, CopyStreamEnd> ProductShare::TakeCopyStream() {
  std::unique_ptr<CopyStream, CopyStreamEnd> copies(
      new CopyStream(TheCopyStreams().Take(stream_.device().ordinal(), stream_.handle())));
  CUDA_CHECK(cudaEventRecord(copies->event.get(), copies->work));
  CUDA_CHECK(cudaStreamWaitEvent(copies->stream.get(), copies->event.get(), 0));
  return copies;
}

void ProductShare::Copy(const ProductPiece& piece) {
  const auto size = static_cast<std::size_t>(SizeOf(problem_.dtype));
  const auto bytes = [&](std::int64_t elements) {
    return static_cast<std::size_t>(elements) * size;
  };
  const bool is_rows = problem_.transpose_b;
  auto* const out = static_cast<char*>(const_cast<void*>(problem_.b)) +
                    bytes(piece.first * (is_rows ? problem_.ldb : 1));
  const auto* const data =
      static_cast<const char*>(source_) + bytes(piece.first * (is_rows ? source_pitch_ : 1));
  const std::int64_t rows = is_rows ? piece.columns : problem_.k;
  const std::int64_t columns = is_rows ? problem_.k : piece.columns;
  // The pitch of a single row is arbitrary, and may be less than its width.
  const std::size_t pitch = bytes(std::max(source_pitch_, columns));
  const std::size_t out_pitch = bytes(problem_.ldb);
  std::vector<RowsOnGpu> parts = RowsByGpu(out, out_pitch, data, pitch, bytes(columns),
                                           static_cast<std::size_t>(rows), source_ordinal_);
  const auto is_here = [here = stream_.device().ordinal()](const RowsOnGpu& part) {
    return part.ordinal == here;
  };
  const auto own = std::ranges::find_if(parts, is_here);
  if (own != parts.end()) std::ranges::rotate(parts, own);
  for (const RowsOnGpu& part : parts) {
    const CopyStream& copies = is_here(part) ? *from_here_ : *from_others_;
    if (part.count == 1) {
      CUDA_CHECK(
          cudaMemcpyAsync(part.to, part.from, part.width, cudaMemcpyDefault, copies.stream.get()));
    } else {
      CUDA_CHECK(cudaMemcpy2DAsync(part.to, out_pitch, part.from, pitch, part.width, part.count,
                                   cudaMemcpyDefault, copies.stream.get()));
    }
  }
  for (const CopyStream* copies : {from_others_.get(), from_here_.get()}) {
    if (copies != nullptr) CUDA_CHECK(cudaEventRecord(copies->event.get(), copies->stream.get()));
  }
}

void ProductShare::Fetch() {
  next_ = {at_, std::min(sizes_.Next(next_.columns, left_), problem_.n - at_)};
  if (source_ != nullptr && next_.columns > 0) Copy(next_);
  at_ = (at_ + next_.columns) % problem_.n;
  left_ -= next_.columns;
}

ProductPiece ProductShare::Next() {
  for (const CopyStream* copies : {from_others_.get(), from_here_.get()}) {
    if (copies != nullptr) CUDA_CHECK(cudaStreamWaitEvent(copies->work, copies->event.get(), 0));
  }
  const ProductPiece piece = next_;
  Fetch();
  return piece;
}

}  // namespace tessera
