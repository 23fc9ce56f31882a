// Select with CUB, CUDA's library of building blocks: DeviceSelect of flagged elements, once for
// the values and once for the indices (selected from a counting iterator).
//
// Cost at n = 2^20, f32, half of them selected: 1 MiB of mask and 4 MiB of x read, 2 MiB written;
// with indices, 1 MiB of mask again and 4 MiB of indices written.
#include <thrust/iterator/counting_iterator.h>

#include <algorithm>
#include <cub/device/device_select.cuh>

#include "kernels/cuda/select/select.cuh"

namespace tessera {
namespace {

// Writes the elements of `in` whose byte of the mask is not 0. CUB also writes their number.
template <class In, class Out>
void Flagged(const SelectProblem& p, In in, Out* out, std::int64_t* number, CudaStream& stream) {
  const auto* const mask = static_cast<const std::uint8_t*>(p.mask);
  std::size_t bytes = 0;
  const auto select = [&](void* workspace) {
    CheckCuda(
        cub::DeviceSelect::Flagged(workspace, bytes, in, mask, out, number, p.n, stream.handle()),
        "cub::DeviceSelect");
  };
  select(nullptr);  // gets the size of the workspace
  select(stream.Scratch(std::max<std::size_t>(bytes, 1)));
}

void Enqueue(const SelectProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  auto* const number = static_cast<std::int64_t*>(cuda.Scratch(sizeof(std::int64_t)));
  if (p.wants_values)
    DispatchSize(p.dtype, [&]<class E>(E) {
      Flagged(p, static_cast<const E*>(p.x), static_cast<E*>(p.values), number, cuda);
    });
  if (p.wants_indices)
    Flagged(p, thrust::counting_iterator<std::int64_t>(0), p.indices, number, cuda);
}

}  // namespace

extern constexpr Strategy<SelectProblem> kSelectLibrary = {
    .name = "library",
    .summary = "CUB's selection of flagged elements",
    .source = "NVIDIA CUB",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const SelectProblem&) { return 0.0; },
    .cost =
        [](const SelectProblem& p) {
          return CudaSelectCost(p, p.wants_values && p.wants_indices ? 2 : 1, 64);
        },
    .launch = Enqueue,
    // CUB's workspace has a state of 16 bytes per tile.
    .scratch = [](const SelectProblem& p) -> std::uint64_t {
      return (std::uint64_t{1} << 16) + static_cast<std::uint64_t>(p.n) / 16;
    },
    .vendor = true,
};

}  // namespace tessera
