// The client library against a real server in this process, over loopback TCP, with connections
// that break on demand.
#include "client/client.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/connection.h"
#include "client/random_array.h"
#include "client/slice.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/error.h"
#include "tests/fake_device.h"
#include "tests/test_server.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::SizeIs;

tessera::Options TcpOptions() {
  tessera::Options options = TestOptions();
  options.listen = {"127.0.0.1:0"};
  return options;
}

ClientOptions FastOptions(const std::string& address) {
  ClientOptions options;
  options.server = address;
  options.timeout = absl::Seconds(20);
  options.connect_timeout = absl::Seconds(5);
  return options;
}

std::string Pattern(std::size_t bytes) {
  std::string data(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i * 31 + i / 251);
  return data;
}

template <class T>
std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <class T>
std::vector<T> Values(const v1::Tensor& tensor) {
  std::vector<T> values(tensor.data().size() / sizeof(T));
  std::memcpy(values.data(), tensor.data().data(), tensor.data().size());
  return values;
}

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() : server_(TcpOptions()), client_(FastOptions(server_.address())) {}

  void Put(const std::string& name, const std::vector<float>& values,
           std::vector<std::int64_t> shape = {}) {
    if (shape.empty()) shape = {static_cast<std::int64_t>(values.size())};
    const std::string bytes = Bytes(values);
    const auto buffer = client_.Upload(name, DType::kF32, shape, FromMemory(bytes));
    ASSERT_TRUE(buffer.ok()) << buffer.status();
  }

  std::string Get(const std::string& name) {
    std::string data;
    const auto buffer = client_.Download(name, [&](const v1::Buffer&, std::string_view bytes) {
      data += bytes;
      return absl::OkStatus();
    });
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return data;
  }

  TestServer server_;
  Client client_;
};

// --- Transfers -----------------------------------------------------------------------------------

TEST_F(ClientTest, RoundTripsOfEveryTypeSizeAndNumberOfStreams) {
  UploadOptions options;
  options.chunk_bytes = 4096;
  options.replace = true;
  for (DType dtype :
       {DType::kF32, DType::kF64, DType::kF16, DType::kBF16, DType::kI32, DType::kI64}) {
    for (std::int64_t elements : {0, 1, 511, 512, 2048, 2049, 10007}) {
      for (int streams : {1, 4}) {
        options.streams = streams;
        const std::string data = Pattern(static_cast<std::size_t>(elements) * SizeOf(dtype));
        std::uint64_t sent = 0;
        options.progress = [&](std::uint64_t bytes) { sent = bytes; };
        const auto buffer = client_.Upload("x", dtype, {elements}, FromMemory(data), options);
        ASSERT_TRUE(buffer.ok()) << buffer.status();
        EXPECT_EQ(buffer->state(), v1::Buffer::STATE_READY);
        EXPECT_EQ(buffer->size_bytes(), data.size());
        EXPECT_EQ(sent, data.size());
        EXPECT_EQ(Get("x"), data);
      }
    }
  }
}

TEST_F(ClientTest, UploadOptions) {
  const std::string data = Pattern(4000);
  UploadOptions options;
  options.ttl = absl::Minutes(10);
  options.device = "cpu";
  auto buffer = client_.Upload("a/b", DType::kF32, {10, 100}, FromMemory(data), options);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_TRUE(buffer->has_expire_time());
  EXPECT_EQ(buffer->device(), "cpu");
  EXPECT_THAT(buffer->shape(), ElementsAre(10, 100));

  buffer = client_.Upload("a/b", DType::kF32, {1000}, FromMemory(data));
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ErrorReason(buffer.status()), "BUFFER_EXISTS");
  options.replace = true;
  buffer = client_.Upload("a/b", DType::kF32, {1000}, FromMemory(data), options);
  EXPECT_TRUE(buffer.ok()) << buffer.status();

  options.device = "cuda:99";
  EXPECT_EQ(
      ErrorReason(client_.Upload("c", DType::kF32, {1000}, FromMemory(data), options).status()),
      "BAD_DEVICE");
  EXPECT_EQ(ErrorReason(client_.Upload("c", DType::kF32, {-1}, FromMemory(data)).status()),
            "BAD_SHAPE");
  options = {};
  options.chunk_bytes = 100;
  EXPECT_EQ(
      ErrorReason(client_.Upload("c", DType::kF32, {1000}, FromMemory(data), options).status()),
      "BAD_OPTION");
}

TEST_F(ClientTest, AFailingSourceLeavesNoBuffer) {
  for (int streams : {1, 3}) {
    UploadOptions options;
    options.chunk_bytes = 1024;
    options.streams = streams;
    const auto buffer = client_.Upload(
        "x", DType::kF32, {100000},
        [&](std::uint64_t offset, absl::Span<char>) {
          if (offset < 200000) return absl::OkStatus();
          // Not before the server has begun: until then there is nothing that could be left.
          EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == Charged(400000); }));
          return absl::DataLossError("the disk broke");
        },
        options);
    EXPECT_EQ(buffer.status(), absl::DataLossError("the disk broke"));
    EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == 0; }));
    EXPECT_EQ(ErrorReason(client_.GetBuffer("x").status()), "BUFFER_NOT_FOUND");
  }
}

TEST_F(ClientTest, DownloadsOfRanges) {
  const std::string data = Pattern(3 << 20);
  ASSERT_TRUE(client_.Upload("x", DType::kI32, {3 << 18}, FromMemory(data)).ok());
  DownloadOptions range;
  range.offset = 1000001;
  range.limit = 1234567;
  std::string out(range.limit, '\0');
  ASSERT_TRUE(client_.Download("x", absl::MakeSpan(out), range).ok());
  EXPECT_EQ(out, data.substr(range.offset, range.limit));
  out.resize(10);
  EXPECT_EQ(ErrorReason(client_.Download("x", absl::MakeSpan(out), range).status()), "BAD_RANGE");
  out.resize(range.limit + 1);
  EXPECT_EQ(ErrorReason(client_.Download("x", absl::MakeSpan(out), range).status()), "BAD_RANGE");
  range.offset = data.size() + 1;
  EXPECT_EQ(ErrorReason(client_.Download("x", absl::MakeSpan(out), range).status()), "BAD_RANGE");
  EXPECT_EQ(ErrorReason(client_.Download("y", absl::MakeSpan(out)).status()), "BUFFER_NOT_FOUND");
  const auto refused = client_.Download("x", [](const v1::Buffer&, std::string_view) {
    return absl::ResourceExhaustedError("enough");
  });
  EXPECT_EQ(refused.status(), absl::ResourceExhaustedError("enough"));
}

// --- Buffers -------------------------------------------------------------------------------------

TEST_F(ClientTest, ABufferByHand) {
  v1::BufferSpec spec;
  spec.set_dtype(v1::DTYPE_F32);
  spec.add_shape(4);
  const auto created = client_.CreateBuffer("x", spec);
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(created->state(), v1::Buffer::STATE_WRITING);
  const auto seen = client_.GetBuffer("x");
  ASSERT_TRUE(seen.ok());
  EXPECT_THAT(seen->missing(), SizeIs(1));
  const auto sealed = client_.SealBuffer("x");
  EXPECT_EQ(ErrorReason(sealed.status()), "BUFFER_NOT_READY");
  EXPECT_THAT(ErrorMetadata(sealed.status()), Contains(Key("missing")));
  EXPECT_TRUE(client_.DeleteBuffer("x").ok());
  EXPECT_EQ(client_.DeleteBuffer("x").code(), absl::StatusCode::kNotFound);
}

TEST_F(ClientTest, TimeToLive) {
  Put("x", {1});
  auto buffer = client_.UpdateBuffer("x", absl::Seconds(100));
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_TRUE(buffer->has_expire_time());
  buffer = client_.UpdateBuffer("x", std::nullopt);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_FALSE(buffer->has_expire_time());
}

TEST_F(ClientTest, ListsEveryPage) {
  constexpr int kBuffers = 1203;  // more than the largest page
  for (int i = 0; i < kBuffers; ++i) Put("many/" + std::to_string(i), {1});
  Put("other", {1});
  const auto all = client_.ListBuffers();
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->size(), kBuffers + 1u);
  EXPECT_TRUE(std::is_sorted(all->begin(), all->end(),
                             [](const auto& a, const auto& b) { return a.name() < b.name(); }));
  EXPECT_THAT(*client_.ListBuffers("other"), SizeIs(1));
  EXPECT_THAT(*client_.ListBuffers("none"), SizeIs(0));
}

// --- Operations ----------------------------------------------------------------------------------

TEST_F(ClientTest, Operations) {
  Put("x", {1, 2, 3, 4, 5, 6}, {2, 3});
  OperationOptions timed;
  timed.timing = true;
  const auto dot = client_.Dot("x", "x", timed);
  ASSERT_TRUE(dot.ok()) << dot.status();
  EXPECT_THAT(dot->value().real(), DoubleEq(91));
  EXPECT_GT(dot->stats().kernel_us(), 0);
  EXPECT_EQ(dot->stats().device(), "cpu");

  const auto argmax = client_.Reduce(ReduceOp::kArgMax, "x");
  ASSERT_TRUE(argmax.ok()) << argmax.status();
  EXPECT_EQ(argmax->index(), 5);
  EXPECT_THAT(argmax->value().real(), DoubleEq(6));

  const auto sums = client_.Reduce(ReduceOp::kSum, "x", {1}, true);
  ASSERT_TRUE(sums.ok()) << sums.status();
  EXPECT_THAT(sums->tensor().shape(), ElementsAre(2, 1));
  EXPECT_THAT(Values<float>(sums->tensor()), ElementsAre(6, 15));

  const auto product = client_.Matmul("x", "x", false, true, DType::kF32);
  ASSERT_TRUE(product.ok()) << product.status();
  EXPECT_THAT(Values<float>(product->tensor()), ElementsAre(14, 32, 32, 77));

  OperationOptions keep;
  keep.target = ResultBuffer{"y", absl::Minutes(5), false};
  const auto kept = client_.Add("x", "x", keep);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(kept->buffer().name(), "y");
  EXPECT_TRUE(kept->buffer().has_expire_time());
  EXPECT_EQ(Get("y"), Bytes<float>({2, 4, 6, 8, 10, 12}));
}

TEST_F(ClientTest, Programs) {
  Put("x", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, {4, 3});
  Program program;
  const ProgramStep squares =
      program.Matmul("x", "x", false, true, std::nullopt, {.scratch = true});
  program.Reduce(ReduceOp::kArgMax, squares, {1});
  const ProgramStep missing = program.Dot("x", "y");
  program.Add(missing, missing);
  EXPECT_FALSE(program.has_target());
  program.Add(squares, squares, {.target = ResultBuffer{.name = "twice"}});
  EXPECT_TRUE(program.has_target());
  program.WindowSum("x", 1);
  program.Dot("x", "x");
  program.WantStats();
  const auto answer = client_.Execute(program);
  ASSERT_TRUE(answer.ok()) << answer.status();
  ASSERT_EQ(answer->results_size(), 7);
  std::vector<std::string> reasons;
  for (const v1::StepResult& result : answer->results())
    reasons.push_back(ErrorReason(Client::StatusOf(result)));
  EXPECT_EQ(reasons, (std::vector<std::string>{"", "", "BUFFER_NOT_FOUND", "STEP_FAILED", "",
                                               "BAD_SHAPE", ""}));
  EXPECT_EQ(Values<std::int64_t>(answer->results(1).reduce().tensor()),
            std::vector<std::int64_t>(4, 3));
  EXPECT_EQ(answer->results(4).add().buffer().name(), "twice");
  EXPECT_EQ(answer->results(6).dot().value().real(), 650);
  EXPECT_EQ(answer->results(6).dot().stats().strategy(), "fixed_tree");
}

TEST_F(ClientTest, ViewsAndInlineOperands) {
  Put("x", {1, 2, 3, 4, 5, 6}, {2, 3});
  Operand column("x");
  column.view.emplace();
  column.view->set_offset(1);
  column.view->add_shape(2);
  column.view->add_strides(3);
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_F32);
  tensor.add_shape(2);
  tensor.set_data(Bytes<float>({10, 100}));
  const auto sum = client_.Add(column, tensor);
  ASSERT_TRUE(sum.ok()) << sum.status();
  EXPECT_THAT(Values<float>(sum->tensor()), ElementsAre(12, 105));
}

TEST_F(ClientTest, ErrorsCarryReasonAndFigures) {
  Put("x", {1, 2, 3});
  absl::Status status = client_.Dot("x", "nothing").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrorReason(status), "BUFFER_NOT_FOUND");
  EXPECT_EQ(ErrorMetadata(status)["name"], "nothing");
  OperationOptions options;
  options.strategy = "magic";
  status = client_.Dot("x", "x", options).status();
  EXPECT_EQ(ErrorReason(status), "UNKNOWN_STRATEGY");
  EXPECT_THAT(ErrorMetadata(status)["valid"], HasSubstr("cpu_serial"));
}

TEST_F(ClientTest, TheServer) {
  const auto info = client_.GetServerInfo();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_THAT(info->devices(), SizeIs(1));
  const auto strategies = client_.ListStrategies("dot", "cpu");
  ASSERT_TRUE(strategies.ok()) << strategies.status();
  EXPECT_THAT(*strategies, SizeIs(Ge(2u)));
  EXPECT_TRUE(*client_.CheckHealth());
  EXPECT_TRUE(*client_.CheckHealth("tessera.v1.ComputeService"));
  EXPECT_EQ(client_.CheckHealth("no.such.Service").status().code(), absl::StatusCode::kNotFound);
  EXPECT_GT(client_.traffic().sent_bytes, 0u);
  EXPECT_GT(client_.traffic().received_bytes, 0u);
}

TEST_F(ClientTest, ManyThreadsShareAClient) {
  Put("x", std::vector<float>(1000, 2));
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      const std::string name = "y" + std::to_string(t);
      const std::string data = Pattern(40000);
      for (int i = 0; i < 20; ++i) {
        UploadOptions options;
        options.replace = true;
        const auto put = client_.Upload(name, DType::kF32, {10000}, FromMemory(data), options);
        const auto dot = client_.Dot("x", "x");
        if (put.ok() && dot.ok() && dot->value().real() == 4000) ++right;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 8 * 20);
}

// --- Deadlines and full queues -------------------------------------------------------------------

TEST(RetryTest, PausesAsLongAsTheServerAsksForWithinBounds) {
  ClientOptions options;
  options.retry_refused = true;
  const auto pause = [&](std::string_view delay_ms) {
    return Retry(options, /*idempotent=*/false, absl::InfiniteDuration())
        .Pause(MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL", "",
                         {{Retry::kRetryDelay, std::string(delay_ms)}}));
  };
  const auto short_pause = pause("3000"), long_pause = pause("3600000");
  ASSERT_TRUE(short_pause.has_value() && long_pause.has_value());
  EXPECT_GE(*short_pause, absl::Seconds(3));
  EXPECT_LE(*short_pause, absl::Seconds(3.75));
  EXPECT_GE(*long_pause, absl::Seconds(10));
  EXPECT_LE(*long_pause, absl::Seconds(12.5));
}

class BusyServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = std::make_unique<FakeDevice>();
    device_ = device.get();
    tessera::Options options = TcpOptions();
    options.workers = 1;
    options.queue = 1;
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::move(device));
    server_ = std::make_unique<TestServer>(options, std::move(devices));
    client_ = std::make_unique<Client>(FastOptions(server_->address()));
    const std::string data = Bytes<float>({1, 2, 3});
    ASSERT_TRUE(client_->Upload("x", DType::kF32, {3}, FromMemory(data)).ok());
    device_->Close(FakeDevice::Step::kBegin);
  }
  void TearDown() override { device_->Open(); }

  FakeDevice* device_ = nullptr;
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<Client> client_;
};

TEST_F(BusyServerTest, DeadlineOfACall) {
  OperationOptions options;
  options.timeout = absl::Milliseconds(200);
  const absl::Time start = absl::Now();
  EXPECT_EQ(client_->Dot("x", "x", options).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

TEST_F(BusyServerTest, FullQueueIsRetriedIfWanted) {
  std::vector<std::thread> busy;
  std::atomic<int> answered{0};
  const auto call = [&] { answered += client_->Dot("x", "x").ok(); };
  busy.emplace_back(call);
  device_->WaitForBlocked(1);
  // The worker holds one operation; of these, one waits in the queue and the others are refused and
  // come again.
  for (int i = 0; i < 3; ++i) busy.emplace_back(call);
  EXPECT_TRUE(Eventually([&] { return server_->Info().waiting() == 1; }));

  ClientOptions impatient = FastOptions(server_->address());
  impatient.retry_refused = false;
  Client other(impatient);
  const absl::Status status = other.Dot("x", "x").status();
  EXPECT_EQ(ErrorReason(status), "QUEUE_FULL");
  EXPECT_THAT(ErrorMetadata(status), Contains(Key("retry_delay_ms")));

  device_->Open();
  for (std::thread& thread : busy) thread.join();
  EXPECT_EQ(answered, 4);
}

// --- Connections that break ----------------------------------------------------------------------

TEST(Reconnecting, WaitsForAServerThatStartsLater) {
  tessera::Options options = TcpOptions();
  std::string address;
  {
    TestServer first(options);
    address = first.address();
  }
  ClientOptions impatient = FastOptions(address);
  impatient.connect_timeout = absl::Milliseconds(200);
  Client client(impatient);
  const absl::Status refused = client.GetServerInfo().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrorReason(refused), "UNREACHABLE");
  EXPECT_EQ(ErrorMetadata(refused)["server"], address);

  Client patient(FastOptions(address));
  std::thread caller([&] { EXPECT_TRUE(patient.GetServerInfo().ok()); });
  absl::SleepFor(absl::Milliseconds(300));
  options.listen = {address};
  TestServer second(options);
  caller.join();
}

TEST(Reconnecting, SaysWhichBuffersAreGoneAfterARestart) {
  tessera::Options options = TcpOptions();
  auto server = std::make_unique<TestServer>(options);
  options.listen = {server->address()};
  Client client(FastOptions(server->address()));
  const std::string data = Bytes<float>({1, 2, 3});
  ASSERT_TRUE(client.Upload("x", DType::kF32, {3}, FromMemory(data)).ok());
  ASSERT_TRUE(client.Dot("x", "x").ok());
  server.reset();
  server = std::make_unique<TestServer>(options);
  const absl::Status status = client.Dot("x", "x").status();
  EXPECT_EQ(ErrorReason(status), "BUFFER_NOT_FOUND");
  ASSERT_TRUE(client.Upload("x", DType::kF32, {3}, FromMemory(data)).ok());
  EXPECT_TRUE(client.Dot("x", "x").ok());
}

// The server's versions go on where those of the one before it ended.
TEST(ServerWithVersions, ADownloadIsNotMixedOverARestart) {
  tessera::Options options = TcpOptions();
  options.drain_timeout = absl::Milliseconds(100);
  auto server = std::make_unique<TestServer>(options);
  options.listen = {server->address()};
  const std::string data = Pattern(64 << 20);  // more than lies between the two when one stops
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

TEST(ServerWithVersions, AnAbandonedDraftIsNotInTheWay) {
  TestServer server(TcpOptions());
  Client client(FastOptions(server.address()));
  const std::string data = Pattern(64 << 10);
  ASSERT_TRUE(client.Upload("x", DType::kF32, {16 << 10}, FromMemory(data)).ok());
  v1::BufferSpec spec;
  spec.set_dtype(v1::DTYPE_F32);
  spec.add_shape(16 << 10);
  spec.set_replace(true);
  const auto left = client.CreateBuffer("x", spec);
  ASSERT_TRUE(left.ok()) << left.status();
  UploadOptions options;
  options.replace = true;
  options.chunk_bytes = 4096;
  for (int streams : {1, 3}) {
    options.streams = streams;
    const auto buffer = client.Upload("x", DType::kF32, {16 << 10}, FromMemory(data), options);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(buffer->crc32c(), Crc32c(data.data(), data.size()));
  }
  // A failure takes its own draft along and nothing else.
  options.streams = 3;
  const auto failed = client.Upload(
      "x", DType::kF32, {16 << 10},
      [](std::uint64_t offset, absl::Span<char>) {
        return offset < 40'000 ? absl::OkStatus() : absl::DataLossError("the disk broke");
      },
      options);
  EXPECT_EQ(failed.status(), absl::DataLossError("the disk broke"));
  const auto seen = client.GetBuffer("x");
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_EQ(seen->buffer().state(), v1::Buffer::STATE_READY);
  ASSERT_THAT(seen->drafts(), SizeIs(1));
  EXPECT_EQ(seen->drafts(0).version(), left->version());
  EXPECT_TRUE(client.DeleteBuffer("x", left->version()).ok());
  EXPECT_THAT(client.GetBuffer("x")->drafts(), SizeIs(0));
}

// Forwards TCP connections to a server and cuts the first `cuts` of them that carry so many bytes
// in one direction. One that a slow machine gives up before it carried data does not count.
class CuttingProxy {
 public:
  enum class Direction { kToServer, kToClient };

  CuttingProxy(const std::string& server, Direction direction, std::size_t bytes, int cuts)
      : direction_(direction), bytes_(bytes), cuts_(cuts) {
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
  // How many connections it has cut.
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
          const bool counted = seen >= bytes_;
          seen += static_cast<std::size_t>(n);
          if (!counted && seen >= bytes_ && cuts_-- > 0) {
            // What a side has not read by the end of its connection is lost to it.
            absl::SleepFor(absl::Milliseconds(50));
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
  std::atomic<int> cuts_;
  std::atomic<int> cut_{0};
  std::atomic<bool> ending_{false};
  sockaddr_in target_{};
  int listener_ = -1;
  std::string address_;
  std::vector<std::thread> connections_;  // of the acceptor's thread until it has ended
  std::thread acceptor_;
};

TEST(BrokenConnection, AnUploadOfSeveralStreamsResumes) {
  for (bool replace : {false, true}) {
    TestServer server(TcpOptions());
    const std::string data = Pattern(8 << 20);
    if (replace) {
      Client direct(FastOptions(server.address()));
      ASSERT_TRUE(direct.Upload("x", DType::kF32, {1}, FromMemory(data)).ok());
    }
    CuttingProxy proxy(server.address(), CuttingProxy::Direction::kToServer, 1 << 20, 3);
    Client client(FastOptions(proxy.address()));
    UploadOptions options;
    options.chunk_bytes = 64 << 10;
    options.streams = 3;
    options.replace = replace;
    std::uint64_t sent = 0;
    options.progress = [&](std::uint64_t bytes) { sent = bytes; };
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
  UploadOptions options;
  options.chunk_bytes = 64 << 10;
  const auto buffer = client.Upload(
      "x", DType::kF32, {2 << 20},
      [&](std::uint64_t offset, absl::Span<char> out) {
        // The connection breaks when the server has begun.
        if (offset == 512 << 10) {
          EXPECT_TRUE(Eventually([&] { return server.used_bytes() == Charged(data.size()); }));
        }
        return whole(offset, out);
      },
      options);
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
    DownloadOptions range;
    range.offset = offset;
    range.limit = limit;
    std::string back(limit == 0 ? data.size() - offset : limit, '\0');
    const auto buffer = client.Download("x", absl::MakeSpan(back), range);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(proxy.cut(), 2);
    EXPECT_TRUE(back == data.substr(offset, back.size()));
  }
}

// More breaks than are suffered in a row, each after some progress.
TEST(BrokenConnection, OnlyBreaksWithoutProgressAreCounted) {
  constexpr int kBreaks = 7;
  TestServer server(TcpOptions());
  const std::string data = Pattern(16 << 20);
  UploadOptions options;
  options.chunk_bytes = 64 << 10;
  options.streams = 2;
  CuttingProxy up(server.address(), CuttingProxy::Direction::kToServer, 1 << 20, 2 * kBreaks);
  const auto buffer = Client(FastOptions(up.address()))
                          .Upload("x", DType::kF32, {4 << 20}, FromMemory(data), options);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  CuttingProxy down(server.address(), CuttingProxy::Direction::kToClient, 2 << 20, kBreaks);
  std::string back(data.size(), '\0');
  const auto fetched = Client(FastOptions(down.address())).Download("x", absl::MakeSpan(back));
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  EXPECT_EQ(down.cut(), kBreaks);
  EXPECT_TRUE(back == data);
}

TEST(BrokenConnection, AReplacedBufferIsNotMixedWithTheOldOne) {
  TestServer server(TcpOptions());
  const std::string data = Pattern(8 << 20);
  Client direct(FastOptions(server.address()));
  ASSERT_TRUE(direct.Upload("x", DType::kF32, {2 << 20}, FromMemory(data)).ok());
  CuttingProxy proxy(server.address(), CuttingProxy::Direction::kToClient, 4 << 20, 1);
  Client client(FastOptions(proxy.address()));
  bool replaced = false;
  const auto buffer = client.Download("x", [&](const v1::Buffer&, std::string_view bytes) {
    if (bytes.empty() || std::exchange(replaced, true)) return absl::OkStatus();
    UploadOptions options;
    options.replace = true;
    return direct.Upload("x", DType::kF32, {2 << 20}, FromMemory(data), options).status();
  });
  EXPECT_EQ(ErrorReason(buffer.status()), "BUFFER_CHANGED") << buffer.status();
}

TEST(BrokenConnection, AnInfiniteLimitIsNone) {
  TestServer server(TcpOptions());
  ClientOptions options = FastOptions(server.address());
  options.timeout = absl::InfiniteDuration();
  options.stall_timeout = absl::InfiniteDuration();
  Client client(options);
  const std::string data = Pattern(4000);
  for (int streams : {1, 2}) {
    UploadOptions upload;
    upload.chunk_bytes = 1024;
    upload.streams = streams;
    upload.replace = true;
    const auto slow = [&](std::uint64_t offset, absl::Span<char> out) {
      absl::SleepFor(absl::Milliseconds(20));
      return FromMemory(data)(offset, out);
    };
    const auto buffer = client.Upload("x", DType::kF32, {1000}, slow, upload);
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
  UploadOptions upload;
  upload.chunk_bytes = 1024;
  const auto buffer = client.Upload(
      "x", DType::kF32, {1000},
      [&](std::uint64_t offset, absl::Span<char> out) {
        if (offset > 0) absl::SleepFor(absl::Seconds(1));
        return FromMemory(data)(offset, out);
      },
      upload);
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ErrorReason(buffer.status()), "STALLED");
}

// --- What it says to a server, and what it makes of the answers ---------------------------------

// One name, "x", whose READY buffer has version 3 and whose draft gets version 7; it fails on
// demand, and remembers what it was asked.
class FakeBuffers final : public v1::BufferService::Service {
 public:
  static constexpr std::uint64_t kOld = 3;
  static constexpr std::uint64_t kDraft = 7;

  FakeBuffers() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
  }
  const std::string& address() const { return address_; }

  static grpc::Status Error(grpc::StatusCode code, const std::string& reason,
                            int retry_delay_ms = 0) {
    google::rpc::Status status;
    status.set_code(static_cast<int>(code));
    google::rpc::ErrorInfo info;
    info.set_domain("tessera");
    info.set_reason(reason);
    status.add_details()->PackFrom(info);
    if (retry_delay_ms > 0) {
      google::rpc::RetryInfo retry;
      retry.mutable_retry_delay()->set_nanos(retry_delay_ms * 1'000'000);
      status.add_details()->PackFrom(retry);
    }
    return {code, reason, status.SerializeAsString()};
  }
  static grpc::Status Damaged() { return Error(grpc::StatusCode::DATA_LOSS, "BAD_CHECKSUM"); }

  v1::Buffer Describe(std::uint64_t version, v1::Buffer::State state) const {
    v1::Buffer buffer;
    buffer.set_name("x");
    buffer.set_dtype(v1::DTYPE_F32);
    buffer.set_size_bytes(data.size());
    buffer.add_shape(static_cast<std::int64_t>(data.size() / 4));
    buffer.set_version(version);
    buffer.set_state(state);
    return buffer;
  }

  grpc::Status CreateBuffer(grpc::ServerContext*, const v1::CreateBufferRequest*,
                            v1::CreateBufferResponse* response) override {
    const std::lock_guard lock(mutex);
    if (++creates <= refusals) return refusal;
    *response->mutable_buffer() = Describe(kDraft, v1::Buffer::STATE_WRITING);
    return grpc::Status::OK;
  }

  grpc::Status Upload(grpc::ServerContext*, grpc::ServerReader<v1::UploadRequest>* reader,
                      v1::UploadResponse* response) override {
    std::vector<v1::UploadRequest> messages;
    v1::UploadRequest message;
    while (reader->Read(&message)) messages.push_back(message);
    const std::lock_guard lock(mutex);
    streams.push_back(std::move(messages));
    if (damaged_uploads > 0) {
      --damaged_uploads;
      return Damaged();
    }
    const bool creates_it = streams.back().front().has_spec();
    *response->mutable_buffer() =
        Describe(kDraft, creates_it ? v1::Buffer::STATE_READY : v1::Buffer::STATE_WRITING);
    return grpc::Status::OK;
  }

  grpc::Status GetBuffer(grpc::ServerContext*, const v1::GetBufferRequest* request,
                         v1::GetBufferResponse* response) override {
    const std::lock_guard lock(mutex);
    gets.push_back(request->version());
    if (knows_versions && request->version() == kDraft) {
      *response->mutable_buffer() = Describe(kDraft, v1::Buffer::STATE_WRITING);
      v1::ByteRange& missing = *response->add_missing();
      missing.set_end(data.size());
    } else {
      *response->mutable_buffer() = Describe(kOld, v1::Buffer::STATE_READY);
    }
    return grpc::Status::OK;
  }

  grpc::Status SealBuffer(grpc::ServerContext*, const v1::SealBufferRequest* request,
                          v1::SealBufferResponse* response) override {
    const std::lock_guard lock(mutex);
    seals.push_back(*request);
    if (!seal_error.ok()) return seal_error;
    *response->mutable_buffer() = Describe(sealed_version, v1::Buffer::STATE_READY);
    if (sealed_bytes) response->mutable_buffer()->set_size_bytes(*sealed_bytes);
    return grpc::Status::OK;
  }

  grpc::Status DeleteBuffer(grpc::ServerContext*, const v1::DeleteBufferRequest* request,
                            v1::DeleteBufferResponse*) override {
    const std::lock_guard lock(mutex);
    deletes.push_back(request->version());
    return grpc::Status::OK;
  }

  grpc::Status Download(grpc::ServerContext*, const v1::DownloadRequest* request,
                        grpc::ServerWriter<v1::DownloadResponse>* writer) override {
    const std::lock_guard lock(mutex);
    downloads.push_back(*request);
    if (request->version() != 0 && request->version() != kOld) {
      return Error(grpc::StatusCode::FAILED_PRECONDITION, "VERSION_MISMATCH");
    }
    constexpr std::size_t kChunk = 1000;
    bool damaged = false;
    v1::DownloadResponse response;
    *response.mutable_buffer() = Describe(kOld, v1::Buffer::STATE_READY);
    if (whole_checksum) response.mutable_buffer()->set_crc32c(*whole_checksum);
    for (std::uint64_t at = request->offset(); at < data.size(); at += kChunk) {
      response.set_offset(at);
      response.set_data(data.substr(at, kChunk));
      if (request->checksums())
        response.set_crc32c(Crc32c(response.data().data(), response.data().size()));
      if (at >= kChunk && damaged_downloads > 0 && !std::exchange(damaged, true)) {
        --damaged_downloads;
        (*response.mutable_data())[10] ^= 1;
      }
      if (!writer->Write(response)) break;
      response.clear_buffer();
    }
    return grpc::Status::OK;
  }

  std::string data;
  // Of CreateBuffer: the first ones get this.
  grpc::Status refusal;
  int refusals = 0;
  int damaged_uploads = 0;
  int damaged_downloads = 0;
  bool knows_versions = true;
  std::uint64_t sealed_version = kDraft;
  std::optional<std::uint64_t> sealed_bytes;  // in place of what data has
  grpc::Status seal_error;
  std::optional<std::uint32_t> whole_checksum;

  std::mutex mutex;
  int creates = 0;
  std::vector<std::vector<v1::UploadRequest>> streams;
  std::vector<std::uint64_t> gets;
  std::vector<v1::SealBufferRequest> seals;
  std::vector<std::uint64_t> deletes;
  std::vector<v1::DownloadRequest> downloads;

 private:
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

class ProtocolTest : public ::testing::Test {
 protected:
  ProtocolTest() : client_(FastOptions(fake_.address())) {
    fake_.data = Pattern(40'000);
    upload_.chunk_bytes = 4096;
  }
  absl::StatusOr<v1::Buffer> Upload(int streams) {
    upload_.streams = streams;
    return client_.Upload("x", DType::kF32, {10'000}, FromMemory(fake_.data), upload_);
  }
  std::uint32_t Checksum() const { return Crc32c(fake_.data.data(), fake_.data.size()); }

  FakeBuffers fake_;
  Client client_;
  UploadOptions upload_;
};

TEST_F(ProtocolTest, EveryMessageOfAnUploadHasItsChecksumAndTheLastOneThatOfTheBuffer) {
  ASSERT_TRUE(Upload(1).ok());
  ASSERT_THAT(fake_.streams, SizeIs(1));
  const auto& messages = fake_.streams[0];
  ASSERT_THAT(messages, SizeIs(10));
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string& bytes = messages[i].data();
    EXPECT_EQ(messages[i].crc32c(), Crc32c(bytes.data(), bytes.size()));
    EXPECT_EQ(messages[i].has_buffer_crc32c(), i == 9);
  }
  EXPECT_EQ(messages[9].buffer_crc32c(), Checksum());
}

TEST_F(ProtocolTest, RangesNameTheVersionOfTheirDraftAndSealingHasTheChecksum) {
  const auto buffer = Upload(3);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  ASSERT_THAT(fake_.streams, SizeIs(3));
  for (const auto& messages : fake_.streams) {
    EXPECT_EQ(messages[0].version(), FakeBuffers::kDraft);
    for (const auto& message : messages) {
      EXPECT_TRUE(message.has_crc32c());
      EXPECT_FALSE(message.has_buffer_crc32c());
    }
  }
  ASSERT_THAT(fake_.seals, SizeIs(1));
  EXPECT_EQ(fake_.seals[0].version(), FakeBuffers::kDraft);
  EXPECT_EQ(fake_.seals[0].crc32c(), Checksum());
}

TEST_F(ProtocolTest, WithoutChecksumsNoneIsSent) {
  upload_.checksums = false;
  ASSERT_TRUE(Upload(1).ok());
  ASSERT_TRUE(Upload(2).ok());
  for (const auto& messages : fake_.streams) {
    for (const auto& message : messages) {
      EXPECT_FALSE(message.has_crc32c() || message.has_buffer_crc32c());
    }
  }
  EXPECT_FALSE(fake_.seals[0].has_crc32c());
  DownloadOptions options;
  options.checksums = false;
  std::string out(fake_.data.size(), '\0');
  ASSERT_TRUE(client_.Download("x", absl::MakeSpan(out), options).ok());
  EXPECT_FALSE(fake_.downloads[0].checksums());
}

TEST_F(ProtocolTest, ADamagedUploadIsSentAgainAFewTimes) {
  for (int streams : {1, 2}) {
    fake_.damaged_uploads = 2;
    EXPECT_TRUE(Upload(streams).ok());
    fake_.damaged_uploads = 1000;
    const absl::Status status = Upload(streams).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(ErrorReason(status), "BAD_CHECKSUM");
    EXPECT_GT(fake_.damaged_uploads, 980);
  }
}

TEST_F(ProtocolTest, ADamagedDownloadGoesOnWhereItWasRight) {
  fake_.damaged_downloads = 3;
  std::string out(fake_.data.size(), '\0');
  const auto buffer = client_.Download("x", absl::MakeSpan(out));
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_TRUE(out == fake_.data);
  ASSERT_THAT(fake_.downloads, SizeIs(4));
  EXPECT_EQ(fake_.downloads[0].version(), 0u);
  EXPECT_EQ(fake_.downloads[1].version(), FakeBuffers::kOld);
  EXPECT_EQ(fake_.downloads[1].offset(), 1000u);

  fake_.damaged_downloads = 1000;
  EXPECT_EQ(ErrorReason(client_.Download("x", absl::MakeSpan(out)).status()), "BAD_CHECKSUM");
  EXPECT_GT(fake_.damaged_downloads, 980);
}

TEST_F(ProtocolTest, ADownloadIsComparedWithTheChecksumOfItsBuffer) {
  std::string out(fake_.data.size(), '\0');
  fake_.whole_checksum = Checksum();
  EXPECT_TRUE(client_.Download("x", absl::MakeSpan(out)).ok());
  fake_.whole_checksum = Checksum() ^ 1;
  const absl::Status status = client_.Download("x", absl::MakeSpan(out)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ErrorMetadata(status)["field"], "buffer.crc32c");
  // That of a part says nothing about the whole.
  DownloadOptions part;
  part.offset = 100;
  EXPECT_TRUE(client_.Download("x", absl::MakeSpan(out).subspan(100), part).ok());
}

TEST_F(ProtocolTest, SealingTheWrongBufferIsAnErrorAndDeletesTheDraftAlone) {
  fake_.sealed_version = FakeBuffers::kOld;
  const absl::Status status = Upload(2).status();
  EXPECT_EQ(ErrorReason(status), "VERSION_MISMATCH") << status;
  EXPECT_EQ(ErrorMetadata(status)["expected"], "7");
  EXPECT_EQ(ErrorMetadata(status)["actual"], "3");
  EXPECT_THAT(fake_.deletes, ElementsAre(FakeBuffers::kDraft));
}

TEST_F(ProtocolTest, NothingIsDeletedOnAServerThatDoesNotKnowVersions) {
  fake_.knows_versions = false;
  fake_.sealed_version = FakeBuffers::kOld;
  EXPECT_EQ(ErrorReason(Upload(2).status()), "VERSION_MISMATCH");
  EXPECT_EQ(ErrorReason(client_.DeleteBuffer("x", FakeBuffers::kDraft)), "VERSION_MISMATCH");
  EXPECT_TRUE(fake_.deletes.empty());
}

TEST_F(ProtocolTest, ARenumberedDraftIsSealed) {
  fake_.sealed_version = FakeBuffers::kDraft + 5;
  const auto buffer = Upload(2);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_EQ(buffer->version(), FakeBuffers::kDraft + 5);
  EXPECT_TRUE(fake_.deletes.empty());
}

// A server that does not know versions may have sealed another draft of the name.
TEST_F(ProtocolTest, ABufferOfAnotherSizeIsNotTheDraft) {
  fake_.sealed_version = FakeBuffers::kDraft + 5;
  fake_.sealed_bytes = 4;
  EXPECT_EQ(ErrorReason(Upload(2).status()), "VERSION_MISMATCH");
}

TEST_F(ProtocolTest, ARefusalWithADelayIsRepeatedWhateverTheCall) {
  const auto create = [&](grpc::Status refusal, int times) {
    fake_.refusal = std::move(refusal);
    fake_.refusals = times;
    fake_.creates = 0;
    return ErrorReason(client_.CreateBuffer("x", {}).status());
  };
  using grpc::StatusCode;
  const auto error = [](StatusCode code, const char* reason, int delay = 0) {
    return FakeBuffers::Error(code, reason, delay);
  };
  for (const char* reason : {"QUEUE_FULL", "HOST_MEMORY_EXHAUSTED", "SCRATCH_EXHAUSTED"}) {
    EXPECT_EQ(create(error(StatusCode::RESOURCE_EXHAUSTED, reason, 20), 2), "");
    EXPECT_EQ(fake_.creates, 3);
    // Without a delay it is no matter of time.
    EXPECT_EQ(create(error(StatusCode::RESOURCE_EXHAUSTED, reason), 2), reason);
    EXPECT_EQ(fake_.creates, 1);
  }
  EXPECT_EQ(create(error(StatusCode::UNAVAILABLE, "DRAINING"), 2), "");
  // Nobody knows whether this one has made a buffer.
  EXPECT_EQ(create(grpc::Status(StatusCode::UNAVAILABLE, "gone"), 2), "CONNECTION_LOST");
  EXPECT_EQ(fake_.creates, 1);

  // Longer than the call may take.
  ClientOptions options = FastOptions(fake_.address());
  options.timeout = absl::Seconds(1);
  fake_.refusal = error(StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", 999);
  fake_.refusals = 1000;
  EXPECT_EQ(ErrorReason(Client(options).CreateBuffer("x", {}).status()), "QUEUE_FULL");
  options.timeout = absl::Seconds(20);
  options.retry_refused = false;
  fake_.creates = 0;
  EXPECT_EQ(ErrorReason(Client(options).CreateBuffer("x", {}).status()), "QUEUE_FULL");
  EXPECT_EQ(fake_.creates, 1);
}

// Its first answers are a failure; it counts calls.
class FailingCompute final : public v1::ComputeService::Service {
 public:
  FailingCompute() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    client = std::make_unique<Client>(FastOptions("127.0.0.1:" + std::to_string(port)));
  }

  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse*) override {
    return Answer();
  }
  grpc::Status Dot(grpc::ServerContext*, const v1::DotRequest*, v1::DotResponse*) override {
    return Answer();
  }
  grpc::Status Reduce(grpc::ServerContext*, const v1::ReduceRequest*,
                      v1::ReduceResponse*) override {
    return Answer();
  }
  grpc::Status Matmul(grpc::ServerContext*, const v1::MatmulRequest*,
                      v1::MatmulResponse*) override {
    return Answer();
  }
  grpc::Status Add(grpc::ServerContext*, const v1::AddRequest*, v1::AddResponse*) override {
    return Answer();
  }
  grpc::Status WindowSum(grpc::ServerContext*, const v1::WindowSumRequest*,
                         v1::WindowSumResponse*) override {
    return Answer();
  }
  grpc::Status Execute(grpc::ServerContext*, const v1::ExecuteRequest* request,
                       v1::ExecuteResponse* response) override {
    for (int i = 0; i < request->steps_size(); ++i) response->add_results();
    return Answer();
  }

  // Set before a call.
  grpc::Status failure;  // of the first call
  int calls = 0;
  std::unique_ptr<Client> client;

 private:
  grpc::Status Answer() { return ++calls == 1 ? failure : grpc::Status::OK; }

  std::unique_ptr<grpc::Server> server_;
};

TEST(RepetitionTest, OfWhatABreakMayHavePrevented) {
  FailingCompute server;
  const auto calls = [&](grpc::Status failure) {
    server.failure = std::move(failure);
    server.calls = 0;
    const bool ok = server.client->GetServerInfo().ok();
    EXPECT_EQ(ok, server.calls == 2) << server.failure.error_message();
    return server.calls;
  };
  using grpc::StatusCode;
  const auto error = FakeBuffers::Error;
  EXPECT_EQ(calls({StatusCode::UNAVAILABLE, "gone"}), 2);
  EXPECT_EQ(calls(error(StatusCode::UNAVAILABLE, "DRAINING", 0)), 2);
  EXPECT_EQ(calls(FakeBuffers::Damaged()), 2);
  EXPECT_EQ(calls(error(StatusCode::UNAVAILABLE, "DEVICE_LOST", 0)), 1) << "its buffers are gone";
  EXPECT_EQ(calls(error(StatusCode::DATA_LOSS, "ANOTHER", 0)), 1);
  EXPECT_EQ(calls(error(StatusCode::INTERNAL, "CUDA_ERROR", 0)), 1);
  EXPECT_EQ(calls(error(StatusCode::FAILED_PRECONDITION, "BUFFER_NOT_READY", 0)), 1);
}

// What a call has stored before its connection broke would be there twice.
TEST(RepetitionTest, NotOfOperationsThatStoreTheirResult) {
  FailingCompute server;
  server.failure = {grpc::StatusCode::UNAVAILABLE, "gone"};
  Client& client = *server.client;
  OperationOptions options;
  for (const bool stored : {false, true}) {
    if (stored) options.target = ResultBuffer{.name = "y"};
    const auto expect = [&](const absl::Status& status) {
      EXPECT_EQ(ErrorReason(status), stored ? "CONNECTION_LOST" : "") << status;
      EXPECT_EQ(server.calls, stored ? 1 : 2);
      server.calls = 0;
    };
    expect(client.Reduce(ReduceOp::kSum, "x", {0}, false, options).status());
    expect(client.Matmul("x", "x", false, false, {}, options).status());
    expect(client.Add("x", "x", options).status());
    expect(client.WindowSum("x", 1, options).status());
    Program program;
    program.Dot("x", "x");
    program.Add("x", "x", options);
    expect(client.Execute(program).status());
  }
  EXPECT_TRUE(client.Dot("x", "x").ok()) << "it stores nothing";
  EXPECT_EQ(server.calls, 2);
}

// --- Operand syntax ------------------------------------------------------------------------------

ViewSpec Slice(std::string_view text, std::vector<std::int64_t> shape) {
  const auto operand = ParseOperand(text);
  EXPECT_TRUE(operand.ok()) << operand.status();
  const auto view = ResolveSubscripts(operand->subscripts, shape);
  EXPECT_TRUE(view.ok()) << view.status();
  return view.value_or(ViewSpec());
}

TEST(OperandSyntax, Names) {
  EXPECT_EQ(ParseOperand("a/b-c.d_e")->name, "a/b-c.d_e");
  const auto file = ParseOperand("file:some/x[0].npy");
  EXPECT_EQ(file->kind, ParsedOperand::Kind::kFile);
  EXPECT_EQ(file->name, "some/x[0].npy");
}

// What Python's range(extent)[slice] has, for every combination of bounds around the ends.
TEST(OperandSyntax, SlicesFollowPython) {
  const std::vector<std::string> bounds = {"",  "-9", "-5", "-4", "-1", "0",
                                           "1", "3",  "4",  "5",  "9"};
  for (std::int64_t extent : {0, 1, 4}) {
    for (const std::string& start : bounds) {
      for (const std::string& stop : bounds) {
        for (std::int64_t step :
             {-9223372036854775807, -5l, -2l, -1l, 1l, 2l, 3l, 9223372036854775807}) {
          const std::string text = "x[" + start + ":" + stop + ":" + std::to_string(step) + "]";
          const auto clip = [&](const std::string& bound, std::int64_t otherwise) {
            if (bound.empty()) return otherwise;
            std::int64_t value = std::stoll(bound);
            if (value < 0) value += extent;
            return step > 0 ? std::clamp<std::int64_t>(value, 0, extent)
                            : std::clamp<std::int64_t>(value, -1, extent - 1);
          };
          std::vector<std::int64_t> expected;
          const std::int64_t end = clip(stop, step > 0 ? extent : -1);
          for (std::int64_t i = clip(start, step > 0 ? 0 : extent - 1);
               step > 0 ? i < end : i > end;) {
            expected.push_back(i);
            if (__builtin_add_overflow(i, step, &i)) break;
          }
          const ViewSpec view = Slice(text, {extent});
          ASSERT_THAT(view.shape, SizeIs(1));
          std::vector<std::int64_t> actual;
          for (std::int64_t i = 0; i < view.shape[0]; ++i) {
            actual.push_back(view.offset + i * view.strides[0]);
          }
          EXPECT_EQ(actual, expected) << text << " of " << extent;
        }
      }
    }
  }
}

TEST(OperandSyntax, SubscriptsOfSeveralAxes) {
  ViewSpec view = Slice("x[1, ::-1]", {3, 4, 5});
  EXPECT_EQ(view.offset, 20 + 15);
  EXPECT_THAT(view.shape, ElementsAre(4, 5));
  EXPECT_THAT(view.strides, ElementsAre(-5, 1));
  view = Slice("x[..., -1]", {3, 4, 5});
  EXPECT_EQ(view.offset, 4);
  EXPECT_THAT(view.shape, ElementsAre(3, 4));
  EXPECT_THAT(view.strides, ElementsAre(20, 5));
  view = Slice("x[ 2 , ... , 1:3 , ]", {3, 4, 5});
  EXPECT_EQ(view.offset, 41);
  EXPECT_THAT(view.shape, ElementsAre(4, 2));
  view = Slice("x[2, 3, 4]", {3, 4, 5});
  EXPECT_EQ(view.offset, 59);
  EXPECT_TRUE(view.shape.empty());
  view = Slice("x[1:1, 3]", {3, 4});
  EXPECT_EQ(view.offset, 0);
  EXPECT_THAT(view.shape, ElementsAre(0));
}

TEST(OperandSyntax, RawViews) {
  auto operand = ParseOperand("norms@5:540x1257:0x-1");
  ASSERT_TRUE(operand.ok());
  EXPECT_EQ(operand->name, "norms");
  EXPECT_EQ(operand->view->offset, 5);
  EXPECT_THAT(operand->view->shape, ElementsAre(540, 1257));
  EXPECT_THAT(operand->view->strides, ElementsAre(0, -1));
  operand = ParseOperand("x@7");
  ASSERT_TRUE(operand.ok());
  EXPECT_EQ(operand->view->offset, 7);
  EXPECT_TRUE(operand->view->shape.empty());
}

TEST(OperandSyntax, Mistakes) {
  for (const char* text :
       {"", "[0]", "@0:1", "x[", "x[]", "x[0]y", "x[0", "x[a]", "x[1:2:3:4]", "x[0,,1]", "x[1.5]",
        "x@", "x@a", "x@0:1:2:3", "x@0:1xx2", "file:", "x[99999999999999999999]"}) {
    EXPECT_EQ(ErrorReason(ParseOperand(text).status()), "BAD_OPERAND") << text;
  }
  const auto reason = [](const char* text, std::vector<std::int64_t> shape) {
    return ErrorReason(ResolveSubscripts(ParseOperand(text)->subscripts, shape).status());
  };
  EXPECT_EQ(reason("x[3]", {3}), "BAD_VIEW");
  EXPECT_EQ(reason("x[-4]", {3}), "BAD_VIEW");
  EXPECT_EQ(reason("x[0, 0]", {3}), "BAD_VIEW");
  EXPECT_EQ(reason("x[::0]", {3}), "BAD_VIEW");
  EXPECT_EQ(reason("x[..., ...]", {3}), "BAD_VIEW");
}

// --- Random arrays -------------------------------------------------------------------------------

TEST(RandomArray, DoesNotDependOnHowItIsRead) {
  for (DType dtype :
       {DType::kF32, DType::kF64, DType::kF16, DType::kBF16, DType::kI32, DType::kI64}) {
    const Source source = RandomArray(Distribution::kNormal, dtype, 3);
    std::string whole(1000 * SizeOf(dtype), '\0');
    ASSERT_TRUE(source(0, absl::MakeSpan(whole)).ok());
    std::string parts;
    while (parts.size() < whole.size()) {
      std::string part(std::min<std::size_t>(48, whole.size() - parts.size()), '\0');
      ASSERT_TRUE(source(parts.size(), absl::MakeSpan(part)).ok());
      parts += part;
    }
    EXPECT_EQ(parts, whole);
  }
}

TEST(RandomArray, HasItsMoments) {
  std::vector<double> x(1 << 16);
  const auto fill = [&](Distribution distribution) {
    const Source source = RandomArray(distribution, DType::kF64, 1);
    const absl::Span<char> bytes(reinterpret_cast<char*>(x.data()), x.size() * sizeof(double));
    ASSERT_TRUE(source(0, bytes).ok());
  };
  const auto moment = [&](int power) {
    double sum = 0;
    for (double value : x) sum += std::pow(value, power);
    return sum / static_cast<double>(x.size());
  };
  // Five standard errors of each mean, 1/256 of the distribution's own deviation.
  fill(Distribution::kNormal);
  EXPECT_NEAR(moment(1), 0, 5 / 256.0);
  EXPECT_NEAR(moment(2), 1, 5 * std::sqrt(2.0) / 256);
  EXPECT_NEAR(moment(4), 3, 5 * std::sqrt(96.0) / 256);
  fill(Distribution::kUniform);
  EXPECT_NEAR(moment(1), 0.5, 5 * std::sqrt(1 / 12.0) / 256);
  EXPECT_THAT(x, ::testing::Each(AllOf(Ge(0.0), ::testing::Lt(1.0))));
  fill(Distribution::kOnes);
  EXPECT_EQ(moment(1), 1);
}

}  // namespace
}  // namespace tessera
