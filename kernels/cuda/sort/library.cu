// Sort with CUB, CUDA's library of building blocks: its radix sort for one row, and its segmented
// sort for several.
//
// CUB sorts numbers by their bits, so a NaN with a sign would come first. CUB therefore sorts the
// keys of kernels/problem/sort.h together with the elements' positions, and the values are then
// collected from x. If only the values of one row of integers are wanted, they are sorted directly.
//
// Cost at n = 2^20, f32, one row: keys of 4 MiB and positions of 4 MiB, which CUB reads and writes
// in each of 4 passes; 2 launches besides CUB's.
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_segmented_sort.cuh>

#include "kernels/cuda/sort/sort.cuh"

namespace tessera {
namespace {

constexpr int kThreads = 256;
using Position = std::uint32_t;  // in a row

struct BeginOfRow {
  std::int64_t n;
  __host__ __device__ std::int64_t operator()(std::int64_t row) const { return row * n; }
};

template <class Word>
__global__ void MakeKeys(SortArrays<Word> arrays, Word* keys, Position* positions) {
  for (std::int64_t i = GridThread(); i < arrays.rows * arrays.n; i += GridThreads()) {
    keys[i] = arrays.key(arrays.x[i]);
    positions[i] = static_cast<Position>(i % arrays.n);
  }
}

template <class Word>
__global__ void StoreByPosition(SortArrays<Word> arrays, const Position* positions) {
  for (std::int64_t i = GridThread(); i < arrays.rows * arrays.n; i += GridThreads())
    arrays.Store(i / arrays.n, i % arrays.n, positions[i]);
}

// Calls sort(workspace, bytes) twice: for the size of the workspace, and to sort.
template <class F>
void WithWorkspace(CudaStream& stream, const F& sort) {
  std::size_t bytes = 0;
  CheckCuda(sort(nullptr, bytes), "cub::DeviceRadixSort");
  void* const workspace = stream.Scratch(std::max<std::size_t>(bytes, 1));
  CheckCuda(sort(workspace, bytes), "cub::DeviceRadixSort");
}

// Whether the elements are sorted without positions.
bool SortsDirectly(const SortProblem& p) {
  return p.rows == 1 && IsInteger(p.dtype) && !p.wants_indices;
}

template <class T>
void SortIntegers(const SortProblem& p, CudaStream& stream) {
  const auto* x = static_cast<const T*>(p.x);
  auto* values = static_cast<T*>(p.values);
  WithWorkspace(stream, [&](void* workspace, std::size_t& bytes) {
    return p.descending ? cub::DeviceRadixSort::SortKeysDescending(
                              workspace, bytes, x, values, p.n, 0, 8 * sizeof(T), stream.handle())
                        : cub::DeviceRadixSort::SortKeys(workspace, bytes, x, values, p.n, 0,
                                                         8 * sizeof(T), stream.handle());
  });
}

template <class Word>
void Run(const SortProblem& p, CudaStream& stream) {
  const SortArrays<Word> arrays(p);
  const auto n = static_cast<std::size_t>(p.elements());
  auto* const keys = static_cast<Word*>(stream.Scratch(n * sizeof(Word)));
  auto* const sorted_keys = static_cast<Word*>(stream.Scratch(n * sizeof(Word)));
  auto* const positions = static_cast<Position*>(stream.Scratch(n * sizeof(Position)));
  auto* const sorted = static_cast<Position*>(stream.Scratch(n * sizeof(Position)));
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(CeilDiv(p.elements(), kThreads), 1 << 20));
  MakeKeys<<<blocks, kThreads, 0, stream.handle()>>>(arrays, keys, positions);
  CUDA_CHECK_LAUNCH(MakeKeys);
  WithWorkspace(stream, [&](void* workspace, std::size_t& bytes) {
    if (p.rows == 1) {
      return cub::DeviceRadixSort::SortPairs(workspace, bytes, keys, sorted_keys, positions, sorted,
                                             p.n, 0, 8 * sizeof(Word), stream.handle());
    }
    const auto begins = thrust::make_transform_iterator(thrust::counting_iterator<std::int64_t>(0),
                                                        BeginOfRow{p.n});
    return cub::DeviceSegmentedSort::StableSortPairs(workspace, bytes, keys, sorted_keys, positions,
                                                     sorted, p.elements(), p.rows, begins,
                                                     begins + 1, stream.handle());
  });
  StoreByPosition<<<blocks, kThreads, 0, stream.handle()>>>(arrays, sorted);
  CUDA_CHECK_LAUNCH(StoreByPosition);
}

void Enqueue(const SortProblem& p, Stream& stream) {
  if (SortsDirectly(p)) {
    if (p.dtype == DType::kI32) {
      SortIntegers<std::int32_t>(p, Cuda(stream));
    } else {
      SortIntegers<std::int64_t>(p, Cuda(stream));
    }
  } else {
    DispatchWord(p.dtype, [&](auto word) { Run<decltype(word)>(p, Cuda(stream)); });
  }
}

std::string Refuses(const SortProblem& p) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  if (p.rows > 1) return p.elements() < kMost ? "" : "rows with fewer than 2^31 elements in total";
  return p.n < 2 * kMost ? "" : "a row of fewer than 2^32 elements";
}

// CUB's workspace has a second copy of the keys and positions, and counters.
std::uint64_t ScratchOf(const SortProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.elements());
  const std::uint64_t each = SizeOf(p.dtype) + sizeof(Position);
  const std::uint64_t counters = (std::uint64_t{16} << 20) + n / 4;
  const auto rows = static_cast<std::uint64_t>(p.rows);
  return (SortsDirectly(p) ? n * SizeOf(p.dtype) : 3 * n * each) + counters + 16 * rows;
}

Cost CostOf(const SortProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.elements());
  const auto passes = static_cast<std::uint64_t>(PassesOf(p.dtype));
  const std::uint64_t index = SortsDirectly(p) ? 0 : sizeof(Position);
  return {.bytes = SortBytes(p, 2 * passes, index),
          .flops = 30 * passes * n,
          .atomics = 0,
          .depth = passes * 512};
}

}  // namespace

extern constexpr Strategy<SortProblem> kSortLibrary = {
    .name = "library",
    .summary = "CUB's radix sort and segmented sort of keys with positions",
    .source = "NVIDIA CUB",
    .backend = Backend::kCuda,
    .deterministic = true,
    .roundoff = SortRoundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .refuses = Refuses,
    .scratch = ScratchOf,
    .vendor = true,
};

}  // namespace tessera
