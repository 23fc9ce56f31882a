// Beneath Client: channels to one server, the repetition of unary calls, and errors from the wire.
// Not for users of the library.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/client.h"

namespace tessera {

// The status of a call with the reason and metadata of its google.rpc.ErrorInfo, and the delay of
// its RetryInfo as metadata "retry_delay_ms".
absl::Status FromGrpc(const grpc::Status& status);

// A moment so far from now, by a clock that nobody sets.
gpr_timespec After(absl::Duration duration);

// Decides whether a call or a transfer is tried again after a failure. One that the server refused
// for want of room (it says so with a RetryInfo) is tried again for as long as `patience` lasts.
// One that broke (no connection, damaged bytes) is, when it is idempotent, up to kMaxFailures times
// in a row without progress. Not thread safe.
class Retry {
 public:
  // Where FromGrpc leaves the delay that a server asks for, in an error's metadata.
  static constexpr std::string_view kRetryDelay = "retry_delay_ms";
  static constexpr int kMaxFailures = 5;

  Retry(const ClientOptions& options, bool idempotent, absl::Duration patience)
      : options_(options), idempotent_(idempotent), patience_(patience), since_(Clock::now()) {}

  // The failures before it do not count any more, and patience begins anew.
  void Progress();
  // How long to wait before the next attempt; nothing: the failure is final.
  std::optional<absl::Duration> Pause(const absl::Status& failure);
  // Sleeps so long. False, at once: the failure is final.
  bool Wait(const absl::Status& failure);

 private:
  using Clock = std::chrono::steady_clock;

  const ClientOptions& options_;
  const bool idempotent_;
  const absl::Duration patience_;
  Clock::time_point since_;
  int failures_ = 0;
};

// Thread safe.
class Connection {
 public:
  explicit Connection(ClientOptions options) : options_(std::move(options)) {}

  const ClientOptions& options() const { return options_; }

  // Channel number i; each has a connection of its own. Made when first asked for.
  std::shared_ptr<grpc::Channel> channel(std::size_t i = 0);

  // Waits until channel i is connected: UNAVAILABLE / UNREACHABLE after connect_timeout or at the
  // deadline.
  absl::Status Connect(gpr_timespec deadline = After(absl::InfiniteDuration()), std::size_t i = 0);

  // Runs attempt(context) until it succeeds, fails for good, or the deadline comes.
  template <class Attempt>
  absl::Status Repeat(std::optional<absl::Duration> timeout, bool idempotent, Attempt&& attempt) {
    const absl::Duration limit = timeout.value_or(options_.timeout);
    const gpr_timespec deadline = After(limit);
    Retry retry(options_, idempotent, limit);
    for (;;) {
      if (absl::Status status = Connect(deadline); !status.ok()) return status;
      grpc::ClientContext context;
      context.set_deadline(deadline);
      absl::Status status = FromGrpc(attempt(&context));
      if (status.ok() || !retry.Wait(status)) return status;
    }
  }

  // One unary call of a generated stub.
  template <class Stub, class Request, class Response>
  absl::StatusOr<Response> Call(
      Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
      const Request& request, bool idempotent, std::optional<absl::Duration> timeout) {
    Response response;
    absl::Status status = Repeat(timeout, idempotent, [&](grpc::ClientContext* context) {
      CountSent(request.ByteSizeLong());
      return (stub.*method)(context, request, &response);
    });
    if (!status.ok()) return status;
    CountReceived(response.ByteSizeLong());
    return response;
  }

  void CountSent(std::size_t bytes) { sent_ += bytes; }
  void CountReceived(std::size_t bytes) { received_ += bytes; }
  Traffic traffic() const { return {sent_, received_}; }

 private:
  const ClientOptions options_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;  // guarded by mutex_
  std::atomic<std::uint64_t> sent_{0};
  std::atomic<std::uint64_t> received_{0};
};

// Cancels a stream that makes no progress for a time; an infinite one is no limit. The sides of a
// broken network may otherwise wait for each other for many minutes.
class StallGuard {
 public:
  StallGuard(grpc::ClientContext* context, absl::Duration timeout);
  ~StallGuard();
  void Progress() { last_ = Clock::now(); }
  // `status`, or DEADLINE_EXCEEDED / STALLED when the guard was what ended the stream.
  absl::Status Explain(absl::Status status) const;

 private:
  using Clock = std::chrono::steady_clock;

  void Watch(grpc::ClientContext* context);

  const absl::Duration timeout_;
  std::atomic<Clock::time_point> last_{Clock::now()};
  std::atomic<bool> stalled_{false};
  std::mutex mutex_;
  std::condition_variable end_;
  bool ended_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace tessera
