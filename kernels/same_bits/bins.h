// Defines the bin that an element belongs to and the cost of a Histogram, once for the host and the
// device.
//
// A bin contains its lower edge, and the last bin contains its upper edge as well:
//
//     [edge 0, edge 1)   [edge 1, edge 2)   ...   [edge n-1, edge n]
//
// Bins are found by comparing elements with edges, so every strategy gives the same counts. No
// compiler may fuse the multiplication and the addition of Edge() below (CMakeLists.txt).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/base/element.h"
#include "kernels/problem/search_sorted.h"
#include "kernels/problem/strategy.h"
#include "kernels/same_bits/convert.h"

namespace tessera {

inline constexpr std::int32_t kNoBin = -1;

// Returns the last bin whose lower edge is not above x. edge(i): returns the lower edge of bin i.
// REQUIRES: bins > 0, and the first edge is not above x.
template <class C, class Edge>
TESSERA_HD std::int32_t SearchBin(C x, std::int32_t bins, const Edge& edge) {
  std::int32_t low = 0, high = bins;  // the bin is in [low, high)
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    if (edge(middle) <= x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Bin i contains the elements that equal i.
template <class E>
struct IntegerBins {
  std::int32_t bins;

  explicit IntegerBins(const HistogramProblem& p) : bins(static_cast<std::int32_t>(p.bins)) {}
  TESSERA_HD void Begin() {}

  TESSERA_HD std::int32_t operator()(E element) const {
    const auto x = static_cast<std::int64_t>(element);  // NOLINT: i8 is signed
    return x >= 0 && x < bins ? static_cast<std::int32_t>(x) : kNoBin;
  }
};

// Bins of the same width. An estimate in the type of the elements is enough unless it is so close
// to an edge that its rounding may matter. Only in that case are edges computed.
template <class E>
struct EvenBins {
  using Real = std::conditional_t<std::is_same_v<ValueOf<E>, float>, float, double>;

  std::int32_t bins;
  Real first, last;     // the outer edges
  Real low, per_width;  // (x - low) * per_width is the estimate, in widths
  Real margin;          // the estimate is this close to the exact value
  double exact_low, step;

  explicit EvenBins(const HistogramProblem& p)
      : bins(static_cast<std::int32_t>(p.bins)),
        first(Rounded(p.low)),
        last(Rounded(p.high)),
        low(static_cast<Real>(p.low)),
        exact_low(p.low),
        step((p.high - p.low) / static_cast<double>(p.bins)) {
    const double range = p.high - p.low, count = static_cast<double>(p.bins);
    per_width = static_cast<Real>(count / range);
    // Fewer than eight roundings move the estimate or an edge, each by at most the unit roundoff of
    // the range or of the larger edge.
    const double larger = std::max(std::abs(p.low), std::abs(p.high));
    const double unit = std::is_integral_v<E> ? UnitRoundoff(DType::kF64) : UnitRoundoff(p.dtype);
    margin = static_cast<Real>(8 * unit * count * (1 + larger / range));
    // Subnormal numbers are rounded by more than the unit roundoff.
    const double normal = std::is_same_v<E, Half> ? 0x1p-14 : std::numeric_limits<Real>::min();
    if (!std::isnormal(per_width) || !(range >= normal * count)) margin = 1;
  }
  TESSERA_HD void Begin() {}

  TESSERA_HD std::int32_t operator()(E element) const {
    const auto x = static_cast<Real>(static_cast<ValueOf<E>>(element));
    if (!(x >= first && x <= last)) return kNoBin;
    const Real at = (x - low) * per_width;
    if (at >= 0 && at < static_cast<Real>(bins)) {
      const auto bin = static_cast<std::int32_t>(at);
      const Real rest = at - static_cast<Real>(bin);
      if (rest > margin && rest < 1 - margin) return bin;
      // The estimate is usually in the right bin even if it is close to an edge.
      if (Edge(bin) <= x && (bin == bins - 1 || x < Edge(bin + 1))) return bin;
    }
    return SearchBin(static_cast<double>(x), bins, [this](std::int32_t i) { return Edge(i); });
  }

 private:
  // Rounds an edge to the type of the elements, unless they are integers.
  TESSERA_HD static double Rounded(double edge) {
    if constexpr (std::is_integral_v<E>) {
      return edge;
    } else {
      return static_cast<double>(static_cast<ValueOf<E>>(ConvertElement<E>(edge)));
    }
  }
  TESSERA_HD double Edge(std::int32_t i) const {
    return Rounded(static_cast<double>(i) * step + exact_low);
  }
};

// Bins with edges in memory. Edges are compared with elements as C: double or std::int64_t. If bins
// have almost equal widths, the first guess is right.
template <class E, class C>
struct EdgeBins {
  const C* edges;
  std::int32_t bins;
  C first = 0, last = 0;
  double per_width = 0;

  explicit EdgeBins(const HistogramProblem& p)
      : edges(static_cast<const C*>(p.edges)), bins(static_cast<std::int32_t>(p.bins)) {}
  // Reads the outer edges.
  TESSERA_HD void Begin() {
    first = edges[0];
    last = edges[bins];
    per_width = bins / (static_cast<double>(last) - static_cast<double>(first));
  }

  TESSERA_HD std::int32_t operator()(E element) const {
    const auto x = static_cast<C>(static_cast<ValueOf<E>>(element));
    if (!(x >= first && x <= last)) return kNoBin;
    const double at = (static_cast<double>(x) - static_cast<double>(first)) * per_width;
    if (at >= 0 && at < bins) {
      const auto bin = static_cast<std::int32_t>(at);
      if (edges[bin] <= x && (bin == bins - 1 || x < edges[bin + 1])) return bin;
    }
    return SearchBin(x, bins, [this](std::int32_t i) { return edges[i]; });
  }
};

// Calls f(E{}, bins), where E is the type of the elements. Once bins.Begin() has been called on the
// edges' device, bins(element) returns the bin of an element, or kNoBin.
template <class F>
void DispatchBins(const HistogramProblem& p, const F& f) {
  DispatchElement(p.dtype, [&]<class E>(E zero) {
    if constexpr (std::is_integral_v<E>) {
      if (p.kind == BinKind::kIntegers) return f(zero, IntegerBins<E>(p));
      if (p.kind == BinKind::kEdges && p.edge_dtype == DType::kI64)
        return f(zero, EdgeBins<E, std::int64_t>(p));
    }
    if (p.kind == BinKind::kEdges) return f(zero, EdgeBins<E, double>(p));
    return f(zero, EvenBins<E>(p));
  });
}

// Returns the cost of a strategy that has `copies` sets of counters. Each element takes a few
// operations, and a search among edges in memory takes one operation per level.
inline Cost HistogramCost(const HistogramProblem& p, std::uint64_t copies, std::uint64_t atomics,
                          std::uint64_t depth) {
  const auto n = static_cast<std::uint64_t>(p.n), bins = static_cast<std::uint64_t>(p.bins);
  const bool searches = p.kind == BinKind::kEdges;
  const std::uint64_t each = searches ? 4 + static_cast<std::uint64_t>(std::bit_width(bins)) : 4;
  return {.bytes = n * SizeOf(p.dtype) + copies * bins * sizeof(std::int64_t) +
                   (searches ? (bins + 1) * sizeof(double) : 0),
          .flops = n * each,
          .atomics = atomics,
          .depth = depth};
}

// Returns the cost of a strategy on the CPU whose cores count `shares` of the elements. A search
// waits for each edge before it reads the next, which takes as long as two or three accesses that
// do not wait for each other.
inline Cost CpuHistogramCost(const HistogramProblem& p, std::int64_t shares, std::uint64_t copies) {
  const auto n = static_cast<std::uint64_t>(p.n), bins = static_cast<std::uint64_t>(p.bins);
  Cost cost = HistogramCost(p, copies, 0, 0);
  cost.among = bins * sizeof(std::int64_t);
  cost.scattered = n;
  if (p.kind == BinKind::kEdges) {
    cost.flops += 3 * n * static_cast<std::uint64_t>(std::bit_width(bins));
    cost.scattered += 5 * n * LevelsInMemory(cost.among) / 2;
  }
  cost.depth = cost.flops / static_cast<std::uint64_t>(shares);
  return cost;
}

}  // namespace tessera
