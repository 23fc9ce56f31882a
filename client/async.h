// Asynchronous versions of the client's calls and transfers (Client::Async). Lists and shared
// memory are only in Client.
//
//   tessera::Future<tessera::v1::DotResponse> dot = client.Async().Dot("x", "y");
//   tessera::Future<std::vector<float>> x = client.Async().Download<float>("x");
//   client.Async().Add("x", "y").Then([](absl::StatusOr<tessera::v1::AddResponse> sum) { ... });
//   ... dot.Get() ...
//
// Deadlines, retries and errors are the same as for the blocking calls. CallOptions::cancel is
// ignored; Future::Cancel takes its place. While a transfer runs, it has a thread of its own, on
// which its source or sink is called.
//
// Thread safe. Must not be used after the client has been destroyed. The client's destructor
// cancels the calls and waits for the functions that were passed to Future::Then, so it must not
// run in one.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/guarded.h"
#include "kernels/base/error.h"

namespace tessera {

class AsyncCallBase;

// Ends the call with CANCELLED unless it has already ended. Does not wait for that.
void Cancel(const std::weak_ptr<AsyncCallBase>& call);

template <class Answer>
using Callback = std::function<void(absl::StatusOr<Answer>)>;

// The answer of a call that may still be running. Move-only. Destroying it does not cancel the
// call, whose answer is then discarded.
template <class Answer>
class Future {
 public:
  // The part that a future shares with its call. Thread safe.
  class State {
   public:
    void Set(absl::StatusOr<Answer> answer) {
      std::unique_lock lock(mutex_);
      answer_ = std::move(answer);
      ready_.notify_all();
      const Callback<Answer> then = std::move(then_);
      lock.unlock();
      if (then) then(*std::move(answer_));
    }
    bool WaitFor(absl::Duration duration) {
      std::unique_lock lock(mutex_);
      const auto is_ready = [this] { return answer_.has_value(); };
      // Short enough to be added to a point in time without overflow.
      const absl::Duration most = std::min(duration, absl::Hours(24 * 36500));
      return ready_.wait_for(lock, absl::ToChronoNanoseconds(most), is_ready);
    }
    // Runs `then` with the answer, immediately if there already is one.
    void Then(Callback<Answer> then) {
      std::unique_lock lock(mutex_);
      if (!answer_) {
        then_ = std::move(then);
        return;
      }
      lock.unlock();
      then(*std::move(answer_));
    }
    absl::StatusOr<Answer> Take() {
      WaitFor(absl::InfiniteDuration());
      return *std::move(answer_);
    }

   private:
    std::mutex mutex_;
    std::condition_variable ready_;
    std::optional<absl::StatusOr<Answer>> answer_;  // guarded by mutex_ until it is set
    Callback<Answer> then_;                         // guarded by mutex_
  };

  Future(std::shared_ptr<State> state, std::weak_ptr<AsyncCallBase> call)
      : state_(std::move(state)), call_(std::move(call)) {}
  Future(Future&&) noexcept = default;
  Future& operator=(Future&&) noexcept = default;

  // Waits for the answer. Must not be called in a function that was passed to Then. Returns
  // FAILED_PRECONDITION / ANSWER_TAKEN if Get or Then has been called before, or if the future has
  // been moved from.
  absl::StatusOr<Answer> Get() {
    const std::shared_ptr<State> state = std::move(state_);
    return state != nullptr ? state->Take() : Taken();
  }
  // Waits for at most this long. Returns whether Get would now return without waiting.
  bool WaitFor(absl::Duration duration) const {
    return state_ == nullptr || state_->WaitFor(duration);
  }
  bool IsReady() const { return WaitFor(absl::ZeroDuration()); }
  // Calls f with the answer, an absl::StatusOr<Answer>, exactly once. If the answer has already
  // arrived, f runs in Then. Otherwise, it runs on a thread that belongs to the client, one
  // function at a time and without a lock held. It may begin other calls but should not block,
  // because meanwhile no other asynchronous call can end. If f returns an absl::StatusOr, Then
  // returns a Future of f's result, which is INTERNAL / CALLER_EXCEPTION if f throws. If f returns
  // nothing, so does Then, and exceptions are discarded.
  template <class F>
  auto Then(F f) {
    using Result = std::invoke_result_t<F, absl::StatusOr<Answer>>;
    if constexpr (std::is_void_v<Result>) {
      Chain([f = std::move(f)](absl::StatusOr<Answer> answer) mutable {
        CallGuarded([&] { f(std::move(answer)); }).IgnoreError();
      });
    } else {
      using Next = Future<typename Result::value_type>;
      const auto next = std::make_shared<typename Next::State>();
      Chain([next, f = std::move(f)](absl::StatusOr<Answer> answer) mutable {
        next->Set(CallGuarded([&] { return f(std::move(answer)); }));
      });
      return Next(next, call_);
    }
  }
  // Ends the call with CANCELLED unless it has already ended. Does not wait for that.
  void Cancel() const { tessera::Cancel(call_); }

 private:
  static absl::Status Taken() {
    return MakeError(absl::StatusCode::kFailedPrecondition, "ANSWER_TAKEN",
                     "the future's response has already been taken");
  }

  void Chain(Callback<Answer> then) {
    if (const std::shared_ptr<State> state = std::move(state_)) {
      state->Then(std::move(then));
    } else {
      then(Taken());
    }
  }

  std::shared_ptr<State> state_;  // null once the answer has been taken
  std::weak_ptr<AsyncCallBase> call_;
};

// Runs work on a thread of its own, and then the function that it returns on the thread of Then.
std::weak_ptr<AsyncCallBase> StartTask(
    ClientConnection& connection,
    std::function<std::function<void()>(const std::stop_token& cancel)> work);

// Each method takes the arguments of the Client method with the same name and returns a Future.
class AsyncClient : public ServiceCalls<AsyncClient> {
 public:
  explicit AsyncClient(ClientConnection* connection) : connection_(connection) {}

  // Makes a single call, unlike Client::DeleteBuffer. The version is checked only if the server
  // supports versions. If the first response was lost and the call was repeated, BUFFER_NOT_FOUND
  // may mean that the first attempt deleted the buffer.
  Future<v1::DeleteBufferResponse> DeleteBuffer(const std::string& name, std::uint64_t version = 0,
                                                const CallOptions& call = {}) {
    return Send(Prepared{BufferRequest<v1::DeleteBufferRequest>(name, version)}, call);
  }

 private:
  friend class Operations<AsyncClient>;
  friend class ServiceCalls<AsyncClient>;
  template <class Request, class Options>
  Future<AnswerTo<Request>> Send(Prepared<Request> request, const Options& options) {
    using Answer = AnswerTo<Request>;
    auto state = std::make_shared<typename Future<Answer>::State>();
    auto call = Start(std::move(request), CallOptionsOf(options),
                      [state](absl::StatusOr<Answer> answer) { state->Set(std::move(answer)); });
    return Future<Answer>(std::move(state), std::move(call));
  }
  template <class Options, class Work>
  auto Transfer(Options options, const Work& work) {
    using Result = std::invoke_result_t<Work, ClientConnection&, Options>;
    using Answer = typename Result::value_type;
    auto state = std::make_shared<typename Future<Answer>::State>();
    auto call = StartTask(*connection_, [connection = connection_, options, work,
                                         state](const std::stop_token& cancel) mutable {
      options.cancel = cancel;
      auto answer = std::make_shared<Result>(work(*connection, options));
      return [state, answer] { state->Set(*std::move(answer)); };
    });
    return Future<Answer>(std::move(state), std::move(call));
  }
  template <class Request>
  std::weak_ptr<AsyncCallBase> Start(Prepared<Request> request, const CallOptions& call,
                                     Callback<AnswerTo<Request>> done);

  ClientConnection* connection_;
};

}  // namespace tessera
