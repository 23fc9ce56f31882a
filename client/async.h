// Asynchronous versions of the client's calls (Client::Async): operations, programs, and the short
// calls about buffers and the server. Transfers, drafts and lists are only in Client.
//
//   client.Async().Dot("x", "y", {}, [](absl::StatusOr<tessera::v1::DotResponse> answer) { ... });
//   tessera::Future<tessera::v1::DotResponse> dot = client.Async().Dot("x", "y");
//   ... dot.Get() ...
//
// Deadlines, retries and errors are the same as for the blocking calls. Callbacks run on a thread
// that belongs to the client, one at a time and without a lock held. They may begin other calls but
// should not block, because no other asynchronous call can end while a callback runs. Each callback
// runs exactly once. It receives CANCELLED if AsyncCall::Cancel is called or the client is
// destroyed before the response arrives. Exceptions from callbacks are discarded. If the callback
// is null, the response is discarded.
//
// Thread safe. Must not be used after the client has been destroyed. The client's destructor waits
// for all callbacks, so it must not run in a callback.
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

// A call under way. Destroying this object does not affect the call. Thread safe.
class AsyncCall {
 public:
  AsyncCall() = default;
  explicit AsyncCall(std::weak_ptr<AsyncCallBase> call) : call_(std::move(call)) {}

  // Ends the call with CANCELLED unless its response has already arrived. Does not wait for the
  // call to end.
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

  // Waits for the response. Must not be called in a callback. Returns FAILED_PRECONDITION /
  // ANSWER_TAKEN if an earlier Get returned the response, or if the future has been moved from.
  absl::StatusOr<Response> Get() {
    if (!answer_.valid()) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "ANSWER_TAKEN",
                       "the future's response has already been taken");
    }
    return answer_.get();
  }
  // Whether Get would return without waiting.
  bool IsReady() const {
    return !answer_.valid() ||
           answer_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void Cancel() const { call_.Cancel(); }

 private:
  std::future<absl::StatusOr<Response>> answer_;
  AsyncCall call_;
};

// Each method takes the arguments of the Client method with the same name. It returns an AsyncCall
// if a Callback is the last argument, and a Future otherwise.
class AsyncClient : public Operations<AsyncClient> {
 public:
  explicit AsyncClient(Connection* connection) : connection_(connection) {}

  template <class... Done>
  auto Execute(const Program& program, const CallOptions& call = {}, Done&&... done) {
    return Send(program.request(), call, std::forward<Done>(done)...);
  }
  template <class... Done>
  auto GetBuffer(const std::string& name, std::uint64_t version = 0, const CallOptions& call = {},
                 Done&&... done) {
    return Send(BufferRequest<v1::GetBufferRequest>(name, version), call,
                std::forward<Done>(done)...);
  }
  template <class... Done>
  auto CopyBuffer(const Operand& source, const ResultBuffer& target,
                  std::optional<DType> dtype = std::nullopt, const std::string& device = {},
                  const CallOptions& call = {}, Done&&... done) {
    return Start<v1::CopyBufferRequest>(CopyRequest(source, target, dtype, device), call.timeout,
                                        std::forward<Done>(done)...);
  }
  // Makes a single call, unlike Client::DeleteBuffer. The version is checked only if the server
  // supports versions. If the first response was lost and the call was repeated, BUFFER_NOT_FOUND
  // may mean that the first attempt deleted the buffer.
  template <class... Done>
  auto DeleteBuffer(const std::string& name, std::uint64_t version = 0,
                    const CallOptions& call = {}, Done&&... done) {
    return Send(BufferRequest<v1::DeleteBufferRequest>(name, version), call,
                std::forward<Done>(done)...);
  }
  template <class... Done>
  auto GetServerInfo(const CallOptions& call = {}, Done&&... done) {
    return Send(v1::GetServerInfoRequest(), call, std::forward<Done>(done)...);
  }

 private:
  friend class Operations<AsyncClient>;
  template <class Request, class Options, class... Done>
  auto Send(Request request, const Options& options, Done&&... done) {
    return Start<Request>(std::move(request), options.timeout, std::forward<Done>(done)...);
  }
  template <class Request>
  AsyncCall Start(absl::StatusOr<Request> request, std::optional<absl::Duration> timeout,
                  Callback<ResponseTo<Request>> done);
  template <class Request>
  Future<ResponseTo<Request>> Start(absl::StatusOr<Request> request,
                                    std::optional<absl::Duration> timeout) {
    auto promise = std::make_shared<std::promise<absl::StatusOr<ResponseTo<Request>>>>();
    auto answer = promise->get_future();
    AsyncCall call = Start<Request>(std::move(request), timeout,
                                    [promise](absl::StatusOr<ResponseTo<Request>> response) {
                                      promise->set_value(std::move(response));
                                    });
    return {std::move(answer), std::move(call)};
  }

  Connection* connection_;
};

}  // namespace tessera
