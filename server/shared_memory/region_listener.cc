#include "server/shared_memory/region_listener.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "server/observe/log.h"
#include "server/rpc/convert.h"
#include "spdlog/spdlog.h"
#include "tessera/v1/shared_memory.pb.h"

namespace tessera {
namespace {

using absl::StatusCode;
using Clock = std::chrono::steady_clock;

// How long a client may take to send its packet after it has connected.
constexpr std::chrono::seconds kHandshake{5};

// Values that replace a user's number. kOwner is a user that may take all connections, such as the
// server's own user. kStranger stands for all users that the server does not know.
constexpr std::int64_t kOwner = -1, kStranger = -2;

// How long to leave connections waiting when none can be accepted.
constexpr std::chrono::milliseconds kPause{100};

// The number of connections accepted before existing connections are served.
constexpr int kBatch = 64;

// The maximum number of descriptors in one message on Linux (SCM_MAX_FD).
constexpr std::size_t kMostDescriptors = 253;

absl::Status BadPacket(std::string_view field, std::string_view message) {
  return MakeError(StatusCode::kInvalidArgument, "BAD_REGION", message,
                   {{"field", std::string(field)}});
}

// Sends a response. It is one packet, and always fits into the buffer of an empty socket.
void Send(int fd, const v1::RegisterRegionResponse& answer) {
  const std::string packet = answer.SerializeAsString();
  // A client that has left needs no response.
  static_cast<void>(send(fd, packet.data(), packet.size(), MSG_DONTWAIT | MSG_NOSIGNAL));
}

void SendError(int fd, const absl::Status& status, bool sees_all) {
  LogFailedCall({.method = "RegisterRegion", .strategy = "", .trace = {}}, "shared memory", status);
  v1::RegisterRegionResponse answer;
  answer.set_code(static_cast<int>(status.code()));
  answer.set_message(std::string(status.message()));
  answer.set_reason(ErrorReason(status));
  for (const auto& [key, value] : FiguresFor(status, sees_all))
    (*answer.mutable_metadata())[key] = value;
  Send(fd, answer);
}

// One packet, with the descriptors that came with it.
struct Packet {
  std::string data;
  std::vector<Descriptor> files;
  bool cut = false;  // it was longer than expected
};

// Returns nothing if there is no packet yet, or an empty packet without files if the connection is
// over.
std::optional<Packet> Receive(int fd) {
  char data[RegionListener::kGreeting.size()];
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))];
  iovec place = {data, sizeof(data)};
  msghdr message{};
  message.msg_iov = &place;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t size = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (size < 0) {
    if (errno == EAGAIN || errno == EINTR) return std::nullopt;
    return Packet();
  }
  Packet packet{.data = std::string(data, static_cast<std::size_t>(size)),
                .cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0};
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int file = -1;
      std::memcpy(&file, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      packet.files.emplace_back(file);
    }
  }
  return packet;
}

}  // namespace

struct RegionListener::Connection {
  explicit Connection(int fd) : socket(fd) {}
  const Descriptor socket;
  const Clock::time_point deadline = Clock::now() + kHandshake;  // the packet must arrive by then
  bool spoken = false;
  std::int64_t guest = kStranger;  // the client's uid, or kOwner, or kStranger
  std::mutex mutex;
  bool over = false;  // guarded by mutex, as is token
  std::string token;  // the region's token, once there is a region
};

absl::StatusOr<std::unique_ptr<RegionListener>> RegionListener::Open(
    const std::string& path, const std::string& socket_group, std::size_t max_connections,
    Rules rules, SharedRegions& regions, Chores& chores) {
  std::string absolute = path;
  if (path.empty() || path.front() != '/') {
    const std::unique_ptr<char, void (*)(void*)> folder(getcwd(nullptr, 0), std::free);
    if (folder == nullptr) return CannotListen(path, errno);
    absolute = absl::StrCat(folder.get(), "/", path);
  }
  std::unique_ptr<RegionListener> listener(
      new RegionListener(std::move(absolute), max_connections, std::move(rules), regions, chores));
  RETURN_IF_ERROR(listener->Listen(socket_group));
  listener->thread_ = std::thread(&RegionListener::Run, listener.get());
  return listener;
}

absl::Status RegionListener::Listen(const std::string& socket_group) {
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake_.get() < 0) return CannotListen(path_, errno);
  ASSIGN_OR_RETURN(UnixSocket opened, ListenUnix(path_, SOCK_SEQPACKET, socket_group, path_));
  listening_ = Descriptor(opened.fd);
  file_ = std::move(opened.file);
  return absl::OkStatus();
}

RegionListener::~RegionListener() {
  ending_ = true;
  Close();
  if (thread_.joinable()) thread_.join();
  for (const auto& connection : connections_) End(*connection);
}

void RegionListener::Close() {
  RemoveSocketFile();
  closed_ = true;
  eventfd_write(wake_.get(), 1);
}

void RegionListener::RemoveSocketFile() {
  const std::lock_guard lock(file_mutex_);
  if (const auto file = std::exchange(file_, std::nullopt); file.has_value())
    tessera::RemoveSocketFile(*file);
}

void RegionListener::Run() {
  bool paused = false;
  std::vector<pollfd> waits;
  while (!ending_) {
    if (closed_ && listening_.get() >= 0) {
      // Clients that have connected but are not accepted yet get a response as well.
      AcceptSome(SOMAXCONN + 1);
      listening_ = Descriptor();
    }
    waits.assign({{wake_.get(), POLLIN, 0}, {paused ? -1 : listening_.get(), POLLIN, 0}});
    Clock::time_point next = paused ? Clock::now() + kPause : Clock::time_point::max();
    for (const auto& connection : connections_) {
      waits.push_back({connection->socket.get(), POLLIN, 0});
      if (!connection->spoken) next = std::min(next, connection->deadline);
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now());
    const bool forever = next == Clock::time_point::max();
    poll(waits.data(), waits.size(),
         forever ? -1 : static_cast<int>(std::max<std::int64_t>(left.count(), 0)));
    eventfd_t ignored = 0;
    if (waits[0].revents != 0) eventfd_read(wake_.get(), &ignored);
    paused = false;
    const Clock::time_point now = Clock::now();
    std::size_t i = 2;
    std::erase_if(connections_, [&](const std::shared_ptr<Connection>& connection) {
      const bool heard = waits[i++].revents != 0;
      const bool late = !connection->spoken && now >= connection->deadline;
      if (heard ? Serve(connection) : !late) return false;
      End(*connection);
      return true;
    });
    if (waits[1].revents != 0) paused = !AcceptSome(kBatch);
  }
}

bool RegionListener::AcceptSome(int most) {
  for (int i = 0; i < most; ++i) {
    const int fd = accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return errno == EAGAIN;
    }
    auto connection = std::make_shared<Connection>(fd);
    const std::optional<uid_t> user = PeerUser(fd);
    const bool known = user.has_value() && rules_.admits(*user);
    connection->guest = !known ? kStranger : rules_.shares(*user) ? std::int64_t{*user} : kOwner;
    const auto silent = std::count_if(
        connections_.begin(), connections_.end(),
        [&](const auto& other) { return !other->spoken && other->guest == connection->guest; });
    // The silent connections of one user must not take up all connections. A connection that is not
    // kept is closed.
    const bool room =
        connection->guest == kOwner ||
        static_cast<std::size_t>(silent) < std::max<std::size_t>(1, max_connections_ / 4);
    if (room && connections_.size() < max_connections_)
      connections_.push_back(std::move(connection));
  }
  return true;
}

bool RegionListener::Serve(const std::shared_ptr<Connection>& connection) {
  std::optional<Packet> packet = Receive(connection->socket.get());
  if (!packet.has_value()) return true;
  // The peer has closed the connection, or has sent a second packet.
  if (connection->spoken || (packet->data.empty() && packet->files.empty())) return false;
  connection->spoken = true;
  absl::Status status;
  const std::optional<uid_t> user = PeerUser(connection->socket.get());
  if (!user.has_value() || !rules_.admits(*user)) {
    status = MakeError(StatusCode::kPermissionDenied, "USER_UNKNOWN",
                       "the server does not know the user of this process");
  } else if (packet->cut || packet->data != kGreeting) {
    status = BadPacket("packet", "the packet is not a region registration");
  } else if (packet->files.size() != 1) {
    status = BadPacket("descriptor", "the packet must carry exactly one descriptor");
  } else {
    status = SharedRegions::CheckFile(packet->files.front());
  }
  if (status.ok()) status = Register(connection, *user, std::move(packet->files.front()));
  if (!status.ok()) SendError(connection->socket.get(), status, rules_.sees_all);
  return status.ok();
}

absl::Status RegionListener::Register(const std::shared_ptr<Connection>& connection, uid_t user,
                                      Descriptor file) {
  if (closed_) return MakeError(StatusCode::kUnavailable, "DRAINING", "the server is stopping");
  const std::optional<uid_t> sharer =
      rules_.shares(user) ? std::optional<uid_t>(user) : std::nullopt;
  return chores_.Submit([&regions = regions_, &chores = chores_, sees_all = rules_.sees_all,
                         connection, sharer, file = std::move(file)] {
    absl::StatusOr<std::string> token = regions.Add(file, sharer);
    const std::lock_guard lock(connection->mutex);
    if (!token.ok()) {
      // The client closes the connection, or the server does when it ends.
      SendError(connection->socket.get(), token.status(), sees_all);
      shutdown(connection->socket.get(), SHUT_RDWR);
      return;
    }
    if (connection->over) {
      chores.Release(regions.Remove(*token));
      return;
    }
    connection->token = *token;
    v1::RegisterRegionResponse answer;
    answer.set_region(*token);
    Send(connection->socket.get(), answer);
  });
}

void RegionListener::End(Connection& connection) {
  const std::lock_guard lock(connection.mutex);
  connection.over = true;
  if (!connection.token.empty()) chores_.Release(regions_.Remove(connection.token));
}

}  // namespace tessera
