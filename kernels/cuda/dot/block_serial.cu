// Dot with the first sums on the GPU: thread 0 of a block adds up what its block has multiplied.
//
// Against `elementwise`: the threads of a block share memory on their multiprocessor. Each leaves
// its product there, all wait at a barrier until every product has arrived, and then one of them
// adds. What goes to device memory and to the host is one sum a block instead of one product an
// element.
//
//   thread      0    1    2   ...  255
//   shared    [p0] [p1] [p2]  ... [p255]      one barrier
//   thread 0   ---->---->---->---->          255 additions, one after the other
//
// Cost at n = 2^20, f32: 8 MiB read, 4096 blocks of 256 with one barrier and a chain of 256
// additions each, in which 255 threads have nothing to do; 32 KiB go to the host. Memory would take
// 2 us at 4.3 TB/s. What the bus no longer carries is won, but the chains keep the blocks, and
// with them their place on a multiprocessor, many times longer than the loads need.
//
// Right for any n: threads beyond the end contribute 0, n = 0 is one block of zeros. For any block
// size: the chain is as long as the block. For any alignment: loads are scalar. For 2^28 floats: a
// product rounds once, in single precision; both chains, the thread's and the host's, are double.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dot/dot.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

Grid GridOf(const DotProblem& p) { return MakeGrid(p.n, p.launch, kBlock, 1); }

// partials[block] = the part of a . b that belongs to the block. Dynamic shared memory: one Acc a
// thread.
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotBlockSerial(const T* a, const T* b, std::int64_t n, DotWide<T>* partials) {
  auto* products = DynamicShared<DotAcc<T>>();
  const std::int64_t i = GridThread();
  products[threadIdx.x] = i < n ? DotFold<T>::Multiply(a[i], b[i]) : DotAcc<T>(0);
  __syncthreads();  // every product of the block is in its place
  if (threadIdx.x != 0) return;
  DotWide<T> sum = 0;
  for (unsigned j = 0; j < blockDim.x; ++j)
    sum = DotFold<T>::Combine(sum, DotFold<T>::Widen(products[j]));
  partials[blockIdx.x] = sum;
}

template <class T>
void Run(const DotProblem& p, CudaStream& stream) {
  const Grid grid = GridOf(p);
  auto* partials = static_cast<DotWide<T>*>(stream.Scratch(grid.blocks * sizeof(DotWide<T>)));
  DotBlockSerial<T>
      <<<grid.blocks, grid.block_size, grid.block_size * sizeof(DotAcc<T>), stream.handle()>>>(
          static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, partials);
  CUDA_CHECK_LAUNCH(DotBlockSerial);
  SumOnHost(partials, grid.blocks, p.result, stream);
}

double Roundoff(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return DotRoundoff(p.dtype, 1, std::int64_t{grid.block_size} + grid.blocks);
}

Cost CostOf(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return {.bytes = OperandBytes(p) + std::uint64_t{grid.blocks} * sizeof(double),
          .flops = 2 * static_cast<std::uint64_t>(p.n),
          .atomics = 0,
          .depth = std::uint64_t{1} + grid.block_size + grid.blocks};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotBlockSerial = {
    .name = "block_serial",
    .summary = "products meet in shared memory, thread 0 of a block adds them, the host the blocks",
    .source = "reduction on GPU and CPU of the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
