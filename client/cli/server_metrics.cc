#include "client/cli/server_metrics.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

// The prefix of the GPU metrics' names.
constexpr std::string_view kGpu = "tessera_gpu_";

constexpr std::size_t kLargestPage = std::size_t{64} << 20;

absl::string_view ToAbsl(std::string_view text) { return {text.data(), text.size()}; }

absl::Status NoMetrics(std::string_view why) {
  return MakeError(absl::StatusCode::kUnavailable, "NO_METRICS",
                   absl::StrCat("cannot read the metrics: ", ToAbsl(why)));
}

// A TCP connection with one deadline for all waits.
class HttpConnection {
 public:
  explicit HttpConnection(absl::Time end) : end_(end) {}
  ~HttpConnection() {
    if (socket_ >= 0) close(socket_);
  }
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  absl::Status Open(const MetricsAddress& address) {
    const addrinfo hints = {.ai_flags = AI_ADDRCONFIG,
                            .ai_family = AF_UNSPEC,
                            .ai_socktype = SOCK_STREAM,
                            .ai_protocol = 0,
                            .ai_addrlen = 0,
                            .ai_addr = nullptr,
                            .ai_canonname = nullptr,
                            .ai_next = nullptr};
    addrinfo* found = nullptr;
    const int failed = getaddrinfo(address.host.c_str(), address.port.c_str(), &hints, &found);
    if (failed != 0)
      return NoMetrics(
          absl::StrCat("cannot find the host ", address.host, ": ", gai_strerror(failed)));
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> all(found, freeaddrinfo);
    absl::Status status;
    for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
      status = Connect(*one);
      if (status.ok()) return status;
    }
    return status;
  }

  absl::Status Send(std::string_view text) {
    while (!text.empty()) {
      const ssize_t sent = send(socket_, text.data(), text.size(), MSG_NOSIGNAL);
      if (sent > 0) {
        text.remove_prefix(static_cast<std::size_t>(sent));
      } else if (absl::Status status = Wait(POLLOUT); !status.ok()) {
        return status;
      }
    }
    return absl::OkStatus();
  }

  // Appends everything that arrives until the peer closes the connection.
  absl::Status Read(std::string& text) {
    char block[16384];
    while (text.size() <= kLargestPage) {
      const ssize_t size = recv(socket_, block, sizeof block, 0);
      if (size == 0) return absl::OkStatus();
      if (size > 0) {
        text.append(block, static_cast<std::size_t>(size));
      } else if (absl::Status status = Wait(POLLIN); !status.ok()) {
        return status;
      }
    }
    return NoMetrics("the page is too large");
  }

 private:
  absl::Status Connect(const addrinfo& to) {
    if (socket_ >= 0) close(socket_);
    socket_ = socket(to.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, to.ai_protocol);
    if (socket_ < 0) return NoMetrics(std::strerror(errno));
    if (connect(socket_, to.ai_addr, to.ai_addrlen) == 0) return absl::OkStatus();
    if (errno != EINPROGRESS) return NoMetrics(std::strerror(errno));
    errno = EAGAIN;
    if (absl::Status status = Wait(POLLOUT); !status.ok()) return status;
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &size);
    return error == 0 ? absl::OkStatus() : NoMetrics(std::strerror(error));
  }

  // Handles errno after a failed call. If the call only has to be repeated, waits for the event.
  absl::Status Wait(short event) {
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
      return NoMetrics(std::strerror(errno));
    const absl::Duration left = end_ - absl::Now();
    if (left <= absl::ZeroDuration()) return NoMetrics("there is no response in time");
    pollfd one = {.fd = socket_, .events = event, .revents = 0};
    poll(&one, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
    return absl::OkStatus();
  }

  const absl::Time end_;
  int socket_ = -1;
};

// Joins the chunks of a body in HTTP's chunked encoding. Returns nullopt if the body is incomplete.
std::optional<std::string> JoinChunks(std::string_view text) {
  std::string body;
  while (true) {
    const std::size_t line = text.find("\r\n");
    if (line == text.npos) return std::nullopt;
    std::uint64_t size = 0;
    const std::string_view digits = text.substr(0, std::min(line, text.find(';')));
    if (!absl::SimpleHexAtoi(ToAbsl(digits), &size)) return std::nullopt;
    text.remove_prefix(line + 2);
    if (size == 0) return body;
    if (size > text.size() || text.substr(size).substr(0, 2) != "\r\n") return std::nullopt;
    body += text.substr(0, size);
    text.remove_prefix(size + 2);
  }
}

// Returns the body of an HTTP response.
absl::StatusOr<std::string> BodyOf(std::string_view answer) {
  const std::size_t end = answer.find("\r\n\r\n");
  if (!answer.starts_with("HTTP/1.") || end == answer.npos)
    return NoMetrics("the response is not HTTP/1.1");
  const std::string_view status_line = answer.substr(0, answer.find("\r\n"));
  if (status_line.substr(8, 4) != " 200")
    return NoMetrics(absl::StrCat("the response is ", ToAbsl(status_line.substr(0, 80))));
  const std::string_view body = answer.substr(end + 4);
  bool chunked = false;
  std::optional<std::uint64_t> length;
  std::string_view lines = answer.substr(status_line.size() + 2, end - status_line.size());
  for (std::size_t size = 0; (size = lines.find("\r\n")) != lines.npos && size > 0;
       lines.remove_prefix(size + 2)) {
    const std::string_view line = lines.substr(0, size);
    const std::size_t colon = line.find(':');
    if (colon == line.npos) continue;
    const absl::string_view name = ToAbsl(line.substr(0, colon));
    const absl::string_view value = absl::StripAsciiWhitespace(ToAbsl(line.substr(colon + 1)));
    if (absl::EqualsIgnoreCase(name, "transfer-encoding"))
      chunked = absl::EqualsIgnoreCase(value, "chunked");
    if (std::uint64_t bytes = 0;
        absl::EqualsIgnoreCase(name, "content-length") && absl::SimpleAtoi(value, &bytes))
      length = bytes;
  }
  if (chunked) {
    if (std::optional<std::string> joined = JoinChunks(body)) return *std::move(joined);
  } else if (length.value_or(body.size()) <= body.size()) {
    return std::string(body.substr(0, length.value_or(body.size())));
  }
  return NoMetrics("the response is incomplete");
}

// --- The text format -----------------------------------------------------------------------------

struct Sample {
  std::string_view name;
  std::map<std::string, std::string, std::less<>> labels;
  double value = 0;

  std::string Label(std::string_view key) const {
    const auto found = labels.find(key);
    return found == labels.end() ? "" : found->second;
  }
};

// Parses a line NAME{KEY="VALUE",...} NUMBER. Returns whether it is valid.
bool Parse(std::string_view line, Sample& sample) {
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

// Interpolates linearly within a bucket, like Prometheus's histogram_quantile. until: maps a time
// to the number of calls that took at most that long.
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

absl::StatusOr<MetricsAddress> ParseMetricsAddress(std::string_view url) {
  constexpr std::string_view kScheme = "http://";
  std::string_view rest = url;
  if (rest.starts_with(kScheme)) rest.remove_prefix(kScheme.size());
  MetricsAddress address;
  const std::size_t slash = rest.find('/');
  if (slash != rest.npos) address.path = rest.substr(slash);
  if (address.path.size() <= 1) address.path = "/metrics";
  rest = rest.substr(0, slash);
  const std::size_t colon = rest.rfind(':');
  if (colon != rest.npos) {
    address.host = rest.substr(0, colon);
    address.port = rest.substr(colon + 1);
    if (address.host.starts_with('[') && address.host.ends_with(']'))
      address.host = address.host.substr(1, address.host.size() - 2);
  }
  int port = 0;
  const bool plain =
      std::none_of(url.begin(), url.end(), [](unsigned char c) { return c <= ' ' || c >= 0x7f; });
  if (!plain || address.host.empty() || !absl::SimpleAtoi(address.port, &port) || port < 1 ||
      port > 65535) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_OPTION",
        absl::StrCat("'", ToAbsl(url), "' is not a metrics address such as http://127.0.0.1:9464"));
  }
  return address;
}

absl::StatusOr<std::string> FetchMetrics(const MetricsAddress& address, absl::Duration limit) {
  HttpConnection connection(absl::Now() + limit);
  if (absl::Status status = connection.Open(address); !status.ok()) return status;
  const bool brackets = absl::StrContains(address.host, ':');
  const absl::Status sent =
      connection.Send(absl::StrCat("GET ", address.path, " HTTP/1.1\r\nHost: ", brackets ? "[" : "",
                                   address.host, brackets ? "]" : "", ":", address.port,
                                   "\r\nAccept: text/plain\r\nConnection: close\r\n\r\n"));
  if (!sent.ok()) return sent;
  std::string answer;
  if (absl::Status status = connection.Read(answer); !status.ok()) return status;
  return BodyOf(answer);
}

MetricsSample ParseMetrics(std::string_view text) {
  MetricsSample found;
  found.time = std::chrono::steady_clock::now();
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    Sample sample;
    if (line.starts_with('#') || !Parse(line, sample)) continue;
    if (sample.name == "tessera_requests_total") {
      MetricsSample::Calls& calls = found.calls[sample.Label("rpc")];
      calls.all += sample.value;
      if (sample.Label("code") != "OK") calls.failed += sample.value;
    } else if (sample.name == "tessera_request_seconds_bucket") {
      double bound = 0;
      if (absl::SimpleAtod(sample.Label("le"), &bound))
        found.calls[sample.Label("rpc")].until[bound] += sample.value;
    } else if (sample.name == "tessera_gpu_slowdown") {
      if (sample.value != 0)
        found.gpus[sample.Label("device")].slowdowns.push_back(sample.Label("reason"));
    } else if (sample.name.starts_with(kGpu)) {
      found.gpus[sample.Label("device")].figures[std::string(sample.name.substr(kGpu.size()))] +=
          sample.value;
    } else if (sample.name == "tessera_errors_total") {
      found.refusals[{sample.Label("code"), sample.Label("reason")}] += sample.value;
    } else if (sample.name == "process_start_time_seconds") {
      found.start_time = sample.value;
    }
  }
  return found;
}

MetricsRates RatesBetween(const MetricsSample& before, const MetricsSample& after) {
  const double seconds =
      std::max(std::chrono::duration<double>(after.time - before.time).count(), 1e-9);
  const bool same = before.start_time == after.start_time;
  MetricsRates rates;
  for (const auto& [method, calls] : after.calls) {
    if (calls.all == 0) continue;
    MetricsSample::Calls grown = calls;
    if (const auto old = before.calls.find(method); same && old != before.calls.end()) {
      grown.all -= old->second.all;
      grown.failed -= old->second.failed;
      for (auto& [bound, count] : grown.until) {
        const auto known = old->second.until.find(bound);
        if (known != old->second.until.end()) count -= known->second;
      }
    }
    rates.calls.push_back({method, grown.all / seconds, grown.failed / seconds,
                           Quantile(0.5, grown.until), Quantile(0.99, grown.until)});
  }
  for (const auto& [refusal, total] : after.refusals) {
    if (total == 0) continue;
    const auto old = before.refusals.find(refusal);
    const double past = same && old != before.refusals.end() ? old->second : 0;
    rates.refusals.push_back({refusal.first, refusal.second, (total - past) / seconds, total});
  }
  std::stable_sort(rates.calls.begin(), rates.calls.end(),
                   [](const auto& a, const auto& b) { return a.per_second > b.per_second; });
  std::stable_sort(rates.refusals.begin(), rates.refusals.end(), [](const auto& a, const auto& b) {
    return std::tie(a.per_second, a.total) > std::tie(b.per_second, b.total);
  });
  return rates;
}

}  // namespace tessera
