#include "server/observe/log.h"

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
#include "kernels/client_and_server/printable.h"
#include "server/clock.h"
#include "spdlog/async.h"
#include "spdlog/formatter.h"
#include "spdlog/sinks/stdout_color_sinks.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

constexpr int kCallLinesPerSecond = 10;
// The length of the log's queue. Lines are cut to a few hundred bytes, so a full queue takes about
// 2 MiB.
constexpr std::size_t kQueuedLines = 4096;
constexpr std::size_t kLongestText = 512;

// Limits the number of lines per second about calls of one kind. Thread safe.
class CallLines {
 public:
  // Whether another line may be written. When a new second begins, sets left_out to the number of
  // lines that were left out since the last call that set it.
  bool Take(std::int64_t& left_out) {
    const std::lock_guard lock(mutex_);
    const absl::Time now = SteadyNow();
    if (now - second_ >= absl::Seconds(1)) {
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
  absl::Time second_ = absl::InfinitePast();  // the beginning of the current second
  int written_ = 0;                           // lines written in this second
  std::int64_t left_out_ = 0;
};

// Whether lines are JSON.
std::atomic<bool> json_lines{false};

// Separates a message from the fields that JsonFormatter adds. No other text contains it, because
// Printable and Fields escape control characters.
constexpr char kFieldsMark = '\x1e';

// Returns a text such as "1.234567s".
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

// The fields that a JSON line has in addition to its message. There are none if lines are text.
class Fields {
 public:
  void Add(std::string_view name, std::string_view value) {
    if (!json_lines || value.empty()) return;
    fmt::format_to(std::back_inserter(text_), ",\"{}\":", name);
    AppendJsonString(value, text_);
  }
  // Adds a time in seconds.
  void Add(std::string_view name, absl::Duration time) {
    if (!json_lines || time == absl::ZeroDuration()) return;
    fmt::format_to(std::back_inserter(text_), ",\"{}\":{:.6f}", name, absl::ToDoubleSeconds(time));
  }
  void AddTimes(const CallRecord& call) {
    Add("total_seconds", call.total());
    Add("queue_seconds", call.queue());
    Add("run_seconds", call.run());
    Add("kernel_seconds", call.kernel);
    Add("copies_seconds", call.copies);
  }

  // Returns the end of the line, which contains the fields.
  std::string Text() const {
    return text_.size() == 0 ? "" : kFieldsMark + std::string(text_.data(), text_.size());
  }

 private:
  spdlog::memory_buf_t text_;
};

// Adds method, peer, tenant and trace to the fields. Returns the text that names peer and tenant.
std::string Who(std::string_view method, std::string_view peer, std::string_view tenant,
                std::string_view trace_id, Fields& fields) {
  const std::string printable = Printable(peer, kLongestText);
  fields.Add("method", method);
  fields.Add("peer", printable);
  fields.Add("tenant", tenant);
  fields.Add("trace_id", trace_id);
  return tenant.empty() ? printable : fmt::format("{} (tenant {})", printable, tenant);
}

std::string TraceText(std::string_view trace_id) {
  return trace_id.empty() || json_lines ? "" : fmt::format(" (trace {})", trace_id);
}

// Formats a line as JSON. A pattern of spdlog cannot do this, because it does not escape quotes.
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
    const std::size_t mark = payload.find(kFieldsMark);
    AppendJsonString(payload.substr(0, mark), out);
    if (mark != payload.npos)
      fmt::format_to(std::back_inserter(out), "{}", payload.substr(mark + 1));
    out.push_back('}');
    out.push_back('\n');
  }

  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<JsonFormatter>();
  }
};

// Logs a line of gRPC, which would otherwise write it to standard error, where a reader may expect
// only JSON.
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

// Logs a line of libprotobuf, for example about a request with text that is not UTF-8. The server
// rejects such a request.
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
    spdlog::warn("{} lines of this log were dropped, because the log is not read fast enough",
                 dropped - before);
  }
}

void FlushLog(absl::Duration limit) {
  if (spdlog::thread_pool() == nullptr) return;
  const absl::Time end = absl::Now() + limit;
  while (spdlog::thread_pool()->queue_size() > 0 && absl::Now() < end) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  absl::SleepFor(absl::Milliseconds(5));  // the last line leaves the queue before it is written
}

void LogFailedCall(const CallRecord& call, std::string_view peer, const absl::Status& status) {
  // Lines are limited separately for each kind. Otherwise calls without permission could crowd out
  // the failures of other calls, and these could crowd out failures of the server itself.
  static CallLines without_rights, of_server, others, questions;
  CallLines* lines = &others;
  if (absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status)) lines = &without_rights;
  if (absl::IsInternal(status) || absl::IsDataLoss(status) || absl::IsUnknown(status))
    lines = &of_server;
  // Clients use GetBuffer to ask whether a buffer exists, so NOT_FOUND is not a failure there.
  const bool expected = call.method == "GetBuffer" && absl::IsNotFound(status);
  if (expected) lines = &questions;
  const auto level = expected ? spdlog::level::info : spdlog::level::warn;

  std::int64_t left_out = 0;
  if (!lines->Take(left_out)) return;
  if (left_out > 0) spdlog::log(level, "{} more calls failed and were not logged", left_out);
  Fields fields;
  const std::string who = Who(call.method, peer, call.tenant_name(), call.trace.id(), fields);
  const std::string code = absl::StatusCodeToString(status.code()), reason = ErrorReason(status);
  fields.Add("code", code);
  fields.Add("reason", reason);
  fields.Add("strategy", Printable(call.strategy, kLongestText));
  fields.AddTimes(call);
  spdlog::log(level, "{} from {}: {} {}: {}{}{}", call.method, who, code, reason,
              Printable({status.message().data(), status.message().size()}, kLongestText),
              TraceText(call.trace.id()), fields.Text());
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
  Fields fields;
  const std::string who = Who(call.method, peer, call.tenant_name(), call.trace.id(), fields);
  fields.Add("code", absl::StatusCodeToString(code));
  fields.Add("strategy", strategy);
  fields.AddTimes(call);
  spdlog::warn("slow: {}{}{} from {}: {} after {}{}{}{}", call.method,
               strategy.empty() ? "" : " by ", strategy, who, absl::StatusCodeToString(code),
               TimeText(call.total()), parts, TraceText(call.trace.id()), fields.Text());
}

}  // namespace tessera
