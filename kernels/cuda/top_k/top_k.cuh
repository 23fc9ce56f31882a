// Code that the TopK strategies share: a row's arrays, candidates as single numbers, and costs.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/problem/top_k.h"

namespace tessera {

template <class T>
struct TopKArrays {
  const T* x;
  T* values;
  std::int64_t* indices;
  std::int64_t rows, n, k, inner;
  bool smallest;

  explicit TopKArrays(const TopKProblem& p)
      : x(static_cast<const T*>(p.x)),
        values(static_cast<T*>(p.values)),
        indices(p.indices),
        rows(p.rows),
        n(p.n),
        k(p.k),
        inner(p.inner),
        smallest(p.smallest) {}

  __device__ KeyOf<T> Key(std::int64_t row, std::int64_t i) const {
    return TopKKey(x[row * n + i], smallest);
  }
  // Stores the j-th result of the row. Its value is copied from x, so that it keeps its bits.
  __device__ void Store(std::int64_t row, std::int64_t j, std::int64_t index) const {
    const std::int64_t place = TopKPlace(row, j, k, inner);
    values[place] = x[row * n + index];
    indices[place] = index;
  }
};

// A candidate, with its key in the upper bits and its place in the lower 32 bits. Places are in
// index order, so a single integer comparison decides, even for equal keys.
__extension__ using Bits128 = unsigned __int128;
template <class T>
using Entry = std::conditional_t<sizeof(T) == 8, Bits128, std::uint64_t>;

// Comes after every candidate, because places are less than 2^32 - 1.
template <class T>
inline constexpr Entry<T> kNoEntry = static_cast<Entry<T>>(~Entry<T>{0});

template <class T>
__device__ Entry<T> MakeEntry(KeyOf<T> key, std::uint32_t place) {
  return static_cast<Entry<T>>(key) << 32 | place;
}
template <class E>
__device__ std::uint32_t PlaceOf(E entry) {
  return static_cast<std::uint32_t>(entry);
}

// Returns a requirement if the element indices of the rows do not fit in an entry's 32 bits, and an
// empty string otherwise.
inline std::string LongRowRefusal(const TopKProblem& p) {
  return p.n < std::int64_t{0xffffffff} ? "" : "rows of fewer than 2^32 - 1 elements";
}

// Returns the number of places in a sorted list of k entries in shared memory, a power of two.
inline int SortedSize(std::int64_t k) {
  return static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(k, 1))));
}

inline std::size_t EntryBytes(DType dtype) { return SizeOf(dtype) == 8 ? 16 : 8; }

// Returns the number of blocks for a grid that strides over `work` items.
inline unsigned TopKBlocks(std::int64_t work) {
  return static_cast<unsigned>(std::min<std::int64_t>(work, std::int64_t{1} << 30));
}

// Launches the kernel with `shared` bytes of dynamic shared memory. If these and the shared memory
// that the kernel declares exceed 48 KiB, sets the attribute that allows them.
template <class Kernel, class... Arguments>
void LaunchTopK(Kernel kernel, unsigned blocks, int threads, std::size_t shared, CudaStream& stream,
                const Arguments&... arguments) {
  constexpr std::size_t kDeclared = 1 << 10;  // at most
  if (shared + kDeclared > std::size_t{48} << 10) AllowSharedBytes(kernel, shared);
  kernel<<<blocks, threads, shared, stream.handle()>>>(arguments...);
  CUDA_CHECK_LAUNCH(kernel);
}

// Elements are compared and never added, so there is no rounding error.
inline double TopKRoundoff(const TopKProblem&) { return 0; }

// Returns the bytes of x, read `times` times, plus the bytes of the results.
inline std::uint64_t TopKBytes(const TopKProblem& p, std::uint64_t times) {
  return times * static_cast<std::uint64_t>(p.rows) * static_cast<std::uint64_t>(p.n) *
             SizeOf(p.dtype) +
         TopKOutBytes(p);
}

}  // namespace tessera
