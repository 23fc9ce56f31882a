// The order in which Sort sorts, defined once for the host and the device. It is the order of
// TopK's keys (kernels/problem/top_k.h). Strategies move elements as words of their size and
// compute the key of a word whenever they need it. Values therefore keep their bits, and types of
// the same size share code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels/base/element.h"
#include "kernels/problem/strategy.h"

namespace tessera {

template <class Word>
inline constexpr auto kSignOf = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));

// Converts words to keys, which are sorted in ascending order.
template <class Word>
struct SortKey {
  Word minus_zero;  // the word that is replaced by 0: -0, or 0 for integers
  Word negative;    // the bits that are flipped if the highest bit is set
  Word infinity;    // words with larger magnitudes are NaNs
  Word flip;        // all bits if the order is descending

  TESSERA_HD Word operator()(Word word) const {
    constexpr Word kSign = kSignOf<Word>;
    if (word == minus_zero) word = 0;
    const auto magnitude = static_cast<Word>(word & static_cast<Word>(~kSign));
    const auto key = static_cast<Word>(word ^ ((word & kSign) != 0 ? negative : kSign));
    return static_cast<Word>((magnitude > infinity ? static_cast<Word>(~Word{0}) : key) ^ flip);
  }
};

// REQUIRES: the type has the size of a Word.
template <class Word>
SortKey<Word> MakeSortKey(DType dtype, bool descending) {
  constexpr auto kAll = static_cast<Word>(~Word{0});
  constexpr Word kSign = kSignOf<Word>;
  const Word flip = descending ? kAll : Word{0};
  if (IsInteger(dtype)) return {0, kSign, static_cast<Word>(~kSign), flip};
  const std::uint64_t infinity = dtype == DType::kF64    ? 0x7ff0000000000000u
                                 : dtype == DType::kF32  ? 0x7f800000u
                                 : dtype == DType::kBF16 ? 0x7f80u
                                                         : 0x7c00u;
  return {kSign, kAll, static_cast<Word>(infinity), flip};
}

// Calls f(Word{}) for the unsigned integer that has the size of the type.
template <class F>
void DispatchWord(DType dtype, F&& f) {
  if (SizeOf(dtype) == 2) {
    f(std::uint16_t{});
  } else if (SizeOf(dtype) == 4) {
    f(std::uint32_t{});
  } else {
    f(std::uint64_t{});
  }
}

// Returns the bytes of the results.
inline std::uint64_t SortOutBytes(const SortProblem& p) {
  return static_cast<std::uint64_t>(p.elements()) *
         ((p.wants_values ? SizeOf(p.dtype) : 0) + (p.wants_indices ? sizeof(std::int64_t) : 0));
}

// Elements are compared and never added, so there is no rounding error.
inline double SortRoundoff(const SortProblem&) { return 0; }

}  // namespace tessera
