// Reduce with one element a thread, the host last.
//
// The kernel that most people write first once they know shared memory: thread i loads element i, a
// tree in shared memory folds the elements of a block, thread 0 leaves its value, and the host,
// which has to wait for the kernel anyway, folds the blocks' values in a loop.
//
//   elements   0 1 2 3 | 4 5 6 7 | 8 9          blocks of 4 threads
//   tree       0<--2 1<--3, 0<1                 in each of them
//   partials   0         1         2            to the host
//
// Against `coarsened` nothing is gained: a thread has one load to wait for and then is idle in half
// of the tree's first level and in more of every later one. It is here to be compared with
// `grid_stride`, which gives the same threads more to do.
//
// Cost at n = 2^20, f32, blocks of 256: 4 MiB read, 4096 blocks with 9 barriers each, 32 KiB
// written, and fetched and folded by the host. Memory would take 1 us at 4.3 TB/s; the round trip
// to the host takes ten times as long.
//
// Right for any n: threads beyond the end contribute the identity, n = 0 is one block of them. For
// any block size: the tree rounds halves up. For any alignment: loads are scalar. For 2^28 floats:
// at most 10 roundings in single precision lie on the way of an element; the host folds doubles.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/reduce/finish.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

Grid GridOf(const ReduceProblem& p) { return MakeGrid(p.n, p.launch, kBlock, 1); }

// Folds the blockDim.x elements of each block to partials[block]. Dynamic shared memory: one Acc a
// thread.
template <class F, class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    ReduceNoStride(const T* x, std::int64_t n, typename F::Wide* partials) {
  using Acc = typename F::Acc;
  const std::int64_t i = GridThread();
  const Acc mine = i < n ? F::Load(x[i], i) : F::template Identity<Acc>();
  const Acc value = FoldBlockTree<F>(mine, DynamicShared<Acc>());
  if (threadIdx.x == 0) partials[blockIdx.x] = F::Widen(value);
}

template <ReduceOp op, class T>
void Run(const ReduceProblem& p, CudaStream& stream) {
  using F = Fold<op, T>;
  using Wide = typename F::Wide;
  const Grid grid = GridOf(p);
  auto* partials = static_cast<Wide*>(stream.Scratch(grid.blocks * sizeof(Wide)));
  ReduceNoStride<F><<<grid.blocks, grid.block_size, grid.block_size * sizeof(typename F::Acc),
                      stream.handle()>>>(static_cast<const T*>(p.x), p.n, partials);
  CUDA_CHECK_LAUNCH(ReduceNoStride);
  FinishOnHost<PartialFold<op, T>>(partials, grid.blocks, p.n, p.result, stream);
}

double Roundoff(const ReduceProblem& p) {
  const Grid grid = GridOf(p);
  return ReduceRoundoff(p.op, p.dtype, p.n, CeilLog2(grid.block_size), grid.blocks);
}

Cost CostOf(const ReduceProblem& p) {
  const Grid grid = GridOf(p);
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = n * SizeOf(p.dtype) + grid.blocks * WideBytes(p.op, p.dtype),
          .flops = n,
          .atomics = 0,
          .depth = static_cast<unsigned>(CeilLog2(grid.block_size)) + std::uint64_t{grid.blocks}};
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) {
    DispatchOp(p.op, [&](auto op) { Run<op(), decltype(zero)>(p, Cuda(stream)); });
  });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceNoStride = {
    .name = "no_stride",
    .summary = "one element a thread, a tree in shared memory a block, the host folds the blocks",
    .source = "reduction without striding of the HIP training examples",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
