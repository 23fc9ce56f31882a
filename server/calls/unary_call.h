// Unary calls of known callers, from their acceptance until their responses have been sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "server/calls/call_parts.h"
#include "server/calls/unary_exchange.h"

namespace tessera {

// Whether a call changes something or only reads.
enum class Effect { kNone, kChange };

// A unary call. It holds its ticket and the charge for its response until its exchange ends. If the
// client does not read the response within --transfer-timeout, the call is cancelled.
class UnaryCall {
 public:
  // REQUIRES: the exchange has been admitted.
  UnaryCall(const CallParts& parts, std::string_view method, UnaryExchange& exchange)
      : parts_(parts), method_(method), exchange_(exchange) {}
  virtual ~UnaryCall() = default;
  UnaryCall(const UnaryCall&) = delete;
  UnaryCall& operator=(const UnaryCall&) = delete;

  const Caller& caller() const { return exchange_.caller(); }
  // Returns the errors of CallLimits::Accept.
  absl::Status Accept();
  // Takes host memory for another `bytes` bytes of a response or of its preparation. Returns
  // RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED if there is too little.
  absl::Status ChargeAnswer(std::size_t bytes);
  // Takes host memory for the description of any one buffer.
  absl::Status ChargeDescription() { return ChargeAnswer(parts_.limits.description_bytes()); }
  // Fills the response with body(), which returns a status, and takes host memory for the encoded
  // response and for its objects, which are larger. If there is too little memory for the response,
  // frees it immediately. The response to a change describes at most one buffer, whose description
  // is charged before body(): no change may be made if its response would then be refused.
  template <class Response, class Body>
  absl::Status Fill(Effect effect, Response& answer, const Body& body) {
    if (effect == Effect::kChange) {
      absl::Status charged;
      if constexpr (requires { answer.mutable_buffer(); }) charged = ChargeDescription();
      return charged.ok() ? body() : charged;
    }
    absl::Status status = body();
    if (!status.ok()) return status;
    status = ChargeAnswer(answer.SpaceUsedLong() + answer.ByteSizeLong());
    if (!status.ok()) answer = Response();
    return status;
  }
  // Ends the call; called once, when the response is in place. The call must not be used
  // afterwards. Counts the call, and logs it if it failed.
  void End(const absl::Status& status);
  // Called when the client has left or the deadline has passed, possibly after the call has ended.
  virtual void OnCancel() {}

 protected:
  const CallParts& parts() const { return parts_; }
  std::string_view method() const { return method_; }
  // The buffers of the caller's tenant.
  BufferStore& store() const { return caller().tenant->store(); }
  // Checks the role of a caller whose request stores a result. Returns the errors of
  // Caller::Require.
  absl::Status RequireWrite() const {
    return caller().Require(Role::kWrite, method_, "a result that is stored");
  }

  // Notes the strategy, if any, that the call requests or that ran. The text must outlive the
  // call's End.
  void NoteStrategy(std::string_view strategy) { strategy_ = strategy; }
  // Notes that a worker begins to run the call.
  void NoteBegin() { begin_time_ = SteadyNow(); }
  // Notes the kernels' time, as measured by the device's clock.
  void NoteKernel(double microseconds) {
    kernel_ = absl::Microseconds(microseconds);
    parts_.records.metrics().CountKernel(method_, strategy_, microseconds);
  }
  // For a transfer: notes how long a piece has waited for a worker, or how long its copy has taken.
  void NoteWait(absl::Duration wait) { waited_ += wait; }
  void NoteCopy(absl::Duration copy) { copies_ += copy; }
  // Returns the time from acceptance until a worker began to run the call, in microseconds.
  double queue_us() const { return absl::ToDoubleMicroseconds(begin_time_ - accept_time_); }
  // Returns the time from acceptance to the first call of total_us or End, in microseconds.
  double total_us() { return absl::ToDoubleMicroseconds(end_time() - accept_time_); }

 private:
  absl::Time end_time() {
    if (end_time_ == absl::InfinitePast()) end_time_ = SteadyNow();
    return end_time_;
  }

  const CallParts& parts_;
  const std::string_view method_;
  UnaryExchange& exchange_;
  const absl::Time accept_time_ = SteadyNow();
  absl::Time begin_time_ = absl::InfinitePast();  // InfinitePast until it begins
  absl::Time end_time_ = absl::InfinitePast();    // InfinitePast until it ends
  absl::Duration waited_ = absl::ZeroDuration();
  absl::Duration copies_ = absl::ZeroDuration();
  absl::Duration kernel_ = absl::ZeroDuration();
  std::string_view strategy_;
  CallLimits::Accepted accepted_;
  Charge answer_memory_;
};

// Returns the admission check for a method. It admits a call if the caller has the required role,
// the request is not too large and there is enough host memory for it. It logs and counts the calls
// that it does not admit.
UnaryExchange::Admit AdmitTo(const CallParts& parts, std::string_view method);

// Serves a unary call that neither allocates nor frees buffer memory. body(caller) runs
// immediately, fills the response (UnaryCall::Fill) and returns a status.
template <class Request, class Response, class Body>
void Answer(const CallParts& parts, std::string_view method, Effect effect,
            UnaryExchangeOf<Request, Response>& exchange, Body body) {
  UnaryCall& call = exchange.Serve(std::make_unique<UnaryCall>(parts, method, exchange));
  call.End(Guarded([&]() -> absl::Status {
    absl::Status status = call.Accept();
    const auto fill = [&] { return body(call.caller()); };
    return status.ok() ? call.Fill(effect, exchange.response(), fill) : status;
  }));
}

// Serves a unary call that may allocate or free memory, or call the operating system. body(caller)
// therefore runs on a thread of the chores. The request and the response exist until the call is
// done.
template <class Request, class Response, class Body>
void AnswerLater(const CallParts& parts, std::string_view method, Effect effect,
                 UnaryExchangeOf<Request, Response>& exchange, Body body) {
  UnaryCall& call = exchange.Serve(std::make_unique<UnaryCall>(parts, method, exchange));
  const absl::Status status = Guarded([&]() -> absl::Status {
    if (absl::Status accepted = call.Accept(); !accepted.ok()) return accepted;
    return parts.chores.Submit(
        [&call, effect, &response = exchange.response(), body = std::move(body)]() mutable {
          const auto fill = [&] { return body(call.caller()); };
          call.End(Guarded([&] { return call.Fill(effect, response, fill); }));
        },
        call.caller().tenant->number());
  });
  if (!status.ok()) call.End(status);
}

}  // namespace tessera
