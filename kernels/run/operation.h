// An operation apart from its operands: what a request, or a step of a program, asks for. It is
// made once, and then checked, estimated, planned and run.
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

struct DotSpec {};

// The operands of its expression follow x.
struct ReduceSpec {
  ReduceOp op = ReduceOp::kSum;
  std::vector<int> axes;  // none: the whole array becomes a number
  bool keep_dims = false;
  std::optional<Expression> expression;
};

// The operands of its expression follow a and b.
struct MatmulSpec {
  bool transpose_a = false;
  bool transpose_b = false;
  std::optional<DType> out_dtype;  // none: the operands'
  std::optional<Expression> expression;
};

struct AddSpec {};

struct WindowSumSpec {
  std::int64_t radius = 0;
};

struct MapSpec {
  Expression expression;
};

struct TopKSpec {
  std::int64_t k = 0;
  int axis = -1;
  bool smallest = false;
};

using OperationSpec =
    std::variant<DotSpec, ReduceSpec, MatmulSpec, AddSpec, WindowSumSpec, MapSpec, TopKSpec>;

// The most arrays that one operation gives: TopK gives two, the others one.
inline constexpr std::size_t kMostResults = 2;

// The types of the arrays; or a number, of which there is the array of rank 0 that later steps see.
struct ResultType {
  bool scalar = false;
  bool is_index = false;  // the number is a Scalar's index
  absl::InlinedVector<ArrayType, 1> arrays;
};

// Makes all checks of the operands, none of the strategy. Compiles the expression.
absl::StatusOr<ResultType> TypeOf(const OperationSpec& spec, absl::Span<const View> x);

// Runs it. A number is in the result's value; arrays go to out, one for each, and leave the value
// alone. REQUIRES: TypeOf is OK.
absl::StatusOr<ScalarResult> Run(const OperationSpec& spec, Stream& stream,
                                 absl::Span<const View> x, absl::Span<const Output> out,
                                 const RunOptions& options);

// Returns an error of one operand, with the operand's name.
absl::Status OfOperand(std::string_view name, const absl::Status& status);
// INVALID_ARGUMENT / BAD_OPERAND: an operand names an array that its source does not have.
absl::Status BadOutput(std::uint32_t output);

// Whether it may share a launch with other small operations, as far as it and its operands decide.
bool FitsBatch(const OperationSpec& spec, const ResultType& result, absl::Span<const View> x);
// Whether two that fit share one: both are the same operation on elements of one type.
bool SharesBatch(const OperationSpec& a, const View& of_a, const OperationSpec& b,
                 const View& of_b);
// RunDotBatch or RunReduceBatch, for operations of which each shares a batch with this one.
absl::Status RunBatch(const OperationSpec& spec, Stream& stream, BatchOperand operand,
                      absl::Span<ScalarResult> results);

// The least that a GPU or a core needs for the operation, in microseconds, whatever its strategy
// is: its operands and its result read and written at 1 TB/s or 4 GB/s, products at 5 TFLOP/s or 5
// GFLOP/s, nodes of an expression and what TopK sorts as a few of those. It tells operations that
// are launched at once from others, and is of no great precision. 0 for operands that TypeOf
// refuses.
double LeastMicroseconds(const OperationSpec& spec, absl::Span<const View> x, Backend backend);

}  // namespace tessera
