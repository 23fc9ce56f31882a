// SearchSorted with the top levels of the search in shared memory.
//
// Compared with `binary`, a block first copies a sample of x to shared memory: the last element of
// each of up to 2048 stretches of the same length. The search for a key among the samples finds the
// only stretch that can contain its position. It has 11 levels, whose loads take a fraction of the
// time of a load from the L1 cache. The search in the stretch is as in `binary`.
//
//     x         [ . . . s0 ][ . . . s1 ][ . . . s2 ] . .     the last stretch may be shorter,
//     samples          s0          s1          s2            and has no sample
//
// The samples of a block are worth loading only if the block looks up many more keys than there are
// samples. The grid is therefore fixed, and nearly fills the chip.
//
// Cost at 2^20 keys among 2^20 f32: 4 MiB of keys and 4 MiB of x read, 8 MiB written; each of up to
// 256 blocks reads 2048 sectors of x for the samples.
//
// The kernel is correct for any number of keys and elements: without samples, it is `binary`. Loads
// and stores are of single elements, so they are correct for any alignment.
#include <algorithm>

#include "kernels/cuda/search_sorted/search_sorted.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 512;
constexpr std::int64_t kSamples = 2048, kLeastKeys = 2 * kSamples;  // of a block

// stretch: the number of elements of x per sample. samples: the number of whole stretches.
template <class T>
__global__ void __launch_bounds__(kBlock)
    SearchTopLevels(const T* x, std::int64_t length, std::int64_t stretch, int samples,
                    const T* keys, std::int64_t n, bool right, std::int64_t* out) {
  using V = ValueOf<T>;
  __shared__ T sampled[kSamples];
  for (int i = static_cast<int>(threadIdx.x); i < samples; i += kBlock)
    sampled[i] = x[(i + 1) * stretch - 1];
  __syncthreads();  // the samples have been loaded
  const std::int64_t step = std::int64_t{gridDim.x} * kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < n; i += step) {
    const auto key = static_cast<V>(keys[i]);
    int low = 0, high = samples;  // all stretches before `low` come before the key
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ComesBefore(static_cast<V>(sampled[middle]), key, right)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    // If stretch `low` has a sample, the sample does not come before the key.
    const std::int64_t first = low * stretch;
    const std::int64_t last = low < samples ? first + stretch - 1 : length;
    out[i] = PlaceOfKey(x, first, last, key, right);
  }
}

std::int64_t Blocks(const SearchSortedProblem& p) {
  return std::clamp<std::int64_t>(CeilDiv(p.n, kLeastKeys), 1, kFixedGrid * 256 / kBlock);
}

void Enqueue(const SearchSortedProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  const std::int64_t stretch = std::max<std::int64_t>(1, CeilDiv(p.length, kSamples));
  DispatchElement(p.dtype, [&]<class T>(T) {
    SearchTopLevels<<<static_cast<unsigned>(Blocks(p)), kBlock, 0, cuda.handle()>>>(
        static_cast<const T*>(p.x), p.length, stretch, static_cast<int>(p.length / stretch),
        static_cast<const T*>(p.keys), p.n, p.right, p.out);
    CUDA_CHECK_LAUNCH(SearchTopLevels);
  });
}

}  // namespace

extern constexpr Strategy<SearchSortedProblem> kSearchSortedTopLevels = {
    .name = "top_levels",
    .summary = "a search among samples in shared memory, then a search between two samples",
    .source = "definition",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const SearchSortedProblem&) { return 0.0; },
    .cost =
        [](const SearchSortedProblem& p) {
          return CudaSearchSortedCost(p, CeilDiv(p.n, Blocks(p) * kBlock));
        },
    .launch = Enqueue,
};

}  // namespace tessera
