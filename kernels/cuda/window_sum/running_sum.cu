// WindowSum from running sums that restart in every segment. It takes a few additions per element,
// for any radius.
//
// Compared with `shared`, the number of additions does not grow with the radius. The obvious method
// is one running sum over the whole array and the difference of two of its values: window =
// sum[end] - sum[begin]. Then, however, every element would leave its rounding error in all later
// windows, and after one large value nothing would be left of small ones. For this reason nothing
// is subtracted here. Instead, put `radius` zeros before the array and cut it into segments as wide
// as a window, w = 2 radius + 1. Result i is the sum of positions i to i + w - 1, which are the end
// of one segment and the beginning of the next (van Herk, 1992, and Gil and Werman, 1993, for
// maxima):
//
//     segments   |. . . . . . .|. . . . . . .|. . . . . . .|
//     window            |<--------- w ------>|
//                        suffix | prefix
//
//     out[i] = suffix[i] + prefix[i + w - 1],    or, where the window is a segment, only the prefix
//
// Suffixes and prefixes are scans that restart in each segment, one from the right and one from the
// left. Segments may be one element long or longer than any block can hold, so blocks take chunks
// of kChunk positions instead of segments. The sums that cross from one chunk into the next are
// passed on:
// 1. ChunkTotals computes the sum of each chunk's last positions, from the beginning of its last
//    segment (or of the chunk). For short segments it reads very little.
// 2. ScanTotals computes the sum that crosses from each chunk into the next. This is the chunk's
//    total, plus the sum that crosses into the chunk if its last segment begins before the chunk.
//    There is one block for each direction, because there are few chunks.
// 3. ScanChunks, from the right, computes every position's suffix.
// 4. ScanChunks, from the left, computes every position's prefix and adds the suffix from step 3.
// Each kernel starts while the previous kernel is still running, and reads nothing but the array
// until that kernel has ended. Within a block, the scan first covers the kItems positions of a
// thread, then a warp, then the block. Each level tests how far back the segment reaches, so the
// values need no flags (ScanSegments).
//
// Cost at n = 2^20, radius 8, f32: 12 MiB read, 8 MiB written, 256 chunks, about 8 * 2^20
// additions; 4 launches; depth under 100. At n = 2^28 the traffic is 5.4 to 7.5 GB, depending on
// the radius, because step 1 reads long segments twice more. This takes 1.2 to 1.8 ms at 4.3 TB/s.
//
// The kernels are correct for any n and radius: positions outside the array count as zeros and
// continue without end, so all chunks have the same length. They are correct for any alignment,
// because loads are scalar. All sums are Fold::Wide. Suffixes are kept as Fold::Acc, in the result
// itself if its elements have that width.
#include <algorithm>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/overlap.cuh"
#include "kernels/cuda/window_sum/window.cuh"

namespace tessera {
namespace {

constexpr int kThreads = 512;
constexpr int kItems = 8;  // positions per thread
constexpr int kChunk = kThreads * kItems;
constexpr int kScanThreads = 1024;  // threads of the block that scans totals

// The positions in the order of a scan, from the left or from the right. length is a multiple of
// width, so segments begin at multiples of width in both directions.
template <class T>
struct Positions {
  const T* x;
  std::int64_t n, radius, width, length;

  __device__ std::int64_t Mirrored(bool backward, std::int64_t s) const {
    return backward ? length - 1 - s : s;
  }
  __device__ WideOf<T> Load(bool backward, std::int64_t s) const {
    const std::int64_t i = Mirrored(backward, s) - radius;
    return i < 0 || i >= n ? 0 : static_cast<WideOf<T>>(static_cast<ValueOf<T>>(x[i]));
  }
};

// The chunks that a scan needs for the requested results. It scans chunks [begin, end). The totals
// that cross into these chunks come from chunk `lead` at the earliest.
struct Chunks {
  std::int64_t lead, begin, end;
};
struct BothWays {
  Chunks left, right;
};

// Computes the required totals, with one block per total. `totals` holds one total per chunk for
// the scan from the left, followed by one per chunk for the scan from the right.
template <class T>
__global__ void __launch_bounds__(kThreads)
    ChunkTotals(Positions<T> positions, BothWays needed, std::int64_t chunks, WideOf<T>* totals) {
  using F = WindowFold<T>;
  AllowNextKernel();
  const std::int64_t from_left = needed.left.end - needed.left.lead;
  const bool backward = blockIdx.x >= from_left;
  const std::int64_t chunk =
      backward ? needed.right.lead + (blockIdx.x - from_left) : needed.left.lead + blockIdx.x;
  const std::int64_t end = (chunk + 1) * kChunk;
  const std::int64_t first = max(chunk * kChunk, (end - 1) / positions.width * positions.width);
  const WideOf<T> sum = FoldThread<F>(first + threadIdx.x, end, std::int64_t{kThreads},
                                      [&](std::int64_t s) { return positions.Load(backward, s); });
  const WideOf<T> total = FoldBlockShuffle<F>(sum);
  if (threadIdx.x == 0) totals[chunk + (backward ? chunks : 0)] = total;
}

// The values that the threads of a block pass from warp to warp.
template <class A>
struct WarpValues {
  A values[kWarpSize];
  int reaches[kWarpSize];
};

// Returns how far back a segment reaches, capped at just above the number of positions that a block
// scans.
__device__ int Reach(std::int64_t positions) {
  return static_cast<int>(min(positions, std::int64_t{kScanThreads} * kChunk + 1));
}

// Adds the values of earlier threads to a thread's value, as far back as the thread's segment goes.
// A value stands for `unit` positions. `reach` is the number of positions from the beginning of the
// segment to the last of these positions. A sum over d threads is extended by the sum that ends d
// threads earlier if and only if the segment is longer than d units:
//
//     thread          t-3       t-2       t-1        t
//     positions    . . . .|. . . .|. . | . .|. . . .      unit 4; a segment begins at |
//                                   reach = 6 ^      6 > 1 * 4: add t - 1, the sum of those of its
//                                                    4 positions that belong to the segment
//                                                    6 <= 2 * 4: add no more
//
// REQUIRES: the block has full warps, and there is a barrier between two calls.
template <class A>
__device__ A ScanSegments(A value, int reach, int unit, WarpValues<A>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const A before = __shfl_up_sync(kFullMask, value, offset);
    if (lane >= offset && reach > offset * unit) value = WrapAdd(before, value);
  }
  if (lane == kWarpSize - 1) {
    shared.values[warp] = value;
    shared.reaches[warp] = reach;
  }
  __syncthreads();  // every warp's last value is stored
  if (warp == 0) {
    A warp_value = lane < warps ? shared.values[lane] : 0;
    const int warp_reach = lane < warps ? shared.reaches[lane] : 0;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const A before = __shfl_up_sync(kFullMask, warp_value, offset);
      if (lane >= offset && warp_reach > offset * kWarpSize * unit)
        warp_value = WrapAdd(before, warp_value);
    }
    shared.values[lane] = warp_value;
  }
  __syncthreads();  // the warps' values are scanned
  if (warp > 0 && reach > (lane + 1) * unit) value = WrapAdd(shared.values[warp - 1], value);
  return value;
}

// Replaces totals[c] with the sum that crosses from chunk c into the next, if that sum depends only
// on the totals starting at `lead`. Block 0 does the scan from the left, and block 1 does the scan
// from the right.
template <class A>
__global__ void __launch_bounds__(kScanThreads)
    ScanTotals(std::int64_t width, BothWays needed, std::int64_t chunks, A* totals) {
  __shared__ WarpValues<A> shared;
  __shared__ A last;
  AllowNextKernel();
  WaitForKernelBefore();
  totals += blockIdx.x * chunks;
  const Chunks range = blockIdx.x == 0 ? needed.left : needed.right;
  A crossing = 0;  // into the first chunk of the round
  for (std::int64_t first = range.lead / kScanThreads * kScanThreads; first < range.end;
       first += kScanThreads) {
    const std::int64_t chunk = first + threadIdx.x;
    const int reach = Reach(((chunk + 1) * kChunk - 1) % width + 1);
    const bool counts = chunk >= range.lead && chunk < range.end;
    A value = counts ? totals[chunk] : 0;
    value = ScanSegments<A>(value, reach, kChunk, shared);
    if (reach > (static_cast<int>(threadIdx.x) + 1) * kChunk) value = WrapAdd(crossing, value);
    if (counts) totals[chunk] = value;
    if (threadIdx.x == kScanThreads - 1) last = value;
    __syncthreads();  // the round's last value is stored
    crossing = last;  // not overwritten before the barriers of the next ScanSegments
  }
}

// Returns (offset + distance) % width for an offset below width and a distance within a chunk. A
// 64-bit division is a routine of many instructions on a GPU, and would be the longest part of a
// short scan.
__device__ std::int64_t OffsetAfter(std::int64_t offset, int distance, std::int64_t width) {
  const std::int64_t sum = offset + distance;
  if (width > kChunk) return sum < width ? sum : sum - width;
  return static_cast<std::uint32_t>(sum) % static_cast<std::uint32_t>(width);
}

// Scans the chunks starting at first_chunk and stores the results [begin, end). `suffixes` and
// `out` begin with result `begin`. From the right (kBackward), suffixes[q] becomes the sum of the
// positions in q's window that are before the end of q's segment, or 0 if the window is the
// segment. From the left, out becomes suffix + prefix.
template <bool kBackward, class T>
__global__ void __launch_bounds__(kThreads)
    ScanChunks(Positions<T> positions, std::int64_t first_chunk, std::int64_t begin,
               std::int64_t end, const WideOf<T>* crossings, typename WindowFold<T>::Acc* suffixes,
               typename WindowFold<T>::Out* out) {
  using F = WindowFold<T>;
  using Wide = WideOf<T>;
  // A gap after the items of each thread puts the accesses of a warp's threads into different
  // banks.
  __shared__ Wide cells[kChunk + kThreads];
  __shared__ WarpValues<Wide> shared;
  __shared__ Wide sums[kThreads];
  __shared__ std::int64_t chunk_offset;  // offset of the chunk's first position in its segment
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t chunk = first_chunk + blockIdx.x;
  const std::int64_t first = chunk * kChunk;
  const std::int64_t width = positions.width;
  AllowNextKernel();

  for (int c = thread; c < kChunk; c += kThreads)
    cells[c + c / kItems] = positions.Load(kBackward, first + c);
  if (thread == 0) chunk_offset = first % width;
  __syncthreads();  // the chunk is complete

  // The sum of the thread's last positions, from the beginning of their segment.
  Wide* const mine = cells + thread * (kItems + 1);
  const std::int64_t first_offset = OffsetAfter(chunk_offset, thread * kItems, width);
  std::int64_t offset = first_offset;
  Wide sum = 0;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    sum = offset == 0 ? mine[j] : WrapAdd(sum, mine[j]);
    offset = offset + 1 == width ? 0 : offset + 1;
  }
  const int reach = Reach(offset == 0 ? width : offset);
  sum = ScanSegments<Wide>(sum, reach, kItems, shared);
  WaitForKernelBefore();  // so far only x has been read, and none of these kernels writes it
  const Wide crossing = chunk == 0 ? 0 : crossings[chunk - 1];
  if (reach > (thread + 1) * kItems) sum = WrapAdd(crossing, sum);
  sums[thread] = sum;
  __syncthreads();  // the sum that crosses from each thread is stored

  // Scans again for every position, starting with the sum that crosses into the thread.
  offset = first_offset;
  sum = thread == 0 ? crossing : sums[thread - 1];
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    sum = offset == 0 ? mine[j] : WrapAdd(sum, mine[j]);
    offset = offset + 1 == width ? 0 : offset + 1;
    // Seen from the right, the last position of a segment begins a window that is the segment.
    mine[j] = kBackward && offset == 0 ? 0 : sum;
  }
  __syncthreads();  // the chunk is scanned

  // Places are relative to the first requested result, so one comparison shows whether a place is
  // requested.
  const std::int64_t place_of_first =
      kBackward ? positions.Mirrored(true, first) - begin : first - (width - 1) - begin;
  const auto places = static_cast<std::uint64_t>(end - begin);
  const auto is_wanted = [&](std::int64_t place) {
    return static_cast<std::uint64_t>(place) < places;
  };
  if constexpr (kBackward) {
    for (int c = thread; c < kChunk; c += kThreads) {
      const std::int64_t place = place_of_first - c;
      if (is_wanted(place)) suffixes[place] = static_cast<typename F::Acc>(cells[c + c / kItems]);
    }
  } else {
    // All loads come before the first store, because the compiler must assume that a store changes
    // what they load.
    typename F::Acc before[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const std::int64_t place = place_of_first + thread + j * kThreads;
      before[j] = is_wanted(place) ? suffixes[place] : 0;
    }
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int c = thread + j * kThreads;
      const std::int64_t place = place_of_first + c;
      if (!is_wanted(place)) continue;
      const Wide sum_of_both = WrapAdd(static_cast<Wide>(before[j]), cells[c + c / kItems]);
      out[place] = F::FinishAxis(sum_of_both, width);
    }
  }
}

// Returns the number of positions in either scan, which is a whole number of segments.
std::int64_t Length(const WindowSumProblem& p) {
  const std::int64_t width = WindowWidth(p);
  return CeilDiv(p.n + 2 * p.radius, width) * width;
}

// Returns the chunks for the results at positions [first, end) of a scan. A segment of `width`
// positions that reaches into the first of these chunks begins at most 1 + ceil(width / kChunk)
// chunks earlier.
Chunks ChunksFor(std::int64_t first, std::int64_t end, std::int64_t width) {
  const std::int64_t begin = first / kChunk;
  return {std::max<std::int64_t>(0, begin - 1 - CeilDiv(width, kChunk)), begin,
          CeilDiv(end, kChunk)};
}

template <class T>
void Run(const WindowSumProblem& p, CudaStream& stream) {
  using F = WindowFold<T>;
  if (p.n == 0) return;
  const Positions<T> positions = {static_cast<const T*>(p.x), p.n, p.radius, WindowWidth(p),
                                  Length(p)};
  const std::int64_t chunks = CeilDiv(positions.length, kChunk);
  const std::int64_t begin = p.first, end = p.results_end();
  // The chunks that contain results, in the scan from the left and in the scan from the right.
  const std::int64_t lead = positions.width - 1;
  const BothWays needed = {
      ChunksFor(begin + lead, end + lead, positions.width),
      ChunksFor(positions.length - end, positions.length - begin, positions.width)};
  auto* out = static_cast<typename F::Out*>(p.out);
  auto* totals = static_cast<WideOf<T>*>(
      stream.Scratch(static_cast<std::size_t>(2 * chunks) * sizeof(WideOf<T>)));
  typename F::Acc* suffixes = nullptr;
  if constexpr (std::is_same_v<typename F::Acc, typename F::Out>) {
    suffixes = out;
  } else {
    suffixes = static_cast<typename F::Acc*>(
        stream.Scratch(static_cast<std::size_t>(end - begin) * sizeof(typename F::Acc)));
  }
  const auto blocks = [](std::int64_t from, std::int64_t to) {
    return static_cast<unsigned>(to - from);
  };
  const unsigned totals_needed =
      blocks(needed.left.lead, needed.left.end) + blocks(needed.right.lead, needed.right.end);
  ChunkTotals<<<totals_needed, kThreads, 0, stream.handle()>>>(positions, needed, chunks, totals);
  CUDA_CHECK_LAUNCH(ChunkTotals);
  LaunchOverlapping(ScanTotals<WideOf<T>>, {2, kScanThreads, 0}, stream, positions.width, needed,
                    chunks, totals);
  LaunchOverlapping(ScanChunks<true, T>,
                    {blocks(needed.right.begin, needed.right.end), kThreads, 0}, stream, positions,
                    needed.right.begin, begin, end, totals + chunks, suffixes, out);
  LaunchOverlapping(ScanChunks<false, T>, {blocks(needed.left.begin, needed.left.end), kThreads, 0},
                    stream, positions, needed.left.begin, begin, end, totals, suffixes, out);
}

// Returns the number of rounds of ScanTotals.
std::int64_t Rounds(const WindowSumProblem& p) {
  return CeilDiv(CeilDiv(Length(p), kChunk), kScanThreads);
}

// Returns the number of steps that a term goes through. In ChunkTotals these are the items of a
// thread and the fold of a block, in ScanTotals 11 and the rounds, and in ScanChunks twice the
// items of a thread, 11 and the crossing. The last step is the sum of suffix and prefix.
std::int64_t Steps(const WindowSumProblem& p) {
  return kItems + ShuffleDepth(kThreads) + 11 + Rounds(p) + 2 * kItems + 12 + 1;
}

// The narrow step is the rounding of a suffix to Acc.
double Roundoff(const WindowSumProblem& p) { return SumRoundoff(p.dtype, {1, Steps(p)}); }

Cost CostOf(const WindowSumProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.n);
  // Step 1 reads at most a segment of every chunk, once for each direction.
  const auto totals =
      static_cast<std::uint64_t>(std::min(p.n, CeilDiv(Length(p), kChunk) * WindowWidth(p)));
  const std::uint64_t suffix =
      SizeOf(p.dtype) == 2 ? sizeof(float) : SizeOf(ResultDType(ReduceOp::kSum, p.dtype));
  return {.bytes = (2 * totals + 2 * n) * SizeOf(p.dtype) + 2 * n * suffix + WindowOutBytes(p),
          .flops = 8 * n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(Steps(p))};
}

void Enqueue(const WindowSumProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<WindowSumProblem> kWindowSumRunningSum = {
    .name = "running_sum",
    .summary = "suffix of one segment + prefix of the next: cost independent of the radius",
    .source = "van Herk's and Gil and Werman's filters, with sums in place of maxima",
    .backend = Backend::kCuda,
    .deterministic = true,
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
