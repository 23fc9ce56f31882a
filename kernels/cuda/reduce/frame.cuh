// The frame of the lessons of Reduce. A lesson brings a kernel, a Shape and a launch; from the
// Shape follow its error bound and its cost.
//
// What holds for every lesson, and is not repeated in their heads: any n (elements beyond the end
// count as the operation's identity, n = 0 is one block of them), any block size, any alignment
// (loads are scalar). A float folds at most kMaxChain elements, or a block's tree of them, in
// single precision; everything beyond is double, so that 2^28 ones sum to 2^28. At n = 2^20, f32,
// memory delivers the 4 MiB in 1 us.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/levels.cuh"
#include "kernels/cuda/primitives.cuh"

namespace tessera {

// The fold of values that are partial already. It knows nothing of elements, so that f32 and the
// 16-bit types, whose accumulators are the same, share the kernels of later stages.
template <class F>
using PartialFold = Fold<F::kOp, ValueOf<typename F::Element>>;

// Calls f.operator()<Fold<op, T>>(x), x being the operand as T, for the problem's operation and
// type.
template <class Function>
void DispatchFold(const ReduceProblem& p, Function&& f) {
  DispatchDType(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    DispatchOp(p.op,
               [&](auto op) { f.template operator()<Fold<op(), T>>(static_cast<const T*>(p.x)); });
  });
}

// x[i] for a fold: an element in a first stage, a partial value in a later one.
template <class F, bool kFirst, class In>
__device__ auto LoadValue(const In* x, std::int64_t i) {
  if constexpr (kFirst) {
    return F::Load(x[i], i);
  } else {
    return x[i];
  }
}

// --- What a lesson costs ---

struct ReduceShape {
  Grid grid;
  // Steps that an element passes at most, in Fold::Acc and then in Fold::Wide.
  std::int64_t narrow_steps = 0;
  std::int64_t wide_steps = 0;
  std::uint64_t extra_bytes = 0;  // that travel beside the operand
  std::uint64_t atomics = 0;      // on one address
  std::int64_t depth = 0;         // longest chain of dependent operations; 0: the steps
};

// The block size of a request, or the usual one.
constexpr std::uint32_t BlockSize(const ReduceProblem& p, std::uint32_t usual = 256) {
  return p.launch.block_size != 0 ? p.launch.block_size : usual;
}

// Of levels of launches in which a block folds two elements per thread, in place.
inline ReduceShape TreesInPlace(const ReduceProblem& p) {
  const std::uint32_t block = BlockSize(p);
  const LaterLevels later = MakeLaterLevels(p.n, 2 * block);
  const std::int64_t depth = CeilLog2(2 * block);
  return {.grid = {.block_size = block},
          .narrow_steps = depth,
          .wide_steps = later.count * depth,
          // A cell is written once, and every step touches three.
          .extra_bytes = 4 * (static_cast<std::uint64_t>(p.n) * AccBytes(p.op, p.dtype) +
                              static_cast<std::uint64_t>(later.values) * WideBytes(p.op, p.dtype))};
}

template <ReduceShape (*ShapeOf)(const ReduceProblem&)>
double RoundoffOf(const ReduceProblem& p) {
  const ReduceShape shape = ShapeOf(p);
  return ReduceRoundoff(p.op, p.dtype, p.n, {shape.narrow_steps, shape.wide_steps});
}

template <ReduceShape (*ShapeOf)(const ReduceProblem&)>
Cost CostOf(const ReduceProblem& p) {
  const ReduceShape shape = ShapeOf(p);
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = n * SizeOf(p.dtype) + shape.extra_bytes,
          .flops = n,
          .atomics = shape.atomics,
          .depth = static_cast<std::uint64_t>(
              shape.depth != 0 ? shape.depth : shape.narrow_steps + shape.wide_steps)};
}

// --- How a lesson ends ---

// enqueue.operator()<F>(x, partials, stream) launches a kernel that leaves `count` > 0 values. The
// host waits for them and folds them in index order.
template <class Enqueue>
void IntoPartials(const ReduceProblem& p, std::int64_t count, Stream& stream, Enqueue enqueue) {
  CudaStream& cuda = Cuda(stream);
  DispatchFold(p, [&]<class F>(auto* x) {
    using P = PartialFold<F>;
    using Wide = typename F::Wide;
    std::vector<Wide> values(static_cast<std::size_t>(count));
    auto* partials = static_cast<Wide*>(cuda.Scratch(values.size() * sizeof(Wide)));
    enqueue.template operator()<F>(x, partials, cuda.handle());
    CUDA_CHECK_LAUNCH(Reduce);
    cuda.CopyToHost(values.data(), partials, values.size() * sizeof(Wide));
    Wide all = values[0];
    for (std::size_t i = 1; i < values.size(); ++i) all = P::Combine(all, values[i]);
    P::Finish(all, p.n, p.result);
  });
}

// enqueue.operator()<F, kFirst>(x, n, blocks, partials, stream) launches a level over n values: the
// elements first (kFirst), then what the blocks of the level before have left, until one block
// leaves the result. A block takes per_block values.
template <class Enqueue>
void IntoLevels(const ReduceProblem& p, std::int64_t per_block, Stream& stream, Enqueue enqueue) {
  CudaStream& cuda = Cuda(stream);
  DispatchFold(p, [&]<class F>(auto* x) {
    using Wide = typename F::Wide;
    RunLevels<Wide>(
        p.n, per_block, cuda,
        [&](unsigned blocks, Wide* to) {
          enqueue.template operator()<F, true>(x, p.n, blocks, to, cuda.handle());
          CUDA_CHECK_LAUNCH(Reduce);
        },
        [&](unsigned blocks, Wide* from, std::int64_t n, Wide* to) {
          enqueue.template operator()<PartialFold<F>, false>(from, n, blocks, to, cuda.handle());
          CUDA_CHECK_LAUNCH(Reduce);
        });
  });
}

}  // namespace tessera
