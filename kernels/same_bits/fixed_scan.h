// The order in which the strategy `fixed_order` of Scan combines elements. It depends only on the
// position in the line that is scanned, so every device, grid and number of threads gives the same
// bits. A line is a row or a column of the array, from the end where the scan begins.
//
//     segment   16 elements           one after the other
//     stripe    32 segments           the scan of Kogge and Stone over their totals
//     chunk      8 stripes            one after the other, and so on
//     part       8 chunks
//     group     32 parts
//     region    32 groups
//
// Each unit is combined starting with the identity, so that a missing element changes no bit.
//
//     chunks = parts + chunks of the part
//     result = ((regions + (groups + chunks)) + (stripes + segments)) + elements of the segment
//
// Each term is the total of all units of that kind that precede the element in the next larger
// unit. Values are combined in Fold::Wide, except that f16 is added in f32 within a chunk, where
// sums cannot overflow. A result is rounded to its type once, when it is stored.
#pragma once

#include <cstdint>

#include "kernels/problem/strategy.h"
#include "kernels/same_bits/reduction.h"

namespace tessera {

inline constexpr int kScanItems = 16;                    // elements of a segment
inline constexpr int kScanSegments = 32;                 // segments of a stripe
inline constexpr int kScanStripes = 8;                   // stripes of a chunk
inline constexpr int kScanPart = 8;                      // chunks of a part
inline constexpr int kScanFan = 32;                      // parts of a group, and groups of a region
inline constexpr int kScanGroup = kScanPart * kScanFan;  // chunks of a group
inline constexpr std::int64_t kScanStripe = kScanItems * kScanSegments;
inline constexpr std::int64_t kScanChunk = kScanStripe * kScanStripes;

constexpr std::int64_t ScanChunks(std::int64_t length) {
  return (length + kScanChunk - 1) / kScanChunk;
}
constexpr std::int64_t ScanGroups(std::int64_t length) {
  return (ScanChunks(length) + kScanGroup - 1) / kScanGroup;
}
constexpr std::int64_t ScanRegions(std::int64_t length) {
  return (ScanGroups(length) + kScanFan - 1) / kScanFan;
}

// The type in which the elements of a chunk are combined.
template <class F>
using ScanValue =
    std::conditional_t<F::kOp == ReduceOp::kSum && std::is_same_v<typename F::Element, Half>, float,
                       typename F::Wide>;
template <class F>
TESSERA_HD typename F::Out FinishScan(ScanValue<F> value) {
  if constexpr (std::is_same_v<ScanValue<F>, typename F::Wide>) {
    return F::FinishAxis(value, 1);
  } else {
    return typename F::Out(value);
  }
}

// The number of additions that a term passes through, within its chunk and between chunks.
inline FoldSteps ScanSteps(DType dtype, std::int64_t length) {
  const std::int64_t within = kScanItems + 5 + kScanStripes + 4;
  const std::int64_t beyond = kScanPart + 2 * kScanFan + ScanRegions(length) + 3;
  return dtype == DType::kF16 ? FoldSteps{within, beyond} : FoldSteps{0, within + beyond};
}

// The totals of everything before a chunk, for code that takes chunks one after the other.
template <class F>
class ScanCarry {
 public:
  using Wide = typename F::Wide;

  // Returns the fold of all chunks so far.
  TESSERA_HD Wide Base() const {
    return F::Combine(regions_, F::Combine(groups_, F::Combine(parts_, chunks_)));
  }
  // Adds the total of the next chunk.
  TESSERA_HD void Add(Wide total) {
    chunks_ = F::Combine(chunks_, total);
    ++count_;
    if (count_ % kScanPart != 0) return;
    Move(chunks_, parts_);
    if (count_ % kScanGroup != 0) return;
    Move(parts_, groups_);
    if (count_ % (kScanGroup * kScanFan) != 0) return;
    Move(groups_, regions_);
  }

 private:
  TESSERA_HD static void Move(Wide& from, Wide& to) {
    to = F::Combine(to, from);
    from = F::template Identity<Wide>();
  }

  Wide regions_ = F::template Identity<Wide>();
  Wide groups_ = F::template Identity<Wide>();
  Wide parts_ = F::template Identity<Wide>();
  Wide chunks_ = F::template Identity<Wide>();
  std::int64_t count_ = 0;
};

// Calls f(std::type_identity<Fold<op, T>>{}) for the fold of a scan.
template <class F>
void DispatchScan(ReduceOp op, DType dtype, F&& f) {
  DispatchDType(dtype, [&]<class T>(T) {
    using R = ReduceOp;
    if constexpr (std::is_same_v<T, std::int32_t>) {  // the only type that ALL and ANY fold
      if (op == R::kAll) return f(std::type_identity<Fold<R::kAll, T>>{});
      if (op == R::kAny) return f(std::type_identity<Fold<R::kAny, T>>{});
    }
    switch (op) {
      case R::kProduct:
        return f(std::type_identity<Fold<R::kProduct, T>>{});
      case R::kMin:
        return f(std::type_identity<Fold<R::kMin, T>>{});
      case R::kMax:
        return f(std::type_identity<Fold<R::kMax, T>>{});
      default:
        return f(std::type_identity<Fold<R::kSum, T>>{});
    }
  });
}

// The models of strategies that read every element once and write every result once.
inline double ScanRoundoff(const ScanProblem& p, FoldSteps steps) {
  return ReduceRoundoff(p.op, p.dtype, p.length, steps);
}
inline double ScanRoundoff(const ScanProblem& p, std::int64_t steps) {
  return ScanRoundoff(p, FoldSteps{0, steps});
}
inline std::uint64_t ScanBytes(const ScanProblem& p) {
  return static_cast<std::uint64_t>(p.elements()) *
         (SizeOf(p.dtype) + SizeOf(ResultDType(p.op, p.dtype)));
}

}  // namespace tessera
