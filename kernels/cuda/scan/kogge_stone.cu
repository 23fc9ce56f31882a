// Scan with one block per line, by Kogge and Stone's network.
//
// Compared with `serial`, the additions of a step do not wait for each other: after the step with
// distance d, each thread has the fold of up to 2d elements, the last of which is its own. A block
// of B threads needs log2(B) steps instead of B.
//
//     d = 1     x0   x0-1   x1-2   x2-3   x3-4   ...     each adds the cell d before its own
//     d = 2     x0   x0-1   x0-2   x0-3   x1-4   ...
//
// A block does about B log2(B) additions, though B would be enough, and each step needs a barrier.
// There are two copies of the cells, one that a step reads and one that it writes, so that one
// barrier per step is enough. The block processes its line piece by piece and carries the total
// along.
//
// Cost at n = 2^20, f32, one row: 4096 pieces of 256, each with 8 barriers and 2048 additions, in a
// single block.
//
// The kernel is correct for any length: missing elements are the identity.
#include "kernels/cuda/scan/scan.cuh"

namespace tessera {
namespace {

template <class F>
__global__ void __launch_bounds__(kMostThreads) ScanKoggeStone(ScanLines<F> p) {
  using Wide = typename F::Wide;
  Wide* cells = DynamicShared<Wide>();
  Wide* others = cells + blockDim.x;
  const unsigned me = threadIdx.x;
  auto carry = F::template Identity<Wide>();
  for (std::int64_t piece = 0; piece < p.length; piece += blockDim.x) {
    cells[me] = p.Load(blockIdx.x, piece + me);
    __syncthreads();  // the elements are in the cells
    for (unsigned distance = 1; distance < blockDim.x; distance *= 2) {
      others[me] = me >= distance ? F::Combine(cells[me - distance], cells[me]) : cells[me];
      __syncthreads();  // this step has been written
      Wide* const written = others;
      others = cells;
      cells = written;
    }
    const Wide before = me > 0 ? cells[me - 1] : F::template Identity<Wide>();
    p.Store(blockIdx.x, piece + me, F::Combine(carry, p.exclusive ? before : cells[me]));
    carry = F::Combine(carry, cells[blockDim.x - 1]);
    __syncthreads();  // all threads have read the cells
  }
}

void Enqueue(const ScanProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  DispatchLesson(p, [&]<class F>(std::type_identity<F>) {
    const ScanLines<F> lines(p);
    const unsigned threads = ScanThreads(p);
    ScanKoggeStone<F><<<static_cast<unsigned>(lines.lines), threads,
                        2 * threads * sizeof(typename F::Wide), cuda.handle()>>>(lines);
    CUDA_CHECK_LAUNCH(ScanKoggeStone);
  });
}

// The number of folds that an element goes through: the steps within a piece, and the pieces.
std::int64_t Steps(const ScanProblem& p) {
  return CeilLog2(ScanThreads(p)) + CeilDiv(p.length, ScanThreads(p)) + 1;
}

}  // namespace

extern constexpr Strategy<ScanProblem> kScanKoggeStone = {
    .name = "kogge_stone",
    .summary = "one block per line; distances double, so a block of B threads takes log2(B) steps",
    .source =
        "Kogge and Stone, A Parallel Algorithm for the Efficient Solution of a General "
        "Class of Recurrence Equations, 1973",
    .backend = Backend::kCuda,
    .dtypes = kLessonDTypes,
    .deterministic = true,
    .limits = {.block_size = kWholeWarps},
    .roundoff = [](const ScanProblem& p) { return ScanRoundoff(p, Steps(p)); },
    .cost =
        [](const ScanProblem& p) {
          const auto n = static_cast<std::uint64_t>(p.elements());
          const auto levels = static_cast<std::uint64_t>(CeilLog2(ScanThreads(p)));
          return Cost{
              .bytes = ScanBytes(p),
              .flops = n * (levels + 1),
              .atomics = 0,
              .depth = levels * static_cast<std::uint64_t>(CeilDiv(p.length, ScanThreads(p)))};
        },
    .launch = Enqueue,
    .refuses = RefusesLines,
};

}  // namespace tessera
