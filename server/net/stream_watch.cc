#include "server/net/stream_watch.h"

#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "grpc/grpc.h"
#include "grpc/support/alloc.h"
#include "nlohmann/json.hpp"
#include "server/clock.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

// How long to pause after each check, as a multiple of the CPU time that the check took.
constexpr int kPause = 20;
constexpr absl::Duration kWatchLogInterval = absl::Seconds(1);
// How long a connection may have more calls than the limit.
constexpr absl::Duration kPatience = absl::Milliseconds(500);

// Returns the CPU time of this thread.
absl::Duration OwnTime() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return absl::DurationFromTimespec(time);
}

// Parses what gRPC returns (see its channelz.proto); null if the object is gone.
Json Parse(char* text) {
  const std::unique_ptr<char, void (*)(void*)> owner(text, gpr_free);
  return text == nullptr ? Json() : Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

// Returns a member of an object, or null if there is none or value is not an object.
const Json& Member(const Json& value, const char* key) {
  static const Json none;
  const auto it = value.is_object() ? value.find(key) : value.end();
  return it == value.end() ? none : *it;
}

std::string Text(const Json& object, const char* key) {
  const Json& member = Member(object, key);
  return member.is_string() ? member.get<std::string>() : "";
}

// 64-bit numbers are strings in this JSON, and are left out if they are 0.
std::int64_t Number(const Json& object, const char* key) {
  std::int64_t number = 0;
  return absl::SimpleAtoi(Text(object, key), &number) ? number : 0;
}

// Returns how many calls or streams have begun but not ended.
std::int64_t Open(const Json& data, const char* started, const char* succeeded,
                  const char* failed) {
  return Number(data, started) - Number(data, succeeded) - Number(data, failed);
}

// Returns nullopt if the address does not belong to a TCP connection.
std::optional<Endpoint> EndpointOf(const Json& address) {
  const Json& tcp = Member(address, "tcpip_address");
  const Json& port = Member(tcp, "port");
  Endpoint endpoint;
  if (!port.is_number_integer() ||
      !absl::Base64Unescape(Text(tcp, "ip_address"), &endpoint.address))
    return std::nullopt;
  endpoint.port = port.get<int>();
  return endpoint;
}

}  // namespace

void StreamWatch::Look(absl::Time now, bool forbearing) {
  if (now < next_look_) return;
  forbearing_ = forbearing;
  const absl::Duration begin = OwnTime();
  were_over_ = std::exchange(over_, {});
  const Json servers = Parse(grpc_channelz_get_servers(0));
  for (const Json& server : Member(servers, "server")) {
    const std::int64_t open =
        Open(Member(server, "data"), "callsStarted", "callsSucceeded", "callsFailed");
    // No connection can have more calls than the whole server.
    if (open > limit_) LookAtServer(Number(Member(server, "ref"), "serverId"), now);
  }
  next_look_ = SteadyNow() + kPause * (OwnTime() - begin);
}

void StreamWatch::LookAtServer(std::int64_t server, absl::Time now) {
  std::int64_t next = 0;
  for (;;) {
    const Json page = Parse(grpc_channelz_get_server_sockets(server, next, 0));
    const Json& sockets = Member(page, "socketRef");
    for (const Json& socket : sockets) {
      LookAtConnection(Number(socket, "socketId"), Text(socket, "name"), now);
      next = Number(socket, "socketId") + 1;
    }
    if (sockets.empty() || Member(page, "end") == true) return;
  }
}

void StreamWatch::LookAtConnection(std::int64_t socket, std::string_view name, absl::Time now) {
  const Json answer = Parse(grpc_channelz_get_socket(socket));
  const Json& counted = Member(answer, "socket");
  const std::int64_t open =
      Open(Member(counted, "data"), "streamsStarted", "streamsSucceeded", "streamsFailed");
  if (open <= limit_) return;
  const auto before = were_over_.find(socket);
  const absl::Time since = before == were_over_.end() ? now : before->second;
  over_.emplace(socket, since);
  if (now - since < kPatience && (forbearing_ || open <= 2 * limit_)) return;
  const std::optional<Endpoint> peer = EndpointOf(Member(counted, "remote"));
  const std::optional<Endpoint> here = EndpointOf(Member(counted, "local"));
  if (!peer.has_value() || !here.has_value() || !connections_.End(*peer, *here)) return;
  ++unlogged_;
  if (now < next_log_) return;
  next_log_ = now + kWatchLogInterval;
  spdlog::warn("{} connections were ended because they had more than {} calls: {} had {}",
               std::exchange(unlogged_, 0), limit_, name.substr(name.find(' ') + 1), open);
}

}  // namespace tessera
