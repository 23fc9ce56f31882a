// Beneath Client: channels to one server, the repetition of unary calls, and errors from the wire.
// Not for users of the library.
#pragma once

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
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

// Whether a transfer or an idempotent call may be repeated after this error.
bool IsTransient(const absl::Status& status);

// The pause before repetition number `failures` >= 1: doubles from 100 ms to 2 s, with jitter
// against herds.
absl::Duration Backoff(int failures);

inline constexpr int kMaxFailures = 5;

// Thread safe.
class Connection {
 public:
  explicit Connection(ClientOptions options) : options_(std::move(options)) {}

  const ClientOptions& options() const { return options_; }

  // Channel number i; each has a connection of its own. Made when first asked for.
  std::shared_ptr<grpc::Channel> channel(std::size_t i = 0);

  // Waits until channel i is connected: UNAVAILABLE / UNREACHABLE after connect_timeout or at the
  // deadline.
  absl::Status Connect(absl::Time deadline = absl::InfiniteFuture(), std::size_t i = 0);

  // Runs attempt(context) until it succeeds, fails for good, or the deadline comes. A transient
  // failure is repeated only when the call is idempotent; a full queue refused the call before it
  // did anything.
  template <class Attempt>
  absl::Status Repeat(std::optional<absl::Duration> timeout, bool idempotent, Attempt&& attempt) {
    const absl::Time deadline = absl::Now() + timeout.value_or(options_.timeout);
    for (int failures = 1;; ++failures) {
      if (absl::Status status = Connect(deadline); !status.ok()) return status;
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(deadline));
      absl::Status status = FromGrpc(attempt(&context));
      if (status.ok()) return status;
      const std::optional<absl::Duration> pause = Pause(status, failures, idempotent);
      if (!pause || absl::Now() + *pause >= deadline) return status;
      absl::SleepFor(*pause);
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
  // Nothing: the error is final.
  std::optional<absl::Duration> Pause(const absl::Status& status, int failures,
                                      bool idempotent) const;

  const ClientOptions options_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;  // guarded by mutex_
  std::atomic<std::uint64_t> sent_{0};
  std::atomic<std::uint64_t> received_{0};
};

// Cancels a stream that makes no progress for a time. The sides of a broken network may otherwise
// wait for each other for many minutes.
class StallGuard {
 public:
  StallGuard(grpc::ClientContext* context, absl::Duration timeout);
  ~StallGuard();
  void Progress() { ++progress_; }
  // `status`, or DEADLINE_EXCEEDED / STALLED when the guard was what ended the stream.
  absl::Status Explain(absl::Status status) const;

 private:
  void Watch(grpc::ClientContext* context);

  const absl::Duration timeout_;
  std::atomic<std::uint64_t> progress_{0};
  std::atomic<bool> stalled_{false};
  std::mutex mutex_;
  std::condition_variable end_;
  bool ended_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace tessera
