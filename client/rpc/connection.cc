#include "client/rpc/connection.h"

#include <algorithm>
#include <climits>
#include <condition_variable>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/rpc/address.h"
#include "client/rpc/event_loop.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/ring.h"
#include "kernels/client_and_server/word_lines.h"

namespace tessera {
namespace {

// The longest delay that a server can request. A longer delay is shortened to this one.
constexpr absl::Duration kLongestDelay = absl::Seconds(10);
// The maximum size of a received message. A server's messages are far smaller: chunks are 1 MiB,
// and inline results stay below gRPC's default limit of 4 MiB.
constexpr int kMaxReceiveBytes = 8 << 20;
// How long a call that failed at one server waits for other servers before it may return to the
// first.
constexpr absl::Duration kOtherServers = absl::Milliseconds(500);
// How long a call waits for one of several servers before it tries the next.
constexpr absl::Duration kTurn = absl::Milliseconds(20);
// How often a call that waits for a connection checks whether it has been cancelled.
constexpr absl::Duration kCancelGlance = absl::Milliseconds(50);
// The shortest time between two DNS lookups of a name. gRPC's default is 30 s.
constexpr absl::Duration kLookUpAgain = absl::Seconds(1);

double Random(double low, double high) {
  thread_local std::minstd_rand random(std::random_device{}());
  return std::uniform_real_distribution<double>(low, high)(random);
}

// Returns the pause before retry number `failures` >= 1. The pause doubles from 100 ms up to 2 s.
// Its jitter keeps clients from retrying at the same time.
absl::Duration Backoff(int failures) {
  return std::min(absl::Milliseconds(100) * (1 << std::min(failures - 1, 10)), absl::Seconds(2)) *
         Random(0.5, 1);
}

// Returns the delay in the RetryInfo of a refusal.
std::optional<absl::Duration> RetryDelay(const absl::Status& status) {
  const auto metadata = ErrorMetadata(status);
  const auto it = metadata.find(std::string(Attempts::kRetryDelay));
  std::int64_t ms = 0;
  if (it == metadata.end() || !absl::SimpleAtoi(it->second, &ms)) return std::nullopt;
  return absl::Milliseconds(ms);
}

// Whether the error is due to the connection or to damaged bytes, rather than to the request.
bool IsTransient(const absl::Status& status) {
  const std::string reason = ErrorReason(status);
  // After DEVICE_LOST and a restart, the buffers are gone, so repeating cannot help. Before
  // UNREACHABLE, the call has already waited long enough.
  if (absl::IsUnavailable(status)) {
    return reason != "DEVICE_LOST" && reason != "UNREACHABLE" && reason != "CERTIFICATE_REFUSED";
  }
  return absl::IsDataLoss(status) && reason == "BAD_CHECKSUM";
}

// Sleeps until the given time or until a stop is requested.
void SleepUntil(std::chrono::steady_clock::time_point time, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any none;
  std::unique_lock lock(mutex);
  none.wait_until(lock, stop, time, [] { return false; });
}

// Returns gRPC's explanation of why a channel does not connect, or "" if the channel has not
// failed.
std::string CauseOf(const PooledChannel& channel) {
  if (channel.channel->GetState(false) != GRPC_CHANNEL_TRANSIENT_FAILURE) return "";
  // This call does not wait for the connection but fails with the connection's error.
  grpc::ClientContext context;
  context.set_deadline(After(kCancelGlance));
  grpc::health::v1::HealthCheckResponse response;
  const grpc::Status status =
      channel.stub<grpc::health::v1::Health>().Check(&context, {}, &response);
  return status.error_code() == grpc::StatusCode::UNAVAILABLE ? status.error_message() : "";
}

constexpr absl::string_view kClosed = "the server closed the connection";

// Returns the meaning of a message from CauseOf, or "" if the message is unknown.
absl::string_view Meaning(absl::string_view cause) {
  struct Known {
    absl::string_view part;  // a part of the message in gRPC 1.51, in lower case
    absl::string_view meaning;
  };
  constexpr absl::string_view kRefused = "the certificate was refused";
  static constexpr Known kKnown[] = {
      {"certificate verify failed", kRefused},
      {"certificate_verify_failed", kRefused},
      {"not in peer certificate", kRefused},
      {"hostname verification", kRefused},
      {"dns resolution failed", "the name does not resolve"},
      {"ssl_error", "the TLS handshake failed"},
      {"ssl handshake", "the TLS handshake failed"},
      {"proxy", "the proxy cannot connect to it"},
      {"connection refused", "the connection was refused"},
      {"no such file", "the socket does not exist"},
      {"settings frame", "the server there does not answer, or does not speak HTTP/2"},
      {"no route", "there is no route to it"},
      {"unreachable", "its network is unreachable"},
      {"socket closed", kClosed},
      {"connection reset", kClosed},
  };
  const std::string text = absl::AsciiStrToLower(cause);
  for (const auto& [part, meaning] : kKnown)
    if (absl::StrContains(text, part)) return meaning;
  return "";
}

// Returns the options with their address and name in a form that gRPC can read.
ClientOptions Readable(ClientOptions options) {
  for (std::string* text : {&options.server, &options.tls_server_name}) *text = Trimmed(*text);
  return options;
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  absl::Status error(code, status.error_message());

  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  google::rpc::RetryInfo retry;
  bool delayed = false;
  if (!status.error_details().empty() && details.ParseFromString(status.error_details())) {
    for (const google::protobuf::Any& detail : details.details()) {
      if (detail.UnpackTo(&info)) error = ErrorOf(code, status.error_message(), info);
      delayed |= detail.UnpackTo(&retry);
    }
  }
  if (delayed) {
    const absl::Duration delay = absl::Seconds(retry.retry_delay().seconds()) +
                                 absl::Nanoseconds(retry.retry_delay().nanos());
    SetErrorMetadata(error, Attempts::kRetryDelay, absl::StrCat(absl::ToInt64Milliseconds(delay)));
  }
  // The server gives each of its refusals a reason. If there is none, the connection has failed.
  if (code == absl::StatusCode::kUnavailable && ErrorReason(error).empty()) {
    return MakeError(code, "CONNECTION_LOST",
                     absl::StrCat("the connection broke: ", status.error_message()));
  }
  return error;
}

absl::Status OfUncancelled(absl::Status status) {
  if (!absl::IsCancelled(status) || !ErrorReason(status).empty()) return status;
  return MakeError(absl::StatusCode::kUnavailable, "CONNECTION_LOST",
                   "the server cancelled the call as it stopped");
}

absl::Status Cancelled() { return absl::CancelledError("the caller cancelled the call"); }

absl::Status WithDeadline(absl::Status status, absl::Duration timeout) {
  if (!absl::IsDeadlineExceeded(status) || !ErrorReason(status).empty()) return status;
  return absl::DeadlineExceededError(
      absl::StrCat("no answer within ", absl::FormatDuration(timeout), ", the call's deadline"));
}

absl::Status Stalled(absl::Duration timeout) {
  return MakeError(absl::StatusCode::kDeadlineExceeded, "STALLED",
                   absl::StrCat("no progress for ", absl::FormatDuration(timeout)));
}

absl::Status MovedFrom() {
  return MakeError(absl::StatusCode::kFailedPrecondition, "MOVED_FROM",
                   "the client has been moved from");
}

absl::Time ToTime(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
}

gpr_timespec After(absl::Duration duration) {
  // gpr counts nanoseconds in 64 bits, which a longer duration would overflow.
  if (duration >= absl::Hours(24 * 36500)) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(absl::ToInt64Nanoseconds(duration), GPR_TIMESPAN));
}

// --- Attempts ------------------------------------------------------------------------------------

Attempts::Attempts(Connection& connection, Plan plan)
    : connection_(connection),
      plan_(std::move(plan)),
      deadline_(After(plan_.timeout)),
      route_(plan_.route) {
  route_.server = route_.only.value_or(route_.server);
  AwaitConnection();
}

void Attempts::AwaitConnection() {
  connect_limit_ = gpr_time_min(deadline_, After(connection_.options().connect_timeout));
  last_resort_ = After(kOtherServers);
}

absl::StatusOr<std::optional<Lease>> Attempts::Pick() {
  if (plan_.cancel.stop_requested()) return Cancelled();
  if (!plan_.refused.ok()) return plan_.refused;
  if (!connection_.refused().ok()) return connection_.refused();
  Channels& channels = connection_.channels();
  const gpr_timespec now = gpr_now(GPR_CLOCK_MONOTONIC);
  std::optional<Lease> channel = channels.Pick(route_, gpr_time_cmp(now, last_resort_) >= 0);
  if (channel) return channel;
  const bool late = gpr_time_cmp(now, connect_limit_) >= 0;
  // A refused certificate is unlikely to change soon, so the call need not wait.
  if (late || (!connection_.options().tls_ca.empty() && !channels.HasChoice(route_))) {
    absl::Status why = connection_.WhyUnreachable(route_);
    // If no attempt to connect has failed yet, the deadline says nothing about the server.
    if (gpr_time_cmp(now, deadline_) >= 0 && !ErrorMetadata(why).contains("cause"))
      return WithDeadline(absl::DeadlineExceededError(""), plan_.timeout);
    if (late || ErrorReason(why) == "CERTIFICATE_REFUSED") return why;
  }
  return std::nullopt;
}

std::shared_ptr<grpc::Channel> Attempts::Awaited() {
  return connection_.channels().Awaited(route_, turn_++);
}

gpr_timespec Attempts::WaitLimit() const {
  if (!connection_.channels().HasChoice(route_)) return connect_limit_;
  return gpr_time_min(connect_limit_, After(kTurn));
}

bool Attempts::HasAlternative() const {
  return plan_.idempotent && connection_.channels().HasChoice(route_);
}

void Attempts::Begin(const PooledChannel& channel, grpc::ClientContext& context) {
  route_.server = channel.server;
  ++route_.attempts;
  if (plan_.stay) Stay();
  connection_.Authorize(context);
  if (!plan_.buffer_route.empty()) context.AddMetadata("tessera-route", plan_.buffer_route);
  context.set_deadline(HasAlternative()
                           ? gpr_time_min(deadline_, After(connection_.options().attempt_timeout))
                           : deadline_);
}

std::optional<absl::Duration> Attempts::Pause(absl::Status& status) {
  if (absl::IsDeadlineExceeded(status) && HasAlternative() &&
      gpr_time_cmp(gpr_now(GPR_CLOCK_MONOTONIC), deadline_) < 0) {
    status = MakeError(absl::StatusCode::kUnavailable, "SERVER_SILENT",
                       absl::StrCat("no answer for ",
                                    absl::FormatDuration(connection_.options().attempt_timeout)));
  }
  absl::Duration pause = Backoff(++failures_);
  bool repeat = false;
  const std::optional<absl::Duration> delay = RetryDelay(status);
  if (absl::IsResourceExhausted(status) && delay) {
    // The server did nothing, so any call is safe to repeat.
    repeat = connection_.options().retry_refused;
    pause = std::max(pause, std::min(*delay, kLongestDelay) * Random(1, 1.25));
  } else {
    // A draining server has done nothing either, and its successor may be ready by the next
    // attempt. A server that received damaged bytes has discarded them.
    const bool safe =
        plan_.idempotent || ErrorReason(status) == "DRAINING" || absl::IsDataLoss(status);
    repeat = safe && IsTransient(status) && failures_ < kMaxFailures;
  }
  repeat &= absl::FromChrono(Clock::now() - since_) + pause < plan_.patience;
  status = WithDeadline(std::move(status), plan_.timeout);
  if (absl::IsUnavailable(status)) {
    connection_.channels().Failed(route_.server);
    route_.failed = route_.server;
  }
  AwaitConnection();
  return repeat ? std::optional(pause) : std::nullopt;
}

bool Attempts::Wait(absl::Status& status) {
  if (plan_.cancel.stop_requested()) {
    status = Cancelled();
    return false;
  }
  const std::optional<absl::Duration> pause = Pause(status);
  if (pause) SleepUntil(Clock::now() + absl::ToChronoNanoseconds(*pause), plan_.cancel);
  return pause.has_value();
}

void Attempts::Progress() {
  failures_ = 0;
  Moved();
}

// --- Connections ---------------------------------------------------------------------------------

std::string Connection::RouteOfBuffer(std::string_view buffer) const {
  // A value that is not a valid buffer name might not be a valid header either. The server reports
  // what is wrong with it.
  const bool valid = std::all_of(buffer.begin(), buffer.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '/' || c == '-';
  });
  if (!options_.send_route || !valid || buffer.empty()) return "";
  return std::string(RouteOf(buffer));
}

Connection::Connection(ClientOptions options, absl::Status refused)
    : options_(Readable(std::move(options))),
      credentials_(MakeCredentials(options_)),
      authorization_(options_),
      refused_([&] {
        const std::vector<absl::string_view> servers =
            absl::StrSplit(options_.server, ',', absl::SkipWhitespace());
        if (servers.empty()) refused.Update(CheckAddress(options_.server));
        for (const absl::string_view server : servers) {
          const absl::string_view address = absl::StripAsciiWhitespace(server);
          refused.Update(CheckAddress({address.data(), address.size()}));
        }
        refused.Update(credentials_.status());
        refused.Update(authorization_.status());
        return refused;
      }()),
      channels_(options_.server, options_.connections,
                [this](const std::string& address) {
                  grpc::ChannelArguments arguments;
                  arguments.SetMaxReceiveMessageSize(kMaxReceiveBytes);
                  // Channels to one server share a connection unless each has its own pool.
                  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
                  // gRPC's own pauses grow to two minutes, which is far longer than
                  // connect_timeout.
                  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
                  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
                  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
                  // With frequent lookups, retries find a server whose address has changed.
                  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS,
                                   static_cast<int>(absl::ToInt64Milliseconds(kLookUpAgain)));
                  // gRPC ends a cancelled stream only when the socket has accepted what is being
                  // written. If the server's host accepts nothing, TCP_USER_TIMEOUT ends the
                  // connection. gRPC sets this option to the second value below if the first value
                  // enables pings. The first ping would come after 24 days.
                  if (options_.stall_timeout < absl::Hours(24)) {
                    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, INT_MAX - 1);
                    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                                     static_cast<int>(absl::ToInt64Milliseconds(
                                         std::max(options_.stall_timeout, absl::Seconds(1)))));
                  }
                  // A proxy from the environment could read unencrypted traffic, including tokens.
                  const std::optional<Proxy> proxy = ProxyFor(address);
                  if (options_.tls_ca.empty() || (proxy && proxy->excepted))
                    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
                  if (!options_.tls_server_name.empty())
                    arguments.SetSslTargetNameOverride(options_.tls_server_name);
                  return grpc::CreateCustomChannel(TargetOf(address), *credentials_, arguments);
                }),
      events_(std::make_unique<EventLoop>()) {}

Connection::~Connection() = default;

bool Connection::MayHaveRestarted(const absl::Status& status, std::size_t server) const {
  return absl::IsNotFound(status) && ErrorReason(status) == "BUFFER_NOT_FOUND" &&
         channels_.first_buffer(server).has_value();
}

absl::Status Connection::WithRestart(const absl::Status& status, std::size_t server,
                                     absl::Time start) const {
  if (start <= *channels_.first_buffer(server)) return status;
  const std::string since = absl::FormatTime(start, absl::UTCTimeZone());
  absl::Status explained(status.code(), absl::StrCat(status.message(), "; the server restarted at ",
                                                     since, " and lost its earlier buffers"));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& value) { explained.SetPayload(url, value); });
  SetErrorMetadata(explained, "server_start", since);
  return explained;
}

absl::Status Connection::ExplainMissing(const absl::Status& status, std::size_t server) {
  if (!MayHaveRestarted(status, server)) return status;
  const auto info = Call(v1::GetServerInfoRequest(), {.timeout = kExplainTimeout}, server);
  return info.ok() ? WithRestart(status, server, ToTime(info->start_time())) : status;
}

absl::Status Connection::WhyUnreachable(const Route& route) {
  const std::string servers = channels_.Describe(route);
  std::string cause;
  for (std::size_t server = 0; server < channels_.servers() && cause.empty(); ++server)
    if (!route.only || *route.only == server) cause = CauseOf(channels_.channel(server, 0));
  const absl::string_view meaning = Meaning(cause);
  std::string text = absl::StrCat("no server answers at ", servers);
  const char* reason = "UNREACHABLE";
  if (absl::StrContains(meaning, "certificate")) {
    reason = "CERTIFICATE_REFUSED";
    text = absl::StrCat(
        "the server's certificate at ", servers, " was refused: ",
        "the certificate is not signed by the given CA, is not for this name, or has expired");
  } else if (!meaning.empty()) {
    absl::StrAppend(&text, ": ", meaning);
    if (meaning == kClosed) {
      absl::StrAppend(&text, options_.tls_ca.empty()
                                 ? "; it may require TLS"
                                 : "; it may require a client certificate that it trusts");
    }
  }
  std::optional<Proxy> proxy;
  if (!options_.tls_ca.empty()) proxy = ProxyFor(servers);
  if (proxy && !proxy->excepted)
    absl::StrAppend(&text, ", through the proxy ", proxy->value, ", set by ", proxy->variable);
  absl::Status status =
      MakeError(absl::StatusCode::kUnavailable, reason, text, {{"server", servers}});
  if (!cause.empty()) SetErrorMetadata(status, "cause", cause);
  return status;
}

absl::StatusOr<Lease> Connection::Connect(Attempts& attempts) {
  for (;;) {
    absl::StatusOr<std::optional<Lease>> channel = attempts.Pick();
    if (!channel.ok()) return channel.status();
    if (*channel) return **std::move(channel);
    gpr_timespec limit = attempts.WaitLimit();
    if (attempts.cancel().stop_possible()) limit = gpr_time_min(limit, After(kCancelGlance));
    const std::shared_ptr<grpc::Channel> awaited = attempts.Awaited();
    awaited->WaitForStateChange(awaited->GetState(true), limit);
  }
}

StallGuard::StallGuard(grpc::ClientContext* context, absl::Duration timeout,
                       const std::stop_token& cancel)
    : timeout_(timeout),
      token_(cancel),
      cancel_(token_, [context] { context->TryCancel(); }),
      watch_([this, context](const std::stop_token& end) { Watch(end, context); }) {}

void StallGuard::Watch(const std::stop_token& end, grpc::ClientContext* context) {
  // Longer than any transfer, but short enough to be added to a point in time without overflow.
  const auto timeout = absl::ToChronoNanoseconds(std::min(timeout_, absl::Hours(24 * 36500)));
  for (Clock::time_point last = last_;; last = last_) {
    SleepUntil(last + timeout, end);
    if (end.stop_requested()) return;
    if (last != last_.load()) continue;
    stalled_ = true;
    context->TryCancel();
    return;
  }
}

absl::Status StallGuard::Explain(absl::Status status) const {
  if (token_.stop_requested() && absl::IsCancelled(status)) return Cancelled();
  if (!stalled_ || status.ok()) return status;
  return Stalled(timeout_);
}

}  // namespace tessera
