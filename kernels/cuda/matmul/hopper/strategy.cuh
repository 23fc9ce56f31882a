// Code that the strategies of the tensor kernel share: their refusals, error bounds and costs, and
// the launch of a plan.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "kernels/cuda/matmul/hopper/gemm/plan.cuh"
#include "kernels/cuda/matmul/k_tiles.cuh"
#include "kernels/cuda/team/shares.cuh"

namespace tessera {

inline std::string TensorMissing(const Device& device) {
  return device.info().compute_capability == 90 ? ""
                                                : "compute capability 9.0, the only one with wgmma";
}

// TMA takes signed 32-bit coordinates.
inline std::string TensorRefusal(const MatmulProblem& p) {
  constexpr std::int64_t most = (std::int64_t{1} << 31) - 1024;
  return std::max({p.m, p.n, p.k}) <= most ? "" : "extents of at most " + std::to_string(most);
}

inline constexpr std::string_view kTensorSource =
    "the warp-specialised kernels of CUTLASS 3, and public work on reaching cuBLAS on the H100 "
    "(P. Shankhdhar, 2024)";

// Sets the fields that the strategies for Hopper share.
constexpr Strategy<MatmulProblem> HopperMatmul(Strategy<MatmulProblem> strategy) {
  strategy.min_compute_capability = 90;
  strategy.missing = TensorMissing;
  if (strategy.refuses == nullptr) strategy.refuses = TensorRefusal;
  return CudaMatmul(strategy);
}

// Returns the cost of a product with tiles of `columns` columns and with operands in `parts` parts,
// whose elements have `size` bytes. The cost includes the bytes that copies of c and of the
// operands read and write, if there are any.
inline Cost TensorCost(const MatmulProblem& p, std::int64_t columns, std::size_t size, int parts,
                       bool copies_a, bool copies_b) {
  const auto copy = [&](bool copies, std::int64_t rows) {
    const auto elements = static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(p.k);
    return copies ? elements * (SizeOf(p.dtype) + size * static_cast<std::size_t>(parts)) : 0;
  };
  const std::size_t out_size = SizeOf(p.out_dtype);
  const bool copies_c = !IsBoxWritable(p.c, p.n * static_cast<std::int64_t>(out_size));
  Cost cost = MatmulCost(p, 0);
  cost.depth = static_cast<std::uint64_t>(p.k / 16 + 1);  // an instruction adds up 16 steps
  if (copies_c) cost.bytes += 2 * static_cast<std::uint64_t>(p.m * p.n) * out_size;
  cost.bytes += MatmulTileLoads(p, 128, columns) * size * static_cast<std::size_t>(parts) +
                copy(copies_a, p.m) + copy(copies_b, p.n);
  return cost;
}

// Returns an upper bound on the bytes of the sums that reach c through scratch memory. If TMA
// cannot write c, these are all sums. If k is split, they are all sums of each piece. If tiles are
// computed in parts, they are the sums of one tile per SM. GPUs with these units have up to 160
// SMs, and the largest tile is 128 x 256.
inline std::uint64_t SumsScratch(const MatmulProblem& p) {
  constexpr std::uint64_t kTiles = std::uint64_t{160} * 128 * 256 * sizeof(float);
  const std::uint64_t all = CopyScratch<float>(p.m, p.n);
  const bool copies_c = !IsBoxWritable(p.c, p.n * static_cast<std::int64_t>(SizeOf(p.out_dtype)));
  // k is split into pieces of at least 128 steps.
  const auto pieces = static_cast<std::uint64_t>(p.k / 128 + 1);
  return std::max(copies_c ? all : 0, all > kTiles / pieces ? kTiles : all * pieces);
}

// Launches the plan. Results go through scratch memory if k is split or TMA cannot write c. The
// rows of c are c_pitch elements apart, which differs from p.n only if TMA can write c and k is not
// split.
template <class C, bool kMnA, bool kMnB>
void RunPlan(const MatmulProblem& p, const TensorOperand<typename C::T>& a,
             const TensorOperand<typename C::T>& b, const TensorPlan& plan, unsigned* nonfinite,
             CudaStream& stream, std::int64_t c_pitch) {
  // S: the type of the tensor cores' sums. O: the type of c.
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
  run(typename C::Sum{}, typename C::Sum{});
}

// Launches the plan for 16-bit operands, each in either layout.
template <class C>
void RunPlanAnyLayout(const MatmulProblem& p, const TensorOperand<typename C::T>& a,
                      const TensorOperand<typename C::T>& b, const TensorPlan& plan,
                      unsigned* nonfinite, CudaStream& stream, std::int64_t c_pitch) {
  DispatchLayouts(!a.mn_major, !b.mn_major, [&](auto a_along_k, auto b_along_k) {
    RunPlan<C, !a_along_k, !b_along_k>(p, a, b, plan, nonfinite, stream, c_pitch);
  });
}

// Returns how many elements of its share a GPU computes at a time, with one tile of rows x columns
// per SM (see ProductShare). Returns 0, which stands for the whole share, if pieces cannot be
// written in place.
inline std::int64_t RoundOfTiles(const MatmulProblem& p, int multiprocessors, std::int64_t rows,
                                 std::int64_t columns) {
  const auto size = static_cast<std::int64_t>(SizeOf(p.out_dtype));
  return IsBoxWritable(p.c, p.n * size) ? multiprocessors * rows * columns : 0;
}

}  // namespace tessera
