// What a column of the tree (kernels/same_bits/fixed_tree.h) does with its elements, for every kind
// of sum. It is defined once for the host and the device, so that both compute the same bits.
//
// A kind has
//   Element, Column, Wide  the operand's type, the narrow accumulator, and the wide one
//   kOperands              1 for Reduce, 2 for Dot
//   Start(x)               a column before its first element, which is x, or 0 if it has none
//   Step(column, x, row)   adds the next element (Dot: a pair), of row `row` of the segment
//   Widen(column, span)    the column's value as Wide
//   Identity, Combine      for Wide values, in the order Combine(earlier, later); KindOf takes them
//                          from Fold
//   Finish                 stores the result of an operation
// mirror is the only run-time choice inside a kind. With it, one kernel serves both SUM and
// NORM_L1, and another serves both MIN and MAX.
//
// Narrow columns of f32 may overflow although a double would hold the sum. The strategies named
// `fixed_tree` then fold again with the kind of `compensated`, whose columns are double.
//
// The files that include this header are compiled without contraction of a * b + c.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/base/element.h"
#include "kernels/problem/strategy.h"
#include "kernels/same_bits/fixed_tree.h"
#include "kernels/same_bits/reduction.h"
#include "kernels/same_bits/squares.h"

namespace tessera {

// The elements of a column in one segment: x[first], x[first + W], ... below end.
struct ColumnSpan {
  std::int64_t first;
  std::int64_t end;
};

template <class T>
inline constexpr int kTreeVector = kTreeVectorBytes / static_cast<int>(sizeof(T));
template <class T>
inline constexpr int kTreeRow = kTreeLanes* kTreeVector<T>;

// --- What a kind takes from Fold ---

// The base class of the kind that folds the operations kFirst and kOthers, which differ in their
// terms and in their last step. If an operation folds T in a type other than W, it belongs to
// another kind.
template <class T, class W, ReduceOp kFirst, ReduceOp... kOthers>
struct KindOf {
  using Element = T;
  using Wide = W;
  static constexpr int kOperands = 1;
  TESSERA_HD static Wide Identity() { return Fold<kFirst, T>::template Identity<Wide>(); }
  TESSERA_HD static Wide Combine(const Wide& a, const Wide& b) {
    return Fold<kFirst, T>::Combine(a, b);
  }
  TESSERA_HD static void Finish(const Wide& w, ReduceOp op, std::int64_t n, bool, Scalar* result) {
    (void)(FinishAs<kFirst>(w, op, n, result) || ... || FinishAs<kOthers>(w, op, n, result));
  }

 private:
  template <ReduceOp kOp>
  TESSERA_HD static bool FinishAs(const Wide& w, ReduceOp op, std::int64_t n, Scalar* result) {
    if constexpr (std::is_same_v<typename Fold<kOp, T>::Wide, Wide>) {
      if (op == kOp) Fold<kOp, T>::Finish(w, n, result);
    }
    return op == kOp;
  }
};

// The kind of an operation that needs no special one. Its columns are the accumulators of Fold.
template <ReduceOp op, class T>
struct PlainColumns : KindOf<T, typename Fold<op, T>::Wide, op> {
  using F = Fold<op, T>;
  using Column = typename F::Acc;
  TESSERA_HD static Column Start(T) { return F::template Identity<Column>(); }
  TESSERA_HD static void Step(Column& c, T x, int, bool) { c = F::Combine(c, F::Load(x, 0)); }
  TESSERA_HD static typename F::Wide Widen(Column c, ColumnSpan) { return F::Widen(c); }
};

// --- Sums ---

// The narrow accumulator of plain sums: Fold's, which is f32 for products and sums of 16-bit
// elements.
template <class T>
using NarrowOf = typename Fold<ReduceOp::kSum, T>::Acc;

// Returns c + x * y, with the product rounded first. If A holds the product of two T exactly, there
// is nothing to round, so a GPU fuses the two operations. It does not fuse them for bf16, because
// products of bf16 may overflow f32.
template <class T, class A>
TESSERA_HD A AddProduct(A c, A x, A y) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<A, double> && !std::is_integral_v<T> && sizeof(T) < sizeof(A))
    return ::fma(x, y, c);
  if constexpr (std::is_same_v<A, float> && std::is_same_v<T, Half>) return ::fmaf(x, y, c);
#endif
  return WrapAdd(c, WrapMultiply(x, y));
}

// SUM and MEAN; mirrored: NORM_L1. A is the type in which the elements of a column are added.
template <class T, class A>
struct SumColumns : KindOf<T, WideOf<A>, ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kNormL1> {
  using Column = A;
  TESSERA_HD static Column Start(T) { return 0; }
  TESSERA_HD static void Step(Column& c, T x, int, bool mirror) {
    const auto v = static_cast<A>(static_cast<ValueOf<T>>(x));
    c = WrapAdd(c, mirror ? Magnitude(v) : v);
  }
  TESSERA_HD static WideOf<A> Widen(Column c, ColumnSpan) { return static_cast<WideOf<A>>(c); }
};

// MEAN of i64: exact except for the last two roundings. The columns of a segment need no carry,
// because the sum of the upper halves of 64 elements and the sum of their lower halves both fit in
// 64 bits.
struct LongMeanColumns : KindOf<std::int64_t, Int128, ReduceOp::kMean> {
  struct Column {
    std::int64_t upper;
    std::int64_t lower;
  };
  TESSERA_HD static Column Start(std::int64_t) { return {}; }
  TESSERA_HD static void Step(Column& c, std::int64_t x, int, bool) {
    c.upper += x >> 32;
    c.lower += static_cast<std::uint32_t>(x);
  }
  TESSERA_HD static Int128 Widen(Column c, ColumnSpan) {
    Int128 upper;
    upper.low = static_cast<std::uint64_t>(c.upper) << 32;
    upper.high = c.upper >> 32;
    return WrapAdd(upper, Int128(c.lower));
  }
};

// SUM_SQUARES, and NORM_L2 of every type except f64.
template <class T, class A>
struct SquareColumns : KindOf<T, WideOf<A>, ReduceOp::kSumSquares, ReduceOp::kNormL2> {
  using Column = A;
  TESSERA_HD static Column Start(T) { return 0; }
  TESSERA_HD static void Step(Column& c, T x, int, bool) {
    const auto v = static_cast<A>(static_cast<ValueOf<T>>(x));
    c = AddProduct<T>(c, v, v);
  }
  TESSERA_HD static WideOf<A> Widen(Column c, ColumnSpan) { return static_cast<WideOf<A>>(c); }
};

// Dot. Products are rounded to A.
template <class T, class A>
struct DotColumns : KindOf<T, WideOf<A>, ReduceOp::kSum> {
  using Column = A;
  static constexpr int kOperands = 2;
  TESSERA_HD static Column Start(T) { return 0; }
  TESSERA_HD static void Step(Column& c, T x, T y, int, bool) {
    c = AddProduct<T>(c, static_cast<A>(static_cast<ValueOf<T>>(x)),
                      static_cast<A>(static_cast<ValueOf<T>>(y)));
  }
  TESSERA_HD static WideOf<A> Widen(Column c, ColumnSpan) { return static_cast<WideOf<A>>(c); }
};

// --- Extremes ---

// Returns x, or its mirror image if the order is reversed.
template <class V>
TESSERA_HD V Mirrored(V x, bool mirror) {
  if constexpr (std::is_integral_v<V>) {
    return mirror ? static_cast<V>(~x) : x;
  } else {
    return mirror ? -x : x;
  }
}

// MAX; mirrored: MIN.
template <class T>
struct ExtremeColumns : KindOf<T, ValueOf<T>, ReduceOp::kMax> {
  using F = Fold<ReduceOp::kMax, T>;
  using Column = ValueOf<T>;
  TESSERA_HD static Column Start(T) { return F::Identity(); }
  TESSERA_HD static void Step(Column& c, T x, int, bool mirror) {
    c = F::Combine(c, Mirrored(static_cast<Column>(x), mirror));
  }
  TESSERA_HD static Column Widen(Column c, ColumnSpan) { return c; }
  TESSERA_HD static void Finish(Column value, ReduceOp, std::int64_t n, bool mirror,
                                Scalar* result) {
    F::Finish(Mirrored(value, mirror), n, result);
  }
};

// ARGMAX; mirrored: ARGMIN. A column stores the row of its value, which is cheaper than storing a
// 64-bit index.
template <class T>
struct ArgColumns : KindOf<T, Indexed<ValueOf<T>>, ReduceOp::kArgMax> {
  using F = Fold<ReduceOp::kArgMax, T>;
  using Value = ValueOf<T>;
  using Wide = Indexed<Value>;
  struct Column {
    Value value;
    std::int32_t row;
  };
  // Starts with the worst value, which the first element beats or equals.
  TESSERA_HD static Column Start(T) { return {F::Identity().value, 0}; }
  TESSERA_HD static void Step(Column& c, T x, int row, bool mirror) {
    const Value v = Mirrored(static_cast<Value>(x), mirror);
    const bool stays = Stays<true>(c.value, v);
    c.value = stays ? c.value : v;
    c.row = stays ? c.row : row;
  }
  TESSERA_HD static Wide Widen(Column c, ColumnSpan span) {
    if (span.first >= span.end) return F::Identity();
    return {c.value, span.first + std::int64_t{c.row} * kTreeRow<T>};
  }
  TESSERA_HD static void Finish(const Wide& w, ReduceOp, std::int64_t n, bool mirror,
                                Scalar* result) {
    F::Finish({Mirrored(w.value, mirror), w.index}, n, result);
  }
};

// --- Others ---

// ALL and ANY.
template <class T>
struct LogicalColumns {
  using Element = T;
  using Column = std::int32_t;  // 1: an element is not zero; 2: an element is zero
  using Wide = std::int32_t;
  static constexpr int kOperands = 1;
  TESSERA_HD static Column Start(T) { return 0; }
  TESSERA_HD static void Step(Column& c, T x, int, bool) {
    c |= static_cast<ValueOf<T>>(x) != ValueOf<T>(0) ? 1 : 2;
  }
  TESSERA_HD static Wide Widen(Column c, ColumnSpan) { return c; }
  TESSERA_HD static Wide Identity() { return 0; }
  TESSERA_HD static Wide Combine(Wide a, Wide b) { return a | b; }
  TESSERA_HD static void Finish(Wide seen, ReduceOp op, std::int64_t, bool, Scalar* result) {
    result->integer = op == ReduceOp::kAny ? (seen & 1) != 0 : (seen & 2) == 0;
  }
};

// Returns how many elements a column has in one segment.
TESSERA_HD inline double ElementsOf(ColumnSpan span, std::int64_t row) {
  if (span.first >= span.end) return 0;
  const auto rows = (span.end - span.first + row - 1) / row;
  return static_cast<double>(rows < kTreeSegmentRows ? rows : kTreeSegmentRows);
}

// VARIANCE and STD. A column sums the differences between its elements and its first element of the
// segment, and the squares of these differences. This needs no division per element and does not
// cancel. The squared deviation of a single element is at most the sum of all squared deviations.
// With c elements, the squares are therefore at most 1 + c times the wanted sum of squared
// deviations. Segments are merged as Moments.
template <class T>
struct MomentColumns : KindOf<T, Moments<SquaresOf<T>>, ReduceOp::kVariance, ReduceOp::kStd> {
  using Wide = Moments<SquaresOf<T>>;
  struct Column {
    ValueOf<T> shift;
    double sum;
    SquaresOf<T> squares;
  };
  TESSERA_HD static Column Start(T first) { return {static_cast<ValueOf<T>>(first), 0, {}}; }
  TESSERA_HD static void Step(Column& c, T x, int, bool) {
    const double apart = Apart(static_cast<ValueOf<T>>(x), c.shift);
    c.sum += apart;
    AddSquare(c.squares, apart);
  }
  TESSERA_HD static Wide Widen(const Column& c, ColumnSpan span) {
    const double count = ElementsOf(span, kTreeRow<T>);
    if (count == 0) return {};
    const double mean = c.sum / count;
    return {count, Plus(ExactPair(c.shift), {mean, 0}), DeviationsOf(c.squares, c.sum, mean)};
  }
};

// --- Compensated, f64 ---

// Sum2 and Dot2 along the tree (Ogita, Rump and Oishi, "Accurate sum and dot product", 2005).
struct PairSum {
  using Wide = Pair;
  TESSERA_HD static Wide Identity() { return {0, 0}; }
  TESSERA_HD static Wide Combine(Wide a, Wide b) { return Plus(a, b); }
  TESSERA_HD static void Finish(Wide w, ReduceOp op, std::int64_t n, bool, Scalar* result) {
    using R = ReduceOp;
    KindOf<double, double, R::kSum, R::kMean, R::kNormL1, R::kSumSquares>::Finish(Rounded(w), op, n,
                                                                                  false, result);
  }
  TESSERA_HD static void Add(Pair& c, double x) {
    const Pair sum = TwoSum(c.value, x);
    c = {sum.value, c.lost + sum.lost};
  }
  TESSERA_HD static void AddProduct(Pair& c, double x, double y) {
    const Pair product = TwoProduct(x, y);
    const Pair sum = TwoSum(c.value, product.value);
    c = {sum.value, c.lost + (sum.lost + product.lost)};
  }
};

struct PairSumColumns : PairSum {
  using Element = double;
  using Column = Pair;
  static constexpr int kOperands = 1;
  TESSERA_HD static Column Start(double) { return {0, 0}; }
  TESSERA_HD static void Step(Column& c, double x, int, bool mirror) {
    Add(c, mirror ? ::fabs(x) : x);
  }
  TESSERA_HD static Wide Widen(Column c, ColumnSpan) { return c; }
};

struct PairSquareColumns : PairSum {
  using Element = double;
  using Column = Pair;
  static constexpr int kOperands = 1;
  TESSERA_HD static Column Start(double) { return {0, 0}; }
  TESSERA_HD static void Step(Column& c, double x, int, bool) { AddSquare(c, x); }
  TESSERA_HD static Wide Widen(Column c, ColumnSpan) { return c; }
};

// NORM_L2.
struct PairNormColumns {
  using Element = double;
  using Column = WideSquares<Pair>;
  using Wide = Column;
  static constexpr int kOperands = 1;
  TESSERA_HD static Column Start(double) { return {}; }
  TESSERA_HD static void Step(Column& c, double x, int, bool) { AddSquare(c, x); }
  TESSERA_HD static Wide Widen(const Column& c, ColumnSpan) { return c; }
  TESSERA_HD static Wide Identity() { return {}; }
  TESSERA_HD static Wide Combine(const Wide& a, const Wide& b) { return Plus(a, b); }
  TESSERA_HD static void Finish(const Wide& w, ReduceOp, std::int64_t, bool, Scalar* result) {
    StoreReal(RootOf(w, 1), result);
  }
};

// VARIANCE and STD: like MomentColumns and Fold::Combine, with twice the digits in every step.
struct PairMomentColumns {
  using Element = double;
  struct Column {
    double shift;
    Pair sum;
    WideSquares<Pair> squares;
  };
  using Wide = Moments<WideSquares<Pair>>;
  static constexpr int kOperands = 1;
  TESSERA_HD static Column Start(double first) { return {first, {}, {}}; }
  TESSERA_HD static void Step(Column& c, double x, int, bool) {
    const Pair apart = TwoSum(x, -c.shift);
    c.sum = Plus(c.sum, apart);
    AddSquare(c.squares, apart.value);
    c.squares.middle.lost += 2 * apart.value * apart.lost;
  }
  TESSERA_HD static Wide Widen(const Column& c, ColumnSpan span) {
    const double count = ElementsOf(span, kTreeRow<double>);
    if (count == 0) return {};
    const Pair all = Normal(c.sum), mean = Quotient(all, count);
    const double sum = all.value, rounded = mean.value;
    Pair middle = Plus(c.squares.middle, Negative(Times(mean, all)));
    if (Rounded(middle) < 0) middle = {};
    return {count,
            Plus({c.shift, 0}, mean),
            {middle, DeviationsOf(c.squares.large, sum * kShrink, rounded * kShrink),
             DeviationsOf(c.squares.small, sum * kGrow, rounded * kGrow)}};
  }
  TESSERA_HD static Wide Identity() { return {}; }
  TESSERA_HD static Wide Combine(const Wide& a, const Wide& b) {
    if (a.count == 0) return b;
    if (b.count == 0) return a;
    const double count = a.count + b.count;
    const Pair apart = Normal(Plus(b.mean, Negative(a.mean)));
    const Pair share = Quotient({b.count, 0}, count), weight = Times({a.count, 0}, share);
    auto deviations = Plus(a.deviations, b.deviations);
    if (apart.value != apart.value) return {count, apart, deviations};
    const auto between = Between<WideSquares<double>>(apart.value, weight.value);
    deviations.middle = Plus(deviations.middle, Times(Times(apart, apart), weight));
    deviations.large += between.large;
    deviations.small += between.small;
    return {count, Plus(a.mean, Times(apart, share)), deviations};
  }
  TESSERA_HD static void Finish(const Wide& w, ReduceOp op, std::int64_t, bool, Scalar* result) {
    StoreReal(
        op == ReduceOp::kStd ? RootOf(w.deviations, w.count) : VarianceOf(w.deviations, w.count),
        result);
  }
};

struct PairDotColumns : PairSum {
  using Element = double;
  using Column = Pair;
  static constexpr int kOperands = 2;
  TESSERA_HD static Column Start(double) { return {0, 0}; }
  TESSERA_HD static void Step(Column& c, double x, double y, int, bool) { AddProduct(c, x, y); }
  TESSERA_HD static Wide Widen(Column c, ColumnSpan) { return c; }
};

// PRODUCT, after Graillat, "Accurate floating-point product and exponentiation", 2009.
struct PairProductColumns {
  using Element = double;
  using Column = Pair;
  using Wide = Pair;
  static constexpr int kOperands = 1;
  TESSERA_HD static Column Start(double) { return {1, 0}; }
  TESSERA_HD static void Step(Column& c, double x, int, bool) {
    const Pair product = TwoProduct(c.value, x);
    c = {product.value, c.lost * x + product.lost};
  }
  TESSERA_HD static Wide Widen(Column c, ColumnSpan) { return c; }
  TESSERA_HD static Wide Identity() { return {1, 0}; }
  TESSERA_HD static Wide Combine(Wide a, Wide b) {
    const Pair product = TwoProduct(a.value, b.value);
    return {product.value, (a.value * b.lost + a.lost * b.value) + product.lost};
  }
  TESSERA_HD static void Finish(Wide w, ReduceOp, std::int64_t, bool, Scalar* result) {
    StoreReal(Rounded(w), result);
  }
};

// --- Which kind ---

constexpr bool IsMirrored(ReduceOp op) {
  return op == ReduceOp::kNormL1 || op == ReduceOp::kMin || op == ReduceOp::kArgMin;
}

// Returns the kind that folds T for op. Compensated kinds have twice the precision of T: f64 uses
// Pair, and the smaller floating-point types use double. Integers and operations that do not round
// have nothing to compensate; squares, products and variances of the smaller types are double
// already.
template <ReduceOp op, class T, bool kCompensated>
constexpr auto ColumnsOf() {
  using R = ReduceOp;
  constexpr bool kPair = kCompensated && std::is_same_v<T, double>;
  if constexpr (op == R::kMean && std::is_same_v<T, std::int64_t>) {
    return LongMeanColumns{};
  } else if constexpr (op == R::kSum || op == R::kNormL1 ||
                       (op == R::kMean && !std::is_integral_v<T>)) {
    if constexpr (kPair) {
      return PairSumColumns{};
    } else {
      return SumColumns<T, std::conditional_t<kCompensated, WideOf<T>, NarrowOf<T>>>{};
    }
  } else if constexpr (op == R::kNormL2 && std::is_same_v<T, double>) {
    if constexpr (kPair) {
      return PairNormColumns{};
    } else {
      return PlainColumns<op, T>{};
    }
  } else if constexpr (op == R::kNormL2 || op == R::kSumSquares) {
    if constexpr (kPair) {
      return PairSquareColumns{};
    } else {
      return SquareColumns<T, typename Fold<op, T>::Wide>{};
    }
  } else if constexpr (op == R::kProduct && kPair) {
    return PairProductColumns{};
  } else if constexpr (IsArg(op)) {
    return ArgColumns<T>{};
  } else if constexpr (IsOrdering(op)) {
    return ExtremeColumns<T>{};
  } else if constexpr (IsDeviation(op)) {
    if constexpr (kPair) {
      return PairMomentColumns{};
    } else {
      return MomentColumns<T>{};
    }
  } else if constexpr (IsLogical(op)) {
    return LogicalColumns<T>{};
  } else {
    return PlainColumns<op, T>{};
  }
}

// Calls f(ColumnsOf<op, T, kCompensated>()) for the run-time op.
template <class T, bool kCompensated, class F>
void DispatchColumns(ReduceOp op, F&& f) {
  DispatchOp(op, [&](auto o) { f(ColumnsOf<o(), T, kCompensated>()); });
}

template <class T, bool kCompensated>
constexpr auto DotColumnsType() {
  if constexpr (kCompensated && std::is_same_v<T, double>) {
    return PairDotColumns{};
  } else if constexpr (kCompensated) {
    return DotColumns<T, WideOf<T>>{};
  } else {
    return DotColumns<T, NarrowOf<T>>{};
  }
}

// --- Out of range ---

// Whether an operation's kinds add values in f32 whose sum may overflow. A column of 64 elements of
// f16, or of 64 products of them, does not overflow.
constexpr bool MayLeaveRange(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16; }
constexpr bool MayLeaveRange(const DotProblem& p) { return MayLeaveRange(p.dtype); }
constexpr bool MayLeaveRange(const ReduceProblem& p) {
  return MayLeaveRange(p.dtype) &&
         (p.op == ReduceOp::kSum || p.op == ReduceOp::kMean || p.op == ReduceOp::kNormL1);
}

// Implements WideRange::left_range for `fixed_tree`. Its wide launch is `compensated`: the same
// tree, in double for these types.
template <class Problem>
bool TreeLeftRange(const Problem& p, Stream&) {
  return MayLeaveRange(p) && !std::isfinite(p.result->real);
}

// --- Bounds and costs ---

// Returns the number of steps in a column and in the wide accumulator.
FoldSteps StepsOf(const Tree& tree, DType dtype);

double TreeRoundoff(const DotProblem& p, const Tree& tree, bool compensated);
double TreeRoundoff(const ReduceProblem& p, const Tree& tree, bool compensated);
// Returns the size in bytes of the value that a chunk's block passes to another block.
std::uint64_t TreeWideBytes(ReduceOp op, DType dtype, bool compensated);

// Returns the fixed tree of a Dot or Reduce problem.
template <class Problem>
Tree FixedTreeOf(const Problem& p) {
  return FixedTree(p.n, static_cast<std::int64_t>(SizeOf(p.dtype)));
}

// Returns the cost of folding along the tree. `value_bytes` is TreeWideBytes if the values of
// chunks pass through device memory, and 0 if they stay on a core.
Cost TreeCost(const DotProblem& p, const Tree& tree, std::uint64_t value_bytes);
Cost TreeCost(const ReduceProblem& p, const Tree& tree, std::uint64_t value_bytes);

}  // namespace tessera
