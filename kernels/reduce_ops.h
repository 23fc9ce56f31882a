// What each ReduceOp does to elements, once for the host and the device: Fold<op, T> for every kind
// of row.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/strategy.h"

#ifdef __CUDACC__
#define TESSERA_HD __host__ __device__
#else
#define TESSERA_HD
#endif

namespace tessera {

// An extreme value and where it stands.
template <class T>
struct Indexed {
  T value;
  std::int64_t index;
};

// Acc: what a thread and a block accumulate in. Wide: what the results of blocks or long chains are
// combined in, so that no chain of single-precision additions grows with n. Squares and products
// are wide at once: they leave the range of their operands.
template <ReduceOp op, class T>
struct Fold {
  static constexpr bool kArg = IsArg(op);
  static constexpr bool kOrdering = kArg || op == ReduceOp::kMin || op == ReduceOp::kMax;
  static constexpr bool kLargest = op == ReduceOp::kMax || op == ReduceOp::kArgMax;
  static constexpr bool kWideAtOnce =
      op == ReduceOp::kProduct || op == ReduceOp::kNormL2 || op == ReduceOp::kSumSquares;

  using Sum = std::conditional_t<std::is_integral_v<T>, std::int64_t, double>;
  using Acc = std::conditional_t<
      kArg, Indexed<T>,
      std::conditional_t<kOrdering, T,
                         std::conditional_t<kWideAtOnce || std::is_integral_v<T>, Sum, T>>>;
  using Wide = std::conditional_t<kArg, Indexed<T>, std::conditional_t<kOrdering, T, Sum>>;

  // The element type of the result of an axis reduction.
  using Out = std::conditional_t<kArg, std::int64_t, T>;

  template <class A = Acc>
  TESSERA_HD static A Identity() {
    if constexpr (kArg) {
      return {Worst(), INT64_MAX};
    } else if constexpr (kOrdering) {
      return Worst();
    } else {
      return op == ReduceOp::kProduct ? A(1) : A(0);
    }
  }

  // The contribution of one element.
  TESSERA_HD static Acc Load(T x, [[maybe_unused]] std::int64_t index) {
    if constexpr (kArg) {
      return {x, index};
    } else if constexpr (op == ReduceOp::kNormL1) {
      return x < T(0) ? static_cast<Acc>(-x) : static_cast<Acc>(x);
    } else if constexpr (op == ReduceOp::kNormL2 || op == ReduceOp::kSumSquares) {
      return static_cast<Acc>(x) * static_cast<Acc>(x);
    } else {
      return static_cast<Acc>(x);
    }
  }

  TESSERA_HD static Wide Widen(Acc a) {
    if constexpr (kArg) {
      return a;
    } else {
      return static_cast<Wide>(a);
    }
  }

  // A is Acc or Wide. NaN wins every ordering; the smaller index wins ties.
  template <class A>
  TESSERA_HD static A Combine(A a, A b) {
    if constexpr (kArg) {
      return Before(b, a) ? b : a;
    } else if constexpr (kOrdering) {
      if (a != a) return a;
      if (b != b) return b;
      return (kLargest ? b > a : b < a) ? b : a;
    } else if constexpr (op == ReduceOp::kProduct) {
      return a * b;
    } else {
      return a + b;
    }
  }

  // The value of the reduction of n elements.
  TESSERA_HD static auto Value(Wide w, [[maybe_unused]] std::int64_t n) {
    if constexpr (kArg) {
      return w.value;
    } else if constexpr (op == ReduceOp::kMean) {
      return static_cast<double>(w) / static_cast<double>(n);
    } else if constexpr (op == ReduceOp::kNormL2) {
      return ::sqrt(static_cast<double>(w));
    } else {
      return w;
    }
  }

  TESSERA_HD static void Finish(Wide w, std::int64_t n, Scalar* result) {
    const auto value = Value(w, n);
    if constexpr (std::is_integral_v<decltype(value)>) {
      result->integer = value;
    } else {
      result->real = static_cast<double>(value);
    }
    if constexpr (kArg) result->index = w.index;
  }

  TESSERA_HD static Out FinishAxis(Wide w, std::int64_t n) {
    if constexpr (kArg) {
      return w.index;
    } else {
      return static_cast<Out>(Value(w, n));
    }
  }

 private:
  // The value that every other beats.
  TESSERA_HD static T Worst() {
    using Limits = std::numeric_limits<T>;
    if constexpr (Limits::has_infinity) {
      return kLargest ? -Limits::infinity() : Limits::infinity();
    } else {
      return kLargest ? Limits::lowest() : Limits::max();
    }
  }

  TESSERA_HD static bool Before(const Indexed<T>& a, const Indexed<T>& b) {
    const bool a_nan = a.value != a.value;
    const bool b_nan = b.value != b.value;
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a.value != b.value) return kLargest ? a.value > b.value : a.value < b.value;
    return a.index < b.index;
  }
};

// Calls f(std::integral_constant<ReduceOp, op>{}) for the runtime op.
template <class F>
decltype(auto) DispatchOp(ReduceOp op, F&& f) {
  using R = ReduceOp;
  switch (op) {
    case R::kSum:
      return f(std::integral_constant<R, R::kSum>{});
    case R::kProduct:
      return f(std::integral_constant<R, R::kProduct>{});
    case R::kMin:
      return f(std::integral_constant<R, R::kMin>{});
    case R::kMax:
      return f(std::integral_constant<R, R::kMax>{});
    case R::kArgMin:
      return f(std::integral_constant<R, R::kArgMin>{});
    case R::kArgMax:
      return f(std::integral_constant<R, R::kArgMax>{});
    case R::kMean:
      return f(std::integral_constant<R, R::kMean>{});
    case R::kNormL1:
      return f(std::integral_constant<R, R::kNormL1>{});
    case R::kNormL2:
      return f(std::integral_constant<R, R::kNormL2>{});
    case R::kSumSquares:
      break;
  }
  return f(std::integral_constant<R, R::kSumSquares>{});
}

}  // namespace tessera
