// Unary calls of callers that the server knows, from their acceptance until their answers have been
// sent.
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

// Whether a call only reads, or changes something.
enum class Effect { kNone, kChange };

// The most memory that the description of a buffer needs in a response: a name of 128 bytes, a
// shape of 8 axes, and a shard for each device.
constexpr std::size_t DescriptionBytes(std::size_t devices) { return 1024 + 256 * devices; }

// Holds its ticket and the memory of its answer as long as its exchange, which outlives it. An
// answer that nobody takes for --download-timeout ends the call.
class UnaryCall {
 public:
  // REQUIRES: the exchange has been admitted.
  UnaryCall(Core& core, std::string_view method, UnaryExchange& exchange)
      : core_(core), method_(method), exchange_(exchange) {}
  virtual ~UnaryCall() = default;
  UnaryCall(const UnaryCall&) = delete;
  UnaryCall& operator=(const UnaryCall&) = delete;

  const Caller& caller() const { return exchange_.caller(); }
  // The errors of Core::Accept.
  absl::Status Accept();
  // Host memory for so many bytes of an answer, and of what leads to it, beside those that it has
  // been called for before. RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED.
  absl::Status ChargeAnswer(std::size_t bytes);
  // The same for the description of one buffer, of any kind.
  absl::Status ChargeDescription();
  // Fills the answer by body(), which gives its Status, and charges it as a message of many parts,
  // whose objects take more than their encoding. What there is no memory for is freed at once. The
  // response of a change describes at most one buffer, and is charged before body(), so that a
  // refused change has not been made.
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
  // With the answer in place. Once; the call may not be touched afterwards. Counts it, and logs
  // what failed.
  void End(const absl::Status& status);
  // The client has left, or its deadline has passed; the call may have ended.
  virtual void OnCancel() {}

 protected:
  Core& core() const { return core_; }
  std::string_view method() const { return method_; }
  // The caller's.
  BufferStore& store() const { return caller().tenant->store(); }
  // For what a request that has one stores. The errors of Caller::Require.
  absl::Status RequireWrite() const {
    return caller().Require(Role::kWrite, method_, "a result that is stored");
  }

  // What is measured of a call. The strategy, if any, that it asks for or that ran: the text
  // outlives the call's End.
  void NoteStrategy(std::string_view strategy) { strategy_ = strategy; }
  // It begins on a worker, now.
  void NoteBegin() { begin_time_ = SteadyNow(); }
  // What the device's clock says, if anything.
  void NoteKernel(double microseconds) {
    kernel_ = absl::Microseconds(microseconds);
    core_.metrics().CountKernel(method_, strategy_, microseconds);
  }
  // Of a transfer: a piece has waited for a worker, or has been copied.
  void NoteWait(absl::Duration wait) { waited_ += wait; }
  void NoteCopy(absl::Duration copy) { copies_ += copy; }
  // Times in microseconds: from acceptance to the begin on a worker, and to the end. The end is
  // when this is first called, or when End is.
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

// Admits to a method those who have the role for it, with requests that may be so large and for
// which there is host memory, and logs and counts the others.
UnaryExchange::Admit AdmitTo(Core& core, std::string_view method);

// A unary call that neither allocates nor frees memory of buffers: body(caller) returns its Status,
// and fills the response (UnaryCall::Fill), at once.
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

// A unary call that may take or free memory, or ask the system: body(caller) runs on a thread of
// the chores. Request and response live until the call is done.
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
