// TODO
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/tree.cuh"

namespace tessera {
namespace {

Tree TreeOf(const DotProblem& p) {
  return FixedTree(p.n, static_cast<std::int64_t>(SizeOf(p.dtype)));
}

double Roundoff(const DotProblem& p) { return TreeDotRoundoff(TreeOf(p), p.dtype, true); }

Cost CostOf(const DotProblem& p) {
  const Tree tree = TreeOf(p);
  const TreeSteps steps = StepsOf(tree, p.dtype);
  const auto n = static_cast<std::uint64_t>(p.n);
  const std::uint64_t sent = tree.chunks == 1 ? 0 : static_cast<std::uint64_t>(tree.chunks);
  return {.bytes = 2 * n * SizeOf(p.dtype) + 2 * sent * TreeWideBytes(ReduceOp::kSum, p.dtype, true),
          .flops = 2 * n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(steps.narrow + steps.wide)};
}

void Enqueue(const DotProblem& p, Lane& lane) {
  CudaLane& cuda = Cuda(lane);
  const TreeLaunch launch = {
      .tree = TreeOf(p), .grid = p.launch.grid_size, .block = p.launch.block_size};
  DispatchDType(p.dtype, [&](auto zero) { LaunchTreeDot<decltype(zero), true>(p, launch, cuda); });
}

}  // namespace

extern const Strategy<DotProblem> kDotCompensated;
constexpr Strategy<DotProblem> kDotCompensated = {
    .name = "compensated",
    .summary = "the fixed tree in twice the precision of the operands",
    .source = "Ogita, Rump and Oishi, Accurate sum and dot product, 2005",
    .backend = Backend::kCuda,
    .dtypes = AllDTypes(),
    .min_compute_capability = kBaseComputeCapability,
    .deterministic = true,
    .limits = {.block_size = kTreeBlockSize,
               .grid_size = kAnyGridSize,
               .items_per_thread = {}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = nullptr,
};

}  // namespace tessera
