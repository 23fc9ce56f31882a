// Which names belong to this server if several servers share them.
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
  // file: in the format of Ring::Parse. server: the name of this server's line. INVALID_ARGUMENT /
  // BAD_RING {file}.
  static absl::StatusOr<std::unique_ptr<Home>> Open(const std::string& file,
                                                    const std::string& server);

  // FAILED_PRECONDITION / WRONG_HOST {name, owner, address} for a name whose home is another
  // server. Names that begin with "unnamed/" are at home on every server: clients use them for
  // intermediate results whose operands are here.
  absl::Status Check(std::string_view name) const;

  // Reads the file again if it has changed, or in any case if asked, and logs the result. If the
  // file cannot be used, the ring in use stays.
  void Reload(bool asked);
  // Whether the file could not be used when it was last read.
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
