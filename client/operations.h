// The operations with their operands and options, defined once for Client, AsyncClient and Program.
#pragma once

#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/expression.h"
#include "kernels/base/dtype.h"
#include "kernels/base/launch.h"
#include "kernels/base/reduce_op.h"
#include "kernels/client_and_server/operations.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// Identifies a result of a Program's step by the step's number. TopK has two results: output 0 is
// the values, and output 1 is the indices.
struct ProgramStep {
  std::uint32_t number = 0;
  std::uint32_t output = 0;

  // Returns the result with the positions of TopK's values.
  ProgramStep indices() const { return {number, 1}; }
};

// The input of an operation: a resident buffer by name, a small inline array or, in a program, the
// result of an earlier step. The operation reads all of it, or only a view.
struct Operand {
  Operand(std::string buffer) : source(std::move(buffer)) {}  // NOLINT(google-explicit-constructor)
  Operand(const char* buffer) : source(buffer) {}             // NOLINT(google-explicit-constructor)
  Operand(v1::Tensor tensor) : source(std::move(tensor)) {}   // NOLINT(google-explicit-constructor)
  Operand(ProgramStep step) : source(step) {}                 // NOLINT(google-explicit-constructor)

  std::variant<std::string, v1::Tensor, ProgramStep> source;
  std::optional<v1::View> view;
  std::uint64_t version = 0;  // the version that the buffer must have; 0 means any
  absl::Status refused;       // unless OK, calls with this operand fail with this error
};

// A new resident buffer for an array result.
struct ResultBuffer {
  std::string name = {};
  std::optional<absl::Duration> ttl = {};  // the server's default if absent
  bool replace = false;
  // The devices among which the array is divided, or the single entry "all". If empty, a copy is on
  // the devices of its source, and any other array is on one device.
  std::vector<std::string> placement = {};
};

// Entries that a call sends to the server beside its request, such as {"traceparent", "00-..."}.
using CallMetadata = std::vector<std::pair<std::string, std::string>>;

struct CallOptions {
  std::optional<absl::Duration> timeout = {};  // the client's timeout if absent
  // Ends a blocking call with CANCELLED once a stop is requested. Asynchronous calls ignore this
  // token and have Future::Cancel instead.
  std::stop_token cancel = {};
  // A key must consist of lower-case letters, digits and -_. and a value of printable ASCII.
  // Otherwise, the call fails with INVALID_ARGUMENT / BAD_OPTION {key}.
  CallMetadata metadata = {};
};
// Returns the part that all options of calls and transfers have.
template <class Options>
CallOptions CallOptionsOf(const Options& options) {
  return {options.timeout, options.cancel, options.metadata};
}

struct OperationOptions {
  std::string strategy = {};  // the fastest correct strategy if empty
  Launch launch = {};
  bool timing = false;  // whether the response has kernel_us
  // Keeps an array result on the device. If absent, the response contains the result, which may
  // have at most Limits.max_inline_result_bytes.
  std::optional<ResultBuffer> target = {};
  // For a program step without a target, keeps an array result on the device for later steps,
  // without a name.
  bool scratch = false;
  // For TopK, target and scratch apply to the values, and the next two fields apply to the indices.
  std::optional<ResultBuffer> indices_target = {};
  bool indices_scratch = false;
  // For Reduce, the expression that is folded; its operand 0 is x. For Matmul, the expression that
  // is applied to the product; its operand 0 is the product. In both, the operands of `with` follow
  // from number 1 on. Expr::ToMessage() creates this message.
  std::optional<v1::Expression> expression = {};
  std::vector<Operand> with = {};
  // The next three fields are used as in CallOptions. They are ignored in a program.
  std::optional<absl::Duration> timeout = {};
  std::stop_token cancel = {};
  CallMetadata metadata = {};
};

// The calls of ServiceCalls, as X(method, field).
#define TESSERA_CALL_METHODS(X)  \
  TESSERA_OPERATION_METHODS(X)   \
  X(Execute, execute)            \
  X(CreateBuffer, create_buffer) \
  X(GetBuffer, get_buffer)       \
  X(SealBuffer, seal_buffer)     \
  X(UpdateBuffer, update_buffer) \
  X(CopyBuffer, copy_buffer)     \
  X(ImportBuffer, import_buffer) \
  X(DeleteBuffer, delete_buffer) \
  X(ListStrategies, strategies)  \
  X(GetServerInfo, server_info)

// Returns the part of a response that the call returns: its only field, or all of it.
template <class Response>
auto AnswerOf(Response response) {
  if constexpr (std::is_same_v<Response, v1::ListStrategiesResponse>) {
    return std::vector<v1::Strategy>(response.strategies().begin(), response.strategies().end());
  } else if constexpr (std::is_same_v<Response, v1::CreateBufferResponse> ||
                       std::is_same_v<Response, v1::SealBufferResponse> ||
                       std::is_same_v<Response, v1::UpdateBufferResponse> ||
                       std::is_same_v<Response, v1::CopyBufferResponse>) {
    return v1::Buffer(std::move(*response.mutable_buffer()));
  } else {
    return response;
  }
}
template <class Request>
struct CallOf;
#define TESSERA_CALL(Name, field)                                          \
  template <>                                                              \
  struct CallOf<v1::Name##Request> {                                       \
    using Answer = decltype(AnswerOf(std::declval<v1::Name##Response>())); \
  };
TESSERA_CALL_METHODS(TESSERA_CALL)
#undef TESSERA_CALL
// What the call with this request returns, as a StatusOr or a Future.
template <class Request>
using AnswerTo = typename CallOf<Request>::Answer;

// A request, or the error that the call fails with before anything is sent.
template <class Request>
struct Prepared {
  Request message = {};
  absl::Status refused = {};
};
template <class Request>
Prepared(Request) -> Prepared<Request>;

// Returns an operation's request with its operands and the fields that all operations have.
template <class Request>
Prepared<Request> NewRequest(const OperationOptions& options, const Operand& first,
                             const Operand* second = nullptr);
Prepared<v1::MapRequest> NewMapRequest(const OperationOptions& options,
                                       absl::Span<const Operand> operands,
                                       const v1::Expression& expression);

// The operations as methods. The methods of Client return absl::StatusOr<v1::DotResponse> and so
// on. Those of AsyncClient return Future<v1::DotResponse>. Those of Program return the ProgramStep
// whose result later steps use.
template <class Self>
class Operations {
 public:
  auto Dot(const Operand& a, const Operand& b, const OperationOptions& options = {}) {
    return Send(NewRequest<v1::DotRequest>(options, a, &b), options);
  }
  // Folds the whole operand to a scalar if there are no axes.
  auto Reduce(ReduceOp op, const Operand& x, absl::Span<const int> axes = {},
              bool keep_dims = false, const OperationOptions& options = {}) {
    auto request = NewRequest<v1::ReduceRequest>(options, x);
    request.message.set_op(static_cast<v1::ReduceOp>(op));
    request.message.mutable_axes()->Add(axes.begin(), axes.end());
    request.message.set_keep_dims(keep_dims);
    return Send(std::move(request), options);
  }
  auto Matmul(const Operand& a, const Operand& b, bool transpose_a = false,
              bool transpose_b = false, std::optional<DType> out_dtype = std::nullopt,
              const OperationOptions& options = {}) {
    auto request = NewRequest<v1::MatmulRequest>(options, a, &b);
    request.message.set_transpose_a(transpose_a);
    request.message.set_transpose_b(transpose_b);
    if (out_dtype) request.message.set_out_dtype(static_cast<v1::Dtype>(*out_dtype));
    return Send(std::move(request), options);
  }
  auto Add(const Operand& a, const Operand& b, const OperationOptions& options = {}) {
    return Send(NewRequest<v1::AddRequest>(options, a, &b), options);
  }
  auto WindowSum(const Operand& x, std::int64_t radius, const OperationOptions& options = {}) {
    auto request = NewRequest<v1::WindowSumRequest>(options, x);
    request.message.set_radius(radius);
    return Send(std::move(request), options);
  }
  // Returns the k largest elements along an axis (by default the last), in descending order, and
  // their positions. If `smallest` is set, returns the k smallest in ascending order.
  auto TopK(const Operand& x, std::int64_t k, bool smallest = false,
            std::optional<int> axis = std::nullopt, const OperationOptions& options = {}) {
    auto request = NewRequest<v1::TopKRequest>(options, x);
    request.message.set_k(k);
    request.message.set_smallest(smallest);
    if (axis) request.message.set_axis(*axis);
    return Send(std::move(request), options);
  }
  // Computes the expression for each element of the operands, which are broadcast.
  auto Map(absl::Span<const Operand> operands, const v1::Expression& expression,
           const OperationOptions& options = {}) {
    return Send(NewMapRequest(options, operands, expression), options);
  }
  auto Map(const std::vector<Operand>& operands, const Expr& expression,
           const OperationOptions& options = {}) {
    return Map(operands, expression.ToMessage(), options);
  }

 protected:
  // Only a Self is constructed and destroyed.
  Operations() = default;
  Operations(const Operations&) = default;
  Operations& operator=(const Operations&) = default;
  ~Operations() = default;

  template <class... Args>
  auto Send(Args&&... args) {
    return static_cast<Self&>(*this).Send(std::forward<Args>(args)...);
  }
};

}  // namespace tessera
