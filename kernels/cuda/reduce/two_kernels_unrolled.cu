// Reduce by two different kernels, the first with an unroll factor.
//
// Against `two_pass`: the grid is not fixed but follows from n, items_per_thread elements a thread
// (8 by default): the unroll factor. With 1 every thread loads one element, as in `no_stride`, and
// the second kernel has n / 256 values left; each doubling halves the blocks to start, the trees to
// climb and the values to pass on. The kernel does not know the factor: it strides by the number of
// threads, however many there are. Since there may be more than 1024 blocks now, the second kernel
// is another one, a single block whose threads stride through the values first.
//
//   kernel 1   grid = ceil(n / (block size * items))    strides, a tree a block, a value each
//   kernel 2   grid = 1                                 strides through the values, a tree
//
// Cost at n = 2^20, f32, blocks of 256: 4 MiB read by 512 blocks with 9 barriers each; 4 KiB
// written, and read by one more block with 11 barriers. Memory takes 1 us at 4.3 TB/s, and starting
// the second kernel about as long.
//
// Right for any n: thread t takes elements t, t + threads, ... as long as there are any; n = 0 is
// one block of identities. For any block size: trees round halves up. For any alignment: loads are
// scalar. For 2^28 floats: chains of at most 64 elements in single precision, the rest double.
#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;
constexpr std::uint32_t kItems = 8;
constexpr std::uint32_t kLastBlock = 1024;

Grid GridOf(const ReduceProblem& p) { return MakeGrid(p.n, p.launch, kBlock, kItems); }

// Folds the elements of each block's threads to partials[block]. Dynamic shared memory: one Wide a
// thread.
template <class F, class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    ReduceUnrolled(const T* x, std::int64_t n, typename F::Wide* partials) {
  using Wide = typename F::Wide;
  const Wide mine = FoldThreadInTurn<F>(GridThread(), n, GridThreads(),
                                        [=](std::int64_t i) { return F::Load(x[i], i); });
  const Wide value = FoldBlockTree<F>(mine, DynamicShared<Wide>());
  if (threadIdx.x == 0) partials[blockIdx.x] = value;
}

// The result of a reduction of `count` elements, from the values of its blocks. One block of
// kLastBlock threads.
template <class F>
__global__ void __launch_bounds__(kLastBlock)
    ReduceBlockValues(const typename F::Wide* partials, std::int64_t blocks, std::int64_t count,
                      Scalar* result) {
  using Wide = typename F::Wide;
  __shared__ Wide cells[kLastBlock];
  const Wide mine = FoldThreadInTurn<F>(threadIdx.x, blocks, kLastBlock,
                                        [=](std::int64_t i) { return partials[i]; });
  const Wide value = FoldBlockTree<F>(mine, cells);
  if (threadIdx.x == 0) F::Finish(value, count, result);
}

template <ReduceOp op, class T>
void Run(const ReduceProblem& p, CudaStream& stream) {
  using F = Fold<op, T>;
  using Wide = typename F::Wide;
  const Grid grid = GridOf(p);
  auto* partials = static_cast<Wide*>(stream.Scratch(grid.blocks * sizeof(Wide)));
  ReduceUnrolled<F>
      <<<grid.blocks, grid.block_size, grid.block_size * sizeof(Wide), stream.handle()>>>(
          static_cast<const T*>(p.x), p.n, partials);
  CUDA_CHECK_LAUNCH(ReduceUnrolled);
  ReduceBlockValues<PartialFold<op, T>>
      <<<1, kLastBlock, 0, stream.handle()>>>(partials, grid.blocks, p.n, p.result);
  CUDA_CHECK_LAUNCH(ReduceBlockValues);
}

// Steps in Fold::Wide that follow a thread's chains.
std::int64_t WideSteps(const Grid& grid) {
  const std::int64_t left = CeilDiv(grid.blocks, kLastBlock);
  return CeilDiv(grid.per_thread, kMaxChain) + CeilLog2(grid.block_size) + left +
         CeilDiv(left, kMaxChain) + CeilLog2(kLastBlock);
}

double Roundoff(const ReduceProblem& p) {
  const Grid grid = GridOf(p);
  return ReduceRoundoff(p.op, p.dtype, p.n, std::min<std::int64_t>(grid.per_thread, kMaxChain),
                        WideSteps(grid));
}

Cost CostOf(const ReduceProblem& p) {
  const Grid grid = GridOf(p);
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = n * SizeOf(p.dtype) + 2 * grid.blocks * WideBytes(p.op, p.dtype),
          .flops = n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(grid.per_thread + WideSteps(grid))};
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) {
    DispatchOp(p.op, [&](auto op) { Run<op(), decltype(zero)>(p, Cuda(stream)); });
  });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceTwoKernelsUnrolled = {
    .name = "two_kernels_unrolled",
    .summary =
        "items_per_thread elements a thread, a tree a block, a second kernel folds the blocks",
    .source = "reduction with two kernels and unrolling of the HIP training examples",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .items_per_thread = kAnyItems},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
