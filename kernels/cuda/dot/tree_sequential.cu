// Dot by a tree whose working threads are neighbours.
//
// Against `tree_interleaved`, only the numbering changes: strides halve instead of doubling, and
// thread t adds the cell a stride away to cell t, as long as t is below the stride.
//
//   live 8     0<------4  1<------5  2<------6  3<------7    threads 0 1 2 3
//   live 4     0<--2  1<--3                                  threads 0 1
//   live 2     0<1                                           thread  0
//
// Of the warps that work all but one work with all of their 32 threads, the others step over the
// addition together; finding out takes a comparison, no division. And a warp's cells are 32
// neighbours, each in a bank of its own.
//
// Cost at n = 2^20, f32, blocks of 256: 8 MiB read, 2048 blocks with 10 barriers each, 2048 atomic
// additions to one address; as before, for a third of the instructions. Memory would take 2 us at
// 4.3 TB/s.
//
// Right for any n: products beyond the end are 0, n = 0 is one block of zeros. For any block size:
// halves are rounded up. For any alignment: loads are scalar. For 2^28 floats: at most 1 + 11
// roundings in single precision lie on the way of a product; between blocks sums are double, in an
// order that differs from run to run.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dot/dot.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

Grid GridOf(const DotProblem& p) { return MakeGrid(p.n, p.launch, kBlock, 2); }

// *total += a . b. Dynamic shared memory: two Acc a thread.
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotTreeSequential(const T* a, const T* b, std::int64_t n, DotWide<T>* total) {
  using F = DotFold<T>;
  auto* products = DynamicShared<DotAcc<T>>();
  const std::int64_t begin = std::int64_t{2} * blockIdx.x * blockDim.x;
  for (unsigned i = threadIdx.x; i < 2 * blockDim.x; i += blockDim.x)
    products[i] = begin + i < n ? F::Multiply(a[begin + i], b[begin + i]) : DotAcc<T>(0);
  __syncthreads();  // every product of the block is in its place
  FoldHalvingStrides<F>(products, 2 * blockDim.x);
  if (threadIdx.x == 0) AtomicAdd(total, F::Widen(products[0]));
}

template <class T>
void Run(const DotProblem& p, CudaStream& stream) {
  const Grid grid = GridOf(p);
  auto* total = MakeSum<DotWide<T>>(stream);
  DotTreeSequential<T>
      <<<grid.blocks, grid.block_size, 2 * grid.block_size * sizeof(DotAcc<T>), stream.handle()>>>(
          static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, total);
  CUDA_CHECK_LAUNCH(DotTreeSequential);
  FetchSum(total, p.result, stream);
}

// Additions of the tree that a product passes.
int Depth(const Grid& grid) { return CeilLog2(std::int64_t{2} * grid.block_size); }

double Roundoff(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return DotRoundoff(p.dtype, 1 + Depth(grid), grid.blocks);
}

Cost CostOf(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return {.bytes = OperandBytes(p),
          .flops = 2 * static_cast<std::uint64_t>(p.n),
          .atomics = grid.blocks,
          .depth = std::uint64_t{1} + static_cast<unsigned>(Depth(grid)) + grid.blocks};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotTreeSequential = {
    .name = "tree_sequential",
    .summary = "a tree of halving strides in shared memory, one atomic addition a block",
    .source = "tree reduction without control divergence of the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
