// Reduce in twice the precision of its operand, along the tree of `fixed_tree`.
//
// Against `fixed_tree`: where terms of both signs cancel, a sum keeps its digits. f32 and the
// 16-bit types add in double from the first element: 53 bits for 24. f64 has nothing wider, so a
// column is a Pair, the sum and what rounding has taken from it so far: TwoSum finds the error of
// an addition with five more, TwoProduct that of a square with one fused multiply-add, and the
// errors are added up on the side (Ogita, Rump and Oishi: Sum2). In the end value and errors meet
// in one rounding:
//
//   |error| <= u |sum| + (depth u)^2 * sum of |terms|     u = 2^-53, depth at most about 250
//
// so that a sum whose terms are 10^16 times larger than itself is still right to the last digits.
// The bits are those of the CPU's row of the same name. Operations that do not round, integers and
// variances (double and free of cancellation already) are as in `fixed_tree`.
//
// Cost at n = 2^20, f32: 4 MiB read, one conversion and one addition in double an element; f64: 8
// MiB read and 7 additions an element, where memory at 4.3 TB/s leaves an H200's multiprocessor
// time for about 25.
//
// Right for any n, block size and alignment as `single_pass`.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/tree/tree.h"

namespace tessera {
namespace {

double Roundoff(const ReduceProblem& p) {
  return TreeRoundoff(FixedTreeOf(p), p.op, p.dtype, true);
}

Cost CostOf(const ReduceProblem& p) {
  return TreeCost(p, FixedTreeOf(p), TreeWideBytes(p.op, p.dtype, true));
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  const TreeLaunch launch = {
      .tree = FixedTreeOf(p), .grid = p.launch.grid_size, .block = p.launch.block_size};
  DispatchDType(p.dtype,
                [&](auto zero) { LaunchTreeReduce<decltype(zero), true>(p, launch, cuda); });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceCompensated = {
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
