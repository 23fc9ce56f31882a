// Asynchronous calls: the thread that moves them on, and the course of each. Not for users of the
// library.
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

// A call under way: the same attempts as those of a blocking one, moved on by events of a
// completion queue. Kept alive by the loop until it has ended. Thread safe.
class AsyncCallBase : public std::enable_shared_from_this<AsyncCallBase> {
 public:
  // must_end: CancelAll waits for its answer.
  AsyncCallBase(Connection& connection, EventLoop& loop, const Attempts::Plan& plan, bool must_end)
      : connection_(connection), loop_(loop), must_end_(must_end), attempts_(connection, plan) {}
  virtual ~AsyncCallBase() = default;

  // refused: unless OK, what it ends with instead of an attempt.
  void Start(absl::Status refused = absl::OkStatus());
  // The call ends with CANCELLED, unless it has just ended otherwise.
  void Cancel();
  bool must_end() const { return must_end_; }
  // An event of the queue has come; on the loop's thread.
  void Proceed(bool ok);

 protected:
  // Begins an attempt, which ends with an event whose tag is `this`.
  virtual void Send(grpc::ClientContext* context, PooledChannel& channel) = 0;
  // After that event: what lies in the memory of the context's call goes before the context.
  virtual void EndAttempt() = 0;
  // Tells the caller; no lock is held.
  virtual void Done(absl::Status status) = 0;

  Connection& connection_;
  EventLoop& loop_;
  const bool must_end_;
  Attempts attempts_;
  grpc::Status answer_;  // of the last attempt

 private:
  enum class State { kConnecting, kCalling, kPausing, kEnding };

  // The next step of the course; a status: it has ended. mutex_ is held in all of them.
  std::optional<absl::Status> Connect();
  std::optional<absl::Status> Answered();
  void SetAlarm(State state, absl::Duration delay);

  std::mutex mutex_;
  State state_ = State::kConnecting;            // guarded by mutex_
  bool cancelled_ = false;                      // guarded by mutex_
  std::optional<Lease> channel_;                // guarded by mutex_
  std::optional<grpc::ClientContext> context_;  // guarded by mutex_
  std::optional<grpc::Alarm> alarm_;            // guarded by mutex_
  absl::Status end_;                            // of kEnding; guarded by mutex_
};

// One thread that waits for the events of all asynchronous calls of a client and runs their
// callbacks, one at a time. It begins with the first call. Thread safe.
class EventLoop {
 public:
  EventLoop() = default;
  ~EventLoop();

  grpc::CompletionQueue* queue() { return &queue_; }
  void Add(const std::shared_ptr<AsyncCallBase>& call);
  void Remove(AsyncCallBase* call);
  // Cancels all calls but those that must end, and waits until the last callback has returned. Not
  // to be called from one.
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

  AsyncUnaryCall(Connection& connection, EventLoop& loop, Request request,
                 const Attempts::Plan& plan, bool must_end, Callback done)
      : AsyncCallBase(connection, loop, plan, must_end),
        request_(std::move(request)),
        done_(std::move(done)) {}

 private:
  using Unary = Method<Request>;

  void Send(grpc::ClientContext* context, PooledChannel& channel) override {
    connection_.CountSent(request_.ByteSizeLong());
    connection_.AddRoute(*context, BufferOf(request_));
    reader_ =
        (channel.stub<typename Unary::Stub>().*Unary::kPrepare)(context, request_, loop_.queue());
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
      Tell(done_, std::move(response_));
    } else {
      Tell(done_, std::move(status));
    }
    done_ = nullptr;  // with what it holds
  }

  // Runs the callback. An exception is discarded, since the event loop has no caller to report it
  // to.
  static void Tell(const Callback& done, absl::StatusOr<ResponseOf<Request>> answer) {
    if (done) Guarded([&] { done(std::move(answer)); }).IgnoreError();
  }
  // As ExplainMissing.
  void Explain(absl::Status status, std::size_t server);

  const Request request_;
  ResponseOf<Request> response_;
  Callback done_;
  std::unique_ptr<grpc::ClientAsyncResponseReaderInterface<ResponseOf<Request>>> reader_;
};

struct AsyncOptions {
  std::optional<absl::Duration> timeout;  // absent: that of the client
  std::optional<std::size_t> only;        // of this server
  bool must_end = false;                  // not cancelled with the client
  absl::Status refused;                   // unless OK: what it ends with, and nothing is sent
};

// Starts a call. done runs on the loop's thread, exactly once.
template <class Request>
std::weak_ptr<AsyncCallBase> StartCall(Connection& connection, EventLoop& loop, Request request,
                                       const AsyncOptions& options,
                                       typename AsyncUnaryCall<Request>::Callback done) {
  const Attempts::Plan plan =
      connection.PlanOf(request, {.timeout = options.timeout}, options.only);
  auto call = std::make_shared<AsyncUnaryCall<Request>>(connection, loop, std::move(request), plan,
                                                        options.must_end, std::move(done));
  loop.Add(call);
  call->Start(options.refused);
  return call;
}

template <class Request>
void AsyncUnaryCall<Request>::Explain(absl::Status status, std::size_t server) {
  StartCall(
      connection_, loop_, v1::GetServerInfoRequest(), {.timeout = kExplainTimeout, .only = server},
      [&connection = connection_, done = std::move(done_), status = std::move(status),
       server](const absl::StatusOr<v1::GetServerInfoResponse>& info) {
        Tell(done, info.ok() ? connection.WithRestart(status, server, ToTime(info->start_time()))
                             : status);
      });
}

}  // namespace tessera
