// WindowSum from shared memory: a block fetches the elements of its windows once and adds them
// there.
//
// Compared with `simple`, a block loads an element only once even if several of its windows contain
// it. The windows of adjacent results overlap in all but two elements, so a block of B threads
// needs only B + 2 radius elements. Its threads fetch these together, wait for each other, and then
// read each window from shared memory. This takes 1 + 2 radius / B loads from memory per element
// instead of 2 radius + 1. The number of additions stays the same.
//
//     x     ..........[ radius |        B         | radius ]..........
//     cells           [        |        B         |        ]   B + 2 radius, fetched together
//     out                      [        B         ]            a window of cells per thread
//
// The simplest form of this kernel is correct only under three conditions: the input is padded, 2
// radius <= B, and n is a multiple of B. The kernel here needs none of them:
// - Elements beyond the ends of the array are not fetched, and windows end where the array does.
// - A thread fetches as many cells as necessary, B apart.
// - If B + 2 radius elements do not fit in kCellBytes, they are fetched in pieces, one after
//   another, and every thread adds the part of its window that is in the piece.
//
// Cost at n = 2^20, radius 8, f32, B = 256: 4.25 MiB read, 4 MiB written; 17 * 2^20 additions and
// as many loads from shared memory; 2 barriers per block; depth 17. Moving 8.25 MiB takes 2 us at
// 4.3 TB/s.
//
// The kernel is correct for any block size, because the number of cells is dynamic. It is correct
// for any alignment, because loads are scalar. Float sums are moved to double every kMaxChain
// elements and after each piece.
#include <algorithm>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/window_sum/window.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;
// The shared memory of a block in bytes. It is small enough for several blocks on an SM.
constexpr std::int64_t kCellBytes = 32 << 10;

// Positions are relative to the first block's first position. The array is [lowest, end_x), and the
// requested results are [begin_result, end_result).
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    WindowSumShared(const T* x, std::int64_t lowest, std::int64_t end_x, std::int64_t radius,
                    int capacity, std::int64_t begin_result, std::int64_t end_result,
                    typename WindowFold<T>::Out* out) {
  using F = WindowFold<T>;
  T* const cells = DynamicShared<T>();
  const std::int64_t i = GridThread();
  const std::int64_t first = max(i - radius, lowest);
  const std::int64_t end = min(i + radius + 1, end_x);
  // The elements that the windows of the block cover together.
  const std::int64_t block_first = max(i - threadIdx.x - radius, lowest);
  const std::int64_t block_end = min(i - threadIdx.x + blockDim.x + radius, end_x);
  auto sum = F::template Identity<typename F::Wide>();
  for (std::int64_t piece = block_first; piece < block_end; piece += capacity) {
    const int count = static_cast<int>(min(block_end - piece, std::int64_t{capacity}));
    __syncthreads();  // all threads are done with the previous piece
    for (int cell = static_cast<int>(threadIdx.x); cell < count;
         cell += static_cast<int>(blockDim.x))
      cells[cell] = x[piece + cell];
    __syncthreads();  // the piece is complete
    const auto in_piece = FoldThreadInTurn<F>(
        max(first - piece, std::int64_t{0}), min(end - piece, std::int64_t{count}), std::int64_t{1},
        [&](std::int64_t cell) { return F::Load(cells[cell], cell); });
    sum = F::Combine(sum, in_piece);
  }
  if (i >= begin_result && i < end_result) out[i] = F::FinishAxis(sum, end - first);
}

// Returns the number of cells in a block.
std::int64_t Capacity(const WindowSumProblem& p, std::uint32_t block_size) {
  return std::min(std::int64_t{block_size} + 2 * p.radius,
                  kCellBytes / static_cast<std::int64_t>(SizeOf(p.dtype)));
}

std::uint32_t BlockSize(const WindowSumProblem& p) {
  return p.launch.block_size != 0 ? p.launch.block_size : kBlock;
}

template <class T>
void Run(const WindowSumProblem& p, CudaStream& stream) {
  if (p.n == 0) return;
  // Blocks are aligned as for the whole array, so that pieces begin at the same positions.
  const std::int64_t before = p.first / BlockSize(p) * BlockSize(p);
  const std::int64_t begin = p.first - before, end = p.results_end() - before;
  const Grid grid = MakeGrid(end, p.launch, kBlock, 1);
  const std::int64_t capacity = Capacity(p, grid.block_size);
  WindowSumShared<<<grid.blocks, grid.block_size, static_cast<std::size_t>(capacity) * sizeof(T),
                    stream.handle()>>>(static_cast<const T*>(p.x) + before, -before, p.n - before,
                                       p.radius, static_cast<int>(capacity), begin, end,
                                       static_cast<typename WindowFold<T>::Out*>(p.out) - begin);
  CUDA_CHECK_LAUNCH(WindowSumShared);
}

double Roundoff(const WindowSumProblem& p) {
  const std::int64_t pieces = CeilDiv(BlockSize(p) + 2 * p.radius, Capacity(p, BlockSize(p)));
  // The end of a piece may split a chain of additions in two.
  return WindowLoopRoundoff(p, 2 * pieces);
}

Cost CostOf(const WindowSumProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.n);
  const auto width = static_cast<std::uint64_t>(WindowWidth(p));
  const auto blocks = static_cast<std::uint64_t>(CeilDiv(p.n, BlockSize(p)));
  return {.bytes = (n + blocks * (width - 1)) * SizeOf(p.dtype) + WindowOutBytes(p),
          .flops = n * width,
          .atomics = 0,
          .depth = width};
}

void Enqueue(const WindowSumProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<WindowSumProblem> kWindowSumShared = {
    .name = "shared",
    .summary = "a block fetches the elements of its windows into shared memory and adds them there",
    .source = "window sum from the notes on hardware acceleration, for any n and radius",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
