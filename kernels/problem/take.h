// Defines what an index of Take means and the cost of Take, once for the host and the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/base/element.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Returns the index in [0, length) that `index` stands for, or -1 if it is out of range. REQUIRES:
// length > 0.
TESSERA_HD constexpr std::int64_t ResolveIndex(std::int64_t index, std::int64_t length,
                                               TakeMode mode) {
  if (index >= 0 && index < length) return index;
  if (mode == TakeMode::kClip) return index < 0 ? 0 : length - 1;
  if (mode == TakeMode::kWrap) {
    const std::int64_t rest = index % length;
    return rest < 0 ? rest + length : rest;
  }
  return index < 0 && index >= -length ? index + length : -1;
}

// Returns the number of indices.
constexpr std::int64_t TakeIndices(const TakeProblem& p) {
  return p.along ? p.elements() : p.count;
}

// Returns the bytes of a row, a run of elements that one index selects together. A row is one
// element unless its elements are adjacent in x.
constexpr std::int64_t TakeRowBytes(const TakeProblem& p) {
  const bool adjacent = !p.along && (p.inner == 1 || p.strides[2] == 1);
  return (adjacent ? p.inner : 1) * static_cast<std::int64_t>(SizeOf(p.dtype));
}

// Returns the bytes that are moved if every row is read from memory in whole sectors of
// `sector` bytes.
inline std::uint64_t TakeBytes(const TakeProblem& p, std::int64_t sector) {
  const auto out = static_cast<std::uint64_t>(p.elements()) * SizeOf(p.dtype);
  const auto row = static_cast<std::uint64_t>(std::max<std::int64_t>(1, TakeRowBytes(p)));
  const auto fetched = std::max(row, static_cast<std::uint64_t>(sector));
  return out / row * fetched + out +
         static_cast<std::uint64_t>(TakeIndices(p)) * SizeOf(p.index_dtype);
}

// Returns the cost of any strategy: each element takes one operation.
inline Cost TakeCost(const TakeProblem& p, std::int64_t sector, std::uint64_t depth) {
  return {.bytes = TakeBytes(p, sector),
          .flops = static_cast<std::uint64_t>(p.elements()),
          .atomics = 0,
          .depth = depth,
          .scattered = static_cast<std::uint64_t>(p.elements()) * SizeOf(p.dtype) /
                       static_cast<std::uint64_t>(std::max<std::int64_t>(1, TakeRowBytes(p))),
          .among = static_cast<std::uint64_t>(p.outer * p.length * p.inner) * SizeOf(p.dtype)};
}

// Calls f(I{}), where I is the C++ type of the indices.
template <class F>
void DispatchIndex(const TakeProblem& p, F&& f) {
  if (p.index_dtype == DType::kI32) {
    f(std::int32_t{});
  } else {
    f(std::int64_t{});
  }
}

// Calls f(U{}), where U is an unsigned type of the elements' size. Elements are only copied.
template <class F>
void DispatchSize(DType dtype, F&& f) {
  switch (SizeOf(dtype)) {
    case 1:
      return f(std::uint8_t{});
    case 2:
      return f(std::uint16_t{});
    case 4:
      return f(std::uint32_t{});
    default:
      return f(std::uint64_t{});
  }
}

}  // namespace tessera
