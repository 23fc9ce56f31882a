// The homes of names, and the metadata by which proxies find them.
#include "kernels/client_and_server/ring.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "client/async.h"
#include "client/ring_client.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Ring, RouteIsTheFolder) {
  EXPECT_EQ(RouteOf("x"), "x");
  EXPECT_EQ(RouteOf("run7/x"), "run7");
  EXPECT_EQ(RouteOf("run7/a/x"), "run7/a");
  EXPECT_EQ(RouteOf("/x"), "");
  EXPECT_EQ(RouteOf("run7/"), "run7");
}

TEST(Ring, WeightsAreThoseOfTheDocumentation) {
  EXPECT_EQ(RouteWeight("a", ""), 0x32cd4e8b32d0fa7cu);
  EXPECT_EQ(RouteWeight("a", "run7"), 0xbee5beb9bb3d3212u);
  EXPECT_EQ(RouteWeight("gpu-0.x", "run7/part"), 0xd7658e9e17c9d1b6u);
}

TEST(Ring, NamesOfAServerThatGoesMoveToAllOthers) {
  const Ring four = *Ring::Parse("a h:1\nb h:2\nc h:3\nd h:4");
  const Ring three = *Ring::Parse("c h:3\na h:1\nb h:2");
  std::map<std::string, int> held, moved;
  for (int i = 0; i < 4000; ++i) {
    const std::string name = "run" + std::to_string(i) + "/x";
    const std::string before = four.HomeOf(name).name, after = three.HomeOf(name).name;
    ++held[before];
    EXPECT_EQ(four.HomeOf("run" + std::to_string(i) + "/y").name, before);
    if (before != "d") {
      EXPECT_EQ(before, after) << name;
    } else {
      ++moved[after];
    }
  }
  for (const auto& [server, names] : held) EXPECT_NEAR(names, 1000, 150) << server;
  for (const auto& [server, names] : moved) EXPECT_NEAR(names, held["d"] / 3, 80) << server;
  EXPECT_EQ(moved.size(), 3u);
}

TEST(Ring, ParseSaysWhichLineIsWrong) {
  const auto why = [](const char* text) {
    const auto ring = Ring::Parse(text);
    EXPECT_EQ(ErrorReason(ring.status()), "BAD_RING") << text;
    return std::string(ring.status().message());
  };
  EXPECT_THAT(why(""), HasSubstr("no server"));
  EXPECT_THAT(why("# none\n\n"), HasSubstr("no server"));
  EXPECT_THAT(why("a h:1\nb\n"), HasSubstr("line 2"));
  EXPECT_THAT(why("a h:1 more"), HasSubstr("line 1"));
  EXPECT_THAT(why("a/b h:1"), HasSubstr("line 1"));
  EXPECT_THAT(why("a h:1\n\na h:2"), HasSubstr("line 3"));
  const auto good = Ring::Parse("  b\th:2 # second\r\n#\na h:1");
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(good->servers()[0].name, "a");
  EXPECT_EQ(good->Find("b")->address, "h:2");
  EXPECT_EQ(good->Find("c"), nullptr);
  for (const auto& [file, says] : std::map<std::string, std::string>{
           {"/none", "cannot be read"}, {"/dev/zero", "is larger than 1 MiB"}}) {
    const absl::Status status = RingClient::Read(file).status();
    EXPECT_EQ(ErrorReason(status), "BAD_RING") << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  }
}

// Records the route and the trace of each call, and gives no useful response.
class Listener final : public grpc::CallbackGenericService {
 public:
  Listener() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterCallbackGenericService(this);
    server_ = builder.BuildAndStart();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  std::vector<std::string> Take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(routes_, {});
  }
  std::vector<std::string> TakeTraces() {
    const std::lock_guard lock(mutex_);
    return std::exchange(traces_, {});
  }

 private:
  struct Reply final : grpc::ServerGenericBidiReactor {
    Reply() { Finish({grpc::StatusCode::NOT_FOUND, "no"}); }
    void OnDone() override { delete this; }
  };
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    const auto entry = [&](const char* key) {
      const auto found = context->client_metadata().find(key);
      if (found == context->client_metadata().end()) return std::string("none");
      return std::string(found->second.data(), found->second.size());
    };
    const std::lock_guard lock(mutex_);
    routes_.push_back(entry("tessera-route"));
    traces_.push_back(entry("traceparent"));
    return new Reply;
  }

  int port_ = 0;
  std::mutex mutex_;
  std::vector<std::string> routes_;
  std::vector<std::string> traces_;
  std::unique_ptr<grpc::Server> server_;
};

TEST(Route, TravelsWithCallsThatNameABuffer) {
  Listener listener;
  Client client({.server = listener.address(), .shared_memory = false, .send_route = true});
  v1::Tensor one;
  one.set_dtype(v1::DTYPE_F32);
  one.add_shape(1);
  one.set_data(std::string(4, '\0'));
  const auto ignore = [](const auto& result) { result.status().IgnoreError(); };
  ignore(client.GetBuffer("run7/a/x"));
  ignore(client.Dot(one, "run8/x"));
  ignore(client.Async().Dot("run9/x", "run8/x").Get());
  ignore(client.Reduce(ReduceOp::kSum, one, {0}, false, {.target = ResultBuffer{"out/y"}}));
  ignore(client.CopyBuffer("from/x", {"to/x"}));
  ignore(client.ImportBuffer("h:1", "there/x", {"here/x"}));
  ignore(client.Upload("up/x", DType::kF32, {1}, FromMemory("abcd")));
  ignore(client.Download("down/x", [](const auto&, auto) { return absl::OkStatus(); }));
  Program program;
  program.Dot(one, one);
  program.Dot("steps/x", one);
  ignore(client.Execute(program));
  EXPECT_THAT(listener.Take(),
              ElementsAre("run7/a", "run8", "run9", "out", "from", "here", "up", "down", "steps"));
  // Calls that name no buffer, and names that no header can carry.
  ignore(client.ListBuffers());
  ignore(client.Dot(one, one));
  ignore(client.GetBuffer("bad name\n"));
  EXPECT_THAT(listener.Take(), ElementsAre("none", "none", "none"));
  Client plain({.server = listener.address(), .shared_memory = false});
  ignore(plain.GetBuffer("run7/x"));
  EXPECT_THAT(listener.Take(), ElementsAre("none"));
}

TEST(Metadata, TravelsWithEveryCallAndTransfer) {
  Listener listener;
  Client client({.server = listener.address(), .shared_memory = false});
  const auto ignore = [](const auto& result) { result.status().IgnoreError(); };
  const auto entry = [](const char* value) { return CallMetadata{{"traceparent", value}}; };
  const std::vector<float> one = {1};
  ignore(client.GetServerInfo({.metadata = entry("1")}));
  ignore(client.Dot("x", "x", {.metadata = entry("2")}));
  ignore(client.Async().Dot("x", "x", {.metadata = entry("3")}).Get());
  ignore(client.Upload("x", one, {1}, {.metadata = entry("4")}));
  ignore(client.Download<float>("x", {.metadata = entry("5")}));
  ignore(client.Download<float>("x", {.streams = 2, .metadata = entry("6")}));
  ignore(client.Async().Download<float>("x", {.metadata = entry("7")}).Get());
  ignore(client.GetServerInfo());
  EXPECT_THAT(listener.TakeTraces(), ElementsAre("1", "2", "3", "4", "5", "6", "7", "none"));
  // gRPC would end the process.
  for (const auto& [key, value] : CallMetadata{{"Upper", "x"},
                                               {"", "x"},
                                               {"a b", "x"},
                                               {"grpc-timeout", "1S"},
                                               {"data-bin", "x"},
                                               {"traceparent", "line\nline"}}) {
    const absl::Status status = client.GetServerInfo({.metadata = {{key, value}}}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << key;
    EXPECT_EQ(ErrorReason(status), "BAD_OPTION") << key;
    EXPECT_EQ(ErrorReason(client.Download<float>("x", {.metadata = {{key, value}}}).status()),
              "BAD_OPTION");
  }
  EXPECT_TRUE(listener.TakeTraces().empty());
}

TEST(RingClient, CallsTheHome) {
  Listener listeners[2];
  const RingClient ring(
      *Ring::Parse("a " + listeners[0].address() + "\nb " + listeners[1].address()));
  for (int i = 0; i < 10; ++i) {
    const std::string name = "run" + std::to_string(i) + "/x";
    ring.For(name).GetBuffer(name).status().IgnoreError();
    const bool first = ring.ring().HomeOf(name).name == "a";
    EXPECT_EQ(listeners[0].Take().size(), first ? 1u : 0u);
    EXPECT_EQ(listeners[1].Take().size(), first ? 0u : 1u);
  }
}

}  // namespace
}  // namespace tessera
