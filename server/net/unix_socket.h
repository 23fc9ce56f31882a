// Unix sockets in the file system: the permissions of the file decide who may connect, and the
// kernel tells which user has connected.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera {

// Which users may connect: those that may write the socket's file.
struct SocketAccess {
  mode_t mode = 0600;
  std::string group;  // name or number; empty: the default group of the process's files
};

// The file of a socket, as it was created.
struct SocketFile {
  std::string path;
  dev_t device = 0;
  ino_t inode = 0;
};
// Removes the file, unless another one has taken its place.
void RemoveSocketFile(const SocketFile& file);

struct UnixSocket {
  int fd;  // belongs to the caller
  SocketFile file;
};
// UNAVAILABLE / CANNOT_LISTEN {address}, for sockets of any kind. error: a value of errno.
absl::Status CannotListen(const std::string& address, const std::string& why);
absl::Status CannotListen(const std::string& address, int error);

// Returns a listening socket that does not block, and accepts no connection before its file has the
// requested permissions. type: SOCK_STREAM or SOCK_SEQPACKET. It replaces a socket that no process
// serves. Errors: CannotListen(address, ...).
absl::StatusOr<UnixSocket> ListenUnix(const std::string& path, int type, const SocketAccess& access,
                                      const std::string& address);

// The effective user of the process that connected a unix socket, at that time; nothing for other
// sockets. It is OverflowUser() for a user outside the process's user namespace.
std::optional<uid_t> PeerUser(int fd);

// The number that the kernel shows for users who are not in the process's user namespace: 65534,
// unless the kernel is configured otherwise.
uid_t OverflowUser();
// Whether this is the process's user; false if it could also be one outside its user namespace.
bool IsOwnUser(uid_t user);
// Whether a user is in the process's user namespace.
bool HasUser(uid_t user);

}  // namespace tessera
