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
#include "kernels/base/linalg_function.h"
#include "kernels/base/reduce_op.h"
#include "kernels/base/take_mode.h"
#include "kernels/client_and_server/operations.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// Identifies a result of a Program's step by the step's number. TopK and Sort have two results:
// output 0 is the values, and output 1 is the indices.
struct ProgramStep {
  std::uint32_t number = 0;
  std::uint32_t output = 0;

  // Returns the result with the positions of the values.
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
};

// A new resident buffer for an array result.
struct ResultBuffer {
  std::string name = {};
  std::optional<absl::Duration> ttl = {};  // the server's default if absent; infinite: 100 years
  bool replace = false;
  // The devices among which the array is divided, or the single entry "all". If empty, a copy is on
  // the devices of its source, and any other array is on one device.
  std::vector<std::string> placement = {};
};

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
  // For TopK, Sort and Select, target and scratch apply to the values, and the next two fields
  // apply to the indices. If only the indices are computed, target and scratch apply to them unless
  // the next two fields do.
  std::optional<ResultBuffer> indices_target = {};
  bool indices_scratch = false;
  // For Reduce, Scan and Sort, an expression that is applied to x first; its operand 0 is x. For
  // Matmul, an expression that is applied to the product; its operand 0 is the product. The
  // operands in `with` are numbered from 1. Expr::ToMessage() creates this message.
  std::optional<v1::Expression> expression = {};
  std::vector<Operand> with = {};
  // The next two fields are used as in CallOptions. They are ignored in a program.
  std::optional<absl::Duration> timeout = {};
  std::stop_token cancel = {};
};

// The bins of a Histogram: bins of equal width between two numbers, one bin for each integer from 0
// on, or bins between given edges.
struct EvenBins {
  std::int64_t count = 0;
  double low = 0;
  double high = 0;
};
struct IntegerBins {
  std::int64_t count = 0;
};
using Bins = std::variant<EvenBins, IntegerBins, Operand>;

// Which results of Sort or Select are computed.
enum class Results { kBoth, kValues, kIndices };

// The calls of AsyncClient, as X(method, field).
#define TESSERA_ASYNC_METHODS(X) \
  TESSERA_OPERATION_METHODS(X)   \
  X(Execute, execute)            \
  X(GetBuffer, get_buffer)       \
  X(CopyBuffer, copy_buffer)     \
  X(DeleteBuffer, delete_buffer) \
  X(GetServerInfo, get_server_info)

template <class Request>
struct CallOf;
#define TESSERA_CALL(Name, field)        \
  template <>                            \
  struct CallOf<v1::Name##Request> {     \
    using Response = v1::Name##Response; \
  };
TESSERA_ASYNC_METHODS(TESSERA_CALL)
#undef TESSERA_CALL
// The response to the request of an operation, or of another call of AsyncClient.
template <class Request>
using ResponseTo = typename CallOf<Request>::Response;

// Returns an operation's request with its operands and the fields that all operations have.
template <class Request>
Request NewRequest(const OperationOptions& options, const Operand& first,
                   const Operand* second = nullptr);
v1::MapRequest NewMapRequest(const OperationOptions& options, absl::Span<const Operand> operands,
                             const v1::Expression& expression);
v1::HistogramRequest NewHistogramRequest(const OperationOptions& options, const Operand& x,
                                         const Bins& bins);
// Returns a request about the buffer or draft with this name and version.
template <class Request>
Request BufferRequest(const std::string& name, std::uint64_t version) {
  Request request;
  request.set_name(name);
  request.set_version(version);
  return request;
}

// Returns BAD_OPERAND if the source is not a resident buffer.
absl::StatusOr<v1::CopyBufferRequest> CopyRequest(const Operand& source, const ResultBuffer& target,
                                                  std::optional<DType> dtype,
                                                  const std::string& device);

// The operations as methods. The methods of Client return absl::StatusOr<v1::DotResponse> and so
// on. Those of AsyncClient return Future<v1::DotResponse>, or an AsyncCall if the last argument is
// a Callback<v1::DotResponse>. The methods of Program return the ProgramStep whose result later
// steps use.
template <class Self>
class Operations {
 public:
  template <class... Done>
  auto Dot(const Operand& a, const Operand& b, const OperationOptions& options = {},
           Done&&... done) {
    return Send(NewRequest<v1::DotRequest>(options, a, &b), options, std::forward<Done>(done)...);
  }
  // Folds the whole operand to a scalar if there are no axes.
  template <class... Done>
  auto Reduce(ReduceOp op, const Operand& x, absl::Span<const int> axes = {},
              bool keep_dims = false, const OperationOptions& options = {}, Done&&... done) {
    auto request = NewRequest<v1::ReduceRequest>(options, x);
    request.set_op(static_cast<v1::ReduceOp>(op));
    request.mutable_axes()->Add(axes.begin(), axes.end());
    request.set_keep_dims(keep_dims);
    return Send(std::move(request), options, std::forward<Done>(done)...);
  }
  template <class... Done>
  auto Matmul(const Operand& a, const Operand& b, bool transpose_a = false,
              bool transpose_b = false, std::optional<DType> out_dtype = std::nullopt,
              const OperationOptions& options = {}, Done&&... done) {
    auto request = NewRequest<v1::MatmulRequest>(options, a, &b);
    request.set_transpose_a(transpose_a);
    request.set_transpose_b(transpose_b);
    if (out_dtype) request.set_out_dtype(static_cast<v1::Dtype>(*out_dtype));
    return Send(std::move(request), options, std::forward<Done>(done)...);
  }
  template <class... Done>
  auto Add(const Operand& a, const Operand& b, const OperationOptions& options = {},
           Done&&... done) {
    return Send(NewRequest<v1::AddRequest>(options, a, &b), options, std::forward<Done>(done)...);
  }
  template <class... Done>
  auto WindowSum(const Operand& x, std::int64_t radius, const OperationOptions& options = {},
                 Done&&... done) {
    auto request = NewRequest<v1::WindowSumRequest>(options, x);
    request.set_radius(radius);
    return Send(std::move(request), options, std::forward<Done>(done)...);
  }
  // Returns the k largest elements along an axis (by default the last), in descending order, and
  // their positions. If `smallest` is set, returns the k smallest in ascending order.
  template <class... Done>
  auto TopK(const Operand& x, std::int64_t k, bool smallest = false,
            std::optional<int> axis = std::nullopt, const OperationOptions& options = {},
            Done&&... done) {
    auto request = NewRequest<v1::TopKRequest>(options, x);
    request.set_k(k);
    request.set_smallest(smallest);
    if (axis) request.set_axis(*axis);
    return Send(std::move(request), options, std::forward<Done>(done)...);
  }
  // Returns, for each element, the fold along an axis (by default the last) up to this element,
  // which is included unless `exclusive` is set. If `reverse`, folds begin at the axis's end.
  template <class... Done>
  auto Scan(ReduceOp op, const Operand& x, std::optional<int> axis = std::nullopt,
            bool exclusive = false, bool reverse = false, const OperationOptions& options = {},
            Done&&... done) {
    auto request = NewRequest<v1::ScanRequest>(options, x);
    request.set_op(static_cast<v1::ReduceOp>(op));
    if (axis) request.set_axis(*axis);
    request.set_exclusive(exclusive);
    request.set_reverse(reverse);
    return Send(std::move(request), options, std::forward<Done>(done)...);
  }
  // Returns the elements along an axis (by default the last) in ascending or descending order, and
  // their positions, or only one of the two.
  template <class... Done>
  auto Sort(const Operand& x, std::optional<int> axis = std::nullopt, bool descending = false,
            Results results = Results::kBoth, const OperationOptions& options = {},
            Done&&... done) {
    auto request = NewRequest<v1::SortRequest>(options, x);
    if (axis) request.set_axis(*axis);
    request.set_descending(descending);
    LeaveOut(results, request);
    return Send(std::move(request), options, std::forward<Done>(done)...);
  }
  // Returns the slices of x at indices along an axis. Without an axis, treats x as a vector. If
  // `along`, the indices have the rank of x, and select separately at each position of the other
  // axes.
  template <class... Done>
  auto Take(const Operand& x, const Operand& indices, std::optional<int> axis = std::nullopt,
            TakeMode mode = TakeMode::kError, bool along = false,
            const OperationOptions& options = {}, Done&&... done) {
    auto request = NewRequest<v1::TakeRequest>(options, x, &indices);
    if (axis) request.set_axis(*axis);
    request.set_mode(static_cast<v1::TakeMode>(mode));
    request.set_along(along);
    return Send(std::move(request), options, std::forward<Done>(done)...);
  }
  // Returns the elements of x at which the mask is true, and their positions in row-major order, or
  // only one of the two. The mask has type BOOL and the shape of x.
  template <class... Done>
  auto Select(const Operand& x, const Operand& mask, Results results = Results::kBoth,
              const OperationOptions& options = {}, Done&&... done) {
    auto request = NewRequest<v1::SelectRequest>(options, x, &mask);
    LeaveOut(results, request);
    return Send(std::move(request), options, std::forward<Done>(done)...);
  }
  // Returns the number of elements of x in each bin, as I64.
  template <class... Done>
  auto Histogram(const Operand& x, const Bins& bins, const OperationOptions& options = {},
                 Done&&... done) {
    return Send(NewHistogramRequest(options, x, bins), options, std::forward<Done>(done)...);
  }
  // Returns, for each key, the position at which it can be inserted into the sorted vector x:
  // before the elements that equal the key or, if `right`, after them.
  template <class... Done>
  auto SearchSorted(const Operand& x, const Operand& keys, bool right = false,
                    const OperationOptions& options = {}, Done&&... done) {
    auto request = NewRequest<v1::SearchSortedRequest>(options, x, &keys);
    request.set_right(right);
    return Send(std::move(request), options, std::forward<Done>(done)...);
  }
  // Returns the sums of the rows of x that have the same label, in [0, length).
  template <class... Done>
  auto SumByLabel(const Operand& x, const Operand& labels, std::int64_t length,
                  TakeMode mode = TakeMode::kError, const OperationOptions& options = {},
                  Done&&... done) {
    auto request = NewRequest<v1::SumByLabelRequest>(options, x, &labels);
    request.set_length(length);
    request.set_mode(static_cast<v1::TakeMode>(mode));
    return Send(std::move(request), options, std::forward<Done>(done)...);
  }
  // Applies a function of linear algebra to each matrix of x. kSolve needs the right sides, b.
  // LinalgFunction in compute.proto says what the result contains.
  template <class... Done>
  auto Linalg(LinalgFunction function, const Operand& x, const std::optional<Operand>& b = {},
              const OperationOptions& options = {}, Done&&... done) {
    auto request = NewRequest<v1::LinalgRequest>(options, x, b.has_value() ? &*b : nullptr);
    request.set_function(static_cast<v1::LinalgFunction>(function));
    return Send(std::move(request), options, std::forward<Done>(done)...);
  }
  // Computes the expression for each element of the operands, which are broadcast.
  template <class... Done>
  auto Map(absl::Span<const Operand> operands, const v1::Expression& expression,
           const OperationOptions& options = {}, Done&&... done) {
    return Send(NewMapRequest(options, operands, expression), options, std::forward<Done>(done)...);
  }
  template <class... Done>
  auto Map(const std::vector<Operand>& operands, const Expr& expression,
           const OperationOptions& options = {}, Done&&... done) {
    return Map(operands, expression.ToMessage(), options, std::forward<Done>(done)...);
  }

 protected:
  // Protected, because only the derived class Self may be constructed or destroyed.
  Operations() = default;
  Operations(const Operations&) = default;
  Operations& operator=(const Operations&) = default;
  ~Operations() = default;

 private:
  // Marks the results that are not requested.
  template <class Request>
  static void LeaveOut(Results results, Request& request) {
    if (results == Results::kIndices) {
      if (request.has_values() && !request.has_indices())
        request.mutable_indices()->Swap(request.mutable_values());
      request.mutable_values()->set_none(true);
    }
    if (results == Results::kValues) request.mutable_indices()->set_none(true);
  }
  template <class... Args>
  auto Send(Args&&... args) {
    return static_cast<Self&>(*this).Send(std::forward<Args>(args)...);
  }
};

}  // namespace tessera
