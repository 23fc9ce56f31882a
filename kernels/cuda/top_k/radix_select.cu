// TopK by radix selection: the k-th key is found digit by digit, and the elements not above it are
// collected.
//
// Unlike in `bitonic_block`, only the result is sorted. Keys are 16-bit, 32-bit or 64-bit numbers.
// A first pass counts how many elements have each value of the upper 8-bit digit. Adding up the
// counts, starting with the smallest digit, gives the upper digit of the k-th key and the number of
// elements with that digit that are still needed. A second pass counts the next digit among these
// elements only, and so on. After as many passes as a key has digits, all bits of the k-th key are
// known.
//
//     k = 4, digits of 2 bits   00: 1   01: 2   10: 5   11: 9    the 4th key begins with 10, and is
//                               1       3       8                the 1st of those
//
// 1. For each digit, CountDigits runs with several blocks per row, and ChooseDigit with one block
//    per row.
// 2. CountTaken counts how many keys in each part of a row are below the k-th key and how many
//    equal it.
// 3. Collect takes the keys below the k-th key, and the first of the keys that equal it, as many as
//    are still needed. An element's place is the number of elements of the same kind before it in
//    the row. So places need no atomics, and the k elements are in two lists in the order of their
//    indices.
// 4. SortRows sorts them by key and place, with one block per row (bitonic.cuh).
//
// The threads of a block share 8 histograms in shared memory. With a single histogram, the counts
// of elements with the same digit would be serialized, and most arrays have few different upper
// digits.
//
// Cost for 16 rows of 2^16, k = 100, f32: x is read 6 times (24 MiB), the last 5 times from the L2
// cache; 11 launches. The data affects only how many threads update the same counter at the same
// time.
//
// The kernels are correct for any n: counts of parts are 32 bits wide, and sums over parts are 64
// bits wide. They are correct for any alignment, because loads are scalar. They are correct for any
// k, because k entries fit in shared memory (64 KiB for 64-bit keys).
#include "kernels/cuda/top_k/bitonic.cuh"
#include "kernels/cuda/top_k/top_k.cuh"

namespace tessera {
namespace {

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kThreads = kDigits;  // one per digit value, in all kernels but the last
constexpr int kHistograms = 8;     // per block
constexpr int kMostSortThreads = 1024;
constexpr std::int64_t kLeastPart = 1 << 14;  // minimum number of elements in a part
constexpr std::int64_t kBlocksEach = 8;       // desired number of blocks per SM

// The part of a row's k-th key that is known so far.
struct Choice {
  std::uint64_t prefix;   // the upper digits
  std::uint64_t missing;  // the key's rank, from 1, among the keys with this prefix
};

// The counts for a part of a row.
struct Taken {
  std::uint32_t below, equal;
};

struct RowParts {
  std::int64_t count;   // parts per row
  std::int64_t length;  // elements of each part but the last
};

RowParts MakeParts(const TopKProblem& p, int multiprocessors) {
  const std::int64_t wanted = CeilDiv(kBlocksEach * multiprocessors, p.rows);
  const std::int64_t least = CeilDiv(p.n, std::int64_t{1} << 31);
  const std::int64_t count = std::max(std::clamp<std::int64_t>(p.n / kLeastPart, 1, wanted), least);
  const std::int64_t length = CeilDiv(p.n, count);
  return {CeilDiv(p.n, length), length};
}

// Calls f(row, part, begin, end) for each of the block's parts.
template <class F>
__device__ void ForParts(std::int64_t rows, std::int64_t n, RowParts parts, F f) {
  for (std::int64_t work = blockIdx.x; work < rows * parts.count; work += gridDim.x) {
    const std::int64_t row = work / parts.count, part = work % parts.count;
    f(row, part, part * parts.length, min(n, (part + 1) * parts.length));
    __syncthreads();  // shared memory is free for the next part
  }
}

// Adds to histograms[row] the counts of the next digit of the keys that begin with the row's
// prefix. top: whether this is the first digit, for which there is no prefix yet.
template <class T>
__global__ void __launch_bounds__(kThreads)
    CountDigits(TopKArrays<T> arrays, RowParts parts, int shift, bool top, const Choice* choices,
                unsigned long long* histograms) {
  // The extra element puts a digit's counts into different banks.
  __shared__ std::uint32_t counts[kHistograms][kDigits + 1];
  const int thread = static_cast<int>(threadIdx.x);
  ForParts(arrays.rows, arrays.n, parts,
           [&](std::int64_t row, std::int64_t, std::int64_t begin, std::int64_t end) {
             for (auto& histogram : counts) histogram[thread] = 0;
             __syncthreads();  // all counts are zero
             const std::uint64_t prefix = top ? 0 : choices[row].prefix;
             std::uint32_t* const mine = counts[thread % kHistograms];
#pragma unroll 4
             for (std::int64_t i = begin + thread; i < end; i += kThreads) {
               const std::uint64_t upper = std::uint64_t{arrays.Key(row, i)} >> shift;
               if (top || upper >> kDigitBits == prefix) atomicAdd(mine + upper % kDigits, 1u);
             }
             __syncthreads();  // the part is counted
             std::uint32_t sum = 0;
             for (const auto& histogram : counts) sum += histogram[thread];
             if (sum > 0) atomicAdd(histograms + row * kDigits + thread, sum);
           });
}

// Appends the next digit to the prefix in choices[row], and sets histograms[row] to zero.
__global__ void __launch_bounds__(kThreads)
    ChooseDigit(std::int64_t rows, std::int64_t k, bool top, Choice* choices,
                unsigned long long* histograms) {
  __shared__ unsigned long long sums[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const Choice before = top ? Choice{0, static_cast<std::uint64_t>(k)} : choices[row];
    const unsigned long long count = histograms[row * kDigits + thread];
    histograms[row * kDigits + thread] = 0;
    unsigned long long sum = count;
    for (int reach = 1; reach < kThreads; reach *= 2) {
      sums[thread] = sum;
      __syncthreads();  // the sums over `reach` digits are stored
      if (thread >= reach) sum += sums[thread - reach];
      __syncthreads();  // the sums have been read
    }
    if (sum - count < before.missing && before.missing <= sum) {
      choices[row] = {before.prefix << kDigitBits | static_cast<std::uint64_t>(thread),
                      before.missing - (sum - count)};
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    CountTaken(TopKArrays<T> arrays, RowParts parts, const Choice* choices, Taken* taken) {
  __shared__ Taken sum;
  ForParts(arrays.rows, arrays.n, parts,
           [&](std::int64_t row, std::int64_t part, std::int64_t begin, std::int64_t end) {
             if (threadIdx.x == 0) sum = {0, 0};
             __syncthreads();  // sum is zero
             const auto pivot = static_cast<KeyOf<T>>(choices[row].prefix);
             Taken mine = {0, 0};
#pragma unroll 4
             for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
               const KeyOf<T> key = arrays.Key(row, i);
               mine.below += key < pivot;
               mine.equal += key == pivot;
             }
             if (mine.below > 0) atomicAdd(&sum.below, mine.below);
             if (mine.equal > 0) atomicAdd(&sum.equal, mine.equal);
             __syncthreads();  // sum is complete
             if (threadIdx.x == 0) taken[row * parts.count + part] = sum;
           });
}

// Returns the sum of the values of the threads before this thread. `all` receives the sum over all
// threads. `sums` is shared memory for one sum per warp.
__device__ inline std::uint32_t SumBefore(std::uint32_t value, std::uint32_t* sums,
                                          std::uint32_t& all) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  std::uint32_t sum = value;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const std::uint32_t before = __shfl_up_sync(kFullMask, sum, offset);
    if (lane >= offset) sum += before;
  }
  if (lane == kWarpSize - 1) sums[warp] = sum;
  __syncthreads();  // every warp's sum is stored
  std::uint32_t before = 0;
  all = 0;
#pragma unroll
  for (int w = 0; w < kThreads / kWarpSize; ++w) {
    if (w < warp) before += sums[w];
    all += sums[w];
  }
  __syncthreads();  // the sums have been read
  return before + sum - value;
}

// Writes indices[row * k + place]: first the indices of keys below the k-th key, then the indices
// of keys that equal it.
template <class T>
__global__ void __launch_bounds__(kThreads)
    Collect(TopKArrays<T> arrays, RowParts parts, const Choice* choices, const Taken* taken,
            std::int64_t* indices) {
  __shared__ unsigned long long before_below, before_equal;
  __shared__ std::uint32_t sums[kThreads / kWarpSize];
  ForParts(arrays.rows, arrays.n, parts,
           [&](std::int64_t row, std::int64_t part, std::int64_t begin, std::int64_t end) {
             if (threadIdx.x == 0) before_below = before_equal = 0;
             __syncthreads();  // the counts are zero
             for (std::int64_t p = threadIdx.x; p < part; p += kThreads) {
               const Taken other = taken[row * parts.count + p];
               if (other.below > 0) atomicAdd(&before_below, other.below);
               if (other.equal > 0) atomicAdd(&before_equal, other.equal);
             }
             __syncthreads();  // the counts of the previous parts are known
             std::uint64_t below = before_below, equal = before_equal;
             const auto pivot = static_cast<KeyOf<T>>(choices[row].prefix);
             const std::uint64_t missing = choices[row].missing;
             std::int64_t* const to = indices + row * arrays.k;
             for (std::int64_t first = begin; first < end; first += kThreads) {
               const std::int64_t i = first + threadIdx.x;
               const KeyOf<T> key = i < end ? arrays.Key(row, i) : KeyOf<T>{};
               const bool is_below = i < end && key < pivot;
               const bool is_equal = i < end && key == pivot && equal < missing;
               if (!__syncthreads_or(is_below || is_equal)) continue;
               // Both counts fit in one number, because each is at most kThreads.
               std::uint32_t all = 0;
               const std::uint32_t before = SumBefore(is_below | is_equal << 16, sums, all);
               if (is_below) to[below + (before & 0xffff)] = i;
               const std::uint64_t nth = equal + (before >> 16);
               if (is_equal && nth < missing)
                 to[static_cast<std::uint64_t>(arrays.k) - missing + nth] = i;
               below += all & 0xffff;
               equal += all >> 16;
             }
           });
}

// Sorts the k elements of a row. Elements with equal keys are already in the order of their
// indices.
template <class T>
__global__ void __launch_bounds__(kMostSortThreads)
    SortRows(TopKArrays<T> arrays, int size, const std::int64_t* indices) {
  Entry<T>* const entries = DynamicShared<Entry<T>>();
  const int threads = static_cast<int>(blockDim.x);
  for (std::int64_t row = blockIdx.x; row < arrays.rows; row += gridDim.x) {
    const std::int64_t* const from = indices + row * arrays.k;
    for (int j = static_cast<int>(threadIdx.x); j < size; j += threads) {
      entries[j] = j < arrays.k ? MakeEntry<T>(arrays.Key(row, from[j]), j) : kNoEntry<T>;
    }
    __syncthreads();  // all entries are stored
    SortBlock(entries, size);
    for (int j = static_cast<int>(threadIdx.x); j < arrays.k; j += threads)
      arrays.Store(row, j, from[PlaceOf(entries[j])]);
    __syncthreads();  // the entries have been read
  }
}

template <class T>
void Run(const TopKProblem& p, CudaStream& stream) {
  if (p.rows == 0) return;
  const TopKArrays<T> arrays(p);
  const RowParts parts = MakeParts(p, stream.device().info().multiprocessors);
  const auto rows = static_cast<std::size_t>(p.rows);
  const std::size_t histogram_bytes = rows * kDigits * sizeof(unsigned long long);
  auto* histograms = static_cast<unsigned long long*>(stream.Scratch(histogram_bytes));
  auto* choices = static_cast<Choice*>(stream.Scratch(rows * sizeof(Choice)));
  auto* taken = static_cast<Taken*>(
      stream.Scratch(rows * static_cast<std::size_t>(parts.count) * sizeof(Taken)));
  auto* indices = static_cast<std::int64_t*>(
      stream.Scratch(rows * static_cast<std::size_t>(p.k) * sizeof(std::int64_t)));
  const unsigned blocks = TopKBlocks(p.rows * parts.count), row_blocks = TopKBlocks(p.rows);

  CUDA_CHECK(cudaMemsetAsync(histograms, 0, histogram_bytes, stream.handle()));
  constexpr int kKeyBits = 8 * sizeof(T);
  for (int shift = kKeyBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
    const bool top = shift == kKeyBits - kDigitBits;
    LaunchTopK(CountDigits<T>, blocks, kThreads, 0, stream, arrays, parts, shift, top, choices,
               histograms);
    LaunchTopK(ChooseDigit, row_blocks, kThreads, 0, stream, p.rows, p.k, top, choices, histograms);
  }
  LaunchTopK(CountTaken<T>, blocks, kThreads, 0, stream, arrays, parts, choices, taken);
  LaunchTopK(Collect<T>, blocks, kThreads, 0, stream, arrays, parts, choices, taken, indices);
  const int size = SortedSize(p.k);
  LaunchTopK(SortRows<T>, row_blocks, std::clamp(size / 2, kWarpSize, kMostSortThreads),
             static_cast<std::size_t>(size) * sizeof(Entry<T>), stream, arrays, size, indices);
}

// The number of SMs of the largest GPU, for an upper bound. Launches use the device's number.
constexpr int kMostMultiprocessors = 192;

Cost CostOf(const TopKProblem& p) {
  const std::uint64_t digits = SizeOf(p.dtype);
  const auto elements = static_cast<std::uint64_t>(p.rows) * static_cast<std::uint64_t>(p.n);
  const auto bits = static_cast<std::uint64_t>(CeilLog2(p.k));
  return {.bytes = TopKBytes(p, digits + 2),
          .flops = (digits + 2) * elements,
          .atomics = 0,
          .depth = (digits + 2) * kLeastPart / kThreads + bits * bits};
}

std::uint64_t ScratchOf(const TopKProblem& p) {
  const RowParts parts = p.rows == 0 ? RowParts{0, 0} : MakeParts(p, kMostMultiprocessors);
  return static_cast<std::uint64_t>(p.rows) *
         (kDigits * sizeof(unsigned long long) + sizeof(Choice) +
          static_cast<std::uint64_t>(parts.count) * sizeof(Taken) +
          static_cast<std::uint64_t>(p.k) * sizeof(std::int64_t));
}

void Enqueue(const TopKProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<TopKProblem> kTopKRadixSelect = {
    .name = "radix_select",
    .summary =
        "finds the k-th key digit by digit, then collects and sorts the elements not above it",
    .source = "radix selection (Alabi et al., Fast K-Selection Algorithms for GPUs, 2012)",
    .backend = Backend::kCuda,
    .deterministic = true,
    .roundoff = TopKRoundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .scratch = ScratchOf,
};

}  // namespace tessera
