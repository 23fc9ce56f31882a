// Take with Thrust, CUDA's library of algorithms: thrust::gather of elements of a vector.
//
// thrust::gather does not check its map. The map is therefore an iterator that checks each index
// when it is read and replaces a bad index with 0.
//
// Cost at 2^20 random i64 indices, f32: 32 MiB of sectors and 8 MiB of indices read, 4 MiB written.
#include <thrust/execution_policy.h>
#include <thrust/gather.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <thrust/system_error.h>

#include <string>

#include "kernels/cuda/take/take.cuh"

namespace tessera {
namespace {

template <class I>
struct Checked {
  TakeIndexes<I> indexes;

  __device__ std::int64_t operator()(std::int64_t position) const {
    const std::int64_t index = indexes.Resolve(indexes.Load(position), position, /*marks=*/true);
    return index < 0 ? 0 : index;
  }
};

template <class E, class I>
void Run(const TakeProblem& p, CudaStream& stream) {
  LaunchWithIndexes<I>(p, stream, [&](const TakeIndexes<I>& indexes) {
    const auto map = thrust::make_transform_iterator(
        thrust::make_counting_iterator(std::int64_t{0}), Checked<I>{indexes});
    try {
      thrust::gather(thrust::cuda::par_nosync.on(stream.handle()), map, map + p.count,
                     static_cast<const E*>(p.x), static_cast<E*>(p.out));
    } catch (const thrust::system_error& error) {
      CheckCuda(static_cast<cudaError_t>(error.code().value()), "thrust::gather");
      throw;
    }
  });
}

void Enqueue(const TakeProblem& p, Stream& stream) {
  DispatchSize(p.dtype, [&]<class E>(E) {
    DispatchIndex(p, [&]<class I>(I) { Run<E, I>(p, Cuda(stream)); });
  });
}

std::string Refuses(const TakeProblem& p) {
  const bool adjacent = p.length == 1 || p.strides[1] == 1;
  return p.outer == 1 && p.inner == 1 && adjacent ? "" : "elements of a contiguous vector";
}

}  // namespace

extern constexpr Strategy<TakeProblem> kTakeLibrary = {
    .name = "library",
    .summary = "Thrust's gather of a vector's elements",
    .source = "NVIDIA Thrust",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const TakeProblem&) { return 0.0; },
    .cost = CudaTakeCost,
    .launch = Enqueue,
    .refuses = Refuses,
    .vendor = true,
};

}  // namespace tessera
