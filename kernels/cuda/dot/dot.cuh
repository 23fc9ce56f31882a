// What the rows of Dot share: the arithmetic of a term and of sums of terms, its error bound, and
// the cell that blocks add their sums to.
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

// For terms that are rounded narrow_steps times in Acc, the product included, then wide_steps times
// in Wide.
constexpr double DotRoundoff(DType dtype, std::int64_t narrow_steps, std::int64_t wide_steps) {
  if (IsInteger(dtype)) return 0;
  return Then(static_cast<double>(narrow_steps) * AccRoundoff(dtype),
              static_cast<double>(wide_steps) * kRoundoffF64);
}

// Bytes of the operands, read once.
constexpr std::uint64_t OperandBytes(const DotProblem& p) {
  return 2 * static_cast<std::uint64_t>(p.n) * SizeOf(p.dtype);
}

// Bytes of an Acc.
constexpr std::uint64_t AccBytes(DType dtype) {
  return IsInteger(dtype) || dtype == DType::kF64 ? 8 : 4;
}

// A zero in device memory for blocks to add to.
template <class Wide>
Wide* MakeSum(CudaStream& stream) {
  auto* sum = static_cast<Wide*>(stream.Scratch(sizeof(Wide)));
  CUDA_CHECK(cudaMemsetAsync(sum, 0, sizeof(Wide), stream.handle()));
  return sum;
}

// Enqueues the copy of what they have added to the result.
template <class Wide>
void FetchSum(const Wide* sum, Scalar* result, CudaStream& stream) {
  void* to = &result->real;
  if constexpr (std::is_integral_v<Wide>) to = &result->integer;
  CUDA_CHECK(cudaMemcpyAsync(to, sum, sizeof(Wide), cudaMemcpyDeviceToHost, stream.handle()));
}

// The other finish: waits for the kernels before it, fetches `count` partial sums and adds them up
// in index order, on the host.
template <class Wide>
void SumOnHost(const Wide* partials, std::int64_t count, Scalar* result, CudaStream& stream) {
  std::vector<Wide> sums(static_cast<std::size_t>(count));
  stream.CopyToHost(sums.data(), partials, sums.size() * sizeof(Wide));
  Wide sum = 0;
  for (const Wide s : sums) sum = WrapAdd(sum, s);
  Finish(sum, result);
}

}  // namespace tessera
