// Unary calls of known callers, from their acceptance until their responses have been sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "server/calls/unary_exchange.h"
#include "server/core.h"

namespace tessera {

// Whether a call changes something or only reads.
enum class Effect { kNone, kChange };

// The most memory that the description of a buffer needs in a response: a name of 128 bytes, a
// shape of 8 axes, and a shard for each device.
constexpr std::size_t DescriptionBytes(std::size_t devices) { return 1024 + 256 * devices; }

// Holds its ticket and the memory of its response until its exchange ends. A response that the
// client does not take within --download-timeout ends the call.
class UnaryCall {
 public:
  // REQUIRES: the exchange has been admitted.
  UnaryCall(Core& core, std::string_view method, UnaryExchange& exchange)
      : core_(core), method_(method), exchange_(exchange) {}
  virtual ~UnaryCall() = default;
  UnaryCall(const UnaryCall&) = delete;
  UnaryCall& operator=(const UnaryCall&) = delete;

  const Caller& caller() const { return exchange_.caller(); }
  // Returns the errors of Core::Accept.
  absl::Status Accept();
  // Takes host memory for a further `bytes` bytes of a response and of its preparation.
  // RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED.
  absl::Status ChargeAnswer(std::size_t bytes);
  // Takes host memory for the description of one buffer of any kind.
  absl::Status ChargeDescription();
  // Fills the response by body(), which returns a status, and charges it as a message of many
  // parts, whose objects take more than their encoding. If there is no memory for it, it is freed
  // immediately. The response of a change describes at most one buffer, and is charged before
  // body(), so that a refused change has not been made.
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
  // Ends the call once the response is in place; called once, and the call must not be used
  // afterwards. Counts the call, and logs a failure.
  void End(const absl::Status& status);
  // Called when the client has left or the deadline has passed; the call may have ended.
  virtual void OnCancel() {}

 protected:
  Core& core() const { return core_; }
  std::string_view method() const { return method_; }
  // The buffers of the caller's tenant.
  BufferStore& store() const { return caller().tenant->store(); }
  // Checks the role of a caller whose request stores a result. Returns the errors of
  // Caller::Require.
  absl::Status RequireWrite() const {
    return caller().Require(Role::kWrite, method_, "a result that is stored");
  }

  // Notes the strategy, if any, that the call asks for or that ran. The text outlives the call's
  // End.
  void NoteStrategy(std::string_view strategy) { strategy_ = strategy; }
  // Notes that the call begins on a worker now.
  void NoteBegin() { begin_time_ = SteadyNow(); }
  // Notes the time by the device's clock.
  void NoteKernel(double microseconds) {
    kernel_ = absl::Microseconds(microseconds);
    core_.metrics().CountKernel(method_, strategy_, microseconds);
  }
  // For a transfer: notes that a piece has waited for a worker, or has been copied.
  void NoteWait(absl::Duration wait) { waited_ += wait; }
  void NoteCopy(absl::Duration copy) { copies_ += copy; }
  // Times in microseconds: from acceptance to the begin on a worker, and to the end. The end is the
  // first call of total_us or of End.
  double queue_us() const { return absl::ToDoubleMicroseconds(begin_time_ - accept_time_); }
  double total_us() { return absl::ToDoubleMicroseconds(end_time() - accept_time_); }

 private:
  absl::Time end_time() {
    if (end_time_ == absl::InfinitePast()) end_time_ = SteadyNow();
    return end_time_;
  }

  Core& core_;
  const std::string_view method_;
  UnaryExchange& exchange_;
  const absl::Time accept_time_ = SteadyNow();
  absl::Time begin_time_ = absl::InfinitePast();  // until it begins
  absl::Time end_time_ = absl::InfinitePast();    // until it ends
  absl::Duration waited_ = absl::ZeroDuration();
  absl::Duration copies_ = absl::ZeroDuration();
  absl::Duration kernel_ = absl::ZeroDuration();
  std::string_view strategy_;
  Core::Accepted accepted_;
  Charge answer_memory_;
};

// Admits calls to a method if the caller has the role for it, the request is not too large and
// there is host memory for it. Logs and counts the other calls.
UnaryExchange::Admit AdmitTo(Core& core, std::string_view method);

// Serves a unary call that neither allocates nor frees memory of buffers. body(caller) runs
// immediately, fills the response (UnaryCall::Fill) and returns a status.
template <class Request, class Response, class Body>
void Answer(Core& core, std::string_view method, Effect effect,
            UnaryExchangeOf<Request, Response>& exchange, Body body) {
  UnaryCall& call = exchange.Serve(std::make_unique<UnaryCall>(core, method, exchange));
  call.End(Guarded([&]() -> absl::Status {
    absl::Status status = call.Accept();
    const auto fill = [&] { return body(call.caller()); };
    return status.ok() ? call.Fill(effect, exchange.response(), fill) : status;
  }));
}

// Serves a unary call that may allocate or free memory, or call the operating system: body(caller)
// runs on a thread of the chores. The request and the response exist until the call is done.
template <class Request, class Response, class Body>
void AnswerLater(Core& core, std::string_view method, Effect effect,
                 UnaryExchangeOf<Request, Response>& exchange, Body body) {
  UnaryCall& call = exchange.Serve(std::make_unique<UnaryCall>(core, method, exchange));
  const absl::Status status = Guarded([&]() -> absl::Status {
    if (absl::Status accepted = call.Accept(); !accepted.ok()) return accepted;
    return core.chores().Submit(
        [&call, effect, &response = exchange.response(), body = std::move(body)]() mutable {
          const auto fill = [&] { return body(call.caller()); };
          call.End(Guarded([&] { return call.Fill(effect, response, fill); }));
        },
        call.caller().tenant->number());
  });
  if (!status.ok()) call.End(status);
}

}  // namespace tessera
