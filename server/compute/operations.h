// Converts requests and steps of programs to operations of the kernels, and fills in their
// responses. The rest of the server handles all operations alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/compute.h"
#include "kernels/run/operation.h"
#include "server/access/methods.h"
#include "server/compute/operands.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// --- Requests -----------------------------------------------------------------------------------

// The requested destination of each result array. Empty if the result is a number.
using Destinations = absl::InlinedVector<const v1::Result*, kMostResults>;

// The operation that a request or a step of a program describes. It points into the request.
struct Operation {
  OperationSpec spec;
  NamedOperands operands;  // in the order of the views that the kernels take
  Destinations destinations;
  RunOptions options;  // the strategy, the launch and the timing
};

// Converts a request, and checks everything that can be checked without the operands. Errors:
// INVALID_ARGUMENT / BAD_EXPRESSION, BAD_DTYPE, BAD_OPERATION, BAD_AXES or BAD_RESULT.
#define TESSERA_MAKE(Method, field) \
  absl::StatusOr<Operation> MakeOperation(const v1::Method##Request& request);
TESSERA_OPERATION_METHODS(TESSERA_MAKE)
#undef TESSERA_MAKE
absl::StatusOr<Operation> MakeOperation(const v1::Step& step);

// Whether a request or a step stores a result in a buffer.
template <class Request>
bool Stores(const Request& request) {
  if constexpr (requires { request.result(); }) {
    return request.result().has_buffer();
  } else if constexpr (requires { request.indices(); }) {
    return request.values().has_buffer() || request.indices().has_buffer();
  } else {
    return false;
  }
}
inline bool Stores(const v1::Step& step) {
  return VisitOperation(
      step, [](const auto& request) { return Stores(request); }, [] { return false; });
}

// An upper bound on the host memory that a step takes in addition to its Operation and its message.
struct OperationSize {
  std::size_t operands = 0;
  std::size_t bytes = 0;  // for its expression
};
OperationSize SizeOf(const v1::Step& step);
// The maximum number of bytes that the allocator adds to an allocation.
inline constexpr std::size_t kHeap = 32;

// Whether the response will contain the array itself.
inline bool IsInline(const v1::Result& destination) {
  return !destination.has_buffer() && !destination.has_scratch() && !destination.has_none();
}

// Returns how long it takes, in microseconds, to copy inline operands to a GPU and inline results
// back at 10 GB/s. `result` is null if the bytes of results do not count.
double TravelMicroseconds(absl::Span<const OperandSource> sources, const Destinations& destinations,
                          const ResultType* result, const Device& device);

// --- Responses ----------------------------------------------------------------------------------

// The response to any operation. It refers to a response message.
class OperationResponse {
 public:
  template <class Response>
  requires(!std::is_same_v<Response, OperationResponse>) explicit OperationResponse(
      Response& message)
      : message_(&message), parts_(PartsOf<Response>()) {}
  // Returns the response for a step. REQUIRES: the step has an operation.
  static OperationResponse In(const v1::Step& step, v1::StepResult& result);

  v1::ExecutionStats& stats() const { return *parts_.stats(message_); }
  void SetValue(const ScalarResult& result, const ResultType& type) const;
  // Returns the array with this number in the response, or the buffer that holds it.
  v1::Tensor& tensor(std::size_t array) const { return *parts_.tensor(message_, array); }
  v1::Buffer& buffer(std::size_t array) const { return *parts_.buffer(message_, array); }

 private:
  struct Parts {
    v1::ExecutionStats* (*stats)(void*);
    v1::Scalar* (*value)(void*);
    void (*set_index)(void*, std::int64_t);
    v1::Tensor* (*tensor)(void*, std::size_t);
    v1::Buffer* (*buffer)(void*, std::size_t);
  };

  template <class Response>
  static const Parts& PartsOf() {
    static constexpr auto kMessage = [](void* message) -> Response& {
      return *static_cast<Response*>(message);
    };
    static constexpr Parts kParts = {
        .stats = [](void* message) { return kMessage(message).mutable_stats(); },
        .value = [](void* message) -> v1::Scalar* {
          if constexpr (requires(Response & r) { r.mutable_value(); }) {
            return kMessage(message).mutable_value();
          } else {
            return nullptr;
          }
        },
        .set_index =
            [](void* message, std::int64_t index) {
              if constexpr (requires(Response & r) { r.set_index(0); })
                kMessage(message).set_index(index);
            },
        .tensor = [](void* message, std::size_t array) -> v1::Tensor* {
          Response& response = kMessage(message);
          if constexpr (requires { response.mutable_tensor(); }) {
            return response.mutable_tensor();
          } else if constexpr (requires { response.mutable_indices(); }) {
            return array == 0 ? response.mutable_values() : response.mutable_indices();
          } else {
            return nullptr;
          }
        },
        .buffer = [](void* message, std::size_t array) -> v1::Buffer* {
          Response& response = kMessage(message);
          if constexpr (requires { response.mutable_buffer(); }) {
            return response.mutable_buffer();
          } else if constexpr (requires { response.mutable_indices_buffer(); }) {
            return array == 0 ? response.mutable_values_buffer()
                              : response.mutable_indices_buffer();
          } else {
            return nullptr;
          }
        }};
    return kParts;
  }

  void* message_;
  const Parts& parts_;
};

// The maximum size of an array in a response, or of all arrays in a program's response together, in
// bytes. The whole response stays below the 4 MiB that gRPC clients accept by default.
inline constexpr std::uint64_t kMaxInlineResult = (4 << 20) - (64 << 10);

// Returns INVALID_ARGUMENT / RESULT_TOO_LARGE {size, limit} if `before` bytes plus the array exceed
// kMaxInlineResult. size is the sum.
absl::Status CheckInline(const ArrayType& type, std::uint64_t before = 0);

// Fills in an array except for its data.
void SetType(const ArrayType& type, v1::Tensor& out);

// Fills in all stats except queue_us and total_us.
void SetStats(const Stats& stats, const Device& device, absl::Span<const OperandSource> sources,
              v1::ExecutionStats& out);

}  // namespace tessera
