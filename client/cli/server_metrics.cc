#include "client/cli/server_metrics.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "client/cli/command.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

// The prefix of the GPU metrics' names.
constexpr std::string_view kGpu = "tessera_gpu_";

constexpr std::size_t kLargestPage = std::size_t{64} << 20;

absl::string_view ToAbsl(std::string_view text) { return {text.data(), text.size()}; }

[[noreturn]] void ThrowNoMetrics(absl::string_view why) {
  throw CommandError(MakeError(absl::StatusCode::kUnavailable, "NO_METRICS",
                               absl::StrCat("cannot read the metrics: ", why)));
}

// A TCP connection with one deadline for all waits. Its methods throw NO_METRICS.
class HttpConnection {
 public:
  explicit HttpConnection(absl::Time end) : end_(end) {}
  ~HttpConnection() { Close(); }
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  void Open(const MetricsAddress& address) {
    addrinfo hints{};
    hints.ai_flags = AI_ADDRCONFIG;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int failed = getaddrinfo(address.host.c_str(), address.port.c_str(), &hints, &found);
    if (failed != 0) {
      ThrowNoMetrics(
          absl::StrCat("cannot find the host ", address.host, ": ", gai_strerror(failed)));
    }
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> all(found, freeaddrinfo);
    for (const addrinfo* to = found; to != nullptr; to = to->ai_next) {
      try {
        Close();
        socket_ =
            socket(to->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, to->ai_protocol);
        if (socket_ < 0) ThrowNoMetrics(std::strerror(errno));
        Repeat(POLLOUT, [&] { return connect(socket_, to->ai_addr, to->ai_addrlen); });
        return;
      } catch (const CommandError&) {
        if (to->ai_next == nullptr) throw;
      }
    }
  }

  void Send(std::string_view text) {
    while (!text.empty()) {
      text.remove_prefix(
          Repeat(POLLOUT, [&] { return send(socket_, text.data(), text.size(), MSG_NOSIGNAL); }));
    }
  }

  // Returns everything that arrives until the peer closes the connection.
  std::string Read() {
    std::string text;
    char block[16384];
    while (const std::size_t size =
               Repeat(POLLIN, [&] { return recv(socket_, block, sizeof block, 0); })) {
      text.append(block, size);
      if (text.size() > kLargestPage) ThrowNoMetrics("the page is too large");
    }
    return text;
  }

 private:
  void Close() {
    if (socket_ >= 0) close(socket_);
  }

  // Repeats a call until it succeeds or has failed for good. Waits for the event between attempts.
  template <class Call>
  std::size_t Repeat(short event, const Call& call) {
    while (true) {
      if (const ssize_t result = call(); result >= 0) return static_cast<std::size_t>(result);
      if (errno != EAGAIN && errno != EINTR && errno != EINPROGRESS && errno != EALREADY)
        ThrowNoMetrics(std::strerror(errno));
      const absl::Duration left = end_ - absl::Now();
      if (left <= absl::ZeroDuration()) ThrowNoMetrics("no response arrived in time");
      pollfd one = {.fd = socket_, .events = event, .revents = 0};
      poll(&one, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
    }
  }

  const absl::Time end_;
  int socket_ = -1;
};

// Joins the chunks of a body in HTTP's chunked encoding. Returns nullopt if the body is incomplete.
std::optional<std::string> JoinChunks(absl::string_view text) {
  std::string body;
  while (true) {
    const std::size_t line = text.find("\r\n");
    std::uint64_t size = 0;
    if (line == text.npos ||
        !absl::SimpleHexAtoi(text.substr(0, std::min(line, text.find(';'))), &size))
      return std::nullopt;
    text.remove_prefix(line + 2);
    if (size == 0) return body;
    if (size > text.size() || !absl::StartsWith(text.substr(size), "\r\n")) return std::nullopt;
    absl::StrAppend(&body, text.substr(0, size));
    text.remove_prefix(size + 2);
  }
}

// Returns the body of an HTTP response.
std::string BodyOf(absl::string_view answer) {
  const std::size_t end = answer.find("\r\n\r\n");
  if (!absl::StartsWith(answer, "HTTP/1.") || end == answer.npos)
    ThrowNoMetrics("the response is not HTTP/1.1");
  const std::vector<absl::string_view> lines = absl::StrSplit(answer.substr(0, end), "\r\n");
  if (absl::ClippedSubstr(lines[0], 8, 4) != " 200")
    ThrowNoMetrics(absl::StrCat("the response is ", lines[0].substr(0, 80)));
  const absl::string_view body = answer.substr(end + 4);
  std::uint64_t length = body.size();
  bool chunked = false;
  for (const absl::string_view line : lines) {
    const std::pair<absl::string_view, absl::string_view> field =
        absl::StrSplit(line, absl::MaxSplits(':', 1));
    const absl::string_view value = absl::StripAsciiWhitespace(field.second);
    if (absl::EqualsIgnoreCase(field.first, "transfer-encoding"))
      chunked = absl::EqualsIgnoreCase(value, "chunked");
    if (std::uint64_t bytes = 0;
        absl::EqualsIgnoreCase(field.first, "content-length") && absl::SimpleAtoi(value, &bytes))
      length = bytes;
  }
  if (chunked) {
    if (std::optional<std::string> joined = JoinChunks(body)) return *std::move(joined);
  } else if (length <= body.size()) {
    return std::string(body.substr(0, length));
  }
  ThrowNoMetrics("the response is incomplete");
}

// --- The text format -----------------------------------------------------------------------------

struct Sample {
  std::string_view name;
  std::map<std::string, std::string> labels;
  double value = 0;
};

// Parses a line NAME{KEY="VALUE",...} NUMBER. Returns whether it is valid.
bool ParseSample(std::string_view line, Sample& sample) {
  std::size_t at = line.find_first_of("{ ");
  if (at == 0 || at == line.npos) return false;
  sample.name = line.substr(0, at);
  if (line[at] == '{') {
    ++at;
    while (at < line.size() && line[at] != '}') {
      const std::size_t equals = line.find("=\"", at);
      if (equals == line.npos) return false;
      std::string& value = sample.labels[std::string(line.substr(at, equals - at))];
      for (at = equals + 2; at < line.size() && line[at] != '"'; ++at) {
        const bool escaped = line[at] == '\\' && at + 1 < line.size();
        if (escaped) ++at;
        value += escaped && line[at] == 'n' ? '\n' : line[at];
      }
      ++at;
      if (at < line.size() && line[at] == ',') ++at;
    }
    ++at;
  }
  if (at >= line.size()) return false;
  std::string_view rest = line.substr(at);
  rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
  return absl::SimpleAtod(ToAbsl(rest.substr(0, rest.find(' '))), &sample.value);
}

// --- Differences ---------------------------------------------------------------------------------

// Returns the value of a key, or a default value if the map lacks the key.
template <class Map>
typename Map::mapped_type At(const Map& map, const typename Map::key_type& key) {
  const auto found = map.find(key);
  return found == map.end() ? typename Map::mapped_type() : found->second;
}

// Returns quantile q of the calls' times, interpolated linearly within a bucket as by Prometheus's
// histogram_quantile. `until` maps a time to the number of calls that took at most that long.
double Quantile(double q, const std::map<double, double>& until) {
  const double all = until.empty() ? 0 : until.rbegin()->second;
  if (all <= 0) return std::numeric_limits<double>::quiet_NaN();
  double below = 0, bound = 0;
  for (const auto& [end, count] : until) {
    if (count >= q * all) {
      if (std::isinf(end)) return end;
      return bound + (end - bound) * (count > below ? (q * all - below) / (count - below) : 1);
    }
    below = count;
    bound = end;
  }
  return bound;
}

}  // namespace

MetricsAddress ParseMetricsAddress(std::string_view url) {
  constexpr std::string_view kScheme = "http://";
  std::string_view rest = url;
  if (rest.starts_with(kScheme)) rest.remove_prefix(kScheme.size());
  MetricsAddress address;
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  address.path = rest.substr(slash);
  if (address.path.size() <= 1) address.path = "/metrics";
  rest = rest.substr(0, slash);
  if (const std::size_t colon = rest.rfind(':'); colon != rest.npos) {
    address.host = rest.substr(0, colon);
    address.port = rest.substr(colon + 1);
  }
  if (address.host.starts_with('[') && address.host.ends_with(']'))
    address.host = address.host.substr(1, address.host.size() - 2);
  int port = 0;
  const bool plain =
      std::none_of(url.begin(), url.end(), [](unsigned char c) { return c <= ' ' || c >= 0x7f; });
  if (!plain || address.host.empty() || !absl::SimpleAtoi(address.port, &port) || port < 1 ||
      port > 65535) {
    ThrowBadOption(
        absl::StrCat("'", ToAbsl(url), "' is not a metrics address such as http://127.0.0.1:9464"));
  }
  return address;
}

std::string FetchMetrics(const MetricsAddress& address, absl::Duration limit) {
  HttpConnection connection(absl::Now() + limit);
  connection.Open(address);
  const bool brackets = absl::StrContains(address.host, ':');
  connection.Send(absl::StrCat("GET ", address.path, " HTTP/1.1\r\nHost: ", brackets ? "[" : "",
                               address.host, brackets ? "]" : "", ":", address.port,
                               "\r\nAccept: text/plain\r\nConnection: close\r\n\r\n"));
  return BodyOf(connection.Read());
}

MetricsSample ParseMetrics(std::string_view text) {
  MetricsSample found;
  found.time = std::chrono::steady_clock::now();
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    Sample sample;
    const auto label = [&](const char* key) { return sample.labels[key]; };
    if (line.starts_with('#') || !ParseSample(line, sample)) continue;
    if (sample.name == "tessera_requests_total") {
      MetricsSample::Calls& calls = found.calls[label("rpc")];
      calls.all += sample.value;
      if (label("code") != "OK") calls.failed += sample.value;
    } else if (sample.name == "tessera_request_seconds_bucket") {
      double bound = 0;
      if (absl::SimpleAtod(label("le"), &bound))
        found.calls[label("rpc")].until[bound] += sample.value;
    } else if (sample.name == "tessera_gpu_slowdown") {
      if (sample.value != 0) found.gpus[label("device")].slowdowns.push_back(label("reason"));
    } else if (sample.name.starts_with(kGpu)) {
      found.gpus[label("device")].figures[std::string(sample.name.substr(kGpu.size()))] +=
          sample.value;
    } else if (sample.name == "tessera_errors_total") {
      found.refusals[{label("code"), label("reason")}] += sample.value;
    } else if (sample.name == "process_start_time_seconds") {
      found.start_time = sample.value;
    }
  }
  return found;
}

MetricsRates RatesBetween(const MetricsSample& before, const MetricsSample& after) {
  const double seconds =
      std::max(std::chrono::duration<double>(after.time - before.time).count(), 1e-9);
  const MetricsSample fresh;
  const MetricsSample& past = before.start_time == after.start_time ? before : fresh;
  MetricsRates rates;
  for (auto [method, calls] : after.calls) {
    if (calls.all == 0) continue;
    const MetricsSample::Calls old = At(past.calls, method);
    for (auto& [bound, count] : calls.until) count -= At(old.until, bound);
    rates.calls.push_back({method, (calls.all - old.all) / seconds,
                           (calls.failed - old.failed) / seconds, Quantile(0.5, calls.until),
                           Quantile(0.99, calls.until)});
  }
  for (const auto& [refusal, total] : after.refusals) {
    if (total == 0) continue;
    rates.refusals.push_back(
        {refusal.first, refusal.second, (total - At(past.refusals, refusal)) / seconds, total});
  }
  std::stable_sort(rates.calls.begin(), rates.calls.end(),
                   [](const auto& a, const auto& b) { return a.per_second > b.per_second; });
  std::stable_sort(rates.refusals.begin(), rates.refusals.end(), [](const auto& a, const auto& b) {
    return std::tie(a.per_second, a.total) > std::tie(b.per_second, b.total);
  });
  return rates;
}

}  // namespace tessera
