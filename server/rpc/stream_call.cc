#include "server/rpc/stream_call.h"

#include "server/clock.h"

namespace tessera {

// --- The call's side ---

void StreamCall::StartRead(grpc::ByteBuffer* message) {
  exchange_.stream_.Read(message, exchange_.Begin(exchange_.read_));
}

void StreamCall::StartWrite(const grpc::ByteBuffer* message) {
  exchange_.stream_.Write(*message, exchange_.Begin(exchange_.written_));
}

void StreamCall::StartSendInitialMetadata() {
  exchange_.stream_.SendInitialMetadata(exchange_.Begin(exchange_.metadata_));
}

void StreamCall::Finish(const grpc::Status& status) {
  exchange_.AwaitClient();
  exchange_.stream_.Finish(status, &exchange_.finished_);
}

void StreamCall::FinishWith(const grpc::ByteBuffer& message) {
  exchange_.AwaitClient();
  exchange_.stream_.WriteAndFinish(message, grpc::WriteOptions(), grpc::Status::OK,
                                   &exchange_.finished_);
}

grpc::ServerContext& StreamCall::context() const { return exchange_.context_; }

const Trace& StreamCall::trace() const { return exchange_.trace_; }

// --- gRPC's side ---

class StreamExchange::Refused final : public StreamCall {
 public:
  Refused(StreamExchange& exchange, const grpc::Status& status) : StreamCall(exchange) {
    exchange.Serve(*this);
    Finish(status);
  }
  void OnDone() override { delete this; }
};

StreamExchange::StreamExchange(grpc::AsyncGenericService& service, CallQueue& queue,
                               const Handle& handle)
    : service_(service), queue_(queue), handle_(handle) {
  context_.AsyncNotifyWhenDone(&end_);
  service_.RequestCall(&context_, &stream_, &queue_.events(), &queue_.events(), &arrived_);
}

StreamExchange::~StreamExchange() {
  if (answer_.call != nullptr) queue_.answers().Remove(answer_);
}

void StreamExchange::Refuse(const grpc::Status& status) { new Refused(*this, status); }

void StreamExchange::OnArrived(bool ok) {
  if (!ok) {  // the server is stopping
    delete this;
    return;
  }
  new StreamExchange(service_, queue_, handle_);
  trace_ = BeginTrace(context_);
  handle_(*this);
  if (state_.exchange(State::kServed) == State::kCancelled) call_->OnCancel();
  LetGo();
}

void StreamExchange::OnEnd(bool) {
  if (context_.IsCancelled() && state_.exchange(State::kCancelled) == State::kServed)
    call_->OnCancel();
  LetGo();
}

StreamExchange::EventOf* StreamExchange::Begin(EventOf& event) {
  under_way_.fetch_add(1, std::memory_order_relaxed);
  return &event;
}

void StreamExchange::AwaitClient() {
  queue_.answers().Add(answer_, context_.c_call(), SteadyNow());
}

void StreamExchange::LetGo() {
  if (under_way_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  call_->OnDone();
  delete this;
}

}  // namespace tessera
