// Select with two passes over the mask.
//
// The destination of an element is the number of selected elements before it, so no thread can
// store anything before the elements of earlier tiles are counted. The first launch counts the
// selected elements of each tile of 4096, the second replaces each count with the sum of all
// earlier counts, and the third reads the mask again and stores the elements (Billeter, Olsson and
// Assarsson, Efficient Stream Compaction on Wide SIMD Many-Core Architectures, 2009).
//
// Cost at n = 2^20, f32, half of them selected: 1 MiB of mask, twice, and 4 MiB of x read, because
// almost every sector has a selected element; 2 MiB written; 2 KiB of counts; 3 launches.
//
// The kernels are correct for any n, because elements beyond the end are not selected, and for any
// alignment, because loads and stores are of single elements.
#include "kernels/cuda/select/select.cuh"

namespace tessera {
namespace {

using Sum = Fold<ReduceOp::kSum, std::int64_t>;

__global__ void __launch_bounds__(kSelectThreads)
    CountTiles(const std::uint8_t* mask, std::int64_t n, std::int64_t* counts) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kSelectTile + threadIdx.x;
  std::int64_t count = 0, all;
#pragma unroll
  for (int j = 0; j < kSelectEach; ++j) {
    const std::int64_t i = first + j * kSelectThreads;
    count += i < n && __ldg(mask + i) != 0 ? 1 : 0;
  }
  ScanBlock<Sum>(count, &all);
  if (threadIdx.x == 0) counts[blockIdx.x] = all;
}

// One block replaces each count with the sum of the counts before it.
__global__ void __launch_bounds__(kMostThreads) ScanCounts(std::int64_t* counts, std::int64_t n) {
  std::int64_t base = 0;
  for (std::int64_t first = 0; first < n; first += blockDim.x) {
    const std::int64_t i = first + threadIdx.x;
    std::int64_t all;
    const std::int64_t before = ScanBlock<Sum>(i < n ? counts[i] : std::int64_t{0}, &all);
    if (i < n) counts[i] = base + before;
    base += all;
    __syncthreads();  // the warps' totals of this round have been read
  }
}

// starts: for each tile, the number of selected elements before it.
template <class E>
__global__ void __launch_bounds__(kSelectThreads)
    StoreTiles(SelectArrays<E> arrays, const std::int64_t* starts) {
  __shared__ typename SelectTile<E>::Shared shared;
  SelectTile<E> tile(arrays, blockIdx.x, shared);
  tile.Load();
  tile.Store(starts[blockIdx.x]);
}

std::uint64_t ScratchOf(const SelectProblem& p) {
  return static_cast<std::uint64_t>(SelectTiles(p)) * sizeof(std::int64_t);
}

void Enqueue(const SelectProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  auto* const counts = static_cast<std::int64_t*>(cuda.Scratch(ScratchOf(p)));
  const auto tiles = static_cast<unsigned>(SelectTiles(p));
  CountTiles<<<tiles, kSelectThreads, 0, cuda.handle()>>>(static_cast<const std::uint8_t*>(p.mask),
                                                          p.n, counts);
  CUDA_CHECK_LAUNCH(CountTiles);
  ScanCounts<<<1, kMostThreads, 0, cuda.handle()>>>(counts, tiles);
  CUDA_CHECK_LAUNCH(ScanCounts);
  DispatchSize(p.dtype, [&]<class E>(E) {
    StoreTiles<<<tiles, kSelectThreads, 0, cuda.handle()>>>(SelectArrays<E>(p), counts);
    CUDA_CHECK_LAUNCH(StoreTiles);
  });
}

}  // namespace

extern constexpr Strategy<SelectProblem> kSelectTwoPass = {
    .name = "two_pass",
    .summary = "counts the mask in tiles, scans the counts, and reads the mask again",
    .source =
        "Billeter, Olsson and Assarsson, Efficient Stream Compaction on Wide SIMD Many-Core "
        "Architectures, 2009",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const SelectProblem&) { return 0.0; },
    .cost =
        [](const SelectProblem& p) {
          const std::int64_t rounds = CeilDiv(SelectTiles(p), kMostThreads);
          return CudaSelectCost(p, 2, 3 * kSelectEach + 16 * static_cast<std::uint64_t>(rounds));
        },
    .launch = Enqueue,
    .refuses = SelectRefuses,
    .scratch = ScratchOf,
};

}  // namespace tessera
