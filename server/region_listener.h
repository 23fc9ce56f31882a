// The socket where clients register regions of shared memory, and the connections that keep them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/chores.h"
#include "server/shared_region.h"

namespace tessera {

// Thread safe, but for destruction. One thread serves all connections and never waits for one of
// them; files are mapped and pinned by the chores.
class RegionListener {
 public:
  // What a client sends with its descriptor.
  static constexpr std::string_view kGreeting = "tessera.v1";

  // Listens at a path, which only this process's user may connect to. max_connections: those beyond
  // are closed as they come. The regions and the chores outlive it. UNAVAILABLE / CANNOT_LISTEN
  // {address}.
  static absl::StatusOr<std::unique_ptr<RegionListener>> Open(const std::string& path,
                                                              std::size_t max_connections,
                                                              SharedRegions& regions,
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

  RegionListener(std::string path, std::size_t max_connections, SharedRegions& regions,
                 Chores& chores)
      : path_(std::move(path)),
        max_connections_(max_connections),
        regions_(regions),
        chores_(chores) {}

  absl::Status Listen();
  void Run();
  // False: nobody can be accepted for want of resources.
  bool AcceptSome();
  // What has come on a connection, or its end. False: it is over.
  bool Serve(const std::shared_ptr<Connection>& connection);
  // Sends a client's file to the chores.
  absl::Status Register(const std::shared_ptr<Connection>& connection, Descriptor file);
  void End(Connection& connection);

  const std::string path_;
  const std::size_t max_connections_;
  SharedRegions& regions_;
  Chores& chores_;
  Descriptor listening_;
  Descriptor wake_;  // an eventfd, readable from Close on, and when the end has come
  std::atomic<bool> closed_{false};
  std::atomic<bool> ending_{false};
  std::vector<std::shared_ptr<Connection>> connections_;  // of the thread
  std::thread thread_;

  std::mutex file_mutex_;
  // The socket's file as it was made: another one at the same path is not ours to remove.
  bool has_file_ = false;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

}  // namespace tessera
