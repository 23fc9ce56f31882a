// Scan in three launches: the totals of pieces, the scan of the totals, and the scan of each piece.
//
// Compared with `brent_kung`, one long line keeps the whole GPU busy, because each piece of a line
// has a block. A thread folds kItems adjacent elements by itself, and only the threads' totals are
// scanned together, by shuffles within the warps. The price is that x is read twice.
//
//     1   x       | piece 0 | piece 1 | piece 2 |    a block per piece
//         totals  |   t0    |   t1    |   t2    |
//     2   bases   |   0     |   t0    |  t0+t1  |    a block per line
//     3   out     | base + scan of the piece    |    a block per piece
//
// Cost at n = 2^20, f32, one row: 8 MiB read, 4 MiB written, three launches, 512 pieces of 2048.
//
// The kernels are correct for any length: missing elements are the identity.
#include "kernels/cuda/scan/scan.cuh"

namespace tessera {
namespace {

constexpr int kItems = 8;  // adjacent elements of a thread

constexpr std::int64_t PieceSize(const ScanProblem& p) {
  return std::int64_t{kItems} * ScanThreads(p);
}
std::int64_t Pieces(const ScanProblem& p) { return CeilDiv(p.length, PieceSize(p)); }

template <class F>
__global__ void __launch_bounds__(kMostThreads)
    TotalsOfPieces(ScanLines<F> p, std::int64_t pieces, typename F::Wide* totals) {
  const std::int64_t line = blockIdx.x / pieces, piece = blockIdx.x % pieces;
  const std::int64_t first = (piece * blockDim.x + threadIdx.x) * kItems;
  auto sum = F::template Identity<typename F::Wide>();
#pragma unroll
  for (int j = 0; j < kItems; ++j) sum = F::Combine(sum, p.Load(line, first + j));
  typename F::Wide total;
  ScanBlock<F>(sum, &total);
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

// Replaces the total of each piece of a line with the fold of all pieces before it.
template <class F>
__global__ void __launch_bounds__(kMostThreads)
    ScanOfTotals(std::int64_t pieces, typename F::Wide* totals) {
  using Wide = typename F::Wide;
  Wide* const line = totals + blockIdx.x * pieces;
  auto carry = F::template Identity<Wide>();
  for (std::int64_t first = 0; first < pieces; first += blockDim.x) {
    const std::int64_t i = first + threadIdx.x;
    Wide total;
    const Wide before = ScanBlock<F>(i < pieces ? line[i] : F::template Identity<Wide>(), &total);
    if (i < pieces) line[i] = F::Combine(carry, before);
    carry = F::Combine(carry, total);
    __syncthreads();  // ScanBlock may be called again
  }
}

template <class F>
__global__ void __launch_bounds__(kMostThreads)
    ScanOfPieces(ScanLines<F> p, std::int64_t pieces, const typename F::Wide* bases) {
  using Wide = typename F::Wide;
  const std::int64_t line = blockIdx.x / pieces, piece = blockIdx.x % pieces;
  const std::int64_t first = (piece * blockDim.x + threadIdx.x) * kItems;
  Wide elements[kItems];
  auto sum = F::template Identity<Wide>();
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    elements[j] = p.Load(line, first + j);
    sum = F::Combine(sum, elements[j]);
  }
  Wide total;
  Wide result = F::Combine(bases[blockIdx.x], ScanBlock<F>(sum, &total));
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const Wide next = F::Combine(result, elements[j]);
    p.Store(line, first + j, p.exclusive ? result : next);
    result = next;
  }
}

void Enqueue(const ScanProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  DispatchLesson(p, [&]<class F>(std::type_identity<F>) {
    const ScanLines<F> lines(p);
    const std::int64_t pieces = Pieces(p);
    const auto blocks = static_cast<unsigned>(lines.lines * pieces);
    const unsigned threads = ScanThreads(p);
    auto* const totals = static_cast<typename F::Wide*>(
        cuda.Scratch(static_cast<std::size_t>(blocks) * sizeof(typename F::Wide)));
    TotalsOfPieces<F><<<blocks, threads, 0, cuda.handle()>>>(lines, pieces, totals);
    CUDA_CHECK_LAUNCH(TotalsOfPieces);
    ScanOfTotals<F>
        <<<static_cast<unsigned>(lines.lines), threads, 0, cuda.handle()>>>(pieces, totals);
    CUDA_CHECK_LAUNCH(ScanOfTotals);
    ScanOfPieces<F><<<blocks, threads, 0, cuda.handle()>>>(lines, pieces, totals);
    CUDA_CHECK_LAUNCH(ScanOfPieces);
  });
}

// The most folds that one element goes through: the items of a thread (counted twice), the lanes
// and warps of both block scans, and the rounds of the second launch.
std::int64_t Steps(const ScanProblem& p) {
  return 2 * kItems + 2 * (5 + ScanThreads(p) / kWarpSize + 1) +
         CeilDiv(Pieces(p), ScanThreads(p)) + 2;
}

}  // namespace

extern constexpr Strategy<ScanProblem> kScanReduceThenScan = {
    .name = "reduce_then_scan",
    .summary = "three launches: totals of pieces, scan of the totals, scan of the pieces",
    .source = "Sengupta, Harris, Zhang and Owens, Scan Primitives for GPU Computing, 2007",
    .backend = Backend::kCuda,
    .dtypes = kLessonDTypes,
    .deterministic = true,
    .limits = {.block_size = kWholeWarps},
    .roundoff = [](const ScanProblem& p) { return ScanRoundoff(p, Steps(p)); },
    .cost =
        [](const ScanProblem& p) {
          const auto n = static_cast<std::uint64_t>(p.elements());
          return Cost{.bytes = ScanBytes(p) + n * SizeOf(p.dtype),
                      .flops = 3 * n,
                      .atomics = 0,
                      .depth = static_cast<std::uint64_t>(Steps(p))};
        },
    .launch = Enqueue,
    .refuses =
        [](const ScanProblem& p) {
          return RefusesBlocks(static_cast<double>(p.outer) * static_cast<double>(p.inner) *
                               static_cast<double>(Pieces(p)));
        },
    .scratch =
        [](const ScanProblem& p) {
          return static_cast<std::uint64_t>(p.outer * p.inner * Pieces(p)) * sizeof(double);
        },
};

}  // namespace tessera
