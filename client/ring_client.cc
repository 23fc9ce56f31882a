#include "client/ring_client.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/rpc/text_file.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

// Returns a moved-from client, which For and Of return once the ring client has been moved from.
Client& MovedFromClient() {
  static Client& moved_from = *new Client();
  [[maybe_unused]] static Client& owner = *new Client(std::move(moved_from));
  return moved_from;
}

}  // namespace

RingClient::RingClient(Ring ring, const ClientOptions& options) : ring_(std::move(ring)) {
  for (const Ring::Server& server : ring_.servers()) {
    ClientOptions own = options;
    own.server = server.address;
    clients_.emplace(server.name, std::make_unique<Client>(own));
  }
}

absl::StatusOr<RingClient> RingClient::Read(const std::string& file, const ClientOptions& options) {
  constexpr std::size_t kLargestRing = 1;  // MiB
  const absl::StatusOr<std::string> text = ReadTextFile(file, kLargestRing);
  if (!text.ok()) {
    return MakeError(absl::StatusCode::kNotFound, "BAD_RING",
                     absl::StrCat(file, " ", text.status().message()));
  }
  absl::StatusOr<Ring> ring = Ring::Parse(*text);
  if (!ring.ok()) return ring.status();
  return RingClient(*std::move(ring), options);
}

Client& RingClient::For(std::string_view buffer) const {
  return ring_.servers().empty() ? MovedFromClient() : Of(ring_.HomeOf(buffer));
}

Client& RingClient::Of(const Ring::Server& server) const {
  const auto found = clients_.find(server.name);
  return found == clients_.end() ? MovedFromClient() : *found->second;
}

}  // namespace tessera
