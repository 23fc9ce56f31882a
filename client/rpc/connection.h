// The layer below Client. Chooses channels, retries calls, and converts gRPC's errors. Internal to
// the library.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/rpc/channels.h"
#include "client/rpc/credentials.h"
#include "client/rpc/requests.h"

namespace tessera {

// Returns the status of a call, with the reason and metadata of its google.rpc.ErrorInfo. The delay
// in its RetryInfo becomes the metadata entry "retry_delay_ms".
absl::Status FromGrpc(const grpc::Status& status);
// Converts the error of a call that this client has not cancelled. When a server ends, gRPC cancels
// the calls that are under way. CANCELLED then becomes CONNECTION_LOST, as for any other lost
// connection.
absl::Status OfUncancelled(absl::Status status);
// Returns the error of a call that the caller has cancelled.
absl::Status Cancelled();
// If the deadline caused the error, returns it with a message that names the deadline. Returns any
// other error unchanged.
absl::Status WithDeadline(absl::Status status, absl::Duration timeout);
// Returns DEADLINE_EXCEEDED / STALLED, the error of a transfer that made no progress for this long.
absl::Status Stalled(absl::Duration timeout);
// Returns FAILED_PRECONDITION / MOVED_FROM.
absl::Status MovedFrom();

absl::Time ToTime(const google::protobuf::Timestamp& time);

// The maximum time by which a response is delayed to find out why a buffer is missing.
inline constexpr absl::Duration kExplainTimeout = absl::Seconds(2);

// Returns the current time of the monotonic clock plus the duration.
gpr_timespec After(absl::Duration duration);

class Connection;
class EventLoop;

// Guides one call or transfer through its attempts: chooses the next channel, decides how long to
// wait for a channel, and decides whether to repeat the call after a failure. A call that the
// server refused for lack of memory or queue space (with a RetryInfo) is repeated until `patience`
// has passed. A call that broke (no connection, damaged bytes) is repeated only if repeating is
// safe (client/rpc/methods.h), and until it has failed kMaxFailures times in a row without
// progress. Blocking and asynchronous calls differ only in how they wait. Not thread safe.
class Attempts {
 public:
  // The key in an error's metadata under which FromGrpc stores the delay that the server requests.
  static constexpr std::string_view kRetryDelay = "retry_delay_ms";
  static constexpr int kMaxFailures = 5;

  struct Plan {
    absl::Duration timeout;   // for all attempts together
    absl::Duration patience;  // the longest time without progress
    bool idempotent = false;
    bool stay = false;              // whether all attempts go to the same server
    Route route = {};               // where attempts may go
    std::string buffer_route = {};  // from Connection::RouteOfBuffer
    std::stop_token cancel = {};    // used only by blocking calls
    absl::Status refused = {};      // unless OK, the error that the call fails with
  };

  Attempts(Connection& connection, Plan plan);

  // Returns a channel for the next attempt, or the error that ends the call: CANCELLED, the error
  // of Plan::refused or Connection::refused, UNAVAILABLE / UNREACHABLE once connect_timeout or the
  // deadline has passed, DEADLINE_EXCEEDED if the deadline has passed before any attempt to connect
  // has failed, or UNAVAILABLE / CERTIFICATE_REFUSED, immediately if there is only one server.
  // Returns nothing if there is neither a channel nor an error yet. The caller must then wait until
  // the state of Awaited() changes or WaitLimit() passes, and call Pick again.
  absl::StatusOr<std::optional<Lease>> Pick();
  std::shared_ptr<grpc::Channel> Awaited();
  gpr_timespec WaitLimit() const;

  // Prepares the context of an attempt through the channel. Must be called before the attempt.
  void Begin(const PooledChannel& channel, grpc::ClientContext& context);
  // Must be called after an attempt that failed. Returns how long to pause before the next one, or
  // nothing if `status` is final.
  std::optional<absl::Duration> Pause(absl::Status& status);
  // Sleeps for the duration that Pause returns, or until the call is cancelled. Returns false
  // immediately if the failure is final.
  bool Wait(absl::Status& status);
  const std::stop_token& cancel() const { return plan_.cancel; }
  // Restarts the times that `patience` and connect_timeout limit.
  void Moved() {
    since_ = Clock::now();
    AwaitConnection();
  }
  // As Moved, and resets the count of failures.
  void Progress();
  // Restricts further attempts to the server of the last one.
  void Stay() { route_.only = route_.server; }

  const Route& route() const { return route_; }
  gpr_timespec deadline() const { return deadline_; }

 private:
  using Clock = std::chrono::steady_clock;

  void AwaitConnection();
  // Whether an attempt may be given up in favour of one at another server.
  bool HasAlternative() const;

  Connection& connection_;
  const Plan plan_;
  const gpr_timespec deadline_;
  Route route_;
  std::size_t turn_ = 0;
  int failures_ = 0;
  Clock::time_point since_ = Clock::now();
  gpr_timespec connect_limit_{};
  gpr_timespec last_resort_{};  // when the server that failed becomes allowed again
};

// Thread safe.
class Connection {
 public:
  // If `refused` is an error, every call fails with this error.
  explicit Connection(ClientOptions options, absl::Status refused = absl::OkStatus());
  ~Connection();

  const ClientOptions& options() const { return options_; }
  // Returns the error that every call fails with, or OK: the constructor's argument, or an error of
  // CheckAddress, MakeCredentials or Authorization. Unless it is OK, no channel is made.
  const absl::Status& refused() const { return refused_; }
  // Adds the caller's token to the call.
  void Authorize(grpc::ClientContext& context) { authorization_.AddTo(context); }
  // Returns the route of a buffer, for proxies, or "" if ClientOptions::send_route is not set.
  std::string RouteOfBuffer(std::string_view buffer) const;
  Channels& channels() { return channels_; }
  // The event loop of the asynchronous calls.
  EventLoop& events() { return *events_; }

  // Returns why the servers of a route do not respond: UNAVAILABLE / CERTIFICATE_REFUSED or
  // UNREACHABLE {server, cause}.
  absl::Status WhyUnreachable(const Route& route);
  // Waits for the next channel that Attempts::Pick returns.
  absl::StatusOr<Lease> Connect(Attempts& attempts);

  template <class Request>
  Attempts::Plan PlanOf(const Request& request, const CallOptions& call,
                        std::optional<std::size_t> only) const {
    const absl::Duration limit = call.timeout.value_or(options_.timeout);
    return {.timeout = limit,
            .patience = limit,
            .idempotent = IsSafeToRepeat(request),
            .stay = Method<Request>::kRepeatable == Repeatable::kWithVersion,
            .route = {.only = only},
            .buffer_route = RouteOfBuffer(BufferOf(request)),
            .cancel = call.cancel,
            .refused = CheckMessage(request.ByteSizeLong())};
  }

  // Makes one unary call, which is repeated according to the table of client/rpc/methods.h. `only`
  // is the only server that may be called. If `route` is not null, it receives the call's route.
  template <class Request>
  absl::StatusOr<ResponseOf<Request>> Call(const Request& request, const CallOptions& call,
                                           std::optional<std::size_t> only = std::nullopt,
                                           Route* route = nullptr) {
    using Unary = Method<Request>;
    Attempts attempts(*this, PlanOf(request, call, only));
    ResponseOf<Request> response;
    const absl::Status status = [&] {
      for (;;) {
        const absl::StatusOr<Lease> channel = Connect(attempts);
        if (!channel.ok()) return channel.status();
        grpc::ClientContext context;
        attempts.Begin(**channel, context);
        CountSent(request.ByteSizeLong());
        const std::stop_callback cancel(call.cancel, [&] { context.TryCancel(); });
        auto& stub = (*channel)->template stub<typename Unary::Service>();
        absl::Status ended =
            OfUncancelled(FromGrpc((stub.*Unary::kCall)(&context, request, &response)));
        if (ended.ok() || !attempts.Wait(ended)) return ended;
      }
    }();
    if (route != nullptr) *route = attempts.route();
    if (!status.ok()) {
      return kReadsBuffers<Request> ? ExplainMissing(status, attempts.route().server) : status;
    }
    Received(attempts.route().server, response);
    if (absl::Status wrong = CheckResponse(request, response); !wrong.ok()) return wrong;
    return response;
  }

  // Whether the error is a BUFFER_NOT_FOUND that may be due to a restart of the server. The
  // server's start time shows whether it is.
  bool MayHaveRestarted(const absl::Status& status, std::size_t server) const;
  // Returns the status. If the server has restarted since this client first saw one of its buffers,
  // the message says so, and the status has metadata "server_start". `start` is the time at which
  // the server started.
  absl::Status WithRestart(const absl::Status& status, std::size_t server, absl::Time start) const;
  // Asks the server when it started, and returns the result of WithRestart.
  absl::Status ExplainMissing(const absl::Status& status, std::size_t server);

  // Records the size of a response, and the creation time of its buffer.
  template <class Response>
  void Received(std::size_t server, const Response& response) {
    CountReceived(response.ByteSizeLong());
    if constexpr (requires { response.buffer().create_time(); }) {
      if (response.buffer().has_create_time()) {
        channels_.SawBuffer(server, ToTime(response.buffer().create_time()));
      }
    }
  }
  void CountSent(std::size_t bytes) { sent_ += bytes; }
  void CountReceived(std::size_t bytes) { received_ += bytes; }
  Traffic traffic() const { return {sent_, received_}; }

 private:
  const ClientOptions options_;
  const absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> credentials_;
  Authorization authorization_;
  const absl::Status refused_;
  Channels channels_;
  std::atomic<std::uint64_t> sent_{0};
  std::atomic<std::uint64_t> received_{0};
  const std::unique_ptr<EventLoop> events_;  // destroyed before the channels
};

// Cancels a stream that makes no progress for a given time, or that its caller cancels. Without
// the time limit, the two ends of a broken connection may wait for each other for many minutes. An
// infinite timeout disables the limit.
class StallGuard {
 public:
  StallGuard(grpc::ClientContext* context, absl::Duration timeout, const std::stop_token& cancel);
  void Progress() { last_ = Clock::now(); }
  // Returns DEADLINE_EXCEEDED / STALLED or CANCELLED if the guard has ended the stream, and
  // `status` otherwise.
  absl::Status Explain(absl::Status status) const;

 private:
  using Clock = std::chrono::steady_clock;

  void Watch(const std::stop_token& end, grpc::ClientContext* context);

  const absl::Duration timeout_;
  const std::stop_token token_;
  const std::stop_callback<std::function<void()>> cancel_;
  std::atomic<Clock::time_point> last_{Clock::now()};
  std::atomic<bool> stalled_{false};
  std::jthread watch_;  // ends before the other members
};

}  // namespace tessera
