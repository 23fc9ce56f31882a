// Decides which names belong to this server when several servers share them.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/client_and_server/ring.h"
#include "server/net/watched_file.h"

namespace tessera {

// Thread safe, except for Reload, which only one thread calls.
class Home {
 public:
  // Reads a file in the format of Ring::Parse. `server` is the name in this server's line. Returns
  // INVALID_ARGUMENT / BAD_RING {file} if the file cannot be used.
  static absl::StatusOr<std::unique_ptr<Home>> Open(const std::string& file,
                                                    const std::string& server);

  // Returns FAILED_PRECONDITION / WRONG_HOST {name, owner, address} for a name whose home is
  // another server. Names that begin with "unnamed/" belong to every server, because clients use
  // them for intermediate results, which are stored on the server of their operands.
  absl::Status Check(std::string_view name) const;

  // Reads the file again if it has changed or if `asked` is true, and logs the result. If the file
  // cannot be used, the current ring stays in effect.
  void Reload(bool asked);
  // Whether the last attempt to use the file has failed.
  bool stale() const { return stale_.load(std::memory_order_relaxed); }

 private:
  Home(std::string file, std::string server) : file_(std::move(file)), server_(std::move(server)) {}
  absl::Status Load();

  const std::string file_;
  const std::string server_;
  FileStamp stamp_;
  std::atomic<bool> stale_{false};
  mutable std::mutex mutex_;
  std::shared_ptr<const Ring> ring_;
};

}  // namespace tessera
