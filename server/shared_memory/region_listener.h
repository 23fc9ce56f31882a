// The socket where clients register regions of shared memory, and the connections that keep them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
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

// Thread safe, but for destruction. One thread serves all connections and never waits for one of
// them; files are mapped and pinned by the chores.
class RegionListener {
 public:
  // What a client sends with its descriptor.
  static constexpr std::string_view kGreeting = "tessera.v1";

  // Called by the listener's thread.
  struct Rules {
    std::function<bool(uid_t)> admits;  // whether a user's processes may register regions
    std::function<bool(uid_t)> shares;  // whether he has half of what there is at most
    bool sees_all = true;               // as of ToGrpc, of everyone who registers
  };

  // Listens at a path, whose file gets the permissions of access. max_connections: those beyond are
  // closed as they come. The regions and the chores outlive it. UNAVAILABLE / CANNOT_LISTEN
  // {address}.
  static absl::StatusOr<std::unique_ptr<RegionListener>> Open(const std::string& path,
                                                              const SocketAccess& access,
                                                              std::size_t max_connections,
                                                              Rules rules, SharedRegions& regions,
                                                              Chores& chores);
  // Closes, and lets go of all regions.
  ~RegionListener();

  // Takes no more connections and no more regions, which are told DRAINING; those that are there
  // stay.
  void Close();

  // For a process that ends without Close; does not wait for anything.
  void RemoveSocketFile();

  // Absolute.
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

  absl::Status Listen(const SocketAccess& access);
  void Run();
  // False: nobody can be accepted for want of resources.
  bool AcceptSome();
  // What has come on a connection, or its end. False: it is over.
  bool Serve(const std::shared_ptr<Connection>& connection);
  // Sends a client's file to the chores.
  absl::Status Register(const std::shared_ptr<Connection>& connection, uid_t user, Descriptor file);
  void End(Connection& connection);

  const std::string path_;
  const std::size_t max_connections_;
  const Rules rules_;
  SharedRegions& regions_;
  Chores& chores_;
  Descriptor listening_;
  Descriptor wake_;  // an eventfd, readable from Close on, and when the end has come
  std::atomic<bool> closed_{false};
  std::atomic<bool> ending_{false};
  std::vector<std::shared_ptr<Connection>> connections_;  // of the thread
  std::thread thread_;

  std::mutex file_mutex_;
  std::optional<SocketFile> file_;  // until it is removed
};

}  // namespace tessera
