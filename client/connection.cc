#include "client/connection.h"

#include <random>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/error.h"

namespace tessera {
namespace {

constexpr std::string_view kRetryDelay = "retry_delay_ms";
// An inline result of 4 MiB and the message around it.
constexpr int kMaxReceiveBytes = 8 << 20;

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
        const std::int64_t ms =
            retry.retry_delay().seconds() * 1000 + retry.retry_delay().nanos() / 1'000'000;
        SetErrorMetadata(error, kRetryDelay, std::to_string(ms));
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

bool IsTransient(const absl::Status& status) {
  // After DEVICE_LOST and a restart the buffers are gone: repeating cannot help. UNREACHABLE has
  // waited long enough.
  const std::string reason = ErrorReason(status);
  return absl::IsUnavailable(status) && reason != "DEVICE_LOST" && reason != "UNREACHABLE";
}

absl::Duration Backoff(int failures) {
  thread_local std::minstd_rand random(std::random_device{}());
  const absl::Duration longest =
      std::min(absl::Milliseconds(100) * (1 << std::min(failures - 1, 10)), absl::Seconds(2));
  return longest * std::uniform_real_distribution<double>(0.5, 1.0)(random);
}

std::optional<absl::Duration> Connection::Pause(const absl::Status& status, int failures,
                                                bool idempotent) const {
  if (ErrorReason(status) == "QUEUE_FULL") {
    if (!options_.retry_queue_full) return std::nullopt;
    std::int64_t ms = 0;
    const auto metadata = ErrorMetadata(status);
    if (const auto it = metadata.find(std::string(kRetryDelay)); it != metadata.end()) {
      if (!absl::SimpleAtoi(it->second, &ms)) ms = 0;
    }
    return std::max(absl::Milliseconds(ms), Backoff(failures));
  }
  if (!idempotent || !IsTransient(status) || failures >= kMaxFailures) return std::nullopt;
  return Backoff(failures);
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

absl::Status Connection::Connect(absl::Time deadline, std::size_t i) {
  const absl::Time limit = std::min(deadline, absl::Now() + options_.connect_timeout);
  if (channel(i)->WaitForConnected(absl::ToChronoTime(limit))) return absl::OkStatus();
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
  std::unique_lock lock(mutex_);
  std::uint64_t seen = progress_;
  while (!end_.wait_for(lock, absl::ToChronoNanoseconds(timeout_), [this] { return ended_; })) {
    const std::uint64_t now = progress_;
    if (now == seen) {
      stalled_ = true;
      context->TryCancel();
      return;
    }
    seen = now;
  }
}

absl::Status StallGuard::Explain(absl::Status status) const {
  if (!stalled_ || status.ok()) return status;
  return MakeError(absl::StatusCode::kDeadlineExceeded, "STALLED",
                   absl::StrCat("no progress for ", absl::FormatDuration(timeout_)));
}

}  // namespace tessera
