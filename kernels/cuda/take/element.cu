// Take with a thread for each element of the result: the thread finds the position of its index,
// loads the index, and then loads the element.
//
// The second load waits for the first one, so a thread works on kEach elements at the same time:
// it loads all their indices, then all elements, and then stores them. Adjacent threads store
// adjacent elements. Their loads coalesce only if the indices are close together, because every
// load fetches a sector of 32 bytes. If a row has several elements, each of them loads and checks
// the same index again.
//
// Cost at 2^14 rows of 64 f32: 36 MiB of sectors if nothing coalesces, 4 MiB written.
//
// The kernel is correct for any strides and alignment, because loads and stores are scalar, and for
// any grid, because threads stride over it. A thread whose index is out of range loads nothing.
#include <array>
#include <limits>

#include "kernels/cuda/take/take.cuh"

namespace tessera {
namespace {

constexpr int kEach = 4;

// N is std::uint32_t if the number of elements fits, because a 64-bit division costs four times as
// much as a 32-bit one.
template <class E, class N>
struct Elements {
  const E* x;
  E* out;
  N n, count, inner;
  bool outer, along;  // outer: whether the outer extent is above 1
  std::int64_t strides[3];
};

template <class N>
struct Place {
  N o, j, i;
};

template <class E, class N>
__device__ Place<N> PlaceOf(const Elements<E, N>& p, N at) {
  Place<N> place = {0, at, 0};
  if (p.inner != 1) {
    place.j = at / p.inner;
    place.i = at - place.j * p.inner;
  }
  if (p.outer) {
    place.o = place.j / p.count;
    place.j -= place.o * p.count;
  }
  return place;
}

// Returns the address of the element of x, or null if the index is out of range. If many elements
// share a bad index, only the first of them marks its position.
template <class E, class I, class N>
__device__ const E* Find(const Elements<E, N>& p, const TakeIndexes<I>& indexes, N at,
                         const Place<N>& place, I loaded) {
  const bool marks = p.along || (place.o == 0 && place.i == 0);
  const auto position = static_cast<std::int64_t>(p.along ? at : place.j);
  const std::int64_t index = indexes.Resolve(loaded, position, marks);
  if (index < 0) return nullptr;
  return p.x + static_cast<std::int64_t>(place.o) * p.strides[0] + index * p.strides[1] +
         static_cast<std::int64_t>(place.i) * p.strides[2];
}

template <class E, class I, class N>
__global__ void __launch_bounds__(kMostThreads)
    TakeElements(Elements<E, N> p, TakeIndexes<I> indexes) {
  const auto n = static_cast<std::int64_t>(p.n);
  const std::int64_t block = std::int64_t{blockDim.x} * kEach;
  for (std::int64_t begin = blockIdx.x * block; begin < n; begin += gridDim.x * block) {
    const std::int64_t first = begin + threadIdx.x;
    Place<N> places[kEach];
    I loaded[kEach];
    const E* from[kEach];
    E elements[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const std::int64_t at = first + j * std::int64_t{blockDim.x};
      if (at >= n) continue;
      places[j] = PlaceOf(p, static_cast<N>(at));
      loaded[j] = indexes.Load(p.along ? at : static_cast<std::int64_t>(places[j].j));
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const std::int64_t at = first + j * std::int64_t{blockDim.x};
      from[j] = at < n ? Find(p, indexes, static_cast<N>(at), places[j], loaded[j]) : nullptr;
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (from[j] != nullptr) elements[j] = __ldg(from[j]);
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (from[j] != nullptr) p.out[first + j * std::int64_t{blockDim.x}] = elements[j];
  }
}

template <class E, class I, class N>
void Launch(const TakeProblem& p, CudaStream& stream) {
  const Elements<E, N> elements = {static_cast<const E*>(p.x),
                                   static_cast<E*>(p.out),
                                   static_cast<N>(p.elements()),
                                   static_cast<N>(p.count),
                                   static_cast<N>(p.inner),
                                   p.outer > 1,
                                   p.along,
                                   {p.strides[0], p.strides[1], p.strides[2]}};
  const Grid grid = MakeGrid(p.elements(), p.launch, 256, kEach);
  LaunchWithIndexes<I>(p, stream, [&](const TakeIndexes<I>& indexes) {
    TakeElements<<<grid.blocks, grid.block_size, 0, stream.handle()>>>(elements, indexes);
    CUDA_CHECK_LAUNCH(TakeElements);
  });
}

void Enqueue(const TakeProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  DispatchSize(p.dtype, [&]<class E>(E) {
    DispatchIndex(p, [&]<class I>(I) {
      if (p.elements() <= std::numeric_limits<std::int32_t>::max()) {
        Launch<E, I, std::uint32_t>(p, cuda);
      } else {
        Launch<E, I, std::uint64_t>(p, cuda);
      }
    });
  });
}

}  // namespace

extern constexpr Strategy<TakeProblem> kTakeElement = {
    .name = "element",
    .summary = "one thread for every four elements, whose loads are in flight together",
    .source = "definition",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = kAnyGridSize},
    .roundoff = [](const TakeProblem&) { return 0.0; },
    .cost = CudaTakeCost,
    .launch = Enqueue,
};

}  // namespace tessera
