// Scan with one block per line, by Brent and Kung's tree.
//
// Compared with `kogge_stone`, there are two additions per element instead of log2(B). On the way
// up, a tree as in Dot's `tree_sequential` leaves the totals of 2, 4, 8, ... elements in the last
// cell of each group. On the way down, each total is added to the middle of the next group:
//
//     up      x0  x0-1  x2  x0-3  x4  x4-5  x6  x0-7
//     down                             x0-5                distance 2: cell 5 gets cell 3
//                       x0-2      x0-4      x0-6           distance 1: cells 2, 4, 6
//
// There are twice as many steps, and in most of them few threads work, so the tree is faster only
// if additions are expensive. Each thread has two elements; active threads are adjacent.
//
// Cost at n = 2^20, f32, one row: 2048 pieces of 512, each with 17 barriers and 1024 additions, in
// a single block.
//
// The kernel is correct for any length, because missing elements are the identity, and for any
// number of warps, because the number of cells is a power of two.
#include <bit>

#include "kernels/cuda/scan/scan.cuh"

namespace tessera {
namespace {

template <class F>
__global__ void __launch_bounds__(kMostThreads) ScanBrentKung(ScanLines<F> p, unsigned size) {
  using Wide = typename F::Wide;
  Wide* const cells = DynamicShared<Wide>();
  auto carry = F::template Identity<Wide>();
  for (std::int64_t piece = 0; piece < p.length; piece += size) {
    for (unsigned i = threadIdx.x; i < size; i += blockDim.x)
      cells[i] = p.Load(blockIdx.x, piece + i);
    for (unsigned distance = 1; distance < size; distance *= 2) {
      __syncthreads();  // the previous level is complete
      for (unsigned i = (threadIdx.x + 1) * 2 * distance - 1; i < size;
           i += blockDim.x * 2 * distance)
        cells[i] = F::Combine(cells[i - distance], cells[i]);
    }
    for (unsigned distance = size / 4; distance > 0; distance /= 2) {
      __syncthreads();  // the previous level is complete
      for (unsigned i = (threadIdx.x + 1) * 2 * distance - 1; i + distance < size;
           i += blockDim.x * 2 * distance)
        cells[i + distance] = F::Combine(cells[i], cells[i + distance]);
    }
    __syncthreads();  // all prefixes are in the cells
    for (unsigned i = threadIdx.x; i < size; i += blockDim.x) {
      const Wide before = i > 0 ? cells[i - 1] : F::template Identity<Wide>();
      p.Store(blockIdx.x, piece + i, F::Combine(carry, p.exclusive ? before : cells[i]));
    }
    carry = F::Combine(carry, cells[size - 1]);
    __syncthreads();  // all threads have read the cells
  }
}

// Returns the number of elements that a block scans at a time.
unsigned PieceSize(const ScanProblem& p) { return 2 * std::bit_ceil(ScanThreads(p)); }

void Enqueue(const ScanProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  DispatchLesson(p, [&]<class F>(std::type_identity<F>) {
    const ScanLines<F> lines(p);
    ScanBrentKung<F>
        <<<static_cast<unsigned>(lines.lines), ScanThreads(p),
           PieceSize(p) * sizeof(typename F::Wide), cuda.handle()>>>(lines, PieceSize(p));
    CUDA_CHECK_LAUNCH(ScanBrentKung);
  });
}

std::int64_t Steps(const ScanProblem& p) {
  return 2 * CeilLog2(PieceSize(p)) + CeilDiv(p.length, PieceSize(p)) + 1;
}

}  // namespace

extern constexpr Strategy<ScanProblem> kScanBrentKung = {
    .name = "brent_kung",
    .summary = "one block per line; a tree up and down takes two additions per element",
    .source = "Brent and Kung, A Regular Layout for Parallel Adders, 1982",
    .backend = Backend::kCuda,
    .dtypes = kLessonDTypes,
    .deterministic = true,
    .limits = {.block_size = kWholeWarps},
    .roundoff = [](const ScanProblem& p) { return ScanRoundoff(p, Steps(p)); },
    .cost =
        [](const ScanProblem& p) {
          const auto n = static_cast<std::uint64_t>(p.elements());
          const auto levels = static_cast<std::uint64_t>(2 * CeilLog2(PieceSize(p)));
          return Cost{
              .bytes = ScanBytes(p),
              .flops = 3 * n,
              .atomics = 0,
              .depth = levels * static_cast<std::uint64_t>(CeilDiv(p.length, PieceSize(p)))};
        },
    .launch = Enqueue,
    .refuses = RefusesLines,
};

}  // namespace tessera
