// The client library with one or two servers that are killed, hang, drain and come back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "client/async.h"
#include "client/resident_buffer.h"
#include "kernels/base/error.h"
#include "tests/client_fixture.h"

namespace tessera {
namespace {

// Makes calls from several threads until it is destroyed. Each call must succeed with the right
// result.
class Load {
 public:
  Load(Client& client, int threads) {
    for (int t = 0; t < threads; ++t) threads_.emplace_back([this, &client] { Run(client); });
  }
  ~Load() { End(); }
  void End() {
    ending_ = true;
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }
  int calls() const { return calls_; }
  int failures() const { return failures_; }

 private:
  void Run(Client& client) {
    while (!ending_) {
      const auto blocking = client.Dot(Floats({1, 2, 3}), Floats({1, 2, 3}));
      const auto async = client.Async().Dot(Floats({1, 2, 3}), Floats({1, 2, 3})).Get();
      for (const auto& answer : {blocking, async}) {
        ++calls_;
        if (answer.ok() && answer->value().real() == 14) continue;
        if (++failures_ <= 5) ADD_FAILURE() << answer.status();
      }
    }
  }

  std::atomic<bool> ending_{false};
  std::atomic<int> calls_{0};
  std::atomic<int> failures_{0};
  std::vector<std::thread> threads_;
};

// While clients call, a signal ends the servers one after the other, and they are restarted.
void EndUnderLoad(int signal) {
  ServerProcess a, b;
  Client client(FastOptions(a.address() + "," + b.address()));
  Load load(client, 4);
  for (ServerProcess* server : {&a, &b, &a}) {
    const int before = load.calls();
    EXPECT_TRUE(Eventually([&] { return load.calls() > before + 200; }));
    server->End(signal);
    const int ended = load.calls();
    EXPECT_TRUE(Eventually([&] { return load.calls() > ended + 200; }));
    server->Start();
  }
  load.End();
  EXPECT_EQ(load.failures(), 0);
}
TEST(TwoServers, NoCallIsLostWhenOneIsKilledUnderLoad) { EndUnderLoad(SIGKILL); }
TEST(TwoServers, NoCallIsLostInARollingRestart) { EndUnderLoad(SIGTERM); }

TEST(TwoServers, OneThatHangsIsLeftForTheOther) {
  ServerProcess a, b;
  ClientOptions options = FastOptions(a.address() + "," + b.address());
  options.attempt_timeout = absl::Milliseconds(500);
  Client client(options);
  ASSERT_TRUE(client.GetServerInfo().ok());
  a.Signal(SIGSTOP);
  EXPECT_TRUE(client.Dot(Floats({1}), Floats({1})).ok());
  EXPECT_TRUE(client.Async().Dot(Floats({1}), Floats({1})).Get().ok());
  a.Signal(SIGCONT);
}

TEST(TwoServers, TheFirstOneMayBeMissing) {
  ServerProcess b;
  ClientOptions options =
      FastOptions("127.0.0.1:" + std::to_string(FreePort()) + ", " + b.address());
  options.connect_timeout = absl::Hours(1);  // Longer than a call may last.
  Client client(options);
  EXPECT_TRUE(client.GetServerInfo().ok());
  EXPECT_TRUE(client.Async().GetServerInfo().Get().ok());
}

// Returns the outcome of CreateBuffer with two servers. The server that the client uses hangs, and
// gets another signal when the call has begun.
absl::Status CreateMeanwhile(ClientOptions options, int signal) {
  ServerProcess a, b;
  options.server = a.address() + "," + b.address();
  Client client(options);
  EXPECT_TRUE(PutFloats(client, "first", {1}).ok());
  ServerProcess& chosen = Client(FastOptions(a.address())).GetBuffer("first").ok() ? a : b;
  chosen.Signal(SIGSTOP);
  std::thread other([&, before = chosen.Unread()] {
    EXPECT_TRUE(Eventually([&] { return chosen.Unread() > before; })) << "the call has begun";
    if (signal == SIGKILL) return chosen.End(SIGKILL);
    absl::SleepFor(2 * options.attempt_timeout);
    chosen.Signal(signal);
  });
  v1::BufferSpec spec;
  spec.set_dtype(v1::DTYPE_F32);
  const absl::Status made = client.CreateBuffer("x", spec).status();
  other.join();
  EXPECT_EQ(client.GetBuffer("x").ok(), made.ok());
  return made;
}

// It is unknown whether the killed server has made the buffer.
TEST(TwoServers, WhatMakesABufferIsNotRepeatedElsewhere) {
  EXPECT_EQ(ErrorReason(CreateMeanwhile(FastOptions(""), SIGKILL)), "CONNECTION_LOST");
}

// Another server would not know what the hanging server has made.
TEST(TwoServers, WhatMakesABufferWaitsForOneThatHangs) {
  ClientOptions options = FastOptions("");
  options.attempt_timeout = absl::Milliseconds(500);
  EXPECT_EQ(CreateMeanwhile(options, SIGCONT), absl::OkStatus());
}

// When a handle is destroyed, its buffer is deleted on the server that has the buffer.
TEST(TwoServers, CallsOfOneLeaveTheOthersWhereTheyWere) {
  ServerProcess a, b;
  b.Signal(SIGSTOP);
  Client client(FastOptions(a.address() + "," + b.address()));
  ASSERT_TRUE(PutFloats(client, "x", {1}).ok());
  b.Signal(SIGCONT);
  for (int i = 0; i < 10; ++i) {
    const auto buffer = PutFloats(client, "y", {1});
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    client.Hold(*buffer, {.delete_with_handle = true});
    EXPECT_TRUE(Eventually([&] { return !client.GetBuffer("y").ok(); }));
    EXPECT_TRUE(client.GetBuffer("x").ok());
  }
}

TEST(OneServer, AMissingBufferSaysThatTheServerHasBeenStartedAgain) {
  ServerProcess server;
  Client client(FastOptions(server.address()));
  const auto start = [](const absl::Status& status) {
    EXPECT_EQ(ErrorReason(status), "BUFFER_NOT_FOUND") << status;
    return ErrorMetadata(status)["server_start"];
  };
  ASSERT_TRUE(PutFloats(client, "x", {1}).ok());
  ClientOptions remote = FastOptions(server.address());
  remote.shared_memory = false;
  Client reader(remote);
  EXPECT_EQ(Get(reader, "x").size(), 4u);
  EXPECT_EQ(start(client.Dot("x", "nothing").status()), "");
  EXPECT_EQ(start(client.Async().Dot("x", "nothing").Get().status()), "");
  server.End(SIGKILL);
  server.Start();
  EXPECT_NE(start(client.Dot("x", "x").status()), "");
  EXPECT_NE(start(client.Async().Dot("x", "x").Get().status()), "");
  std::string out(4, 0);
  EXPECT_NE(start(client.Download("x", absl::MakeSpan(out)).status()), "");
  EXPECT_NE(start(reader.Download("x", absl::MakeSpan(out)).status()), "");
  EXPECT_EQ(ErrorMetadata(client.Dot("x", "x").status())["name"], "x");
}

TEST(OneServer, TransfersToOneThatHangsEnd) {
  ServerProcess server;
  ClientOptions options = FastOptions(server.address());
  options.stall_timeout = absl::Seconds(1);
  Client client(options), reader(options);
  const std::vector<float> values(4 << 20, 1.0f);
  // On a busy machine, a transfer may stall.
  ASSERT_TRUE(Eventually([&] { return PutFloats(client, "x", values).ok(); }));
  std::vector<char> out(values.size() * sizeof(float));
  ASSERT_TRUE(Eventually([&] { return reader.Download("x", absl::MakeSpan(out)).ok(); }));
  options.stall_timeout = absl::InfiniteDuration();
  Client patient(options);
  ASSERT_TRUE(patient.GetServerInfo().ok());
  server.Signal(SIGSTOP);
  EXPECT_EQ(ErrorReason(PutFloats(client, "y", values).status()), "STALLED");
  // The upload's connection may have ended with the upload, because bytes that the server's host
  // has not received block the connection.
  EXPECT_EQ(ErrorReason(reader.Download("x", absl::MakeSpan(out)).status()), "STALLED");
  EXPECT_EQ(reader.Download("x", absl::MakeSpan(out), {.timeout = absl::Milliseconds(100)})
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
  const std::string bytes = Bytes(values);
  // These transfers retry until they are cancelled. One stream sends so little that the socket
  // accepts it, because gRPC ends a stream only when nothing of it is being written.
  for (const int streams : {1, 4}) {
    const std::int64_t shape[] = {streams == 1 ? 1 << 12 : 4 << 20};
    const std::string data = bytes.substr(0, static_cast<std::size_t>(shape[0]) * sizeof(float));
    std::stop_source source;
    const std::uint64_t sent = patient.traffic().sent_bytes;
    std::thread canceller([&] {
      EXPECT_TRUE(Eventually([&] { return patient.traffic().sent_bytes > sent; }));
      source.request_stop();
    });
    const absl::Status cancelled = patient
                                       .Upload("z", DType::kF32, shape, FromMemory(data),
                                               {.streams = streams, .cancel = source.get_token()})
                                       .status();
    EXPECT_TRUE(absl::IsCancelled(cancelled)) << cancelled;
    canceller.join();
  }
  server.Signal(SIGCONT);
}

TEST(OneServer, CallsSpreadOverConnectionsWhileOthersAreUnderWay) {
  TestServer server(TcpOptions());
  Client watcher(FastOptions(server.address()));
  const auto connections = [&] {
    const auto info = watcher.GetServerInfo();
    for (const v1::Budget& budget : info->budgets()) {
      if (budget.name() == "connections") return static_cast<int>(budget.used()) - 1;
    }
    return -1;
  };
  ClientOptions options = FastOptions(server.address());
  options.connections = 3;
  Client client(options);
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(client.GetServerInfo().ok());
  EXPECT_EQ(connections(), 1) << "one caller needs no more";
  {
    Load load(client, 16);
    EXPECT_TRUE(Eventually([&] { return connections() == 3; }));
    EXPECT_LE(connections(), 3);
  }
}

}  // namespace
}  // namespace tessera
