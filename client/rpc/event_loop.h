// Asynchronous calls and the thread that advances them. Internal to the library.
#pragma once

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_set>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/rpc/connection.h"
#include "client/rpc/guarded.h"

namespace tessera {

class EventLoop;

// A call under way. It makes the same attempts as a blocking call, but is advanced by events from a
// completion queue. The loop keeps this object alive until the call has ended. Thread safe.
class AsyncCallBase : public std::enable_shared_from_this<AsyncCallBase> {
 public:
  // `must_end` says whether CancelAll waits for the call's response instead of cancelling the call.
  AsyncCallBase(Connection& connection, Attempts::Plan plan, bool must_end)
      : connection_(connection),
        loop_(connection.events()),
        must_end_(must_end),
        attempts_(connection, std::move(plan)) {}
  virtual ~AsyncCallBase() = default;

  void Start();
  // Ends the call with CANCELLED, unless it has just ended in another way.
  void Cancel();
  bool must_end() const { return must_end_; }
  // Handles an event of the queue. Runs on the loop's thread.
  void Proceed(bool ok);

 protected:
  // Begins an attempt. When the attempt ends, the queue delivers an event with the tag `this`.
  virtual void Send(grpc::ClientContext* context, PooledChannel& channel) = 0;
  // Runs after the event of an attempt. Frees objects that gRPC allocated in the memory of the
  // call, before the context is destroyed.
  virtual void EndAttempt() = 0;
  // Reports the result to the caller. No lock is held.
  virtual void Done(absl::Status status) = 0;

  Connection& connection_;
  EventLoop& loop_;
  const bool must_end_;
  Attempts attempts_;
  grpc::Status answer_;  // the status of the last attempt

 private:
  enum class State { kConnecting, kCalling, kPausing, kEnding };

  // These advance the call, and return a status if the call has ended. mutex_ is held.
  std::optional<absl::Status> Connect();
  std::optional<absl::Status> Answered();
  void SetAlarm(State state, absl::Duration delay);

  std::mutex mutex_;
  State state_ = State::kConnecting;            // guarded by mutex_
  bool cancelled_ = false;                      // guarded by mutex_
  std::optional<Lease> channel_;                // guarded by mutex_
  std::optional<grpc::ClientContext> context_;  // guarded by mutex_
  std::optional<grpc::Alarm> alarm_;            // guarded by mutex_
  absl::Status end_;                            // for kEnding; guarded by mutex_
};

// A thread that waits for the events of a client's asynchronous calls and runs their callbacks, one
// at a time. The thread starts with the first call. Thread safe.
class EventLoop {
 public:
  EventLoop() = default;
  ~EventLoop();

  grpc::CompletionQueue* queue() { return &queue_; }
  void Add(const std::shared_ptr<AsyncCallBase>& call);
  void Remove(AsyncCallBase* call);
  // Cancels all calls except those with must_end, which run to completion, and waits until the last
  // callback has returned. Must not be called from a callback.
  void CancelAll();

 private:
  void Run();

  grpc::CompletionQueue queue_;
  std::mutex mutex_;
  std::condition_variable empty_;
  std::unordered_set<std::shared_ptr<AsyncCallBase>> calls_;  // guarded by mutex_
  std::thread thread_;                                        // guarded by mutex_
};

template <class Request>
class AsyncUnaryCall final : public AsyncCallBase {
 public:
  using Callback = std::function<void(absl::StatusOr<ResponseOf<Request>>)>;

  AsyncUnaryCall(Connection& connection, Request request, Attempts::Plan plan, bool must_end,
                 Callback done)
      : AsyncCallBase(connection, std::move(plan), must_end),
        request_(std::move(request)),
        done_(std::move(done)) {}

 private:
  using Unary = Method<Request>;

  void Send(grpc::ClientContext* context, PooledChannel& channel) override {
    connection_.CountSent(request_.ByteSizeLong());
    reader_ = (channel.stub<typename Unary::Service>().*Unary::kPrepare)(context, request_,
                                                                         loop_.queue());
    reader_->StartCall();
    reader_->Finish(&response_, &answer_, this);
  }
  void EndAttempt() override { reader_.reset(); }
  void Done(absl::Status status) override {
    const std::size_t server = attempts_.route().server;
    if (kReadsBuffers<Request> && connection_.MayHaveRestarted(status, server)) {
      return Explain(std::move(status), server);
    }
    if (status.ok()) {
      connection_.Received(server, response_);
      status = CheckResponse(request_, response_);
    }
    if (status.ok()) {
      Tell(done_, std::move(response_));
    } else {
      Tell(done_, std::move(status));
    }
    done_ = nullptr;  // frees what the callback holds
  }

  // Runs the callback. Discards an exception, since the event loop has no caller to which it could
  // be reported.
  static void Tell(const Callback& done, absl::StatusOr<ResponseOf<Request>> answer) {
    if (done) Guarded([&] { done(std::move(answer)); }).IgnoreError();
  }
  // Does the work of Connection::ExplainMissing without waiting.
  void Explain(absl::Status status, std::size_t server);

  const Request request_;
  ResponseOf<Request> response_;
  Callback done_;
  std::unique_ptr<grpc::ClientAsyncResponseReaderInterface<ResponseOf<Request>>> reader_;
};

struct AsyncOptions {
  std::optional<absl::Duration> timeout;  // the client's timeout if absent
  std::optional<std::size_t> only;        // the only server that may be called
  bool must_end = false;                  // whether the call continues when the client is destroyed
  absl::Status refused;  // unless OK, the call ends with this status and nothing is sent
};

// Starts a call. done runs on the loop's thread, exactly once.
template <class Request>
std::weak_ptr<AsyncCallBase> StartCall(Connection& connection, Request request,
                                       const AsyncOptions& options,
                                       typename AsyncUnaryCall<Request>::Callback done) {
  Attempts::Plan plan = connection.PlanOf(request, {.timeout = options.timeout}, options.only);
  plan.refused.Update(options.refused);
  auto call = std::make_shared<AsyncUnaryCall<Request>>(
      connection, std::move(request), std::move(plan), options.must_end, std::move(done));
  connection.events().Add(call);
  call->Start();
  return call;
}

template <class Request>
void AsyncUnaryCall<Request>::Explain(absl::Status status, std::size_t server) {
  StartCall(connection_, v1::GetServerInfoRequest(), {.timeout = kExplainTimeout, .only = server},
            [&connection = connection_, done = std::move(done_), status = std::move(status),
             server](const absl::StatusOr<v1::GetServerInfoResponse>& info) {
              Tell(done, info.ok()
                             ? connection.WithRestart(status, server, ToTime(info->start_time()))
                             : status);
            });
}

}  // namespace tessera
