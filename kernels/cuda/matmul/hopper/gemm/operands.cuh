// Operands and results that TMA cannot access directly: copies in scratch memory, and the sums of
// split-K.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <type_traits>

#include "kernels/cuda/matmul/hopper/ptx/ptx.cuh"
#include "kernels/cuda/matmul/hopper/ptx/tensor_map.cuh"
#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/runtime/overlap.cuh"
#include "kernels/problem/matmul.h"
#include "kernels/same_bits/convert.h"

namespace tessera {

template <class Out, class In>
__device__ Out Rounded(In x) {
  if constexpr (std::is_same_v<Out, Tf32>) {
    Tf32 out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out.bits) : "f"(x));
    return out;
  } else if constexpr (std::is_same_v<Out, BFloat16> && std::is_same_v<In, float>) {
    // Finite elements stay finite, because the product of an infinity and a zero is NaN. The
    // largest f32 is less than 2^-8 above the largest bf16, so the error bound still holds.
    constexpr float kLargest = 0x1.fep127f;
    if (std::abs(x) <= std::numeric_limits<float>::max()) x = fminf(fmaxf(x, -kLargest), kLargest);
    return ConvertElement<Out>(x);
  } else {
    return ConvertElement<Out>(x);
  }
}

// Loads a vector of elements from a row that ends at `columns`, with zeros beyond the end.
// `packable`: whether rows are aligned to vectors.
template <class In, int kWidth>
__device__ void LoadRow(const In* row, std::int64_t column, std::int64_t columns, bool packable,
                        In (&x)[kWidth]) {
  if (packable && column + kWidth <= columns) {
#pragma unroll
    for (int w = 0; w < kWidth; w += Pack<In>::kSize) {
      const Pack<In> pack = LoadPack(row + column + w);
#pragma unroll
      for (int i = 0; i < Pack<In>::kSize; ++i) x[w + i] = pack.v[i];
    }
  } else {
#pragma unroll
    for (int w = 0; w < kWidth; ++w) x[w] = column + w < columns ? row[column + w] : In{};
  }
}

// Copies a matrix: out[row][column] = in[row][column]. The rows of `in` are `pitch` elements apart.
// The rows of `out` are out_pitch apart, a multiple of the vector width. Each thread writes one
// vector. The elements of `out` between columns and out_pitch are never read.
template <class In, class Out>
__global__ void __launch_bounds__(256)
    CopyOperand(const In* in, std::int64_t rows, std::int64_t columns, std::int64_t pitch,
                bool packable, Out* out, std::int64_t out_pitch) {
  AllowNextKernel();
  constexpr int kWidth = Pack<Out>::kSize;
  const std::int64_t packs = out_pitch / kWidth;
  const std::int64_t thread = GridThread();
  const std::int64_t row = thread / packs, column = thread % packs * kWidth;
  if (row >= rows) return;
  In x[kWidth];
  LoadRow(in + row * pitch, column, columns, packable, x);
  Pack<Out> pack;
#pragma unroll
  for (int w = 0; w < kWidth; ++w) pack.v[w] = Rounded<Out>(x[w]);
  StorePack(out + row * out_pitch + column, pack);
}

// Transposes a matrix: out[row][column] = in[column][row]. A block moves a square of side kSquare
// through shared memory, where an odd pitch spreads columns over the banks.
inline constexpr int kSquare = 64;

template <class In, class Out>
__global__ void __launch_bounds__(256)
    TransposeOperand(const In* in, std::int64_t rows, std::int64_t columns, std::int64_t pitch,
                     Out* out, std::int64_t out_pitch) {
  AllowNextKernel();
  constexpr int kWidth = Pack<Out>::kSize;
  __shared__ In square[kSquare][kSquare + 1];
  const std::int64_t row_squares = (rows + kSquare - 1) / kSquare;
  const std::int64_t row = blockIdx.x % row_squares * kSquare;
  const std::int64_t column = blockIdx.x / row_squares * kSquare;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = thread / kSquare; i < kSquare; i += 256 / kSquare) {
    const std::int64_t from_row = column + i, from_column = row + thread % kSquare;
    square[i][thread % kSquare] =
        from_row < columns && from_column < rows ? in[from_row * pitch + from_column] : In{};
  }
  __syncthreads();  // the square is complete
  constexpr int kPacks = kSquare / kWidth;
#pragma unroll
  for (int i = thread; i < kSquare * kPacks; i += 256) {
    const int y = i / kPacks, x = i % kPacks * kWidth;
    if (row + y >= rows || column + x >= out_pitch) continue;
    Pack<Out> pack;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) pack.v[w] = Rounded<Out>(square[x + w][y]);
    StorePack(out + (row + y) * out_pitch + column + x, pack);
  }
}

// Computes c[y][x] as the sum of sums[0][y][x], sums[1][y][x], ..., in this order. Rows of `sums`
// are `pitch` elements apart, and rows of c are n elements apart. A block processes kFinishedRows x
// kFinishedColumns elements, one row per warp. A warp issues all its loads before it writes.
constexpr int kFinishedRows = 8, kFinishedColumns = 256;

template <class S, class O>
__global__ void __launch_bounds__(kFinishedRows* kWarpSize)
    FinishResults(const S* sums, int splits, std::int64_t m, std::int64_t n, std::int64_t pitch,
                  O* c) {
  AllowNextKernel();
  WaitForKernelBefore();
  const auto pieces = static_cast<unsigned>((n + kFinishedColumns - 1) / kFinishedColumns);
  const std::int64_t row =
      std::int64_t{blockIdx.x / pieces} * kFinishedRows + threadIdx.x / kWarpSize;
  const std::int64_t column =
      std::int64_t{blockIdx.x % pieces} * kFinishedColumns + threadIdx.x % kWarpSize;
  const auto end = static_cast<int>(min(n - column, std::int64_t{kFinishedColumns}));
  if (row >= m || end <= 0) return;
  using Sum = std::conditional_t<std::is_integral_v<S>, S, float>;
  Sum sum[kFinishedColumns / kWarpSize];
  sums += row * pitch + column;
  for (int s = 0; s < splits; ++s, sums += m * pitch) {
#pragma unroll
    for (int i = 0; i < kFinishedColumns; i += kWarpSize) {
      // The index is clamped because a branch would delay the load.
      const auto x = static_cast<Sum>(sums[min(i, end - 1)]);
      Sum& all = sum[i / kWarpSize];
      if constexpr (std::is_integral_v<S>) {
        all = s == 0 ? x : WrapAdd(all, x);
      } else {
        all = s == 0 ? x : all + x;
      }
    }
  }
  c += row * n + column;
#pragma unroll
  for (int i = 0; i < kFinishedColumns; i += kWarpSize)
    if (i < end) c[i] = static_cast<O>(sum[i / kWarpSize]);
}

// A matrix in a form that TMA can read. Its rows are `pitch` elements apart, and the first
// `columns` elements of each row are used. k goes along the rows or, if mn_major, across them. If a
// matrix has several parts, they are consecutive in memory.
template <class T>
struct TensorOperand {
  const T* data;
  std::int64_t rows, columns, pitch;
  bool mn_major;
};

// Returns a map with which TMA reads the parts of a matrix; see MakeTensorMap.
template <class T>
CUtensorMap MapOf(const TensorOperand<T>& x, int parts, int box_rows, int row_bytes,
                  bool permuted = true) {
  return MakeTensorMap<T>(x.data, parts, x.rows, x.columns, x.pitch, box_rows, row_bytes, permuted);
}

// An operand of a product as it is in memory. The members of the same names are those of
// TensorOperand. `others` is the number of rows or columns of the product's other operand.
struct StoredMatrix {
  const void* data;
  DType dtype;
  std::int64_t rows, columns, pitch;
  bool mn_major = false;
  std::int64_t others = 0;

  // Returns whether TMA can read the elements, which have `size` bytes.
  bool IsReadable(std::int64_t size) const { return IsBoxAligned(data, rows, pitch * size); }
  template <class T>
  TensorOperand<T> InPlace() const {
    return {static_cast<const T*>(data), rows, columns, pitch, mn_major};
  }
};
inline StoredMatrix StoredA(const MatmulProblem& p) {
  return p.transpose_a ? StoredMatrix{p.a, p.dtype, p.k, p.m, p.lda, true, p.n}
                       : StoredMatrix{p.a, p.dtype, p.m, p.k, p.lda, false, p.n};
}
inline StoredMatrix StoredB(const MatmulProblem& p) {
  return p.transpose_b ? StoredMatrix{p.b, TypeOfB(p), p.n, p.k, p.ldb, false, p.m}
                       : StoredMatrix{p.b, TypeOfB(p), p.k, p.n, p.ldb, true, p.m};
}

// Returns the number of bytes of scratch memory that a copy of a matrix in `parts` parts takes.
template <class T>
std::uint64_t CopyScratch(std::int64_t rows, std::int64_t columns, int parts = 1) {
  return static_cast<std::uint64_t>(parts * rows * PaddedPitch<T>(columns)) * sizeof(T);
}
template <class T>
std::uint64_t CopyScratch(const StoredMatrix& x, int parts = 1) {
  return CopyScratch<T>(x.rows, x.columns, parts);
}

// The maximum number of rows or columns of the other operand for which a copy may be kept. At this
// maximum, splitting f32 into parts takes a tenth of the product's time.
constexpr std::int64_t kMostOthersToKeepFor = 1024;

// Returns memory for a prepared copy of a matrix. If the other operand is so small that the time to
// make the copy matters, the copy may be kept (Stream::Prepare). For `how`, see Preparation.
inline PreparedMemory PrepareMatrix(std::string_view how, const StoredMatrix& x,
                                    std::uint64_t bytes, CudaStream& stream) {
  const auto size = static_cast<std::size_t>(bytes);
  if (x.others > kMostOthersToKeepFor) return {stream.Scratch(size), /*ready=*/false};
  return stream.Prepare({how, {x.data, x.dtype, {2, {x.rows, x.columns}}, {x.pitch, 1}}}, size);
}

// Returns the matrix, with elements of type In, in a form that TMA can read. Copies it to `memory`
// unless the copy is already there.
template <class Out, class In>
TensorOperand<Out> CopiedTo(const PreparedMemory& memory, const StoredMatrix& x,
                            CudaStream& stream) {
  const std::int64_t out_pitch = PaddedPitch<Out>(x.columns);
  auto* out = static_cast<Out*>(memory.data);
  if (!memory.ready) {
    const std::int64_t threads = x.rows * (out_pitch / Pack<Out>::kSize);
    CopyOperand<<<static_cast<unsigned>(CeilDiv(threads, 256)), 256, 0, stream.handle()>>>(
        static_cast<const In*>(x.data), x.rows, x.columns, x.pitch, IsPackable<In>(x.data, x.pitch),
        out, out_pitch);
    CUDA_CHECK_LAUNCH(CopyOperand);
  }
  return {out, x.rows, x.columns, out_pitch, x.mn_major};
}

// Copies the matrix to the stream's scratch memory.
template <class Out, class In>
TensorOperand<Out> Copied(const StoredMatrix& x, CudaStream& stream) {
  const auto bytes = static_cast<std::size_t>(CopyScratch<Out>(x));
  return CopiedTo<Out, In>({stream.Scratch(bytes), /*ready=*/false}, x, stream);
}

// Returns a transposed copy of the matrix. k goes across the rows of the matrix and along the rows
// of the copy.
template <class Out, class In>
TensorOperand<Out> Transposed(const StoredMatrix& x, CudaStream& stream) {
  const std::int64_t rows = x.columns, columns = x.rows, out_pitch = PaddedPitch<Out>(columns);
  auto* out =
      static_cast<Out*>(stream.Scratch(static_cast<std::size_t>(rows * out_pitch) * sizeof(Out)));
  const std::int64_t squares = CeilDiv(rows, kSquare) * CeilDiv(columns, kSquare);
  TransposeOperand<<<static_cast<unsigned>(squares), 256, 0, stream.handle()>>>(
      static_cast<const In*>(x.data), rows, columns, x.pitch, out, out_pitch);
  CUDA_CHECK_LAUNCH(TransposeOperand);
  return {out, rows, columns, out_pitch, false};
}

}  // namespace tessera
