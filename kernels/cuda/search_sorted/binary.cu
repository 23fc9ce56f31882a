// SearchSorted with one thread for each key.
//
// A search is a chain of loads (28 for 2^28 elements), each of which waits for the comparison
// before it. The chip hides this latency with the searches of many other threads. All searches
// begin with the same few elements, which the caches hold, so only the loads of the last levels go
// to memory. If the keys are also sorted, adjacent threads load the same elements at almost all
// levels.
//
// Cost at 2^20 keys among 2^20 f32: 4 MiB of keys and 4 MiB of x read, 8 MiB written.
//
// The kernel is correct for any number of keys and elements, because PlaceOfKey is, and for any
// alignment, because loads and stores are of single elements.
#include "kernels/cuda/search_sorted/search_sorted.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

template <class T>
__global__ void __launch_bounds__(kMostThreads)
    SearchBinary(const T* x, std::int64_t length, const T* keys, std::int64_t n, bool right,
                 std::int64_t* out) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step)
    out[i] = PlaceOfKey(x, 0, length, static_cast<ValueOf<T>>(keys[i]), right);
}

void Enqueue(const SearchSortedProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  const Grid grid = MakeGrid(p.n, p.launch, kBlock, 1);
  DispatchElement(p.dtype, [&]<class T>(T) {
    SearchBinary<<<grid.blocks, grid.block_size, 0, cuda.handle()>>>(
        static_cast<const T*>(p.x), p.length, static_cast<const T*>(p.keys), p.n, p.right, p.out);
    CUDA_CHECK_LAUNCH(SearchBinary);
  });
}

}  // namespace

extern constexpr Strategy<SearchSortedProblem> kSearchSortedBinary = {
    .name = "binary",
    .summary = "one thread for each key, with a binary search",
    .source = "definition",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = kAnyGridSize},
    .roundoff = [](const SearchSortedProblem&) { return 0.0; },
    .cost =
        [](const SearchSortedProblem& p) {
          return CudaSearchSortedCost(p, MakeGrid(p.n, p.launch, kBlock, 1).per_thread);
        },
    .launch = Enqueue,
};

}  // namespace tessera
