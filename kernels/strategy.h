// The vocabulary of kernels/: element types, array views, the problem of each operation, and the
// row that every algorithm contributes to the table in strategies.cc. Standard library only, so
// that a .cu file compiles in seconds.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

class Device;
class Lane;

// The values equal those of tessera.v1.Dtype on the wire.
enum class DType : std::uint8_t { kF32 = 1, kF64, kF16, kBF16, kI32, kI64 };

constexpr std::size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF64:
    case DType::kI64:
      return 8;
  }
  return 0;
}

constexpr std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF64:
      return "f64";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
  }
  return "?";
}

inline constexpr DType kAllDTypes[] = {DType::kF32,  DType::kF64, DType::kF16,
                                       DType::kBF16, DType::kI32, DType::kI64};

constexpr bool IsInteger(DType dtype) { return dtype == DType::kI32 || dtype == DType::kI64; }

// A set of element types, one bit each.
struct DTypes {
  std::uint32_t bits = 0;
  constexpr bool Contains(DType dtype) const {
    return (bits >> static_cast<unsigned>(dtype) & 1u) != 0;
  }
};

template <class... D>
constexpr DTypes DTypesOf(D... dtype) {
  return {((1u << static_cast<unsigned>(dtype)) | ... | 0u)};
}

constexpr DTypes AllDTypes() {
  DTypes all;
  for (DType dtype : kAllDTypes) all.bits |= 1u << static_cast<unsigned>(dtype);
  return all;
}

inline constexpr int kMaxRank = 8;

// Extents of an array, outermost first. Rank 0 is a scalar: one element.
struct Shape {
  int rank = 0;
  std::array<std::int64_t, kMaxRank> dims{};

  constexpr std::int64_t operator[](int i) const { return dims[static_cast<std::size_t>(i)]; }
  constexpr std::int64_t& operator[](int i) { return dims[static_cast<std::size_t>(i)]; }
  // The product of the extents; every Shape that reaches kernels/ has been checked to fit 63 bits.
  constexpr std::int64_t elements() const {
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= (*this)[i];
    return n;
  }
  friend constexpr bool operator==(const Shape& a, const Shape& b) {
    if (a.rank != b.rank) return false;
    for (int i = 0; i < a.rank; ++i)
      if (a[i] != b[i]) return false;
    return true;
  }
};

// A non-owning n-dimensional window into device memory. strides count elements and may be 0 or
// negative; data is the address of element [0, 0, ...] and aligned to the element's size, no more.
struct View {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  std::array<std::int64_t, kMaxRank> strides{};

  constexpr std::int64_t elements() const { return shape.elements(); }
  // Row-major without gaps; extents of 1 have no stride to speak of.
  constexpr bool contiguous() const {
    std::int64_t expected = 1;
    for (int i = shape.rank - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[static_cast<std::size_t>(i)] != expected) return false;
      expected *= shape[i];
    }
    return true;
  }
};

// The values equal those of tessera.v1.ReduceOp on the wire.
enum class ReduceOp : std::uint8_t {
  kSum = 1,
  kProduct,
  kMin,
  kMax,
  kArgMin,
  kArgMax,
  kMean,
  kNormL1,
  kNormL2,
  kSumSquares,
  kVariance,
  kAll,
  kAny,
};

constexpr bool IsArg(ReduceOp op) { return op == ReduceOp::kArgMin || op == ReduceOp::kArgMax; }

// Operations that pick an element.
constexpr bool IsOrdering(ReduceOp op) {
  return IsArg(op) || op == ReduceOp::kMin || op == ReduceOp::kMax;
}

// Operations that ask whether elements are zero.
constexpr bool IsLogical(ReduceOp op) { return op == ReduceOp::kAll || op == ReduceOp::kAny; }

// Operations that have no value for an empty input.
constexpr bool NeedsElements(ReduceOp op) {
  return IsOrdering(op) || op == ReduceOp::kMean || op == ReduceOp::kVariance;
}

// The element type of a reduction's result. Sums and products of integers need 64 bits, their means
// and norms fractions.
constexpr DType ResultDType(ReduceOp op, DType dtype) {
  if (IsArg(op)) return DType::kI64;
  if (IsLogical(op)) return DType::kI32;
  if (!IsInteger(dtype) || IsOrdering(op)) return dtype;
  const bool fraction =
      op == ReduceOp::kMean || op == ReduceOp::kNormL2 || op == ReduceOp::kVariance;
  return fraction ? DType::kF64 : DType::kI64;
}

// Operations that never round on this type.
constexpr bool IsExact(ReduceOp op, DType dtype) {
  return IsOrdering(op) || IsLogical(op) || ResultDType(op, dtype) == DType::kI64;
}

// Operations whose sums do not round, in any order: only the sum becomes a double and is divided.
constexpr bool IsExactMean(ReduceOp op, DType dtype) {
  return op == ReduceOp::kMean && IsInteger(dtype);
}

// A request's knobs. 0: the strategy's own choice. Checked against the row's LaunchLimits before
// launch is called.
struct Launch {
  std::uint32_t block_size = 0;
  std::uint32_t grid_size = 0;
  std::uint32_t items_per_thread = 0;
};

// The values of Launch that a row honours, inclusive. {0, 0}: the row has no such knob.
struct LaunchLimits {
  struct Range {
    std::uint32_t min = 0;
    std::uint32_t max = 0;
  };
  Range block_size;
  Range grid_size;
  Range items_per_thread;
};

// Where an operation that ends in one value leaves it: host memory that the device can write.
// Floating-point operands set real, integer operands set integer, ARGMIN and ARGMAX set index as
// well.
struct Scalar {
  double real = 0;
  std::int64_t integer = 0;
  std::int64_t index = 0;
};

// The problem structs: operands are contiguous device memory (row-major, aligned to the element
// only), n >= 0. A row that reads_views finds an operand that is not contiguous behind its view
// pointer, which is null otherwise, and nothing behind the other. result and out are written by the
// time the lane has been synchronised.

struct DotProblem {
  DType dtype = DType::kF32;
  std::int64_t n = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  const View* a_view = nullptr;
  const View* b_view = nullptr;
  Scalar* result = nullptr;
  Launch launch;
};

struct ReduceProblem {
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
  std::int64_t n = 0;  // > 0 when NeedsElements(op)
  const void* x = nullptr;
  const View* x_view = nullptr;
  Scalar* result = nullptr;
  Launch launch;
};

// Folds the middle axis of x[outer, length, inner] into out[outer, inner]. out has x's dtype, or
// I64 when IsArg(op).
struct ReduceAxesProblem {
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
  std::int64_t outer = 0;
  std::int64_t length = 0;  // > 0 when NeedsElements(op) and there is any output
  std::int64_t inner = 0;
  const void* x = nullptr;
  void* out = nullptr;
  Launch launch;
};

// c[m, n] = op(a) * op(b), row-major, c without gaps. a is stored [m, k] with row pitch lda >=
// max(1, k), or [k, m] with lda >= max(1, m) when transpose_a; b likewise [k, n] or [n, k]. Pitches
// count elements. Which types c may have for which operands: IsMatmulPair in kernels/matmul.h.
struct MatmulProblem {
  DType dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  std::int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  std::int64_t lda = 0;
  bool transpose_a = false;
  const void* b = nullptr;
  std::int64_t ldb = 0;
  bool transpose_b = false;
  void* c = nullptr;
  Launch launch;
};

struct AddProblem {
  DType dtype = DType::kF32;
  std::int64_t n = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
  Launch launch;
};

// out[i] = the sum of x[j] for |j - i| <= radius, as far as there are such j. out has the type of
// ResultDType(kSum, dtype).
struct WindowSumProblem {
  DType dtype = DType::kF32;
  std::int64_t n = 0;
  std::int64_t radius = 0;  // below max(1, n): a wider window is no wider
  const void* x = nullptr;
  void* out = nullptr;
  Launch launch;
};

enum class Backend : std::uint8_t { kCpu, kCuda };

constexpr std::string_view Name(Backend backend) {
  return backend == Backend::kCpu ? "cpu" : "cuda";
}

// What a row costs for one problem, by its own model.
struct Cost {
  std::uint64_t bytes = 0;    // device memory read and written
  std::uint64_t flops = 0;    // arithmetic operations on elements
  std::uint64_t atomics = 0;  // atomic read-modify-writes on one address
  std::uint64_t depth = 0;    // longest chain of dependent operations; on a CPU, of those that
                              // one core does one after the other
};

// One algorithm of one operation: a constant defined in the algorithm's own file. Stateless; every
// function may be called from many threads at once, each with its own lane.
template <class Problem>
struct Strategy {
  std::string_view name;     // what a request says; the stem of the file
  std::string_view summary;  // one line
  std::string_view source;   // where the algorithm comes from
  Backend backend = Backend::kCpu;
  DTypes dtypes;
  int min_compute_capability = 0;  // 10 * major + minor
  bool deterministic = false;      // same operands, launch and device: same bits
  LaunchLimits limits;
  // Bound of the accumulated rounding: |computed - exact| <= roundoff * sum of |terms|, before the
  // result is rounded to an output type. For PRODUCT the factor is relative to |product|. The value
  // includes the unit roundoff. It holds as long as all partial sums stay in the range of the row's
  // accumulators, neither beyond their largest value nor among their subnormal ones.
  double (*roundoff)(const Problem&) = nullptr;
  Cost (*cost)(const Problem&) = nullptr;
  // Enqueues the work on the lane; problem.result or problem.out is complete after
  // lane.Synchronize(). Throws DeviceError.
  void (*launch)(const Problem&, Lane&) = nullptr;
  // For rows that run by default in accumulators which sums of finite operands may leave.
  // left_range, once launch's work is done: whether some sum is not finite. launch_wide: launch
  // once more, for such sums, in accumulators wide enough for them; where operands are not finite
  // themselves, it finds the same again. Null, both: there is nothing wider to do.
  bool (*left_range)(const Problem&, Lane&) = nullptr;
  void (*launch_wide)(const Problem&, Lane&) = nullptr;
  // What the row needs and this device or host does not have; empty: nothing. Null: always runs.
  std::string (*missing)(const Device&) = nullptr;
  // What the row asks of a problem of its dtypes that this one does not meet; empty: it takes it.
  // Null: takes them all.
  std::string (*refuses)(const Problem&) = nullptr;
  // Scratch memory that launch takes at most, in bytes: copies of operands and results. Addresses
  // that are null are still to be allocated, and aligned. Null: none worth mentioning, a few MiB.
  std::uint64_t (*scratch)(const Problem&) = nullptr;
  // Of Dot and Reduce: takes operands that are not contiguous as they are.
  bool reads_views = false;
};

// What the row says against the problem; empty: it takes it.
template <class Problem>
std::string Refusal(const Strategy<Problem>& row, const Problem& problem) {
  return row.refuses == nullptr ? "" : row.refuses(problem);
}

// The operation's name as requests, the CLI and the documents spell it.
template <class Problem>
inline constexpr std::string_view kOperation = "";
template <>
inline constexpr std::string_view kOperation<DotProblem> = "dot";
template <>
inline constexpr std::string_view kOperation<ReduceProblem> = "reduce";
template <>
inline constexpr std::string_view kOperation<ReduceAxesProblem> = "reduce_axes";
template <>
inline constexpr std::string_view kOperation<MatmulProblem> = "matmul";
template <>
inline constexpr std::string_view kOperation<AddProblem> = "add";
template <>
inline constexpr std::string_view kOperation<WindowSumProblem> = "window_sum";

// Unit roundoffs of the accumulators.
inline constexpr double kRoundoffF32 = 0x1p-24;
inline constexpr double kRoundoffF64 = 0x1p-53;
// Of IsExactMean: the sum and the quotient round once each.
inline constexpr double kExactMeanRoundoff = 2 * kRoundoffF64;
// Of an element of the type; 0 for integers.
constexpr double UnitRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return kRoundoffF32;
    case DType::kF64:
      return kRoundoffF64;
    case DType::kF16:
      return 0x1p-11;
    case DType::kBF16:
      return 0x1p-8;
    default:
      return 0;
  }
}

}  // namespace tessera
