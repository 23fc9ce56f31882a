// SumByLabel with atomic additions to the result, in device memory.
//
// A thread finds the label of an element, and adds the element to the sum of its label and column.
// Atomics happen in the L2 cache, which serves many addresses at a time, but the additions to one
// sum are serialized. The fewer labels there are, the more time this takes. The additions happen in
// whatever order the threads arrive, and a floating-point sum is rounded to its type after each
// addition, so the bits of the sum change from run to run.
//
// Cost at 2^20 f32 and 1024 labels: 4 MiB of x and 8 MiB of labels read, 2^20 additions, 2^10 for
// each sum.
//
// The kernel is correct for any grid, because threads stride over it, and for any alignment,
// because loads are scalar. A thread whose label is out of range adds nothing.
#include "kernels/cuda/sum_by_label/sum_by_label.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kEach = 4;

__device__ void AtomicAdd(float* sum, float x) { atomicAdd(sum, x); }
__device__ void AtomicAdd(double* sum, double x) { atomicAdd(sum, x); }
__device__ void AtomicAdd(std::int64_t* sum, std::int64_t x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(x));
}

template <class T, class I>
__global__ void __launch_bounds__(kMostThreads)
    AddToLabels(const T* x, TakeIndexes<I> labels, std::int64_t elements, std::int64_t inner,
                LabelSumOf<T>* out) {
  for (std::int64_t i = GridThread(); i < elements; i += GridThreads()) {
    const std::int64_t row = inner == 1 ? i : i / inner, column = i - row * inner;
    const std::int64_t label = labels.Resolve(labels.Load(row), row, /*marks=*/column == 0);
    if (label >= 0) AtomicAdd(out + label * inner + column, static_cast<LabelSumOf<T>>(x[i]));
  }
}

// Calls f(T{}) for the types that `dtypes` below lists.
template <class F>
void DispatchAtomic(DType dtype, F&& f) {
  if (IsInteger(dtype)) {
    if (dtype == DType::kI32) {
      f(std::int32_t{});
    } else {
      f(std::int64_t{});
    }
  } else {
    DispatchReal(dtype, f);
  }
}

void Enqueue(const SumByLabelProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  cuda.Zero(p.out, LabelOutBytes(p));
  const Grid grid = MakeGrid(p.elements(), p.launch, kLabelBlock, kEach);
  DispatchAtomic(p.dtype, [&]<class T>(T) {
    LaunchWithLabels(p, cuda, [&]<class I>(const TakeIndexes<I>& labels) {
      AddToLabels<<<grid.blocks, grid.block_size, 0, cuda.handle()>>>(
          static_cast<const T*>(p.x), labels, p.elements(), p.inner,
          static_cast<LabelSumOf<T>*>(p.out));
      CUDA_CHECK_LAUNCH(AddToLabels);
    });
  });
}

}  // namespace

extern constexpr Strategy<SumByLabelProblem> kSumByLabelAtomic = {
    .name = "atomic",
    .summary = "every thread adds to the sums of the result, in any order",
    .source = "definition",
    .backend = Backend::kCuda,
    .dtypes = {1u << static_cast<unsigned>(DType::kF32) | 1u << static_cast<unsigned>(DType::kF64) |
               1u << static_cast<unsigned>(DType::kI32) | 1u << static_cast<unsigned>(DType::kI64)},
    .deterministic = false,
    .limits = {.block_size = kAnyBlockSize,
               .grid_size = kAnyGridSize,
               .items_per_thread = kAnyItems},
    // If all rows have the same label, a term passes through an addition for each of them.
    .roundoff =
        [](const SumByLabelProblem& p) { return SumRoundoff(p.dtype, {.narrow = p.n, .wide = 0}); },
    .cost =
        [](const SumByLabelProblem& p) {
          const auto each = static_cast<std::uint64_t>(p.n / std::max<std::int64_t>(1, p.length));
          return LabelCost(p, 0, each, each);
        },
    .launch = Enqueue,
};

}  // namespace tessera
