// What the strategies of the tensor kernel share: what they refuse, their bounds and costs, and a
// run.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "kernels/cuda/matmul/hopper/gemm/plan.cuh"
#include "kernels/cuda/team/shares.cuh"

namespace tessera {

inline std::string TensorMissing(const Device& device) {
  return device.info().compute_capability == 90
             ? ""
             : "compute capability 9.0: wgmma is of that one alone";
}

// TMA counts in 32 bits with a sign.
inline std::string TensorRefusal(const MatmulProblem& p) {
  constexpr std::int64_t most = (std::int64_t{1} << 31) - 1024;
  return std::max({p.m, p.n, p.k}) <= most ? "" : "extents of at most " + std::to_string(most);
}

// The tensor cores sum products of one instruction by aligning them and the sum so far to the
// largest and cutting off what sticks out (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior
// of NVIDIA tensor cores", 2021): each of up to 17 terms for 16 products, or 9 for 8, costs 2 u of
// the largest at most, and so does the result.
inline double TensorSumRoundoff(std::int64_t k) {
  return 3 * (static_cast<double>(k) + 16) * kRoundoffF32;
}

// Loads of tiles of `columns` columns, of elements of `size` bytes in `parts`, and what copies read
// and write: of the operands that need one, and of c.
inline Cost TensorCost(const MatmulProblem& p, std::int64_t columns, std::size_t size, int parts,
                       bool copies_a, bool copies_b) {
  const auto copy = [&](bool copies, std::int64_t rows) {
    const auto elements = static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(p.k);
    return copies ? elements * (SizeOf(p.dtype) + size * static_cast<std::size_t>(parts)) : 0;
  };
  const std::size_t out_size = SizeOf(p.out_dtype);
  const bool copies_c = !IsBoxWritable(p.c, p.n * static_cast<std::int64_t>(out_size));
  Cost cost = MatmulCost(p, 0);
  cost.depth = static_cast<std::uint64_t>(p.k / 16 + 1);  // an instruction adds up as many steps
  if (copies_c) cost.bytes += 2 * static_cast<std::uint64_t>(p.m * p.n) * out_size;
  cost.bytes += MatmulTileLoads(p, 128, columns) * size * static_cast<std::size_t>(parts) +
                copy(copies_a, p.m) + copy(copies_b, p.n);
  return cost;
}

// Of sums on their way to c, at most: where TMA cannot write c, of all; where k is cut, of as many
// as there are pieces, and where tiles come in parts, of a tile for each SM: GPUs with these units
// have up to 160, and the largest tile is 128 x 256.
inline std::uint64_t SumsScratch(const MatmulProblem& p) {
  constexpr std::uint64_t kTiles = std::uint64_t{160} * 128 * 256 * sizeof(float);
  const std::uint64_t all = CopyScratch<float>(p.m, p.n);
  const bool copies_c = !IsBoxWritable(p.c, p.n * static_cast<std::int64_t>(SizeOf(p.out_dtype)));
  // k is cut into pieces of 128 steps and more.
  const auto pieces = static_cast<std::uint64_t>(p.k / 128 + 1);
  return std::max(copies_c ? all : 0, all > kTiles / pieces ? kTiles : all * pieces);
}

// Launches: by way of scratch memory where k is cut, or where TMA cannot write c. c has rows of
// c_pitch elements, other than p.n only where TMA can write it and k is not cut.
template <class C, bool kMnA, bool kMnB>
void RunPlan(const MatmulProblem& p, const TensorOperand<typename C::T>& a,
             const TensorOperand<typename C::T>& b, const TensorPlan& plan, unsigned* nonfinite,
             CudaStream& stream, std::int64_t c_pitch) {
  // S: of the sums that the tensor cores leave; O: of c.
  const auto run = [&](auto s, auto o) {
    using S = decltype(s);
    using O = decltype(o);
    auto* const c = static_cast<O*>(p.c);
    if (plan.splits == 1 && IsBoxWritable(c, c_pitch * static_cast<std::int64_t>(sizeof(O)))) {
      LaunchTensor<C, kMnA, kMnB>(p, a, b, plan, c, c_pitch, nonfinite, stream);
      return;
    }
    const std::int64_t pitch = PaddedPitch<S>(p.n);
    auto* const sums = static_cast<S*>(
        stream.Scratch(static_cast<std::size_t>(plan.splits * p.m * pitch) * sizeof(S)));
    LaunchTensor<C, kMnA, kMnB>(p, a, b, plan, sums, pitch, nonfinite, stream);
    const std::int64_t blocks = CeilDiv(p.m, kFinishedRows) * CeilDiv(p.n, kFinishedColumns);
    LaunchOverlapping(FinishResults<S, O>,
                      {static_cast<unsigned>(blocks), kFinishedRows * kWarpSize, 0}, stream,
                      static_cast<const S*>(sums), plan.splits, p.m, p.n, pitch, c);
  };
  if constexpr (sizeof(typename C::T) == 2 && C::kParts == 1) {
    using T = typename C::T;
    if (p.out_dtype != DType::kF32) {
      if (plan.splits == 1) {
        run(T{}, T{});
      } else {
        run(float{}, T{});
      }
      return;
    }
  }
  run(float{}, float{});
}

// For operands of 16 bits, each either way around.
template <class C>
void RunPlanAnyLayout(const MatmulProblem& p, const TensorOperand<typename C::T>& a,
                      const TensorOperand<typename C::T>& b, const TensorPlan& plan,
                      unsigned* nonfinite, CudaStream& stream, std::int64_t c_pitch) {
  if (a.mn_major && b.mn_major) {
    RunPlan<C, true, true>(p, a, b, plan, nonfinite, stream, c_pitch);
  } else if (a.mn_major) {
    RunPlan<C, true, false>(p, a, b, plan, nonfinite, stream, c_pitch);
  } else if (b.mn_major) {
    RunPlan<C, false, true>(p, a, b, plan, nonfinite, stream, c_pitch);
  } else {
    RunPlan<C, false, false>(p, a, b, plan, nonfinite, stream, c_pitch);
  }
}

// What a GPU computes at a time of a share, in tiles of rows x columns for each SM:
// ProductShare. 0, all of it, where pieces could not be written in place.
inline std::int64_t RoundOfTiles(const MatmulProblem& p, int multiprocessors, std::int64_t rows,
                                 std::int64_t columns) {
  const auto size = static_cast<std::int64_t>(SizeOf(p.out_dtype));
  return IsBoxWritable(p.c, p.n * size) ? multiprocessors * rows * columns : 0;
}

}  // namespace tessera
