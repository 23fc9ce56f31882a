#include "server/calls/unary_exchange.h"

#include "server/calls/unary_call.h"

namespace tessera {

UnaryExchange::UnaryExchange(Answers& answers) : answers_(answers) {
  context_.AsyncNotifyWhenDone(&done_);
}

UnaryExchange::~UnaryExchange() {
  if (answer_.call != nullptr) answers_.Remove(answer_);
}

void UnaryExchange::AwaitClient() { answers_.Add(answer_, context_.c_call(), SteadyNow()); }

void UnaryExchange::OnArrived(bool ok) {
  if (!ok) {
    delete this;  // the server is stopping
    return;
  }
  trace_ = BeginTrace(context_);
  Handle();
  if (state_.exchange(State::kHandled) == State::kCancelled) Cancel();
  LetGo();
}

void UnaryExchange::OnDone(bool) {
  if (context_.IsCancelled() && state_.exchange(State::kCancelled) == State::kHandled) Cancel();
  LetGo();
}

void UnaryExchange::Cancel() {
  if (call_ != nullptr) call_->OnCancel();
}

void UnaryExchange::LetGo() {
  if (events_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

}  // namespace tessera
