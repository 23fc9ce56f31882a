// Batches on a GPU: a block a problem, in one launch. A problem is one chunk of the tree of
// kernels/fixed_tree.h, so that its block folds it as `fixed_tree` does, and no block has to meet
// another. Where no problem has more than a row of the tree, each has a warp, whose threads take eight
// lanes each: there are no barriers, and eight times as many problems are under way at once.
//
// The table of problems stays in page-locked host memory, from which each block or warp fetches its
// line, and results go straight to host memory: there is no copy before or after the launch.
//
// Cost of 1000 Dots of 4096 f32: 32 MB read by 1000 blocks, each of which has all of its 32 KiB in
// flight; 32 KB of table and 24 KB of results over PCIe.
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

// An item a block.
template <class C>
__global__ void __launch_bounds__(kTreeLanes, 2)
    FoldBatch(const BatchItem<C>* items, ReduceOp op, bool mirror) {
  constexpr int kWords = sizeof(BatchItem<C>) / sizeof(uint4);
  __shared__ uint4 words[kWords];
  if (threadIdx.x < kWords)
    words[threadIdx.x] = reinterpret_cast<const uint4*>(items + blockIdx.x)[threadIdx.x];
  __syncthreads();  // the item is there
  const auto& item = reinterpret_cast<const BatchItem<C>&>(words);
  FoldArray<C>(item.in, item.n, op, mirror, item.result);
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

// An item a warp.
template <class C>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    FoldRows(const BatchItem<C>* items, unsigned count, ReduceOp op, bool mirror) {
  constexpr int kWords = sizeof(BatchItem<C>) / sizeof(uint4);
  __shared__ uint4 words[kWarps][kWords];
  const unsigned warp = threadIdx.x / kWarpSize, thread = threadIdx.x % kWarpSize;
  const unsigned number = blockIdx.x * kWarps + warp;
  if (number >= count) return;
  if (thread < kWords) words[warp][thread] = reinterpret_cast<const uint4*>(items + number)[thread];
  __syncwarp();  // the item is there
  const auto& item = reinterpret_cast<const BatchItem<C>&>(words[warp]);
  FoldRow<C>(item.in, item.n, op, mirror, item.result);
}

template <class C, class Problem, class OperandsOf>
void Enqueue(std::span<const Problem> problems, ReduceOp op, const OperandsOf& operands,
             CudaStream& stream) {
  auto* items =
      static_cast<BatchItem<C>*>(stream.HostScratch(problems.size() * sizeof(BatchItem<C>)));
  std::int64_t longest = 0;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    items[i] = {operands(problems[i]), problems[i].n, problems[i].result};
    longest = std::max(longest, problems[i].n);
  }
  const auto count = static_cast<unsigned>(problems.size());
  if (longest <= kTreeRow<typename C::Element>) {
    FoldRows<C><<<(count + kWarps - 1) / kWarps, kWarps * kWarpSize, 0, stream.handle()>>>(
        items, count, op, IsMirrored(op));
  } else {
    FoldBatch<C><<<count, kTreeLanes, 0, stream.handle()>>>(items, op, IsMirrored(op));
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
