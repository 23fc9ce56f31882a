// Dot with the first sums on the GPU: thread 0 of each block adds the products of the block.
//
// Compared with `elementwise`, the threads of a block use the shared memory of their SM. Each
// thread stores its product there, all threads wait at a barrier until every product has arrived,
// and then one thread adds all products. Only one sum per block goes to device memory and to the
// host, instead of one product per element.
//
//   thread      0    1    2   ...  255
//   shared    [p0] [p1] [p2]  ... [p255]      one barrier
//   thread 0   ---->---->---->---->          255 additions, one after the other
//
// At n = 2^20 there are 4096 blocks. Fewer bytes go over the bus, but each block occupies its SM
// for a serial chain of 255 additions, during which 255 threads have nothing to do. Only products
// are rounded in single precision.
//
// `block_serial_atomic` is the same kernel, but the host adds nothing. Blocks cannot wait for each
// other. If two of them read a cell, add to it and write it back, one addition may be lost. An
// atomic addition reads, adds and writes in one step, which the memory system does in the L2 cache.
// Every block therefore adds its sum to one cell atomically, in the order in which the blocks end,
// and only the result leaves the GPU. The 4096 additions to one address are serialized, but other
// blocks run their chains in the meantime. The drawback is that the order of the additions varies,
// so the last bits of a floating-point result differ from run to run.
//
// Lesson: kernels/lessons/sum_1_atomics.cu
#include "kernels/cuda/common/ladder.cuh"

namespace tessera {
namespace {

// Dynamic shared memory: one Acc per thread.
template <class F, class Terms, class End>
__global__ void __launch_bounds__(kMostThreads)
    DotBlockSerial(Terms terms, std::int64_t n, End end) {
  using Acc = typename F::Acc;
  Acc* products = DynamicShared<Acc>();
  const std::int64_t i = GridThread();
  products[threadIdx.x] = i < n ? terms(i) : Acc(0);
  __syncthreads();  // every product of the block is in its cell
  if (threadIdx.x != 0) return;
  typename F::Wide sum = 0;
  for (unsigned j = 0; j < blockDim.x; ++j) sum = F::Combine(sum, F::Widen(products[j]));
  end(sum);
}

template <bool kAtomic>
LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 1);
  return {.grid = grid,
          .wide_steps = std::int64_t{grid.block_size} + grid.blocks,
          .extra_bytes = kAtomic ? 0 : grid.blocks * WideBytes(p),
          .atomics = kAtomic ? grid.blocks : 0};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf<false>(p).grid;
  IntoHost(p, grid.blocks, stream, [&]<class F>(auto terms, auto* values, cudaStream_t on) {
    DotBlockSerial<F><<<grid.blocks, grid.block_size, grid.block_size * AccBytes(p), on>>>(
        terms, p.n, ToValues<F>{values});
  });
}

void EnqueueAtomic(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf<true>(p).grid;
  IntoOneSum(p, stream, [&]<class F>(auto terms, auto end, cudaStream_t on) {
    DotBlockSerial<F>
        <<<grid.blocks, grid.block_size, grid.block_size * AccBytes(p), on>>>(terms, p.n, end);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotBlockSerial =
    Lesson<ShapeOf<false>, Enqueue, DotProblem>({
        .name = "block_serial",
        .summary =
            "thread 0 of each block adds products in shared memory, the host adds the blocks' sums",
        .source = "reduction on GPU and CPU from the notes on dot products in Metal",
        .deterministic = true,
        .limits = {.block_size = kAnyBlockSize},
    });

extern constexpr Strategy<DotProblem> kDotBlockSerialAtomic =
    Lesson<ShapeOf<true>, EnqueueAtomic, DotProblem>({
        .name = "block_serial_atomic",
        .summary =
            "thread 0 of each block adds the block's products, one atomic addition per block",
        .source = "reduction on the GPU from the notes on dot products in Metal",
        .limits = {.block_size = kAnyBlockSize},
    });

}  // namespace tessera
