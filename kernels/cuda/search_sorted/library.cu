// SearchSorted with Thrust, CUDA's library of algorithms: thrust::lower_bound and
// thrust::upper_bound of a range of keys.
//
// Cost at 2^20 keys among 2^20 f32: 4 MiB of keys and 4 MiB of x read, 8 MiB written.
#include <thrust/binary_search.h>
#include <thrust/execution_policy.h>
#include <thrust/system_error.h>

#include "kernels/cuda/search_sorted/search_sorted.cuh"

namespace tessera {
namespace {

template <class T>
struct Order {
  __device__ bool operator()(T a, T b) const {
    return Precedes(static_cast<ValueOf<T>>(a), static_cast<ValueOf<T>>(b));
  }
};

void Enqueue(const SearchSortedProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  DispatchElement(p.dtype, [&]<class T>(T) {
    const auto* const x = static_cast<const T*>(p.x);
    const auto* const keys = static_cast<const T*>(p.keys);
    const auto policy = thrust::cuda::par_nosync.on(cuda.handle());
    try {
      if (p.right) {
        thrust::upper_bound(policy, x, x + p.length, keys, keys + p.n, p.out, Order<T>());
      } else {
        thrust::lower_bound(policy, x, x + p.length, keys, keys + p.n, p.out, Order<T>());
      }
    } catch (const thrust::system_error& error) {
      CheckCuda(static_cast<cudaError_t>(error.code().value()), "thrust::lower_bound");
      throw;
    }
  });
}

}  // namespace

extern constexpr Strategy<SearchSortedProblem> kSearchSortedLibrary = {
    .name = "library",
    .summary = "Thrust's binary searches of a range of keys",
    .source = "NVIDIA Thrust",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const SearchSortedProblem&) { return 0.0; },
    .cost = [](const SearchSortedProblem& p) { return CudaSearchSortedCost(p, 1); },
    .launch = Enqueue,
    .vendor = true,
};

}  // namespace tessera
