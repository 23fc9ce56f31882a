// The order in which SumByLabel adds the terms of a sum, and what it costs, defined once for the
// host and the device.
//
// The terms are the elements of a column whose rows have the same label, in the order of the rows.
// kLabelChunk adjacent terms are a chunk, and kLabelGroup adjacent chunks a group; the last of
// each may be shorter. A chunk's sum is the sum of its terms, a group's sum that of its chunks, and
// the result that of its groups. Each sum begins with 0 and adds these in order. All
// additions are in WideOf<T>, so no sum of finite elements of 32 bits or fewer overflows.
//
// The order depends only on the number of terms, so chunks and groups can be summed at the same
// time, and a sum has the same bits on every device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/base/element.h"
#include "kernels/problem/roundoff.h"
#include "kernels/problem/strategy.h"
#include "kernels/problem/take.h"
#include "kernels/same_bits/convert.h"

namespace tessera {

inline constexpr std::int64_t kLabelChunk = 64;  // terms
inline constexpr std::int64_t kLabelGroup = 64;  // chunks
inline constexpr std::int64_t kLabelGroupTerms = kLabelChunk * kLabelGroup;

// The type of a term in the additions.
template <class T>
TESSERA_HD WideOf<T> LabelTerm(T element) {
  return static_cast<WideOf<T>>(static_cast<ValueOf<T>>(element));
}

// The C++ type of the result.
template <class T>
using LabelSumOf = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>;

// Every NaN gets the same bits on all devices, which convert NaN to 16 bits in different ways.
template <class T>
TESSERA_HD LabelSumOf<T> FinishLabelSum(WideOf<T> sum) {
  if constexpr (!std::is_integral_v<T>)
    if (sum != sum) sum = std::numeric_limits<double>::quiet_NaN();
  auto result = ConvertElement<LabelSumOf<T>>(sum);
  if constexpr (std::is_same_v<T, Half>)
    if (sum != sum) result.bits = 0x7e00;
  if constexpr (std::is_same_v<T, BFloat16>)
    if (sum != sum) result.bits = 0x7fc0;
  return result;
}

// Rows sorted by label, stably. Rows with label j are sorted[k] for k in [begin[j], end[j]). The
// rows are divided into windows of kLabelChunk places, in each of which at most one complete chunk
// begins, whose sums are at partial[window].
struct LabelRuns {
  const std::int64_t* sorted;
  const std::int64_t* begin;
  const std::int64_t* end;

  // Returns the place where the window's complete chunk begins, or -1. `label` is that of the
  // window's last place, `last`, which is in the chunk if there is one.
  TESSERA_HD std::int64_t ChunkAt(std::int64_t last, std::int64_t label) const {
    const std::int64_t chunk = last - (last - begin[label]) % kLabelChunk;
    return chunk + kLabelChunk <= end[label] ? chunk : -1;
  }
  // Whether this chunk is the first of a complete group.
  TESSERA_HD bool BeginsGroup(std::int64_t chunk, std::int64_t label) const {
    return (chunk - begin[label]) % kLabelGroupTerms == 0 && chunk + kLabelGroupTerms <= end[label];
  }
};

constexpr std::int64_t LabelWindows(const SumByLabelProblem& p) {
  return (p.n + kLabelChunk - 1) / kLabelChunk;
}

// The labels, as the indices of a Take.
inline TakeProblem LabelsAsIndices(const SumByLabelProblem& p) {
  return {.index_dtype = p.label_dtype,
          .mode = p.mode,
          .length = p.length,
          .count = p.n,
          .indices = p.labels,
          .result = p.result};
}

// The type in which the labels in [0, length) are sorted. Positive BF16 numbers have the order of
// their bits, so up to kMostShortLabels labels are sorted in half as many passes.
inline constexpr std::int64_t kMostShortLabels = 0x7f80;
constexpr DType SortedLabelDType(std::int64_t length) {
  if (length <= kMostShortLabels) return DType::kBF16;
  return length <= std::numeric_limits<std::int32_t>::max() ? DType::kI32 : DType::kI64;
}
// Calls f(K{}), where K is an integer with the bits of that type.
template <class F>
void DispatchSortedLabel(std::int64_t length, F&& f) {
  switch (SortedLabelDType(length)) {
    case DType::kBF16:
      return f(std::int16_t{});
    case DType::kI32:
      return f(std::int32_t{});
    default:
      return f(std::int64_t{});
  }
}

// Returns the sort of the labels, without its arrays.
inline SortProblem LabelSort(const SumByLabelProblem& p) {
  return {.dtype = SortedLabelDType(p.length), .rows = 1, .n = p.n};
}

// Returns the bytes of the arrays that a strategy with LabelRuns needs: the labels before and after
// the sort, the rows, both ends of the runs, and the partial sums of the windows. `window_bytes` is
// what it needs in addition for each window.
inline std::uint64_t LabelRunBytes(const SumByLabelProblem& p, std::uint64_t window_bytes) {
  const auto n = static_cast<std::uint64_t>(p.n), length = static_cast<std::uint64_t>(p.length);
  const auto windows = static_cast<std::uint64_t>(LabelWindows(p));
  return n * (2 * SizeOf(SortedLabelDType(p.length)) + sizeof(std::int64_t)) +
         length * 2 * sizeof(std::int64_t) +
         windows * (static_cast<std::uint64_t>(p.inner) * sizeof(double) + window_bytes);
}

constexpr std::uint64_t LabelOutBytes(const SumByLabelProblem& p) {
  return static_cast<std::uint64_t>(p.length * p.inner) *
         SizeOf(ResultDType(ReduceOp::kSum, p.dtype));
}

// The bound is for rows that all have the same label. A term passes through the additions within
// its chunk, within its group and between groups; the result is then rounded.
inline double LabelRoundoff(const SumByLabelProblem& p) {
  return SumRoundoff(p.dtype, {.narrow = 0,
                               .wide = std::min(p.n, kLabelChunk) + kLabelGroup +
                                       (p.n + kLabelGroupTerms - 1) / kLabelGroupTerms});
}

// `moved` is the number of bytes that are moved for each row in addition to its elements and label.
inline Cost LabelCost(const SumByLabelProblem& p, std::uint64_t moved, std::uint64_t atomics,
                      std::uint64_t depth) {
  const auto n = static_cast<std::uint64_t>(p.n);
  const auto elements = static_cast<std::uint64_t>(p.elements());
  return {
      .bytes = elements * SizeOf(p.dtype) + n * (SizeOf(p.label_dtype) + moved) + LabelOutBytes(p),
      .flops = elements + n,
      .atomics = atomics,
      .depth = depth};
}

}  // namespace tessera
