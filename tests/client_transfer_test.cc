// The client library with connections that break on demand, and servers that are restarted.
#include "client/client.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/base/error.h"
#include "server/net/listener.h"
#include "tests/client_fixture.h"
#include "tests/quiet.h"

namespace tessera {
namespace {

TEST(Reconnecting, WaitsForAServerThatStartsLater) {
  tessera::Options options = TestOptions();
  const std::string address = absl::StrCat("127.0.0.1:", FreePort());
  ClientOptions impatient = FastOptions(address);
  impatient.connect_timeout = absl::Milliseconds(200);
  Client client(impatient);
  const absl::Status refused = client.GetServerInfo().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrorReason(refused), "UNREACHABLE");
  EXPECT_EQ(ErrorMetadata(refused)["server"], address);

  const auto none_yet = ListenTcp(address);
  ASSERT_TRUE(none_yet.ok()) << none_yet.status();
  Client patient(FastOptions(address));
  std::thread caller([&] { EXPECT_TRUE(patient.GetServerInfo().ok()); });
  pollfd attempt{none_yet->sockets[0], POLLIN, 0};
  EXPECT_EQ(::poll(&attempt, 1, 20'000), 1) << "the call has begun";
  for (const int socket : none_yet->sockets) ::close(socket);
  options.listen = {address};
  TestServer second(options);
  caller.join();
}

// The new server's versions continue from the versions of the previous server.
TEST(ServerWithVersions, ADownloadIsNotMixedOverARestart) {
  tessera::Options options = TestOptions();
  options.listen = {absl::StrCat("127.0.0.1:", FreePort())};
  options.drain_timeout = absl::Milliseconds(100);
  auto server = std::make_unique<TestServer>(options);
  const std::string data = Pattern(64 << 20);  // More than the connection can buffer.
  const auto upload = [&](const std::string& bytes) {
    Client client(FastOptions(options.listen[0]));
    return client.Upload("x", DType::kF32, {16 << 20}, FromMemory(bytes)).status();
  };
  ASSERT_TRUE(upload(data).ok());
  Client client(FastOptions(options.listen[0]));
  bool restarted = false;
  const auto buffer = client.Download("x", [&](const v1::Buffer&, std::string_view bytes) {
    if (bytes.empty() || std::exchange(restarted, true)) return absl::OkStatus();
    server.reset();
    server = std::make_unique<TestServer>(options);
    return upload(std::string(data.rbegin(), data.rend()));
  });
  EXPECT_EQ(ErrorReason(buffer.status()), "BUFFER_CHANGED") << buffer.status();
}

TEST(Restart, OfTheServerLosesTheBuffersOfTransfersWithSeveralStreams) {
  tessera::Options options = TestOptions();
  options.listen = {absl::StrCat("127.0.0.1:", FreePort())};
  options.drain_timeout = absl::Milliseconds(100);
  auto server = std::make_unique<TestServer>(options);
  std::atomic<bool> restarted = false;
  const auto restart = [&] {
    if (restarted.exchange(true)) return;
    server.reset();
    server = std::make_unique<TestServer>(options);
  };
  const auto expect_lost = [&](const absl::Status& status) {
    EXPECT_TRUE(restarted);
    EXPECT_EQ(ErrorReason(status), "BUFFER_NOT_FOUND") << status;
    EXPECT_NE(ErrorMetadata(status)["server_start"], "") << status;
    restarted = false;
  };
  const std::string data = Pattern(64 << 20);  // more than the connections can buffer
  Client client(FastOptions(options.listen[0]));
  ASSERT_TRUE(client.Upload("x", DType::kF32, {16 << 20}, FromMemory(data)).ok());
  const auto sink = [&](const v1::Buffer&, std::uint64_t, std::string_view bytes) {
    if (!bytes.empty()) restart();
    return absl::OkStatus();
  };
  expect_lost(client.DownloadRanges("x", sink, {.streams = 2}).status());
  const auto source = [&](std::uint64_t offset, absl::Span<char> out) {
    if (offset == 4 << 20) restart();
    return FromMemory(data)(offset, out);
  };
  expect_lost(client.Upload("x", DType::kF32, {16 << 20}, source, {.streams = 3}).status());
}

// Forwards TCP connections to a server. Of the connections that carry `bytes` in one direction, it
// cuts the first `cuts`. A connection that a slow machine gives up before it carries data does not
// count.
class CuttingProxy {
 public:
  enum class Direction { kToServer, kToClient };
  // Returns the number of bytes that each part of a transfer lacks. If there are two parts, the
  // bytes of the second part are mostly 'b'.
  using Left = std::function<std::vector<std::uint64_t>()>;

  // left: a connection is cut only once the part that it carries has made progress.
  CuttingProxy(const std::string& server, Direction direction, std::size_t bytes, int cuts,
               Left left = {})
      : direction_(direction), bytes_(bytes), left_(std::move(left)), cuts_(cuts) {
    target_.sin_family = AF_INET;
    target_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    target_.sin_port =
        htons(static_cast<std::uint16_t>(std::stoi(server.substr(server.rfind(':') + 1))));
    sockaddr_in any = target_;
    any.sin_port = 0;
    socklen_t size = sizeof(any);
    listener_ = ::socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&any), size), 0);
    EXPECT_EQ(::listen(listener_, 16), 0);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&any), &size);
    address_ = "127.0.0.1:" + std::to_string(ntohs(any.sin_port));
    acceptor_ = std::thread([this] { Accept(); });
  }
  ~CuttingProxy() {
    ending_ = true;
    acceptor_.join();
    for (std::thread& thread : connections_) thread.join();
    ::close(listener_);
  }
  const std::string& address() const { return address_; }
  // The number of connections that the proxy has cut.
  int cut() const { return cut_; }

 private:
  void Accept() {
    while (!ending_) {
      pollfd ready{listener_, POLLIN, 0};
      if (::poll(&ready, 1, 20) <= 0) continue;
      const int client = ::accept(listener_, nullptr, nullptr);
      const int server = ::socket(AF_INET, SOCK_STREAM, 0);
      if (::connect(server, reinterpret_cast<sockaddr*>(&target_), sizeof(target_)) != 0) {
        ADD_FAILURE() << "the proxy does not reach the server";
      }
      connections_.emplace_back([this, client, server] { Forward(client, server); });
    }
  }

  void Forward(int client, int server) {
    std::array<char, 65536> block;
    std::size_t seen = 0;
    std::vector<std::uint64_t> before;
    std::array<pollfd, 2> ends = {pollfd{client, POLLIN, 0}, pollfd{server, POLLIN, 0}};
    bool open = true;
    while (open && !ending_) {
      ::poll(ends.data(), ends.size(), 20);
      for (std::size_t i = 0; i < ends.size() && open; ++i) {
        if (ends[i].revents == 0) continue;
        const ssize_t n = ::read(ends[i].fd, block.data(), block.size());
        if (n <= 0) open = false;
        for (ssize_t done = 0; open && done < n;) {
          const ssize_t m = ::send(ends[1 - i].fd, block.data() + done,
                                   static_cast<std::size_t>(n - done), MSG_NOSIGNAL);
          if (m <= 0) open = false;
          done += std::max<ssize_t>(m, 0);
        }
        if (open && (direction_ == Direction::kToServer) == (i == 0)) {
          if (seen == 0 && left_) before = left_();
          const bool counted = seen >= bytes_;
          seen += static_cast<std::size_t>(n);
          if (!counted && seen >= bytes_ && cuts_-- > 0) {
            // Data that the client or server has not read when its connection ends is lost.
            const std::size_t part =
                before.size() > 1 && std::count(block.begin(), block.begin() + n, 'b') > n / 2;
            EXPECT_TRUE(Eventually(
                [&] { return ending_ || before.empty() || left_()[part] < before[part]; }));
            open = false;
            ++cut_;
          }
        }
      }
    }
    ::close(client);
    ::close(server);
  }

  const Direction direction_;
  const std::size_t bytes_;
  const Left left_;
  std::atomic<int> cuts_;
  std::atomic<int> cut_{0};
  std::atomic<bool> ending_{false};
  sockaddr_in target_{};
  int listener_ = -1;
  std::string address_;
  std::vector<std::thread> connections_;  // Owned by the acceptor's thread until it ends.
  std::thread acceptor_;
};

TEST(BrokenConnection, AnUploadOfSeveralStreamsResumes) {
  for (bool replace : {false, true}) {
    TestServer server(TcpOptions());
    const std::string data = Pattern(8 << 20);
    if (replace) {
      Client direct(FastOptions(server.address()));
      ASSERT_TRUE(direct.Upload("x", DType::kF32, {2 << 20}, FromMemory(data)).ok());
    }
    CuttingProxy proxy(server.address(), CuttingProxy::Direction::kToServer, 1 << 20, 3);
    Client client(FastOptions(proxy.address()));
    std::uint64_t sent = 0;
    const UploadOptions options = {.replace = replace,
                                   .chunk_bytes = 64 << 10,
                                   .streams = 3,
                                   .progress = [&](std::uint64_t bytes) { sent = bytes; }};
    const auto buffer = client.Upload("x", DType::kF32, {2 << 20}, FromMemory(data), options);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(proxy.cut(), 3);
    EXPECT_EQ(sent, data.size());
    std::string back(data.size(), '\0');
    ASSERT_TRUE(client.Download("x", absl::MakeSpan(back)).ok());
    EXPECT_TRUE(back == data);
  }
}

TEST(BrokenConnection, AnUploadOfOneStreamLeavesNothing) {
  TestServer server(TcpOptions());
  CuttingProxy proxy(server.address(), CuttingProxy::Direction::kToServer, 1 << 20, 1);
  Client client(FastOptions(proxy.address()));
  const std::string data = Pattern(8 << 20);
  const auto whole = FromMemory(data);
  const auto buffer = client.Upload(
      "x", DType::kF32, {2 << 20},
      [&](std::uint64_t offset, absl::Span<char> out) {
        // The connection breaks when the server has begun.
        if (offset == 512 << 10) {
          EXPECT_TRUE(Eventually([&] { return server.used_bytes() == Charged(data.size()); }));
        }
        return whole(offset, out);
      },
      {.chunk_bytes = 64 << 10});
  EXPECT_EQ(ErrorReason(buffer.status()), "CONNECTION_LOST") << buffer.status();
  EXPECT_TRUE(Eventually([&] { return server.used_bytes() == 0; }));
}

TEST(BrokenConnection, ADownloadResumes) {
  TestServer server(TcpOptions());
  const std::string data = Pattern(8 << 20);
  Client direct(FastOptions(server.address()));
  ASSERT_TRUE(direct.Upload("x", DType::kF32, {2 << 20}, FromMemory(data)).ok());
  constexpr std::uint64_t kMost = 7 << 20, kFirst = (1 << 20) + 12;
  for (const auto& [offset, limit] : {std::pair<std::uint64_t, std::uint64_t>{0, 0},
                                      {0, kMost},
                                      {kFirst, 0},
                                      {kFirst, kMost - kFirst}}) {
    CuttingProxy proxy(server.address(), CuttingProxy::Direction::kToClient, 2 << 20, 2);
    Client client(FastOptions(proxy.address()));
    std::string back(limit == 0 ? data.size() - offset : limit, '\0');
    const auto buffer =
        client.Download("x", absl::MakeSpan(back), {.offset = offset, .limit = limit});
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(proxy.cut(), 2);
    EXPECT_TRUE(back == data.substr(offset, back.size()));
  }
}

// There are more breaks than the client tolerates in a row, but each follows some progress.
TEST(BrokenConnection, OnlyBreaksWithoutProgressAreCounted) {
  constexpr int kBreaks = 7;
  TestServer server(TcpOptions());
  const std::string data = std::string(8 << 20, 'a') + std::string(8 << 20, 'b');
  // Returns the number of missing bytes in each half, which has its own stream.
  Client direct(FastOptions(server.address()));
  const auto missing = [&] {
    std::vector<std::uint64_t> left(2);
    const auto buffer = direct.GetBuffer("x");
    if (!buffer.ok()) return std::vector<std::uint64_t>(2, data.size() / 2);
    for (const v1::ByteRange& range : buffer->missing()) {
      for (std::uint64_t half : {0, 1}) {
        const std::uint64_t begin = half * data.size() / 2, end = begin + data.size() / 2;
        left[half] += std::min(std::max(range.end(), begin), end) -
                      std::min(std::max(range.begin(), begin), end);
      }
    }
    return left;
  };
  CuttingProxy up(server.address(), CuttingProxy::Direction::kToServer, 1 << 20, 2 * kBreaks,
                  missing);
  const auto buffer = Client(FastOptions(up.address()))
                          .Upload("x", DType::kF32, {4 << 20}, FromMemory(data),
                                  {.chunk_bytes = 64 << 10, .streams = 2});
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_EQ(up.cut(), 2 * kBreaks);
  std::atomic<std::uint64_t> received{0};
  CuttingProxy down(server.address(), CuttingProxy::Direction::kToClient, 2 << 20, kBreaks,
                    [&] { return std::vector<std::uint64_t>{data.size() - received}; });
  std::string back;
  const auto fetched = Client(FastOptions(down.address()))
                           .Download("x", [&](const v1::Buffer&, std::string_view bytes) {
                             back += bytes;
                             received = back.size();
                             return absl::OkStatus();
                           });
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  EXPECT_EQ(down.cut(), kBreaks);
  EXPECT_TRUE(back == data);
}

// The stall timeout does not count from the beginning of the transfer, which may last longer than
// the timeout.
TEST(BrokenConnection, PatienceBeginsWithTheBreak) {
  TestServer server(TcpOptions());
  const std::string data = Pattern(4 << 20);
  CuttingProxy proxy(server.address(), CuttingProxy::Direction::kToServer, 1 << 20, 2);
  ClientOptions options = FastOptions(proxy.address());
  options.stall_timeout = absl::Seconds(4);
  // Before the break, a stream takes half a second longer than the stall timeout.
  const auto slow = [&](std::uint64_t offset, absl::Span<char> out) {
    absl::SleepFor(absl::Milliseconds(4500 / 16));
    return FromMemory(data)(offset, out);
  };
  const auto buffer = Client(options).Upload("x", DType::kF32, {1 << 20}, slow,
                                             {.chunk_bytes = 64 << 10, .streams = 2});
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_EQ(proxy.cut(), 2);
}

TEST(BrokenConnection, AnInfiniteLimitIsNone) {
  TestServer server(TcpOptions());
  ClientOptions options = FastOptions(server.address());
  options.timeout = absl::InfiniteDuration();
  options.stall_timeout = absl::InfiniteDuration();
  Client client(options);
  const std::string data = Pattern(4000);
  for (int streams : {1, 2}) {
    const auto slow = [&](std::uint64_t offset, absl::Span<char> out) {
      absl::SleepFor(absl::Milliseconds(20));
      return FromMemory(data)(offset, out);
    };
    const auto buffer = client.Upload("x", DType::kF32, {1000}, slow,
                                      {.replace = true, .chunk_bytes = 1024, .streams = streams});
    EXPECT_TRUE(buffer.ok()) << buffer.status();
  }
  std::string back(data.size(), '\0');
  EXPECT_TRUE(client.Download("x", absl::MakeSpan(back)).ok());
  EXPECT_TRUE(back == data);
}

TEST(BrokenConnection, ATransferThatStandsStillEnds) {
  TestServer server(TcpOptions());
  ClientOptions options = FastOptions(server.address());
  options.stall_timeout = absl::Milliseconds(300);
  Client client(options);
  const std::string data = Pattern(4000);
  const auto buffer =
      client.Upload("x", DType::kF32, {1000},
                    [&](std::uint64_t offset, absl::Span<char> out) {
                      if (offset > 0) {  // Waits until both ends have seen the end.
                        absl::SleepFor(2 * options.stall_timeout);
                        AwaitQuiet();
                        EXPECT_TRUE(Eventually([&] { return server.used_bytes() == 0; }));
                      }
                      return FromMemory(data)(offset, out);
                    },
                    {.chunk_bytes = 1024});
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ErrorReason(buffer.status()), "STALLED");
}

}  // namespace
}  // namespace tessera
