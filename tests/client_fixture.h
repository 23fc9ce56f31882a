// Common parts of the client library's suites: options, servers as processes, and values.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "tests/test_server.h"

extern char** environ;

namespace tessera {

inline Options TcpOptions() {
  Options options = TestOptions();
  options.listen = {"127.0.0.1:0"};
  return options;
}

inline ClientOptions FastOptions(const std::string& address) {
  ClientOptions options;
  options.server = address;
  options.timeout = absl::Seconds(60);
  options.connect_timeout = absl::Seconds(5);
  return options;
}

inline std::string Pattern(std::size_t bytes) {
  std::string data(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i * 31 + i / 251);
  return data;
}

template <class T>
std::vector<T> Values(const v1::Tensor& tensor) {
  std::vector<T> values(tensor.data().size() / sizeof(T));
  std::memcpy(values.data(), tensor.data().data(), tensor.data().size());
  return values;
}

// Uploads floats.
inline absl::StatusOr<v1::Buffer> PutFloats(Client& client, const std::string& name,
                                            const std::vector<float>& values) {
  const std::string bytes = Bytes(values);
  return client.Upload(name, DType::kF32, {static_cast<std::int64_t>(values.size())},
                       FromMemory(bytes), {.replace = true});
}

// Returns the bytes of a download.
inline std::string Get(Client& client, const std::string& name,
                       const DownloadOptions& options = {}) {
  std::string data;
  const auto append = [&](const v1::Buffer&, std::string_view bytes) {
    data += bytes;
    return absl::OkStatus();
  };
  const auto buffer = client.Download(name, append, options);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  return data;
}

// A small inline array.
inline v1::Tensor Floats(const std::vector<float>& values) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_F32);
  tensor.add_shape(static_cast<std::int64_t>(values.size()));
  tensor.set_data(Bytes(values));
  return tensor;
}

inline v1::Tensor Integers(const std::vector<std::int64_t>& values) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_I64);
  tensor.add_shape(static_cast<std::int64_t>(values.size()));
  tensor.set_data(Bytes(values));
  return tensor;
}

// Returns a free port of this host, below the ports that Linux gives to sockets that request any
// port. Each process starts its search at a different port.
inline int FreePort() {
  constexpr int kFirst = 10000, kPorts = 22000;
  static std::atomic<int> next{static_cast<int>(::getpid()) * 61 % kPorts};
  while (true) {
    const int port = kFirst + next++ % kPorts;
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool is_free =
        ::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    ::close(socket);
    if (is_free) return port;
  }
}

// A server whose only worker waits for the test before each operation.
class WithABusyServer : public ::testing::Test {
 protected:
  void SetUp() override {
    Options options = TcpOptions();
    options.workers = 1;
    options.queue = 1;
    server_ = std::make_unique<TestServer>(options, Only(device_));
    client_ = std::make_unique<Client>(FastOptions(server_->address()));
    ASSERT_TRUE(PutFloats(*client_, "x", {1, 2, 3}).ok());
    device_->Close(FakeDevice::Step::kBegin);
  }
  void TearDown() override { device_->Open(); }

  FakeDevice* const device_ = new FakeDevice;  // Owned by the server.
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<Client> client_;
};

#ifdef TESSERA_SERVER
// The server as a separate process, which can be killed, stopped and restarted at its address.
class ServerProcess {
 public:
  ServerProcess() : address_("127.0.0.1:" + std::to_string(FreePort())) { Start(); }
  ~ServerProcess() { End(SIGKILL); }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const std::string& address() const { return address_; }

  // Returns when the server responds.
  void Start() {
    std::vector<std::string> words = {TESSERA_SERVER, "--listen", address_,      "--device", "cpu",
                                      "--workers",    "2",        "--log-level", "off"};
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    ASSERT_EQ(::posix_spawn(&pid_, TESSERA_SERVER, nullptr, nullptr, arguments.data(), environ), 0);
    ClientOptions options = FastOptions(address_);
    options.timeout = options.connect_timeout = absl::Seconds(60);
    const absl::Status status = Client(options).GetServerInfo().status();
    ASSERT_TRUE(status.ok()) << status;
  }
  // With SIGSTOP, the server hangs when this returns; with SIGCONT, it continues.
  void Signal(int signal) const {
    ::kill(pid_, signal);
    if (signal == SIGSTOP) ::waitpid(pid_, nullptr, WUNTRACED);
  }
  // Returns the number of bytes in its connections that the server has not read yet.
  std::uint64_t Unread() const {
    const int port = std::stoi(address_.substr(address_.rfind(':') + 1));
    std::ifstream table("/proc/self/net/tcp");
    std::string line;
    std::uint64_t unread = 0;
    while (std::getline(table, line)) {
      unsigned local = 0, state = 0, received = 0;
      if (std::sscanf(line.c_str(), "%*d: %*x:%x %*x:%*x %x %*x:%x", &local, &state, &received) ==
              3 &&
          local == static_cast<unsigned>(port) && state == 1)
        unread += received;
    }
    return unread;
  }
  // Ends the server, and waits until it has ended.
  void End(int signal) {
    if (pid_ == 0) return;
    ::kill(pid_, signal);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  const std::string address_;
  pid_t pid_ = 0;
};
#endif

}  // namespace tessera
