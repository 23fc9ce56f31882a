// The server's sockets: it accepts connections itself, so that their number has a limit, which
// gRPC 1.51 does not offer, and so that running out of descriptors does not end its listeners.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/server_builder.h"
#include "server/net/unix_socket.h"
#include "server/net/user_mark.h"

namespace tessera {

// Lets the process have as many descriptors as it may, and returns how many that is.
std::size_t RaiseDescriptorLimit();

// Sockets that listen on one "host:port", where host may be a name, an IPv4 address or an IPv6
// address in brackets and port 0 takes a free one. A name that has several addresses is listened to
// on all that this machine has. They do not block, and belong to the caller.
struct TcpSockets {
  std::vector<int> sockets;      // at least one
  std::string address;           // with the port that was taken for port 0
  bool beyond_loopback = false;  // whether other hosts can connect
};
// [::] means every address of IPv6 and of IPv4, or of IPv4 alone where the kernel has no IPv6.
// UNAVAILABLE / CANNOT_LISTEN {address}.
absl::StatusOr<TcpSockets> ListenTcp(const std::string& address);

// Whom a connection counts against: an IPv4 address, or the network (/64) of an IPv6 address, as
// bytes; of a unix socket another user than the server's own, if fd, the accepted socket, is one.
// Empty for this host itself: loopback addresses, and the server's own user.
std::string SourceOf(const sockaddr_storage& peer, int fd = -1);

// An end of a TCP connection.
struct Endpoint {
  std::string address;  // 4 or 16 bytes; of an IPv4 address that is mapped to one of IPv6, 4
  int port = 0;

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

// The connections that are open, and who has them. Nobody tells when one closes: a connection is
// known by its descriptor and its socket's cookie, which the kernel never gives twice, and those
// that are gone are noticed when a place is wanted. Thread safe.
class ConnectionTable {
 public:
  // limit: at least 1. From 16 on, one source has half of the places at most.
  explicit ConnectionTable(std::size_t limit);

  enum class Answer { kAdmitted, kFull, kSourceFull };
  // Takes a place for the socket fd, which may be closed at any time afterwards. source: as of
  // SourceOf; an empty one may have all places.
  Answer Admit(int fd, const std::string& source);
  void CountRefused();
  // Ends the TCP connection between these two. False: there is none that has not been ended.
  bool End(const Endpoint& peer, const Endpoint& here);

  std::size_t limit() const { return limit_; }
  std::size_t source_limit() const { return source_limit_; }
  std::size_t open();             // is up to 10 ms old
  std::uint64_t refused() const;  // since the start
  std::uint64_t ended() const;    // by End, since the start

 private:
  struct Connection {
    int fd;
    std::uint64_t cookie;
    std::string source;
    bool ended = false;  // by End
  };
  // Forgets closed connections, unless that has just been done.
  void Sweep();
  // Whether there is a place. Both are called with the mutex held.
  Answer Look(const std::string& source) const;

  const std::size_t limit_;
  const std::size_t source_limit_;
  mutable std::mutex mutex_;
  std::vector<Connection> open_;
  std::unordered_map<std::string, std::size_t> of_source_;  // how many of open_; not of ""
  std::chrono::steady_clock::time_point next_sweep_;
  std::uint64_t refused_ = 0;
  std::uint64_t ended_ = 0;
};

// Thread safe, but for construction, Start and destruction.
class Listener {
 public:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

  // Listens on every address: "host:port" as of ListenTcp; "unix:/path" or "unix:///path", whose
  // files get the permissions of access. Who connects waits until Start. max_connections: at least
  // 1; fewer when the process may not have so many descriptors. UNAVAILABLE / CANNOT_LISTEN
  // {address}.
  static absl::StatusOr<std::unique_ptr<Listener>> Open(const std::vector<std::string>& addresses,
                                                        std::size_t max_connections,
                                                        const SocketAccess& access = {});
  ~Listener();  // closes

  // Where it listens, in the order of Open, with the ports that were taken for port 0.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // The first address to which other hosts can connect; empty: only this host can.
  const std::string& beyond_loopback() const { return beyond_loopback_; }

  // Whether users of this host can connect as such.
  bool has_unix() const { return !files_.empty(); }

  // What takes the connections of one user, and marks them with him.
  struct User {
    std::unique_ptr<UserMark> mark;
    std::unique_ptr<Acceptor> acceptor;
  };
  using Knows = std::function<bool(uid_t)>;
  // Serves, once, by handing connections to acceptors whose gRPC server has started: those by unix
  // sockets to the one of users that has the mark of who connects, or that gets it; all others, and
  // those of users who are not known or for whom none is left, to acceptor. knows: called by the
  // listener's thread; not empty where there are users.
  void Start(std::unique_ptr<Acceptor> acceptor, std::vector<User> users = {}, Knows knows = {});

  // Stops listening, removes socket files, and hands nothing to gRPC afterwards; connections that
  // gRPC has stay. May be called more than once.
  void Close();

  // For a process that ends without Close; does not wait for anything.
  void RemoveSocketFiles();

  ConnectionTable& connections() { return connections_; }

 private:
  explicit Listener(std::size_t max_connections) : connections_(max_connections) {}
  absl::Status OpenUnix(const std::string& address, const SocketAccess& access);
  absl::Status OpenTcp(const std::string& address);

  // The accept thread.
  void Run();
  // Accepts some of those who wait. False: nobody can be accepted for want of resources.
  bool AcceptSome(int listening);
  void Take(int listening, int fd, const sockaddr_storage& peer);
  Acceptor& AcceptorFor(int fd);
  // There are no descriptors: closes the spare one, and the next connection with it. False: there
  // is no spare one.
  bool RefuseOne(int listening);
  void NoteRefused(std::string_view why);

  std::vector<std::string> addresses_;
  std::string beyond_loopback_;
  ConnectionTable connections_;
  std::unique_ptr<Acceptor> acceptor_;
  std::vector<User> users_;
  Knows knows_;
  bool told_of_users_ = false;  // that they are too many
  int stop_ = -1;               // an eventfd, readable from Close on
  int spare_ = -1;  // held so that a connection can be accepted, and refused, without any other
  std::chrono::steady_clock::time_point next_log_;
  std::uint64_t unlogged_ = 0;  // refused since the last log line

  std::mutex close_mutex_;
  std::vector<int> sockets_;  // changed by Open and, without the thread, by Close
  std::thread thread_;
  std::mutex files_mutex_;
  std::vector<SocketFile> files_;
};

}  // namespace tessera
