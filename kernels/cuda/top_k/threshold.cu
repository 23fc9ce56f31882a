// TopK with a threshold: x is read once, at memory bandwidth, with very little other work.
//
// `bitonic_block` sorts every element, and `radix_select` reads x six times. Here, most elements
// cost one comparison. The k-th best element so far is a limit, and elements are compared with it
// by value directly after they are loaded. In a random row of n elements, about k (1 + ln(n / k))
// elements pass. These are collected in shared memory (candidates.cuh), and all others are dropped.
//
//     x     .....|  part of a row: a block  |.....        one wave of blocks over all rows
//     tile       |t0|t1|t2|..|t0|t1|t2|..|                4 vectors of 16 bytes per thread
//                while one is compared, the next is in flight
//
// A block processes a part of a row, or a whole short row. It has only as many threads as it has
// work for, for example one warp for a row of 512 floats. If it has a part of a row, it stores the
// k best elements of the part, sorted, in device memory. The last block to count itself on the
// row's ticket merges the lists. With p parts and p j >= k, the worst of the parts' j-th best
// elements is a limit for the merge from the start. All lists are read at the same time, best
// entries first, so that a few entries of each list are usually enough.
//
// Cost for 16 rows of 2^16, k = 100, f32: one launch of 64 blocks, 4 per row, reads 4 MiB. Each
// block sorts 256 candidates two or three times, in 36 rounds of comparisons, and writes 800 bytes.
//
// The kernel is correct for any n and k, because there is no limit before k elements have been
// seen. It is correct for any alignment: the elements before the first whole vector and after the
// last one are single loads. The order in which threads run does not affect which elements are
// found, because candidates are compared by key and place.
#include "kernels/cuda/top_k/candidates.cuh"
#include "kernels/cuda/top_k/part.cuh"
#include "kernels/cuda/top_k/top_k.cuh"

namespace tessera {
namespace {

// The number of threads for which an SM has enough registers, at 64 registers per thread.
constexpr int kResidentThreads = 1024;
// Threads per block. At this size, four blocks fit on an SM and do not wait for each other. Four
// long lists do not fit, so blocks for long lists are larger, which also makes sorting faster.
constexpr int kFewThreads = 256;
constexpr std::int64_t kLeastTiles = 4;  // per part
constexpr std::int64_t kMostLength = std::int64_t{1} << 31;
constexpr int kMergeEach = 4;  // entries that a thread compares at a time in a merge
constexpr std::int64_t kMostParts = std::int64_t{kMergeEach} * kFewThreads;

struct Plan {
  int size;             // length of the list of the best
  int threads;          // per block
  std::int64_t parts;   // per row
  std::int64_t length;  // elements of each part but the last
};

Plan PlanOf(const TopKProblem& p, int multiprocessors) {
  Plan plan{};
  plan.size = SortedSize(p.k);
  const int most = std::clamp(plan.size / 2, kFewThreads, kResidentThreads);
  const std::int64_t each =
      kTileVectors * kVectorBytes / static_cast<std::int64_t>(SizeOf(p.dtype));
  const std::int64_t resident = std::int64_t{multiprocessors} * (kResidentThreads / most);
  const std::int64_t rows = std::max<std::int64_t>(1, p.rows);
  // `least` is the minimum number of elements in a part, and `limit` is the maximum number of parts
  // per row.
  const std::int64_t least = std::max(kLeastTiles * most * each, 4 * p.k);
  const std::int64_t limit = p.rows > static_cast<std::int64_t>(CudaStream::kTickets)
                                 ? 1
                                 : std::clamp<std::int64_t>(p.n / least, 1, kMostParts);
  // The time is proportional to the number of waves divided by the number of parts per row. The
  // best number of parts leaves the last wave full, but a smaller number is chosen if its time is
  // within 5 % of the best.
  const std::int64_t few =
      std::clamp<std::int64_t>(std::max(resident / rows, CeilDiv(p.n, kMostLength)), 1, limit);
  plan.parts = few;
  const auto waves = [&](std::int64_t parts) {
    return static_cast<double>(CeilDiv(rows * parts, resident)) / static_cast<double>(parts);
  };
  for (std::int64_t parts = few + 1; parts <= std::min(few + 7, limit); ++parts)
    if (waves(parts) < 0.95 * waves(plan.parts)) plan.parts = parts;
  plan.length = std::max<std::int64_t>(1, CeilDiv(p.n, plan.parts));
  plan.parts = std::max<std::int64_t>(1, CeilDiv(p.n, plan.length));
  plan.threads = most;
  while (plan.threads > kWarpSize && plan.threads / 2 * each >= plan.length) plan.threads /= 2;
  return plan;
}

// Loads, from the L2 cache, an entry that another block has written during this launch.
__device__ inline std::uint64_t LoadListed(const std::uint64_t* from) {
  return __ldcg(reinterpret_cast<const unsigned long long*>(from));
}
__device__ inline Bits128 LoadListed(const Bits128* from) {
  const auto words = __ldcg(reinterpret_cast<const ulonglong2*>(from));
  return static_cast<Bits128>(words.y) << 64 | words.x;
}

// Merges the lists of a row's parts. Entry j of part p is lists[j * parts + p], so that the best
// entries of all parts are adjacent. An entry's place is its index in the part.
template <class T>
__device__ void MergeParts(const TopKArrays<T>& arrays, const Plan& plan, std::int64_t row,
                           const Entry<T>* lists, Candidates<Entry<T>>& candidates,
                           Entry<T>* worst) {
  using E = Entry<T>;
  constexpr std::uint32_t kPlaces = 0xffffffffu;  // the bits of an entry's place
  const auto parts = static_cast<std::uint32_t>(plan.parts);
  const auto k = static_cast<std::uint32_t>(arrays.k);
  const std::uint32_t count = parts * k;
  const auto load = [&](std::uint32_t i) { return LoadListed(lists + i); };
  // At least k entries are not worse than the worst of all parts' entries at `level`.
  const std::uint32_t level = (k + parts - 1) / parts - 1;
  E limit = 0;
  for (std::uint32_t p = threadIdx.x; p < parts; p += blockDim.x) {
    const E entry = load(level * parts + p);
    if (limit < entry) limit = entry;
  }
  worst[threadIdx.x] = limit;
  __syncthreads();  // every thread's worst is stored
  for (std::uint32_t half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half && worst[threadIdx.x] < worst[threadIdx.x + half])
      worst[threadIdx.x] = worst[threadIdx.x + half];
    __syncthreads();  // the worse entry of each pair is stored
  }
  candidates.Lower(worst[0] | kPlaces);
  __syncthreads();  // all threads have read worst[0]

  for (std::uint32_t first = threadIdx.x; first - threadIdx.x < count;
       first += kMergeEach * blockDim.x) {
    E entries[kMergeEach];
#pragma unroll
    for (int e = 0; e < kMergeEach; ++e) {
      const std::uint32_t i = first + e * blockDim.x;
      entries[e] = i < count ? load(i) : kNoEntry<T>;
    }
    std::uint32_t pending = 0;
#pragma unroll
    for (int e = 0; e < kMergeEach; ++e) {
      if (entries[e] == kNoEntry<T>) continue;
      // Places are ordered like indices: part by part.
      const std::uint32_t i = first + e * blockDim.x;
      entries[e] = (entries[e] | kPlaces) ^ kPlaces ^ (i % parts * k + i / parts);
      if (entries[e] < candidates.limit()) pending |= 1u << e;
    }
    // This round has an entry of every part, and later entries of a part are no better.
    if (!__syncthreads_or(pending != 0)) break;
    candidates.Offer(pending, [&](int e) { return entries[e]; });
  }
  const E* const best = candidates.Sorted();
  for (std::uint32_t j = threadIdx.x; j < k; j += blockDim.x) {
    const std::uint32_t part = PlaceOf(best[j]) / k, nth = PlaceOf(best[j]) % k;
    arrays.Store(row, j, part * plan.length + PlaceOf(load(nth * parts + part)));
  }
}

template <class T>
__global__ void __launch_bounds__(kResidentThreads, 1)
    TopKThreshold(TopKArrays<T> arrays, Plan plan, Entry<T>* lists, std::uint32_t* tickets) {
  using E = Entry<T>;
  E* const entries = DynamicShared<E>();
  __shared__ std::uint32_t count;
  __shared__ bool last;
  const int k = static_cast<int>(arrays.k);
  for (std::int64_t work = blockIdx.x; work < arrays.rows * plan.parts; work += gridDim.x) {
    const std::int64_t row = work / plan.parts, part = work % plan.parts;
    const std::int64_t begin = part * plan.length;
    Candidates<E> candidates(entries, &count, k, plan.size);
    Part<T>(arrays.x + row * arrays.n + begin,
            static_cast<std::uint32_t>(min(plan.length, arrays.n - begin)), arrays.smallest)
        .OfferTo(candidates);
    const E* const best = candidates.Sorted();
    if (plan.parts == 1) {
      for (int j = static_cast<int>(threadIdx.x); j < k; j += static_cast<int>(blockDim.x))
        arrays.Store(row, j, PlaceOf(best[j]));
    } else {
      E* const own = lists + row * plan.parts * k;
      for (int j = static_cast<int>(threadIdx.x); j < k; j += static_cast<int>(blockDim.x))
        own[j * plan.parts + part] = best[j];
      __threadfence();  // this thread's entries are visible to other blocks
      __syncthreads();  // all threads are past the fence before the block is counted
      if (threadIdx.x == 0) {
        last = atomicAdd(tickets + row, 1u) == static_cast<std::uint32_t>(plan.parts - 1);
        if (last) tickets[row] = 0;
      }
      __syncthreads();  // last is written
      if (last) {
        __threadfence();  // the entries of blocks counted earlier are visible from here on
        Candidates<E> of_all(entries, &count, k, plan.size);
        MergeParts(arrays, plan, row, own, of_all, entries + plan.size);
      }
    }
    __syncthreads();  // shared memory is free for the next part
  }
}

template <class T>
void Run(const TopKProblem& p, CudaStream& stream) {
  if (p.rows == 0) return;
  const Plan plan = PlanOf(p, stream.device().info().multiprocessors);
  Entry<T>* lists = nullptr;
  std::uint32_t* tickets = nullptr;
  if (plan.parts > 1) {
    lists = static_cast<Entry<T>*>(
        stream.Scratch(static_cast<std::size_t>(p.rows * plan.parts * p.k) * sizeof(Entry<T>)));
    tickets = stream.Tickets();
  }
  LaunchTopK(TopKThreshold<T>, TopKBlocks(p.rows * plan.parts), plan.threads,
             static_cast<std::size_t>(plan.size + 2 * plan.threads) * sizeof(Entry<T>), stream,
             TopKArrays<T>(p), plan, lists, tickets);
}

// The number of SMs for which the cost is stated, and a maximum for all GPUs, for which the scratch
// memory is stated. Launches use the device's number.
constexpr int kUsualMultiprocessors = 132;
constexpr int kMostMultiprocessors = 192;

std::uint64_t ListBytes(const TopKProblem& p, const Plan& plan) {
  return plan.parts == 1
             ? 0
             : static_cast<std::uint64_t>(p.rows * plan.parts * p.k) * EntryBytes(p.dtype);
}

Cost CostOf(const TopKProblem& p) {
  const Plan plan = PlanOf(p, kUsualMultiprocessors);
  const auto elements = static_cast<std::uint64_t>(p.rows) * static_cast<std::uint64_t>(p.n);
  const auto bits = static_cast<std::uint64_t>(CeilLog2(plan.size) + 8);
  return {.bytes = TopKBytes(p, 1) + 2 * ListBytes(p, plan),
          .flops = elements,
          .atomics = plan.parts > 1 ? static_cast<std::uint64_t>(plan.parts) : 0,
          // A thread reads its elements and helps to sort a few buffers.
          .depth = static_cast<std::uint64_t>(plan.length / plan.threads) + 4 * bits * bits};
}

void Enqueue(const TopKProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<TopKProblem> kTopKThreshold = {
    .name = "threshold",
    .summary = "one pass, in which one comparison with the k-th best so far rejects most elements",
    .source =
        "WarpSelect (Johnson, Douze and Jegou, 2017) with a buffer per block instead of per thread",
    .backend = Backend::kCuda,
    .min_compute_capability = 80,  // 96 KiB of shared memory for 4096 64-bit elements
    .deterministic = true,
    .roundoff = TopKRoundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .scratch = [](const TopKProblem& p) { return ListBytes(p, PlanOf(p, kMostMultiprocessors)); },
};

}  // namespace tessera
