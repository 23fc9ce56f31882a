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

// Raises the process's limit of descriptors as far as possible, and returns it.
std::size_t RaiseDescriptorLimit();

// Sockets that listen on one "host:port". The host may be a name, an IPv4 address, or an IPv6
// address in brackets; port 0 takes a free port. For a name with several addresses, they listen on
// all that this machine has. They do not block, and belong to the caller.
struct TcpSockets {
  std::vector<int> sockets;      // at least one
  std::string address;           // with the port that was chosen for port 0
  bool beyond_loopback = false;  // whether other hosts can connect
};
// [::] means every IPv6 and IPv4 address, or every IPv4 address if the kernel has no IPv6.
// UNAVAILABLE / CANNOT_LISTEN {address}.
absl::StatusOr<TcpSockets> ListenTcp(const std::string& address);

// Returns what a connection counts against: an IPv4 address, or the network (/64) of an IPv6
// address, as bytes, or, if fd is an accepted unix socket, the user. Empty for this host itself:
// loopback addresses, and the server's own user.
std::string SourceOf(const sockaddr_storage& peer, int fd = -1);

// One end of a TCP connection.
struct Endpoint {
  std::string address;  // 4 or 16 bytes; 4 for an IPv4 address that is mapped to IPv6
  int port = 0;

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

// The open connections and their sources. gRPC does not report that a connection closes. A
// connection is identified by its descriptor and its socket's cookie, which the kernel never
// reuses; closed connections are noticed when a place is needed. Thread safe.
class ConnectionTable {
 public:
  // limit: at least 1. From 16 on, one source may have at most half of the places.
  explicit ConnectionTable(std::size_t limit);

  enum class Answer { kAdmitted, kFull, kSourceFull };
  // Takes a place for the socket fd, which may be closed at any time afterwards. source: from
  // SourceOf; the empty source may have all places.
  Answer Admit(int fd, const std::string& source);
  void CountRefused();
  // Ends the TCP connection between these two. Returns false if there is none that has not been
  // ended.
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
  // Whether there is a place. The caller of both functions holds the mutex.
  Answer Look(const std::string& source) const;

  const std::size_t limit_;
  const std::size_t source_limit_;
  mutable std::mutex mutex_;
  std::vector<Connection> open_;
  std::unordered_map<std::string, std::size_t> of_source_;  // connections by source, without ""
  std::chrono::steady_clock::time_point next_sweep_;
  std::uint64_t refused_ = 0;
  std::uint64_t ended_ = 0;
};

// Thread safe, except for construction, Start and destruction.
class Listener {
 public:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

  // Listens on every address: "host:port" as for ListenTcp; "unix:/path" or "unix:///path", whose
  // files get the permissions of access. Clients that connect wait until Start. max_connections: at
  // least 1; the limit is lower if the process may not have that many descriptors. UNAVAILABLE /
  // CANNOT_LISTEN {address}.
  static absl::StatusOr<std::unique_ptr<Listener>> Open(const std::vector<std::string>& addresses,
                                                        std::size_t max_connections,
                                                        const SocketAccess& access = {});
  ~Listener();  // closes

  // The addresses that it listens on, in the order of Open, with the port that was chosen for port
  // 0.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // The first address to which other hosts can connect; empty if only this host can.
  const std::string& beyond_loopback() const { return beyond_loopback_; }

  // Whether clients can connect as users of this host.
  bool has_unix() const { return !files_.empty(); }

  // An acceptor for the connections of one user, and the mark that it gives them.
  struct User {
    std::unique_ptr<UserMark> mark;
    std::unique_ptr<Acceptor> acceptor;
  };
  using Knows = std::function<bool(uid_t)>;
  // Starts to serve, once, by handing connections to acceptors whose gRPC server has started. A
  // connection by a unix socket goes to the entry of users that has the mark of its user, or to a
  // free entry, which then gets that mark. Other connections go to acceptor, as do those of users
  // who are unknown or for whom no entry is left. knows: called by the listener's thread; not empty
  // if there are users.
  void Start(std::unique_ptr<Acceptor> acceptor, std::vector<User> users = {}, Knows knows = {});

  // Stops listening, removes socket files, and hands no more connections to gRPC, which keeps those
  // that it has. May be called more than once.
  void Close();

  // For a process that ends without Close. Does not wait for anything.
  void RemoveSocketFiles();

  ConnectionTable& connections() { return connections_; }

 private:
  explicit Listener(std::size_t max_connections) : connections_(max_connections) {}
  absl::Status OpenUnix(const std::string& address, const SocketAccess& access);
  absl::Status OpenTcp(const std::string& address);

  // The accept thread.
  void Run();
  // Accepts some of the waiting connections. Returns false if there are too few resources to accept
  // any.
  bool AcceptSome(int listening);
  void Take(int listening, int fd, const sockaddr_storage& peer);
  Acceptor& AcceptorFor(int fd);
  // Called when there are no descriptors: closes the spare one, accepts the next connection with
  // it, and closes that. Returns false if no new spare one can be opened.
  bool RefuseOne(int listening);
  void NoteRefused(std::string_view why);

  std::vector<std::string> addresses_;
  std::string beyond_loopback_;
  ConnectionTable connections_;
  std::unique_ptr<Acceptor> acceptor_;
  std::vector<User> users_;
  Knows knows_;
  bool told_of_users_ = false;  // whether the log has reported that they are too many
  int stop_ = -1;               // an eventfd, which Close makes readable
  int spare_ = -1;  // kept so that a connection can be refused when there are no other descriptors
  std::chrono::steady_clock::time_point next_log_;
  std::uint64_t unlogged_ = 0;  // refused since the last log line

  std::mutex close_mutex_;
  std::vector<int> sockets_;  // changed by Open, and by Close once the thread has ended
  std::thread thread_;
  std::mutex files_mutex_;
  std::vector<SocketFile> files_;
};

}  // namespace tessera
