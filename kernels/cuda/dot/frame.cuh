// The code that the lessons of Dot share. A lesson has a kernel, a LessonShape and a launch. Its
// error bound and its cost are computed from the shape.
//
// The following holds for every lesson and is not repeated in the lessons' files. A lesson accepts
// any n (products beyond the end are 0, and n = 0 is one block of zeros), any block size and any
// alignment (loads are scalar). In single precision it sums at most kMaxChain products of floats,
// or the tree of one block. All further sums are in double, so 2^28 ones sum to exactly 2^28. At n
// = 2^20, f32, memory delivers both operands (8 MiB) in 2 us.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "kernels/cuda/common/lesson.cuh"
#include "kernels/cuda/common/levels.cuh"
#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"

namespace tessera {

// The terms and the sums within a thread or a block are Acc. That is f32 for f32 and for the 16-bit
// types, whose products it holds without rounding. It is f64 for f64, and a wrapping 64-bit integer
// for integers. The sums of blocks and of long chains are Wide: double, or the same 64-bit integer.
template <class T>
struct DotFold : Fold<ReduceOp::kSum, T> {
  using Acc = typename Fold<ReduceOp::kSum, T>::Acc;

  TESSERA_HD static Acc Multiply(T a, T b) {
    return WrapMultiply(static_cast<Acc>(static_cast<ValueOf<T>>(a)),
                        static_cast<Acc>(static_cast<ValueOf<T>>(b)));
  }
};

template <class T>
using DotAcc = typename DotFold<T>::Acc;
template <class T>
using DotWide = typename DotFold<T>::Wide;

// Returns the size of an Acc. A Wide takes 8 bytes.
constexpr std::size_t AccBytes(DType dtype) {
  return IsInteger(dtype) || dtype == DType::kF64 ? 8 : 4;
}

// --- What a lesson costs ---

// Returns the shape of a reduction in which the blocks of each level add two products per thread in
// place.
inline LessonShape TreesInPlace(const DotProblem& p) {
  LessonShape shape = TreesInPlace(p.n, BlockSize(p.launch), AccBytes(p.dtype), sizeof(double));
  ++shape.narrow_steps;  // the product
  return shape;
}

template <LessonShape (*ShapeOf)(const DotProblem&)>
double RoundoffOf(const DotProblem& p) {
  const LessonShape shape = ShapeOf(p);
  return SumRoundoff(p.dtype, {shape.narrow_steps, shape.wide_steps});
}

template <LessonShape (*ShapeOf)(const DotProblem&)>
Cost CostOf(const DotProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.n);
  return CostOfShape(ShapeOf(p), 2 * n * SizeOf(p.dtype), 2 * n);
}

// --- How a lesson ends ---

// enqueue(a, b, sum, stream) launches a kernel whose blocks add to *sum, which starts at zero. The
// sum becomes the result.
template <class Enqueue>
void IntoOneSum(const DotProblem& p, Stream& stream, Enqueue enqueue) {
  CudaStream& cuda = Cuda(stream);
  DispatchDType(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Wide = DotWide<T>;
    auto* sum = static_cast<Wide*>(cuda.Scratch(sizeof(Wide)));
    CUDA_CHECK(cudaMemsetAsync(sum, 0, sizeof(Wide), cuda.handle()));
    enqueue(static_cast<const T*>(p.a), static_cast<const T*>(p.b), sum, cuda.handle());
    CUDA_CHECK_LAUNCH(Dot);
    void* to = &p.result->real;
    if constexpr (std::is_integral_v<Wide>) to = &p.result->integer;
    CUDA_CHECK(cudaMemcpyAsync(to, sum, sizeof(Wide), cudaMemcpyDeviceToHost, cuda.handle()));
  });
}

// enqueue(a, b, partials, stream) launches a kernel that writes `count` partial sums. The host
// waits for them and adds them in index order.
template <class Enqueue>
void IntoPartials(const DotProblem& p, std::int64_t count, Stream& stream, Enqueue enqueue) {
  CudaStream& cuda = Cuda(stream);
  DispatchDType(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Wide = DotWide<T>;
    std::vector<Wide> sums(static_cast<std::size_t>(count));
    auto* partials = static_cast<Wide*>(cuda.Scratch(sums.size() * sizeof(Wide)));
    enqueue(static_cast<const T*>(p.a), static_cast<const T*>(p.b), partials, cuda.handle());
    CUDA_CHECK_LAUNCH(Dot);
    cuda.CopyToHost(sums.data(), partials, sums.size() * sizeof(Wide));
    Wide sum = 0;
    for (const Wide s : sums) sum = WrapAdd(sum, s);
    Finish(sum, p.result);
  });
}

// Launches one level after another, all of which work in place. first(a, b, cells, blocks,
// partials, stream) launches the level over the elements, with n cells of scratch. next(cells, n,
// blocks, partials, stream) launches a level over the n values of the previous level's blocks. The
// level with only one block writes the result.
template <class First, class Next>
void IntoLevelsInPlace(const DotProblem& p, std::int64_t per_block, Stream& stream, First first,
                       Next next) {
  CudaStream& cuda = Cuda(stream);
  DispatchDType(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Acc = DotAcc<T>;
    using Wide = DotWide<T>;
    auto* cells = static_cast<Acc*>(cuda.Scratch(static_cast<std::size_t>(p.n) * sizeof(Acc)));
    RunLevels<Wide>(
        p.n, per_block, cuda,
        [&](unsigned blocks, Wide* to) {
          first(static_cast<const T*>(p.a), static_cast<const T*>(p.b), cells, blocks, to,
                cuda.handle());
          CUDA_CHECK_LAUNCH(Dot);
        },
        [&](unsigned blocks, Wide* from, std::int64_t n, Wide* to) {
          next(from, n, blocks, to, cuda.handle());
          CUDA_CHECK_LAUNCH(Dot);
        });
  });
}

}  // namespace tessera
