// Connections: how many are allowed, which clients are refused, and how connections end.
#include "server/net/listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <future>
#include <iterator>

#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/generic/generic_stub.h"
#include "tests/test_server.h"

namespace tessera {
namespace {

using testing::HasSubstr;

sockaddr_in Loopback(const std::string& address) {
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int port = std::atoi(address.c_str() + address.rfind(':') + 1);
  to.sin_port = htons(static_cast<std::uint16_t>(port));
  return to;
}

// A connection that sends nothing by itself.
class RawConnection {
 public:
  RawConnection() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}
  explicit RawConnection(const std::string& address) : RawConnection() {
    EXPECT_TRUE(Connect(address));
  }
  RawConnection(RawConnection&& from) noexcept : fd_(std::exchange(from.fd_, -1)) {}
  ~RawConnection() {
    if (fd_ >= 0) close(fd_);
  }
  bool Connect(const std::string& address) {
    const sockaddr_in to = Loopback(address);
    return connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0;
  }
  // Returns whether gRPC greets this client, as it does if it serves the client. Returns false if
  // the connection was closed, or if nothing arrived for a minute.
  bool IsServed() {
    char byte;
    return Readable() && recv(fd_, &byte, 1, MSG_PEEK) == 1;
  }
  // Returns whether the connection closes within a minute, after it has been read to its end.
  bool Closes() {
    char bytes[256];
    while (Readable()) {
      if (recv(fd_, bytes, sizeof(bytes), 0) <= 0) return true;
    }
    return false;
  }

 private:
  bool Readable() {
    pollfd wait{fd_, POLLIN, 0};
    return poll(&wait, 1, 60'000) == 1;
  }
  int fd_;
};

// Echoes the request of every call. For /slow it does so only when it is told to.
class Echo : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    return new Call(*this, context->method() == "/slow");
  }
  std::atomic<int> waiting{0};
  std::promise<void> release;
  std::shared_future<void> released{release.get_future()};

 private:
  class Call : public grpc::ServerGenericBidiReactor {
   public:
    Call(Echo& echo, bool slow) : echo_(echo), slow_(slow) { StartRead(&message_); }
    void OnReadDone(bool ok) override {
      if (!ok) return Finish(grpc::Status(grpc::StatusCode::INTERNAL, "no request"));
      if (!slow_) return StartWriteAndFinish(&message_, {}, grpc::Status::OK);
      ++echo_.waiting;
      std::thread([this] {
        echo_.released.wait();
        StartWriteAndFinish(&message_, {}, grpc::Status::OK);
      }).detach();
    }
    void OnDone() override { delete this; }

   private:
    Echo& echo_;
    const bool slow_;
    grpc::ByteBuffer message_;
  };
};

// A listener and a gRPC server that it feeds.
class Host {
 public:
  Host(const std::vector<std::string>& addresses, std::size_t max_connections) {
    SetUpLog("off", false);
    auto opened = Listener::Open(addresses, max_connections);
    if (!opened.ok()) {
      ADD_FAILURE() << opened.status();
      std::abort();
    }
    listener_ = *std::move(opened);
    grpc::ServerBuilder builder;
    builder.RegisterCallbackGenericService(&echo_);
    auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        grpc::InsecureServerCredentials());
    server_ = builder.BuildAndStart();
    listener_->Start(std::move(acceptor));
  }
  ~Host() {
    listener_->Close();
    server_->Shutdown(std::chrono::system_clock::now());
  }
  Listener& listener() { return *listener_; }
  grpc::Server& server() { return *server_; }
  Echo& echo() { return echo_; }
  ConnectionTable& connections() { return listener_->connections(); }
  const std::string& address(std::size_t i = 0) { return listener_->addresses().at(i); }

 private:
  Echo echo_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<grpc::Server> server_;
};

std::shared_ptr<grpc::Channel> Dial(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // A separate connection.
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method = "/") {
  grpc::GenericStub stub(channel);
  grpc::Slice slice("hello");
  grpc::ByteBuffer send(&slice, 1);
  grpc::ByteBuffer receive;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, method, grpc::StubOptions(), &send, &receive,
                 [&](grpc::Status status) { done.set_value(std::move(status)); });
  return done.get_future().get();
}

// --- The table ---------------------------------------------------------------------------------

class TableTest : public testing::Test {
 protected:
  void TearDown() override {
    for (const int fd : sockets_) close(fd);
  }
  int Socket() {
    sockets_.push_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    return sockets_.back();
  }
  // Gives the descriptor's number to a new owner immediately.
  void Replace(int fd) {
    const int other = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(other, fd);
    close(other);
  }
  std::vector<int> sockets_;
};

using Answer = ConnectionTable::Answer;

TEST_F(TableTest, PlacesComeBackThoughDescriptorsAreUsedAgain) {
  ConnectionTable table(3);
  const int first = Socket();
  const int second = Socket();
  EXPECT_EQ(table.Admit(first, ""), Answer::kAdmitted);
  EXPECT_EQ(table.Admit(second, ""), Answer::kAdmitted);
  EXPECT_EQ(table.Admit(Socket(), ""), Answer::kAdmitted);
  EXPECT_EQ(table.Admit(Socket(), ""), Answer::kFull);
  Replace(first);
  dup2(Socket(), second);  // Another socket.
  EXPECT_TRUE(Eventually([&] { return table.open() == 1; }));
  EXPECT_EQ(table.Admit(Socket(), ""), Answer::kAdmitted);
  EXPECT_EQ(table.Admit(Socket(), ""), Answer::kAdmitted);
  EXPECT_EQ(table.Admit(Socket(), ""), Answer::kFull);
}

TEST_F(TableTest, OneSourceHasHalfOfThePlaces) {
  ConnectionTable table(16);
  std::vector<int> of_a;
  for (int i = 0; i < 8; ++i) {
    of_a.push_back(Socket());
    EXPECT_EQ(table.Admit(of_a.back(), "a"), Answer::kAdmitted);
  }
  EXPECT_EQ(table.Admit(Socket(), "a"), Answer::kSourceFull);
  EXPECT_EQ(table.Admit(Socket(), "b"), Answer::kAdmitted);
  for (int i = 0; i < 7; ++i) EXPECT_EQ(table.Admit(Socket(), ""), Answer::kAdmitted);
  EXPECT_EQ(table.Admit(Socket(), ""), Answer::kFull);
  Replace(of_a[3]);
  EXPECT_TRUE(Eventually([&] { return table.Admit(Socket(), "a") == Answer::kAdmitted; }));
  EXPECT_EQ(table.open(), 16u);
  EXPECT_EQ(ConnectionTable(15).source_limit(), 15u) << "too few to share";
}

TEST_F(TableTest, AConnectionIsEndedOnce) {
  const absl::StatusOr<TcpSockets> listening = ListenTcp("127.0.0.1:0");
  ASSERT_TRUE(listening.ok());
  sockets_ = listening->sockets;
  RawConnection client(listening->address), other(listening->address);
  ConnectionTable table(3);
  std::vector<int> ports;
  for (int i = 0; i < 2; ++i) {
    pollfd waiting{sockets_[0], POLLIN, 0};
    ASSERT_EQ(poll(&waiting, 1, 5000), 1);
    sockaddr_in peer{};
    socklen_t size = sizeof(peer);
    sockets_.push_back(accept(sockets_[0], reinterpret_cast<sockaddr*>(&peer), &size));
    ports.push_back(ntohs(peer.sin_port));
    EXPECT_EQ(table.Admit(sockets_.back(), ""), Answer::kAdmitted);
  }
  const std::string host("\x7f\0\0\1", 4), elsewhere("\x7f\0\0\2", 4);
  const Endpoint here{host,
                      std::stoi(listening->address.substr(listening->address.rfind(':') + 1))};
  EXPECT_FALSE(table.End({elsewhere, ports[0]}, here));
  EXPECT_FALSE(table.End({host, ports[0]}, {elsewhere, here.port}));
  EXPECT_TRUE(table.End({host, ports[0]}, here));
  EXPECT_FALSE(table.End({host, ports[0]}, here)) << "it has been";
  EXPECT_EQ(table.ended(), 1u);
  EXPECT_TRUE(client.Closes());
  EXPECT_TRUE(table.End({host, ports[1]}, here));
  EXPECT_EQ(table.ended(), 2u);
}

TEST(Sources, AreAddressesAndNetworksAndEmptyOnThisHost) {
  const auto of = [](const std::string& text) {
    sockaddr_storage peer{};
    if (text.find(':') == text.npos) {
      peer.ss_family = AF_INET;
      inet_pton(AF_INET, text.c_str(), &reinterpret_cast<sockaddr_in&>(peer).sin_addr);
    } else {
      peer.ss_family = AF_INET6;
      inet_pton(AF_INET6, text.c_str(), &reinterpret_cast<sockaddr_in6&>(peer).sin6_addr);
    }
    return SourceOf(peer);
  };
  EXPECT_EQ(of("127.0.0.1"), "");
  EXPECT_EQ(of("127.9.9.9"), "");
  EXPECT_EQ(of("::1"), "");
  EXPECT_EQ(of("::ffff:127.0.0.1"), "");
  EXPECT_EQ(of("192.0.2.1"), std::string("\xc0\x00\x02\x01", 4));
  EXPECT_EQ(of("::ffff:192.0.2.1"), of("192.0.2.1"));
  EXPECT_NE(of("192.0.2.2"), of("192.0.2.1"));
  EXPECT_EQ(of("2001:db8:0:1::1"), of("2001:db8:0:1:ffff::9"));
  EXPECT_NE(of("2001:db8:0:1::1"), of("2001:db8:0:2::1"));
  sockaddr_storage local{};
  local.ss_family = AF_UNIX;
  EXPECT_EQ(SourceOf(local), "");
}

// --- Addresses ---------------------------------------------------------------------------------

void ExpectCannotListen(const std::string& address, const std::string& why = "") {
  const absl::Status status = Listener::Open({address}, 4).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << address;
  EXPECT_EQ(ErrorReason(status), "CANNOT_LISTEN") << address;
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot listen on " + address)) << address;
  EXPECT_THAT(std::string(status.message()), HasSubstr(why)) << address;
}

TEST(Addresses, EveryKindIsServed) {
  const std::string path = SocketPath("listener_kinds");
  const std::string other = SocketPath("listener_other");
  std::vector<std::string> addresses = {"127.0.0.1:0", "localhost:0", "unix:" + path,
                                        "unix://" + other};
  const int probe = socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  any.sin6_addr = IN6ADDR_LOOPBACK_INIT;
  if (bind(probe, reinterpret_cast<const sockaddr*>(&any), sizeof(any)) == 0) {
    addresses.push_back("[::1]:0");
    addresses.push_back("[::]:0");
  }
  close(probe);
  {
    Host host(addresses, 64);
    ASSERT_EQ(host.listener().addresses().size(), addresses.size());
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      std::string address = host.address(i);
      EXPECT_THAT(address, Not(testing::EndsWith(":0")));
      // c-ares, which gRPC uses to look up names, leaks memory for "localhost".
      const std::size_t port = address.rfind(':');
      if (address.substr(0, port) == "localhost") address = "127.0.0.1" + address.substr(port);
      const grpc::Status status = Call(Dial(address));
      EXPECT_TRUE(status.ok()) << address << ": " << status.error_message();
    }
    // IPv4 clients reach "[::]", and one port serves all addresses of a name.
    EXPECT_TRUE(RawConnection(host.address(1)).IsServed());
    EXPECT_TRUE(RawConnection(host.listener().addresses().back().substr(0, 1) == "["
                                  ? host.listener().addresses().back()
                                  : host.address(0))
                    .IsServed());
    EXPECT_EQ(host.connections().refused(), 0u);
  }
  EXPECT_NE(access(path.c_str(), F_OK), 0);
  EXPECT_NE(access(other.c_str(), F_OK), 0);
}

// Simulates a kernel without IPv6, where socket() fails for IPv6.
[[noreturn]] void ListenWithoutIpv6() {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_INET6, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAFNOSUPPORT),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {static_cast<unsigned short>(std::size(code)), code};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) std::_Exit(1);
  const absl::StatusOr<TcpSockets> every = ListenTcp("[::]:0");
  if (!every.ok() || every->address.rfind("0.0.0.0:", 0) != 0) std::_Exit(2);
  if (ListenTcp("[::1]:0").ok()) std::_Exit(3);
  std::_Exit(0);
}

TEST(AddressesDeathTest, EveryAddressIsThatOfIpv4WhereTheKernelHasNoOther) {
  EXPECT_EXIT(ListenWithoutIpv6(), testing::ExitedWithCode(0), "");
}

TEST(Addresses, TakenAndImpossibleOnesAreRefused) {
  const std::string path = SocketPath("listener_taken");
  auto first = Listener::Open({"127.0.0.1:0", "unix:" + path}, 4);
  ASSERT_TRUE(first.ok()) << first.status();
  ExpectCannotListen((*first)->addresses()[0], "in use");
  ExpectCannotListen("unix:" + path, "in use");
  EXPECT_EQ(access(path.c_str(), F_OK), 0);
  ExpectCannotListen("192.0.2.1:0");
  ExpectCannotListen("no-such-host.invalid:1");
  ExpectCannotListen("127.0.0.1");
  ExpectCannotListen("127.0.0.1:port", "no port from 0 to 65535");
  ExpectCannotListen("127.0.0.1:65536", "no port from 0 to 65535");
  ExpectCannotListen("::1:50051", "brackets");
  ExpectCannotListen("unix:");
  ExpectCannotListen("unix:/" + std::string(200, 'x'));
  ExpectCannotListen("unix:/no/such/directory/s");
  // The port is free again although the kernel still remembers a connection of the first listener.
  const std::string address = (*first)->addresses()[0];
  { RawConnection waiting(address); }
  (*first)->Close();
  EXPECT_TRUE(Listener::Open({address}, 4).ok());
}

TEST(Addresses, SocketFilesAreReplacedOnlyWhenDead) {
  const std::string path = SocketPath("listener_dead");
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  path.copy(name.sun_path, sizeof(name.sun_path) - 1);
  const int dead = socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(bind(dead, reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  close(dead);
  ASSERT_EQ(access(path.c_str(), F_OK), 0);
  {
    Host host({"unix:" + path}, 4);
    EXPECT_TRUE(Call(Dial(host.address())).ok());
    // A file that another program has put there in the meantime is not removed.
    unlink(path.c_str());
    std::ofstream(path) << "a file";
    ExpectCannotListen("unix:" + path, "in use");
  }
  EXPECT_EQ(access(path.c_str(), F_OK), 0);
  unlink(path.c_str());
}

// --- The budget --------------------------------------------------------------------------------

// Runs in a separate process. Exits with 0, or with a number that says what went wrong.
[[noreturn]] void RunOutOfDescriptors() {
  const rlimit limit{200, 200};
  setrlimit(RLIMIT_NOFILE, &limit);
  Host host({"127.0.0.1:0"}, 4096);
  if (host.connections().limit() != 100) std::_Exit(1);
  auto channel = Dial(host.address());
  if (!Call(channel).ok()) std::_Exit(2);
  std::vector<RawConnection> connections(10);  // Their sockets already exist.
  RawConnection late;
  std::vector<int> files;
  for (int fd = 0; fd >= 0;) {
    fd = open("/dev/null", O_RDONLY);
    if (fd >= 0) files.push_back(fd);
  }
  for (RawConnection& connection : connections) {
    if (!connection.Connect(host.address()) || connection.IsServed()) std::_Exit(3);
  }
  if (host.connections().refused() != 10) std::_Exit(4);
  if (!Call(channel).ok()) std::_Exit(5);
  const std::clock_t before = std::clock();  // The processor time of all threads.
  absl::SleepFor(absl::Milliseconds(300));
  if (std::clock() - before > CLOCKS_PER_SEC * 3 / 20) std::_Exit(6);
  for (const int fd : files) close(fd);
  if (!late.Connect(host.address()) || !late.IsServed()) std::_Exit(7);
  if (!Call(Dial(host.address())).ok()) std::_Exit(8);
  std::_Exit(0);
}

TEST(BudgetDeathTest, RunningOutOfDescriptorsIsSurvived) {
#ifdef __SANITIZE_ADDRESS__
  // UndefinedBehaviorSanitizer opens a pipe to find out whether an object's vptr can be read.
  GTEST_SKIP() << "the sanitizer needs descriptors";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(RunOutOfDescriptors(), testing::ExitedWithCode(0), "");
}

// --- The end -----------------------------------------------------------------------------------

TEST(Closing, RunningCallsSucceedWhileNoClientCanConnect) {
  const std::string path = SocketPath("listener_closing");
  Host host({"127.0.0.1:0", "unix:" + path}, 16);
  auto channel = Dial(host.address());
  auto idle = Dial(host.address(1));
  ASSERT_TRUE(Call(idle).ok());
  auto running = std::async(std::launch::async, [&] { return Call(channel, "/slow"); });
  ASSERT_TRUE(Eventually([&] { return host.echo().waiting == 1; }));

  std::thread twice([&] { host.listener().Close(); });
  host.listener().Close();
  twice.join();
  EXPECT_FALSE(RawConnection().Connect(host.address()));
  EXPECT_NE(access(path.c_str(), F_OK), 0);
  EXPECT_TRUE(Call(channel).ok()) << "old connections still serve";

  // The connections end with the server. GOAWAY ends idle connections immediately.
  ASSERT_EQ(idle->GetState(false), GRPC_CHANNEL_READY);
  std::thread shutdown(
      [&] { host.server().Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(60)); });
  EXPECT_TRUE(Eventually([&] { return idle->GetState(false) != GRPC_CHANNEL_READY; }));
  EXPECT_TRUE(Eventually([&] { return channel->GetState(false) != GRPC_CHANNEL_READY; }));
  EXPECT_EQ(Call(channel).error_code(), grpc::StatusCode::UNAVAILABLE);
  host.echo().release.set_value();
  const grpc::Status status = running.get();
  EXPECT_TRUE(status.ok()) << status.error_message();
  shutdown.join();
  EXPECT_TRUE(Eventually([&] { return host.connections().open() == 0; }));
}

TEST(Closing, WhoConnectsMeanwhileIsServedOrClosed) {
  for (int round = 0; round < 20; ++round) {
    Host host({"127.0.0.1:0"}, 64);
    std::vector<std::thread> callers;
    for (int t = 0; t < 4; ++t) {
      callers.emplace_back([&] {
        for (int i = 0; i < 4; ++i) {
          RawConnection connection;
          if (connection.Connect(host.address())) connection.IsServed();
        }
      });
    }
    host.listener().Close();
    host.server().Shutdown(std::chrono::system_clock::now());
    for (std::thread& caller : callers) caller.join();
  }
}

// --- The server's settings ---------------------------------------------------------------------

// Returns the options of a server that listens.
template <class Change>
Options Listening(const Change& change) {
  Options options = With(change);
  options.listen = {"127.0.0.1:0"};
  return options;
}

TEST(Settings, ConnectionsThatSayNothingEnd) {
  TestServer server(
      Listening([](Options& options) { options.handshake = absl::Milliseconds(300); }));
  // On a busy machine, a connection may end before it is served.
  EXPECT_TRUE(Eventually([&] { return RawConnection(server.address()).IsServed(); }));
  EXPECT_TRUE(RawConnection(server.address()).Closes()) << "within a minute";
}

TEST(Settings, IdleConnectionsEndAndLaterCallsConnectAgain) {
  TestServer server(
      Listening([](Options& options) { options.connection_idle = absl::Milliseconds(300); }));
  auto channel = Dial(server.address());
  auto stub = v1::ComputeService::NewStub(channel);
  const auto call = [&] {
    grpc::ClientContext context;
    v1::GetServerInfoResponse response;
    return stub->GetServerInfo(&context, {}, &response).ok();
  };
  EXPECT_TRUE(call());
  EXPECT_TRUE(Eventually([&] { return channel->GetState(false) == GRPC_CHANNEL_IDLE; }));
  EXPECT_TRUE(call());
}

}  // namespace
}  // namespace tessera
