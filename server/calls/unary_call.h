// Unary calls of known callers, from their acceptance until their responses have been sent.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "kernels/base/status_macros.h"
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
      : parts_(parts),
        exchange_(exchange),
        record_{.method = method,
                .strategy = "",
                .tenant = exchange.caller().tenant,
                .trace = exchange.trace(),
                .accepted = SteadyNow()} {}
  virtual ~UnaryCall() = default;
  UnaryCall(const UnaryCall&) = delete;
  UnaryCall& operator=(const UnaryCall&) = delete;

  const Caller& caller() const { return exchange_.caller(); }
  // Returns the errors of CallLimits::Accept.
  absl::Status Accept();
  // Takes host memory for another `bytes` bytes of a response or of its preparation. Returns
  // RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED if there is too little. message: the error's message
  // if other calls hold too much memory.
  absl::Status ChargeAnswer(
      std::size_t bytes,
      std::string_view message =
          "other calls' messages leave too little memory for this call's response");
  // Takes enough host memory to describe any one buffer.
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
  std::string_view method() const { return record_.method; }
  // The buffers of the caller's tenant.
  BufferStore& store() const { return caller().tenant->store(); }
  // Checks the role of a caller whose request stores a result. Returns the errors of
  // Caller::Require.
  absl::Status RequireWrite() const {
    return caller().Require(Role::kWrite, method(), "storing a result");
  }

  // Notes the strategy, if any, that the call requests or that ran. The text must outlive the
  // call's End.
  void NoteStrategy(std::string_view strategy) { record_.strategy = strategy; }
  // Notes that a worker begins to run the call.
  void NoteBegin() { record_.begun = SteadyNow(); }
  // Notes the kernels' time, as measured by the device's clock.
  void NoteKernel(double microseconds) {
    record_.kernel = absl::Microseconds(microseconds);
    parts_.records.metrics().CountKernel(method(), record_.strategy, microseconds);
  }
  // For a transfer: notes how long a piece has waited for a worker, or how long its copy has taken.
  void NoteWait(absl::Duration wait) { record_.waited += wait; }
  void NoteCopy(absl::Duration copy) { record_.copies += copy; }
  // Returns the time from acceptance until a worker began to run the call, in microseconds.
  double queue_us() const { return absl::ToDoubleMicroseconds(record_.queue()); }
  // Returns the time from acceptance to the first call of total_us or End, in microseconds.
  double total_us() {
    NoteEnd();
    return absl::ToDoubleMicroseconds(record_.total());
  }

 private:
  void NoteEnd() {
    if (record_.ended == absl::Time()) record_.ended = SteadyNow();
  }

  const CallParts& parts_;
  UnaryExchange& exchange_;
  CallRecord record_;
  CallLimits::Accepted accepted_;
  Charge answer_memory_;
};

// Returns the admission check for a method. It admits a call if the caller has the required role,
// the request is not too large and there is enough host memory for it. It logs and counts the calls
// that it does not admit.
UnaryExchange::Admit AdmitTo(const CallParts& parts, std::string_view method);

// Where a unary call is handled: immediately on the queue's thread, or on a thread of the chores if
// the call may allocate or free buffer memory or call the operating system.
enum class Thread { kQueue, kChores };

// Serves a unary call. body(caller, request, response) fills the response and returns a status. The
// request and the response exist until the call is done.
template <class Request, class Response, class Body>
void Answer(const CallParts& parts, std::string_view method, Effect effect, Thread thread,
            UnaryExchangeOf<Request, Response>& exchange, Body body) {
  UnaryCall& call = exchange.Serve(std::make_unique<UnaryCall>(parts, method, exchange));
  const auto fill = [&call, &exchange, effect, body] {
    Response& response = exchange.response();
    return call.Fill(effect, response,
                     [&] { return body(call.caller(), exchange.request(), response); });
  };
  const absl::Status status = Guarded([&]() -> absl::Status {
    RETURN_IF_ERROR(call.Accept());
    if (thread == Thread::kQueue) return fill();
    return parts.chores.Submit([&call, fill] { call.End(Guarded(fill)); },
                               call.caller().tenant->number());
  });
  if (thread == Thread::kQueue || !status.ok()) call.End(status);
}

// Answers the calls of a method with service.handle(caller, request, response). ask: as for
// AcceptUnary. The service and the parts must outlive the queues.
template <class Service, class Asker, class Request, class Response>
void AnswerCalls(CallQueues& queues, const CallParts& parts, Service& service, Asker ask,
                 std::string_view method, Effect effect, Thread thread,
                 absl::Status (Service::*handle)(const Caller&, const Request&, Response&)) {
  AcceptUnary<Request, Response>(
      queues, service, ask, AdmitTo(parts, method),
      [=, &parts, &service](UnaryExchangeOf<Request, Response>& exchange) {
        Answer(
            parts, method, effect, thread, exchange,
            [&service, handle](const Caller& caller, const Request& request, Response& response) {
              return (service.*handle)(caller, request, response);
            });
      });
}

}  // namespace tessera
