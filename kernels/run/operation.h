// An operation without its operands, as a request or a step of a program specifies it. It is
// created once, and then checked, estimated, planned and run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/compute.h"

namespace tessera {

// What a request specifies in addition to its operands: nothing, except for the operations below.
template <class Problem>
struct SpecOf {};

// The operands that only the expression uses follow x.
template <>
struct SpecOf<ReduceProblem> {
  ReduceOp op = ReduceOp::kSum;
  std::vector<int> axes;  // none: the whole array becomes a number
  bool keep_dims = false;
  std::optional<Expression> expression;
};

// The operands that only the expression uses follow a and b.
template <>
struct SpecOf<MatmulProblem> {
  bool transpose_a = false;
  bool transpose_b = false;
  std::optional<DType> out_dtype;  // none: MatmulDefaultType
  std::optional<Expression> expression;
};

template <>
struct SpecOf<WindowSumProblem> {
  std::int64_t radius = 0;
};

template <>
struct SpecOf<MapProblem> {
  Expression expression;
};

template <>
struct SpecOf<TopKProblem> {
  std::int64_t k = 0;
  int axis = -1;
  bool smallest = false;
};

// The operands that only the expression uses follow x.
template <>
struct SpecOf<ScanProblem> {
  ReduceOp op = ReduceOp::kSum;
  int axis = -1;
  bool exclusive = false;
  bool reverse = false;
  std::optional<Expression> expression;
};

// The operands that only the expression uses follow x.
template <>
struct SpecOf<SortProblem> {
  int axis = -1;
  bool descending = false;
  // Which results are wanted: at least one. An array that is not wanted gets no memory.
  bool values = true;
  bool indices = true;
  std::optional<Expression> expression;
};

template <>
struct SpecOf<TakeProblem> {
  std::optional<int> axis;  // none: x is read as a vector
  TakeMode mode = TakeMode::kError;
  bool along = false;
};

template <>
struct SpecOf<SelectProblem> {
  // Which results are wanted: at least one. An array that is not wanted gets no memory.
  bool values = true;
  bool indices = true;
  std::optional<std::int64_t> count;  // the length of the results; set by CountResults
};

// The operand with the edges, if there is one, follows x.
template <>
struct SpecOf<HistogramProblem> {
  BinKind kind = BinKind::kEven;
  std::int64_t bins = 0;  // for every kind except kEdges
  double low = 0;
  double high = 1;
};

template <>
struct SpecOf<SearchSortedProblem> {
  bool right = false;
};

template <>
struct SpecOf<SumByLabelProblem> {
  std::int64_t length = 0;
  TakeMode mode = TakeMode::kError;
};

// The operand with the right sides of kSolve follows x.
template <>
struct SpecOf<LinalgProblem> {
  LinalgFunction function = LinalgFunction::kSolve;
};

#define TESSERA_SPEC(Operation, name) using Operation##Spec = SpecOf<Operation##Problem>;
TESSERA_OPERATION_METHODS(TESSERA_SPEC)
#undef TESSERA_SPEC

// The list of specs begins with a comma.
template <class, class... Specs>
using VariantOf = std::variant<Specs...>;
#define TESSERA_SPEC(Operation, name) , Operation##Spec
using OperationSpec = VariantOf<void TESSERA_OPERATION_METHODS(TESSERA_SPEC)>;
#undef TESSERA_SPEC

// The maximum number of arrays that one operation returns. TopK, Sort and Select return two, and
// the others return one.
inline constexpr std::size_t kMostResults = 2;

// The types of an operation's results. If the result is a number (`scalar`), later steps read it as
// a 0-d array, whose type is in `arrays`.
struct ResultType {
  bool scalar = false;
  bool is_index = false;  // the number is a Scalar's index
  // Whether the length of the arrays depends on the operands' elements and has not been counted. If
  // so, the types in `arrays` have the largest possible length.
  bool uncounted = false;
  absl::InlinedVector<ArrayType, 1> arrays;
};

// The arguments of Run, except for the operation.
struct Arguments {
  Stream& stream;
  absl::Span<const View> x;
  absl::Span<const Output> out;
  const RunOptions& options;
};

// TypeOf and Run below call these functions of the operation. They are defined in kernels/run/.
#define TESSERA_OPERATION(Operation, name)                                                  \
  absl::StatusOr<ResultType> TypeOf(const Operation##Spec& spec, absl::Span<const View> x); \
  absl::StatusOr<ScalarResult> Run(const Operation##Spec& spec, const Arguments& with);
TESSERA_OPERATION_METHODS(TESSERA_OPERATION)
#undef TESSERA_OPERATION
// Returns the result of a run that has written its arrays.
absl::StatusOr<ScalarResult> ArrayRun(const absl::StatusOr<Stats>& stats);

// Checks everything about the operands and nothing about the strategy. Compiles the expression.
absl::StatusOr<ResultType> TypeOf(const OperationSpec& spec, absl::Span<const View> x);

// Finds the length of the results if it depends on the operands' elements, as that of a Select
// does. Stores the length in the spec; TypeOf then returns the exact types. Waits for the stream.
// Of the options, only pace and max_seconds have an effect. REQUIRES: TypeOf is OK.
absl::Status CountResults(OperationSpec& spec, Stream& stream, absl::Span<const View> x,
                          const RunOptions& options);

// Runs the operation. A number is returned in the result's value. Arrays are written to out, which
// has one entry per array. REQUIRES: TypeOf is OK, and the results are counted unless the options
// have check_only.
absl::StatusOr<ScalarResult> Run(const OperationSpec& spec, Stream& stream,
                                 absl::Span<const View> x, absl::Span<const Output> out,
                                 const RunOptions& options);

// Returns an error of one operand, with the operand's name.
absl::Status OfOperand(std::string_view name, const absl::Status& status);
// Returns INVALID_ARGUMENT / BAD_OPERAND, for an operand that refers to an array that its source
// does not have.
absl::Status BadOutput(std::uint32_t output);

// Whether the operation and its operands allow it to share a launch with other small operations.
bool FitsBatch(const OperationSpec& spec, const ResultType& result, absl::Span<const View> x);
// Whether two operations that meet FitsBatch may share a launch: both must be the same operation on
// elements of one type.
bool SharesBatch(const OperationSpec& a, const View& of_a, const OperationSpec& b,
                 const View& of_b);
// Calls RunDotBatch or RunReduceBatch. Each operation must be able to share a batch with `spec`.
absl::Status RunBatch(const OperationSpec& spec, Stream& stream, BatchOperand operand,
                      absl::Span<ScalarResult> results);

// Returns a rough lower bound on the microseconds that a GPU or a CPU core needs for the operation
// with any strategy. It assumes that a GPU moves 1 TB/s and computes 5 TFLOP/s, and that a core
// moves 4 GB/s and computes 5 GFLOP/s. A node of an expression, or an element that TopK selects,
// counts as a few operations. The bound only has to distinguish operations that are launched
// immediately from others. REQUIRES: TypeOf is OK.
double LeastMicroseconds(const OperationSpec& spec, absl::Span<const View> x, Backend backend);

}  // namespace tessera
