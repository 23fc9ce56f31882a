// What each request of an operation asks of the kernels. There is an overload for each, so that
// calls and steps of programs use the same code. Views are those of OperandsOf, in its order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/compute.h"
#include "kernels/problem/product_top_k.h"
#include "server/compute/operands.h"
#include "server/core.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

NamedOperands OperandsOf(const v1::DotRequest& request);
NamedOperands OperandsOf(const v1::AddRequest& request);
NamedOperands OperandsOf(const v1::WindowSumRequest& request);
// Returns no operands for a request whose expression has too few or too many nodes or operands.
NamedOperands OperandsOf(const v1::ReduceRequest& request);
NamedOperands OperandsOf(const v1::MatmulRequest& request);
NamedOperands OperandsOf(const v1::MapRequest& request);
NamedOperands OperandsOf(const v1::TopKRequest& request);

// The most arrays that one operation gives: TopK gives two, the others one.
inline constexpr std::size_t kMostResults = 2;

// The types of the arrays. A scalar has the array of rank 0 that later steps see.
struct ResultType {
  bool scalar = false;
  absl::InlinedVector<ArrayType, 1> arrays;
};

// Makes all checks of the operands, and none of the strategy.
absl::StatusOr<ResultType> ResultTypeOf(const v1::DotRequest& request, absl::Span<const View> x);
absl::StatusOr<ResultType> ResultTypeOf(const v1::ReduceRequest& request, absl::Span<const View> x);
absl::StatusOr<ResultType> ResultTypeOf(const v1::MatmulRequest& request, absl::Span<const View> x);
absl::StatusOr<ResultType> ResultTypeOf(const v1::AddRequest& request, absl::Span<const View> x);
absl::StatusOr<ResultType> ResultTypeOf(const v1::WindowSumRequest& request,
                                        absl::Span<const View> x);
absl::StatusOr<ResultType> ResultTypeOf(const v1::MapRequest& request, absl::Span<const View> x);
absl::StatusOr<ResultType> ResultTypeOf(const v1::TopKRequest& request, absl::Span<const View> x);

// One for each array of a result.
using Outputs = absl::Span<const Output>;

// Runs the operation. A scalar result has a value and stats; arrays go to out, and their result has
// only stats. REQUIRES: ResultTypeOf is OK.
absl::StatusOr<ScalarResult> Run(const v1::DotRequest& request, Stream& stream,
                                 absl::Span<const View> x, Outputs out, const RunOptions& options);
absl::StatusOr<ScalarResult> Run(const v1::ReduceRequest& request, Stream& stream,
                                 absl::Span<const View> x, Outputs out, const RunOptions& options);
absl::StatusOr<ScalarResult> Run(const v1::MatmulRequest& request, Stream& stream,
                                 absl::Span<const View> x, Outputs out, const RunOptions& options);
absl::StatusOr<ScalarResult> Run(const v1::AddRequest& request, Stream& stream,
                                 absl::Span<const View> x, Outputs out, const RunOptions& options);
absl::StatusOr<ScalarResult> Run(const v1::WindowSumRequest& request, Stream& stream,
                                 absl::Span<const View> x, Outputs out, const RunOptions& options);
absl::StatusOr<ScalarResult> Run(const v1::MapRequest& request, Stream& stream,
                                 absl::Span<const View> x, Outputs out, const RunOptions& options);
absl::StatusOr<ScalarResult> Run(const v1::TopKRequest& request, Stream& stream,
                                 absl::Span<const View> x, Outputs out, const RunOptions& options);

// Steps of a program that one launch may replace: a product with or without an expression, possibly
// a Map whose operand `product` it is, and the TopK of the result. Views are those of the requests'
// operands.
struct SelectionSteps {
  const v1::MatmulRequest& matmul;
  absl::Span<const View> matmul_operands;
  const v1::MapRequest* map = nullptr;  // null: TopK takes the result of Matmul
  absl::Span<const View> map_operands;
  int product = 0;
  const v1::TopKRequest& top_k;
};

// Returns the strategy for that launch (kernels/problem/product_top_k.h), or null if there is none.
// matmul, top_k: the strategies that the steps would use by themselves. REQUIRES: ResultTypeOf is
// OK for each.
const ProductTopKStrategy* ChooseSelection(const SelectionSteps& steps, std::string_view matmul,
                                           std::string_view top_k, const Device& device);
// Returns the most scratch memory that it takes.
std::uint64_t SelectionScratch(const SelectionSteps& steps, const ProductTopKStrategy& strategy,
                               const Device& device);
// Runs it. The result is that of TopK.
absl::StatusOr<ScalarResult> RunSelection(const SelectionSteps& steps,
                                          const ProductTopKStrategy& strategy, Stream& stream,
                                          Outputs out, const RunOptions& options);

// Fills in a scalar result.
void SetValue(const v1::DotRequest& request, const ScalarResult& result, v1::DotResponse& response);
void SetValue(const v1::ReduceRequest& request, const ScalarResult& result,
              v1::ReduceResponse& response);
// The results of the other operations are arrays.
template <class Request, class Response>
void SetValue(const Request&, const ScalarResult&, Response&) {}

// Returns the least time in microseconds that a GPU or a core needs for the operation, whatever its
// strategy is. Operands and results are read and written at 1 TB/s or 4 GB/s, and products run at 5
// TFLOP/s or 5 GFLOP/s. Nodes of an expression, and elements that TopK sorts, count as a few
// operations each. Inline operands are copied to a GPU at 10 GB/s. The time only has to tell which
// problems are small enough to be launched immediately, so it is not precise.
double LeastMicroseconds(const v1::ReduceRequest& request, absl::Span<const OperandSource> sources,
                         const Device& device);
double LeastMicroseconds(const v1::MatmulRequest& request, absl::Span<const OperandSource> sources,
                         const Device& device);
double LeastMicroseconds(const v1::MapRequest& request, absl::Span<const OperandSource> sources,
                         const Device& device);
double LeastMicroseconds(const v1::TopKRequest& request, absl::Span<const OperandSource> sources,
                         const Device& device);
double LeastMicroseconds(absl::Span<const OperandSource> sources, const Device& device);
template <class Request>
double LeastMicroseconds(const Request&, absl::Span<const OperandSource> sources,
                         const Device& device) {
  return LeastMicroseconds(sources, device);
}

// Returns where the request wants each of its arrays; a scalar has no destination.
using Destinations = absl::InlinedVector<const v1::Result*, kMostResults>;
template <class Request>
Destinations DestinationsOf(const Request& request) {
  if constexpr (requires { request.result(); }) {
    return {&request.result()};
  } else {
    return {};
  }
}
Destinations DestinationsOf(const v1::TopKRequest& request);
// Whether the response is to contain the array itself.
inline bool IsInline(const v1::Result& destination) {
  return !destination.has_buffer() && !destination.has_scratch();
}
// Returns what the response's arrays add to LeastMicroseconds; they are copied from a GPU at 10
// GB/s.
double AnswerMicroseconds(const Destinations& destinations, const ResultType& result,
                          const Device& device);

// Returns the array with that number in the response, or the buffer that it went to.
template <class Response>
requires requires(Response& r) { r.mutable_tensor(); }
v1::Tensor& TensorOf(Response& response, std::size_t) { return *response.mutable_tensor(); }
template <class Response>
requires requires(Response& r) { r.mutable_buffer(); }
v1::Buffer& BufferOf(Response& response, std::size_t) { return *response.mutable_buffer(); }
v1::Tensor& TensorOf(v1::TopKResponse& response, std::size_t array);
v1::Buffer& BufferOf(v1::TopKResponse& response, std::size_t array);

template <class Request>
RunOptions OptionsOf(const Request& request, Core& core, const Device& device) {
  return {.strategy = request.strategy(),
          .launch = {request.launch().block_size(), request.launch().grid_size(),
                     request.launch().items_per_thread()},
          .timing = request.timing(),
          .pace = &core.pace(device),
          .max_seconds = core.options().max_operation_seconds,
          .max_slow_seconds = core.options().max_slow_operation_seconds};
}

// The largest array in a response, in bytes; for a program, the sum of all its arrays. The whole
// response stays below the 4 MiB that gRPC clients accept by default.
inline constexpr std::uint64_t kMaxInlineResult = (4 << 20) - (64 << 10);

// INVALID_ARGUMENT / RESULT_TOO_LARGE {size, limit} if `before` bytes and the array exceed that
// limit; size is the sum.
absl::Status CheckInline(const ArrayType& type, std::uint64_t before = 0);

// Fills in an array except for its data.
void SetType(const ArrayType& type, v1::Tensor& out);

// Fills in all stats except queue_us and total_us.
void SetStats(const Stats& stats, const Device& device, absl::Span<const OperandSource> sources,
              v1::ExecutionStats& out);

}  // namespace tessera
