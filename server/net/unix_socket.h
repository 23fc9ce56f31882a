// Unix sockets in the file system: the permissions of the file decide which users may connect, and
// the kernel reports which user has connected.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera {

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
// Returns UNAVAILABLE / CANNOT_LISTEN {address}, for sockets of any kind. `error` is a value of
// errno.
absl::Status CannotListen(const std::string& address, const std::string& why);
absl::Status CannotListen(const std::string& address, int error);

// Returns a non-blocking listening socket, or CannotListen(address, ...). The socket accepts no
// connection before its file has the requested permissions. It replaces an existing socket that no
// process serves. `type` is SOCK_STREAM or SOCK_SEQPACKET. `group` is the group whose users may
// connect, by name or number. "*" stands for all users, and "" for only the process's own user and
// root.
absl::StatusOr<UnixSocket> ListenUnix(const std::string& path, int type, const std::string& group,
                                      const std::string& address);

// Returns the effective user that the process at the other end of a unix socket had when it
// connected, or nothing for other sockets. Returns OverflowUser() for a user outside this process's
// user namespace.
std::optional<uid_t> PeerUser(int fd);

// Returns the number that the kernel shows for users outside the process's user namespace: 65534,
// unless the kernel is configured otherwise.
uid_t OverflowUser();
// Whether this is the process's user. Returns false if the number could also stand for a user
// outside the process's user namespace.
bool IsOwnUser(uid_t user);
// Whether a user is in the process's user namespace.
bool HasUser(uid_t user);

}  // namespace tessera
