// The vocabulary of kernels/: array views, the problem of each operation, and the Strategy that
// every algorithm adds to the table in strategies.cc. It uses only the standard library, so that a
// .cu file compiles in seconds.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "kernels/base/dtype.h"
#include "kernels/base/launch.h"
#include "kernels/base/linalg_function.h"
#include "kernels/base/reduce_op.h"
#include "kernels/base/shape.h"
#include "kernels/base/take_mode.h"
#include "kernels/client_and_server/operations.h"
#include "kernels/problem/map.h"
#include "kernels/problem/roundoff.h"

namespace tessera {

class Device;
class Stream;

// A non-owning n-dimensional window into device memory. Strides count elements and may be 0 or
// negative. data is the address of element [0, 0, ...]; only the element's own alignment is
// guaranteed.
struct View {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  std::array<std::int64_t, kMaxRank> strides{};

  constexpr std::int64_t elements() const { return shape.elements(); }
  // Whether the view is row-major without gaps. The stride of an extent of 1 does not matter.
  constexpr bool contiguous() const {
    std::int64_t expected = 1;
    for (int i = shape.rank - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[static_cast<std::size_t>(i)] != expected) return false;
      expected *= shape[i];
    }
    return true;
  }
};

// The result of an operation that returns a single value. It is in host memory that the device can
// write. Floating-point operands set real, integer operands set integer, and ARGMIN and ARGMAX also
// set index.
struct Scalar {
  double real = 0;
  std::int64_t integer = 0;
  std::int64_t index = 0;
};

constexpr void Finish(double sum, Scalar* result) { result->real = sum; }
constexpr void Finish(std::int64_t sum, Scalar* result) { result->integer = sum; }

// The problem of each operation. kOperation is the operation's name in requests, the CLI and the
// documents. Operands are contiguous device memory (row-major, with only the element's alignment),
// and n >= 0. A strategy with reads_views gets an operand that is not contiguous through its view
// pointer, and the data pointer is null. In all other cases the view pointer is null. result and
// out are complete once the stream has been synchronised.

struct DotProblem {
  static constexpr std::string_view kOperation = "dot";
  DType dtype = DType::kF32;
  std::int64_t n = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  const View* a_view = nullptr;
  const View* b_view = nullptr;
  Scalar* result = nullptr;
  Launch launch;
};

struct MapProblem;

// With a map, x is null, and the elements of the map's result are folded.
struct ReduceProblem {
  static constexpr std::string_view kOperation = "reduce";
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
  std::int64_t n = 0;  // > 0 when NeedsElements(op)
  const void* x = nullptr;
  const View* x_view = nullptr;
  const MapProblem* map = nullptr;
  Scalar* result = nullptr;
  Launch launch;
};

// Folds the middle axis of x[outer, length, inner] into out[outer, inner]. out has the type
// ResultDType(op, dtype).
struct ReduceAxesProblem {
  static constexpr std::string_view kOperation = "reduce_axes";
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
  std::int64_t outer = 0;
  std::int64_t length = 0;  // > 0 when NeedsElements(op) and there are outputs
  std::int64_t inner = 0;
  const void* x = nullptr;
  void* out = nullptr;
  // If above 0, this problem is a share of a larger problem with this `outer`. The share gives the
  // same bits as the whole problem.
  std::int64_t outer_of_all = 0;
  // If above 0, this problem is a share of a larger problem with this `inner`, and outer is 1. Rows
  // of x are then this many elements apart.
  std::int64_t inner_of_all = 0;
  // Whether the stream has already run another share of the same problem. If so, left_range covers
  // both shares.
  bool continues = false;
  Launch launch;
};

inline constexpr int kMaxStackRank = kMaxRank - 2;

// An axis of a stack of products. Strides count elements and may be 0, which repeats the operand,
// or negative.
struct StackAxis {
  std::int64_t extent = 1;
  std::int64_t stride_a = 0;
  std::int64_t stride_b = 0;
};

// c[m, n] = op(a) * op(b), with c row-major without gaps and extents above 0. a is [m, k] with row
// pitch lda >= k, or [k, m] with lda >= m when transpose_a; b is [k, n] or [n, k] in the same way.
// Pitches count elements. IsMatmulPair in kernels/problem/matmul.h defines which types c may have
// for which operand types.
//
// A stack is many such products with the same extents, pitches and transposes. The result of
// product i is at c + i * m * n; ProductOffsets in kernels/problem/matmul.h returns the distances
// from a and b to the operands of product i.
struct MatmulProblem {
  static constexpr std::string_view kOperation = "matmul";
  DType dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  bool mixed = false;  // whether b has the other 8-bit type: i8 if a is u8, and u8 if a is i8
  std::int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  std::int64_t lda = 0;
  bool transpose_a = false;
  const void* b = nullptr;
  std::int64_t ldb = 0;
  bool transpose_b = false;
  void* c = nullptr;
  std::int64_t stack = 1;  // the number of products: the product of the axes' extents
  int stack_rank = 0;
  // Outermost first. Adjacent axes are merged where both operands allow it.
  StackAxis stack_axes[kMaxStackRank]{};
  Launch launch;
};

struct AddProblem {
  static constexpr std::string_view kOperation = "add";
  DType dtype = DType::kF32;
  std::int64_t n = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
  Launch launch;
};

inline constexpr std::int64_t kWindowPart = std::int64_t{1} << 16;

// out[i] = the sum of x[j] over all existing j with |j - i| <= radius. out has the type
// ResultDType(kSum, dtype).
struct WindowSumProblem {
  static constexpr std::string_view kOperation = "window_sum";
  DType dtype = DType::kF32;
  std::int64_t n = 0;
  std::int64_t radius = 0;  // below max(1, n): a larger radius gives the same sums
  const void* x = nullptr;
  void* out = nullptr;
  // The results [first, end) are computed, and the first of them is written to out[0]. If end is 0,
  // they extend to the last one. first and end are multiples of kWindowPart, except that end may be
  // n.
  std::int64_t first = 0;
  std::int64_t end = 0;
  Launch launch;

  constexpr std::int64_t results_end() const { return end > 0 ? end : n; }
};

// out[i] = the program's value for element i of each operand, in row-major order of the result's
// shape. Operands are views of that shape, with stride 0 where they are broadcast. out overlaps no
// operand.
struct MapProblem {
  static constexpr std::string_view kOperation = "map";
  DType dtype = DType::kF32;  // of the result: program->dtype
  std::int64_t n = 0;
  const MapProgram* program = nullptr;
  std::array<View, kMostOperands> operands{};
  void* out = nullptr;
  Launch launch;
};

inline constexpr std::int64_t kMostTopK = 4096;

// Selects the k largest or smallest elements of each row of x[rows, n], sorted, with their indices
// in the row; kernels/problem/top_k.h defines the order. values and indices are [rows / inner, k,
// inner]: the j-th element selected from row r is at [r / inner, j, r % inner].
struct TopKProblem {
  static constexpr std::string_view kOperation = "top_k";
  DType dtype = DType::kF32;
  bool smallest = false;
  std::int64_t rows = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;      // from 1 to min(n, kMostTopK) if there are rows
  std::int64_t inner = 1;  // divides rows
  const void* x = nullptr;
  void* values = nullptr;
  std::int64_t* indices = nullptr;
  Launch launch;
};

// out[o, i, j] = the fold of x[o, 0, j] to x[o, i, j] of the array x[outer, length, inner], without
// x[o, i, j] itself if `exclusive`. If `reverse`, the fold begins at x[o, length - 1, j]. out has
// the type ResultDType(op, dtype).
struct ScanProblem {
  static constexpr std::string_view kOperation = "scan";
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;  // SUM, PRODUCT, MIN, MAX, or ALL or ANY of I32
  std::int64_t outer = 0;
  std::int64_t length = 0;
  std::int64_t inner = 1;
  bool exclusive = false;
  bool reverse = false;
  const void* x = nullptr;
  void* out = nullptr;
  Launch launch;

  constexpr std::int64_t elements() const { return outer * length * inner; }
};

// Sorts each row of x[rows, n] into values[rows, n], and writes the elements' former positions in
// their rows to indices[rows, n]. The order is stable; kernels/problem/sort.h defines it.
struct SortProblem {
  static constexpr std::string_view kOperation = "sort";
  DType dtype = DType::kF32;
  bool descending = false;
  // Which results are wanted; at least one must be.
  bool wants_values = true;
  bool wants_indices = true;
  std::int64_t rows = 0;
  std::int64_t n = 0;
  const void* x = nullptr;
  void* values = nullptr;           // null unless wanted
  std::int64_t* indices = nullptr;  // null unless wanted
  Launch launch;

  constexpr std::int64_t elements() const { return rows * n; }
};

// out[o, j, i] = x[o, index, i] of the array x[outer, length, inner]. The index is indices[j], or
// indices[o, j, i] if `along` is set. out is [outer, count, inner], without gaps.
struct TakeProblem {
  static constexpr std::string_view kOperation = "take";
  DType dtype = DType::kF32;        // of x and out, any type
  DType index_dtype = DType::kI64;  // I32 or I64
  TakeMode mode = TakeMode::kError;
  bool along = false;
  std::int64_t outer = 1;
  std::int64_t length = 0;  // > 0 if out has elements
  std::int64_t inner = 1;
  std::int64_t count = 0;
  // The distances, in elements, between neighbours of x along outer, length and inner. They may be
  // 0 or negative. The stride of an extent of 1 does not matter.
  std::array<std::int64_t, 3> strides{};
  const void* x = nullptr;
  const void* indices = nullptr;
  void* out = nullptr;
  // In mode kError, result->index becomes the position of the first index that is out of range, or
  // -1. The result for such an index is undefined.
  Scalar* result = nullptr;
  Launch launch;

  constexpr std::int64_t elements() const { return outer * count * inner; }
};

// Writes the elements of x[n] whose byte of mask[n] is not 0 to values, in their order, and their
// positions to indices.
struct SelectProblem {
  static constexpr std::string_view kOperation = "select";
  DType dtype = DType::kF32;  // of x and values, any type
  // Which results are wanted; at least one must be.
  bool wants_values = true;
  bool wants_indices = true;
  std::int64_t n = 0;
  std::int64_t count = 0;   // the number of bytes of the mask that are not 0: the results' length
  const void* x = nullptr;  // not read unless values are wanted
  const void* mask = nullptr;
  void* values = nullptr;           // null unless wanted
  std::int64_t* indices = nullptr;  // null unless wanted
  Launch launch;
};

inline constexpr std::int64_t kMostBins = std::int64_t{1} << 30;

enum class BinKind : std::uint8_t { kEven, kIntegers, kEdges };

// counts[i] = the number of elements of x[n] in bin i; kernels/same_bits/bins.h defines the bins.
struct HistogramProblem {
  static constexpr std::string_view kOperation = "histogram";
  DType dtype = DType::kF32;  // of x, any type
  BinKind kind = BinKind::kEven;
  std::int64_t n = 0;
  std::int64_t bins = 0;  // at most kMostBins
  // The outer edges of bins of equal width. They are finite, and low < high.
  double low = 0;
  double high = 1;
  DType edge_dtype = DType::kF64;  // or I64, if x has integers
  const void* x = nullptr;
  const void* edges = nullptr;  // edges[bins + 1], in ascending order, for kEdges
  std::int64_t* counts = nullptr;
  Launch launch;
};

// out[i] = the number of elements of x[length], in ascending order, that come before keys[i] or, if
// `right`, do not come after it; kernels/problem/search_sorted.h defines the order.
struct SearchSortedProblem {
  static constexpr std::string_view kOperation = "search_sorted";
  DType dtype = DType::kF32;  // of x and keys, any type
  bool right = false;
  std::int64_t length = 0;
  std::int64_t n = 0;
  const void* x = nullptr;
  const void* keys = nullptr;
  std::int64_t* out = nullptr;
  Launch launch;
};

// out[j, c] = the sum of x[i, c] over all i with labels[i] == j, for the arrays x[n, inner] and
// out[length, inner]. out has the type ResultDType(kSum, dtype). kernels/same_bits/label_sums.h
// defines the order of the additions.
struct SumByLabelProblem {
  static constexpr std::string_view kOperation = "sum_by_label";
  DType dtype = DType::kF32;
  DType label_dtype = DType::kI64;  // I32 or I64
  TakeMode mode = TakeMode::kError;
  std::int64_t n = 0;
  std::int64_t inner = 1;
  std::int64_t length = 0;  // > 0 if x has elements
  const void* x = nullptr;
  const void* labels = nullptr;
  void* out = nullptr;
  // In mode kError, result->index becomes the position of the first label that is out of range, or
  // -1. If there is such a label, the results are undefined.
  Scalar* result = nullptr;
  Launch launch;

  constexpr std::int64_t elements() const { return n * inner; }
};

// Applies the function to each matrix of x[stack, m, n]. out is [stack, out_rows(), out_columns()];
// LinalgFunction in compute.proto says what it contains.
struct LinalgProblem {
  static constexpr std::string_view kOperation = "linalg";
  DType dtype = DType::kF32;  // of x, b and out: F32 or F64
  LinalgFunction function = LinalgFunction::kSolve;
  std::int64_t stack = 1;
  std::int64_t m = 0;  // equals n, except for kQr and kSvd
  std::int64_t n = 0;
  std::int64_t columns = 0;  // of b[stack, n, columns], for kSolve
  const void* x = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
  // result->index becomes the position of the first matrix that has no result (singular, not
  // positive definite, or not converged), or -1. The results of such matrices are undefined.
  Scalar* result = nullptr;
  Launch launch;

  constexpr std::int64_t least() const { return m < n ? m : n; }
  constexpr std::int64_t out_rows() const {
    switch (function) {
      case LinalgFunction::kDeterminant:
        return 1;
      case LinalgFunction::kEigh:
        return n + 1;
      case LinalgFunction::kQr:
        return m + n;
      case LinalgFunction::kSvd:
        return m + 1 + n;
      default:
        return n;
    }
  }
  constexpr std::int64_t out_columns() const {
    switch (function) {
      case LinalgFunction::kSolve:
        return columns;
      case LinalgFunction::kDeterminant:
        return 2;
      default:
        return least();
    }
  }
  constexpr std::int64_t elements() const { return stack * out_rows() * out_columns(); }
};

// Calls f.operator()<Problem>() for the problem of each operation.
template <class F>
constexpr void ForEachOperation(F&& f) {
#define TESSERA_CALL(Operation, name) f.template operator()<Operation##Problem>();
  TESSERA_OPERATIONS(TESSERA_CALL)
#undef TESSERA_CALL
}

enum class Backend : std::uint8_t { kCpu, kCuda };

constexpr std::string_view Name(Backend backend) {
  return backend == Backend::kCpu ? "cpu" : "cuda";
}

// Compute capability, 10 * major + minor, of the oldest GPUs that CUDA 13 compiles for: the minimum
// of every strategy that needs nothing newer.
inline constexpr int kBaseComputeCapability = 75;

// What a strategy costs for one problem, according to its own model.
struct Cost {
  std::uint64_t bytes = 0;    // device memory read and written
  std::uint64_t flops = 0;    // arithmetic operations on elements
  std::uint64_t atomics = 0;  // atomic read-modify-writes on one address
  std::uint64_t depth = 0;    // longest chain of dependent operations; on a CPU, the operations
                              // that one core does in sequence
  // On a CPU: the number of accesses whose addresses depend on the values of operands, and the size
  // of the memory that they go to, in bytes.
  std::uint64_t scattered = 0;
  std::uint64_t among = 0;
};

// Parts [first, end) of a problem, and a stream of the device that computes them. Parts are chunks
// of the fixed tree (Dot and Reduce), slabs (ReduceAxes), or rows of c (Matmul).
struct TeamShare {
  Stream* stream = nullptr;
  std::int64_t first = 0;
  std::int64_t end = 0;
};

// For strategies whose default accumulators can overflow on sums of finite operands. Both are null
// if there is no wider accumulator.
template <class Problem>
struct WideRange {
  // Returns whether any sum is not finite. REQUIRES: launch's work is done.
  bool (*left_range)(const Problem&, Stream&) = nullptr;
  // Computes such sums again in accumulators that are wide enough; if the operands themselves are
  // not finite, it gives the same result again.
  void (*launch)(const Problem&, Stream&) = nullptr;
};

// Strategy::launch and WideRange::launch for work that is divided among devices, all of which can
// access the operands. TeamShare describes the parts. For Dot and Reduce, the stream argument
// computes the final result, even if it has no share. For ReduceAxes, the problem must have slabs
// (kernels/team/axis_slabs.h). Shares are adjacent, from the first part to the last. The result is
// complete once all streams have been synchronised. If a pointer is null, one device does
// everything.
template <class Problem>
struct SharedLaunch {
  void (*launch)(const Problem&, std::span<const TeamShare>, Stream&) = nullptr;
  void (*launch_wide)(const Problem&, std::span<const TeamShare>, Stream&) = nullptr;
};

// One algorithm of one operation: a constant defined in the algorithm's own file. It is stateless;
// several threads may call any function at the same time, each with its own stream.
template <class Problem>
struct Strategy {
  std::string_view name;     // its name in requests; the stem of the file
  std::string_view summary;  // one line
  std::string_view source;   // where the algorithm comes from
  Backend backend = Backend::kCpu;
  DTypes dtypes = AllDTypes();
  int min_compute_capability = 0;  // 10 * major + minor; 0: kBaseComputeCapability
  bool deterministic = false;      // same bits for the same operands, launch and device
  LaunchLimits limits;
  // A bound on the accumulated rounding error, including the unit roundoff: |computed - exact| <=
  // roundoff * sum of |terms|, before the result is rounded to an output type. For PRODUCT it is
  // relative to |product|; for Map it bounds each node (MapRoundoff), and for Linalg the backward
  // error. It holds as long as no partial sum overflows its accumulator or becomes subnormal.
  double (*roundoff)(const Problem&) = nullptr;
  Cost (*cost)(const Problem&) = nullptr;
  // Enqueues the work on the stream; problem.result or problem.out is complete after
  // stream.Synchronize(). Throws DeviceError.
  void (*launch)(const Problem&, Stream&) = nullptr;
  WideRange<Problem> wide;
  SharedLaunch<Problem> shared;
  // Returns the requirement of the strategy that this device or host does not meet, or an empty
  // string if it meets all of them. If the pointer is null, the strategy always runs.
  std::string (*missing)(const Device&) = nullptr;
  // Returns the requirement that a problem of the strategy's dtypes does not meet, or an empty
  // string if the strategy accepts the problem. If the pointer is null, the strategy accepts every
  // problem.
  std::string (*refuses)(const Problem&) = nullptr;
  // Returns the maximum scratch memory of launch in bytes, for copies of operands and results. Null
  // addresses in the problem stand for memory that is not allocated yet, and count as aligned. If
  // the function is null, launch takes at most a few MiB.
  std::uint64_t (*scratch)(const Problem&) = nullptr;
  // Whether the strategy calls the vendor's library, with which the other strategies are compared.
  bool vendor = false;
  // For Dot and Reduce: whether the strategy reads operands in place even if they are not
  // contiguous. For Reduce, it then also accepts operands that a map computes.
  bool reads_views = false;
  // For Matmul: whether launch computes a whole stack. `refuses` and `scratch` then receive the
  // stack. Otherwise all functions are called for one product at a time. roundoff and cost always
  // describe one product.
  bool stacks = false;
  // For Matmul: whether the strategy multiplies operands of different types.
  bool mixed = false;
};

// Returns one product that stands for every product of a stack. Each of its addresses is the least
// aligned one in the stack, so the addresses may belong to different products.
inline MatmulProblem LeastAlignedProduct(const MatmulProblem& p) {
  MatmulProblem product = p;
  product.stack = 1;
  product.stack_rank = 0;
  const auto move = [&](std::uintptr_t address, std::int64_t elements, DType dtype) {
    const std::uintptr_t moved = address + static_cast<std::uintptr_t>(elements) * SizeOf(dtype);
    return std::countr_zero(moved) < std::countr_zero(address) ? moved : address;
  };
  auto a = reinterpret_cast<std::uintptr_t>(p.a), b = reinterpret_cast<std::uintptr_t>(p.b);
  for (int i = 0; i < p.stack_rank; ++i) {
    const StackAxis& axis = p.stack_axes[i];
    if (axis.extent <= 1) continue;
    a = move(a, axis.stride_a, p.dtype);
    b = move(b, axis.stride_b, p.dtype);
  }
  auto c = reinterpret_cast<std::uintptr_t>(p.c);
  if (p.stack > 1) c = move(c, p.m * p.n, p.out_dtype);
  product.a = reinterpret_cast<const void*>(a);  // NOLINT(performance-no-int-to-ptr): not read
  product.b = reinterpret_cast<const void*>(b);  // NOLINT(performance-no-int-to-ptr): not read
  product.c = reinterpret_cast<void*>(c);        // NOLINT(performance-no-int-to-ptr): not written
  return product;
}

// Returns why the strategy does not accept the problem, or an empty string if it does.
template <class Problem>
std::string Refusal(const Strategy<Problem>& strategy, const Problem& problem) {
  if constexpr (std::is_same_v<Problem, MatmulProblem>)
    if (problem.mixed && !strategy.mixed) return "operands of the same type";
  if (strategy.refuses == nullptr) return "";
  if constexpr (std::is_same_v<Problem, MatmulProblem>) {
    if (problem.stack != 1 && !strategy.stacks)
      return strategy.refuses(LeastAlignedProduct(problem));
  }
  return strategy.refuses(problem);
}

}  // namespace tessera
