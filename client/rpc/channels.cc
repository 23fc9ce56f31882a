#include "client/rpc/channels.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace tessera {
namespace {

// How long new calls prefer other servers to one that failed. Draining or restarting a server takes
// about this long.
constexpr std::chrono::seconds kAvoid{1};

}  // namespace

Channels::Channels(const std::string& addresses, int connections, Make make)
    : connections_(static_cast<std::size_t>(std::max(connections, 1))), make_(std::move(make)) {
  for (const std::string& address :
       std::vector<std::string>(absl::StrSplit(addresses, ',', absl::SkipWhitespace()))) {
    servers_.push_back(std::make_unique<Server>());
    servers_.back()->address = std::string(absl::StripAsciiWhitespace(address));
  }
  if (servers_.empty()) servers_.push_back(std::make_unique<Server>());
}

PooledChannel& Channels::Open(std::size_t server, std::size_t i) {
  auto& channels = servers_[server]->channels;
  while (channels.size() <= i) {
    channels.push_back(std::make_unique<PooledChannel>(server, make_(servers_[server]->address)));
  }
  return *channels[i];
}

PooledChannel& Channels::channel(std::size_t server, std::size_t i) {
  const std::lock_guard lock(mutex_);
  return Open(server, i);
}

PooledChannel* Channels::Ready(const Route& route, std::size_t server) {
  if (route.channel) {
    PooledChannel& only = Open(server, *route.channel);
    return only.channel->GetState(false) == GRPC_CHANNEL_READY ? &only : nullptr;
  }
  PooledChannel* best = nullptr;
  bool pending = false;
  const std::size_t open = std::min(servers_[server]->channels.size(), connections_);
  for (std::size_t i = 0; i < open; ++i) {
    PooledChannel& channel = *servers_[server]->channels[i];
    if (best != nullptr && channel.calls >= best->calls) continue;
    if (channel.channel->GetState(false) == GRPC_CHANNEL_READY) {
      best = &channel;
    } else {
      channel.channel->GetState(true);
      pending = true;
    }
    if (best != nullptr && best->calls == 0) return best;
  }
  if (!pending && open < connections_) Open(server, open).channel->GetState(true);
  return best;
}

std::optional<Lease> Channels::Pick(const Route& route, bool last_resort) {
  const std::lock_guard lock(mutex_);
  const bool choice = HasChoice(route);
  const Clock::time_point now = choice ? Clock::now() : Clock::time_point{};
  PooledChannel* second_choice = nullptr;
  for (std::size_t k = 0; k < servers_.size(); ++k) {
    const std::size_t server = (current_ + k) % servers_.size();
    if (!Allowed(route, server)) continue;
    if (choice && route.failed == server && !last_resort) continue;
    PooledChannel* const channel = Ready(route, server);
    if (channel == nullptr) continue;
    if (choice && (route.failed == server || now < servers_[server]->avoid_until)) {
      if (second_choice == nullptr) second_choice = channel;
      continue;
    }
    if (!route.only) current_ = server;
    return Lease(channel);
  }
  if (second_choice == nullptr) return std::nullopt;
  return Lease(second_choice);
}

std::shared_ptr<grpc::Channel> Channels::Awaited(const Route& route, std::size_t turn) {
  const std::size_t server = route.only.value_or((current_ + turn) % servers_.size());
  return channel(server, route.channel.value_or(0)).channel;
}

void Channels::Failed(std::size_t server) {
  if (servers_.size() == 1) return;
  const std::lock_guard lock(mutex_);
  servers_[server]->avoid_until = Clock::now() + kAvoid;
}

std::string Channels::Describe(const Route& route) const {
  if (route.only) return servers_[*route.only]->address;
  return absl::StrJoin(servers_, ",", [](std::string* out, const std::unique_ptr<Server>& server) {
    *out += server->address;
  });
}

void Channels::SawBuffer(std::size_t server, absl::Time created) {
  std::atomic<std::int64_t>& first = servers_[server]->first_buffer;
  std::int64_t none = 0;
  if (first == none) first.compare_exchange_strong(none, absl::ToUnixMicros(created));
}

std::optional<absl::Time> Channels::first_buffer(std::size_t server) const {
  const std::int64_t micros = servers_[server]->first_buffer;
  if (micros == 0) return std::nullopt;
  return absl::FromUnixMicros(micros);
}

}  // namespace tessera
