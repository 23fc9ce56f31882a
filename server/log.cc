#include "server/log.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "grpc/support/log.h"
#include "kernels/error.h"
#include "spdlog/async.h"
#include "spdlog/formatter.h"
#include "spdlog/sinks/stdout_color_sinks.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

constexpr int kFailureLinesPerSecond = 10;
// A line is cut to a few hundred bytes: this many take about 2 MiB.
constexpr std::size_t kQueuedLines = 4096;
constexpr std::size_t kLongestText = 512;

// Length of the UTF-8 sequence that text begins with; 0 when it begins with none.
std::size_t SequenceLength(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  const std::size_t length = lead < 0x80                   ? 1
                             : lead >= 0xc2 && lead < 0xe0 ? 2
                             : lead >= 0xe0 && lead < 0xf0 ? 3
                             : lead >= 0xf0 && lead < 0xf5 ? 4
                                                           : 0;
  if (length == 0 || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // What longer forms of shorter sequences, surrogates and numbers above U+10FFFF begin with.
  if ((lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xed && byte(1) >= 0xa0) ||
      (lead == 0xf0 && byte(1) < 0x90) || (lead == 0xf4 && byte(1) >= 0x90)) {
    return 0;
  }
  return length;
}

// C1 controls, and characters that break a line or turn the direction of writing.
bool IsInvisible(std::string_view sequence) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(sequence[i]); };
  if (sequence.size() == 2) return byte(0) == 0xc2 && byte(1) < 0xa0;
  if (sequence.size() != 3 || byte(0) != 0xe2) return false;
  return (byte(1) == 0x80 && (byte(2) == 0x8e || byte(2) == 0x8f ||      // U+200E, U+200F
                              (byte(2) >= 0xa8 && byte(2) <= 0xae))) ||  // U+2028 to U+202E
         (byte(1) == 0x81 && byte(2) >= 0xa6 && byte(2) <= 0xa9);        // U+2066 to U+2069
}

void AppendJsonString(spdlog::string_view_t text, spdlog::memory_buf_t& out) {
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
    AppendJsonString(message.payload, out);
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
      spdlog::warn("grpc: {}", Printable(args->message));
      break;
    case GPR_LOG_SEVERITY_INFO:
    case GPR_LOG_SEVERITY_DEBUG:
      spdlog::debug("grpc: {}", Printable(args->message));
      break;
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
  if (json) {
    logger->set_formatter(std::make_unique<JsonFormatter>());
  } else {
    logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%l%$ %v");
  }
  spdlog::set_default_logger(std::move(logger));
  gpr_set_log_function(ForwardGrpcLog);
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

std::string Printable(std::string_view text) {
  std::string out;
  while (!text.empty() && out.size() < kLongestText) {
    const std::size_t length = SequenceLength(text);
    const auto lead = static_cast<unsigned char>(text[0]);
    const bool control = lead < 0x20 || lead == 0x7f || IsInvisible(text.substr(0, length));
    if (length == 0 || control) {
      for (std::size_t i = 0; i < std::max<std::size_t>(length, 1); ++i) {
        absl::StrAppendFormat(&out, "\\x%02x", static_cast<unsigned char>(text[i]));
      }
      text.remove_prefix(std::max<std::size_t>(length, 1));
    } else {
      out.append(text.substr(0, length));
      text.remove_prefix(length);
    }
  }
  if (!text.empty()) out += "...";
  return out;
}

void LogFailedCall(std::string_view method, std::string_view peer, const absl::Status& status) {
  static std::mutex mutex;
  static std::chrono::steady_clock::time_point window;
  static int written = 0;
  static std::int64_t suppressed = 0;

  std::int64_t left_out = 0;
  {
    const std::lock_guard lock(mutex);
    const auto now = std::chrono::steady_clock::now();
    if (now - window >= std::chrono::seconds(1)) {
      window = now;
      written = 0;
      left_out = std::exchange(suppressed, 0);
    }
    if (written == kFailureLinesPerSecond) {
      ++suppressed;
      return;
    }
    ++written;
  }
  if (left_out > 0) spdlog::warn("{} more calls failed and were not logged", left_out);
  spdlog::warn("{} from {}: {} {}: {}", method, Printable(peer),
               absl::StatusCodeToString(status.code()), ErrorReason(status),
               Printable({status.message().data(), status.message().size()}));
}

}  // namespace tessera
