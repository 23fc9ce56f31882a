// Batches on a GPU: a block a problem, in one launch. A problem is one chunk of the tree of
// kernels/fixed_tree.h, so that its block folds it as `fixed_tree` does, and no block has to meet
// another.
//
// The table of problems stays in page-locked host memory, from which each block fetches its line,
// and results go straight to host memory: there is no copy before or after the launch.
//
// Cost of 1000 Dots of 4096 f32: 32 MB read by 1000 blocks, each of which has all of its 32 KiB in
// flight; 32 KB of table and 24 KB of results over PCIe.
#include "kernels/batch.h"

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

// A block an item.
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

template <class C, class Problem, class OperandsOf>
void Enqueue(std::span<const Problem> problems, ReduceOp op, const OperandsOf& operands,
             CudaStream& stream) {
  auto* items =
      static_cast<BatchItem<C>*>(stream.HostScratch(problems.size() * sizeof(BatchItem<C>)));
  for (std::size_t i = 0; i < problems.size(); ++i)
    items[i] = {operands(problems[i]), problems[i].n, problems[i].result};
  FoldBatch<C><<<static_cast<unsigned>(problems.size()), kTreeLanes, 0, stream.handle()>>>(
      items, op, IsMirrored(op));
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
