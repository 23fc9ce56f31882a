// Reduce as a tree in device memory, level of launches by level, until a single value is left.
//
// A block takes two elements a thread and folds them in place, with a barrier between the steps:
// thread t folds the neighbour of cell 2 t into it, first at distance 1, then 2, 4, ...
//
//   stride 1   0<1 2<3 4<5 6<7    threads 0 1 2 3
//   stride 2   0<--2   4<--6      threads 0   2
//   stride 4   0<------4          thread  0
//
// A barrier holds the threads of one block only. So a block's value goes to an array, and the next
// launch, which starts when the last has ended, folds that array in the same way, until one block
// is enough: it writes the result. The input is not ours to change: the first level copies it to
// scratch, its later steps and all other levels work in place.
//
// Cost at n = 2^20, f32, blocks of 256: 4 MiB read, 4 MiB written to scratch, and 2^20 steps that
// read two cells and write one each, another 12 MiB; launches of 2048, 4 and 1 blocks with 10, 9
// and 2 barriers. Memory would take 5 us at 4.3 TB/s. Much of it meets in the caches, but ever
// fewer lanes of a warp work, on cells ever further apart: at stride 16 each of them is a
// transaction of its own.
//
// Right for any n: a block's tree takes as many cells as it has, n = 0 is one block without any.
// For any block size: who has no neighbour waits. For any alignment: loads are scalar. For 2^28
// floats: at most 11 roundings in single precision lie on the way of an element; between levels
// values are double.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/levels.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

std::uint32_t BlockSize(const ReduceProblem& p) {
  return p.launch.block_size != 0 ? p.launch.block_size : kBlock;
}

// Elements a block: two a thread.
std::int64_t PerBlock(const ReduceProblem& p) { return std::int64_t{2} * BlockSize(p); }

// Folds this block's 2 * blockDim.x of cells[0, n) in place, to partials[block] or, in the last
// level, which has one block, to the result of a reduction of `count` elements.
template <class F, class A>
__device__ void FoldPart(A* cells, std::int64_t n, std::int64_t count, typename F::Wide* partials,
                         Scalar* result) {
  const std::int64_t begin = std::int64_t{2} * blockIdx.x * blockDim.x;
  const std::int64_t mine = min(n - begin, std::int64_t{2} * blockDim.x);
  FoldDoublingStrides<F>(cells + begin, static_cast<unsigned>(mine));
  StoreBlock<F>(mine == 0 ? F::template Identity<typename F::Wide>() : Widened<F>(cells[begin]),
                count, partials, result);
}

// The first level: cells[0, n) are scratch.
template <class F, class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    ReduceInterleaved(const T* x, std::int64_t n, typename F::Acc* cells,
                      typename F::Wide* partials, Scalar* result) {
  for (std::int64_t i = std::int64_t{2} * blockIdx.x * blockDim.x + threadIdx.x, copied = 0;
       copied < 2 && i < n; ++copied, i += blockDim.x)
    cells[i] = F::Load(x[i], i);
  __syncthreads();  // the block's cells are written
  FoldPart<F>(cells, n, n, partials, result);
}

// The other levels: cells[0, n) are the values of the blocks before.
template <class F>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    ReduceInterleavedLevel(typename F::Wide* cells, std::int64_t n, std::int64_t count,
                           typename F::Wide* partials, Scalar* result) {
  FoldPart<F>(cells, n, count, partials, result);
}

template <ReduceOp op, class T>
void Run(const ReduceProblem& p, CudaStream& stream) {
  using F = Fold<op, T>;
  using Wide = typename F::Wide;
  const std::uint32_t block = BlockSize(p);
  auto* cells = static_cast<typename F::Acc*>(
      stream.Scratch(static_cast<std::size_t>(p.n) * sizeof(typename F::Acc)));
  RunLevels<Wide>(
      p.n, PerBlock(p), stream,
      [&](unsigned blocks, Wide* to) {
        ReduceInterleaved<F><<<blocks, block, 0, stream.handle()>>>(static_cast<const T*>(p.x), p.n,
                                                                    cells, to, p.result);
        CUDA_CHECK_LAUNCH(ReduceInterleaved);
      },
      [&](unsigned blocks, Wide* from, std::int64_t n, Wide* to) {
        ReduceInterleavedLevel<PartialFold<op, T>>
            <<<blocks, block, 0, stream.handle()>>>(from, n, p.n, to, p.result);
        CUDA_CHECK_LAUNCH(ReduceInterleavedLevel);
      });
}

// Steps of a tree over a block's cells.
std::int64_t Depth(const ReduceProblem& p) { return CeilLog2(PerBlock(p)); }

double Roundoff(const ReduceProblem& p) {
  return ReduceRoundoff(p.op, p.dtype, p.n, Depth(p),
                        MakeLaterLevels(p.n, PerBlock(p)).count * Depth(p));
}

Cost CostOf(const ReduceProblem& p) {
  const LaterLevels later = MakeLaterLevels(p.n, PerBlock(p));
  const auto n = static_cast<std::uint64_t>(p.n);
  const auto values = static_cast<std::uint64_t>(later.values);
  // A cell is written once, and every step touches three.
  return {.bytes = n * SizeOf(p.dtype) + 4 * n * AccBytes(p.op, p.dtype) +
                   4 * values * WideBytes(p.op, p.dtype),
          .flops = n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>((1 + later.count) * Depth(p))};
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) {
    DispatchOp(p.op, [&](auto op) { Run<op(), decltype(zero)>(p, Cuda(stream)); });
  });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceInterleaved = {
    .name = "interleaved",
    .summary = "a tree of doubling strides in device memory, launches until one value is left",
    .source = "naive tree of the notes on CUDA reductions",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
