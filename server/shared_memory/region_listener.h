// The socket where clients register regions of shared memory, and the connections that keep these
// regions registered.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/buffers/shared_region.h"
#include "server/devices/chores.h"
#include "server/net/unix_socket.h"

namespace tessera {

// Thread safe, except for destruction. One thread serves all connections and never waits for any of
// them. Files are mapped and pinned on threads of the chores.
class RegionListener {
 public:
  // The data that a client sends with its descriptor.
  static constexpr std::string_view kGreeting = "tessera.v1";

  // The rules for clients. The listener's thread calls the functions.
  struct Rules {
    std::function<bool(uid_t)> admits;  // whether a user's processes may register regions
    std::function<bool(uid_t)> shares;  // whether a user is limited to half of all regions
    bool sees_all = true;               // as for ToGrpc, for every client
  };

  // Listens at a path. `socket_group` is the group that may connect, as for ListenUnix. Connections
  // above `max_connections` are closed. The regions and the chores must outlive the listener.
  // Returns UNAVAILABLE / CANNOT_LISTEN {address} if it cannot listen.
  static absl::StatusOr<std::unique_ptr<RegionListener>> Open(const std::string& path,
                                                              const std::string& socket_group,
                                                              std::size_t max_connections,
                                                              Rules rules, SharedRegions& regions,
                                                              Chores& chores);
  // Calls Close, closes all connections, and releases all regions.
  ~RegionListener();

  // Accepts no more connections, and answers further registrations with DRAINING; existing
  // connections and regions stay.
  void Close();

  // Removes the socket's file for a process that ends without Close. Does not wait for anything.
  void RemoveSocketFile();

  // The absolute path of the socket.
  const std::string& path() const { return path_; }

 private:
  // A client, from its connection to the end of its region. Its chore may outlive it.
  struct Connection;

  RegionListener(std::string path, std::size_t max_connections, Rules rules, SharedRegions& regions,
                 Chores& chores)
      : path_(std::move(path)),
        max_connections_(max_connections),
        rules_(std::move(rules)),
        regions_(regions),
        chores_(chores) {}

  absl::Status Listen(const std::string& socket_group);
  void Run();
  // Accepts up to `most` of the waiting connections. Returns false if there are too few resources
  // to accept a connection.
  bool AcceptSome(int most);
  // Handles a packet or the end of a connection. Returns false if the connection is over.
  bool Serve(const std::shared_ptr<Connection>& connection);
  // Submits a chore that maps a client's file.
  absl::Status Register(const std::shared_ptr<Connection>& connection, uid_t user, Descriptor file);
  void End(Connection& connection);

  const std::string path_;
  const std::size_t max_connections_;
  const Rules rules_;
  SharedRegions& regions_;
  Chores& chores_;
  Descriptor listening_;
  Descriptor wake_;  // an eventfd, which Close makes readable
  std::atomic<bool> closed_{false};
  std::atomic<bool> ending_{false};
  std::vector<std::shared_ptr<Connection>> connections_;  // used only by the thread while it runs
  std::thread thread_;

  std::mutex file_mutex_;
  std::optional<SocketFile> file_;  // empty once it is removed
};

}  // namespace tessera
