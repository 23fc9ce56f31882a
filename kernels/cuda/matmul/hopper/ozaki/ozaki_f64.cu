// Matmul of f64 in integer arithmetic on Hopper's tensor cores, within the error bound of plain
// f64.
//
// The tensor cores multiply signed bytes exactly, at thirty times the rate of the f64 arithmetic
// that `tensor_f64` uses (1979 compared with 67 tera-operations per second in the H200's data
// sheet). So rows of a and columns of b are converted to integers, and the integers to residues
// modulo 14 small numbers. The products of the residues are computed in bytes (the second scheme of
// Ozaki, Uchino and Imamura). The product of the moduli is about 2^110. For each element of c, the
// Chinese remainder theorem finds the one integer that has the residues of the 14 results and whose
// magnitude is below half of that product:
//
//      a ── 2^e, round ──> integers ──> residues ─┐
//                                                 ├─ 14 products, residues ──> 2^-(e+f) integer = c
//      b ── 2^f, round ──> integers ──> residues ─┘
//
// At these rates, 14 products of byte matrices take half the time of one product of f64 matrices.
// Only the rounding to integers and the final rounding to f64 are inexact, so the order of sums,
// tiles and SMs does not affect the bits of a result.
//
// The size of the integers: let P be the product of the moduli. Rows of a and columns of b are
// scaled to a norm of at most R = sqrt(P / 2), rounding included, so that no sum exceeds P / 2 (by
// the Cauchy-Schwarz inequality). The exponent is the largest for which the norm is at most R, so
// the norm of a scaled row is greater than R / 2. The elements of the row are about 2^54 / sqrt(k).
//
// The error of rounding: let x and y be a scaled row and column, and let d and f be the amounts
// that rounding removes from their elements, at most 1/2 each. Then the integer result is off by
//
//      | sum d y + x f - d f |  <=  (|x|_1 + |y|_1) / 2 + k / 4  <=  sqrt(k) (s + t) / 2 + k / 4
//
// where s and t are the norms of x and y. This error does not shrink with the terms, whereas plain
// f64 is off by at most k u sum |x y|, with u = 2^-53. If a large element of x is multiplied by a
// zero of y, the error may exceed the sum of all other terms. So this strategy examines its
// operands first. The vectors |x| and (1, ..., 1) form an angle whose cosine is |x|_1 / (sqrt(k)
// |x|_2). The same holds for |y|, and the angle between |x| and |y| is at most the sum of these two
// angles. If both cosines are at least g, and g^2 >= 1/2, then
//
//      sum |x y|  >=  s t (2 g^2 - 1)
//
// Relative to this sum, the error is largest if s and t are R / 2. So if (2 g^2 - 1) R^2 (k - 2) u
// >= 2 sqrt(k) R + k, the result is within the bound of plain f64, k u sum |x y|. The difference
// between k and k - 2 is left for the rounding of the reconstruction. The condition requires g^2 to
// be at least 0.543 for k = 64, 0.511 for 1024, and 0.503 for 16384. For normally distributed
// numbers g^2 is 2 / pi = 0.64, and for uniform ones it is 0.75.
//
// `tensor_f64` computes the whole product if any row of a or column of b has a smaller g^2,
// contains an infinity or NaN, or has a norm above 2^450 or below 2^-450. For example, g^2 is
// smaller if a third of a row's uniform numbers are replaced by zeros, or if its elements have very
// different magnitudes. The device decides, with a flag that every kernel checks. For such a
// product, the examination is an additional pass over the operands. Rows of zeros are exact.
//
// The expected error is also smaller than that of plain f64 (docs/notebook.md, "f64").
//
// The kernels of residue_rows.cuh compute the residues of the operands, and the kernel of
// residue_products.cuh multiplies them. Reconstruct adds up residues times weights, in three f64
// parts so that nothing is rounded, and subtracts a multiple of P. Residues take 14 bytes per
// element. In each pass they are computed for as many columns of b and rows of a as fit in 6 GB,
// but for at least 256 of each (BandsOf).
//
// Cost for 4096 x 4096 x 4096: 14 products of 2^37 byte operations, 0.97 ms at the data sheet's
// rate. The operands, 0.27 GB, are read for the sums and again for the conversion, which writes
// 0.47 GB of residues. The residues of the results, 0.23 GB, are written and read back, and the
// results take 0.13 GB. The scratch memory is 0.7 GB, or 5.6 GB for side 16384.
//
// Lesson: kernels/lessons/hopper_product.cu
#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/matmul/f64_product.h"
#include "kernels/cuda/matmul/hopper/ozaki/residue_products.cuh"
#include "kernels/cuda/matmul/hopper/ozaki/residue_rows.cuh"
#include "kernels/cuda/matmul/hopper/strategy.cuh"

namespace tessera {
namespace {

using namespace ozaki;

// --- Results ---

// Computes c[rows, columns], with rows `pitch` apart, from the residues that MultiplyResidues has
// written. A thread reads one vector per modulus, with eight elements from each of two rows.
__global__ void __launch_bounds__(kThreads)
    Reconstruct(const uint4* residues, std::int64_t row_tiles, std::int64_t column_tiles,
                const std::int32_t* row_exponents, const std::int32_t* column_exponents,
                const __grid_constant__ Table table, const unsigned* plain, std::int64_t rows,
                std::int64_t columns, bool packable, double* c, std::int64_t pitch) {
  if (*plain != 0) return;
  using C = ByteTile;
  constexpr int kBlocksOfTile = kTileVectors / kThreads;
  const std::int64_t tile = blockIdx.x / kBlocksOfTile;
  const int vector = static_cast<int>(blockIdx.x % kBlocksOfTile * kThreads + threadIdx.x);
  const int thread = vector % C::kWarpgroup, v = vector / C::kWarpgroup % kVectors;
  const int consumer = vector / (C::kWarpgroup * kVectors);
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  const std::int64_t row =
      tile / column_tiles * C::kRows + consumer * C::kGroupRows + warp * 16 + lane / 4;
  const std::int64_t column = tile % column_tiles * C::kColumns + 32 * v + lane % 4 * 2;
  if (row >= rows || column >= columns) return;

  uint4 loaded[kModuli];
#pragma unroll
  for (int modulus = 0; modulus < kModuli; ++modulus)
    loaded[modulus] = residues[(modulus * row_tiles * column_tiles + tile) * kTileVectors + vector];
  const bool second_row = row + 8 < rows;
  const std::int32_t exponents[2] = {row_exponents[row], second_row ? row_exponents[row + 8] : 0};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::int64_t x = column + 8 * j;
    if (x >= columns) return;
    WeightedSum sums[4];
#pragma unroll
    for (int modulus = 0; modulus < kModuli; ++modulus) {
      const uint4& words = loaded[modulus];
      const std::uint32_t word = j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[i].Add(static_cast<std::int8_t>(word >> 8 * i), table.weights[modulus]);
    }
    const bool second_column = x + 1 < columns;
    const std::int32_t column_exponent[2] = {column_exponents[x],
                                             second_column ? column_exponents[x + 1] : 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && !second_row) break;
      double* const to = c + (row + 8 * half) * pitch + x;
      double pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        pair[i] =
            sums[2 * half + i].Value(table) * PowerOfTwo(-exponents[half] - column_exponent[i]);
      StoreClipped(pair, 0, second_column ? 2 : 1, packable, to);
    }
  }
}

// --- Launch ---

// The number of rows of a and the number of columns of b whose residues are in memory at a time.
// Each is a whole number of tiles, at least one. They are limited to 2^28 elements of b, and to
// 2^26 elements of a and of c.
struct Bands {
  std::int64_t rows, columns;
};
Bands BandsOf(const MatmulProblem& p) {
  const auto band = [](std::int64_t extent, std::int64_t elements, std::int64_t depth,
                       std::int64_t tile) {
    return std::max<std::int64_t>(1, std::min(CeilDiv(extent, tile), elements / depth / tile)) *
           tile;
  };
  const std::int64_t columns =
      band(p.n, std::int64_t{1} << 28, std::max(p.k, std::int64_t{1} << 14), kTileColumns);
  return {band(p.m, std::int64_t{1} << 26, std::max(p.k, columns), kClusterRows), columns};
}

// The parts of the scratch memory, and the size of all parts.
struct Memory {
  unsigned* plain;  // set if a row or a column does not meet the bound
  RowSums *a_sums, *b_sums;
  std::int32_t *a_exponents, *b_exponents;
  std::int8_t *a, *b;
  uint4* c;
  std::size_t bytes = 0;
};
Memory MemoryOf(const MatmulProblem& p, void* scratch) {
  const Bands bands = BandsOf(p);
  const auto pieces = static_cast<std::size_t>(Pieces(p.k));
  const auto m = static_cast<std::size_t>(p.m), n = static_cast<std::size_t>(p.n);
  Memory memory{};
  const auto place = [&]<class T>(T*& part, std::size_t bytes) {
    // For ScratchOf, there is no memory yet, so the address is computed as a number.
    part = reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(scratch) + memory.bytes);
    memory.bytes += (bytes + 255) / 256 * 256;
  };
  place(memory.plain, sizeof(unsigned));
  place(memory.a_sums, m * pieces * sizeof(RowSums));
  place(memory.a_exponents, m * sizeof(std::int32_t));
  place(memory.b_sums, n * pieces * sizeof(RowSums));
  place(memory.b_exponents, n * sizeof(std::int32_t));
  place(memory.a, ResidueBytes(bands.rows, p.k));
  place(memory.b, ResidueBytes(bands.columns, p.k));
  place(memory.c, static_cast<std::size_t>(kModuli * bands.rows * bands.columns));
  return memory;
}

// A product for which the scaling of the operands has been enqueued.
struct ScaledProduct {
  MatmulProblem p;
  Memory memory;
  Scaled a, b;
};

std::uint64_t ScratchOf(const MatmulProblem& p) { return MemoryOf(p, nullptr).bytes; }

// Enqueues the scaling of the operands. `scratch` is scratch memory of ScratchOf(p) bytes.
ScaledProduct EnqueueScales(const MatmulProblem& p, void* scratch, CudaStream& stream) {
  const Memory memory = MemoryOf(p, scratch);
  const auto scale = [&](const Operand<double>& x, RowSums* sums, std::int32_t* exponents) {
    return EnqueueScale(x, p.k, sums, exponents, memory.plain, stream);
  };
  stream.Zero(memory.plain, sizeof(unsigned));
  const Scaled a = scale(OperandA<double>(p), memory.a_sums, memory.a_exponents);
  const Scaled b = scale(OperandB<double>(p), memory.b_sums, memory.b_exponents);
  return {p, memory, a, b};
}

void EnqueueProduct(const ScaledProduct& scaled, CudaStream& stream) {
  const auto& [p, memory, a, b] = scaled;
  const Bands bands = BandsOf(p);
  const unsigned* const plain = memory.plain;
  auto* const c = static_cast<double*>(p.c);
  Residues a_residues{};
  for (std::int64_t column = 0; column < p.n; column += bands.columns) {
    const std::int64_t columns = std::min(bands.columns, p.n - column);
    const Residues b_residues = EnqueueConvert(b, column, columns, plain, memory.b, stream);
    for (std::int64_t row = 0; row < p.m; row += bands.rows) {
      const std::int64_t rows = std::min(bands.rows, p.m - row);
      // If all rows of a fit in one band, they are converted only once.
      if (column == 0 || rows < p.m)
        a_residues = EnqueueConvert(a, row, rows, plain, memory.a, stream);
      EnqueueResidueProducts(a_residues, b_residues, p.k, plain, memory.c, stream);
      const std::int64_t row_tiles = CeilDiv(rows, kClusterRows) * ByteTile::kCluster;
      const std::int64_t column_tiles = CeilDiv(columns, kTileColumns);
      const std::int64_t blocks = row_tiles * column_tiles * (kTileVectors / kThreads);
      double* const to = c + row * p.n + column;
      Reconstruct<<<static_cast<unsigned>(blocks), kThreads, 0, stream.handle()>>>(
          memory.c, row_tiles, column_tiles, a.exponents + row, b.exponents + column, kTable, plain,
          rows, columns, IsPackable<double>(to, p.n), to, p.n);
      CUDA_CHECK_LAUNCH(Reconstruct);
    }
  }
  MultiplyF64IfWanted(p, plain, stream);
}

void Enqueue(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  if (MayMeet(BoundOf(p.k), p.k)) {
    EnqueueProduct(EnqueueScales(p, stream.Scratch(ScratchOf(p)), stream), stream);
  } else {
    MultiplyF64IfWanted(p, nullptr, stream);
  }
}

// --- Several GPUs ---

__global__ void AnyOf(unsigned* flags, int count) {
  unsigned any = 0;
  for (int i = 0; i < count; ++i) any |= flags[i];
  flags[0] = any;
}

// If a row of any share does not meet the bound, `tensor_f64` computes all shares. Otherwise the
// bits would depend on which share has which rows. So one GPU combines all flags before any GPU
// continues.
void ShareFlags(std::span<const ScaledProduct> scaled, std::span<const TeamShare> shares,
                CudaStream& own) {
  const std::size_t count = shares.size();
  auto* const flags = static_cast<unsigned*>(own.Scratch(count * sizeof(unsigned)));
  for (std::size_t i = 0; i < count; ++i) {
    OnDeviceOf(*shares[i].stream, [&] {
      Cuda(*shares[i].stream).CopyToPeer(own, flags + i, scaled[i].memory.plain, sizeof(unsigned));
    });
    if (shares[i].stream != &own) own.WaitFor(*shares[i].stream);
  }
  AnyOf<<<1, 1, 0, Cuda(own).handle()>>>(flags, static_cast<int>(count));
  CUDA_CHECK_LAUNCH(AnyOf);
  for (std::size_t i = 0; i < count; ++i)
    own.CopyToPeer(*shares[i].stream, scaled[i].memory.plain, flags, sizeof(unsigned));
  for (const TeamShare& share : shares) {
    if (share.stream != &own) OnDeviceOf(*share.stream, [&] { share.stream->WaitFor(own); });
  }
}

// Each GPU multiplies its rows by all of b, which it fetches first, because the sums of b's columns
// are needed before any column is multiplied.
void EnqueueShared(const MatmulProblem& p, std::span<const TeamShare> shares, Stream& any_stream) {
  CudaStream& own = Cuda(any_stream);
  std::vector<std::unique_ptr<ProductShare>> parts(shares.size());
  const auto for_all = [&](auto f) {
    for (std::size_t i = 0; i < shares.size(); ++i)
      OnDeviceOf(*shares[i].stream, [&] { f(i, Cuda(*shares[i].stream)); });
  };
  const bool may_meet = MayMeet(BoundOf(p.k), p.k);
  std::vector<void*> memory(shares.size());
  for_all([&](std::size_t i, CudaStream& stream) {
    // The scratch memory is allocated before the copy of b, which is optional and may take all
    // remaining memory.
    if (may_meet) memory[i] = stream.Scratch(ScratchOf(RowsOf(p, shares[i])));
    parts[i] =
        std::make_unique<ProductShare>(p, shares[i], /*round=*/0, /*rate=*/1, i, shares.size());
  });
  std::vector<ScaledProduct> scaled;
  for_all([&](std::size_t i, CudaStream& stream) {
    parts[i]->Next();
    const MatmulProblem& part = parts[i]->problem();
    if (may_meet) {
      scaled.push_back(EnqueueScales(part, memory[i], stream));
    } else {
      MultiplyF64IfWanted(part, nullptr, stream);
    }
  });
  if (!may_meet) return;
  if (shares.size() > 1) ShareFlags(scaled, shares, own);
  for_all([&](std::size_t i, CudaStream& stream) { EnqueueProduct(scaled[i], stream); });
}

// --- Models ---

Cost CostOf(const MatmulProblem& p) {
  const auto m = static_cast<std::uint64_t>(p.m), n = static_cast<std::uint64_t>(p.n);
  const auto k = static_cast<std::uint64_t>(p.k);
  const Bands bands = BandsOf(p);
  const auto times_a =
      static_cast<std::uint64_t>(p.m <= bands.rows ? 1 : CeilDiv(p.n, bands.columns));
  // Operands are read for the sums and again for the conversion. Operand a is converted once for
  // every band of columns, or only once if all rows of a fit in one band.
  Cost cost = MatmulCost(p, m * k * (1 + times_a) + 2 * n * k);
  cost.bytes += kModuli * (m * k * times_a + n * k + 2 * m * n +
                           MatmulTileLoads(p, kClusterRows, kTileColumns));
  cost.depth = k / 32 + 1;  // an instruction adds up 32 steps
  return cost;
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulOzakiF64 = HopperMatmul({
    .name = "ozaki_f64",
    .summary = "f64 in integers: 14 byte products on Hopper's tensor cores, as accurate as f64",
    .source = "K. Ozaki, Y. Uchino and T. Imamura, Ozaki Scheme II: A GEMM-oriented emulation of "
              "floating-point matrix multiplication using an integer modular technique, 2025",
    .dtypes = DTypesOf(DType::kF64),
    .cost = CostOf,
    .launch = Enqueue,
    .shared = {.launch = EnqueueShared},
    .scratch = ScratchOf,
});

}  // namespace tessera
