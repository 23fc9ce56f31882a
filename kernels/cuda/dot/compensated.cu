// Dot in twice the precision of its operands, along the tree of `fixed_tree`.
//
// Against `fixed_tree`: where products of both signs cancel, the sum keeps its digits. f32 and the
// 16-bit types multiply and add in double, in which their products are exact. f64 has nothing
// wider, so a column is a Pair, the sum and what rounding has taken from it so far: TwoProduct
// finds the error of a product with one fused multiply-add, TwoSum that of an addition with five
// more, and the errors are added up on the side (Ogita, Rump and Oishi: Dot2). In the end value and
// errors meet in one rounding:
//
//   |error| <= u |sum| + (depth u)^2 * sum of |products|     u = 2^-53, depth at most about 250
//
// so that a sum whose terms are 10^16 times larger than itself is still right to the last digits,
// as long as no product underflows. The bits are those of the CPU's row of the same name.
//
// Cost at n = 2^20, f32: 8 MiB read, two conversions and one multiply-add in double a pair; f64: 16
// MiB read and 10 operations a pair, where memory at 4.3 TB/s leaves an H200's multiprocessor time
// for about 50.
//
// Right for any n, block size and alignment as `single_pass`.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/tree/tree.h"

namespace tessera {
namespace {

double Roundoff(const DotProblem& p) { return TreeDotRoundoff(FixedTreeOf(p), p.dtype, true); }

Cost CostOf(const DotProblem& p) {
  return TreeCost(p, FixedTreeOf(p), TreeWideBytes(ReduceOp::kSum, p.dtype, true));
}

void Enqueue(const DotProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  const TreeLaunch launch = {
      .tree = FixedTreeOf(p), .grid = p.launch.grid_size, .block = p.launch.block_size};
  DispatchDType(p.dtype, [&](auto zero) { LaunchTreeDot<decltype(zero), true>(p, launch, cuda); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotCompensated = {
    .name = "compensated",
    .summary = "the fixed tree in twice the precision of the operands",
    .source = "Ogita, Rump and Oishi, Accurate sum and dot product, 2005",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kTreeBlockSize, .grid_size = kAnyGridSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .reads_views = true,
};

}  // namespace tessera
