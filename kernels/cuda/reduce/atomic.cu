// Reduce without a tree: every thread adds its own partial value to a single cell.
//
// Compared with `grid_stride`, there is no shared memory, no barrier and no work for the host.
// If all threads of a block simply stored their values in one cell, all but one of the values would
// be lost. An atomic operation reads, folds and writes in one step that no other
// thread can interrupt, so even a single cell for the whole grid is enough.
//
// The hardware adds atomically in the L2 cache. Other operations are built from its
// compare-and-swap: read the cell, fold, and write the new value if the cell still holds the value
// that was read. Otherwise another thread was faster, and the loop starts again. A thread whose
// value would not change the cell writes nothing. For MIN and MAX, most threads soon write nothing.
// For PRODUCT, every thread has to write: of the 2^18 threads that try at the same time, only one
// succeeds, so PRODUCT would take minutes and is refused.
//
// At n = 2^20 there are 2^18 atomic additions to one address. The L2 cache does them one after
// another, which takes some hundreds of microseconds.
//
// The order of the atomics differs from run to run, so the last bits of a floating-point result may
// differ too. The state of a reduction has to fit in the word that compare-and-swap changes, so
// ARGMIN, ARGMAX, VARIANCE and STD are refused as well.
//
// Lesson: kernels/lessons/sum_1_atomics.cu
#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "kernels/cuda/common/lesson.cuh"

namespace tessera {
namespace {

// The grid is limited, because every thread performs an atomic operation, and an operation that has
// to be retried may take microseconds.
constexpr LaunchLimits::Range kGridSize = {1, 1024};
// The wait of a thread after its first failure, and its longest wait, in nanoseconds.
constexpr unsigned kFirstWait = 64;
constexpr unsigned kLongestWait = 1u << 19;

constexpr bool IsAddition(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kMean || op == ReduceOp::kNormL1 ||
         op == ReduceOp::kNormL2 || op == ReduceOp::kSumSquares;
}

// Whether the hardware supports the operation, or its state fits in a 64-bit word and most threads
// change nothing. (Means of integers take two words, and norms of f64 take three independent
// words.)
constexpr bool Takes(ReduceOp op) {
  return !IsArg(op) && !IsDeviation(op) && op != ReduceOp::kProduct;
}

// *cell = F::Combine(*cell, value), for values of 32 or 64 bits.
template <class F, class A>
__device__ void AtomicCombine(A* cell, A value) {
  using Word = std::conditional_t<sizeof(A) == sizeof(unsigned), unsigned, unsigned long long>;
  static_assert(sizeof(A) == sizeof(Word));
  auto* const word = reinterpret_cast<Word*>(cell);
  for (unsigned wait = kFirstWait;; wait = min(2 * wait, kLongestWait)) {
    const Word seen = *static_cast<volatile Word*>(word);
    A before;
    std::memcpy(&before, &seen, sizeof before);
    const A after = F::Combine(before, value);
    Word desired;
    std::memcpy(&desired, &after, sizeof desired);
    if (desired == seen || atomicCAS(word, seen, desired) == seen) return;
    __nanosleep(wait);
  }
}

// Folds the terms into *cell.
template <class F, class Terms>
__global__ void __launch_bounds__(kMostThreads)
    ReduceAtomic(Terms terms, std::int64_t n, typename F::Wide* cell) {
  if (GridThread() >= n) return;
  const auto mine = FoldThreadInTurn<F>(GridThread(), n, GridThreads(), terms);
  if constexpr (IsAddition(F::kOp)) {
    AtomicAdd(cell, mine);
  } else {
    AtomicCombine<F>(cell, mine);
  }
}

template <class F>
__global__ void PrepareCell(typename F::Wide* cell) {
  *cell = F::template Identity<typename F::Wide>();
}

LessonShape ShapeOf(const ReduceProblem& p) {
  const Grid grid = MakeFixedGrid(p.n, p.launch, 256, kFixedGrid);
  // The number of threads that have elements.
  const std::int64_t threads = std::min(p.n, std::int64_t{grid.blocks} * grid.block_size);
  return WithChains(
      grid.per_thread,
      {.grid = grid, .wide_steps = threads, .atomics = static_cast<std::uint64_t>(threads)});
}

std::string Refuses(const ReduceProblem& p) {
  if (Takes(p.op)) return "";
  return "a reduction that threads can do atomically, not ARGMIN, ARGMAX, VARIANCE, STD or "
         "PRODUCT";
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  CudaStream& cuda = Cuda(stream);
  DispatchTerms(p, [&]<class F>(auto terms) {
    if constexpr (Takes(F::kOp)) {
      auto* cell = static_cast<typename F::Wide*>(cuda.Scratch(sizeof(typename F::Wide)));
      PrepareCell<PartialFold<F>><<<1, 1, 0, cuda.handle()>>>(cell);
      CUDA_CHECK_LAUNCH(PrepareCell);
      ReduceAtomic<F><<<grid.blocks, grid.block_size, 0, cuda.handle()>>>(terms, p.n, cell);
      CUDA_CHECK_LAUNCH(ReduceAtomic);
      FinishCell<PartialFold<F>><<<1, 1, 0, cuda.handle()>>>(cell, p.n, p.result);
      CUDA_CHECK_LAUNCH(FinishCell);
    }
  });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceAtomic = Lesson<ShapeOf, Enqueue, ReduceProblem>({
    .name = "atomic",
    .summary = "grid-stride loops; each thread atomically folds its own value into one cell",
    .source = "reduction with atomics from the HIP training examples",
    .limits = {.block_size = kAnyBlockSize, .grid_size = kGridSize},
    .refuses = Refuses,
});

}  // namespace tessera
