// The server's listening sockets. The server accepts connections itself for two reasons: to limit
// their number, which gRPC 1.51 cannot do, and to keep listening when it runs out of descriptors.
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

// Raises the process's limit on descriptors as far as possible, and returns it.
std::size_t RaiseDescriptorLimit();

// Sockets that listen on one "host:port". The host may be a name, an IPv4 address, or an IPv6
// address in brackets; port 0 means any free port. If the name has several addresses, the sockets
// listen on all of them that this machine has. The sockets are non-blocking and belong to the
// caller.
struct TcpSockets {
  std::vector<int> sockets;      // at least one
  std::string address;           // with the port that was chosen for port 0
  bool beyond_loopback = false;  // whether other hosts can connect
};
// [::] means every IPv6 and IPv4 address, or every IPv4 address if the kernel has no IPv6. Returns
// UNAVAILABLE / CANNOT_LISTEN {address} if it cannot listen.
absl::StatusOr<TcpSockets> ListenTcp(const std::string& address);

// Returns the source that a connection counts against. For TCP, it consists of the bytes of the
// IPv4 address, or of the /64 network of the IPv6 address. If fd is an accepted unix socket, the
// source is the user. Returns "" for this host itself, that is, for loopback addresses and for the
// server's own user.
std::string SourceOf(const sockaddr_storage& peer, int fd = -1);

// One end of a TCP connection.
struct Endpoint {
  std::string address;  // 4 or 16 bytes; 4 for an IPv4 address that is mapped to IPv6
  int port = 0;

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

// The open connections and their sources. gRPC does not report when a connection closes. The table
// therefore identifies a connection by its descriptor and by its socket's cookie, which the kernel
// never reuses, and looks for closed connections when it needs space. Thread safe.
class ConnectionTable {
 public:
  // `limit` is the maximum number of connections, at least 1. If it is 16 or more, one source may
  // have at most half of them.
  explicit ConnectionTable(std::size_t limit);

  enum class Answer { kAdmitted, kFull, kSourceFull };
  // Adds the socket fd, which may be closed at any time afterwards, unless a limit is reached.
  // `source` comes from SourceOf. The empty source may have all connections.
  Answer Admit(int fd, const std::string& source);
  void CountRefused();
  // Ends the TCP connection between the two endpoints. Returns false if there is none, or if it has
  // already been ended.
  bool End(const Endpoint& peer, const Endpoint& here);

  std::size_t limit() const { return limit_; }
  std::size_t source_limit() const { return source_limit_; }
  std::size_t open();             // may be out of date by 10 ms
  std::uint64_t refused() const;  // since the start
  std::uint64_t ended() const;    // connections ended by End since the start

 private:
  struct Connection {
    int fd;
    std::uint64_t cookie;
    std::string source;
    bool ended = false;  // whether End has ended it
  };
  // Removes closed connections, unless that has just been done.
  void Sweep();
  // Whether the source may have another connection. The caller of Sweep and Look holds the mutex.
  Answer Look(const std::string& source) const;

  const std::size_t limit_;
  const std::size_t source_limit_;
  mutable std::mutex mutex_;
  std::vector<Connection> open_;
  std::unordered_map<std::string, std::size_t> of_source_;  // connections by source, except ""
  std::chrono::steady_clock::time_point next_sweep_;
  std::uint64_t refused_ = 0;
  std::uint64_t ended_ = 0;
};

// Thread safe, except for construction, Start and destruction.
class Listener {
 public:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

  // Listens on all addresses. An address is "host:port", as for ListenTcp, or "unix:/path" or
  // "unix:///path", to which the users of socket_group may connect, as for ListenUnix. Clients that
  // connect wait until Start. `max_connections` is at least 1; the limit is lower if the process
  // may not have that many descriptors. Returns UNAVAILABLE / CANNOT_LISTEN {address} if it cannot
  // listen on an address.
  static absl::StatusOr<std::unique_ptr<Listener>> Open(const std::vector<std::string>& addresses,
                                                        std::size_t max_connections,
                                                        const std::string& socket_group = {});
  ~Listener();  // calls Close

  // The addresses that it listens on, in the order of Open, with the port that was chosen for port
  // 0.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // The first address to which other hosts can connect. It is empty if only this host can connect.
  const std::string& beyond_loopback() const { return beyond_loopback_; }

  // Whether clients can connect as users of this host.
  bool has_unix() const { return !files_.empty(); }

  // An acceptor for the connections of one user, and the mark that it gives them.
  struct User {
    std::unique_ptr<UserMark> mark;
    std::unique_ptr<Acceptor> acceptor;
  };
  using Knows = std::function<bool(uid_t)>;
  // Starts to serve; called once. Connections are handed to acceptors whose gRPC server has
  // started. A connection through a unix socket goes to the entry of `users` that has its user's
  // mark, or otherwise to a free entry, which then gets that mark. All other connections go to
  // `acceptor`, including those of unknown users and of users for which no entry is left. `knows`,
  // which the listener's thread calls, says whether a user is known. `knows` must not be empty if
  // there are users.
  void Start(std::unique_ptr<Acceptor> acceptor, std::vector<User> users = {}, Knows knows = {});

  // Stops listening, removes socket files, and hands no more connections to gRPC. Connections that
  // gRPC already has stay open. May be called more than once.
  void Close();

  // Removes the socket files of a process that ends without Close. Does not wait for anything.
  void RemoveSocketFiles();

  ConnectionTable& connections() { return connections_; }

 private:
  explicit Listener(std::size_t max_connections) : connections_(max_connections) {}
  absl::Status OpenUnix(const std::string& address, const std::string& socket_group);
  absl::Status OpenTcp(const std::string& address);

  // Runs on the thread that accepts connections.
  void Run();
  // Accepts some of the waiting connections. Returns false if there are too few resources to accept
  // any.
  bool AcceptSome(int listening);
  void Take(int listening, int fd, const sockaddr_storage& peer);
  Acceptor& AcceptorFor(int fd);
  // Called when no descriptors are left. Closes the spare descriptor, accepts the next connection
  // in its place, and closes that connection. Returns false if no new spare descriptor can be
  // opened.
  bool RefuseOne(int listening);
  void NoteRefused(std::string_view why);

  std::vector<std::string> addresses_;
  std::string beyond_loopback_;
  ConnectionTable connections_;
  std::unique_ptr<Acceptor> acceptor_;
  std::vector<User> users_;
  Knows knows_;
  bool told_of_users_ = false;  // whether the warning about too many users was logged
  int stop_ = -1;               // an eventfd, which Close makes readable
  int spare_ = -1;  // kept so that a connection can be refused when there are no other descriptors
  std::chrono::steady_clock::time_point next_log_;
  std::uint64_t unlogged_ = 0;  // connections refused since the last log line

  std::mutex close_mutex_;
  std::vector<int> sockets_;  // changed by Open, and by Close once the thread has ended
  std::thread thread_;
  std::mutex files_mutex_;
  std::vector<SocketFile> files_;
};

}  // namespace tessera
