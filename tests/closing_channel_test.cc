// Connections that are made when their channel has gone.
#include "server/closing_channel.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <string>
#include <string_view>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tessera {
namespace {

// A port of the loopback. It refuses connections until Listen.
class Port {
 public:
  Port() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    address_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  }
  ~Port() { close(socket_); }
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  const std::string& address() const { return address_; }
  void Listen() const { EXPECT_EQ(listen(socket_, 16), 0); }
  int Accept() const {
    pollfd coming{socket_, POLLIN, 0};
    EXPECT_EQ(poll(&coming, 1, 30'000), 1) << "nobody connects";
    return accept(socket_, nullptr, nullptr);
  }

 private:
  const int socket_;
  std::string address_;
};

std::shared_ptr<grpc::Channel> Connect(const Port& port) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  std::shared_ptr<grpc::Channel> channel =
      CreateClosingChannel(port.address(), grpc::InsecureChannelCredentials(), arguments);
  channel->GetState(/*try_to_connect=*/true);
  return channel;
}

void Await(grpc::Channel& channel, grpc_connectivity_state wanted) {
  const absl::Time end = absl::Now() + absl::Seconds(30);
  for (;;) {
    const grpc_connectivity_state state = channel.GetState(/*try_to_connect=*/true);
    if (state == wanted) return;
    ASSERT_TRUE(channel.WaitForStateChange(state, absl::ToChronoTime(end))) << state;
  }
}

// An empty frame of settings, by which a client knows that it is connected.
void Greet(int connection) {
  constexpr std::string_view kSettings("\0\0\0\4\0\0\0\0\0", 9);
  send(connection, kSettings.data(), kSettings.size(), MSG_NOSIGNAL);
}

// Whether the other end closes within the time.
bool Ends(int connection, int milliseconds) {
  std::array<char, 4096> bytes;
  pollfd coming{connection, POLLIN, 0};
  while (poll(&coming, 1, milliseconds) == 1) {
    if (recv(connection, bytes.data(), bytes.size(), 0) <= 0) return true;
  }
  return false;
}

TEST(ClosingChannel, EndsAConnectionThatIsMadeAfterwards) {
  const Port port;
  port.Listen();
  std::shared_ptr<grpc::Channel> channel = Connect(port);
  const int connection = port.Accept();
  channel.reset();
  Greet(connection);
  EXPECT_TRUE(Ends(connection, 30'000));
  close(connection);
}

TEST(ClosingChannel, EndsOneThatIsMadeAgain) {
  const Port port;
  std::shared_ptr<grpc::Channel> channel = Connect(port);
  Await(*channel, GRPC_CHANNEL_TRANSIENT_FAILURE);
  port.Listen();
  channel->WaitForConnected(absl::ToChronoTime(absl::Now() + absl::Milliseconds(300)));
  const int connection = port.Accept();
  channel.reset();
  Greet(connection);
  EXPECT_TRUE(Ends(connection, 30'000));
  close(connection);
}

TEST(ClosingChannel, LeavesThoseOfOthers) {
  const Port port;
  port.Listen();
  std::shared_ptr<grpc::Channel> first = Connect(port);
  const int of_first = port.Accept();
  Greet(of_first);
  Await(*first, GRPC_CHANNEL_READY);
  std::shared_ptr<grpc::Channel> second = Connect(port);
  const int of_second = port.Accept();
  Greet(of_second);
  Await(*second, GRPC_CHANNEL_READY);
  first.reset();
  EXPECT_TRUE(Ends(of_first, 30'000));
  EXPECT_FALSE(Ends(of_second, 100));
  EXPECT_EQ(second->GetState(/*try_to_connect=*/false), GRPC_CHANNEL_READY);
  close(of_first);
  close(of_second);
}

}  // namespace
}  // namespace tessera
