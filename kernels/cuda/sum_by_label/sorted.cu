// SumByLabel without atomic additions: the rows are sorted by label, and threads then sum chunks.
//
// Compared with `atomic`, the order of the additions is fixed (kernels/same_bits/label_sums.h), and
// no sum is rounded to its type before it is complete. The price is the sort, which is Sort's
// `onesweep` of the labels with the numbers of their rows. Six kernels follow one another:
//
//     resolve   the label of each row, in the type in which labels are sorted
//     (sort)
//     bound     a thread per row: where the runs of equal labels begin and end
//     locate    a thread per window of 64 sorted rows: the complete chunk that begins in it
//     chunks    a thread per window and column: the sum of that chunk
//     groups    the same threads, where a complete group of 64 chunks begins: the sum of the group
//     labels    a thread per label and column: complete groups + complete chunks + remaining terms
//
// At most one complete chunk begins in a window, so partial sums need no list, and every thread of
// `chunks` has the same work, however the rows are distributed among the labels. Adjacent threads
// have adjacent columns, so the loads of rows of many elements coalesce; a row of one element takes
// a sector of 32 bytes. A thread has kBatch rows in flight.
//
// Cost at 2^20 f32 and 1024 labels: labels of 2 bytes are sorted in 2 passes with 4 bytes for each
// row's number; 32 MiB of sectors of x if nothing coalesces.
//
// The kernels are correct for any grid, because threads stride over it, and for any alignment,
// because loads and stores are scalar.
#include <algorithm>
#include <limits>

#include "kernels/cuda/sum_by_label/sum_by_label.cuh"

namespace tessera {

extern const Strategy<SortProblem> kSortOnesweep;

namespace {

// Calls f(i) for the elements i in [0, n) of this thread.
template <class F>
__device__ void ForThread(std::int64_t n, const F& f) {
  for (std::int64_t i = GridThread(); i < n; i += GridThreads()) f(i);
}

template <class I, class K>
__global__ void __launch_bounds__(kLabelBlock)
    ResolveLabels(TakeIndexes<I> labels, std::int64_t n, K* keys) {
  ForThread(n, [&](std::int64_t i) {
    const std::int64_t label = labels.Resolve(labels.Load(i), i, /*marks=*/true);
    keys[i] = static_cast<K>(label < 0 ? 0 : label);
  });
}

// Labels without rows keep the zeros that are in begin and end.
template <class K>
__global__ void __launch_bounds__(kLabelBlock)
    BoundRuns(const K* labels, std::int64_t n, std::int64_t* begin, std::int64_t* end) {
  ForThread(n, [&](std::int64_t k) {
    const K label = labels[k];
    if (k == 0 || labels[k - 1] != label) begin[label] = k;
    if (k + 1 == n || labels[k + 1] != label) end[label] = k + 1;
  });
}

// A window's complete chunk.
struct Chunk {
  std::int64_t at;  // the place where it begins, or -1
  bool group;       // whether a complete group begins with it
};

template <class K>
__global__ void __launch_bounds__(kLabelBlock)
    LocateChunks(LabelRuns runs, const K* labels, std::int64_t n, std::int64_t windows,
                 Chunk* chunks) {
  ForThread(windows, [&](std::int64_t w) {
    const std::int64_t last = min(n, (w + 1) * kLabelChunk) - 1;
    const auto label = static_cast<std::int64_t>(labels[last]);
    const std::int64_t at = runs.ChunkAt(last, label);
    chunks[w] = {at, at >= 0 && runs.BeginsGroup(at, label)};
  });
}

template <class T>
struct LabelArrays {
  LabelRuns runs;
  const T* x;
  std::int64_t inner;
  WideOf<T>* partial;  // [windows, inner]

  // Returns the sum of the rows at the places [begin, end), at most a chunk.
  __device__ WideOf<T> SumRows(std::int64_t begin, std::int64_t end, std::int64_t column) const {
    static_assert(kMaxChain == kLabelChunk);
    return FoldThread<Fold<ReduceOp::kSum, WideOf<T>>>(begin, end, 1, [&](std::int64_t k) {
      return LabelTerm(x[runs.sorted[k] * inner + column]);
    });
  }
  __device__ WideOf<T>* Partial(std::int64_t window, std::int64_t column) const {
    return partial + window * inner + column;
  }
};

// The row and the column of an element.
struct LabelPlace {
  std::int64_t row, column;

  __device__ LabelPlace(std::int64_t i, std::int64_t inner)
      : row(inner == 1 ? i : i / inner), column(i - row * inner) {}
};

template <class T>
__global__ void __launch_bounds__(kLabelBlock)
    SumChunks(LabelArrays<T> arrays, const Chunk* chunks, std::int64_t windows) {
  ForThread(windows * arrays.inner, [&](std::int64_t i) {
    const LabelPlace place(i, arrays.inner);
    const std::int64_t at = chunks[place.row].at;
    if (at >= 0) arrays.partial[i] = arrays.SumRows(at, at + kLabelChunk, place.column);
  });
}

// A group's sum replaces that of its first chunk, which no other thread reads.
template <class T>
__global__ void __launch_bounds__(kLabelBlock)
    SumGroups(LabelArrays<T> arrays, const Chunk* chunks, std::int64_t windows) {
  ForThread(windows * arrays.inner, [&](std::int64_t i) {
    const LabelPlace place(i, arrays.inner);
    if (!chunks[place.row].group) return;
    WideOf<T> sum = 0;
#pragma unroll 8
    for (std::int64_t j = 0; j < kLabelGroup; ++j)
      sum = WrapAdd(sum, arrays.partial[i + j * arrays.inner]);
    arrays.partial[i] = sum;
  });
}

template <class T>
__global__ void __launch_bounds__(kLabelBlock)
    SumLabels(LabelArrays<T> arrays, std::int64_t length, LabelSumOf<T>* out) {
  ForThread(length * arrays.inner, [&](std::int64_t i) {
    const LabelPlace place(i, arrays.inner);
    const std::int64_t end = arrays.runs.end[place.row];
    std::int64_t k = arrays.runs.begin[place.row];
    WideOf<T> all = 0, group = 0;
#pragma unroll 8
    for (; k + kLabelGroupTerms <= end; k += kLabelGroupTerms)
      all = WrapAdd(all, *arrays.Partial(k / kLabelChunk, place.column));
    for (; k + kLabelChunk <= end; k += kLabelChunk)
      group = WrapAdd(group, *arrays.Partial(k / kLabelChunk, place.column));
    group = WrapAdd(group, arrays.SumRows(k, end, place.column));
    out[i] = FinishLabelSum<T>(WrapAdd(all, group));
  });
}

// The blocks of a kernel with n elements of work.
unsigned BlocksFor(std::int64_t n) {
  return static_cast<unsigned>(std::clamp<std::int64_t>(CeilDiv(n, std::int64_t{kLabelBlock}), 1,
                                                        std::numeric_limits<std::int32_t>::max()));
}

template <class T>
T* Allocate(CudaStream& stream, std::int64_t count) {
  return static_cast<T*>(stream.Scratch(static_cast<std::size_t>(count) * sizeof(T)));
}

template <class T>
void Sum(const SumByLabelProblem& p, const LabelRuns& runs, const Chunk* chunks,
         CudaStream& stream) {
  const std::int64_t windows = LabelWindows(p);
  const LabelArrays<T> arrays = {runs, static_cast<const T*>(p.x), p.inner,
                                 Allocate<WideOf<T>>(stream, windows * p.inner)};
  const unsigned blocks = BlocksFor(windows * p.inner);
  SumChunks<<<blocks, kLabelBlock, 0, stream.handle()>>>(arrays, chunks, windows);
  CUDA_CHECK_LAUNCH(SumChunks);
  if (p.n >= kLabelGroupTerms) {
    SumGroups<<<blocks, kLabelBlock, 0, stream.handle()>>>(arrays, chunks, windows);
    CUDA_CHECK_LAUNCH(SumGroups);
  }
  SumLabels<<<BlocksFor(p.length * p.inner), kLabelBlock, 0, stream.handle()>>>(
      arrays, p.length, static_cast<LabelSumOf<T>*>(p.out));
  CUDA_CHECK_LAUNCH(SumLabels);
}

template <class K>
void Run(const SumByLabelProblem& p, CudaStream& stream) {
  K* const keys = Allocate<K>(stream, p.n);
  K* const labels = Allocate<K>(stream, p.n);
  auto* const rows = Allocate<std::int64_t>(stream, p.n);
  auto* const begin = Allocate<std::int64_t>(stream, 2 * p.length);
  std::int64_t* const end = begin + p.length;
  const std::int64_t windows = LabelWindows(p);
  auto* const chunks = Allocate<Chunk>(stream, windows);
  const unsigned blocks = BlocksFor(p.n);
  LaunchWithLabels(p, stream, [&](const auto& indices) {
    ResolveLabels<<<blocks, kLabelBlock, 0, stream.handle()>>>(indices, p.n, keys);
    CUDA_CHECK_LAUNCH(ResolveLabels);
  });
  SortProblem sort = LabelSort(p);
  sort.x = keys;
  sort.values = labels;
  sort.indices = rows;
  kSortOnesweep.launch(sort, stream);
  stream.Zero(begin, static_cast<std::size_t>(2 * p.length) * sizeof *begin);
  BoundRuns<<<blocks, kLabelBlock, 0, stream.handle()>>>(labels, p.n, begin, end);
  CUDA_CHECK_LAUNCH(BoundRuns);
  const LabelRuns runs = {rows, begin, end};
  LocateChunks<<<BlocksFor(windows), kLabelBlock, 0, stream.handle()>>>(runs, labels, p.n, windows,
                                                                        chunks);
  CUDA_CHECK_LAUNCH(LocateChunks);
  DispatchElement(p.dtype, [&]<class T>(T) { Sum<T>(p, runs, chunks, stream); });
}

}  // namespace

extern constexpr Strategy<SumByLabelProblem> kSumByLabelSorted = {
    .name = "sorted",
    .summary = "sorts the rows by label and sums chunks of rows with the same label",
    .source = "sort by key and segmented sums",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = LabelRoundoff,
    .cost =
        [](const SumByLabelProblem& p) {
          const Cost sort = kSortOnesweep.cost(LabelSort(p));
          Cost cost = LabelCost(p, 0, 0, 0);
          cost.bytes += sort.bytes;
          cost.flops += sort.flops;
          cost.depth = sort.depth + static_cast<std::uint64_t>(2 * kLabelChunk + kLabelGroup +
                                                               p.n / kLabelGroupTerms);
          return cost;
        },
    .launch =
        [](const SumByLabelProblem& p, Stream& stream) {
          DispatchSortedLabel(p.length, [&]<class K>(K) { Run<K>(p, Cuda(stream)); });
        },
    .refuses = [](const SumByLabelProblem& p) { return kSortOnesweep.refuses(LabelSort(p)); },
    .scratch =
        [](const SumByLabelProblem& p) {
          return LabelRunBytes(p, sizeof(Chunk)) + kSortOnesweep.scratch(LabelSort(p));
        },
};

}  // namespace tessera
