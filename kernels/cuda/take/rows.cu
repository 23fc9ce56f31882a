// Take with vectors of 16 bytes, for rows of at least 16 bytes whose elements are adjacent in x.
//
// A row of the result is cut into slots: the aligned vectors of the result that it overlaps. The
// first and the last slot of a row may be shorter. A group of 1 to 32 adjacent lanes copies the
// slots of a piece, which is a whole row if the row has at most 32 slots. An index is therefore
// read by a few lanes instead of once per element. A group takes kEach pieces at the same time: it
// loads their indices, then a vector of each, and then stores them, so each thread has kEach loads
// of 16 bytes in flight.
//
//   result   .....[aaaaaaaaaaa|aaaaaaaaaaaaaaaa|aaaaaaaa]......    slots 0, 1 and 2 of row a
//   x        ..[aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa]...........
//
// Stores of whole slots are aligned. If the source of a slot is not, its bytes come from the two
// aligned vectors of x that it straddles, provided that both are inside the row. All other slots
// are copied element by element. No byte outside of a row is read. If the host finds that all rows
// are aligned, a kernel without these cases runs. This kernel needs few registers, so enough loads
// are in flight to keep the memory busy.
//
// Cost at 2^14 rows of 64 f32: 4 MiB and 2^14 indices read, 4 MiB written.
#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>

#include "kernels/cuda/common/loads.cuh"
#include "kernels/cuda/take/take.cuh"

namespace tessera {
namespace {

constexpr int kBlock = 256;
constexpr int kEach = 4;

// Distances are in bytes.
struct RowLayout {
  const unsigned char* x;
  unsigned char* out;
  std::int64_t rows, count, bytes;  // bytes: of a row
  std::int64_t outer_stride, stride;
  std::int64_t pieces;  // of a row
  int lane_bits;        // a group has 2^lane_bits lanes
};

__host__ __device__ unsigned Misaligned(const void* address) {
  return static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(address) % kVectorBytes);
}

// Returns the 16 bytes that begin at byte `shift` of the 32 bytes in lo and hi, for any shift below
// 16.
__device__ uint4 Shifted(const uint4& lo, const uint4& hi, unsigned shift) {
  const bool two = (shift & 8) != 0, one = (shift & 4) != 0;
  const unsigned a0 = two ? lo.z : lo.x, a1 = two ? lo.w : lo.y, a2 = two ? hi.x : lo.z,
                 a3 = two ? hi.y : lo.w, a4 = two ? hi.z : hi.x, a5 = two ? hi.w : hi.y;
  const unsigned b0 = one ? a1 : a0, b1 = one ? a2 : a1, b2 = one ? a3 : a2, b3 = one ? a4 : a3,
                 b4 = one ? a5 : a4;
  const unsigned bits = shift % 4 * 8;
  return make_uint4(__funnelshift_r(b0, b1, bits), __funnelshift_r(b1, b2, bits),
                    __funnelshift_r(b2, b3, bits), __funnelshift_r(b3, b4, bits));
}

// The part of a row that one thread copies: elements of type E, an unsigned type of the elements'
// size. A slot is constructed, loaded and stored, in this order. A default-constructed slot does
// nothing.
template <class E>
class Slot {
 public:
  Slot() = default;
  // Slot `number` of a row of `bytes` bytes, which may be beyond the row's end.
  __device__ Slot(const unsigned char* from, unsigned char* to, std::int64_t bytes,
                  std::int64_t number) {
    const std::int64_t first = number * kVectorBytes - Misaligned(to);
    const std::int64_t begin = max(first, std::int64_t{0}), end = min(first + kVectorBytes, bytes);
    if (begin >= end) return;
    from_ = from + begin;
    to_ = to + begin;
    bytes_ = static_cast<int>(end - begin);
    const std::int64_t low = begin - Misaligned(from_);
    whole_ =
        bytes_ == kVectorBytes && (low == begin || (low >= 0 && low + 2 * kVectorBytes <= bytes));
  }
  __device__ void Load() {
    if (!whole_) return;
    const unsigned shift = Misaligned(from_);
    low_ = LoadAligned<tessera::Load::kAgain>(from_ - shift);
    if (shift != 0) high_ = LoadAligned<tessera::Load::kAgain>(from_ - shift + kVectorBytes);
  }
  __device__ void Store() const {
    if (whole_) {
      *reinterpret_cast<uint4*>(to_) = Shifted(low_, high_, Misaligned(from_));
      return;
    }
    const auto* from = reinterpret_cast<const E*>(from_);
    auto* to = reinterpret_cast<E*>(to_);
    for (int i = 0; i < bytes_ / static_cast<int>(sizeof(E)); ++i) to[i] = __ldg(from + i);
  }

 private:
  const unsigned char* from_ = nullptr;
  unsigned char* to_ = nullptr;
  int bytes_ = 0;
  bool whole_ = false;  // whether the slot has 16 bytes, all in vectors inside the row
  uint4 low_ = {}, high_ = {};
};

// A slot of rows that are aligned.
template <>
class Slot<uint4> {
 public:
  Slot() = default;
  __device__ Slot(const unsigned char* from, unsigned char* to, std::int64_t bytes,
                  std::int64_t number) {
    if (number * kVectorBytes >= bytes) return;
    from_ = from + number * kVectorBytes;
    to_ = to + number * kVectorBytes;
  }
  __device__ void Load() {
    if (to_ != nullptr) vector_ = LoadAligned<tessera::Load::kOnce>(from_);
  }
  __device__ void Store() const {
    if (to_ != nullptr) *reinterpret_cast<uint4*>(to_) = vector_;
  }

 private:
  const unsigned char* from_ = nullptr;
  unsigned char* to_ = nullptr;
  uint4 vector_ = {};
};

// A piece of a row, with the index that has been loaded for it.
template <class I>
struct Piece {
  std::int64_t o, j, number;  // number: of the thread's slot
  I loaded;
};

template <class E, class I>
__global__ void __launch_bounds__(kBlock) TakeRows(RowLayout p, TakeIndexes<I> indexes) {
  const std::int64_t items = p.rows * p.pieces;
  const std::int64_t stride = (GridThreads() >> p.lane_bits) * kEach;
  const int lane = static_cast<int>(threadIdx.x) & ((1 << p.lane_bits) - 1);
  for (std::int64_t item = (GridThread() >> p.lane_bits) * kEach; item < items; item += stride) {
    const std::int64_t row = p.pieces == 1 ? item : item / p.pieces;
    std::int64_t piece = item - row * p.pieces;
    std::int64_t o = p.rows == p.count ? 0 : row / p.count;
    std::int64_t j = row - o * p.count;
    Piece<I> taken[kEach];
    Slot<E> slots[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      taken[k] = {o, j, (piece << p.lane_bits) + lane, 0};
      if (item + k < items) taken[k].loaded = indexes.Load(j);
      if (++piece < p.pieces) continue;
      piece = 0;
      if (++j < p.count) continue;
      j = 0;
      ++o;
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (item + k >= items) continue;
      const Piece<I>& one = taken[k];
      const bool marks = one.o == 0 && one.number == 0;
      const std::int64_t index = indexes.Resolve(one.loaded, one.j, marks);
      if (index < 0) continue;
      slots[k] = Slot<E>(p.x + one.o * p.outer_stride + index * p.stride,
                         p.out + (one.o * p.count + one.j) * p.bytes, p.bytes, one.number);
    }
#pragma unroll
    for (Slot<E>& slot : slots) slot.Load();
#pragma unroll
    for (const Slot<E>& slot : slots) slot.Store();
  }
}

// Returns the layout with the groups that leave the fewest lanes idle. If there are several such
// layouts, the one with the largest groups is returned. Groups have 8 lanes or more if the row is
// long enough, because 8 lanes read 128 adjacent bytes.
RowLayout LayoutOf(const TakeProblem& p) {
  const auto size = static_cast<std::int64_t>(SizeOf(p.dtype));
  RowLayout layout = {.x = static_cast<const unsigned char*>(p.x),
                      .out = static_cast<unsigned char*>(p.out),
                      .rows = p.outer * p.count,
                      .count = p.count,
                      .bytes = p.inner * size,
                      .outer_stride = p.outer == 1 ? 0 : p.strides[0] * size,
                      .stride = p.length == 1 ? 0 : p.strides[1] * size,
                      .pieces = 0,
                      .lane_bits = 0};
  // A row that begins at byte 15 of a vector has the most slots.
  const bool aligned = Misaligned(layout.out) == 0 && layout.bytes % kVectorBytes == 0;
  const std::int64_t slots = CeilDiv(layout.bytes + (aligned ? 0 : kVectorBytes - 1), kVectorBytes);
  std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
  const int most_bits = std::min(CeilLog2(slots), CeilLog2(kWarpSize));
  for (int bits = most_bits; bits >= std::min(3, most_bits); --bits) {
    const std::int64_t pieces = CeilDiv(slots, std::int64_t{1} << bits);
    if (pieces << bits >= fewest) continue;
    fewest = pieces << bits;
    layout.pieces = pieces;
    layout.lane_bits = bits;
  }
  return layout;
}

bool IsAligned(const RowLayout& p) {
  return Misaligned(p.x) == 0 && Misaligned(p.out) == 0 && p.bytes % kVectorBytes == 0 &&
         p.outer_stride % kVectorBytes == 0 && p.stride % kVectorBytes == 0;
}

// Calls f(E{}) with the type of the slots' elements.
template <class F>
void DispatchSlot(DType dtype, const RowLayout& layout, F&& f) {
  if (IsAligned(layout)) {
    f(uint4{});
  } else {
    DispatchSize(dtype, f);
  }
}

void Enqueue(const TakeProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  const RowLayout layout = LayoutOf(p);
  const std::int64_t groups = CeilDiv(layout.rows * layout.pieces, kEach);
  const Grid grid = MakeGrid(groups << layout.lane_bits, p.launch, kBlock, 1);
  DispatchSlot(p.dtype, layout, [&]<class E>(E) {
    DispatchIndex(p, [&]<class I>(I) {
      LaunchWithIndexes<I>(p, cuda, [&](const TakeIndexes<I>& indexes) {
        TakeRows<E><<<grid.blocks, kBlock, 0, cuda.handle()>>>(layout, indexes);
        CUDA_CHECK_LAUNCH(TakeRows);
      });
    });
  });
}

std::string Refuses(const TakeProblem& p) {
  return TakeRowBytes(p) >= kVectorBytes ? "" : "rows of 16 bytes or more, adjacent in x";
}

}  // namespace

extern constexpr Strategy<TakeProblem> kTakeRows = {
    .name = "rows",
    .summary = "vectors of 16 bytes, four in flight per thread; up to a warp per row",
    .source = "grid-stride copies as in gathers of embeddings, with aligned stores",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .limits = {.grid_size = kAnyGridSize},
    .roundoff = [](const TakeProblem&) { return 0.0; },
    .cost = CudaTakeCost,
    .launch = Enqueue,
    .refuses = Refuses,
};

}  // namespace tessera
