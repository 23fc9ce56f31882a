// Operands and results that TMA cannot take as they are: copies in scratch memory, and the sums of
// split-K.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <type_traits>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/matmul/hopper/ptx/ptx.cuh"
#include "kernels/cuda/matmul/hopper/ptx/tensor_map.cuh"
#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/runtime/cuda.h"
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
  } else {
    return ConvertElement<Out>(x);
  }
}

// A vector of elements from a row that ends at `columns`, zeros beyond. packable: rows are aligned
// to vectors.
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

// out[row][column] = in[row][column], rows of `pitch` and `out_pitch`, a multiple of the vector: a
// thread writes a vector. What lies between columns and out_pitch is never read.
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

// The same transposed: out[row][column] = in[column][row]. A block moves a square of kSquare
// through shared memory, whose odd pitch spreads columns over the banks.
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

// c[y][x] = the sum of sums[0][y][x], sums[1][y][x], ..., in this order: rows of `pitch` become
// rows of n. A block takes kFinishedRows x kFinishedColumns, a warp one row of them, whose loads
// are all on their way before it writes.
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
  float sum[kFinishedColumns / kWarpSize];
  sums += row * pitch + column;
  for (int s = 0; s < splits; ++s, sums += m * pitch) {
#pragma unroll
    for (int i = 0; i < kFinishedColumns; i += kWarpSize) {
      // No branch, which the load would wait behind.
      const auto x = static_cast<float>(sums[min(i, end - 1)]);
      sum[i / kWarpSize] = s == 0 ? x : sum[i / kWarpSize] + x;
    }
  }
  c += row * n + column;
#pragma unroll
  for (int i = 0; i < kFinishedColumns; i += kWarpSize)
    if (i < end) c[i] = static_cast<O>(sum[i / kWarpSize]);
}

// A matrix as TMA can read it: rows of `pitch` elements, of which `columns` count, k along the rows
// or, if mn_major, across. Parts of one stand one behind the other.
template <class T>
struct TensorOperand {
  const T* data;
  std::int64_t rows, columns, pitch;
  bool mn_major;
};

// Scratch memory of a copy of a matrix, in parts.
template <class T>
std::uint64_t CopyScratch(std::int64_t rows, std::int64_t columns, int parts = 1) {
  return static_cast<std::uint64_t>(parts * rows * PaddedPitch<T>(columns)) * sizeof(T);
}

// Memory for what is made of a matrix, CopyScratch of it, which may be kept (Stream::Prepare) where
// the other operand of the product has so few rows or columns, `others`, that making it counts:
// with 1024 the parts of an f32 take a tenth of the product's time. how: of Preparation.
constexpr std::int64_t kMostOthersToKeepFor = 1024;

template <class T>
PreparedMemory PrepareMatrix(std::string_view how, const void* data, DType dtype, std::int64_t rows,
                             std::int64_t columns, std::int64_t pitch, int parts,
                             std::int64_t others, CudaStream& stream) {
  const auto bytes = static_cast<std::size_t>(CopyScratch<T>(rows, columns, parts));
  if (others > kMostOthersToKeepFor) return {stream.Scratch(bytes), /*ready=*/false};
  return stream.Prepare({how, {data, dtype, {2, {rows, columns}}, {pitch, 1}}}, bytes);
}

// The matrix as TMA can read it, copied to this memory unless it is there.
template <class Out, class In>
TensorOperand<Out> CopiedTo(const PreparedMemory& memory, const In* data, std::int64_t rows,
                            std::int64_t columns, std::int64_t pitch, bool mn_major,
                            CudaStream& stream) {
  const std::int64_t out_pitch = PaddedPitch<Out>(columns);
  auto* out = static_cast<Out*>(memory.data);
  if (!memory.ready) {
    const std::int64_t threads = rows * (out_pitch / Pack<Out>::kSize);
    CopyOperand<<<static_cast<unsigned>(CeilDiv(threads, 256)), 256, 0, stream.handle()>>>(
        data, rows, columns, pitch, IsPackable<In>(data, pitch), out, out_pitch);
    CUDA_CHECK_LAUNCH(CopyOperand);
  }
  return {out, rows, columns, out_pitch, mn_major};
}

// The same in the stream's scratch memory.
template <class Out, class In>
TensorOperand<Out> Copied(const In* data, std::int64_t rows, std::int64_t columns,
                          std::int64_t pitch, bool mn_major, CudaStream& stream) {
  const auto bytes = static_cast<std::size_t>(CopyScratch<Out>(rows, columns));
  return CopiedTo<Out>({stream.Scratch(bytes), /*ready=*/false}, data, rows, columns, pitch,
                       mn_major, stream);
}

// A copy with k along the rows, of a matrix [columns, rows] in which it goes across.
template <class Out, class In>
TensorOperand<Out> Transposed(const In* data, std::int64_t rows, std::int64_t columns,
                              std::int64_t pitch, CudaStream& stream) {
  const std::int64_t out_pitch = PaddedPitch<Out>(columns);
  auto* out =
      static_cast<Out*>(stream.Scratch(static_cast<std::size_t>(rows * out_pitch) * sizeof(Out)));
  const std::int64_t squares = CeilDiv(rows, kSquare) * CeilDiv(columns, kSquare);
  TransposeOperand<<<static_cast<unsigned>(squares), 256, 0, stream.handle()>>>(
      data, rows, columns, pitch, out, out_pitch);
  CUDA_CHECK_LAUNCH(TransposeOperand);
  return {out, rows, columns, out_pitch, false};
}

}  // namespace tessera
