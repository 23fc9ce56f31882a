// A client's pools of connections, one for each server, and the choice among them. Internal to the
// library.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "client/rpc/methods.h"

namespace tessera {

// A channel with its own connection, and the stubs that call through it.
struct PooledChannel {
  PooledChannel(std::size_t number, std::shared_ptr<grpc::Channel> connection)
      : server(number),
        channel(std::move(connection)),
        stubs(v1::BufferService::NewStub(channel), v1::ComputeService::NewStub(channel),
              v1::SharedMemoryService::NewStub(channel),
              grpc::health::v1::Health::NewStub(channel)) {}

  template <class Service>
  typename Service::StubInterface& stub() const {
    return *std::get<std::unique_ptr<typename Service::StubInterface>>(stubs);
  }

  const std::size_t server;
  const std::shared_ptr<grpc::Channel> channel;
  const std::tuple<std::unique_ptr<v1::BufferService::StubInterface>,
                   std::unique_ptr<v1::ComputeService::StubInterface>,
                   std::unique_ptr<v1::SharedMemoryService::StubInterface>,
                   std::unique_ptr<grpc::health::v1::Health::StubInterface>>
      stubs;
  std::atomic<int> calls{0};  // the number of calls under way
};

// One call under way on a channel.
class Lease {
 public:
  explicit Lease(PooledChannel* channel) : channel_(channel) { ++channel_->calls; }
  PooledChannel& operator*() const { return *channel_; }
  PooledChannel* operator->() const { return channel_.get(); }

 private:
  struct End {
    void operator()(PooledChannel* channel) const { --channel->calls; }
  };
  std::unique_ptr<PooledChannel, End> channel_;
};

// Where a call may go, and where it has gone so far. Servers are numbered in the order of the list.
struct Route {
  std::optional<std::size_t> only = {};     // the only server allowed, if any
  std::optional<std::size_t> channel = {};  // the only one of its channels allowed, if any
  // The server at which the last attempt failed. It is tried again only as a last resort.
  std::optional<std::size_t> failed = {};
  std::size_t server = 0;  // the server of the last attempt
  int attempts = 0;
};

// Thread safe. A client stays with one server until that server fails, because its buffers are
// there.
class Channels {
 public:
  using Make = std::function<std::shared_ptr<grpc::Channel>(const std::string& address)>;

  // `addresses` are separated by commas. `connections` is the maximum number of connections over
  // which calls to one server are spread, at least 1.
  Channels(const std::string& addresses, int connections, Make make);

  // Returns the connected channel with the fewest calls under way, or nothing if there is none. If
  // all are busy, another connection is opened and is used once it is ready. `last_resort` says
  // whether the server that failed may be chosen as well.
  std::optional<Lease> Pick(const Route& route, bool last_resort);
  // Returns the channel to wait for when Pick returns none. Successive values of `turn` cycle
  // through the servers that the route allows.
  std::shared_ptr<grpc::Channel> Awaited(const Route& route, std::size_t turn);
  // Whether a call of this route has more than one server to wait for.
  bool HasChoice(const Route& route) const { return !route.only && servers_.size() > 1; }
  // Reports a failed attempt at a server. For a second, new calls prefer other servers.
  void Failed(std::size_t server);

  // Returns channel number i of a server, which is made on first use. Transfers use as many
  // channels as they have streams.
  PooledChannel& channel(std::size_t server, std::size_t i);
  std::size_t servers() const { return servers_.size(); }
  // Returns the address of a route's only server, or all addresses, to be shown in messages.
  std::string Describe(const Route& route) const;

  // Records when a server created a buffer, by the server's clock. Only the first call for a server
  // counts.
  void SawBuffer(std::size_t server, absl::Time created);
  // Returns the time that was recorded for a server, or nullopt if there is none yet.
  std::optional<absl::Time> first_buffer(std::size_t server) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Server {
    std::string address;
    std::vector<std::unique_ptr<PooledChannel>> channels;  // guarded by mutex_
    Clock::time_point avoid_until{};                       // guarded by mutex_
    std::atomic<std::int64_t> first_buffer{0};             // microseconds since 1970; 0 if none yet
  };

  PooledChannel& Open(std::size_t server, std::size_t i);  // mutex_ is held
  // Returns the channel of a server that a call of this route uses, or nullptr if none is ready.
  PooledChannel* Ready(const Route& route, std::size_t server);  // mutex_ is held
  bool Allowed(const Route& route, std::size_t server) const {
    return !route.only || *route.only == server;
  }

  const std::size_t connections_;
  const Make make_;
  std::vector<std::unique_ptr<Server>> servers_;
  std::atomic<std::size_t> current_{0};
  std::mutex mutex_;
};

}  // namespace tessera
