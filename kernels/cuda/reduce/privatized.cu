// Reduce by trees in shared memory, one level of launches after the other until a single value is
// left.
//
// A tree over device memory reads and writes it at every level. Here a block takes a private copy
// of its part: a thread loads two elements, a block apart, and folds them on the way into shared
// memory (so the first level of the tree costs nothing, and no thread is idle in it); halving
// strides do the rest. One value a block goes back to device memory, and the next launch reduces
// those, until one block is enough: it writes the result. No atomics, so the same input gives the
// same bits.
//
// Cost at n = 2^20, f32, blocks of 256: 4 MiB read, and 16 KiB written and read again between
// levels; three launches of 2048, 4 and 1 blocks; 9 barriers a block.
//
// Right for any n: elements beyond the end count as the operation's identity, and n = 0 is one
// block of identities. For any block size: the tree rounds halves up. For any alignment: loads are
// scalar. For 2^28 floats: at most 1 + 10 roundings in single precision lie on the way of an
// element, all in the first level; between levels values are double.
#include <utility>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

std::uint32_t BlockSize(const ReduceProblem& p) {
  return p.launch.block_size != 0 ? p.launch.block_size : kBlock;
}

// Blocks of a level over n values, two a thread.
std::int64_t Blocks(std::int64_t n, std::uint32_t block_size) {
  return n == 0 ? 1 : CeilDiv(n, std::int64_t{2} * block_size);
}

// Folds the 2 * blockDim.x values of each block to partials[block] or, in the last level, which has
// one block, to the result of a reduction of `count` elements. The first level reads elements, the
// others partial values. Dynamic shared memory: one accumulator a thread, Acc in the first level
// and Wide in the others.
template <class F, bool kFirst, class In>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    ReducePrivatized(const In* x, std::int64_t n, std::int64_t count, typename F::Wide* partials,
                     Scalar* result) {
  using A = std::conditional_t<kFirst, typename F::Acc, typename F::Wide>;
  const auto load = [=](std::int64_t i) -> A {
    if (i >= n) return F::template Identity<A>();
    if constexpr (kFirst) {
      return F::Load(x[i], i);
    } else {
      return x[i];
    }
  };
  const std::int64_t i = std::int64_t{2} * blockIdx.x * blockDim.x + threadIdx.x;
  const A pair = F::Combine(load(i), load(i + blockDim.x));
  const auto value = Widened<F>(FoldBlockTree<F>(pair, DynamicShared<A>()));
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) {
    F::Finish(value, count, result);
  } else {
    partials[blockIdx.x] = value;
  }
}

template <class F, class T>
void Run(const ReduceProblem& p, CudaLane& lane) {
  using Wide = typename F::Wide;
  const std::uint32_t block = BlockSize(p);
  std::int64_t blocks = Blocks(p.n, block);
  // Levels write to the two arrays in turn: a level's blocks end in any order, so none may write
  // what another still reads.
  auto* to = static_cast<Wide*>(lane.Scratch(static_cast<std::size_t>(blocks) * sizeof(Wide)));
  auto* from = static_cast<Wide*>(
      lane.Scratch(static_cast<std::size_t>(Blocks(blocks, block)) * sizeof(Wide)));
  ReducePrivatized<F, true>
      <<<static_cast<unsigned>(blocks), block, block * sizeof(typename F::Acc), lane.stream()>>>(
          static_cast<const T*>(p.x), p.n, p.n, to, p.result);
  CUDA_CHECK_LAUNCH(ReducePrivatized);
  while (blocks > 1) {
    std::swap(from, to);
    const std::int64_t values = blocks;
    blocks = Blocks(values, block);
    ReducePrivatized<F, false>
        <<<static_cast<unsigned>(blocks), block, block * sizeof(Wide), lane.stream()>>>(
            static_cast<const Wide*>(from), values, p.n, to, p.result);
    CUDA_CHECK_LAUNCH(ReducePrivatized);
  }
}

// Steps of the levels after the first.
std::int64_t WideSteps(const ReduceProblem& p) {
  const std::uint32_t block = BlockSize(p);
  std::int64_t steps = 0;
  for (std::int64_t blocks = Blocks(p.n, block); blocks > 1; blocks = Blocks(blocks, block))
    steps += 1 + CeilLog2(block);
  return steps;
}

double Roundoff(const ReduceProblem& p) {
  return ReduceRoundoff(p.op, p.dtype, p.n, 1 + CeilLog2(BlockSize(p)), WideSteps(p));
}

Cost CostOf(const ReduceProblem& p) {
  const std::uint32_t block = BlockSize(p);
  const std::uint64_t wide = IsArg(p.op) ? sizeof(Indexed<double>) : sizeof(double);
  const auto n = static_cast<std::uint64_t>(p.n);
  std::uint64_t between = 0;
  for (std::int64_t blocks = Blocks(p.n, block); blocks > 1; blocks = Blocks(blocks, block))
    between += 2 * wide * static_cast<std::uint64_t>(blocks);
  return {.bytes = n * SizeOf(p.dtype) + between,
          .flops = n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(1 + CeilLog2(block) + WideSteps(p))};
}

void Enqueue(const ReduceProblem& p, Lane& lane) {
  DispatchReal(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    DispatchOp(p.op, [&](auto op) { Run<Fold<op(), T>, T>(p, Cuda(lane)); });
  });
}

}  // namespace

extern const Strategy<ReduceProblem> kReducePrivatized;
constexpr Strategy<ReduceProblem> kReducePrivatized = {
    .name = "privatized",
    .summary = "a tree in shared memory a block, two elements a thread, launches until one is left",
    .source = "privatization in the notes on CUDA reductions",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .min_compute_capability = kBaseComputeCapability,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = {}, .items_per_thread = {}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = nullptr,
};

}  // namespace tessera
