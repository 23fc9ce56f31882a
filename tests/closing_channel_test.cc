// Connections that are established after their channel has been destroyed.
#include "server/net/closing_channel.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tessera {
namespace {

// Polls as the threads of a server do.
class Poller {
 public:
  Poller()
      : thread_([this] {
          void* tag = nullptr;
          bool ok = false;
          while (queue_.Next(&tag, &ok)) {
          }
        }) {}
  ~Poller() {
    queue_.Shutdown();
    thread_.join();
  }
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

 private:
  grpc::CompletionQueue queue_;
  std::thread thread_;
};

// A loopback port. It refuses connections until Listen.
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
    EXPECT_EQ(poll(&coming, 1, 30'000), 1) << "no client connects";
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

// Sends an empty SETTINGS frame, from which a client learns that it is connected.
void Greet(int connection) {
  constexpr std::string_view kSettings("\0\0\0\4\0\0\0\0\0", 9);
  send(connection, kSettings.data(), kSettings.size(), MSG_NOSIGNAL);
}

// Returns whether the other end closes the connection within the time, and closes this end.
bool Ends(int connection, int milliseconds = 30'000) {
  std::array<char, 4096> bytes;
  pollfd coming{connection, POLLIN, 0};
  bool ended = false;
  while (!ended && poll(&coming, 1, milliseconds) == 1)
    ended = recv(connection, bytes.data(), bytes.size(), 0) <= 0;
  close(connection);
  return ended;
}

class ClosingChannel : public testing::Test {
 protected:
  const Poller poller_;
  const Port port_;
};

TEST_F(ClosingChannel, EndsOneThatIsMadeAgain) {
  std::shared_ptr<grpc::Channel> channel = Connect(port_);
  Await(*channel, GRPC_CHANNEL_TRANSIENT_FAILURE);
  port_.Listen();
  channel->WaitForConnected(absl::ToChronoTime(absl::Now() + absl::Milliseconds(300)));
  const int connection = port_.Accept();
  channel.reset();
  Greet(connection);
  EXPECT_TRUE(Ends(connection));
}

int Descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

// The channel ends just before, while or just after the other end greets.
TEST_F(ClosingChannel, EndsConnectionsThatAreMadeMeanwhile) {
  port_.Listen();
  std::mt19937 random(1);
  const auto sleep = [&](int most) {
    return absl::Microseconds(random() % static_cast<unsigned>(1000 * most));
  };
  Connect(port_).reset();
  close(port_.Accept());
  const int before = Descriptors();
  for (int i = 0; i < 600; ++i) {
    std::shared_ptr<grpc::Channel> channel = Connect(port_);
    const int connection = port_.Accept();
    const absl::Duration greets = sleep(6), ends = sleep(8);
    std::thread other([&] {
      absl::SleepFor(greets);
      Greet(connection);
    });
    absl::SleepFor(ends);
    channel.reset();
    other.join();
    close(connection);
  }
  const absl::Time end = absl::Now() + absl::Seconds(30);
  while (Descriptors() > before && absl::Now() < end) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_LE(Descriptors(), before);
}

#ifndef __SANITIZE_ADDRESS__  // In that build, UBSan opens a pipe to inspect objects.
// The connections end immediately. A channel that cannot end its sockets waits for two seconds.
TEST_F(ClosingChannel, EndsConnectionsWhereNoDescriptorIsLeft) {
  port_.Listen();
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit few = before;
  few.rlim_cur = 256;
  bool ended = false;
  for (int i = 0; i < 5 && !ended; ++i) {  // Something else may take a busy machine for as long.
    std::shared_ptr<grpc::Channel> channel = Connect(port_);
    const int connection = port_.Accept();
    setrlimit(RLIMIT_NOFILE, &few);
    std::vector<int> taken;
    for (int one = 0; (one = dup(connection)) >= 0;) taken.push_back(one);
    std::thread ends([&] { channel.reset(); });
    ended = Ends(connection, 1900);
    for (const int one : taken) close(one);
    setrlimit(RLIMIT_NOFILE, &before);
    ends.join();
  }
  EXPECT_TRUE(ended);
}
#endif

TEST_F(ClosingChannel, LeavesThoseOfOthers) {
  port_.Listen();
  std::shared_ptr<grpc::Channel> channels[2];
  int connections[2];
  for (int i = 0; i < 2; ++i) {
    channels[i] = Connect(port_);
    connections[i] = port_.Accept();
    Greet(connections[i]);
    Await(*channels[i], GRPC_CHANNEL_READY);
  }
  channels[0].reset();
  EXPECT_TRUE(Ends(connections[0]));
  EXPECT_EQ(channels[1]->GetState(/*try_to_connect=*/false), GRPC_CHANNEL_READY);
  EXPECT_FALSE(Ends(connections[1], 100));
}

}  // namespace
}  // namespace tessera
