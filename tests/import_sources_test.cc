// Channels to other servers: which are kept when their imports have gone, and for how long.
#include "server/import_sources.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/clock.h"

namespace tessera {
namespace {

// A port of the loopback that refuses connections while this lives.
class ClosedPort {
 public:
  ClosedPort() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    source_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  }
  ~ClosedPort() { close(socket_); }
  ClosedPort(const ClosedPort&) = delete;
  ClosedPort& operator=(const ClosedPort&) = delete;

  const std::string& source() const { return source_; }

 private:
  const int socket_;
  std::string source_;
};

std::shared_ptr<grpc::Channel> OrFail(absl::StatusOr<std::shared_ptr<grpc::Channel>> channel) {
  EXPECT_TRUE(channel.ok()) << channel.status();
  return channel.ok() ? *std::move(channel) : nullptr;
}

// Leaves a channel that has tried once, in vain.
void TryOnce(ImportSources& sources, const std::string& source) {
  const std::shared_ptr<grpc::Channel> channel = OrFail(sources.Connect(source));
  grpc_connectivity_state state = channel->GetState(/*try_to_connect=*/true);
  while (state != GRPC_CHANNEL_TRANSIENT_FAILURE) {
    channel->WaitForStateChange(state, absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
    state = channel->GetState(/*try_to_connect=*/true);
  }
}

// Whether the next import from there gets a channel that has tried before.
bool IsKept(ImportSources& sources, const std::string& source) {
  return OrFail(sources.Connect(source))->GetState(/*try_to_connect=*/false) ==
         GRPC_CHANNEL_TRANSIENT_FAILURE;
}

TEST(ImportSources, KeepsAChannelThatStillTriesToConnect) {
  const ClosedPort port;
  Options options;
  ImportSources sources(options);
  TryOnce(sources, port.source());
  sources.CloseUnused(SteadyNow());
  EXPECT_TRUE(IsKept(sources, port.source()));
  sources.CloseUnused(SteadyNow() + absl::Minutes(9));
  EXPECT_TRUE(IsKept(sources, port.source()));
  sources.CloseUnused(SteadyNow() + absl::Minutes(11));
  EXPECT_FALSE(IsKept(sources, port.source()));
}

TEST(ImportSources, EachImportHasAChannelOfItsOwn) {
  const ClosedPort port;
  Options options;
  ImportSources sources(options);
  TryOnce(sources, port.source());
  const std::shared_ptr<grpc::Channel> kept = OrFail(sources.Connect(port.source()));
  const std::shared_ptr<grpc::Channel> other = OrFail(sources.Connect(port.source()));
  EXPECT_NE(kept, other);
  EXPECT_EQ(kept->GetState(/*try_to_connect=*/false), GRPC_CHANNEL_TRANSIENT_FAILURE);
  EXPECT_EQ(other->GetState(/*try_to_connect=*/false), GRPC_CHANNEL_IDLE);
}

TEST(ImportSources, GivesUpTheOldestOfMoreThan64) {
  std::vector<ClosedPort> ports(65);
  Options options;
  ImportSources sources(options);
  for (const ClosedPort& port : ports) TryOnce(sources, port.source());
  EXPECT_FALSE(IsKept(sources, ports.front().source()));
  // Which was looked for by a channel that is kept now, in place of the second.
  EXPECT_TRUE(IsKept(sources, ports.back().source()));
  EXPECT_TRUE(IsKept(sources, ports[32].source()));
}

}  // namespace
}  // namespace tessera
