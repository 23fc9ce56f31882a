// Dot with the first sums on the GPU: thread 0 of each block adds the products of the block.
//
// Compared with `elementwise`, the threads of a block use the shared memory of their SM. Each
// thread stores its product there, all threads wait at a barrier until every product has arrived,
// and then one thread adds the products. Only one sum per block goes to device memory and to the
// host, instead of one product per element.
//
//   thread      0    1    2   ...  255
//   shared    [p0] [p1] [p2]  ... [p255]      one barrier
//   thread 0   ---->---->---->---->          255 additions, one after the other
//
// At n = 2^20 there are 4096 blocks. Fewer bytes go over the bus, but each block occupies its SM
// for a serial chain of 255 additions, during which 255 threads have nothing to do. Only products
// are rounded in single precision.
#include "kernels/cuda/dot/frame.cuh"

namespace tessera {
namespace {

// partials[block] = the block's part of a . b. Dynamic shared memory: one Acc per thread.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    DotBlockSerial(const T* a, const T* b, std::int64_t n, DotWide<T>* partials) {
  using F = DotFold<T>;
  auto* products = DynamicShared<DotAcc<T>>();
  const std::int64_t i = GridThread();
  products[threadIdx.x] = i < n ? F::Multiply(a[i], b[i]) : DotAcc<T>(0);
  __syncthreads();  // every product of the block is in its cell
  if (threadIdx.x != 0) return;
  DotWide<T> sum = 0;
  for (unsigned j = 0; j < blockDim.x; ++j) sum = F::Combine(sum, F::Widen(products[j]));
  partials[blockIdx.x] = sum;
}

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 1);
  return {.grid = grid,
          .narrow_steps = 1,
          .wide_steps = std::int64_t{grid.block_size} + grid.blocks,
          .extra_bytes = grid.blocks * sizeof(double)};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoPartials(p, grid.blocks, stream, [&](auto* a, auto* b, auto* partials, cudaStream_t on) {
    DotBlockSerial<<<grid.blocks, grid.block_size, grid.block_size * AccBytes(p.dtype), on>>>(
        a, b, p.n, partials);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotBlockSerial = {
    .name = "block_serial",
    .summary =
        "products in shared memory, thread 0 of each block adds them, the host adds the blocks",
    .source = "reduction on GPU and CPU from the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
