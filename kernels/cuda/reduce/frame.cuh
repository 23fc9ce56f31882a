// The code that the lessons of Reduce share. A lesson has a kernel, a LessonShape and a launch. Its
// error bound and its cost are computed from the shape.
//
// The following holds for every lesson and is not repeated in the lessons' files. A lesson accepts
// any n (elements beyond the end count as the operation's identity, and n = 0 is one block of
// identities), any block size and any alignment (loads are scalar). In single precision it folds at
// most kMaxChain floats, or the tree of one block. All further folds are in double, so 2^28 ones
// sum to exactly 2^28. At n = 2^20, f32, memory delivers the 4 MiB in 1 us.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/common/lesson.cuh"
#include "kernels/cuda/common/levels.cuh"
#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"

namespace tessera {

// Folds partial values. It does not depend on the element type, so that f32 and the 16-bit types,
// which have the same accumulators, share the kernels of later stages.
template <class F>
using PartialFold = Fold<F::kOp, ValueOf<typename F::Element>>;

// Calls f.operator()<Fold<op, T>>(x) for the problem's operation and type. x is the operand as a
// pointer to T.
template <class Function>
void DispatchFold(const ReduceProblem& p, Function&& f) {
  DispatchDType(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    DispatchOp(p.op,
               [&](auto op) { f.template operator()<Fold<op(), T>>(static_cast<const T*>(p.x)); });
  });
}

// Returns x[i] for a fold: an element in the first stage, a partial value in a later one.
template <class F, bool kFirst, class In>
__device__ auto LoadValue(const In* x, std::int64_t i) {
  if constexpr (kFirst) {
    return F::Load(x[i], i);
  } else {
    return x[i];
  }
}

// --- What a lesson costs ---

// Returns the shape of a reduction in which the blocks of each level fold two elements per thread
// in place.
inline LessonShape TreesInPlace(const ReduceProblem& p) {
  return TreesInPlace(p.n, BlockSize(p.launch), AccBytes(p.op, p.dtype), WideBytes(p.op, p.dtype));
}

template <LessonShape (*ShapeOf)(const ReduceProblem&)>
double RoundoffOf(const ReduceProblem& p) {
  const LessonShape shape = ShapeOf(p);
  return ReduceRoundoff(p.op, p.dtype, p.n, {shape.narrow_steps, shape.wide_steps});
}

template <LessonShape (*ShapeOf)(const ReduceProblem&)>
Cost CostOf(const ReduceProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.n);
  return CostOfShape(ShapeOf(p), n * SizeOf(p.dtype), n);
}

// --- How a lesson ends ---

// enqueue.operator()<F>(x, partials, stream) launches a kernel that writes `count` > 0 values. The
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

template <class F>
__global__ void PrepareCell(typename F::Wide* cell) {
  *cell = F::template Identity<typename F::Wide>();
}

// Finishes the result of a reduction of `count` elements.
template <class F>
__global__ void FinishCell(const typename F::Wide* cell, std::int64_t count, Scalar* result) {
  F::Finish(*cell, count, result);
}

// enqueue.operator()<F>(x, cell, stream) launches a kernel whose blocks fold into *cell, which
// starts as the identity. The cell becomes the result. REQUIRES: Takes(op).
template <bool (*Takes)(ReduceOp), class Enqueue>
void IntoOneCell(const ReduceProblem& p, Stream& stream, Enqueue enqueue) {
  CudaStream& cuda = Cuda(stream);
  DispatchFold(p, [&]<class F>(auto* x) {
    if constexpr (Takes(F::kOp)) {
      using P = PartialFold<F>;
      using Wide = typename F::Wide;
      auto* cell = static_cast<Wide*>(cuda.Scratch(sizeof(Wide)));
      PrepareCell<P><<<1, 1, 0, cuda.handle()>>>(cell);
      CUDA_CHECK_LAUNCH(PrepareCell);
      enqueue.template operator()<F>(x, cell, cuda.handle());
      CUDA_CHECK_LAUNCH(Reduce);
      FinishCell<P><<<1, 1, 0, cuda.handle()>>>(cell, p.n, p.result);
      CUDA_CHECK_LAUNCH(FinishCell);
    }
  });
}

// first.operator()<F>(x, partials, stream) launches a kernel of `blocks` blocks over the elements.
// second.operator()<F>(partials, stream) launches a kernel over the values of these blocks.
template <class First, class Second>
void IntoSecondKernel(const ReduceProblem& p, std::int64_t blocks, Stream& stream, First first,
                      Second second) {
  CudaStream& cuda = Cuda(stream);
  DispatchFold(p, [&]<class F>(auto* x) {
    using Wide = typename F::Wide;
    auto* partials =
        static_cast<Wide*>(cuda.Scratch(static_cast<std::size_t>(blocks) * sizeof(Wide)));
    first.template operator()<F>(x, partials, cuda.handle());
    CUDA_CHECK_LAUNCH(Reduce);
    second.template operator()<PartialFold<F>>(partials, cuda.handle());
    CUDA_CHECK_LAUNCH(Reduce);
  });
}

// enqueue.operator()<F, kFirst>(x, n, blocks, partials, stream) launches a level over n values. In
// the first level (kFirst) these are the elements, and in each later level they are the values of
// the previous level's blocks. The level with only one block writes the result. A block takes
// per_block values.
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

// Like IntoLevels, for kernels that fold in place. first.operator()<F>(x, cells, blocks, partials,
// stream) gets n cells of scratch, because the operand must not change. next.operator()<F>(cells,
// n, blocks, partials, stream) launches the later levels.
template <class First, class Next>
void IntoLevelsInPlace(const ReduceProblem& p, std::int64_t per_block, Stream& stream, First first,
                       Next next) {
  IntoLevels(p, per_block, stream,
             [&]<class F, bool kFirst>(auto* x, std::int64_t n, unsigned blocks, auto* partials,
                                       cudaStream_t on) {
               if constexpr (kFirst) {
                 using Acc = typename F::Acc;
                 auto* cells =
                     static_cast<Acc*>(stream.Scratch(static_cast<std::size_t>(n) * sizeof(Acc)));
                 first.template operator()<F>(x, cells, blocks, partials, on);
               } else {
                 next.template operator()<F>(x, n, blocks, partials, on);
               }
             });
}

}  // namespace tessera
