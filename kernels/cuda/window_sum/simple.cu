// WindowSum as it is defined: one thread per element of the result, which loops over its window.
//
// Adjacent threads read adjacent elements in every step of their loops, so loads coalesce. However,
// each element is loaded for each of the 2 radius + 1 windows that contain it. The L1 cache serves
// most of these loads, but each load costs an access.
//
// Cost at n = 2^20, radius 8, f32: 17 * 2^20 loads, 68 MiB, of which 4 MiB come from memory; 4 MiB
// written; 17 * 2^20 additions; no barriers; depth 17. Moving 8 MiB takes 2 us at 4.3 TB/s.
//
// The kernel is correct for any n and radius: a window ends where the array does. It is correct for
// any block size and alignment, because threads do not communicate and loads are scalar. Float sums
// are moved to double every kMaxChain elements.
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/window_sum/window.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

// Positions are relative to the first requested result, and the array is [lowest, end_x). kWhole:
// all results are requested, so lowest is 0.
template <bool kWhole, class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    WindowSumSimple(const T* x, std::int64_t lowest, std::int64_t end_x, std::int64_t radius,
                    std::int64_t results, typename WindowFold<T>::Out* out) {
  using F = WindowFold<T>;
  const std::int64_t i = GridThread();
  if (i >= (kWhole ? end_x : results)) return;
  const std::int64_t first = max(i - radius, kWhole ? std::int64_t{0} : lowest);
  const std::int64_t end = min(i + radius + 1, end_x);
  const auto sum = FoldThreadInTurn<F>(first, end, std::int64_t{1},
                                       [&](std::int64_t j) { return F::Load(x[j], j); });
  out[i] = F::FinishAxis(sum, end - first);
}

template <class T>
void Run(const WindowSumProblem& p, CudaStream& stream) {
  if (p.n == 0) return;
  const Grid grid = MakeGrid(WindowResults(p), p.launch, kBlock, 1);
  const auto kernel =
      WindowResults(p) == p.n ? WindowSumSimple<true, T> : WindowSumSimple<false, T>;
  kernel<<<grid.blocks, grid.block_size, 0, stream.handle()>>>(
      static_cast<const T*>(p.x) + p.first, -p.first, p.n - p.first, p.radius, WindowResults(p),
      static_cast<typename WindowFold<T>::Out*>(p.out));
  CUDA_CHECK_LAUNCH(WindowSumSimple);
}

double Roundoff(const WindowSumProblem& p) { return WindowLoopRoundoff(p, 1); }

Cost CostOf(const WindowSumProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.n);
  const auto width = static_cast<std::uint64_t>(WindowWidth(p));
  return {.bytes = n * width * SizeOf(p.dtype) + WindowOutBytes(p),
          .flops = n * width,
          .atomics = 0,
          .depth = width};
}

void Enqueue(const WindowSumProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<WindowSumProblem> kWindowSumSimple = {
    .name = "simple",
    .summary = "one thread per element of the result, which loops over its window",
    .source = "first version of the window sum in the notes on hardware acceleration",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
