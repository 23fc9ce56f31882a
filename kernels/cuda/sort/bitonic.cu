// Sort by a sorting network, with one block per row, in shared memory.
//
// Which elements a network compares does not depend on their values, so all threads compare at the
// same time, and no thread waits for the result of another (see the picture in top_k/bitonic.cuh).
// A network does not keep the order of equal keys. An entry therefore consists of a key and, in the
// lower bits, the element's index, so no two entries are equal.
//
// Every length is rounded up to a power of two, and a network for n entries has log2(n)
// (log2(n) + 1) / 2 rounds: it compares far more often than a merge sort. This pays off only
// because all comparisons of a round happen together.
//
// Cost for 1024 rows of 1024 elements, f32: 4 MiB read twice, 4 MiB and 8 MiB written; 55 rounds of
// 512 comparisons for each row.
//
// The kernel is correct for any n up to kMost: places without an element hold an entry that comes
// after all others.
#include <algorithm>

#include "kernels/cuda/sort/sort.cuh"
#include "kernels/cuda/top_k/bitonic.cuh"
#include "kernels/cuda/top_k/top_k.cuh"

namespace tessera {
namespace {

constexpr std::int64_t kMost = 4096;
constexpr int kMostSortThreads = 1024;

template <class Word>
__global__ void __launch_bounds__(kMostSortThreads)
    SortBitonicRows(SortArrays<Word> arrays, int size) {
  Entry<Word>* const entries = DynamicShared<Entry<Word>>();
  const int threads = static_cast<int>(blockDim.x), n = static_cast<int>(arrays.n);
  for (std::int64_t row = blockIdx.x; row < arrays.rows; row += gridDim.x) {
    for (int i = static_cast<int>(threadIdx.x); i < size; i += threads) {
      entries[i] =
          i < n ? MakeEntry<Word>(arrays.key(arrays.x[row * n + i]), static_cast<std::uint32_t>(i))
                : kNoEntry<Word>;
    }
    __syncthreads();  // all entries are stored
    SortBlock(entries, size);
    for (int j = static_cast<int>(threadIdx.x); j < n; j += threads)
      arrays.Store(row, j, PlaceOf(entries[j]));
    __syncthreads();  // the entries have been read
  }
}

template <class Word>
void Run(const SortProblem& p, CudaStream& stream) {
  const int size = SortedSize(p.n);
  LaunchTopK(
      SortBitonicRows<Word>, TopKBlocks(p.rows), std::clamp(size / 2, kWarpSize, kMostSortThreads),
      static_cast<std::size_t>(size) * sizeof(Entry<Word>), stream, SortArrays<Word>(p), size);
}

Cost CostOf(const SortProblem& p) {
  const auto bits = static_cast<std::uint64_t>(CeilLog2(p.n));
  const std::uint64_t rounds = bits * (bits + 1) / 2;
  const auto pairs = static_cast<std::uint64_t>(p.rows) * (std::uint64_t{1} << bits) / 2;
  return {.bytes = SortBytes(p, p.wants_values ? 1 : 0, 0),
          .flops = pairs * rounds * 4,
          .atomics = 0,
          .depth = rounds};
}

}  // namespace

extern constexpr Strategy<SortProblem> kSortBitonic = {
    .name = "bitonic",
    .summary = "one block per row compares pairs in shared memory, in a fixed order",
    .source = "bitonic sorting networks (Batcher, 1968)",
    .backend = Backend::kCuda,
    .min_compute_capability = 80,  // 64 KiB of shared memory for 4096 64-bit elements
    .deterministic = true,
    .roundoff = SortRoundoff,
    .cost = CostOf,
    .launch =
        [](const SortProblem& p, Stream& stream) {
          DispatchWord(p.dtype, [&](auto word) { Run<decltype(word)>(p, Cuda(stream)); });
        },
    .refuses = [](const SortProblem& p) -> std::string {
      return p.n <= kMost ? "" : "rows of at most 4096 elements";
    },
};

}  // namespace tessera
