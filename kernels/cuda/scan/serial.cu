// Scan as it is defined: one thread per line, which adds the elements one after another.
//
// A row is a chain of dependent additions and loads. One long row keeps a single thread busy on a
// GPU that can run a quarter of a million. Columns are better: adjacent threads read adjacent data.
//
// Cost at n = 2^20, f32, one row: 8 MiB moved by one thread, 2^20 steps, 74 ms on an H200.
//
// The kernel is correct for any number of lines and any alignment, because threads do not
// communicate and loads are scalar.
#include "kernels/cuda/scan/scan.cuh"

namespace tessera {
namespace {

template <class F>
__global__ void __launch_bounds__(kMostThreads) ScanSerial(ScanLines<F> p) {
  const std::int64_t line = GridThread();
  if (line >= p.lines) return;
  auto sum = F::template Identity<typename F::Wide>();
  for (std::int64_t i = 0; i < p.length; ++i) {
    const auto next = F::Combine(sum, p.Load(line, i));
    p.Store(line, i, p.exclusive ? sum : next);
    sum = next;
  }
}

void Enqueue(const ScanProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  DispatchLesson(p, [&]<class F>(std::type_identity<F>) {
    const ScanLines<F> lines(p);
    const auto blocks = static_cast<unsigned>(CeilDiv(lines.lines, ScanThreads(p)));
    ScanSerial<F><<<blocks, ScanThreads(p), 0, cuda.handle()>>>(lines);
    CUDA_CHECK_LAUNCH(ScanSerial);
  });
}

}  // namespace

extern constexpr Strategy<ScanProblem> kScanSerial = {
    .name = "serial",
    .summary = "one thread per row or column",
    .source = "definition",
    .backend = Backend::kCuda,
    .dtypes = kLessonDTypes,
    .deterministic = true,
    .limits = {.block_size = kWholeWarps},
    .roundoff = [](const ScanProblem& p) { return ScanRoundoff(p, p.length); },
    .cost =
        [](const ScanProblem& p) {
          return Cost{.bytes = ScanBytes(p),
                      .flops = static_cast<std::uint64_t>(p.elements()),
                      .atomics = 0,
                      .depth = static_cast<std::uint64_t>(p.length)};
        },
    .launch = Enqueue,
};

}  // namespace tessera
