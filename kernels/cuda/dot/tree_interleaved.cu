// Dot with the tree of `tree_global`, in shared memory.
//
// Compared with `tree_global`, the products of a block (two per thread) are in shared memory, where
// a step costs tens of cycles instead of hundreds. Each block adds its value to the result with an
// atomic addition, so no further launch is needed.
//
//   stride 1   0<1 2<3 4<5 6<7    threads 0 1 2 3
//   stride 2   0<--2   4<--6      threads 0   2
//   stride 4   0<------4          thread  0
//
// Thread t is active at stride s if s divides t. The test takes a division, and adjacent threads
// differ in its result: a warp executes the addition if any of its 32 threads needs it. At stride 2
// all warps do half of the work in the full time, at stride 4 a quarter, and so on. The cells that
// a warp reads are 2s apart. Shared memory has 32 banks, and at s = 16 all of a warp's cells are in
// one bank. At n = 2^20 there are 2048 blocks with 10 barriers and an atomic addition each.
#include "kernels/cuda/dot/frame.cuh"

namespace tessera {
namespace {

// *total += a . b. Dynamic shared memory: two Acc per thread.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    DotTreeInterleaved(const T* a, const T* b, std::int64_t n, DotWide<T>* total) {
  using F = DotFold<T>;
  auto* products = DynamicShared<DotAcc<T>>();
  const std::int64_t begin = std::int64_t{2} * blockIdx.x * blockDim.x;
  for (unsigned i = threadIdx.x; i < 2 * blockDim.x; i += blockDim.x)
    products[i] = begin + i < n ? F::Multiply(a[begin + i], b[begin + i]) : DotAcc<T>(0);
  __syncthreads();  // every product of the block is in its cell
  const unsigned mine = 2 * threadIdx.x;
  for (unsigned stride = 1; stride < 2 * blockDim.x; stride *= 2) {
    if (threadIdx.x % stride == 0 && mine + stride < 2 * blockDim.x)
      products[mine] = F::Combine(products[mine], products[mine + stride]);
    __syncthreads();  // multiples of 2 * stride are written, and the cells between have been read
  }
  if (threadIdx.x == 0) AtomicAdd(total, F::Widen(products[0]));
}

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 2);
  return {.grid = grid,
          .narrow_steps = 1 + CeilLog2(std::int64_t{2} * grid.block_size),
          .wide_steps = grid.blocks,
          .atomics = grid.blocks};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoOneSum(p, stream, [&](auto* a, auto* b, auto* total, cudaStream_t on) {
    DotTreeInterleaved<<<grid.blocks, grid.block_size, 2 * grid.block_size * AccBytes(p.dtype),
                         on>>>(a, b, p.n, total);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotTreeInterleaved = {
    .name = "tree_interleaved",
    .summary = "a tree of doubling strides in shared memory, one atomic addition per block",
    .source = "tree reduction in threadgroup memory from the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
