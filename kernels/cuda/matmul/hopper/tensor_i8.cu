// Matmul on Hopper's tensor cores, with 8-bit integers and i32 sums.
//
// The kernel is that of `tensor_bf16` (gemm.cuh). One instruction multiplies 64 x 32 by 32 x 256
// bytes, twice as many as 16-bit elements in the same time. Products and sums are exact. A sum of
// more than 2^17 products of i8, or 2^16 of u8, may leave the range of i32. It then wraps, as in
// every strategy, so the order of the additions never affects the bits.
//
// wgmma requires that bytes are contiguous along k in both operands. In the plain product b is not,
// so a transposed copy of b is made first, at the speed of memory (TransposeBytes). A transposed a
// is copied in the same way. A caller that stores b as [n, k] and requests transpose_b avoids the
// copy. If the other operand has few rows or columns, the copy takes longer than the product. It is
// then kept for later requests if memory allows (PrepareMatrix).
//
// Cost for 4096 x 4096 x 4096: 2^37 operations, 0.07 ms at the data sheet's rate of 1979
// tera-operations per second, and 0.75 GiB of loads in tiles of 128 x 256, nearly all from the L2.
// The copy of b reads and writes 16 MiB each.
//
// Lesson: kernels/lessons/hopper_product.cu
#include "kernels/cuda/matmul/hopper/strategy.cuh"

namespace tessera {
namespace {

// A block transposes a square of this side, with vectors of 16 bytes on both sides.
constexpr int kSide = 128, kBytes = 16, kVectors = kSide / kBytes;
constexpr int kTransposeThreads = kSide / 4 * kVectors;

// Transposes 4 x 4 bytes: byte i of word j becomes byte j of word i.
__device__ void TransposeWords(std::uint32_t (&x)[4]) {
  const std::uint32_t low01 = __byte_perm(x[0], x[1], 0x5140);
  const std::uint32_t low23 = __byte_perm(x[2], x[3], 0x5140);
  const std::uint32_t high01 = __byte_perm(x[0], x[1], 0x7362);
  const std::uint32_t high23 = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(low01, low23, 0x5410);
  x[1] = __byte_perm(low01, low23, 0x7632);
  x[2] = __byte_perm(high01, high23, 0x5410);
  x[3] = __byte_perm(high01, high23, 0x7632);
}

// Transposes a matrix of bytes: out[row][column] = in[column][row]. The rows of `out` are out_pitch
// apart, a multiple of 16, and their padding is zero. `packable`: whether the rows of `in` are
// aligned to vectors.
//
// The square passes through shared memory twice. First its rows are stored as they are, and each
// thread collects a column of 4 x 16 bytes: four bytes from each of 16 rows. Then each thread
// stores the four vectors that it has transposed, and whole rows of `out` are written. In both
// passes, the slots of vectors are permuted so that adjacent lanes use different banks.
__global__ void __launch_bounds__(kTransposeThreads)
    TransposeBytes(const std::uint8_t* in, std::int64_t rows, std::int64_t columns,
                   std::int64_t pitch, bool packable, std::uint8_t* out, std::int64_t out_pitch) {
  AllowNextKernel();
  __shared__ uint4 square[kSide][kVectors];
  const std::int64_t row_squares = (rows + kSide - 1) / kSide;
  const std::int64_t row = blockIdx.x % row_squares * kSide;
  const std::int64_t column = blockIdx.x / row_squares * kSide;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = thread; i < kSide * kVectors; i += kTransposeThreads) {
    const int y = i / kVectors, x = i % kVectors;
    std::uint8_t bytes[kBytes] = {};
    if (column + y < columns)
      LoadRow(in + (column + y) * pitch, row + x * kBytes, rows, packable, bytes);
    memcpy(&square[y][x], bytes, kBytes);
  }
  __syncthreads();  // the square is complete
  const int word = thread % (kSide / 4), group = thread / (kSide / 4);
  std::uint32_t vectors[4][4];  // [row of out][four bytes of it]
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = reinterpret_cast<const std::uint32_t*>(square[group * kBytes + 4 * j + i])[word];
    TransposeWords(words);
#pragma unroll
    for (int i = 0; i < 4; ++i) vectors[i][j] = words[i];
  }
  __syncthreads();  // the square has been read
#pragma unroll
  for (int i = 0; i < 4; ++i)
    square[4 * word + i][group ^ word % kVectors] = {vectors[i][0], vectors[i][1], vectors[i][2],
                                                     vectors[i][3]};
  __syncthreads();  // the transposed square is complete
#pragma unroll
  for (int i = thread; i < kSide * kVectors; i += kTransposeThreads) {
    const int y = i / kVectors, x = i % kVectors;
    const std::int64_t to = column + x * kBytes;
    if (row + y < rows && to < out_pitch)
      *reinterpret_cast<uint4*>(out + (row + y) * out_pitch + to) = square[y][x ^ y / 4 % kVectors];
  }
}

// Returns the operand with k along the rows.
template <class T>
TensorOperand<T> Prepared(const StoredMatrix& x, CudaStream& stream) {
  if (!x.mn_major) {
    if (x.IsReadable(1)) return x.InPlace<T>();
    const auto copy = CopiedTo<std::uint8_t, std::uint8_t>(
        PrepareMatrix("aligned", x, CopyScratch<T>(x), stream), x, stream);
    return {reinterpret_cast<const T*>(copy.data), x.rows, x.columns, copy.pitch, false};
  }
  const std::int64_t rows = x.columns, k = x.rows, out_pitch = PaddedPitch<T>(k);
  const PreparedMemory memory = PrepareMatrix("transposed", x, CopyScratch<T>(rows, k), stream);
  if (!memory.ready) {
    const std::int64_t squares = CeilDiv(rows, kSide) * CeilDiv(out_pitch, kSide);
    const auto* in = static_cast<const std::uint8_t*>(x.data);
    TransposeBytes<<<static_cast<unsigned>(squares), kTransposeThreads, 0, stream.handle()>>>(
        in, rows, k, x.pitch, IsPackable<std::uint8_t>(in, x.pitch),
        static_cast<std::uint8_t*>(memory.data), out_pitch);
    CUDA_CHECK_LAUNCH(TransposeBytes);
  }
  return {static_cast<const T*>(memory.data), rows, k, out_pitch, false};
}

template <class T>
void Run(const MatmulProblem& p, CudaStream& stream) {
  const auto a = Prepared<T>(StoredA(p), stream), b = Prepared<T>(StoredB(p), stream);
  RunBestPlan(ProductOf(p.m, p.n, p.k, a, b, stream), tuning::kTiles8<T>,
              [&](auto tile, const TensorPlan& plan) {
                RunPlan<decltype(tile), false, false>(p, a, b, plan, nullptr, stream, p.n);
              });
}

void Enqueue(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  if (p.mixed) {
    p.dtype == DType::kI8 ? Run<I8ByU8>(p, stream) : Run<U8ByI8>(p, stream);
  } else {
    p.dtype == DType::kI8 ? Run<std::int8_t>(p, stream) : Run<std::uint8_t>(p, stream);
  }
}

bool IsCopied(const StoredMatrix& x) { return x.mn_major || !x.IsReadable(1); }

Cost CostOf(const MatmulProblem& p) {
  return TensorCost(p, 256, 1, 1, IsCopied(StoredA(p)), IsCopied(StoredB(p)));
}

std::uint64_t ScratchOf(const MatmulProblem& p) {
  return SumsScratch(p) + (IsCopied(StoredA(p)) ? CopyScratch<std::int8_t>(p.m, p.k) : 0) +
         (IsCopied(StoredB(p)) ? CopyScratch<std::int8_t>(p.n, p.k) : 0);
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulTensorI8 = HopperMatmul({
    .name = "tensor_i8",
    .summary = "Hopper's tensor cores on 8-bit integers, signed or not, with exact i32 sums",
    .source = "the kernel of tensor_bf16, with the byte instructions of wgmma",
    .dtypes = DTypesOf(DType::kU8, DType::kI8),
    .cost = CostOf,
    .launch = Enqueue,
    .shared = {.launch = LaunchGathered<kMatmulTensorI8>},
    .scratch = ScratchOf,
    .mixed = true,
});
template void LaunchGathered<kMatmulTensorI8>(const MatmulProblem&, std::span<const TeamShare>,
                                              Stream&);

}  // namespace tessera
