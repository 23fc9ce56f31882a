// Reduce by trees in shared memory, one level of launches after the other until a single value is
// left.
//
// Against `coalesced`: a block takes a private copy of its part, in memory of its own
// multiprocessor, where a step costs tens of cycles and not hundreds. A thread loads two elements,
// a block apart, and folds them on the way: the first step of the tree costs nothing, and half the
// cells are enough.
//
//   elements   0 1 2 3 | 4 5 6 7                    4 threads
//   load       0<4  1<5  2<6  3<7                   into shared memory
//   live 4     0<--2  1<--3                         threads 0 1
//   live 2     0<1                                  thread  0
//
// One value a block goes back to device memory, and the next launch reduces those, until one block
// is enough: it writes the result. No atomics, so the same input gives the same bits.
//
// Cost at n = 2^20, f32, blocks of 256: 4 MiB read, and 16 KiB written and read again between
// levels; three launches of 2048, 4 and 1 blocks; 9 barriers a block. Memory would take 1 us at 4.3
// TB/s.
//
// Right for any n: elements beyond the end count as the operation's identity, and n = 0 is one
// block of identities. For any block size: the tree rounds halves up. For any alignment: loads are
// scalar. For 2^28 floats: at most 1 + 10 roundings in single precision lie on the way of an
// element, all in the first level; between levels values are double.
#include <type_traits>

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
  StoreBlock<F>(Widened<F>(FoldBlockTree<F>(pair, DynamicShared<A>())), count, partials, result);
}

template <ReduceOp op, class T>
void Run(const ReduceProblem& p, CudaStream& stream) {
  using F = Fold<op, T>;
  using Wide = typename F::Wide;
  const std::uint32_t block = BlockSize(p);
  RunLevels<Wide>(
      p.n, PerBlock(p), stream,
      [&](unsigned blocks, Wide* to) {
        ReducePrivatized<F, true>
            <<<blocks, block, block * sizeof(typename F::Acc), stream.handle()>>>(
                static_cast<const T*>(p.x), p.n, p.n, to, p.result);
        CUDA_CHECK_LAUNCH(ReducePrivatized);
      },
      [&](unsigned blocks, const Wide* from, std::int64_t n, Wide* to) {
        ReducePrivatized<PartialFold<op, T>, false>
            <<<blocks, block, block * sizeof(Wide), stream.handle()>>>(from, n, p.n, to, p.result);
        CUDA_CHECK_LAUNCH(ReducePrivatized);
      });
}

// Steps that a value passes in a level.
std::int64_t Depth(const ReduceProblem& p) { return 1 + CeilLog2(BlockSize(p)); }

double Roundoff(const ReduceProblem& p) {
  return ReduceRoundoff(p.op, p.dtype, p.n, Depth(p),
                        MakeLaterLevels(p.n, PerBlock(p)).count * Depth(p));
}

Cost CostOf(const ReduceProblem& p) {
  const LaterLevels later = MakeLaterLevels(p.n, PerBlock(p));
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = n * SizeOf(p.dtype) +
                   2 * static_cast<std::uint64_t>(later.values) * WideBytes(p.op, p.dtype),
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

extern constexpr Strategy<ReduceProblem> kReducePrivatized = {
    .name = "privatized",
    .summary = "a tree in shared memory a block, two elements a thread, launches until one is left",
    .source = "privatization in the notes on CUDA reductions",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
