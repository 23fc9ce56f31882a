// TODO
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/tree.cuh"

namespace tessera {
namespace {

// The bound holds for the fewest chunks that SinglePassTree makes on any device.
Tree TreeOf(const ReduceProblem& p) {
  return SinglePassTree(p.n, static_cast<std::int64_t>(SizeOf(p.dtype)), p.launch, 0);
}

double Roundoff(const ReduceProblem& p) { return TreeRoundoff(TreeOf(p), p.op, p.dtype, false); }

Cost CostOf(const ReduceProblem& p) {
  const Tree tree = TreeOf(p);
  const TreeSteps steps = StepsOf(tree, p.dtype);
  const auto n = static_cast<std::uint64_t>(p.n);
  const std::uint64_t sent = tree.chunks == 1 ? 0 : static_cast<std::uint64_t>(tree.chunks);
  return {.bytes = n * SizeOf(p.dtype) + 2 * sent * TreeWideBytes(p.op, p.dtype, false),
          .flops = n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(steps.narrow + steps.wide)};
}

void Enqueue(const ReduceProblem& p, Lane& lane) {
  CudaLane& cuda = Cuda(lane);
  const TreeLaunch launch = {
      .tree = SinglePassTree(p.n, static_cast<std::int64_t>(SizeOf(p.dtype)), p.launch,
                             cuda.device().info().multiprocessors),
      .block = p.launch.block_size};
  DispatchDType(p.dtype, [&](auto zero) { LaunchTreeReduce<decltype(zero), false>(p, launch, cuda); });
}

}  // namespace

extern const Strategy<ReduceProblem> kReduceSinglePass;
constexpr Strategy<ReduceProblem> kReduceSinglePass = {
    .name = "single_pass",
    .summary = "one launch: 16-byte loads, shuffles, the last block to start folds what the others send it",
    .source = "decoupled look-back and the LL protocol of NCCL, applied to a reduction",
    .backend = Backend::kCuda,
    .dtypes = AllDTypes(),
    .min_compute_capability = kBaseComputeCapability,
    .deterministic = true,
    .limits = {.block_size = kTreeBlockSize,
               .grid_size = {1, static_cast<std::uint32_t>(kTreeMaxChunks)},
               .items_per_thread = {}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = nullptr,
};

}  // namespace tessera
