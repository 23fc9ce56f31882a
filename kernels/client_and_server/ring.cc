#include "kernels/client_and_server/ring.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/word_lines.h"

namespace tessera {
namespace {

std::uint64_t Fnv1a(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

std::uint64_t Mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

absl::Status Bad(std::size_t line, std::string_view why) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RING",
                   absl::StrCat("line ", line, ": ", Absl(why)));
}

}  // namespace

std::string_view RouteOf(std::string_view name) { return name.substr(0, name.rfind('/')); }

std::uint64_t RouteWeight(std::string_view server, std::string_view route) {
  return Mix(Fnv1a(server) ^ Mix(Fnv1a(route)));
}

absl::StatusOr<Ring> Ring::Parse(std::string_view text) {
  Ring ring;
  for (const auto& [number, words] : WordLines(text)) {
    if (words.size() != 2)
      return Bad(number, "the line must have the name and the address of a server");
    if (!IsPlainName(words[0]))
      return Bad(number, "a server's name must have 1 to 64 characters of [a-zA-Z0-9._-]");
    Server server{std::string(words[0]), std::string(words[1])};
    if (ring.Find(server.name) != nullptr) return Bad(number, "the name is already in use");
    ring.servers_.push_back(std::move(server));
  }
  if (ring.servers_.empty()) {
    const auto breaks = std::count(text.begin(), text.end(), '\n');
    return Bad(static_cast<std::size_t>(breaks) + 1, "there is no server");
  }
  std::sort(ring.servers_.begin(), ring.servers_.end(),
            [](const Server& a, const Server& b) { return a.name < b.name; });
  return ring;
}

const Ring::Server& Ring::HomeOf(std::string_view name) const {
  const std::string_view route = RouteOf(name);
  const Server* home = &servers_.front();
  std::uint64_t most = RouteWeight(home->name, route);
  for (const Server& server : servers_) {
    const std::uint64_t weight = RouteWeight(server.name, route);
    if (weight > most) {
      most = weight;
      home = &server;
    }
  }
  return *home;
}

const Ring::Server* Ring::Find(std::string_view server) const {
  const auto found = std::find_if(servers_.begin(), servers_.end(),
                                  [&](const Server& one) { return one.name == server; });
  return found == servers_.end() ? nullptr : &*found;
}

}  // namespace tessera
