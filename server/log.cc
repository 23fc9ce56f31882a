#include "server/log.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/time/clock.h"
#include "google/protobuf/stubs/logging.h"
#include "grpc/support/log.h"
#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "spdlog/async.h"
#include "spdlog/formatter.h"
#include "spdlog/sinks/stdout_color_sinks.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

constexpr int kCallLinesPerSecond = 10;
// A line is cut to a few hundred bytes: this many take about 2 MiB.
constexpr std::size_t kQueuedLines = 4096;
constexpr std::size_t kLongestText = 512;

// Lines about calls of one kind, of which some are left out. Thread safe.
class CallLines {
 public:
  // Whether there may be another line. left_out: how many there were not before a second began.
  bool Take(std::int64_t& left_out) {
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (now - second_ >= std::chrono::seconds(1)) {
      second_ = now;
      written_ = 0;
      left_out = std::exchange(left_out_, 0);
    }
    if (written_ == kCallLinesPerSecond) {
      ++left_out_;
      return false;
    }
    ++written_;
    return true;
  }

 private:
  std::mutex mutex_;
  std::chrono::steady_clock::time_point second_;  // its begin
  int written_ = 0;                               // in it
  std::int64_t left_out_ = 0;
};

// Whether lines are JSON.
std::atomic<bool> json_lines{false};

// Comes before the trace's id at the end of a line, for JsonFormatter. No other text has it:
// Printable escapes control characters.
constexpr char kTraceMark = '\x1e';

// What ends a line about a call of a trace.
std::string TraceText(std::string_view trace_id) {
  if (trace_id.empty()) return "";
  return json_lines ? fmt::format("{}{}", kTraceMark, trace_id)
                    : fmt::format(" (trace {})", trace_id);
}

// "1.234567s".
std::string TimeText(absl::Duration time) {
  return absl::FormatDuration(absl::Trunc(time, absl::Microseconds(1)));
}

void AppendJsonString(std::string_view text, spdlog::memory_buf_t& out) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out.push_back('"');
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (byte < 0x20) {
      for (const char e : {'\\', 'u', '0', '0', kHex[byte >> 4], kHex[byte & 15]}) {
        out.push_back(e);
      }
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
}

// spdlog's patterns do not escape, so quotes in a message would break a JSON pattern.
class JsonFormatter : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const auto since_epoch = message.time.time_since_epoch();
    const std::time_t seconds = std::chrono::system_clock::to_time_t(message.time);
    const auto millis =
        std::chrono::duration_cast<std::chrono::milliseconds>(since_epoch).count() % 1000;
    std::tm utc{};
    gmtime_r(&seconds, &utc);
    char time[40];
    const std::size_t length = std::strftime(time, sizeof(time), "%Y-%m-%dT%H:%M:%S", &utc);
    fmt::format_to(
        std::back_inserter(out),
        "{{\"time\":\"{}.{:03}Z\",\"level\":\"{}\",\"message\":", std::string_view(time, length),
        millis, std::string_view(spdlog::level::to_string_view(message.level).data()));
    const std::string_view payload(message.payload.data(), message.payload.size());
    const std::size_t mark = payload.rfind(kTraceMark);
    AppendJsonString(payload.substr(0, mark), out);
    if (mark != payload.npos) {
      fmt::format_to(std::back_inserter(out), ",\"trace_id\":");
      AppendJsonString(payload.substr(mark + 1), out);
    }
    out.push_back('}');
    out.push_back('\n');
  }

  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<JsonFormatter>();
  }
};

// gRPC writes lines of its own to standard error otherwise, which no reader of JSON expects.
void ForwardGrpcLog(gpr_log_func_args* args) {
  switch (args->severity) {
    case GPR_LOG_SEVERITY_ERROR:
      spdlog::warn("grpc: {}", Printable(args->message, kLongestText));
      break;
    case GPR_LOG_SEVERITY_INFO:
    case GPR_LOG_SEVERITY_DEBUG:
      spdlog::debug("grpc: {}", Printable(args->message, kLongestText));
      break;
  }
}

// So does libprotobuf: about text in a request that is no UTF-8, for one, which is refused.
void ForwardProtobufLog(google::protobuf::LogLevel level, const char*, int,
                        const std::string& message) {
  if (level == google::protobuf::LOGLEVEL_FATAL) {
    spdlog::error("protobuf: {}", Printable(message, kLongestText));
  } else {
    spdlog::debug("protobuf: {}", Printable(message, kLongestText));
  }
}

}  // namespace

void SetUpLog(const std::string& level, bool json) {
  if (spdlog::thread_pool() == nullptr) spdlog::init_thread_pool(kQueuedLines, 1);
  auto logger = std::make_shared<spdlog::async_logger>(
      "tessera", std::make_shared<spdlog::sinks::stderr_color_sink_mt>(), spdlog::thread_pool(),
      spdlog::async_overflow_policy::overrun_oldest);
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  json_lines = json;
  if (json) {
    logger->set_formatter(std::make_unique<JsonFormatter>());
  } else {
    logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%l%$ %v");
  }
  spdlog::set_default_logger(std::move(logger));
  gpr_set_log_function(ForwardGrpcLog);
  google::protobuf::SetLogHandler(ForwardProtobufLog);
}

void LogDroppedLines() {
  static std::atomic<std::size_t> reported{0};
  if (spdlog::thread_pool() == nullptr) return;
  const std::size_t dropped = spdlog::thread_pool()->overrun_counter();
  const std::size_t before = reported.exchange(dropped);
  if (dropped > before) {
    spdlog::warn("{} lines of this log were dropped: nobody read it fast enough", dropped - before);
  }
}

void FlushLog(absl::Duration limit) {
  if (spdlog::thread_pool() == nullptr) return;
  const absl::Time end = absl::Now() + limit;
  while (spdlog::thread_pool()->queue_size() > 0 && absl::Now() < end) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  absl::SleepFor(absl::Milliseconds(5));  // the last line has left the queue before it is written
}

void LogFailedCall(std::string_view method, std::string_view peer, const absl::Status& status,
                   std::string_view trace_id) {
  // Callers without rights hide nobody's failures, and no caller those of the server.
  static CallLines without_rights, of_server, others, questions;
  CallLines* lines = &others;
  if (absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status)) lines = &without_rights;
  if (absl::IsInternal(status) || absl::IsDataLoss(status) || absl::IsUnknown(status))
    lines = &of_server;
  // Whether there is a buffer is what GetBuffer is asked: no is an answer like yes.
  const bool expected = method == "GetBuffer" && absl::IsNotFound(status);
  if (expected) lines = &questions;
  const auto level = expected ? spdlog::level::info : spdlog::level::warn;

  std::int64_t left_out = 0;
  if (!lines->Take(left_out)) return;
  if (left_out > 0) spdlog::log(level, "{} more calls failed and were not logged", left_out);
  spdlog::log(level, "{} from {}: {} {}: {}{}", method, Printable(peer, kLongestText),
              absl::StatusCodeToString(status.code()), ErrorReason(status),
              Printable({status.message().data(), status.message().size()}, kLongestText),
              TraceText(trace_id));
}

void LogSlowCall(const CallRecord& call, std::string_view peer, absl::StatusCode code) {
  static CallLines lines;
  std::int64_t left_out = 0;
  if (!lines.Take(left_out)) return;
  if (left_out > 0) spdlog::warn("{} more calls were slow and were not logged", left_out);
  std::string parts;
  const auto add = [&](std::string_view name, absl::Duration time) {
    if (time == absl::ZeroDuration()) return;
    parts += fmt::format("{}{} {}", parts.empty() ? ": " : ", ", name, TimeText(time));
  };
  add("queue", call.queue());
  add("run", call.run());
  add("kernel", call.kernel);
  add("copies", call.copies);
  const std::string strategy = Printable(call.strategy, kLongestText);
  spdlog::warn("slow: {}{}{} from {}: {} after {}{}{}", call.method, strategy.empty() ? "" : " by ",
               strategy, Printable(peer, kLongestText), absl::StatusCodeToString(code),
               TimeText(call.total()), parts, TraceText(call.trace.id()));
}

}  // namespace tessera
