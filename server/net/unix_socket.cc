#include "server/net/unix_socket.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <system_error>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

// Buffer size for the members of a large group.
constexpr std::size_t kGroupEntry = std::size_t{1} << 20;

int MakeSocket(int type) { return socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

// Whether path is a socket that no process serves, such as one left by a server that was killed.
bool IsDeadSocket(const std::string& path, int type, const sockaddr_un& address) {
  struct stat file;
  if (lstat(path.c_str(), &file) != 0 || !S_ISSOCK(file.st_mode)) return false;
  const int fd = MakeSocket(type);
  if (fd < 0) return false;
  const bool dead =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 &&
      errno == ECONNREFUSED;
  close(fd);
  return dead;
}

std::optional<gid_t> FindGroup(const std::string& group) {
  std::vector<char> room(kGroupEntry);
  struct group entry;
  struct group* found = nullptr;
  if (getgrnam_r(group.c_str(), &entry, room.data(), room.size(), &found) == 0 && found != nullptr)
    return found->gr_gid;
  gid_t number = 0;
  // The largest number stands for no group: lchown() would leave the file's group as it is.
  if (absl::SimpleAtoi(group, &number) && number != static_cast<gid_t>(-1)) return number;
  return std::nullopt;
}

// Returns how many of the users in [first, end) are in the process's user namespace.
std::uint64_t UsersIn(std::uint64_t first, std::uint64_t end) {
  std::ifstream map("/proc/self/uid_map");
  if (!map) return end - first;  // the kernel has no such namespaces
  std::uint64_t users = 0, inside = 0, outside = 0, count = 0;
  while (map >> inside >> outside >> count) {
    const std::uint64_t from = std::max(first, inside), to = std::min(end, inside + count);
    if (to > from) users += to - from;
  }
  return users;
}

}  // namespace

absl::Status CannotListen(const std::string& address, const std::string& why) {
  return MakeError(absl::StatusCode::kUnavailable, "CANNOT_LISTEN",
                   absl::StrCat("cannot listen on ", address, ": ", why), {{"address", address}});
}

absl::Status CannotListen(const std::string& address, int error) {
  return CannotListen(address, std::error_code(error, std::generic_category()).message());
}

void RemoveSocketFile(const SocketFile& file) {
  struct stat there;
  if (lstat(file.path.c_str(), &there) == 0 && there.st_dev == file.device &&
      there.st_ino == file.inode) {
    unlink(file.path.c_str());
  }
}

absl::StatusOr<UnixSocket> ListenUnix(const std::string& path, int type, const std::string& group,
                                      const std::string& address) {
  const auto cannot = [&address](const std::string& why) { return CannotListen(address, why); };
  const auto failed = [&address](int error) { return CannotListen(address, error); };
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (path.empty()) return cannot("it has no path");
  if (path.size() >= sizeof(name.sun_path)) return failed(ENAMETOOLONG);
  std::memcpy(name.sun_path, path.data(), path.size());
  const auto* generic = reinterpret_cast<const sockaddr*>(&name);
  const bool own = group.empty(), all = group == "*";
  std::optional<gid_t> owner;
  if (!own && !all) {
    owner = FindGroup(group);
    if (!owner.has_value()) return cannot(absl::StrCat("there is no group ", group));
  }

  const int fd = MakeSocket(type);
  if (fd < 0) return failed(errno);
  absl::Cleanup closer = [fd] { close(fd); };
  // The file is created with the mode of the socket, and no client can connect before listen().
  if (fchmod(fd, S_IRUSR | S_IWUSR) != 0) return failed(errno);
  if (bind(fd, generic, sizeof(name)) != 0) {
    if (errno != EADDRINUSE) return failed(errno);
    if (!IsDeadSocket(path, type, name)) return failed(EADDRINUSE);
    unlink(path.c_str());
    if (bind(fd, generic, sizeof(name)) != 0) return failed(errno);
  }
  struct stat made;
  if (lstat(path.c_str(), &made) != 0) return failed(errno);
  const SocketFile file = {path, made.st_dev, made.st_ino};
  absl::Cleanup remover = [&file] { RemoveSocketFile(file); };
  if (owner.has_value() && lchown(path.c_str(), static_cast<uid_t>(-1), *owner) != 0) {
    return cannot(absl::StrCat("its group cannot become ", group, ": ",
                               std::error_code(errno, std::generic_category()).message()));
  }
  // If a symbolic link has replaced the socket, this does not change the file that it points to.
  const mode_t mode = own ? 0600 : all ? 0666 : 0660;
  if (fchmodat(AT_FDCWD, path.c_str(), mode, AT_SYMLINK_NOFOLLOW) != 0) return failed(errno);
  if (listen(fd, SOMAXCONN) != 0) return failed(errno);
  std::move(closer).Cancel();
  std::move(remover).Cancel();
  return UnixSocket{fd, file};
}

std::optional<uid_t> PeerUser(int fd) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0 || domain != AF_UNIX)
    return std::nullopt;
  ucred peer{};
  size = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  return peer.uid;
}

uid_t OverflowUser() {
  static const uid_t user = [] {
    uid_t number = 65534;
    std::ifstream("/proc/sys/kernel/overflowuid") >> number;
    return number == 0 ? 65534 : number;
  }();
  return user;
}

bool IsOwnUser(uid_t user) {
  constexpr std::uint64_t kUsers = std::numeric_limits<uid_t>::max();
  static const bool has_all = UsersIn(0, kUsers) == kUsers;
  return user == geteuid() && (has_all || user != OverflowUser());
}

bool HasUser(uid_t user) { return UsersIn(user, std::uint64_t{user} + 1) == 1; }

}  // namespace tessera
