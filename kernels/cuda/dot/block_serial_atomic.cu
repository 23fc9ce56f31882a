// Dot without the host: as `block_serial`, but the blocks' sums meet on the GPU.
//
// Blocks can not wait for each other, and if two of them read a cell, add to it and write it back,
// one addition may be lost. An atomic addition reads, adds and writes as one step that no other can
// come between; the memory system does it in the L2 cache. So every block adds its sum to one cell,
// in whichever order the blocks end, and nothing but the result leaves the GPU.
//
// Cost at n = 2^20, f32: 8 MiB read, 4096 blocks of 256 with one barrier, a chain of 256 additions
// and one atomic addition each, all to one address; memory would take 2 us at 4.3 TB/s. The
// atomics come one after the other, but in the shadow of the chains. What is won is the wait for
// the host: the request ends with the kernel.
//
// The order of the atomic additions is not the same from run to run: the last bits of a
// floating-point result may differ. Otherwise right as `block_serial` is: any n, block size and
// alignment, and nothing but products in single precision.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dot/dot.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

Grid GridOf(const DotProblem& p) { return MakeGrid(p.n, p.launch, kBlock, 1); }

// *total += a . b. Dynamic shared memory: one Acc a thread.
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotBlockSerialAtomic(const T* a, const T* b, std::int64_t n, DotWide<T>* total) {
  auto* products = DynamicShared<DotAcc<T>>();
  const std::int64_t i = GridThread();
  products[threadIdx.x] = i < n ? DotFold<T>::Multiply(a[i], b[i]) : DotAcc<T>(0);
  __syncthreads();  // every product of the block is in its place
  if (threadIdx.x != 0) return;
  DotWide<T> sum = 0;
  for (unsigned j = 0; j < blockDim.x; ++j)
    sum = DotFold<T>::Combine(sum, DotFold<T>::Widen(products[j]));
  AtomicAdd(total, sum);
}

template <class T>
void Run(const DotProblem& p, CudaStream& stream) {
  const Grid grid = GridOf(p);
  auto* total = MakeSum<DotWide<T>>(stream);
  DotBlockSerialAtomic<T>
      <<<grid.blocks, grid.block_size, grid.block_size * sizeof(DotAcc<T>), stream.handle()>>>(
          static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, total);
  CUDA_CHECK_LAUNCH(DotBlockSerialAtomic);
  FetchSum(total, p.result, stream);
}

double Roundoff(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return DotRoundoff(p.dtype, 1, std::int64_t{grid.block_size} + grid.blocks);
}

Cost CostOf(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return {.bytes = OperandBytes(p),
          .flops = 2 * static_cast<std::uint64_t>(p.n),
          .atomics = grid.blocks,
          .depth = std::uint64_t{1} + grid.block_size + grid.blocks};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotBlockSerialAtomic = {
    .name = "block_serial_atomic",
    .summary = "thread 0 of a block adds its products, one atomic addition a block",
    .source = "reduction on the GPU of the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
