// The frame of the lessons of Dot. A lesson brings a kernel, a Shape and a launch; from the Shape
// follow its error bound and its cost.
//
// What holds for every lesson, and is not repeated in their heads: any n (products beyond the end
// are 0, n = 0 is one block of zeros), any block size, any alignment (loads are scalar). A float
// sums at most kMaxChain products, or a block's tree of them, in single precision; everything
// beyond is double, so that 2^28 ones sum to 2^28. At n = 2^20, f32, memory delivers both operands,
// 8 MiB, in 2 us.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/primitives.cuh"

namespace tessera {

// Terms and the sums of a thread or a block are Acc: f32 for f32 and the 16-bit types, whose
// products it holds without rounding, f64 for f64, 64 bits that wrap for integers. Sums of blocks
// and of long chains are Wide: double, or the same 64 bits.
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

// Bytes of an Acc; a Wide has 8.
constexpr std::size_t AccBytes(DType dtype) {
  return IsInteger(dtype) || dtype == DType::kF64 ? 8 : 4;
}

// --- What a lesson costs ---

struct DotShape {
  Grid grid;
  // Roundings that a product passes at most: in Acc, its own included, and then in Wide.
  std::int64_t narrow_steps = 0;
  std::int64_t wide_steps = 0;
  std::uint64_t extra_bytes = 0;  // that travel beside the operands
  std::uint64_t atomics = 0;      // additions to one address
  std::int64_t depth = 0;         // longest chain of dependent operations; 0: the roundings
};

template <DotShape (*ShapeOf)(const DotProblem&)>
double RoundoffOf(const DotProblem& p) {
  const DotShape shape = ShapeOf(p);
  return SumRoundoff(p.dtype, {shape.narrow_steps, shape.wide_steps});
}

template <DotShape (*ShapeOf)(const DotProblem&)>
Cost CostOf(const DotProblem& p) {
  const DotShape shape = ShapeOf(p);
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = 2 * n * SizeOf(p.dtype) + shape.extra_bytes,
          .flops = 2 * n,
          .atomics = shape.atomics,
          .depth = static_cast<std::uint64_t>(
              shape.depth != 0 ? shape.depth : shape.narrow_steps + shape.wide_steps)};
}

// --- How a lesson ends ---

// enqueue(a, b, sum, stream) launches a kernel whose blocks add to *sum, which is zero before. The
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

// enqueue(a, b, partials, stream) launches a kernel that leaves `count` partial sums. The host
// waits for them and adds them up in index order.
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

}  // namespace tessera
