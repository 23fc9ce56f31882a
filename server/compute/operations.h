// What each request of an operation asks of the kernels: an overload for each, so that a call and a
// step of a program are one thing. Views are those of OperandsOf, in its order.
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
// None of a request whose expression has too few or too many nodes or operands.
NamedOperands OperandsOf(const v1::ReduceRequest& request);
NamedOperands OperandsOf(const v1::MatmulRequest& request);
NamedOperands OperandsOf(const v1::MapRequest& request);
NamedOperands OperandsOf(const v1::TopKRequest& request);

// Arrays that one operation gives: TopK two, the others one.
inline constexpr std::size_t kMostResults = 2;

// The types of the arrays; or a number, of which there is the array of rank 0 that later steps see.
struct ResultType {
  bool scalar = false;
  absl::InlinedVector<ArrayType, 1> arrays;
};

// All checks of the operands, none of the strategy.
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

// Runs it. Of the result a scalar has value and stats, arrays, which go to out, stats alone.
// REQUIRES: ResultTypeOf is OK.
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

// Steps of a program that one launch may stand for: a product, which may have an expression, or of
// which operand `product` of a Map makes one, and TopK of that. Views are those of the requests'
// operands.
struct SelectionSteps {
  const v1::MatmulRequest& matmul;
  absl::Span<const View> matmul_operands;
  const v1::MapRequest* map = nullptr;  // null: TopK takes what Matmul gives
  absl::Span<const View> map_operands;
  int product = 0;
  const v1::TopKRequest& top_k;
};

// The strategy that does so (kernels/problem/product_top_k.h), where the steps by themselves would
// take these ones of Matmul and TopK; null: none. REQUIRES: ResultTypeOf is OK for each.
const ProductTopKStrategy* ChooseSelection(const SelectionSteps& steps, std::string_view matmul,
                                           std::string_view top_k, const Device& device);
// Scratch memory that it takes at most.
std::uint64_t SelectionScratch(const SelectionSteps& steps, const ProductTopKStrategy& strategy,
                               const Device& device);
// Runs it: the result is that of TopK.
absl::StatusOr<ScalarResult> RunSelection(const SelectionSteps& steps,
                                          const ProductTopKStrategy& strategy, Stream& stream,
                                          Outputs out, const RunOptions& options);

// Fills in a scalar result.
void SetValue(const v1::DotRequest& request, const ScalarResult& result, v1::DotResponse& response);
void SetValue(const v1::ReduceRequest& request, const ScalarResult& result,
              v1::ReduceResponse& response);
// Those of the others are arrays.
template <class Request, class Response>
void SetValue(const Request&, const ScalarResult&, Response&) {}

// The least that a GPU or a core needs for the operation, in microseconds, whatever its strategy
// is: its operands and its result read and written at 1 TB/s or 4 GB/s, products at 5 TFLOP/s or 5
// GFLOP/s, nodes of an expression and what TopK sorts as a few of those; inline operands copied to
// a GPU at 10 GB/s. For problems that are small enough to be launched at once, hence of no great
// precision.
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

// Where the request wants its arrays, one for each; of a number there is nothing to say.
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
// Whether the answer is to have the array itself.
inline bool IsInline(const v1::Result& destination) {
  return !destination.has_buffer() && !destination.has_scratch();
}
// What the arrays of the answer add to LeastMicroseconds: copied from a GPU at 10 GB/s.
double AnswerMicroseconds(const Destinations& destinations, const ResultType& result,
                          const Device& device);

// Where the answer has the array of that number: in itself, or the buffer that it went to.
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

// The largest array that travels in a response, in bytes; of a program, all of them together. The
// response as a whole stays below the 4 MiB that clients of gRPC accept unless they are told
// otherwise.
inline constexpr std::uint64_t kMaxInlineResult = (4 << 20) - (64 << 10);

// INVALID_ARGUMENT / RESULT_TOO_LARGE {size, limit} when an array goes beyond that limit after
// `before` bytes, which size includes.
absl::Status CheckInline(const ArrayType& type, std::uint64_t before = 0);

// Fills in an array but for its data.
void SetType(const ArrayType& type, v1::Tensor& out);

// All but queue_us.
void SetStats(const Stats& stats, const Device& device, absl::Span<const OperandSource> sources,
              v1::ExecutionStats& out);

}  // namespace tessera
