// Batches on a GPU: a block a problem, in one launch. A problem is one chunk of the tree of
// kernels/fixed_tree.h, so that its block folds it as `fixed_tree` does, and no block has to meet
// another. Where no problem has more than a row of the tree, each has a warp, whose threads take eight
// lanes each: eight times as many problems are under way at once.
//
// Problems of one length that lie at one distance from each other, as slices of an array do, are known
// by the first one and the distance. Others stand in a table in page-locked host memory, whose lines a
// block fetches at once: those of all its warps, or, where there are more problems than blocks that
// run at a time, of up to four problems that it folds one after the other. A read over PCIe takes
// longer than to fold a short problem, and a longer one does not take longer. Results go straight to
// host memory: there is no copy before or after the launch.
//
// Cost of 1000 Dots of 4096 f32: 32 MB read by 1000 blocks, each of which has all of its 32 KiB in
// flight; 24 KB of results over PCIe, and 32 KB of table where there is one.
#include "kernels/batch.h"

#include <algorithm>

#include "kernels/cuda/tree/kernel.cuh"

namespace tessera {
namespace {

static_assert(kBatchBytes == kShortRows * kTreeRowBytes);

// A line of the table, in words of 16 bytes, as which a block fetches it.
template <class C>
struct alignas(sizeof(uint4)) BatchItem {
  TreeOperands<C> in;
  std::int64_t n;
  Scalar* result;
};

// The problems of a launch: lines of a table, or, where `table` is null, the first one and how many
// bytes each operand lies behind that of the problem before. Results follow each other then.
template <class C>
struct Batch {
  const BatchItem<C>* table;
  BatchItem<C> first;
  std::ptrdiff_t apart[C::kOperands];
  unsigned count;

  __host__ __device__ BatchItem<C> At(unsigned number) const {
    BatchItem<C> item = first;
    for (int o = 0; o < C::kOperands; ++o)
      item.in.x[o] = reinterpret_cast<const typename C::Element*>(
          reinterpret_cast<std::uintptr_t>(first.in.x[o]) +
          static_cast<std::uintptr_t>(apart[o]) * number);
    item.result += number;
    return item;
  }
};

// Of a table, the block's `count` lines from `first` on, which all its threads fetch together.
template <class C, unsigned kMost>
__device__ const BatchItem<C>* FetchLines(const Batch<C>& batch, unsigned first, unsigned count) {
  constexpr unsigned kWords = sizeof(BatchItem<C>) / sizeof(uint4);
  __shared__ uint4 words[kMost * kWords];
  if (batch.table == nullptr) return nullptr;
  if (threadIdx.x < count * kWords)
    words[threadIdx.x] = reinterpret_cast<const uint4*>(batch.table + first)[threadIdx.x];
  __syncthreads();  // the lines are there
  return reinterpret_cast<const BatchItem<C>*>(words);
}

constexpr unsigned kMostEach = 4;  // problems of a block, one after the other

// Problems of up to so many rows have a kernel that loads no more of them at once, which leaves
// registers for a third block of an SM.
constexpr int kFewRows = kShortRows / 2;

template <class C, int kRows>
constexpr int BatchBlocks() {
  constexpr std::size_t kBytes =
      C::kOperands * sizeof(typename C::Column) * kTreeVector<typename C::Element>;
  return kRows <= kFewRows && kBytes <= 32 ? 3 : 2;
}

// `each` problems a block, of up to kRows rows.
template <class C, int kRows>
__global__ void __launch_bounds__(kTreeLanes, BatchBlocks<C, kRows>())
    FoldBatch(const Batch<C> batch, unsigned each, ReduceOp op, bool mirror) {
  const unsigned first = blockIdx.x * each, count = min(each, batch.count - first);
  const BatchItem<C>* const lines = FetchLines<C, kMostEach>(batch, first, count);
#pragma unroll 1
  for (unsigned i = 0; i < count; ++i) {
    if (i > 0) __syncthreads();  // the cells of the problem before are read
    const BatchItem<C> item = lines == nullptr ? batch.At(first + i) : lines[i];
    FoldArray<C, kRows>(item.in, item.n, op, mirror, item.result);
  }
}

// One array of up to a row, by all threads of a warp. The first one leaves the result.
template <class C>
__device__ void FoldRow(const TreeOperands<C>& in, std::int64_t n, ReduceOp op, bool mirror,
                        Scalar* result) {
  using T = typename C::Element;
  constexpr int V = kTreeVector<T>;
  constexpr int O = C::kOperands;
  TreeWork work = {};
  work.mirror = mirror;
  const int end = static_cast<int>(n), thread = static_cast<int>(threadIdx.x % kWarpSize);
  std::uintptr_t places = 0;
#pragma unroll
  for (const auto* x : in.x) places |= reinterpret_cast<std::uintptr_t>(x);
  const bool aligned = places % kTreeVectorBytes == 0;
  // Vectors of which not all elements exist, or which are not aligned, are taken one by one.
  const auto first = [&](int i) { return (thread + i * kWarpSize) * V; };
  const auto whole = [&](int i) { return aligned && first(i) + V <= end; };
  TreeVectorOf<T> v[kLanesEach][O];
#pragma unroll
  for (int i = 0; i < kLanesEach; ++i)
#pragma unroll
    for (int o = 0; o < O; ++o)
      if (whole(i)) v[i][o] = VectorIn<T>(LoadVector<C, true>(in.x[o] + first(i)), 0);
  typename C::Wide lanes[kLanesEach];
#pragma unroll
  for (int i = 0; i < kLanesEach; ++i) {
    typename C::Column column[V];
#pragma unroll
    for (int k = 0; k < V; ++k) column[k] = C::Start(whole(i) ? v[i][0].element[k] : T{});
    if (whole(i)) {
#pragma unroll
      for (int k = 0; k < V; ++k) StepElement<C>(column[k], v[i], k, 0, mirror);
    } else if (first(i) < end) {
      FoldRest<C>(in, work, column, first(i), end, 0);
    }
    lanes[i] = C::Combine(C::Identity(), FoldColumns<C>(column, first(i), end));
  }
  const typename C::Wide value = FoldLanes<C>(lanes);
  if (thread == 0) C::Finish(value, op, n, mirror, result);
}

constexpr unsigned kWarps = 8;  // of a block

// A problem a warp.
template <class C>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    FoldRows(const Batch<C> batch, ReduceOp op, bool mirror) {
  const unsigned first = blockIdx.x * kWarps, warp = threadIdx.x / kWarpSize;
  const BatchItem<C>* const lines =
      FetchLines<C, kWarps>(batch, first, min(kWarps, batch.count - first));
  if (first + warp >= batch.count) return;
  const BatchItem<C> item = lines == nullptr ? batch.At(first + warp) : lines[warp];
  FoldRow<C>(item.in, item.n, op, mirror, item.result);
}

template <class C>
bool operator==(const BatchItem<C>& one, const BatchItem<C>& other) {
  return std::ranges::equal(one.in.x, other.in.x) && one.n == other.n && one.result == other.result;
}

template <class C, class Problem, class OperandsOf>
void Enqueue(std::span<const Problem> problems, ReduceOp op, const OperandsOf& operands,
             CudaStream& stream) {
  const auto item = [&](std::size_t i) {
    return BatchItem<C>{operands(problems[i]), problems[i].n, problems[i].result};
  };
  Batch<C> batch = {.first = item(0), .count = static_cast<unsigned>(problems.size())};
  if (batch.count > 1) {
    const BatchItem<C> second = item(1);
    for (int o = 0; o < C::kOperands; ++o)
      batch.apart[o] =
          static_cast<std::ptrdiff_t>(reinterpret_cast<std::uintptr_t>(second.in.x[o]) -
                                      reinterpret_cast<std::uintptr_t>(batch.first.in.x[o]));
  }
  unsigned even = 1;  // so many lie as the first two do
  while (even < batch.count && item(even) == batch.At(even)) ++even;
  std::int64_t longest = batch.first.n;
  if (even < batch.count) {
    auto* const table =
        static_cast<BatchItem<C>*>(stream.HostScratch(problems.size() * sizeof(BatchItem<C>)));
    for (std::size_t i = 0; i < problems.size(); ++i) {
      table[i] = item(i);
      longest = std::max(longest, table[i].n);
    }
    batch.table = table;
  }
  if (longest <= kTreeRow<typename C::Element>) {
    FoldRows<C><<<(batch.count + kWarps - 1) / kWarps, kWarps * kWarpSize, 0, stream.handle()>>>(
        batch, op, IsMirrored(op));
  } else {
    // Blocks of an SM that there are before any of them takes several problems.
    constexpr unsigned kBlocksOfSm = 8;
    const auto multiprocessors = static_cast<unsigned>(stream.device().info().multiprocessors);
    const unsigned each =
        batch.table == nullptr
            ? 1u
            : std::clamp(batch.count / (kBlocksOfSm * multiprocessors), 1u, kMostEach);
    const auto kernel = longest <= kFewRows * kTreeRow<typename C::Element>
                            ? FoldBatch<C, kFewRows>
                            : FoldBatch<C, kShortRows>;
    kernel<<<(batch.count + each - 1) / each, kTreeLanes, 0, stream.handle()>>>(batch, each, op,
                                                                                IsMirrored(op));
  }
  CUDA_CHECK_LAUNCH(FoldBatch);
}

}  // namespace

void LaunchBatchCuda(std::span<const DotProblem> problems, Stream& stream) {
  if (problems.empty()) return;
  DispatchDType(problems.front().dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = decltype(DotColumnsType<T, false>());
    Enqueue<C>(
        problems, ReduceOp::kSum,
        [](const DotProblem& p) {
          return TreeOperands<C>{{static_cast<const T*>(p.a), static_cast<const T*>(p.b)}};
        },
        Cuda(stream));
  });
}

void LaunchBatchCuda(std::span<const ReduceProblem> problems, Stream& stream) {
  if (problems.empty()) return;
  DispatchDType(problems.front().dtype, [&](auto zero) {
    using T = decltype(zero);
    DispatchColumns<T, false>(problems.front().op, [&](auto kind) {
      using C = decltype(kind);
      Enqueue<C>(
          problems, problems.front().op,
          [](const ReduceProblem& p) { return TreeOperands<C>{{static_cast<const T*>(p.x)}}; },
          Cuda(stream));
    });
  });
}

}  // namespace tessera
