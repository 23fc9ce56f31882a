// Dot as a tree in device memory, level of launches by level, until a single value is left.
//
// The host is out of the way again, now without a chain: pairs of values are added at the same
// time, then pairs of their sums. A block multiplies two elements a thread into device memory and
// sums its part in place, with a barrier between the steps: thread t adds the neighbour of cell
// 2 t, first at distance 1, then 2, 4, ...
//
//   stride 1   0<1 2<3 4<5 6<7    threads 0 1 2 3
//   stride 2   0<--2   4<--6      threads 0   2
//   stride 4   0<------4          thread  0
//
// A barrier holds the threads of one block only. So a block's value goes to an array, and the next
// launch, which starts when the last has ended, sums that array in the same way, until one block is
// enough: it writes the result.
//
// Cost at n = 2^20, f32, blocks of 256: 8 MiB read, 4 MiB of products written, and 2^20 additions
// that read two cells and write one each, another 12 MiB; launches of 2048, 4 and 1 blocks with 10,
// 9 and 2 barriers. Memory would take 6 us at 4.3 TB/s. Much of it meets in the caches, but every
// step of a thread waits for them: hundreds of cycles, where the next row waits for tens.
//
// Right for any n: a block's tree takes as many cells as it has, n = 0 is one block without any.
// For any block size: who has no neighbour waits. For any alignment: loads are scalar. For 2^28
// floats: at most 1 + 11 roundings in single precision lie on the way of a product; between levels
// values are double.
#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dot/dot.cuh"
#include "kernels/cuda/levels.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

std::uint32_t BlockSize(const DotProblem& p) {
  return p.launch.block_size != 0 ? p.launch.block_size : kBlock;
}

// Products a block: two a thread.
std::int64_t PerBlock(const DotProblem& p) { return std::int64_t{2} * BlockSize(p); }

// How many of n cells belong to this block, which takes 2 * blockDim.x from *begin on.
__device__ unsigned PartOf(std::int64_t n, std::int64_t* begin) {
  *begin = std::int64_t{2} * blockIdx.x * blockDim.x;
  return static_cast<unsigned>(min(n - *begin, std::int64_t{2} * blockDim.x));
}

// The first level: cells[0, n) are scratch for the products.
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotTreeGlobal(const T* a, const T* b, std::int64_t n, DotAcc<T>* cells, DotWide<T>* partials,
                  Scalar* result) {
  using F = DotFold<T>;
  std::int64_t begin = 0;
  const unsigned count = PartOf(n, &begin);
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x)
    cells[begin + i] = F::Multiply(a[begin + i], b[begin + i]);
  __syncthreads();  // the products of the block are written
  FoldDoublingStrides<F>(cells + begin, count);
  StoreBlock<F>(count == 0 ? DotWide<T>(0) : F::Widen(cells[begin]), n, partials, result);
}

// The other levels: cells[0, n) are the values of the blocks before, and scratch too.
template <class F>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotTreeGlobalLevel(typename F::Wide* cells, std::int64_t n, typename F::Wide* partials,
                       Scalar* result) {
  std::int64_t begin = 0;
  const unsigned count = PartOf(n, &begin);
  FoldDoublingStrides<F>(cells + begin, count);
  StoreBlock<F>(cells[begin], n, partials, result);
}

template <class T>
void Run(const DotProblem& p, CudaStream& stream) {
  using Wide = DotWide<T>;
  const std::uint32_t block = BlockSize(p);
  auto* cells =
      static_cast<DotAcc<T>*>(stream.Scratch(static_cast<std::size_t>(p.n) * sizeof(DotAcc<T>)));
  RunLevels<Wide>(
      p.n, PerBlock(p), stream,
      [&](unsigned blocks, Wide* to) {
        DotTreeGlobal<T><<<blocks, block, 0, stream.handle()>>>(
            static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, cells, to, p.result);
        CUDA_CHECK_LAUNCH(DotTreeGlobal);
      },
      [&](unsigned blocks, Wide* from, std::int64_t n, Wide* to) {
        DotTreeGlobalLevel<Fold<ReduceOp::kSum, Wide>>
            <<<blocks, block, 0, stream.handle()>>>(from, n, to, p.result);
        CUDA_CHECK_LAUNCH(DotTreeGlobalLevel);
      });
}

// Steps of a tree over a block's cells.
std::int64_t Depth(const DotProblem& p) { return CeilLog2(PerBlock(p)); }

double Roundoff(const DotProblem& p) {
  return DotRoundoff(p.dtype, 1 + Depth(p), MakeLaterLevels(p.n, PerBlock(p)).count * Depth(p));
}

Cost CostOf(const DotProblem& p) {
  const LaterLevels later = MakeLaterLevels(p.n, PerBlock(p));
  const auto n = static_cast<std::uint64_t>(p.n);
  const auto values = static_cast<std::uint64_t>(later.values);
  // A product or value is written once, and every addition touches three cells.
  return {.bytes = OperandBytes(p) + 4 * n * AccBytes(p.dtype) + 4 * values * sizeof(double),
          .flops = 2 * n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(1 + (1 + later.count) * Depth(p))};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotTreeGlobal = {
    .name = "tree_global",
    .summary = "products in device memory, a tree in place there, launches until one is left",
    .source = "tree reduction in device memory of the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
