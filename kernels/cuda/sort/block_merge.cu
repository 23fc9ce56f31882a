// Sort by merging, with many blocks per row.
//
// Compared with `bitonic`, a row may have any length: blocks sort tiles of kTile elements, and then
// merge pairs of sorted runs into runs that are twice as long. Many blocks merge one run, and the
// threads of a block merge one tile, without waiting for each other: the merge path tells which
// elements of both runs are the first d of the merged order.
//
//               b0 b1 b2 b3       A step along the path takes the next element of a (down) or of b
//          a0 ---+                (right). The path crosses each diagonal d = i + j once, at the i
//          a1    +--+             for which a[i - 1] < b[j] and b[j - 1] < a[i]. A binary search
//          a2       |             along the diagonal finds it.
//          a3       +-----
//
// An entry consists of a key and, in its lower bits, the element's index, so no two entries are
// equal, and the order of equal elements is kept.
//
// Cost at n = 2^20, f32, one row: tiles are sorted by 66 rounds of comparisons; 9 merges, each of
// which reads and writes 8 MiB of entries; 11 launches.
//
// The kernels are correct for any n: the last tile and the last run may be shorter, and a run
// without a partner is merged with nothing.
#include <algorithm>
#include <utility>

#include "kernels/cuda/sort/sort.cuh"
#include "kernels/cuda/top_k/bitonic.cuh"
#include "kernels/cuda/top_k/top_k.cuh"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int kItems = 8;
constexpr int kTile = kThreads * kItems;

// Calls f(row, first) for the first element of each of the block's tiles.
template <class F>
__device__ void ForTiles(std::int64_t rows, std::int64_t n, F f) {
  const std::int64_t tiles = CeilDiv(n, kTile);
  for (std::int64_t tile = blockIdx.x; tile < rows * tiles; tile += gridDim.x) {
    f(tile / tiles, tile % tiles * kTile);
    __syncthreads();  // shared memory is free for the next tile
  }
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    SortTiles(SortArrays<Word> arrays, Entry<Word>* sorted) {
  __shared__ Entry<Word> entries[kTile];
  const std::int64_t n = arrays.n;
  ForTiles(arrays.rows, n, [&](std::int64_t row, std::int64_t first) {
    for (int i = static_cast<int>(threadIdx.x); i < kTile; i += kThreads) {
      const std::int64_t at = first + i;
      entries[i] = at < n ? MakeEntry<Word>(arrays.key(arrays.x[row * n + at]),
                                            static_cast<std::uint32_t>(at))
                          : kNoEntry<Word>;
    }
    __syncthreads();  // all entries are stored
    SortBlock(entries, kTile);
    for (int i = static_cast<int>(threadIdx.x); i < kTile && first + i < n; i += kThreads)
      sorted[row * n + first + i] = entries[i];
  });
}

// Returns how many of the first `diagonal` entries of the merged order come from a.
template <class E, class Index>
__device__ Index MergePath(const E* a, Index a_count, const E* b, Index b_count, Index diagonal) {
  Index low = diagonal > b_count ? diagonal - b_count : 0;
  Index high = diagonal < a_count ? diagonal : a_count;
  while (low < high) {
    const Index middle = (low + high) / 2;
    if (a[middle] < b[diagonal - 1 - middle]) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Merges entries[0, a_count) with the b_count entries after them, in place.
template <class E>
__device__ void MergeTile(E* entries, int a_count, int b_count) {
  const E *const a = entries, *const b = entries + a_count;
  const int all = a_count + b_count;
  const int begin = min(static_cast<int>(threadIdx.x) * kItems, all);
  int i = MergePath(a, a_count, b, b_count, begin);
  int j = begin - i;
  E merged[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (begin + k >= all) break;
    const bool from_a = j == b_count || (i < a_count && a[i] < b[j]);
    merged[k] = from_a ? a[i++] : b[j++];
  }
  __syncthreads();  // both runs have been read
#pragma unroll
  for (int k = 0; k < kItems; ++k)
    if (begin + k < all) entries[begin + k] = merged[k];
  __syncthreads();  // the tile is merged
}

// Merges runs of `width` entries in pairs. A block writes a tile of a merged run.
template <class E>
__global__ void __launch_bounds__(kThreads)
    MergeRuns(const E* from, E* to, std::int64_t rows, std::int64_t n, std::int64_t width) {
  __shared__ E entries[kTile];
  __shared__ std::int64_t splits[2];
  ForTiles(rows, n, [&](std::int64_t row, std::int64_t first) {
    const std::int64_t pair = first / (2 * width) * (2 * width);
    const E* const a = from + row * n + pair;
    const std::int64_t a_count = min(width, n - pair);
    const std::int64_t b_count = min(width, n - pair - a_count);
    const E* const b = a + a_count;
    const std::int64_t begin = first - pair;
    const std::int64_t end = min(begin + kTile, a_count + b_count);
    if (threadIdx.x < 2)
      splits[threadIdx.x] = MergePath(a, a_count, b, b_count, threadIdx.x == 0 ? begin : end);
    __syncthreads();  // the ends of the tile's path are known
    const std::int64_t a_first = splits[0], b_first = begin - a_first;
    const auto of_a = static_cast<int>(splits[1] - a_first);
    const auto all = static_cast<int>(end - begin);
    for (int i = static_cast<int>(threadIdx.x); i < all; i += kThreads)
      entries[i] = i < of_a ? a[a_first + i] : b[b_first + i - of_a];
    __syncthreads();  // the parts of both runs have been stored
    MergeTile(entries, of_a, all - of_a);
    for (int i = static_cast<int>(threadIdx.x); i < all; i += kThreads)
      to[row * n + first + i] = entries[i];
  });
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    StoreSorted(SortArrays<Word> arrays, const Entry<Word>* sorted) {
  const std::int64_t n = arrays.n;
  for (std::int64_t i = GridThread(); i < arrays.rows * n; i += GridThreads())
    arrays.Store(i / n, i % n, PlaceOf(sorted[i]));
}

template <class Word>
void Run(const SortProblem& p, CudaStream& stream) {
  using E = Entry<Word>;
  const SortArrays<Word> arrays(p);
  const std::size_t bytes = static_cast<std::size_t>(p.elements()) * sizeof(E);
  auto* now = static_cast<E*>(stream.Scratch(bytes));
  auto* next = static_cast<E*>(p.n > kTile ? stream.Scratch(bytes) : nullptr);
  const unsigned blocks = TopKBlocks(p.rows * CeilDiv(p.n, kTile));
  LaunchTopK(SortTiles<Word>, blocks, kThreads, 0, stream, arrays, now);
  for (std::int64_t width = kTile; width < p.n; width *= 2) {
    LaunchTopK(MergeRuns<E>, blocks, kThreads, 0, stream, now, next, p.rows, p.n, width);
    std::swap(now, next);
  }
  LaunchTopK(StoreSorted<Word>, blocks, kThreads, 0, stream, arrays, now);
}

std::uint64_t Merges(const SortProblem& p) {
  return static_cast<std::uint64_t>(CeilLog2(CeilDiv(p.n, kTile)));
}

Cost CostOf(const SortProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.elements());
  constexpr std::uint64_t kBits = 11, kRounds = kBits * (kBits + 1) / 2;
  const std::uint64_t entries = n * EntryBytes(p.dtype);
  return {.bytes = SortBytes(p, p.wants_values ? 1 : 0, 0) + (2 * Merges(p) + 2) * entries,
          .flops = n * (2 * kRounds + 8 * Merges(p)),
          .atomics = 0,
          .depth = kRounds * 4 + Merges(p) * 64};
}

}  // namespace

extern constexpr Strategy<SortProblem> kSortBlockMerge = {
    .name = "block_merge",
    .summary = "blocks sort tiles, and merge runs of tiles along their merge path",
    .source = "Green, McColl and Bader, GPU Merge Path: A GPU Merging Algorithm, 2012",
    .backend = Backend::kCuda,
    .deterministic = true,
    .roundoff = SortRoundoff,
    .cost = CostOf,
    .launch =
        [](const SortProblem& p, Stream& stream) {
          DispatchWord(p.dtype, [&](auto word) { Run<decltype(word)>(p, Cuda(stream)); });
        },
    .refuses = [](const SortProblem& p) -> std::string {
      return p.n < std::int64_t{0xffffffff} ? "" : "rows of fewer than 2^32 - 1 elements";
    },
    .scratch =
        [](const SortProblem& p) {
          return (p.n > kTile ? 2 : 1) * static_cast<std::uint64_t>(p.elements()) *
                 EntryBytes(p.dtype);
        },
};

}  // namespace tessera
