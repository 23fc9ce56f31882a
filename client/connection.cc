#include "client/connection.h"

#include <algorithm>
#include <climits>
#include <random>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/event_loop.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/base/error.h"
#include "kernels/base/ring.h"

namespace tessera {
namespace {

// Of a server that asks for more patience than this, the wish is granted only in part.
constexpr absl::Duration kLongestDelay = absl::Seconds(10);
// Well above what a server puts into a message: chunks of 1 MiB, and inline results, which it keeps
// below gRPC's default of 4 MiB.
constexpr int kMaxReceiveBytes = 8 << 20;
// How long a call that failed at one server waits for others before it goes back to that one.
constexpr absl::Duration kOtherServers = absl::Milliseconds(500);
// How long a call waits for one of several servers before it looks at the next.
constexpr absl::Duration kTurn = absl::Milliseconds(20);

double Random(double low, double high) {
  thread_local std::minstd_rand random(std::random_device{}());
  return std::uniform_real_distribution<double>(low, high)(random);
}

// The pause before repetition number `failures` >= 1: doubles from 100 ms to 2 s, with jitter
// against herds.
absl::Duration Backoff(int failures) {
  return std::min(absl::Milliseconds(100) * (1 << std::min(failures - 1, 10)), absl::Seconds(2)) *
         Random(0.5, 1);
}

// The delay of a refusal's RetryInfo.
std::optional<absl::Duration> RetryDelay(const absl::Status& status) {
  const auto metadata = ErrorMetadata(status);
  const auto it = metadata.find(std::string(Retry::kRetryDelay));
  std::int64_t ms = 0;
  if (it == metadata.end() || !absl::SimpleAtoi(it->second, &ms)) return std::nullopt;
  return absl::Milliseconds(ms);
}

// The connection or the bytes broke, not the request.
bool IsTransient(const absl::Status& status) {
  const std::string reason = ErrorReason(status);
  // Without a reason it is the error of a source or a sink. After DEVICE_LOST and a restart the
  // buffers are gone: repeating cannot help. UNREACHABLE has waited long enough.
  if (absl::IsUnavailable(status)) {
    return !reason.empty() && reason != "DEVICE_LOST" && reason != "UNREACHABLE";
  }
  return absl::IsDataLoss(status) && reason == "BAD_CHECKSUM";
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  absl::Status error(code, status.error_message());

  google::rpc::Status details;
  if (!status.error_details().empty() && details.ParseFromString(status.error_details())) {
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    for (const google::protobuf::Any& detail : details.details()) {
      if (detail.UnpackTo(&info)) {
        error = MakeError(code, info.reason(), status.error_message());
        for (const auto& [key, value] : info.metadata()) SetErrorMetadata(error, key, value);
      }
    }
    for (const google::protobuf::Any& detail : details.details()) {
      if (detail.UnpackTo(&retry)) {
        const absl::Duration delay = absl::Seconds(retry.retry_delay().seconds()) +
                                     absl::Nanoseconds(retry.retry_delay().nanos());
        SetErrorMetadata(error, Retry::kRetryDelay,
                         std::to_string(absl::ToInt64Milliseconds(delay)));
      }
    }
  }
  // The server gives every refusal of its own a reason; without one the connection is what failed.
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

absl::Time ToTime(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
}

gpr_timespec After(absl::Duration duration) {
  // gpr counts nanoseconds in 64 bits.
  if (duration >= absl::Hours(24 * 36500)) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(absl::ToInt64Nanoseconds(duration), GPR_TIMESPAN));
}

void Retry::Progress() {
  failures_ = 0;
  Moved();
}

std::optional<absl::Duration> Retry::Pause(const absl::Status& failure) {
  ++failures_;
  absl::Duration pause = Backoff(failures_);
  const std::optional<absl::Duration> delay = RetryDelay(failure);
  if (absl::IsResourceExhausted(failure) && delay) {
    // The server did nothing: repeating is safe whatever the call.
    if (!options_.retry_refused) return std::nullopt;
    pause = std::max(pause, std::min(*delay, kLongestDelay) * Random(1, 1.25));
  } else {
    // A server that stops has done nothing either, and its successor may be there by the next
    // attempt; one that got damaged bytes has dropped them.
    const bool safe =
        idempotent_ || ErrorReason(failure) == "DRAINING" || absl::IsDataLoss(failure);
    if (!safe || !IsTransient(failure) || failures_ >= kMaxFailures) return std::nullopt;
  }
  if (absl::FromChrono(Clock::now() - since_) + pause >= patience_) return std::nullopt;
  return pause;
}

bool Retry::Wait(const absl::Status& failure) {
  const std::optional<absl::Duration> pause = Pause(failure);
  if (pause.has_value()) absl::SleepFor(*pause);
  return pause.has_value();
}

// --- Attempts ------------------------------------------------------------------------------------

Attempts::Attempts(Connection& connection, const Plan& plan)
    : connection_(connection),
      plan_(plan),
      deadline_(After(plan.timeout)),
      retry_(connection.options(), plan.idempotent, plan.patience) {
  route_.only = plan.only;
  AwaitConnection();
}

void Attempts::AwaitConnection() {
  connect_limit_ = gpr_time_min(deadline_, After(connection_.options().connect_timeout));
  last_resort_ = After(kOtherServers);
}

std::optional<Lease> Attempts::Pick() {
  const bool last_resort = gpr_time_cmp(gpr_now(GPR_CLOCK_MONOTONIC), last_resort_) >= 0;
  return connection_.channels().Pick(route_, last_resort);
}

std::shared_ptr<grpc::Channel> Attempts::Awaited() {
  return connection_.channels().Awaited(route_, turn_++);
}

gpr_timespec Attempts::WaitLimit() const {
  if (!connection_.channels().HasChoice(route_)) return connect_limit_;
  return gpr_time_min(connect_limit_, After(kTurn));
}

absl::Status Attempts::Unreachable() const {
  if (absl::Status status = connection_.CheckCredentials(); !status.ok()) return status;
  if (gpr_time_cmp(gpr_now(GPR_CLOCK_MONOTONIC), connect_limit_) < 0) return absl::OkStatus();
  const std::string servers = connection_.channels().Describe(route_);
  return MakeError(absl::StatusCode::kUnavailable, "UNREACHABLE",
                   absl::StrCat("no server answers at ", servers), {{"server", servers}});
}

void Attempts::Begin(const PooledChannel& channel) {
  route_.server = channel.server;
  ++route_.attempts;
  if (plan_.stay) Stay();
}

gpr_timespec Attempts::AttemptDeadline() const {
  if (!plan_.idempotent || !connection_.channels().HasChoice(route_)) return deadline_;
  return gpr_time_min(deadline_, After(connection_.options().attempt_timeout));
}

std::optional<absl::Duration> Attempts::Pause(absl::Status& status) {
  if (absl::IsDeadlineExceeded(status) && plan_.idempotent &&
      connection_.channels().HasChoice(route_) &&
      gpr_time_cmp(gpr_now(GPR_CLOCK_MONOTONIC), deadline_) < 0) {
    status = MakeError(absl::StatusCode::kUnavailable, "SERVER_SILENT",
                       absl::StrCat("no answer for ",
                                    absl::FormatDuration(connection_.options().attempt_timeout)));
  }
  const std::optional<absl::Duration> pause = retry_.Pause(status);
  if (absl::IsUnavailable(status)) {
    connection_.channels().Failed(route_.server);
    route_.failed = route_.server;
  }
  AwaitConnection();
  return pause;
}

bool Attempts::Wait(absl::Status& status) {
  const std::optional<absl::Duration> pause = Pause(status);
  if (pause.has_value()) absl::SleepFor(*pause);
  return pause.has_value();
}

// --- Connections ---------------------------------------------------------------------------------

void Connection::AddRoute(grpc::ClientContext& context, std::string_view buffer) const {
  if (!options_.send_route || buffer.empty()) return;
  // What no buffer can be named may not be a header either; the server says what is wrong with it.
  const bool valid = std::all_of(buffer.begin(), buffer.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '/' || c == '-';
  });
  if (valid) context.AddMetadata("tessera-route", std::string(RouteOf(buffer)));
}

Connection::Connection(ClientOptions options)
    : options_(std::move(options)),
      credentials_(MakeCredentials(options_)),
      authorization_(options_),
      channels_(options_.server, options_.connections,
                [this](const std::string& address) {
                  grpc::ChannelArguments arguments;
                  arguments.SetMaxReceiveMessageSize(kMaxReceiveBytes);
                  // Channels to one server share a connection unless each has its own pool.
                  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
                  // gRPC's own pauses grow to two minutes, far beyond the patience of
                  // connect_timeout.
                  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
                  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
                  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
                  // gRPC ends a cancelled stream only when the socket has taken what is being
                  // written. Where the server's host takes nothing any more, TCP_USER_TIMEOUT ends
                  // the connection: gRPC sets it to the second argument where the first one asks
                  // for pings, and the first of those would come after 24 days.
                  if (options_.stall_timeout < absl::Hours(24)) {
                    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, INT_MAX - 1);
                    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                                     static_cast<int>(absl::ToInt64Milliseconds(
                                         std::max(options_.stall_timeout, absl::Seconds(1)))));
                  }
                  // A proxy named by the environment would read what is not encrypted, tokens too.
                  if (options_.tls_ca.empty()) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
                  if (!options_.tls_server_name.empty())
                    arguments.SetSslTargetNameOverride(options_.tls_server_name);
                  // One that never connects, where there are no credentials: what waits for it asks.
                  const auto credentials = CheckCredentials().ok()
                                               ? *credentials_
                                               : grpc::SslCredentials({.pem_root_certs = "none"});
                  return grpc::CreateCustomChannel(address, credentials, arguments);
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
  absl::Status explained =
      MakeError(status.code(), ErrorReason(status),
                absl::StrCat(status.message(), "; the server was started again at ", since,
                             ", which ended the buffers it had"));
  for (const auto& [key, value] : ErrorMetadata(status)) SetErrorMetadata(explained, key, value);
  SetErrorMetadata(explained, "server_start", since);
  return explained;
}

absl::Status Connection::ExplainMissing(const absl::Status& status, std::size_t server) {
  if (!MayHaveRestarted(status, server)) return status;
  const auto info = Call(v1::GetServerInfoRequest(), kExplainTimeout, server);
  return info.ok() ? WithRestart(status, server, ToTime(info->start_time())) : status;
}

absl::StatusOr<Lease> Connection::Connect(std::size_t server, std::size_t i,
                                          gpr_timespec deadline) {
  if (absl::Status status = CheckCredentials(); !status.ok()) return status;
  PooledChannel& channel = channels_.channel(server, i);
  const gpr_timespec limit = gpr_time_min(deadline, After(options_.connect_timeout));
  if (channel.channel->WaitForConnected(limit)) return Lease(&channel);
  const std::string address = channels_.Describe({.only = server});
  return MakeError(absl::StatusCode::kUnavailable, "UNREACHABLE",
                   absl::StrCat("no server answers at ", address), {{"server", address}});
}

absl::StatusOr<Lease> Connection::Connect(Attempts& attempts) {
  for (;;) {
    if (std::optional<Lease> channel = attempts.Pick()) return *std::move(channel);
    if (absl::Status status = attempts.Unreachable(); !status.ok()) return status;
    attempts.Awaited()->WaitForConnected(attempts.WaitLimit());
  }
}

StallGuard::StallGuard(grpc::ClientContext* context, absl::Duration timeout)
    : timeout_(timeout), thread_([this, context] { Watch(context); }) {}

StallGuard::~StallGuard() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  end_.notify_one();
  thread_.join();
}

void StallGuard::Watch(grpc::ClientContext* context) {
  // Beyond any transfer, and short enough to be added to a point in time.
  const auto timeout = absl::ToChronoNanoseconds(std::min(timeout_, absl::Hours(24 * 36500)));
  std::unique_lock lock(mutex_);
  for (Clock::time_point last = last_;; last = last_) {
    if (end_.wait_until(lock, last + timeout, [this] { return ended_; })) return;
    if (last != last_.load()) continue;
    stalled_ = true;
    context->TryCancel();
    return;
  }
}

absl::Status StallGuard::Explain(absl::Status status) const {
  if (!stalled_ || status.ok()) return status;
  return MakeError(absl::StatusCode::kDeadlineExceeded, "STALLED",
                   absl::StrCat("no progress for ", absl::FormatDuration(timeout_)));
}

}  // namespace tessera
