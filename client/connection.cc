#include "client/connection.h"

#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

// Of a server that asks for more patience than this, the wish is granted only in part.
constexpr absl::Duration kLongestDelay = absl::Seconds(10);
// Well above what a server puts into a message: chunks of 1 MiB, and inline results, which it keeps
// below gRPC's default of 4 MiB.
constexpr int kMaxReceiveBytes = 8 << 20;

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

gpr_timespec After(absl::Duration duration) {
  // gpr counts nanoseconds in 64 bits.
  if (duration >= absl::Hours(24 * 36500)) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(absl::ToInt64Nanoseconds(duration), GPR_TIMESPAN));
}

void Retry::Progress() {
  failures_ = 0;
  since_ = Clock::now();
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

std::shared_ptr<grpc::Channel> Connection::channel(std::size_t i) {
  const std::lock_guard lock(mutex_);
  while (channels_.size() <= i) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMaxReceiveBytes);
    // Channels to one server share a connection unless each has its own pool.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    // gRPC's own pauses grow to two minutes, far beyond the patience of connect_timeout.
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    channels_.push_back(
        grpc::CreateCustomChannel(options_.server, grpc::InsecureChannelCredentials(), arguments));
  }
  return channels_[i];
}

absl::Status Connection::Connect(gpr_timespec deadline, std::size_t i) {
  const gpr_timespec limit = gpr_time_min(deadline, After(options_.connect_timeout));
  if (channel(i)->WaitForConnected(limit)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kUnavailable, "UNREACHABLE",
                   absl::StrCat("no server answers at ", options_.server),
                   {{"server", options_.server}});
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
