// Code that the strategies of Sort share: the arrays of a problem, and limits.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/scan/scan.cuh"
#include "kernels/problem/sort.h"

namespace tessera {

// The number of SMs of the largest GPU, for an upper bound. Launches use the device's number.
inline constexpr int kMostMultiprocessors = 192;

template <class Word>
struct SortArrays {
  const Word* x;
  Word* values;           // null if they are not wanted
  std::int64_t* indices;  // null if they are not wanted
  std::int64_t rows, n;
  SortKey<Word> key;

  explicit SortArrays(const SortProblem& p)
      : x(static_cast<const Word*>(p.x)),
        values(p.wants_values ? static_cast<Word*>(p.values) : nullptr),
        indices(p.wants_indices ? p.indices : nullptr),
        rows(p.rows),
        n(p.n),
        key(MakeSortKey<Word>(p.dtype, p.descending)) {}

  // Stores the j-th result of a row, which is the row's element `index`.
  __device__ void Store(std::int64_t row, std::int64_t j, std::int64_t index) const {
    if (values != nullptr) values[row * n + j] = x[row * n + index];
    if (indices != nullptr) indices[row * n + j] = index;
  }
};

// Returns the bytes of x, of `moved` further reads or writes of all elements, and of the results.
// In these reads and writes, an element has `index_bytes` in addition to its word.
inline std::uint64_t SortBytes(const SortProblem& p, std::uint64_t moved,
                               std::uint64_t index_bytes) {
  const auto n = static_cast<std::uint64_t>(p.elements());
  return n * SizeOf(p.dtype) + moved * n * (SizeOf(p.dtype) + index_bytes) + SortOutBytes(p);
}

// Returns the number of digits of a key.
inline int PassesOf(DType dtype) { return static_cast<int>(SizeOf(dtype)); }

// Returns what strategies with counters per row require but the problem lacks, or an empty string.
inline std::string RefusesManyShortRows(const SortProblem& p) {
  constexpr std::int64_t kLeast = 1024;
  return p.n >= kLeast || p.rows <= kLeast ? "" : "rows of 1024 elements or more";
}

}  // namespace tessera
