#include "server/net/listener.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "server/net/port.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

// Descriptors that are reserved for devices, files and gRPC. If the process's limit is small, only
// half of it is reserved.
constexpr std::size_t kReservedDescriptors = 256;

// If the limit on connections is at least this, one source may have at most half of them.
constexpr std::size_t kShared = 16;

// A sweep takes 0.2 us per connection. With this interval, sweeps take at most a fraction of one
// core.
constexpr std::chrono::milliseconds kSweepInterval{10};

constexpr std::chrono::seconds kLogInterval{1};

// How long to leave connections waiting when none can be accepted.
constexpr int kPauseMs = 100;

// The number of connections accepted from one socket before the other sockets are checked.
constexpr int kBatch = 64;

// Data that stays unacknowledged for this long ends the connection, as the keepalive timeout does
// for gRPC's own listener.
constexpr unsigned kUserTimeoutMs = 20'000;

// The number of attempts to find one port that is free on all addresses of a name.
constexpr int kPortAttempts = 16;

constexpr std::string_view kUnixPrefix = "unix:";

bool IsUnix(const std::string& address) { return address.rfind(kUnixPrefix, 0) == 0; }

// Decodes an address as gRPC clients do. For example, "%20" is a space.
std::string PercentDecoded(std::string_view text) {
  std::string decoded;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool coded = text[i] == '%' && i + 2 < text.size() && absl::ascii_isxdigit(text[i + 1]) &&
                       absl::ascii_isxdigit(text[i + 2]);
    decoded +=
        coded ? absl::HexStringToBytes(Absl(text.substr(i + 1, 2))) : std::string(1, text[i]);
    if (coded) i += 2;
  }
  return decoded;
}

// Returns a listening socket, or -1 with errno set.
int ListenOn(const sockaddr* address, socklen_t size, bool only_ipv6) {
  const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  const int on = 1;
  // With this option, old connections of an ended server do not block the port. A listening socket
  // still does.
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  // Accepted sockets inherit the next two options.
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs, sizeof(kUserTimeoutMs));
  if (address->sa_family == AF_INET6) {
    const int only = only_ipv6 ? 1 : 0;
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof(only));
  }
  if (bind(fd, address, size) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

int PortOf(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

// Whether other hosts can connect to a socket that listens.
bool IsBeyondLoopback(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return !SourceOf(address).empty();
}

void SetPort(int port, sockaddr* address) {
  const std::uint16_t value = htons(static_cast<std::uint16_t>(port));
  if (address->sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address)->sin6_port = value;
  } else {
    reinterpret_cast<sockaddr_in*>(address)->sin_port = value;
  }
}

void CloseAll(std::vector<int>& sockets) {
  for (const int fd : sockets) close(fd);
  sockets.clear();
}

std::uint64_t CookieOf(int fd) {
  std::uint64_t cookie = 0;  // no socket has this cookie
  socklen_t size = sizeof(cookie);
  if (getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) != 0) return 0;
  return cookie;
}

std::string_view BytesOf(const in_addr& address) {
  return {reinterpret_cast<const char*>(&address), 4};
}

// Returns the bytes of an address: four bytes if it is an IPv4 address that is mapped to IPv6.
std::string_view BytesOf(const in6_addr& address) {
  const std::string_view bytes(reinterpret_cast<const char*>(&address), 16);
  return IN6_IS_ADDR_V4MAPPED(&address) ? bytes.substr(12) : bytes;
}

// Returns one endpoint of a connected TCP socket. `name` is getpeername or getsockname.
std::optional<Endpoint> EndpointOf(int fd, int (*name)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (name(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return std::nullopt;
  if (address.ss_family == AF_INET) {
    const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(address);
    return Endpoint{std::string(BytesOf(ipv4.sin_addr)), ntohs(ipv4.sin_port)};
  }
  if (address.ss_family != AF_INET6) return std::nullopt;
  const auto& ipv6 = reinterpret_cast<const sockaddr_in6&>(address);
  return Endpoint{std::string(BytesOf(ipv6.sin6_addr)), ntohs(ipv6.sin6_port)};
}

// Returns the different addresses of a list, in which an address may occur more than once.
std::vector<const addrinfo*> WithoutRepeats(const addrinfo* list) {
  std::vector<const addrinfo*> found;
  std::set<std::string> seen;
  for (const addrinfo* it = list; it != nullptr; it = it->ai_next)
    if (seen.emplace(reinterpret_cast<const char*>(it->ai_addr), it->ai_addrlen).second)
      found.push_back(it);
  return found;
}

// Opens a socket on each of the addresses, all on the same port. Leaves out addresses that this
// machine lacks, such as IPv6 addresses if it has no IPv6. Returns 0, the errno of an address that
// cannot be used, or, if the machine lacks all addresses, the errno of the last one.
int ListenOnAll(const std::vector<const addrinfo*>& addresses, std::vector<int>& sockets) {
  int lacking = EADDRNOTAVAIL;
  int port = 0;  // the first address's port, which the others must share
  for (const addrinfo* it : addresses) {
    sockaddr_storage name{};
    std::memcpy(&name, it->ai_addr, it->ai_addrlen);
    auto* generic = reinterpret_cast<sockaddr*>(&name);
    if (port != 0) SetPort(port, generic);
    // "[::]" alone includes every IPv4 address.
    const int fd = ListenOn(generic, it->ai_addrlen, addresses.size() > 1);
    if (fd >= 0) {
      sockets.push_back(fd);
      port = PortOf(fd);
    } else if (errno == EADDRNOTAVAIL || errno == EAFNOSUPPORT) {
      lacking = errno;
    } else {
      return errno;
    }
  }
  return sockets.empty() ? lacking : 0;
}

}  // namespace

std::size_t RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  if (limit.rlim_cur < limit.rlim_max) {
    const rlim_t before = std::exchange(limit.rlim_cur, limit.rlim_max);
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
  }
  return limit.rlim_cur;
}

absl::StatusOr<TcpSockets> ListenTcp(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  // getaddrinfo takes port numbers modulo 65536.
  if (colon == address.npos || !IsPort(std::string_view(address).substr(colon + 1)))
    return CannotListen(address, "it has no port from 0 to 65535");
  std::string host = address.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != host.npos) {
    return CannotListen(address, "an IPv6 address must be in brackets");
  }
  const std::string port = address.substr(colon + 1);
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE;  // makes an empty host mean all addresses
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* resolved = nullptr;
  const int wrong =
      getaddrinfo(host.empty() ? nullptr : host.c_str(), port.c_str(), &hints, &resolved);
  if (wrong != 0) return CannotListen(address, std::string(gai_strerror(wrong)));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(resolved, freeaddrinfo);

  std::vector<int> sockets;
  int error = 0;
  for (int attempt = 0; attempt < kPortAttempts; ++attempt) {
    error = ListenOnAll(WithoutRepeats(resolved), sockets);
    // The port that was free on one address is taken on another.
    const bool retry = !sockets.empty() && error == EADDRINUSE && port == "0";
    if (error != 0) CloseAll(sockets);
    if (!retry) break;
  }
  // If the kernel has no IPv6, [::] means every IPv4 address.
  if (sockets.empty() && error == EAFNOSUPPORT && host == "::")
    return ListenTcp("0.0.0.0" + address.substr(colon));
  if (sockets.empty()) return CannotListen(address, error);
  TcpSockets opened;
  opened.beyond_loopback = std::any_of(sockets.begin(), sockets.end(), IsBeyondLoopback);
  opened.address = absl::StrCat(address.substr(0, colon), ":", PortOf(sockets[0]));
  opened.sockets = std::move(sockets);
  return opened;
}

std::string SourceOf(const sockaddr_storage& peer, int fd) {
  if (peer.ss_family == AF_UNIX) {
    const std::optional<uid_t> user = PeerUser(fd);
    // This text is longer than any address, so it cannot be mistaken for one.
    return user.has_value() && !IsOwnUser(*user) ? absl::StrCat("user number ", *user) : "";
  }
  std::string_view bytes;
  if (peer.ss_family == AF_INET) {
    bytes = BytesOf(reinterpret_cast<const sockaddr_in&>(peer).sin_addr);
  } else if (peer.ss_family == AF_INET6) {
    const in6_addr& address = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
    if (IN6_IS_ADDR_LOOPBACK(&address)) return "";
    bytes = BytesOf(address);
  }
  const bool loopback = bytes.size() == 4 && bytes[0] == 127;
  return loopback ? "" : std::string(bytes.substr(0, 8));
}

// --- ConnectionTable ---------------------------------------------------------------------------

ConnectionTable::ConnectionTable(std::size_t limit)
    : limit_(limit), source_limit_(limit < kShared ? limit : limit / 2) {}

ConnectionTable::Answer ConnectionTable::Look(const std::string& source) const {
  if (open_.size() >= limit_) return Answer::kFull;
  if (source.empty()) return Answer::kAdmitted;
  const auto it = of_source_.find(source);
  const bool has_share = it != of_source_.end() && it->second >= source_limit_;
  return has_share ? Answer::kSourceFull : Answer::kAdmitted;
}

ConnectionTable::Answer ConnectionTable::Admit(int fd, const std::string& source) {
  const std::lock_guard lock(mutex_);
  Answer answer = Look(source);
  if (answer != Answer::kAdmitted) {
    Sweep();
    answer = Look(source);
  }
  if (answer != Answer::kAdmitted) return answer;
  open_.push_back({fd, CookieOf(fd), source});
  if (!source.empty()) ++of_source_[source];
  return answer;
}

void ConnectionTable::CountRefused() {
  const std::lock_guard lock(mutex_);
  ++refused_;
}

bool ConnectionTable::End(const Endpoint& peer, const Endpoint& here) {
  const std::lock_guard lock(mutex_);
  for (Connection& connection : open_) {
    if (connection.ended) continue;
    // gRPC may close its descriptor at any time, and another connection may get the number.
    const int fd = fcntl(connection.fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) continue;
    const bool found = CookieOf(fd) == connection.cookie && EndpointOf(fd, getpeername) == peer &&
                       EndpointOf(fd, getsockname) == here;
    if (found) shutdown(fd, SHUT_RDWR);
    close(fd);
    if (!found) continue;
    connection.ended = true;
    ++ended_;
    return true;
  }
  return false;
}

std::size_t ConnectionTable::open() {
  const std::lock_guard lock(mutex_);
  Sweep();
  return open_.size();
}

std::uint64_t ConnectionTable::refused() const {
  const std::lock_guard lock(mutex_);
  return refused_;
}

std::uint64_t ConnectionTable::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

void ConnectionTable::Sweep() {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_sweep_) return;
  next_sweep_ = now + kSweepInterval;
  std::erase_if(open_, [this](const Connection& connection) {
    if (CookieOf(connection.fd) == connection.cookie) return false;
    const auto it = of_source_.find(connection.source);
    if (it != of_source_.end() && --it->second == 0) of_source_.erase(it);
    return true;
  });
}

// --- Listener ----------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<Listener>> Listener::Open(const std::vector<std::string>& addresses,
                                                         std::size_t max_connections,
                                                         const std::string& socket_group) {
  const std::size_t descriptors = RaiseDescriptorLimit();
  const std::size_t possible = descriptors - std::min(kReservedDescriptors, descriptors / 2);
  if (possible < max_connections) {
    spdlog::warn("at most {} connections, because the process may have only {} descriptors",
                 possible, descriptors);
  }
  std::unique_ptr<Listener> listener(new Listener(std::min(max_connections, possible)));
  for (const std::string& address : addresses) {
    RETURN_IF_ERROR(IsUnix(address) ? listener->OpenUnix(address, socket_group)
                                    : listener->OpenTcp(address));
  }
  listener->stop_ = eventfd(0, EFD_CLOEXEC);
  if (listener->stop_ < 0) {
    return MakeError(absl::StatusCode::kInternal, "CANNOT_START",
                     absl::StrCat("eventfd: ", std::strerror(errno)));
  }
  return listener;
}

Listener::~Listener() {
  Close();
  for (const int fd : {stop_, spare_}) {
    if (fd >= 0) close(fd);
  }
}

absl::Status Listener::OpenUnix(const std::string& address, const std::string& socket_group) {
  std::string path = address.substr(kUnixPrefix.size());
  if (path.compare(0, 2, "//") == 0) path.erase(0, 2);
  path = PercentDecoded(path);
  if (path.find('\0') != path.npos) return CannotListen(address, "its path contains a zero byte");
  ASSIGN_OR_RETURN(UnixSocket opened, ListenUnix(path, SOCK_STREAM, socket_group, address));
  sockets_.push_back(opened.fd);
  files_.push_back(std::move(opened.file));
  addresses_.push_back(address);
  return absl::OkStatus();
}

absl::Status Listener::OpenTcp(const std::string& address) {
  ASSIGN_OR_RETURN(TcpSockets opened, ListenTcp(address));
  if (opened.beyond_loopback && beyond_loopback_.empty()) beyond_loopback_ = address;
  sockets_.insert(sockets_.end(), opened.sockets.begin(), opened.sockets.end());
  addresses_.push_back(std::move(opened.address));
  return absl::OkStatus();
}

void Listener::Start(std::unique_ptr<Acceptor> acceptor, std::vector<User> users, Knows knows) {
  acceptor_ = std::move(acceptor);
  users_ = std::move(users);
  knows_ = std::move(knows);
  spare_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
  thread_ = std::thread(&Listener::Run, this);
}

void Listener::Close() {
  const std::lock_guard lock(close_mutex_);
  if (thread_.joinable()) {
    eventfd_write(stop_, 1);
    thread_.join();
  }
  RemoveSocketFiles();
  CloseAll(sockets_);
}

void Listener::RemoveSocketFiles() {
  const std::lock_guard lock(files_mutex_);
  for (const SocketFile& file : files_) RemoveSocketFile(file);
  files_.clear();
}

void Listener::Run() {
  std::vector<pollfd> waits = {{stop_, POLLIN, 0}};
  for (const int fd : sockets_) waits.push_back({fd, POLLIN, 0});
  bool paused = false;
  for (;;) {
    const int ready = poll(waits.data(), paused ? 1 : waits.size(), paused ? kPauseMs : -1);
    if (ready > 0 && waits[0].revents != 0) return;
    if (std::exchange(paused, false) || ready <= 0) continue;
    for (std::size_t i = 1; i < waits.size(); ++i) {
      if (waits[i].revents != 0 && !AcceptSome(waits[i].fd)) paused = true;
    }
  }
}

bool Listener::AcceptSome(int listening) {
  for (int i = 0; i < kBatch; ++i) {
    sockaddr_storage peer{};
    socklen_t size = sizeof(peer);
    const int fd =
        accept4(listening, reinterpret_cast<sockaddr*>(&peer), &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      Take(listening, fd, peer);
      continue;
    }
    switch (errno) {
      case EAGAIN:
        return true;
      case EINTR:
      case ECONNABORTED:  // the client left while it was waiting
      case EPROTO:
        break;
      case EMFILE:
      case ENFILE:
        if (!RefuseOne(listening)) return false;
        break;
      default:
        return false;
    }
  }
  return true;
}

void Listener::Take(int listening, int fd, const sockaddr_storage& peer) {
  const ConnectionTable::Answer answer = connections_.Admit(fd, SourceOf(peer, fd));
  if (answer == ConnectionTable::Answer::kAdmitted) {
    Acceptor::NewConnectionParameters connection;
    connection.listener_fd = listening;
    connection.fd = fd;
    AcceptorFor(fd).HandleNewConnection(&connection);
    return;
  }
  NoteRefused(answer == ConnectionTable::Answer::kFull
                  ? absl::StrCat(connections_.limit(), " are open, which is the limit")
                  : absl::StrCat("one address or user has ", connections_.source_limit(),
                                 ", which is its share"));
  close(fd);
}

Listener::Acceptor& Listener::AcceptorFor(int fd) {
  if (users_.empty()) return *acceptor_;
  const std::optional<uid_t> user = PeerUser(fd);
  if (!user.has_value() || !knows_(*user)) return *acceptor_;
  for (const User& one : users_) {
    if (!one.mark->user().has_value()) one.mark->Set(*user);
    if (one.mark->user() == *user) return *one.acceptor;
  }
  if (!std::exchange(told_of_users_, true)) {
    spdlog::warn(
        "more than {} users of the token file have connected: further users are treated as unknown",
        users_.size());
  }
  return *acceptor_;
}

bool Listener::RefuseOne(int listening) {
  if (spare_ >= 0) {
    close(spare_);
    const int fd = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      NoteRefused("no descriptors are left");
      close(fd);
    }
  }
  spare_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
  return spare_ >= 0;
}

void Listener::NoteRefused(std::string_view why) {
  connections_.CountRefused();
  ++unlogged_;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_log_) return;
  next_log_ = now + kLogInterval;
  spdlog::warn("{} connections refused: {}", std::exchange(unlogged_, 0), why);
}

}  // namespace tessera
