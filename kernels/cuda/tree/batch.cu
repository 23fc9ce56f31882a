// Batches on a GPU: one launch with a block for each problem. A problem is one chunk of the tree of
// kernels/same_bits/fixed_tree.h. The problem's block folds it as `fixed_tree` does, and blocks do
// not communicate. If no problem is longer than a row of the tree, each problem has only one warp,
// and each thread takes eight lanes. Eight times as many problems are then in progress at the same
// time.
//
// Problems of equal length at equal distances, such as slices of an array, are described by the
// first problem and the distance. Otherwise the problems are in a table in page-locked host memory.
// A block fetches all of its table entries together, for two reasons: a read over PCIe takes longer
// than the fold of a short problem, and a longer read takes no more time than a short one. A block
// has one entry per warp or, if there are more problems than blocks that run at a time, up to four
// entries for problems that it folds one after another. Results go directly to host memory, so
// there is no copy before or after the launch.
//
// Cost of 1000 Dots of 4096 f32: 1000 blocks read 32 MB, and each has all of its 32 KiB in flight.
// The results are 24 KB over PCIe, and a table would be another 32 KB.
//
// Invariant: a problem's result depends only on its elements. The bits are those of `fixed_tree`,
// whichever kernel folds the problem.
#include "kernels/same_bits/batch.h"

#include <algorithm>

#include "kernels/cuda/tree/kernel.cuh"

namespace tessera {
namespace {

static_assert(kBatchBytes == kShortRows * kTreeRowBytes);

// A problem. Blocks fetch it from a table in 16-byte words.
template <class C>
using ItemOf = BatchItem<C::kOperands>;

template <class C>
__device__ TreeOperands<C> OperandsOf(const ItemOf<C>& item) {
  TreeOperands<C> in;
  for (int o = 0; o < C::kOperands; ++o)
    in.x[o] = static_cast<const typename C::Element*>(item.x[o]);
  return in;
}

// The problems of a launch: a table of items or, if `table` is null, the first item and, for each
// operand, the distance in bytes to the same operand of the next problem.
template <class C>
struct Batch {
  const ItemOf<C>* table;
  ItemOf<C> first;
  std::uintptr_t apart[C::kOperands];
  unsigned count;
  Scalar* results;

  __device__ ItemOf<C> At(unsigned number) const {
    ItemOf<C> item = first;
    for (int o = 0; o < C::kOperands; ++o)
      item.x[o] = reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(first.x[o]) +
                                                apart[o] * number);
    return item;
  }
};

// Fetches the block's `count` table entries starting at entry `first`. All threads of the block
// call it. Returns null if there is no table.
template <class C, unsigned kMost>
__device__ const ItemOf<C>* FetchLines(const Batch<C>& batch, unsigned first, unsigned count) {
  constexpr unsigned kWords = sizeof(ItemOf<C>) / sizeof(uint4);
  __shared__ uint4 words[kMost * kWords];
  if (batch.table == nullptr) return nullptr;
  if (threadIdx.x < count * kWords)
    words[threadIdx.x] = reinterpret_cast<const uint4*>(batch.table + first)[threadIdx.x];
  __syncthreads();  // the entries are in shared memory
  return reinterpret_cast<const ItemOf<C>*>(words);
}

constexpr unsigned kMostEach = 4;  // problems that a block folds one after another

// Problems of up to this many rows have a kernel that loads at most this many rows at a time, which
// leaves registers for a third block on an SM.
constexpr int kFewRows = kShortRows / 2;

template <class C, int kRows>
constexpr int BatchBlocks() {
  constexpr std::size_t kBytes =
      C::kOperands * sizeof(typename C::Column) * kTreeVector<typename C::Element>;
  return kRows <= kFewRows && kBytes <= 32 ? 3 : 2;
}

// Folds `each` problems of up to kRows rows per block.
template <class C, int kRows>
__global__ void __launch_bounds__(kTreeLanes, BatchBlocks<C, kRows>())
    FoldBatch(const Batch<C> batch, unsigned each, ReduceOp op, bool mirror) {
  const unsigned first = blockIdx.x * each, count = min(each, batch.count - first);
  const ItemOf<C>* const lines = FetchLines<C, kMostEach>(batch, first, count);
#pragma unroll 1
  for (unsigned i = 0; i < count; ++i) {
    if (i > 0) __syncthreads();  // the cells of the previous problem have been read
    const ItemOf<C> item = lines == nullptr ? batch.At(first + i) : lines[i];
    FoldArray<C, kRows>(OperandsOf<C>(item), item.n, op, mirror, batch.results + first + i);
  }
}

// Folds an array of at most one row. All threads of a warp call it, and the first thread stores the
// result.
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
  // If vectors are incomplete or not aligned, their elements are loaded one by one.
  const auto first = [&](int i) { return (thread + i * kWarpSize) * V; };
  const auto whole = [&](int i) { return aligned && first(i) + V <= end; };
  TreeVectorOf<T> v[kLanesEach][O];
#pragma unroll
  for (int i = 0; i < kLanesEach; ++i)
#pragma unroll
    for (int o = 0; o < O; ++o)
      if (whole(i)) v[i][o] = VectorIn<T>(LoadVector<true>(in.x[o] + first(i)), 0);
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

constexpr unsigned kWarps = 8;  // per block

// Folds one problem per warp.
template <class C>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    FoldRows(const Batch<C> batch, ReduceOp op, bool mirror) {
  const unsigned first = blockIdx.x * kWarps, warp = threadIdx.x / kWarpSize;
  const ItemOf<C>* const lines =
      FetchLines<C, kWarps>(batch, first, min(kWarps, batch.count - first));
  if (first + warp >= batch.count) return;
  const ItemOf<C> item = lines == nullptr ? batch.At(first + warp) : lines[warp];
  FoldRow<C>(OperandsOf<C>(item), item.n, op, mirror, batch.results + first + warp);
}

// Whether all problems have the length of the first problem, and all distances equal the distance
// of the first two. The launch waits for this check, so it compares kAtOnce items before each
// branch.
template <int kOperands>
bool AreEven(std::span<const BatchItem<kOperands>> items,
             const std::uintptr_t (&apart)[kOperands]) {
  constexpr std::size_t kAtOnce = 128;
  std::uintptr_t next[kOperands];
  for (int o = 0; o < kOperands; ++o) next[o] = reinterpret_cast<std::uintptr_t>(items[0].x[o]);
  for (std::size_t i = 0; i < items.size();) {
    std::uint64_t different = 0;
    for (const std::size_t end = std::min(items.size(), i + kAtOnce); i < end; ++i) {
      different |= static_cast<std::uint64_t>(items[i].n ^ items[0].n);
      for (int o = 0; o < kOperands; ++o) {
        different |= reinterpret_cast<std::uintptr_t>(items[i].x[o]) ^ next[o];
        next[o] += apart[o];
      }
    }
    if (different != 0) return false;
  }
  return true;
}

template <class C>
void Enqueue(std::span<const ItemOf<C>> items, ReduceOp op, Scalar* results, CudaStream& stream) {
  Batch<C> batch = {
      .first = items[0], .count = static_cast<unsigned>(items.size()), .results = results};
  for (int o = 0; o < C::kOperands; ++o)
    batch.apart[o] = reinterpret_cast<std::uintptr_t>(items[batch.count > 1].x[o]) -
                     reinterpret_cast<std::uintptr_t>(items[0].x[o]);
  std::int64_t longest = batch.first.n;
  if (!AreEven(items, batch.apart)) {
    auto* const table = static_cast<ItemOf<C>*>(stream.HostScratch(items.size_bytes()));
    for (std::size_t i = 0; i < items.size(); ++i) {
      table[i] = items[i];
      longest = std::max(longest, items[i].n);
    }
    batch.table = table;
  }
  if (longest <= kTreeRow<typename C::Element>) {
    FoldRows<C><<<(batch.count + kWarps - 1) / kWarps, kWarps * kWarpSize, 0, stream.handle()>>>(
        batch, op, IsMirrored(op));
  } else {
    // There are at least this many blocks per SM before a block takes several problems.
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

void LaunchBatchCuda(DType dtype, std::span<const DotItem> items, Scalar* results, Stream& stream) {
  if (items.empty()) return;
  DispatchDType(dtype, [&](auto zero) {
    Enqueue<decltype(DotColumnsType<decltype(zero), false>())>(items, ReduceOp::kSum, results,
                                                               Cuda(stream));
  });
}

void LaunchBatchCuda(DType dtype, ReduceOp op, std::span<const ReduceItem> items, Scalar* results,
                     Stream& stream) {
  if (items.empty()) return;
  DispatchDType(dtype, [&](auto zero) {
    DispatchColumns<decltype(zero), false>(
        op, [&](auto kind) { Enqueue<decltype(kind)>(items, op, results, Cuda(stream)); });
  });
}

}  // namespace tessera
