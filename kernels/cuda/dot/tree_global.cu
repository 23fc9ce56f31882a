// Dot as a tree in device memory, with one launch per level, until a single value is left.
//
// Compared with `block_partials`, the host does none of the work. A block multiplies two pairs of
// elements per thread, stores the products in device memory and sums its part in place, with a
// barrier between the steps. Thread t works on cell 2t and adds another cell to it, first the one
// at distance 1, then 2, 4, ...
//
//   stride 1   0<1 2<3 4<5 6<7    threads 0 1 2 3
//   stride 2   0<--2   4<--6      threads 0   2
//   stride 4   0<------4          thread  0
//
// A barrier only stops the threads of one block. Each block therefore writes its value to an array.
// The next launch, which starts when the previous one has ended, sums that array in the same way.
// The launch with only one block writes the result. At n = 2^20, launches of 2048, 4 and 1 blocks
// move 24 MiB. Much of this data stays in the caches, but every step waits hundreds of cycles for
// its data.
#include "kernels/cuda/dot/frame.cuh"

namespace tessera {
namespace {

// Returns how many of n cells belong to this block: up to 2 * blockDim.x cells starting at *begin.
__device__ unsigned PartOf(std::int64_t n, std::int64_t* begin) {
  *begin = std::int64_t{2} * blockIdx.x * blockDim.x;
  return static_cast<unsigned>(min(n - *begin, std::int64_t{2} * blockDim.x));
}

// Sums cells[0, count) in place into cells[0]; count <= 2 * blockDim.x. All threads of the block
// see the cells' values before and after the call.
template <class F, class A>
__device__ void SumInPlace(A* cells, unsigned count) {
  const unsigned mine = 2 * threadIdx.x;
  for (unsigned stride = 1; stride < count; stride *= 2) {
    if (threadIdx.x % stride == 0 && mine + stride < count)
      cells[mine] = F::Combine(cells[mine], cells[mine + stride]);
    __syncthreads();  // multiples of 2 * stride are written, and the cells between have been read
  }
}

// The first level. cells[0, n) are scratch for the products.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    DotTreeGlobal(const T* a, const T* b, std::int64_t n, DotAcc<T>* cells, DotWide<T>* partials,
                  Scalar* result) {
  using F = DotFold<T>;
  std::int64_t begin = 0;
  const unsigned count = PartOf(n, &begin);
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x)
    cells[begin + i] = F::Multiply(a[begin + i], b[begin + i]);
  __syncthreads();  // the products of the block are written
  SumInPlace<F>(cells + begin, count);
  StoreBlock<F>(count == 0 ? DotWide<T>(0) : F::Widen(cells[begin]), n, partials, result);
}

// The later levels. cells[0, n) are the values of the previous level's blocks, and also serve as
// scratch.
template <class Wide>
__global__ void __launch_bounds__(kMostThreads)
    DotTreeGlobalLevel(Wide* cells, std::int64_t n, Wide* partials, Scalar* result) {
  using F = Fold<ReduceOp::kSum, Wide>;
  std::int64_t begin = 0;
  const unsigned count = PartOf(n, &begin);
  SumInPlace<F>(cells + begin, count);
  StoreBlock<F>(cells[begin], n, partials, result);
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const std::uint32_t block = BlockSize(p.launch);
  IntoLevelsInPlace(
      p, 2 * block, stream,
      [&](auto* a, auto* b, auto* cells, unsigned blocks, auto* partials, cudaStream_t on) {
        DotTreeGlobal<<<blocks, block, 0, on>>>(a, b, p.n, cells, partials, p.result);
      },
      [&](auto* cells, std::int64_t n, unsigned blocks, auto* partials, cudaStream_t on) {
        DotTreeGlobalLevel<<<blocks, block, 0, on>>>(cells, n, partials, p.result);
      });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotTreeGlobal = {
    .name = "tree_global",
    .summary = "a tree over the products in device memory, in place, one launch per level",
    .source = "tree reduction in device memory from the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = RoundoffOf<TreesInPlace>,
    .cost = CostOf<TreesInPlace>,
    .launch = Enqueue,
};

}  // namespace tessera
