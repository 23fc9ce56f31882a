// Matmul of f32 on Hopper's tensor cores, no less accurate than plain f32.
//
// An f32 has 24 bits of precision; a bf16 has 8 and the same exponent range. So a copy first splits
// each operand into three bf16 parts whose sum is exactly the f32 value, and the kernel of
// `tensor_bf16` multiplies the parts:
//
//      x = x0 + x1 + x2,   x0 = bf16(x),   x1 = bf16(x - x0),   x2 = x - x0 - x1
//
// Of the nine products of parts, only the six largest are summed (see the source below). The other
// three are below 2^-23 of a term. Six products take six times the arithmetic of bf16. But each
// part in shared memory is used up to three times, so the tensor cores run at full speed. One sixth
// of the bf16 speed is still more than twice the speed of the f32 units.
//
//              b0    b1    b2
//        a0    3rd   2nd   1st     This is the order in a k-tile of 32 steps. Small products come
//        a1    2nd   1st   -       first, so that little of them is lost when they are added.
//        a2    1st   -     -
//
// The tensor cores truncate their f32 sums instead of rounding them, and these errors would
// accumulate. So the tensor cores sum only one k-tile at a time, and each of these sums is added to
// a sum in registers. The rounding error of that addition is not lost, because the sum of the next
// k-tile starts from it (MultiplyParts in mainloop.cuh).
// docs/notebook.md, "f32 split into three bf16", compares the errors with those of cuBLAS.
//
// Two measures ensure correct results for elements of any magnitude:
//
// - Small elements: the parts of an element below 2^-109 could underflow. So elements are
//   multiplied by 2^23 before they are split, and results by 2^-46. Every f32 is a multiple of
//   2^-149, so every part is a multiple of 2^-126, and is zero or a normal number. Even terms too
//   small for f32 are added. A subnormal result is the sum rounded once, or twice where k is cut,
//   whereas plain f32 rounds each term.
// - Large elements: the multiplication by 2^23 may overflow for elements of 2^105 or more. Results
//   of 2^82 or more and large terms that cancel may overflow too. An infinity cannot be split
//   either (inf - inf is NaN). Each of these cases leaves a value in c that is not finite, which
//   sets a flag. If the flag is set, a last kernel recomputes every tile of c with such an element
//   in plain f32; otherwise it exits immediately.
//
// Cost for 1024 x 1024 x 1024: 2^31 flops, computed as 6 x 2^31; 96 MiB of loads in 128 x 128
// tiles, 20 MiB for the copies, and 12 MiB of scratch memory, one and a half times the size of the
// operands. For 4096 x 4096 x 4096, an H200 takes 87 us for the copies, which run at memory speed.
// Including them, the product takes less than half of cuBLAS's time in f32 (docs/measured). In the
// worst case, in which no element of c is finite at first, it takes 1.7 times as long as cuBLAS.
//
// Lesson: kernels/lessons/hopper_product.cu
#include "kernels/cuda/matmul/hopper/strategy.cuh"

namespace tessera {
namespace {

constexpr int kParts = 3;
using T = BFloat16;

// An operand, whose rows are `pitch` elements apart, and the destination of its parts, whose rows
// are `out_pitch` elements apart. `blocks` is the number of thread blocks that split the operand,
// or 0 if the parts are already there.
struct Splitting {
  const float* in;
  std::int64_t rows, columns, pitch;
  bool packable;
  T* out;
  std::int64_t out_pitch;
  unsigned blocks;
};

// Splits both operands. The first a.blocks blocks split a, and the others split b. Each thread
// writes one vector of each part.
__global__ void __launch_bounds__(256)
    SplitOperands(const __grid_constant__ Splitting a, const __grid_constant__ Splitting b,
                  unsigned* nonfinite) {
  AllowNextKernel();
  if (GridThread() == 0) *nonfinite = 0;
  if (blockIdx.x >= a.blocks + b.blocks) return;
  const bool first = blockIdx.x < a.blocks;
  const Splitting& s = first ? a : b;
  constexpr int kWidth = Pack<T>::kSize;
  const std::int64_t packs = s.out_pitch / kWidth;
  const std::int64_t thread =
      std::int64_t{blockIdx.x - (first ? 0 : a.blocks)} * blockDim.x + threadIdx.x;
  const std::int64_t row = thread / packs, column = thread % packs * kWidth;
  if (row >= s.rows) return;
  float x[kWidth];
  LoadRow(s.in + row * s.pitch, column, s.columns, s.packable, x);
#pragma unroll
  for (float& element : x) element *= kPartsScale;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    Pack<T> pack;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      pack.v[w] = T(x[w]);
      x[w] -= static_cast<float>(pack.v[w]);  // exact
    }
    StorePack(s.out + (part * s.rows + row) * s.out_pitch + column, pack);
  }
}

// Recomputes every tile of c that has a nonfinite element, in plain f32 as in `double_buffered`.
constexpr int kAgainTile = 128, kAgainDepth = 8, kAgainThreads = 256;

__global__ void __launch_bounds__(kAgainThreads, 2)
    ComputeAgain(Operand<float> a, Operand<float> b, Packable packable, std::int64_t k, float* c,
                 const unsigned* nonfinite) {
  AllowNextKernel();
  WaitForKernelBefore();
  if (*nonfinite == 0) return;
  constexpr int kPitch = kAgainTile + 4;
  __shared__ __align__(16) float a_k_tiles[2][kAgainDepth][kPitch];
  __shared__ __align__(16) float b_k_tiles[2][kAgainDepth][kPitch];
  const std::int64_t column_tiles = (b.extent + kAgainTile - 1) / kAgainTile;
  const std::int64_t tiles = (a.extent + kAgainTile - 1) / kAgainTile * column_tiles;
  for (std::int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const std::int64_t row = index / column_tiles * kAgainTile;
    const std::int64_t column = index % column_tiles * kAgainTile;
    bool finite = true;
    for (int i = static_cast<int>(threadIdx.x); i < kAgainTile * kAgainTile; i += kAgainThreads) {
      const std::int64_t y = row + i / kAgainTile, x = column + i % kAgainTile;
      if (y < a.extent && x < b.extent)
        finite = finite && fabsf(c[y * b.extent + x]) <= std::numeric_limits<float>::max();
    }
    if (__syncthreads_and(finite)) continue;
    using Copier = KTileCopier<float, kAgainTile, kAgainDepth, kPitch, kAgainThreads>;
    Copier a_copier(a, packable.a, row);
    Copier b_copier(b, packable.b, column);
    ThreadTile<float, kAgainTile, 8> tile;
    static_assert(tile.kThreads == kAgainThreads);
    const auto copy = [&](std::int64_t k_first, int stage) {
      const auto depth = static_cast<int>(min(k - k_first, std::int64_t{kAgainDepth}));
      if (depth <= 0) return;
      a_copier.Copy(depth, &a_k_tiles[stage][0][0]);
      b_copier.Copy(depth, &b_k_tiles[stage][0][0]);
      CommitCopies();
    };
    copy(0, 0);
    int stage = 0;
    for (std::int64_t k_first = 0; k_first < k; k_first += kAgainDepth, stage = 1 - stage) {
      WaitForCopies<0>();
      __syncthreads();  // the k-tile is complete, and the previous one is free
      copy(k_first + kAgainDepth, 1 - stage);
#pragma unroll
      for (int l = 0; l < kAgainDepth; ++l) tile.Multiply(a_k_tiles[stage][l], b_k_tiles[stage][l]);
    }
    tile.Store(row, column, a.extent, b.extent, packable.c, c);
    __syncthreads();  // all threads have read the last k-tile
  }
}

// `parts` is memory for the parts of a matrix of this size or larger.
Splitting SplittingOf(const StoredMatrix& x, const PreparedMemory& parts) {
  const std::int64_t out_pitch = PaddedPitch<T>(x.columns);
  const std::int64_t threads = parts.ready ? 0 : x.rows * (out_pitch / Pack<T>::kSize);
  return {.in = static_cast<const float*>(x.data),
          .rows = x.rows,
          .columns = x.columns,
          .pitch = x.pitch,
          .packable = IsPackable<float>(x.data, x.pitch),
          .out = static_cast<T*>(parts.data),
          .out_pitch = out_pitch,
          .blocks = static_cast<unsigned>(CeilDiv(threads, 256))};
}

// Prepares an operand in memory that may be kept for later calls.
Splitting Prepare(const StoredMatrix& x, CudaStream& stream) {
  return SplittingOf(x, PrepareMatrix("three parts", x, CopyScratch<T>(x, kParts), stream));
}

// Launches at least one block, because the kernel also clears the flag.
void EnqueueSplit(const Splitting& a, const Splitting& b, unsigned* nonfinite, CudaStream& stream) {
  const unsigned blocks = std::max(1U, a.blocks + b.blocks);
  SplitOperands<<<blocks, 256, 0, stream.handle()>>>(a, b, nonfinite);
  CUDA_CHECK_LAUNCH(SplitOperands);
}

// Enqueues the product of the parts. The rows of c are c_pitch elements apart.
void EnqueueParts(const MatmulProblem& p, const Splitting& a, const Splitting& b, bool whole_tiles,
                  std::int64_t c_pitch, unsigned* nonfinite, CudaStream& stream) {
  const TensorOperand<T> a_parts{a.out, a.rows, a.columns, a.out_pitch, p.transpose_a};
  const TensorOperand<T> b_parts{b.out, b.rows, b.columns, b.out_pitch, !p.transpose_b};
  TensorProduct product = ProductOf(p.m, p.n, p.k, a_parts, b_parts, stream);
  product.whole_tiles = whole_tiles;
  RunBestPlan(product, tuning::kTilesF32x3, [&](auto tile, const TensorPlan& plan) {
    RunPlanAnyLayout<decltype(tile)>(p, a_parts, b_parts, plan, nonfinite, stream, c_pitch);
  });
}

void EnqueueAgain(const MatmulProblem& p, const unsigned* nonfinite, CudaStream& stream) {
  const int blocks = 2 * stream.device().info().multiprocessors;
  LaunchOverlapping(ComputeAgain, {static_cast<unsigned>(blocks), kAgainThreads, 0}, stream,
                    OperandA<float>(p), OperandB<float>(p), PackableOf<float>(p), p.k,
                    static_cast<float*>(p.c), nonfinite);
}

void Enqueue(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  auto* nonfinite = static_cast<unsigned*>(stream.Scratch(sizeof(unsigned)));
  const Splitting a = Prepare(StoredA(p), stream), b = Prepare(StoredB(p), stream);
  EnqueueSplit(a, b, nonfinite, stream);
  EnqueueParts(p, a, b, /*whole_tiles=*/false, p.n, nonfinite, stream);
  EnqueueAgain(p, nonfinite, stream);
}

// The Work type for LaunchProductShares. a is split once. The pieces of b are split one after
// another into the same memory. Tiles with values that left the range of the parts are recomputed
// at the end.
class PartsWork {
 public:
  explicit PartsWork(const ProductShare& share)
      : share_(share),
        flags_(static_cast<unsigned*>(share.stream().Scratch(2 * sizeof(unsigned)))),
        a_(Prepare(StoredA(share.problem()), share.stream())) {
    MatmulProblem widest = share.problem();
    widest.n = share.most_columns();
    const auto bytes = static_cast<std::size_t>(CopyScratch<T>(StoredB(widest), kParts));
    b_parts_ = {share.stream().Scratch(bytes), /*ready=*/false};
    EnqueueSplit(a_, Splitting{}, nonfinite(), share.stream());
  }

  static constexpr double kRate = 55e12;
  static std::int64_t Round(const MatmulProblem& p, int multiprocessors) {
    return RoundOfTiles(p, multiprocessors, 128, 128);
  }
  void Multiply(const ProductPiece& piece) {
    const MatmulProblem part = ColumnsOf(share_.problem(), piece);
    const Splitting b = SplittingOf(StoredB(part), b_parts_);
    // This launch clears the second flag, because the product's flag must stay set if an earlier
    // piece has set it.
    EnqueueSplit(b, Splitting{}, flags_ + 1, share_.stream());
    EnqueueParts(part, a_, b, /*whole_tiles=*/true, share_.problem().n, nonfinite(),
                 share_.stream());
  }
  void Finish() { EnqueueAgain(share_.problem(), nonfinite(), share_.stream()); }

 private:
  unsigned* nonfinite() const { return flags_; }

  const ProductShare& share_;
  unsigned* const flags_;
  const Splitting a_;
  PreparedMemory b_parts_;
};

// The errors below are in units of 2^-24, relative to the sum of |terms|. Omitting three of the
// products costs 2: two of these are up to 2^-8 2^-16 of a term, and the third is smaller. In a
// k-tile of 32 terms, truncation costs 3 (32 + 16) for the large product of each term, plus 3 (5 32
// + 16) times 2^-7 for the five small products, which together are at most 2^-7 of the term. Adding
// up the k-tiles costs 2, because an addition loses at most its last bit, and only where a k-tile
// outweighs all earlier ones. The last addition costs 1, and if k is cut into two to k / 128
// pieces, each of them costs 1 as well. The sum of a k-tile starts from the previous rounding
// error, at most 2^-24 of all earlier terms. Where that error outweighs the k-tile's own terms, it
// is truncated by up to 2^-23 of itself, which costs less than 2^-20 k in total.
double Roundoff(const MatmulProblem& p) {
  return (160 + 0.01 * static_cast<double>(p.k)) * kRoundoffF32;
}

Cost CostOf(const MatmulProblem& p) { return TensorCost(p, 128, sizeof(T), kParts, true, true); }

std::uint64_t ScratchOf(const MatmulProblem& p) {
  return SumsScratch(p) + CopyScratch<T>(StoredA(p), kParts) + CopyScratch<T>(StoredB(p), kParts);
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulTensorF32x3 = HopperMatmul({
    .name = "tensor_f32x3",
    .summary = "Hopper's tensor cores on f32 in three bf16 parts, as accurate as f32",
    .source = "G. Henry, P. T. P. Tang and A. Heinecke, Leveraging the bfloat16 artificial "
              "intelligence datatype for higher-precision computations, 2019",
    .dtypes = DTypesOf(DType::kF32),
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .shared = {.launch = LaunchProductShares<PartsWork>},
    .scratch = ScratchOf,
});

}  // namespace tessera
