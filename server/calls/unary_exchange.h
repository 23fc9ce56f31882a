// Unary calls between gRPC's completion queues and their handlers.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "google/protobuf/arena.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/async_unary_call.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "server/access/access.h"
#include "server/buffers/charge.h"
#include "server/rpc/answers.h"
#include "server/rpc/call_limits.h"
#include "server/rpc/call_queues.h"
#include "server/rpc/convert.h"
#include "server/rpc/message_memory.h"
#include "server/rpc/trace.h"

namespace tessera {

class UnaryCall;

// gRPC's side of one call. Its events arrive on threads of its queue. It is destroyed, together
// with its UnaryCall, when its handler has returned, gRPC has sent the response, and gRPC has
// reported the end of the call.
class UnaryExchange {
 public:
  UnaryExchange(const UnaryExchange&) = delete;
  UnaryExchange& operator=(const UnaryExchange&) = delete;

  grpc::ServerContext& context() { return context_; }
  struct Admit {
    // Returns OK if a call is to be handled, and sets the caller and the memory of the request in
    // that case. It is called before the message is parsed.
    std::function<grpc::Status(UnaryExchange&)> check;
    // Returns the error of an admitted call whose request is not a valid message.
    std::function<grpc::Status(UnaryExchange&)> refuse;
  };
  const Caller& caller() const { return caller_; }
  void set_caller(const Caller& caller) { caller_ = caller; }
  // The trace of the call; set when the call arrives.
  const Trace& trace() const { return trace_; }
  // Keeps the call until the exchange ends, and calls its OnCancel if the client leaves before it
  // has its response. A request that is answered immediately needs no call. Returns *call.
  template <class Call>
  Call& Serve(std::unique_ptr<Call> call) {
    Call& served = *call;
    call_ = std::move(call);
    return served;
  }
  // The size of the request before it is parsed.
  virtual std::size_t message_size() const = 0;
  // Returns a bound on the request's memory and repeated fields, or nothing if the request is not a
  // valid message.
  virtual std::optional<MessageBound> Bound() const = 0;
  // The charge for the memory of the request, which is held until Finish.
  void set_memory(Charge memory) { memory_ = std::move(memory); }
  const Charge& memory() const { return memory_; }
  // Sends the response, which has been filled in. Called once, on any thread. On return, the
  // messages are destroyed, and the exchange may be destroyed too.
  virtual void Finish(const grpc::Status& status) = 0;

 protected:
  // answers: cancels the call if its client does not read the response; must outlive the exchange.
  explicit UnaryExchange(Answers& answers);
  virtual ~UnaryExchange();

  // Called when the response is about to be sent.
  void AwaitClient();

  QueueEventOf<UnaryExchange> arrived_{this, &UnaryExchange::OnArrived};
  QueueEventOf<UnaryExchange> sent_{this, &UnaryExchange::OnSent};

 private:
  // Accepts the next call, and handles this one.
  virtual void Handle() = 0;

  // `ok` is true if a call has arrived, and false if the server is stopping.
  void OnArrived(bool ok);
  void OnSent(bool) { LetGo(); }
  void OnDone(bool);
  void Cancel();
  void LetGo();

  QueueEventOf<UnaryExchange> done_{this, &UnaryExchange::OnDone};
  grpc::ServerContext context_;
  Caller caller_;
  Charge memory_;
  Trace trace_;
  Answers& answers_;
  Answers::Entry answer_;  // in the list while its `call` is set
  std::unique_ptr<UnaryCall> call_;
  std::atomic<int> events_left_{3};  // handled, sent and done
  enum class State { kArriving, kHandled, kCancelled };
  std::atomic<State> state_{State::kArriving};
};

// The messages of a call, in an arena whose first block is large enough for small messages.
template <class Request, class Response>
struct CallMessages {
  // A Dot of two buffers whose names have 40 bytes each needs about 700 bytes.
  alignas(std::max_align_t) char block[1024];
  google::protobuf::Arena arena{block, sizeof block};
  Request& request = *google::protobuf::Arena::CreateMessage<Request>(&arena);
  Response& response = *google::protobuf::Arena::CreateMessage<Response>(&arena);

  // Parses the bytes and clears them. Returns false if they are not a valid message.
  bool Parse(grpc::ByteBuffer& bytes) {
    grpc::ProtoBufferReader reader(&bytes);
    const bool parsed = request.ParseFromZeroCopyStream(&reader);
    bytes.Clear();
    return parsed;
  }
  void Serialize(grpc::ByteBuffer& bytes) {
    bool owned = false;
    grpc::SerializationTraits<Response>::Serialize(response, &bytes, &owned);
  }
};
// An exchange with its messages. gRPC passes them as bytes and does not parse them, because a
// message whose parsing fails in gRPC keeps its memory until the next call.
template <class Request, class Response>
class UnaryExchangeOf final : public UnaryExchange {
 public:
  using Writer = grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>;

  Request& request() { return messages_->request; }
  Response& response() { return messages_->response; }

  std::size_t message_size() const override { return bytes_.Length(); }
  std::optional<MessageBound> Bound() const override {
    return MessageLayout::Of<Request>().Bound(bytes_);
  }

  void Finish(const grpc::Status& status) override {
    if (status.ok()) messages_->Serialize(bytes_);
    messages_.reset();  // freed first, because the client may be slow to read the response
    set_memory(Charge());
    AwaitClient();
    if (status.ok()) {
      writer_.Finish(bytes_, status, &sent_);
    } else {
      writer_.FinishWithError(status, &sent_);
    }
  }

  // How calls of a method are requested from gRPC, admitted and handled.
  struct Method {
    using Ask = std::function<void(grpc::ServerContext*, grpc::ByteBuffer*, Writer*,
                                   grpc::ServerCompletionQueue*, void*)>;
    Method(Ask a, Admit d, std::function<void(UnaryExchangeOf&)> h)
        : ask(std::move(a)), admit(std::move(d)), handle(std::move(h)) {}
    const Ask ask;
    const Admit admit;
    const std::function<void(UnaryExchangeOf&)> handle;
  };

  UnaryExchangeOf(std::shared_ptr<const Method> method, CallQueue& queue)
      : UnaryExchange(queue.answers()), method_(std::move(method)), queue_(queue) {
    method_->ask(&context(), &bytes_, &writer_, &queue_.events(), &arrived_);
  }

 private:
  void Handle() override {
    new UnaryExchangeOf(method_, queue_);
    const grpc::Status admitted = method_->admit.check(*this);
    if (!admitted.ok()) return Finish(admitted);
    bool parsed = false;
    const absl::Status memory = Guarded([&] {
      parsed = messages_.emplace().Parse(bytes_);
      return absl::OkStatus();
    });
    if (!memory.ok()) {
      Finish(ToGrpc(memory));
    } else if (parsed) {
      method_->handle(*this);
    } else {
      Finish(method_->admit.refuse(*this));
    }
  }

  // Created by the thread that handles the call, because an arena must allocate memory if a thread
  // other than its creator uses it.
  std::optional<CallMessages<Request, Response>> messages_;
  grpc::ByteBuffer bytes_;
  Writer writer_{&context()};
  const std::shared_ptr<const Method> method_;
  CallQueue& queue_;
  const CallQueue::User user_{queue_};
};

// Accepts the calls of one method from the queues of a built server. handle(exchange) is called for
// each admitted call, on a thread of a queue, and must return soon. `ask` is Service::RequestMethod
// of a raw method. The service must outlive the queues.
template <class Request, class Response, class Service, class Asker, class Handle>
void AcceptUnary(CallQueues& queues, Service& service,
                 void (Asker::*ask)(grpc::ServerContext*, grpc::ByteBuffer*,
                                    grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>*,
                                    grpc::CompletionQueue*, grpc::ServerCompletionQueue*, void*),
                 UnaryExchange::Admit admit, Handle handle) {
  using Exchange = UnaryExchangeOf<Request, Response>;
  const auto method = std::make_shared<const typename Exchange::Method>(
      [&service, ask](grpc::ServerContext* context, grpc::ByteBuffer* request,
                      typename Exchange::Writer* writer, grpc::ServerCompletionQueue* queue,
                      void* tag) { (service.*ask)(context, request, writer, queue, queue, tag); },
      std::move(admit), std::move(handle));
  queues.Accept([&](CallQueue& queue) { new Exchange(method, queue); });
}

}  // namespace tessera
