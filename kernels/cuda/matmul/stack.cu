// Matmul for stacks of small matrices: one launch computes all products of a stack.
//
// The other strategies are designed for one product that fills the GPU. A product of 16 x 16
// matrices has 256 elements, so a launch per product would take a thousand times longer than its
// arithmetic. Here a block computes several products, and a thread 4 x 4 elements of one:
//
//     product 0        product 1        ..      block of 128 threads, stack of 16 x 16 matrices:
//     +--+--+--+--+    +--+--+--+--+            8 products, 16 threads each
//     |t0|t1|t2|t3|    |16|17|  |  |
//     +--+--+--+--+    +--+--+--+--+            every 4 steps along k: 8 vectors of 4 elements
//     |t4|  |  |  |    |  |  |  |  |            from shared memory for 64 multiply-adds
//     +--+--+--+--+    +--+--+--+--+
//
// The operands of all products of a block are first copied to shared memory, in slices along k if k
// is long. Neighbouring threads copy neighbouring elements, 16 bytes at a time if rows are aligned,
// so the copies coalesce however small the matrices are. In shared memory, a is [row][k] and b is
// [k][column], whatever their layouts in device memory.
//
// Cost for 4096 products of 16 x 16 by 16 x 16, f32: 12 MiB moved, 2^25 flops, one launch.
//
// Lesson: kernels/lessons/product_3_registers.cu
#include <algorithm>
#include <limits>

#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/team/shares.h"

namespace tessera {
namespace {

constexpr int kEach = 4;  // rows, columns and steps along k of a thread's tile
constexpr int kMostTiles = 256;
constexpr int kBlock = 128;         // threads, unless one product needs more
constexpr int kBlocksPerSm = 8;     // maximum number of blocks that share an SM
constexpr int kLeastPerSm = 4;      // minimum blocks per SM if a block computes several products
constexpr int kShared = 192 << 10;  // bytes of shared memory for the blocks of an SM
constexpr int kMostShared = 96 << 10;

// The elements that one instruction copies, if they are aligned.
template <class T>
constexpr int kPackOf = std::min(kEach, Pack<T>::kSize);

// Division of numbers below 2^16 by a divisor that the host knows.
struct Divisor {
  std::uint32_t by, reciprocal;

  explicit Divisor(int divisor)
      : by(static_cast<std::uint32_t>(divisor)),
        reciprocal(by == 1 ? 0 : static_cast<std::uint32_t>((std::uint64_t{1} << 32) / by + 1)) {}
  __device__ int Divide(int x) const {
    return by == 1 ? x : static_cast<int>(__umulhi(static_cast<unsigned>(x), reciprocal));
  }
  __device__ int Remainder(int x, int quotient) const {
    return x - quotient * static_cast<int>(by);
  }
};

constexpr int RoundUp(std::int64_t x) { return static_cast<int>((x + kEach - 1) / kEach * kEach); }

// What the host prepares for a launch. Offsets in shared memory are in elements.
struct Plan {
  Divisor lines_a, lines_b;  // rows of a and columns of b
  Divisor packs_a, packs_b;  // copies along the contiguous dimension
  Divisor slice;             // steps along k in shared memory at one time
  Divisor threads;           // of one product
  Divisor columns;           // tiles in a row of c
  int products;              // in a block
  int pitch_a, pitch_b;      // distance from row to row in shared memory
  int product_a, product_b;  // between products
  bool packs_of_a, packs_of_b;
  bool packed_c;
};

// An operand of every product of the launch.
template <class T>
struct StackOperand {
  Operand<T> first;
  std::int64_t step;  // distance to the next product
};

// Copies steps [k_first, k_first + slice) of one operand of `products` products to shared memory,
// with zeros for steps at or beyond k. Element [i, l] of product g goes to g * product + i *
// i_pitch + l * l_pitch. kPack elements that are contiguous in device memory are copied at a time.
template <int kPack, class T, class V>
__device__ __forceinline__ void CopySlice(const StackOperand<T>& from, std::int64_t product_first,
                                          int products, std::int64_t k_first, std::int64_t k,
                                          const Divisor& extent, const Divisor& slice,
                                          const Divisor& packs, int product, int i_pitch,
                                          int l_pitch, V* to) {
  const bool along_k = from.first.k_stride == 1;
  const Divisor lines = along_k ? extent : slice;
  const int copies = products * static_cast<int>(lines.by * packs.by);
  const int inside = static_cast<int>(min(k - k_first, static_cast<std::int64_t>(slice.by)));
  const T* const data = from.first.data + product_first * from.step + k_first * from.first.k_stride;
#pragma unroll 4
  for (int e = static_cast<int>(threadIdx.x); e < copies; e += static_cast<int>(blockDim.x)) {
    const int line = packs.Divide(e), along = packs.Remainder(e, line) * kPack;
    const int g = lines.Divide(line), across = lines.Remainder(line, g);
    const int i = along_k ? across : along, l = along_k ? along : across;
    const T* const at = data + g * from.step + i * from.first.stride + l * from.first.k_stride;
    struct alignas(sizeof(T) * kPack) Elements {
      T v[kPack];
    } elements = {};
    if (l < inside) elements = *reinterpret_cast<const Elements*>(at);
    V* const cell = to + g * product + i * i_pitch + l * l_pitch;
    const int step = along_k ? l_pitch : i_pitch;
#pragma unroll
    for (int w = 0; w < kPack; ++w)
      cell[w * step] = static_cast<V>(static_cast<ValueOf<T>>(elements.v[w]));
  }
}

template <class V>
struct alignas(sizeof(V) * kEach < 16 ? sizeof(V) * kEach : 16) Four {
  V v[kEach];
};

template <class T, class O>
__global__ void __launch_bounds__(kMostTiles)
    MatmulStack(StackOperand<T> a, StackOperand<T> b, std::int64_t stack, std::int64_t k, Plan plan,
                std::int64_t c_step, O* c) {
  using V = MatmulAcc<T, O>;
  constexpr int kPack = kPackOf<T>;
  V* const a_slice = DynamicShared<V>();
  V* const b_slice = a_slice + plan.products * plan.product_a;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * plan.products;
  const int products =
      static_cast<int>(min(stack - first, static_cast<std::int64_t>(plan.products)));
  const int thread = static_cast<int>(threadIdx.x);
  const int g = plan.threads.Divide(thread), tile = plan.threads.Remainder(thread, g);
  const int tile_row = plan.columns.Divide(tile);
  const int y = tile_row * kEach, x = plan.columns.Remainder(tile, tile_row) * kEach;
  const bool computes = g < products;
  const int slice = static_cast<int>(plan.slice.by);

  V sums[kEach][kEach] = {};
  for (std::int64_t k_first = 0; k_first < k; k_first += slice) {
    if (k_first > 0) __syncthreads();  // every thread has used the previous slice
    if (plan.packs_of_a) {
      CopySlice<kPack>(a, first, products, k_first, k, plan.lines_a, plan.slice, plan.packs_a,
                       plan.product_a, plan.pitch_a, 1, a_slice);
    } else {
      CopySlice<1>(a, first, products, k_first, k, plan.lines_a, plan.slice, plan.packs_a,
                   plan.product_a, plan.pitch_a, 1, a_slice);
    }
    if (plan.packs_of_b) {
      CopySlice<kPack>(b, first, products, k_first, k, plan.lines_b, plan.slice, plan.packs_b,
                       plan.product_b, 1, plan.pitch_b, b_slice);
    } else {
      CopySlice<1>(b, first, products, k_first, k, plan.lines_b, plan.slice, plan.packs_b,
                   plan.product_b, 1, plan.pitch_b, b_slice);
    }
    __syncthreads();
    if (!computes) continue;
    const V* a_at = a_slice + g * plan.product_a + y * plan.pitch_a;
    const V* b_at = b_slice + g * plan.product_b + x;
#pragma unroll 1
    for (int l = 0; l < slice; l += kEach, a_at += kEach, b_at += kEach * plan.pitch_b) {
      Four<V> rows[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        rows[i] = *reinterpret_cast<const Four<V>*>(a_at + i * plan.pitch_a);
#pragma unroll
      for (int s = 0; s < kEach; ++s) {
        const Four<V> row = *reinterpret_cast<const Four<V>*>(b_at + s * plan.pitch_b);
#pragma unroll
        for (int i = 0; i < kEach; ++i)
#pragma unroll
          for (int j = 0; j < kEach; ++j)
            sums[i][j] = MultiplyAdd(rows[i].v[s], row.v[j], sums[i][j]);
      }
    }
  }
  if (!computes) return;
  const auto m = static_cast<int>(a.first.extent), n = static_cast<int>(b.first.extent);
  O* const to = c + (first + g) * c_step + x;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (y + i >= m) return;
    O* const row = to + (y + i) * n;
    if (plan.packed_c) {
      Four<O> four;
#pragma unroll
      for (int j = 0; j < kEach; ++j) four.v[j] = static_cast<O>(sums[i][j]);
      *reinterpret_cast<Four<O>*>(row) = four;
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (x + j < n) row[j] = static_cast<O>(sums[i][j]);
    }
  }
}

// Whether the contiguous lines of an operand consist of whole aligned vectors in every product.
template <class T>
bool ConsistsOfPacks(const StackOperand<T>& operand, std::int64_t k) {
  const bool along_k = operand.first.k_stride == 1;
  const std::int64_t length = along_k ? k : operand.first.extent;
  const std::int64_t pitch = along_k ? operand.first.stride : operand.first.k_stride;
  constexpr int kPack = kPackOf<T>;
  return length % kPack == 0 && operand.step % kPack == 0 && pitch % kPack == 0 &&
         reinterpret_cast<std::uintptr_t>(operand.first.data) % (kPack * sizeof(T)) == 0;
}

template <class T, class O>
void Run(const MatmulProblem& p, const StackSteps& stack, int multiprocessors,
         cudaStream_t stream) {
  using V = MatmulAcc<T, O>;
  constexpr int kPack = kPackOf<T>;
  const StackOperand<T> a{OperandA<T>(p), stack.a}, b{OperandB<T>(p), stack.b};
  const int rows = RoundUp(p.m), columns = RoundUp(p.n);
  const int threads = rows / kEach * (columns / kEach);
  const std::int64_t share = CeilDiv(stack.products, kLeastPerSm * multiprocessors);
  const int products =
      static_cast<int>(std::min<std::int64_t>(share, std::max(1, kBlock / threads)));
  const std::int64_t blocks = CeilDiv(stack.products, products);
  const auto per_sm =
      static_cast<int>(std::min<std::int64_t>(CeilDiv(blocks, multiprocessors), kBlocksPerSm));
  const int elements =
      std::min(kShared / per_sm, kMostShared) / static_cast<int>(sizeof(V)) / products;
  // All slices have nearly the same length.
  const int most =
      std::max(kEach, (elements - (rows + 2) * kEach) / (rows + columns) / kEach * kEach);
  const std::int64_t slices = CeilDiv(p.k, most);
  const int slice = static_cast<int>(CeilDiv(CeilDiv(p.k, slices), kEach) * kEach);
  // Rows of a are padded so that vertically adjacent tiles read from different banks. Products are
  // padded for threads that each compute a whole product.
  const auto odd = [](int elements) {
    return elements / kEach % 2 == 1 ? elements : elements + kEach;
  };
  const int pitch_a = rows == kEach ? slice : slice + kEach;
  const int product_a = odd(rows * pitch_a), product_b = odd(slice * columns);
  const bool packs_of_a = ConsistsOfPacks(a, p.k), packs_of_b = ConsistsOfPacks(b, p.k);
  const auto copies = [&](const Operand<T>& operand, bool packs) {
    const int along = operand.k_stride == 1 ? slice : static_cast<int>(operand.extent);
    return Divisor(packs ? along / kPack : along);
  };
  const Plan plan{.lines_a = Divisor(static_cast<int>(p.m)),
                  .lines_b = Divisor(static_cast<int>(p.n)),
                  .packs_a = copies(a.first, packs_of_a),
                  .packs_b = copies(b.first, packs_of_b),
                  .slice = Divisor(slice),
                  .threads = Divisor(threads),
                  .columns = Divisor(columns / kEach),
                  .products = products,
                  .pitch_a = pitch_a,
                  .pitch_b = columns,
                  .product_a = product_a,
                  .product_b = product_b,
                  .packs_of_a = packs_of_a,
                  .packs_of_b = packs_of_b,
                  .packed_c = p.n % kEach == 0 && (stack.c % kEach == 0 || stack.products == 1) &&
                              reinterpret_cast<std::uintptr_t>(p.c) % alignof(Four<O>) == 0};
  const int bytes = products * (product_a + product_b) * static_cast<int>(sizeof(V));
  const auto kernel = MatmulStack<T, O>;
  AllowSharedBytes(kernel, bytes);
  kernel<<<static_cast<unsigned>(blocks),
           static_cast<unsigned>(CeilDiv(products * threads, kWarpSize) * kWarpSize), bytes,
           stream>>>(a, b, stack.products, p.k, plan, stack.c, static_cast<O*>(p.c));
  CUDA_CHECK_LAUNCH(MatmulStack);
}

Cost CostOf(const MatmulProblem& p) {
  return MatmulCost(p,
                    static_cast<std::uint64_t>(p.m * p.k) + static_cast<std::uint64_t>(p.k * p.n));
}

void Enqueue(const MatmulProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  const int multiprocessors = cuda.device().info().multiprocessors;
  DispatchMatmul(p, [&](auto t, auto o) {
    ForEachStackPart(p, std::numeric_limits<std::int32_t>::max(),
                     [&](const MatmulProblem& first, const StackSteps& part) {
                       Run<decltype(t), decltype(o)>(first, part, multiprocessors, cuda.handle());
                     });
  });
}

std::string Refuses(const MatmulProblem& p) {
  const std::int64_t rows = CeilDiv(p.m, kEach), columns = CeilDiv(p.n, kEach);
  return rows <= kMostTiles && columns <= kMostTiles && rows * columns <= kMostTiles
             ? ""
             : "results of at most 256 tiles of 4 x 4 elements";
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulStack = CudaMatmul({
    .name = "stack",
    .summary = "stacks of small matrices: several products per block, 4 x 4 elements per thread",
    .source = "batched products of small matrices: Dongarra et al., \"Batched BLAS\", 2017",
    .dtypes = kMatmulDTypes,
    .cost = CostOf,
    .launch = Enqueue,
    .shared = {.launch = LaunchGathered<kMatmulStack>},
    .refuses = Refuses,
    .stacks = true,
});
template void LaunchGathered<kMatmulStack>(const MatmulProblem&, std::span<const TeamShare>,
                                           Stream&);

}  // namespace tessera
