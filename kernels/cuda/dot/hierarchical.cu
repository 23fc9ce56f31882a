// Dot by a hierarchy: many blocks, each with a tree in shared memory, and one atomic addition a
// block.
//
// A block cannot wait for another, so a tree ends at the block. Every thread multiplies one pair of
// elements; the products of a block meet in shared memory, where halving strides sum them in
// log2(block) levels with a barrier each; then thread 0 adds the block's sum to one double. The
// order of those additions is the order in which blocks happen to end: the last bits of the result
// differ from run to run.
//
// Cost at n = 2^20, f32, blocks of 256: 8 MiB read, 4096 blocks with 9 barriers each, 4096 atomic
// additions to one address. A thread does one multiplication for eight barriers, and its load is
// the only one that it has in flight: what bounds this row is starting blocks and waiting in them,
// not memory.
//
// Right for any n: threads beyond the end contribute 0, n = 0 is one block of zeros. For any block
// size: the tree rounds halves up. For any alignment: loads are scalar. For 2^28 floats: at most 1
// + 10 roundings in single precision lie on the way of a product, everything between blocks is
// double.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

template <class T>
using Sum = Fold<ReduceOp::kSum, T>;

constexpr std::uint32_t kBlock = 256;

Grid GridOf(const DotProblem& p) { return MakeGrid(p.n, p.launch, kBlock, 1); }

// *sum += a . b. Dynamic shared memory: one T a thread.
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotHierarchical(const T* a, const T* b, std::int64_t n, double* sum) {
  const std::int64_t i = GridThread();
  const T product = i < n ? a[i] * b[i] : T(0);
  const T block_sum = FoldBlockTree<Sum<T>>(product, DynamicShared<T>());
  if (threadIdx.x == 0) atomicAdd(sum, static_cast<double>(block_sum));
}

template <class T>
void Run(const DotProblem& p, CudaLane& lane) {
  const Grid grid = GridOf(p);
  auto* sum = static_cast<double*>(lane.Scratch(sizeof(double)));
  CUDA_CHECK(cudaMemsetAsync(sum, 0, sizeof(double), lane.stream()));
  DotHierarchical<T><<<grid.blocks, grid.block_size, grid.block_size * sizeof(T), lane.stream()>>>(
      static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, sum);
  CUDA_CHECK_LAUNCH(DotHierarchical);
  CUDA_CHECK(
      cudaMemcpyAsync(&p.result->real, sum, sizeof(double), cudaMemcpyDeviceToHost, lane.stream()));
}

double Roundoff(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return Then((1 + CeilLog2(grid.block_size)) * UnitRoundoff(p.dtype), grid.blocks * kRoundoffF64);
}

Cost CostOf(const DotProblem& p) {
  const Grid grid = GridOf(p);
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = 2 * n * SizeOf(p.dtype),
          .flops = 2 * n,
          .atomics = grid.blocks,
          .depth = 1u + static_cast<unsigned>(CeilLog2(grid.block_size)) + grid.blocks};
}

void Enqueue(const DotProblem& p, Lane& lane) {
  DispatchReal(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(lane)); });
}

}  // namespace

extern const Strategy<DotProblem> kDotHierarchical;
constexpr Strategy<DotProblem> kDotHierarchical = {
    .name = "hierarchical",
    .summary = "one product a thread, a tree in shared memory a block, one atomic addition a block",
    .source = "hierarchical tree reduction of the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .min_compute_capability = kBaseComputeCapability,
    .deterministic = false,
    .limits = {.block_size = kAnyBlockSize, .grid_size = {}, .items_per_thread = {}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = nullptr,
};

}  // namespace tessera
