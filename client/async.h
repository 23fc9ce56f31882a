// The calls of a client without waiting for their answers (Client::Async): operations, programs,
// and what is short of the others. Transfers, drafts and lists are in Client alone.
//
//   client.Async().Dot("x", "y", {}, [](absl::StatusOr<tessera::v1::DotResponse> answer) { ... });
//   tessera::Future<tessera::v1::DotResponse> dot = client.Async().Dot("x", "y");
//   ... dot.Get() ...
//
// Deadlines, repetitions and errors are those of the blocking calls. Callbacks run on a thread of
// the client's own, one at a time and without a lock held, so they may begin other calls, and
// should not block: until one returns, no other call of this form ends. Each runs exactly once,
// with CANCELLED if AsyncCall::Cancel or the end of the client comes first. An exception
// from a callback is discarded. A null callback is allowed: the response is then discarded.
//
// Thread safe. Not to be used after the client's end, which waits for all callbacks and so must not
// happen in one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "kernels/base/error.h"

namespace tessera {

class AsyncCallBase;
class Connection;

// A call under way. To let it go has no effect on the call. Thread safe.
class AsyncCall {
 public:
  AsyncCall() = default;
  explicit AsyncCall(std::weak_ptr<AsyncCallBase> call) : call_(std::move(call)) {}

  // The call ends with CANCELLED, unless its answer is already there. Does not wait for that.
  void Cancel() const;

 private:
  std::weak_ptr<AsyncCallBase> call_;
};

template <class Response>
using Callback = std::function<void(absl::StatusOr<Response>)>;

// The response of a call that may still be running. Move-only. Destroying it does not cancel the
// call.
template <class Response>
class Future {
 public:
  Future(std::future<absl::StatusOr<Response>> answer, AsyncCall call)
      : answer_(std::move(answer)), call_(std::move(call)) {}

  // Waits for the answer. Must not be called in a callback. Returns FAILED_PRECONDITION /
  // ANSWER_TAKEN if an earlier Get returned the answer, or if the future has been moved from.
  absl::StatusOr<Response> Get() {
    if (!answer_.valid()) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "ANSWER_TAKEN",
                       "the future's answer has been taken already");
    }
    return answer_.get();
  }
  // Whether Get would return at once.
  bool IsReady() const {
    return !answer_.valid() ||
           answer_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void Cancel() const { call_.Cancel(); }

 private:
  std::future<absl::StatusOr<Response>> answer_;
  AsyncCall call_;
};

// Arguments are those of Client's method of that name.
class AsyncClient {
 public:
  explicit AsyncClient(Connection* connection) : connection_(connection) {}

  AsyncCall Dot(const Operand& a, const Operand& b, const OperationOptions& options,
                Callback<v1::DotResponse> done);
  AsyncCall Reduce(ReduceOp op, const Operand& x, absl::Span<const int> axes, bool keep_dims,
                   const OperationOptions& options, Callback<v1::ReduceResponse> done);
  AsyncCall Matmul(const Operand& a, const Operand& b, bool transpose_a, bool transpose_b,
                   std::optional<DType> out_dtype, const OperationOptions& options,
                   Callback<v1::MatmulResponse> done);
  AsyncCall Add(const Operand& a, const Operand& b, const OperationOptions& options,
                Callback<v1::AddResponse> done);
  AsyncCall WindowSum(const Operand& x, std::int64_t radius, const OperationOptions& options,
                      Callback<v1::WindowSumResponse> done);
  AsyncCall TopK(const Operand& x, std::int64_t k, bool smallest, std::optional<int> axis,
                 const OperationOptions& options, Callback<v1::TopKResponse> done);
  AsyncCall Map(absl::Span<const Operand> operands, const v1::Expression& expression,
                const OperationOptions& options, Callback<v1::MapResponse> done);
  AsyncCall Execute(const Program& program, const CallOptions& call,
                    Callback<v1::ExecuteResponse> done);
  AsyncCall GetBuffer(const std::string& name, std::uint64_t version, const CallOptions& call,
                      Callback<v1::GetBufferResponse> done);
  AsyncCall CopyBuffer(const Operand& source, const ResultBuffer& target,
                       std::optional<DType> dtype, const std::string& device,
                       const CallOptions& call, Callback<v1::CopyBufferResponse> done);
  // One call: with a version, it takes a server that knows versions, and where the first answer was
  // lost and the call repeated, BUFFER_NOT_FOUND may say that it has done its work.
  AsyncCall DeleteBuffer(const std::string& name, std::uint64_t version, const CallOptions& call,
                         Callback<v1::DeleteBufferResponse> done);
  AsyncCall GetServerInfo(const CallOptions& call, Callback<v1::GetServerInfoResponse> done);

  Future<v1::DotResponse> Dot(const Operand& a, const Operand& b,
                              const OperationOptions& options = {}) {
    return Promise<v1::DotResponse>([&](auto done) { return Dot(a, b, options, std::move(done)); });
  }
  Future<v1::ReduceResponse> Reduce(ReduceOp op, const Operand& x, absl::Span<const int> axes = {},
                                    bool keep_dims = false, const OperationOptions& options = {}) {
    return Promise<v1::ReduceResponse>(
        [&](auto done) { return Reduce(op, x, axes, keep_dims, options, std::move(done)); });
  }
  Future<v1::MatmulResponse> Matmul(const Operand& a, const Operand& b, bool transpose_a = false,
                                    bool transpose_b = false,
                                    std::optional<DType> out_dtype = std::nullopt,
                                    const OperationOptions& options = {}) {
    return Promise<v1::MatmulResponse>([&](auto done) {
      return Matmul(a, b, transpose_a, transpose_b, out_dtype, options, std::move(done));
    });
  }
  Future<v1::AddResponse> Add(const Operand& a, const Operand& b,
                              const OperationOptions& options = {}) {
    return Promise<v1::AddResponse>([&](auto done) { return Add(a, b, options, std::move(done)); });
  }
  Future<v1::WindowSumResponse> WindowSum(const Operand& x, std::int64_t radius,
                                          const OperationOptions& options = {}) {
    return Promise<v1::WindowSumResponse>(
        [&](auto done) { return WindowSum(x, radius, options, std::move(done)); });
  }
  Future<v1::TopKResponse> TopK(const Operand& x, std::int64_t k, bool smallest = false,
                                std::optional<int> axis = std::nullopt,
                                const OperationOptions& options = {}) {
    return Promise<v1::TopKResponse>(
        [&](auto done) { return TopK(x, k, smallest, axis, options, std::move(done)); });
  }
  Future<v1::MapResponse> Map(absl::Span<const Operand> operands, const v1::Expression& expression,
                              const OperationOptions& options = {}) {
    return Promise<v1::MapResponse>(
        [&](auto done) { return Map(operands, expression, options, std::move(done)); });
  }
  Future<v1::MapResponse> Map(const std::vector<Operand>& operands, const Expr& expression,
                              const OperationOptions& options = {}) {
    return Map(operands, expression.ToMessage(), options);
  }
  Future<v1::ExecuteResponse> Execute(const Program& program, const CallOptions& call = {}) {
    return Promise<v1::ExecuteResponse>(
        [&](auto done) { return Execute(program, call, std::move(done)); });
  }
  Future<v1::GetBufferResponse> GetBuffer(const std::string& name, std::uint64_t version = 0,
                                          const CallOptions& call = {}) {
    return Promise<v1::GetBufferResponse>(
        [&](auto done) { return GetBuffer(name, version, call, std::move(done)); });
  }
  Future<v1::CopyBufferResponse> CopyBuffer(const Operand& source, const ResultBuffer& target,
                                            std::optional<DType> dtype = std::nullopt,
                                            const std::string& device = {},
                                            const CallOptions& call = {}) {
    return Promise<v1::CopyBufferResponse>([&](auto done) {
      return CopyBuffer(source, target, dtype, device, call, std::move(done));
    });
  }
  Future<v1::DeleteBufferResponse> DeleteBuffer(const std::string& name, std::uint64_t version = 0,
                                                const CallOptions& call = {}) {
    return Promise<v1::DeleteBufferResponse>(
        [&](auto done) { return DeleteBuffer(name, version, call, std::move(done)); });
  }
  Future<v1::GetServerInfoResponse> GetServerInfo(const CallOptions& call = {}) {
    return Promise<v1::GetServerInfoResponse>(
        [&](auto done) { return GetServerInfo(call, std::move(done)); });
  }

 private:
  template <class Response, class Begin>
  static Future<Response> Promise(Begin&& begin) {
    auto promise = std::make_shared<std::promise<absl::StatusOr<Response>>>();
    auto answer = promise->get_future();
    AsyncCall call = begin(
        [promise](absl::StatusOr<Response> response) { promise->set_value(std::move(response)); });
    return {std::move(answer), std::move(call)};
  }

  Connection* connection_;
};

}  // namespace tessera
