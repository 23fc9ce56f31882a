// Converts the operands of `ozaki_f64`: rows of f64 to integers, and integers to residues.
//
// RowSumsOf computes |x|_1 and |x|_2^2 of all rows, in pieces of kPiece steps along k. ScaleRows
// computes exponents, and sets the flag if a row does not meet the bound. ConvertRows writes
// residues with k along the rows for any transposes, since the tensor cores require that layout for
// bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/matmul/hopper/ozaki/residue_products.cuh"

namespace tessera::ozaki {

// The rows of a (or columns of b), the threads and the warps of a block.
inline constexpr int kBlockRows = 32, kThreads = 256, kWarps = kThreads / kWarpSize;
// Steps along k in a sum of RowSumsOf, in a tile of ConvertRows, and for a thread of such a tile.
inline constexpr int kPiece = 1024, kTileSteps = 128, kEach = 8;

// Computes sums over rows, one per piece of k: [pieces, rows]. kAlongK: whether k goes along the
// operand's rows.
template <bool kAlongK>
__global__ void __launch_bounds__(kThreads)
    RowSumsOf(Operand<double> x, std::int64_t k, RowSums* sums) {
  const std::int64_t groups = (x.extent + kBlockRows - 1) / kBlockRows;
  const std::int64_t row = blockIdx.x % groups * kBlockRows, piece = blockIdx.x / groups;
  const auto steps = static_cast<int>(min(k - piece * kPiece, std::int64_t{kPiece}));
  const double* const data = x.data + row * x.stride + piece * kPiece * x.k_stride;
  const auto rows = static_cast<int>(min(x.extent - row, std::int64_t{kBlockRows}));
  const int warp = WarpIndex(), lane = LaneIndex();
  RowSums* const out = sums + piece * x.extent + row;
  const auto sum = [](const double* from, int first, int end, int step, std::int64_t stride) {
    RowSums s{};
#pragma unroll 8
    for (int l = first; l < end; l += step) {
      const double value = from[l * stride];
      s.squares += value * value;
      s.magnitudes += fabs(value);
    }
    return s;
  };
  if constexpr (kAlongK) {
    for (int r = warp; r < rows; r += kWarps) {
      RowSums s = sum(data + r * x.stride, lane, steps, kWarpSize, 1);
#pragma unroll
      for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
        s.squares += __shfl_xor_sync(kFullMask, s.squares, offset);
        s.magnitudes += __shfl_xor_sync(kFullMask, s.magnitudes, offset);
      }
      if (lane == 0) out[r] = s;
    }
  } else {
    __shared__ RowSums of_warps[kWarps][kBlockRows];
    if (lane < rows) of_warps[warp][lane] = sum(data + lane, warp, steps, kWarps, x.k_stride);
    __syncthreads();  // all warps have their sums
    if (warp != 0 || lane >= rows) return;
    RowSums s = of_warps[0][lane];
    for (int w = 1; w < kWarps; ++w) {
      s.squares += of_warps[w][lane].squares;
      s.magnitudes += of_warps[w][lane].magnitudes;
    }
    out[lane] = s;
  }
}

// Computes the exponents of rows. `plain` is set if a row does not meet the bound.
__global__ void __launch_bounds__(kThreads)
    ScaleRows(const RowSums* sums, std::int64_t rows, std::int64_t pieces, Bound bound,
              std::int32_t* exponents, unsigned* plain) {
  const std::int64_t row = GridThread();
  if (row >= rows) return;
  RowSums s = sums[row];
  for (std::int64_t piece = 1; piece < pieces; ++piece) {
    s.squares += sums[piece * rows + row].squares;
    s.magnitudes += sums[piece * rows + row].magnitudes;
  }
  if (!ScaleRow(s, bound, exponents + row)) *plain = 1;
}

// Computes the residues of rows. A block converts kBlockRows x kTileSteps elements. Operands with k
// across the rows go through shared memory, where a gap follows every eight steps along k, so that
// lanes eight steps apart access different banks.
template <bool kAlongK>
__global__ void __launch_bounds__(kThreads)
    ConvertRows(Operand<double> x, bool packable, std::int64_t k, const std::int32_t* exponents,
                const __grid_constant__ Table table, const unsigned* plain, Residues out) {
  if (*plain != 0) return;
  const std::int64_t groups = (x.extent + kBlockRows - 1) / kBlockRows;
  const std::int64_t first_row = blockIdx.x % groups * kBlockRows;
  const std::int64_t first_step = blockIdx.x / groups * kTileSteps;
  const auto place = [](int row, int step) { return step * kBlockRows + row + step / kEach; };
  __shared__ double tile[kAlongK ? 1 : kTileSteps * kBlockRows + kTileSteps / kEach];
  if constexpr (!kAlongK) {
    const int warp = WarpIndex(), lane = LaneIndex();
#pragma unroll
    for (int step = warp; step < kTileSteps; step += kWarps) {
      const std::int64_t l = first_step + step;
      tile[place(lane, step)] =
          l < k && first_row + lane < x.extent ? x.data[l * x.k_stride + first_row + lane] : 0;
    }
    __syncthreads();  // the tile is complete
  }
  constexpr int kThreadsOfRow = kTileSteps / kEach;
  const int step = static_cast<int>(threadIdx.x) % kThreadsOfRow * kEach;
#pragma unroll 1
  for (int r = static_cast<int>(threadIdx.x) / kThreadsOfRow; r < kBlockRows;
       r += kThreads / kThreadsOfRow) {
    const std::int64_t row = first_row + r, column = first_step + step;
    if (row >= x.extent || column >= k) return;
    double values[kEach];
    if constexpr (kAlongK) {
      LoadRow(x.data + row * x.stride, column, k, packable, values);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) values[i] = tile[place(r, step + i)];
    }
    const double scale = PowerOfTwo(exponents[row]);
    Limbs limbs[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) limbs[i] = LimbsOf(Nearest(values[i] * scale));
#pragma unroll
    for (int modulus = 0; modulus < kModuli; ++modulus) {
      std::int32_t residues[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) residues[i] = Residue(limbs[i], table.moduli[modulus]);
      *reinterpret_cast<uint2*>(out.data + (modulus * out.rows + row) * out.pitch + column) = {
          PackBytes(residues), PackBytes(residues + 4)};
    }
  }
}

// --- Launch ---

// An operand, and the exponents of its rows.
struct Scaled {
  Operand<double> x;
  std::int64_t k;
  std::int32_t* exponents;
};

inline std::int64_t Pieces(std::int64_t k) { return CeilDiv(k, kPiece); }

inline std::size_t ResidueBytes(std::int64_t rows, std::int64_t k) {
  return static_cast<std::size_t>(kModuli * rows * PaddedPitch<std::int8_t>(k));
}

// Enqueues RowSumsOf and ScaleRows. `plain` is set if a row does not meet the bound.
inline Scaled EnqueueScale(const Operand<double>& x, std::int64_t k, RowSums* sums,
                           std::int32_t* exponents, unsigned* plain, CudaStream& stream) {
  const auto kernel = x.k_stride == 1 ? RowSumsOf<true> : RowSumsOf<false>;
  const std::int64_t blocks = CeilDiv(x.extent, kBlockRows) * Pieces(k);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream.handle()>>>(x, k, sums);
  CUDA_CHECK_LAUNCH(RowSumsOf);
  ScaleRows<<<static_cast<unsigned>(CeilDiv(x.extent, kThreads)), kThreads, 0, stream.handle()>>>(
      sums, x.extent, Pieces(k), BoundOf(k), exponents, plain);
  CUDA_CHECK_LAUNCH(ScaleRows);
  return {x, k, exponents};
}

// Enqueues the conversion of rows [first, first + count) to residues in `data`.
inline Residues EnqueueConvert(const Scaled& all, std::int64_t first, std::int64_t count,
                               const unsigned* plain, std::int8_t* data, CudaStream& stream) {
  Operand<double> x = all.x;
  x.data += first * x.stride;
  x.extent = count;
  const Residues out{data, count, PaddedPitch<std::int8_t>(all.k)};
  const auto kernel = x.k_stride == 1 ? ConvertRows<true> : ConvertRows<false>;
  const std::int64_t blocks = CeilDiv(count, kBlockRows) * CeilDiv(all.k, kTileSteps);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream.handle()>>>(
      x, IsPackable<double>(x.data, x.stride), all.k, all.exponents + first, kTable, plain, out);
  CUDA_CHECK_LAUNCH(ConvertRows);
  return out;
}

}  // namespace tessera::ozaki
