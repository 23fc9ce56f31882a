#include "server/status/http_listener.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "server/net/listener.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Time limits for reading a request, writing a response, and waiting for the client to close the
// connection afterwards.
constexpr std::chrono::seconds kReadTime{10};
constexpr std::chrono::seconds kWriteTime{20};
constexpr std::chrono::seconds kCloseTime{2};

// How long to leave connections waiting when none can be accepted.
constexpr milliseconds kPause{100};

// The status page loads nothing but its metrics.
constexpr std::string_view kPolicy =
    "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";

// Returns the end of the empty line after the fields, or npos if it has not arrived. Lines may end
// with LF instead of CRLF.
std::size_t HeadEnd(std::string_view head) {
  for (std::size_t at = head.find('\n'); at != head.npos; at = head.find('\n', at + 1)) {
    const std::string_view rest = head.substr(at + 1);
    if (rest.starts_with("\n")) return at + 2;
    if (rest.starts_with("\r\n")) return at + 3;
  }
  return head.npos;
}

// Removes the next line from `lines`, and returns it without its end.
std::string_view NextLine(std::string_view& lines) {
  const std::size_t end = std::min(lines.find('\n'), lines.size());
  std::string_view line = lines.substr(0, end);
  lines.remove_prefix(std::min(end + 1, lines.size()));
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

std::string_view Reason(int code) {
  constexpr std::pair<int, std::string_view> kReasons[] = {{200, "OK"},
                                                           {400, "Bad Request"},
                                                           {404, "Not Found"},
                                                           {405, "Method Not Allowed"},
                                                           {431, "Request Header Fields Too Large"},
                                                           {503, "Service Unavailable"},
                                                           {505, "HTTP Version Not Supported"}};
  for (const auto& [known, reason] : kReasons)
    if (known == code) return reason;
  return "Error";
}

// `with_body` is false for HEAD, whose response has only the head.
std::string Message(const HttpAnswer& answer, bool with_body = true) {
  std::string message = absl::StrCat(
      "HTTP/1.1 ", answer.code, " ", Absl(Reason(answer.code)), "\r\nContent-Type: ", answer.type,
      "\r\nContent-Length: ", answer.body.size(),
      "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nContent-Security-Policy: ",
      Absl(kPolicy), "\r\nConnection: close\r\n", answer.code == 405 ? "Allow: GET, HEAD\r\n" : "",
      "\r\n");
  if (with_body) message += answer.body;
  return message;
}

std::string Failure(int code) {
  return Message({.code = code, .body = std::string(Reason(code)) + "\n"});
}

bool IsToken(std::string_view text) {
  constexpr std::string_view kMore = "!#$%&'*+-.^_`|~";
  return !text.empty() && std::all_of(text.begin(), text.end(), [&](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           kMore.find(c) != kMore.npos;
  });
}

// Returns whether all lines before the first empty line are fields. Sets hosts to the number of
// "Host" fields.
bool ParseFields(std::string_view lines, int& hosts) {
  hosts = 0;
  for (std::string_view line = NextLine(lines); !line.empty(); line = NextLine(lines)) {
    const std::size_t colon = line.find(':');
    if (colon == line.npos || !IsToken(line.substr(0, colon))) return false;
    if (line.find_first_of(std::string_view("\r\0", 2)) != line.npos) return false;
    if (absl::EqualsIgnoreCase(Absl(line.substr(0, colon)), "host")) ++hosts;
  }
  return true;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpListener>> HttpListener::Open(const std::string& address,
                                                                 Handler handler) {
  ASSIGN_OR_RETURN(TcpSockets opened, ListenTcp(address));
  std::unique_ptr<HttpListener> listener(new HttpListener());
  listener->handler_ = std::move(handler);
  listener->sockets_ = std::move(opened.sockets);
  listener->address_ = std::move(opened.address);
  listener->beyond_loopback_ = opened.beyond_loopback;
  listener->stop_ = eventfd(0, EFD_CLOEXEC);
  if (listener->stop_ < 0) {
    return MakeError(absl::StatusCode::kInternal, "CANNOT_START",
                     absl::StrCat("eventfd: ", std::strerror(errno)));
  }
  listener->thread_ = std::thread(&HttpListener::Run, listener.get());
  return listener;
}

HttpListener::~HttpListener() {
  if (thread_.joinable()) {
    eventfd_write(stop_, 1);
    thread_.join();
  }
  for (const Connection& connection : connections_) close(connection.fd);
  for (const int fd : sockets_) close(fd);
  if (stop_ >= 0) close(stop_);
}

void HttpListener::Run() {
  std::vector<pollfd> waits;
  Time paused_until;  // no connection is accepted before this time
  for (;;) {
    Time now = steady_clock::now();
    const bool paused = now < paused_until;
    Time wake = paused ? paused_until : Time::max();
    waits.assign(1, {stop_, POLLIN, 0});
    for (const int fd : sockets_) waits.push_back({paused ? -1 : fd, POLLIN, 0});
    for (const Connection& connection : connections_) {
      const bool writes = connection.state == Connection::State::kWriting;
      waits.push_back({connection.fd, static_cast<short>(writes ? POLLOUT : POLLIN), 0});
      wake = std::min(wake, connection.deadline);
    }
    const auto left = std::chrono::ceil<milliseconds>(std::max(wake - now, Time::duration(0)));
    poll(waits.data(), waits.size(), wake == Time::max() ? -1 : static_cast<int>(left.count()));
    if (waits[0].revents != 0) return;

    now = steady_clock::now();
    auto wait = waits.begin() + 1 + static_cast<std::ptrdiff_t>(sockets_.size());
    for (auto it = connections_.begin(); it != connections_.end(); ++wait) {
      const bool stays = now < it->deadline && (wait->revents == 0 || Serve(*it, now));
      if (!stays) close(it->fd);
      it = stays ? std::next(it) : connections_.erase(it);
    }
    for (std::size_t i = 0; i < sockets_.size(); ++i) {
      if (waits[1 + i].revents != 0 && !AcceptSome(sockets_[i], now)) paused_until = now + kPause;
    }
  }
}

bool HttpListener::AcceptSome(int listening, Time now) {
  // At most half of the possible connections are accepted here, so that each one is served once
  // before another can replace it.
  for (std::size_t i = 0; i < kMostConnections / 2; ++i) {
    const int fd = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
      return errno == EAGAIN;
    }
    if (connections_.size() == kMostConnections) {
      close(connections_.front().fd);
      connections_.pop_front();
    }
    connections_.emplace_back();
    connections_.back().fd = fd;
    connections_.back().deadline = now + kReadTime;
  }
  return true;
}

bool HttpListener::Serve(Connection& connection, Time now) {
  switch (connection.state) {
    case Connection::State::kReading:
      return Read(connection, now);
    case Connection::State::kWriting:
      return Write(connection, now);
    case Connection::State::kClosing:
      return Drop(connection);
  }
  return false;
}

bool HttpListener::Read(Connection& connection, Time now) {
  char bytes[4096];
  const ssize_t size = recv(connection.fd, bytes, sizeof bytes, 0);
  if (size < 0) return errno == EAGAIN || errno == EINTR;
  if (size == 0) return false;
  connection.head.append(bytes, static_cast<std::size_t>(size));
  const std::size_t end = HeadEnd(connection.head);
  const bool whole = end <= kLargestHead;
  if (!whole && connection.head.size() <= kLargestHead) return true;
  connection.answer =
      whole ? Answer(std::string_view(connection.head).substr(0, end)) : Failure(431);
  connection.head = std::string();
  connection.state = Connection::State::kWriting;
  connection.deadline = now + kWriteTime;
  return Write(connection, now);
}

bool HttpListener::Write(Connection& connection, Time now) {
  const std::string_view rest = std::string_view(connection.answer).substr(connection.sent);
  const ssize_t size = send(connection.fd, rest.data(), rest.size(), MSG_NOSIGNAL);
  if (size < 0) return errno == EAGAIN || errno == EINTR;
  connection.sent += static_cast<std::size_t>(size);
  if (connection.sent < connection.answer.size()) return true;
  shutdown(connection.fd, SHUT_WR);
  connection.answer = std::string();
  connection.state = Connection::State::kClosing;
  connection.deadline = now + kCloseTime;
  return true;
}

bool HttpListener::Drop(Connection& connection) {
  char bytes[4096];
  const ssize_t size = recv(connection.fd, bytes, sizeof bytes, 0);
  return size > 0 || (size < 0 && (errno == EAGAIN || errno == EINTR));
}

std::string HttpListener::Answer(std::string_view head) const {
  const std::string_view line = NextLine(head);
  const std::size_t first = line.find(' ');
  const std::size_t last = line.rfind(' ');
  if (first == line.npos || first == last) return Failure(400);
  const std::string_view method = line.substr(0, first);
  std::string_view target = line.substr(first + 1, last - first - 1);
  const std::string_view version = line.substr(last + 1);
  int hosts = 0;
  if (!IsToken(method) || target.find_first_of(" \r\n\t") != target.npos ||
      !ParseFields(head, hosts)) {
    return Failure(400);
  }
  if (version != "HTTP/1.1" && version != "HTTP/1.0") {
    return Failure(version.substr(0, 5) == "HTTP/" ? 505 : 400);
  }
  if (hosts > 1 || (hosts == 0 && version == "HTTP/1.1")) return Failure(400);
  if (method != "GET" && method != "HEAD") return Failure(405);
  constexpr std::string_view kScheme = "http://";
  if (absl::StartsWithIgnoreCase(Absl(target), Absl(kScheme))) {  // as in requests to proxies
    const std::size_t path = target.find_first_of("/?", kScheme.size());
    target = path == target.npos || target[path] == '?' ? "/" : target.substr(path);
  }
  if (target.empty() || target[0] != '/') return Failure(400);
  target = target.substr(0, target.find('?'));
  return Message(handler_(target), method == "GET");
}

}  // namespace tessera
