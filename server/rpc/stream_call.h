// Streaming calls between gRPC's completion queues and their handlers.
#pragma once

#include <atomic>

#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/grpcpp.h"
#include "server/rpc/call_queues.h"
#include "server/rpc/trace.h"

namespace tessera {

class StreamExchange;

// Handles a call whose messages are bytes. It may have one read and one write at a time. It is
// notified of their ends, and of all other events, on a thread of a queue, which it must not block.
class StreamCall {
 public:
  explicit StreamCall(StreamExchange& exchange) : exchange_(exchange) {}
  StreamCall(const StreamCall&) = delete;
  StreamCall& operator=(const StreamCall&) = delete;

  // `ok` is true if a message has arrived, and false if the client has sent everything or has left.
  virtual void OnReadDone(bool) {}
  // `ok` is false if the client accepts no more messages.
  virtual void OnWriteDone(bool) {}
  virtual void OnSendInitialMetadataDone(bool) {}
  // Called if the client leaves or the deadline passes before the call ends.
  virtual void OnCancel() {}
  // Called last, when nothing else is in progress.
  virtual void OnDone() = 0;

 protected:
  ~StreamCall() = default;

  // These may be called from any thread. A message must stay in place until its read or write has
  // ended.
  void StartRead(grpc::ByteBuffer* message);
  void StartWrite(const grpc::ByteBuffer* message);
  void StartSendInitialMetadata();
  // Ends the call; called once, and nothing may be started afterwards. If the client does not read
  // the response, the call is cancelled, like a unary call (Answers).
  void Finish(const grpc::Status& status);
  void FinishWith(const grpc::ByteBuffer& message);

  grpc::ServerContext& context() const;
  const Trace& trace() const;

 private:
  StreamExchange& exchange_;
};

// gRPC's side of one call to a method that the server's services leave to its generic service.
class StreamExchange final {
 public:
  using Handle = std::function<void(StreamExchange&)>;

  // Accepts one call, and then another each time one arrives. handle(exchange) begins to serve the
  // call on a thread of the queue. The service and `handle` must outlive the queue.
  StreamExchange(grpc::AsyncGenericService& service, CallQueue& queue, const Handle& handle);
  StreamExchange(const StreamExchange&) = delete;
  StreamExchange& operator=(const StreamExchange&) = delete;

  grpc::GenericServerContext& context() { return context_; }
  // The trace of the call; set when the call arrives.
  const Trace& trace() const { return trace_; }
  // From now on, `call` receives the events. It must exist until its OnDone.
  void Serve(StreamCall& call) { call_ = &call; }
  // Ends the call with a status instead of serving it.
  void Refuse(const grpc::Status& status);

 private:
  friend class StreamCall;
  using EventOf = QueueEventOf<StreamExchange>;

  // A call without a handler.
  class Refused;

  ~StreamExchange();
  void OnArrived(bool ok);
  template <void (StreamCall::*kOnDone)(bool)>
  void Notify(bool ok) {
    (call_->*kOnDone)(ok);
    LetGo();
  }
  void OnFinished(bool) { LetGo(); }
  void OnEnd(bool);
  EventOf* Begin(EventOf& event);
  // Gives the call to the queue's answers before its response is sent.
  void AwaitClient();
  void LetGo();

  grpc::AsyncGenericService& service_;
  CallQueue& queue_;
  const CallQueue::User user_{queue_};
  const Handle& handle_;
  Answers::Entry answer_;  // in the queue's answers while its `call` is set
  grpc::GenericServerContext context_;
  Trace trace_;
  grpc::GenericServerAsyncReaderWriter stream_{&context_};
  StreamCall* call_ = nullptr;
  EventOf arrived_{this, &StreamExchange::OnArrived};
  EventOf read_{this, &StreamExchange::Notify<&StreamCall::OnReadDone>};
  EventOf written_{this, &StreamExchange::Notify<&StreamCall::OnWriteDone>};
  EventOf metadata_{this, &StreamExchange::Notify<&StreamCall::OnSendInitialMetadataDone>};
  EventOf finished_{this, &StreamExchange::OnFinished};
  EventOf end_{this, &StreamExchange::OnEnd};
  std::atomic<int> under_way_{3};  // initially the arrival, the end and Finish
  enum class State { kArriving, kServed, kCancelled };
  std::atomic<State> state_{State::kArriving};
};

}  // namespace tessera
