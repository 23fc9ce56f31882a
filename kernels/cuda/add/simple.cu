// Add: one thread per element, the first kernel that most people write.
//
// The threads of a warp take adjacent elements, so each load and each store of a warp is four
// 32-byte transactions (f32). The only cost is memory traffic: 12 bytes per addition.
//
// Cost at n = 2^20, f32: 8 MiB read, 4 MiB written, 4096 blocks of 256; no barriers, depth 1.
//
// The kernel is correct for any n: threads beyond the end do nothing, and n = 0 launches nothing.
// It is correct for any block size and alignment: threads do not communicate, and loads are scalar.
// out may be the same array as a or b.
#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    AddSimple(const T* a, const T* b, std::int64_t n, T* out) {
  const std::int64_t i = GridThread();
  if (i < n) out[i] = T(WrapAdd(ValueOf<T>(a[i]), ValueOf<T>(b[i])));
}

template <class T>
void Run(const AddProblem& p, CudaStream& stream) {
  if (p.n == 0) return;
  const Grid grid = MakeGrid(p.n, p.launch, kBlock, 1);
  AddSimple<T><<<grid.blocks, grid.block_size, 0, stream.handle()>>>(
      static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, static_cast<T*>(p.out));
  CUDA_CHECK_LAUNCH(AddSimple);
}

double Roundoff(const AddProblem& p) { return UnitRoundoff(p.dtype); }

Cost CostOf(const AddProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = 3 * n * SizeOf(p.dtype), .flops = n, .atomics = 0, .depth = 1};
}

void Enqueue(const AddProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<AddProblem> kAddSimple = {
    .name = "simple",
    .summary = "one thread per element",
    .source = "vector addition from the notes on hardware acceleration",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
