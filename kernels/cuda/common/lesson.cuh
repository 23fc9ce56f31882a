// Code that the lessons share. Lessons are strategies that teach sums step by step, as sums of
// products (Dot) and as reductions with any operation (Reduce). This file has the terms that a
// lesson folds, the shape of its launches (which determines its error bound and its cost), and the
// ways in which the values of blocks become the result. ladder.cuh has the kernels.
//
// The following holds for every lesson and is not repeated in the lessons' files. A lesson accepts
// any n (terms beyond the end count as the operation's identity, and n = 0 is one block of
// identities), any block size and any alignment (loads are scalar). In single precision it folds
// only chains of up to kMaxChain terms and the tree of a block. All further folds are in double, so
// 2^28 ones sum to exactly 2^28. At n = 2^20, f32, memory delivers an operand (4 MiB) in 1 us.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// --- Terms ---

// The fold of Dot. A product of f32 or 16-bit elements is an f32 (exact for 16 bits), a product of
// f64 is an f64, and one of integers is a 64-bit integer that wraps.
template <class T>
struct DotFold : Fold<ReduceOp::kSum, T> {
  using Acc = typename Fold<ReduceOp::kSum, T>::Acc;

  TESSERA_HD static Acc Multiply(T a, T b) {
    return WrapMultiply(static_cast<Acc>(static_cast<ValueOf<T>>(a)),
                        static_cast<Acc>(static_cast<ValueOf<T>>(b)));
  }
};

// Folds the values of blocks. It does not depend on the element type, so that f32 and the 16-bit
// types, which have the same accumulators, share the kernels of later launches.
template <class F>
using PartialFold = Fold<F::kOp, ValueOf<typename F::Element>>;

// Functions from an index to a term: the products of Dot, the elements of Reduce, and the values
// that blocks have stored.
template <class T>
struct Products {
  const T *a, *b;
  __device__ typename DotFold<T>::Acc operator()(std::int64_t i) const {
    return DotFold<T>::Multiply(a[i], b[i]);
  }
};
template <class F>
struct Elements {
  const typename F::Element* x;
  __device__ typename F::Acc operator()(std::int64_t i) const { return F::Load(x[i], i); }
};
template <class F>
struct Values {
  typename F::Wide* values;
  __device__ typename F::Wide operator()(std::int64_t i) const { return values[i]; }
};

// Calls f.operator()<F>(terms) with the fold and the terms of the problem.
template <class Function>
void DispatchTerms(const DotProblem& p, Function&& f) {
  DispatchDType(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    f.template operator()<DotFold<T>>(
        Products<T>{static_cast<const T*>(p.a), static_cast<const T*>(p.b)});
  });
}
template <class Function>
void DispatchTerms(const ReduceProblem& p, Function&& f) {
  DispatchDType(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    DispatchOp(p.op, [&](auto op) {
      using F = Fold<op(), T>;
      f.template operator()<F>(Elements<F>{static_cast<const T*>(p.x)});
    });
  });
}

// --- Shapes, bounds and costs ---

struct LessonShape {
  Grid grid;
  // The largest number of folds that a term goes through: first in Fold::Acc (narrow), then in
  // Fold::Wide (wide).
  std::int64_t narrow_steps = 0;
  std::int64_t wide_steps = 0;
  std::uint64_t extra_bytes = 0;  // bytes moved in addition to the operands
  std::uint64_t atomics = 0;      // number of atomics on one address
  std::int64_t depth = 0;         // longest chain of dependent steps; 0 means the sum of the steps
};

// Returns the shape of a lesson whose threads each fold `terms` terms, in chains of kMaxChain.
// `others` holds the steps before and after the chains.
constexpr LessonShape WithChains(std::int64_t terms, LessonShape others) {
  others.narrow_steps += std::min<std::int64_t>(terms, kMaxChain);
  others.wide_steps += CeilDiv(terms, kMaxChain);
  others.depth = terms + others.wide_steps;
  return others;
}

// Returns the number of steps in which a thread folds `values` values that are already Wide. Every
// kMaxChain values take one additional step, which folds the chain into the total.
constexpr std::int64_t WideChainSteps(std::int64_t values) {
  return values + CeilDiv(values, kMaxChain);
}

// Return the launch's value of the parameter, or the default if the launch does not set it.
constexpr std::uint32_t BlockSize(const Launch& launch) {
  return launch.block_size != 0 ? launch.block_size : 256;
}
constexpr std::int64_t Items(const Launch& launch) {
  return launch.items_per_thread != 0 ? launch.items_per_thread : 8;
}

template <class Problem>
std::uint64_t AccBytes(const Problem& p) {
  return AccBytes(OpOf(p), p.dtype);
}
template <class Problem>
std::uint64_t WideBytes(const Problem& p) {
  return WideBytes(OpOf(p), p.dtype);
}

template <auto kShapeOf>
double LessonRoundoff(const DotProblem& p) {
  const LessonShape shape = kShapeOf(p);
  return SumRoundoff(p.dtype, {shape.narrow_steps + 1, shape.wide_steps});  // 1: the product
}
template <auto kShapeOf>
double LessonRoundoff(const ReduceProblem& p) {
  const LessonShape shape = kShapeOf(p);
  return ReduceRoundoff(p.op, p.dtype, p.n, {shape.narrow_steps, shape.wide_steps});
}

template <auto kShapeOf, class Problem>
Cost LessonCost(const Problem& p) {
  constexpr int kOperands = std::is_same_v<Problem, DotProblem> ? 2 : 1;
  const LessonShape shape = kShapeOf(p);
  const auto n = static_cast<std::uint64_t>(p.n);
  const std::int64_t steps = shape.narrow_steps + shape.wide_steps + (kOperands - 1);
  return {.bytes = kOperands * n * SizeOf(p.dtype) + shape.extra_bytes,
          .flops = kOperands * n,
          .atomics = shape.atomics,
          .depth = static_cast<std::uint64_t>(shape.depth != 0 ? shape.depth : steps)};
}

// Sets the other fields of a lesson's strategy, whose texts and limits are already set.
template <auto kShapeOf, auto kEnqueue, class Problem>
constexpr Strategy<Problem> Lesson(Strategy<Problem> strategy) {
  strategy.backend = Backend::kCuda;
  strategy.roundoff = LessonRoundoff<kShapeOf>;
  strategy.cost = LessonCost<kShapeOf, Problem>;
  strategy.launch = kEnqueue;
  return strategy;
}

// --- Ends: what a kernel does with the value of a block. All threads of the block call an end ---

// The values are stored in the order of the blocks.
template <class F>
struct ToValues {
  typename F::Wide* values;
  __device__ void operator()(typename F::Wide value) const {
    if (threadIdx.x == 0) values[blockIdx.x] = value;
  }
};

// The values are added to a sum, in any order.
template <class F>
struct ToOneSum {
  typename F::Wide* sum;
  __device__ void operator()(typename F::Wide value) const {
    if (threadIdx.x == 0) AtomicAdd(sum, value);
  }
};

// The values are stored for the next launch. If there is only one block, its value becomes the
// result of a reduction of `count` terms.
template <class F>
struct ToNextLaunch {
  typename F::Wide* values;
  std::int64_t count;
  Scalar* result;
  __device__ void operator()(typename F::Wide value) const {
    if (threadIdx.x != 0) return;
    if (gridDim.x == 1) {
      F::Finish(value, count, result);
    } else {
      values[blockIdx.x] = value;
    }
  }
};

// --- Launches ---

// enqueue.operator()<F>(terms, values, stream) launches a kernel that stores `count` > 0 values.
// The host waits for them and folds them in index order.
template <class Problem, class Enqueue>
void IntoHost(const Problem& p, std::int64_t count, Stream& stream, Enqueue enqueue) {
  CudaStream& cuda = Cuda(stream);
  DispatchTerms(p, [&]<class F>(auto terms) {
    using P = PartialFold<F>;
    using Wide = typename F::Wide;
    std::vector<Wide> values(static_cast<std::size_t>(count));
    auto* stored = static_cast<Wide*>(cuda.Scratch(values.size() * sizeof(Wide)));
    enqueue.template operator()<F>(terms, stored, cuda.handle());
    CUDA_CHECK_LAUNCH(Lesson);
    cuda.CopyToHost(values.data(), stored, values.size() * sizeof(Wide));
    Wide all = values[0];
    for (std::size_t i = 1; i < values.size(); ++i) all = P::Combine(all, values[i]);
    P::Finish(all, p.n, p.result);
  });
}

// enqueue.operator()<F>(terms, end, stream) launches a kernel whose blocks add to one sum, which
// becomes the result.
template <class Enqueue>
void IntoOneSum(const DotProblem& p, Stream& stream, Enqueue enqueue) {
  CudaStream& cuda = Cuda(stream);
  DispatchTerms(p, [&]<class F>(auto terms) {
    using Wide = typename F::Wide;
    auto* sum = static_cast<Wide*>(cuda.Scratch(sizeof(Wide)));
    CUDA_CHECK(cudaMemsetAsync(sum, 0, sizeof(Wide), cuda.handle()));
    enqueue.template operator()<F>(terms, ToOneSum<F>{sum}, cuda.handle());
    CUDA_CHECK_LAUNCH(Lesson);
    void* to = &p.result->real;
    if constexpr (std::is_integral_v<Wide>) to = &p.result->integer;
    CUDA_CHECK(cudaMemcpyAsync(to, sum, sizeof(Wide), cudaMemcpyDeviceToHost, cuda.handle()));
  });
}

// Makes the value of a cell in device memory the result of a reduction of `count` elements.
template <class F>
__global__ void FinishCell(const typename F::Wide* cell, std::int64_t count, Scalar* result) {
  F::Finish(*cell, count, result);
}

// launch.operator()<F>(grid, terms, n, end, stream) launches a kernel over n terms. It is called
// for the grid, and then for one block of `threads` threads over the values of the grid's blocks.
// Unless kAlways is set, a grid of one block writes the result itself.
template <bool kAlways, class LaunchKernel>
void IntoSecondKernel(const ReduceProblem& p, const Grid& grid, std::uint32_t threads,
                      Stream& stream, LaunchKernel launch) {
  CudaStream& cuda = Cuda(stream);
  DispatchTerms(p, [&]<class F>(auto terms) {
    using P = PartialFold<F>;
    using Wide = typename F::Wide;
    auto* values = static_cast<Wide*>(cuda.Scratch(std::size_t{grid.blocks} * sizeof(Wide)));
    if constexpr (kAlways) {
      launch.template operator()<F>(grid, terms, p.n, ToValues<F>{values}, cuda.handle());
    } else {
      launch.template operator()<F>(grid, terms, p.n, ToNextLaunch<F>{values, p.n, p.result},
                                    cuda.handle());
    }
    CUDA_CHECK_LAUNCH(Lesson);
    if (!kAlways && grid.blocks == 1) return;
    const Grid one = {.block_size = threads, .blocks = 1, .per_thread = 0};
    launch.template operator()<P>(one, Values<P>{values}, grid.blocks,
                                  ToNextLaunch<P>{nullptr, p.n, p.result}, cuda.handle());
    CUDA_CHECK_LAUNCH(Lesson);
  });
}

// Returns the shape of a lesson that ends with a second kernel. `first` and `second` are the steps
// that the two kernels take after their chains. `twice`: whether the second kernel runs, for which
// the values of the blocks are written and read.
inline LessonShape SecondKernelShape(const ReduceProblem& p, const Grid& grid, std::int64_t first,
                                     std::int64_t second, bool twice) {
  return WithChains(grid.per_thread, {.grid = grid,
                                      .wide_steps = first + (twice ? second : 0),
                                      .extra_bytes = twice ? 2 * grid.blocks * WideBytes(p) : 0});
}

// --- One launch per level ---

// Returns the number of blocks of a level over n values. It is at least one, because a block must
// write the result of an empty input.
constexpr std::int64_t LevelBlocks(std::int64_t n, std::int64_t per_block) {
  return n == 0 ? 1 : CeilDiv(n, per_block);
}

// The levels that follow the first level over n terms.
struct LaterLevels {
  int count = 0;
  std::int64_t values = 0;  // values passed from level to level, in total
};
constexpr LaterLevels MakeLaterLevels(std::int64_t n, std::int64_t per_block) {
  LaterLevels later;
  for (std::int64_t blocks = LevelBlocks(n, per_block); blocks > 1;
       blocks = LevelBlocks(blocks, per_block)) {
    ++later.count;
    later.values += blocks;
  }
  return later;
}

// Launches one level after another until one value is left. A kernel has no barrier between its
// blocks; the end of a launch serves as such a barrier. Each block of a level takes per_block > 1
// values and leaves one, and the level with only one block writes the result.
// level.operator()<F>(terms, n, blocks, end, stream) launches a level over n terms. Levels
// alternate between two arrays, because the blocks of a level end in any order and must not
// overwrite values that other blocks have yet to read.
template <class Problem, class Level>
void IntoLevels(const Problem& p, std::int64_t per_block, Stream& stream, Level level) {
  CudaStream& cuda = Cuda(stream);
  DispatchTerms(p, [&]<class F>(auto terms) {
    using P = PartialFold<F>;
    using Wide = typename F::Wide;
    const auto values = [&](std::int64_t count) {
      return static_cast<Wide*>(cuda.Scratch(static_cast<std::size_t>(count) * sizeof(Wide)));
    };
    std::int64_t blocks = LevelBlocks(p.n, per_block);
    Wide* to = values(blocks);
    Wide* from = values(LevelBlocks(blocks, per_block));
    level.template operator()<F>(terms, p.n, static_cast<unsigned>(blocks),
                                 ToNextLaunch<F>{to, p.n, p.result}, cuda.handle());
    CUDA_CHECK_LAUNCH(Lesson);
    while (blocks > 1) {
      std::swap(from, to);
      const std::int64_t n = blocks;
      blocks = LevelBlocks(n, per_block);
      level.template operator()<P>(Values<P>{from}, n, static_cast<unsigned>(blocks),
                                   ToNextLaunch<P>{to, p.n, p.result}, cuda.handle());
      CUDA_CHECK_LAUNCH(Lesson);
    }
  });
}

}  // namespace tessera
