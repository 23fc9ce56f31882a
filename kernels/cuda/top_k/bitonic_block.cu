// TopK by sorting networks, with one block per row and a sorted list of the best elements so far in
// shared memory.
//
// Unlike in `heap_thread`, the threads of a block read adjacent elements of a row, and all of them
// do the same work. The length of the list is the smallest power of two that is at least k. The
// block loads a chunk of the row, sorts it, and merges it with the list. The list in reverse order,
// followed by the chunk, is a bitonic sequence, and the better element of each pair stays in the
// list (bitonic.cuh).
//
//     best  2 5 7 9    chunk, sorted  3 4 6 8    pairs 9-3 7-4 5-6 2-8    better  3 4 5 2
//                                                                         sorted  2 3 4 5
//
// Every element is sorted, which takes 55 rounds of comparisons for a chunk of 1024, although
// nearly all elements could be dropped after one comparison.
//
// Cost for 16 rows of 2^16, k = 100, f32: 4 MiB read by 16 blocks; 64 chunks per row, each with 55
// rounds to sort and 8 to merge; 2^16 * 32 comparisons per row.
//
// The kernel is correct for any k and n: places without an element (in a chunk, and initially in
// the list) hold an entry that comes after every element. It is correct for any alignment, because
// loads are scalar. Elements with equal keys are ordered by their indices, which are the lower bits
// of the compared numbers.
#include "kernels/cuda/top_k/bitonic.cuh"
#include "kernels/cuda/top_k/top_k.cuh"

namespace tessera {
namespace {

constexpr int kThreads = 512;
constexpr int kChunk = 2 * kThreads;

template <class T>
__global__ void __launch_bounds__(kThreads) TopKBitonicBlock(TopKArrays<T> arrays, int size) {
  using E = Entry<T>;
  E* const best = DynamicShared<E>();
  E* const chunk = best + size;
  const int thread = static_cast<int>(threadIdx.x);
  for (std::int64_t row = blockIdx.x; row < arrays.rows; row += gridDim.x) {
    for (int i = thread; i < size; i += kThreads) best[i] = kNoEntry<T>;
    for (std::int64_t first = 0; first < arrays.n; first += kChunk) {
#pragma unroll
      for (int i = thread; i < kChunk; i += kThreads) {
        const std::int64_t at = first + i;
        chunk[i] = at < arrays.n ? MakeEntry<T>(arrays.Key(row, at), static_cast<std::uint32_t>(at))
                                 : kNoEntry<T>;
      }
      __syncthreads();  // the chunk is complete
      SortBlock(chunk, kChunk);
      MergeBest(best, size, chunk, kChunk);
    }
    for (int j = thread; j < arrays.k; j += kThreads) arrays.Store(row, j, PlaceOf(best[j]));
    __syncthreads();  // the list has been read
  }
}

template <class T>
void Run(const TopKProblem& p, CudaStream& stream) {
  if (p.rows == 0) return;
  const int size = SortedSize(p.k);
  LaunchTopK(TopKBitonicBlock<T>, TopKBlocks(p.rows), kThreads,
             static_cast<std::size_t>(size + kChunk) * sizeof(Entry<T>), stream, TopKArrays<T>(p),
             size);
}

// Returns the number of rounds of comparisons for a chunk.
std::uint64_t Rounds(const TopKProblem& p) {
  const int bits = CeilLog2(kChunk);
  return static_cast<std::uint64_t>(bits * (bits + 1) / 2 + 1 + CeilLog2(SortedSize(p.k)));
}

Cost CostOf(const TopKProblem& p) {
  const auto chunks = static_cast<std::uint64_t>(CeilDiv(p.n, kChunk));
  const auto pairs = static_cast<std::uint64_t>(std::max(kChunk, SortedSize(p.k)) / 2);
  return {.bytes = TopKBytes(p, 1),
          .flops = static_cast<std::uint64_t>(p.rows) * chunks * pairs * Rounds(p),
          .atomics = 0,
          .depth = chunks * Rounds(p)};
}

void Enqueue(const TopKProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<TopKProblem> kTopKBitonicBlock = {
    .name = "bitonic_block",
    .summary = "one block per row sorts chunk after chunk and merges each with the best so far",
    .source = "bitonic sorting networks (Batcher, 1968)",
    .backend = Backend::kCuda,
    .min_compute_capability = 80,  // 80 KiB of shared memory for 4096 64-bit elements
    .deterministic = true,
    .roundoff = TopKRoundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .refuses = LongRowRefusal,
};

}  // namespace tessera
