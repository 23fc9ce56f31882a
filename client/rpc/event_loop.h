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
#include "client/guarded.h"
#include "client/rpc/connection.h"

namespace tessera {

class EventLoop;

// A call under way, which the loop keeps alive until it has ended. Thread safe.
class AsyncCallBase : public std::enable_shared_from_this<AsyncCallBase> {
 public:
  // must_end: whether CancelAll waits for the call's response instead of cancelling the call.
  AsyncCallBase(EventLoop& loop, bool must_end) : loop_(loop), must_end_(must_end) {}
  virtual ~AsyncCallBase() = default;

  // Ends the call with CANCELLED, unless it has just ended in another way.
  virtual void Cancel() = 0;
  // Handles an event of the queue with the tag `this`. Runs on the loop's thread.
  virtual void Proceed() = 0;
  bool must_end() const { return must_end_; }

 protected:
  // Makes the queue deliver an event after the delay.
  void SetAlarm(absl::Duration delay);

  EventLoop& loop_;
  const bool must_end_;
  std::optional<grpc::Alarm> alarm_;
};

// Work on a thread of its own. It returns a function that then runs on the loop's thread.
class AsyncTask final : public AsyncCallBase {
 public:
  using Work = std::function<std::function<void()>(const std::stop_token& cancel)>;

  AsyncTask(EventLoop& loop, Work work) : AsyncCallBase(loop, false), work_(std::move(work)) {}
  void Start();
  void Cancel() override { cancel_.request_stop(); }
  void Proceed() override;

 private:
  const Work work_;
  std::stop_source cancel_;
  std::function<void()> end_;
  std::thread thread_;
};

// A unary call. It makes the same attempts as a blocking call, but is advanced by events.
class AsyncAttempts : public AsyncCallBase {
 public:
  AsyncAttempts(Connection& connection, Attempts::Plan plan, bool must_end)
      : AsyncCallBase(connection.events(), must_end),
        connection_(connection),
        attempts_(connection, std::move(plan)) {}

  void Start();
  void Cancel() override;
  void Proceed() override;

 protected:
  // Begins an attempt. When the attempt ends, the queue delivers an event.
  virtual void Send(grpc::ClientContext* context, PooledChannel& channel) = 0;
  // Runs after that event. Frees objects that gRPC allocated in the memory of the call, before the
  // context is destroyed.
  virtual void EndAttempt() = 0;
  // Reports the result to the caller. No lock is held.
  virtual void Done(absl::Status status) = 0;

  Connection& connection_;
  Attempts attempts_;
  grpc::Status answer_;  // the status of the last attempt

 private:
  enum class State { kConnecting, kCalling, kPausing, kEnding };

  // These advance the call, and return a status if the call has ended. mutex_ is held.
  std::optional<absl::Status> Connect();
  std::optional<absl::Status> Answered();

  std::mutex mutex_;
  State state_ = State::kConnecting;            // guarded by mutex_
  bool cancelled_ = false;                      // guarded by mutex_
  std::optional<Lease> channel_;                // guarded by mutex_
  std::optional<grpc::ClientContext> context_;  // guarded by mutex_
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
class AsyncUnaryCall final : public AsyncAttempts {
 public:
  using Callback = std::function<void(absl::StatusOr<ResponseOf<Request>>)>;

  AsyncUnaryCall(Connection& connection, Request request, Attempts::Plan plan, bool must_end,
                 Callback done)
      : AsyncAttempts(connection, std::move(plan), must_end),
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
    if (done) CallGuarded([&] { done(std::move(answer)); }).IgnoreError();
  }
  // Does the work of Connection::ExplainMissing without waiting.
  void Explain(absl::Status status, std::size_t server);

  const Request request_;
  ResponseOf<Request> response_;
  Callback done_;
  std::unique_ptr<grpc::ClientAsyncResponseReaderInterface<ResponseOf<Request>>> reader_;
};

struct AsyncOptions {
  CallOptions call = {};
  std::optional<std::size_t> only = {};  // the only server that may be called
  bool must_end = false;                 // whether the call continues when the client is destroyed
  absl::Status refused = {};  // unless OK, the call ends with this status and nothing is sent
};

// Starts a call. done runs on the loop's thread, exactly once.
template <class Request>
std::weak_ptr<AsyncCallBase> StartCall(Connection& connection, Request request,
                                       const AsyncOptions& options,
                                       typename AsyncUnaryCall<Request>::Callback done) {
  Attempts::Plan plan = connection.PlanOf(request, options.call, options.only);
  plan.refused = options.refused;
  plan.cancel = {};
  auto call = std::make_shared<AsyncUnaryCall<Request>>(
      connection, std::move(request), std::move(plan), options.must_end, std::move(done));
  connection.events().Add(call);
  call->Start();
  return call;
}

template <class Request>
void AsyncUnaryCall<Request>::Explain(absl::Status status, std::size_t server) {
  StartCall(connection_, v1::GetServerInfoRequest(),
            {.call = {.timeout = kExplainTimeout}, .only = server},
            [&connection = connection_, done = std::move(done_), status = std::move(status),
             server](const absl::StatusOr<v1::GetServerInfoResponse>& info) {
              Tell(done, info.ok()
                             ? connection.WithRestart(status, server, ToTime(info->start_time()))
                             : status);
            });
}

}  // namespace tessera
