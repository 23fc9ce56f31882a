// Reduce with CUB, CUDA's library of building blocks.
//
// One call takes any n. CUB runs a kernel with vector loads, several items per thread and a tree
// per block and, if this kernel has more than one block, a second kernel with a single block. Only
// the arithmetic is ours. Elements are converted to Fold::Wide when they are loaded, because the
// number of elements that CUB folds in a thread grows with n and we cannot bound it. ARGMIN and
// ARGMAX get their indices from a counting iterator, so they have no vector loads.
//
// Cost at n = 2^20, f32: 4 MiB read, two of the library's kernels, and a one-thread kernel of ours
// that finishes the value.
//
// The strategy is correct for any n: counts are 64 bits wide, and n = 0 writes the initial value,
// which is the identity. It is correct for any alignment, because CUB checks the alignment before
// it uses vector loads. It is accurate for 2^28 floats, because all additions are in double, in any
// order.
#include <thrust/iterator/counting_iterator.h>
#include <cub/device/device_reduce.cuh>

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/common/lesson.cuh"

namespace tessera {
namespace {

// All sums over a type use the same fold. They differ only in the terms, which are chosen at run
// time, so there is one instance of CUB's kernels instead of five. (Each instance takes as long to
// compile as a whole strategy.) Norms and means of integers have separate instances, because they
// are sums of doubles and of 128-bit integers, respectively. Norms of f64 also have separate
// instances, because their sums have a wider range.
template <ReduceOp op, class T>
constexpr ReduceOp FoldedAs() {
  switch (op) {
    case ReduceOp::kNormL2:
      if (std::is_same_v<T, double>) return op;
      [[fallthrough]];
    case ReduceOp::kMean:
      if (std::is_integral_v<T>) return op;
      [[fallthrough]];
    case ReduceOp::kNormL1:
    case ReduceOp::kSumSquares:
      return ReduceOp::kSum;
    default:
      return op;
  }
}

template <class F>
struct CombineWide {
  using Wide = typename F::Wide;
  __host__ __device__ Wide operator()(const Wide& a, const Wide& b) const {
    return F::Combine(a, b);
  }
};

template <class F, class T>
struct LoadElement {
  ReduceOp op;
  __host__ __device__ typename F::Wide operator()(T x) const { return F::Widen(F::Load(x, 0)); }
};

// Loads the terms of op, for a sum.
template <class T>
struct LoadElement<Fold<ReduceOp::kSum, T>, T> {
  ReduceOp op;
  __host__ __device__ WideOf<T> operator()(T x) const {
    if (op == ReduceOp::kNormL1) return Term<ReduceOp::kNormL1>(x);
    if (op == ReduceOp::kSumSquares || op == ReduceOp::kNormL2)
      return Term<ReduceOp::kSumSquares>(x);
    return Term<ReduceOp::kSum>(x);
  }

 private:
  template <ReduceOp term>
  __host__ __device__ static WideOf<T> Term(T x) {
    return Fold<term, T>::Widen(Fold<term, T>::Load(x, 0));
  }
};

template <class F, class T>
struct LoadAtIndex {
  const T* x;
  __host__ __device__ typename F::Wide operator()(std::int64_t i) const { return F::Load(x[i], i); }
};

template <class F, class Iterator, class Load>
void Reduce(Iterator in, std::int64_t n, Load load, typename F::Wide* out, CudaStream& stream) {
  std::size_t bytes = 0;
  const auto reduce = [&](void* workspace) {
    CheckCuda(cub::DeviceReduce::TransformReduce(workspace, bytes, in, out, n, CombineWide<F>{},
                                                 load, F::template Identity<typename F::Wide>(),
                                                 stream.handle()),
              "cub::DeviceReduce::TransformReduce");
  };
  reduce(nullptr);                                          // gets the size of the workspace
  reduce(stream.Scratch(std::max<std::size_t>(bytes, 1)));  // null would request the size again
}

// The bound holds for any order of the additions, because CUB chooses the order.
LessonShape ShapeOf(const ReduceProblem& p) { return {.wide_steps = p.n, .depth = CeilLog2(p.n)}; }

void Enqueue(const ReduceProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  DispatchTerms(p, [&]<class Asked>(auto terms) {
    using T = typename Asked::Element;
    using F = Fold<FoldedAs<Asked::kOp, T>(), T>;
    using Wide = typename F::Wide;
    auto* out = static_cast<Wide*>(cuda.Scratch(sizeof(Wide)));
    if constexpr (F::kArg) {
      Reduce<F>(thrust::counting_iterator<std::int64_t>(0), p.n, LoadAtIndex<F, T>{terms.x}, out,
                cuda);
    } else {
      Reduce<F>(terms.x, p.n, LoadElement<F, T>{p.op}, out, cuda);
    }
    FinishCell<PartialFold<Asked>><<<1, 1, 0, cuda.handle()>>>(out, p.n, p.result);
    CUDA_CHECK_LAUNCH(FinishCell);
  });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceLibrary = Lesson<ShapeOf, Enqueue, ReduceProblem>({
    .name = "library",
    .summary = "CUB's device-wide reduction, accumulating in double",
    .source = "NVIDIA CUB, where the HIP training examples call rocPRIM",
    .deterministic = true,
    .vendor = true,
});

}  // namespace tessera
