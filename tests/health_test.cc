// What watchers of the health service receive. The client is gRPC's own, over an in-process
// channel.
#include "server/status/health.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>

#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "server/rpc/call_queues.h"
#include "server/rpc/stream_call.h"
#include "tests/quiet.h"

namespace tessera {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

class HealthTest : public testing::Test {
 protected:
  HealthTest() {
    grpc::ServerBuilder builder;
    builder.RegisterService(&health_);
    builder.RegisterAsyncGenericService(&streams_);
    queues_ = std::make_unique<CallQueues>(builder);
    server_ = builder.BuildAndStart();
    health_.Serve(*queues_, /*most_watches=*/2);
    queues_->Accept([this](CallQueue& queue) { new StreamExchange(streams_, queue, serve_); });
    stub_ = grpc::health::v1::Health::NewStub(server_->InProcessChannel({}));
  }
  ~HealthTest() override {
    server_->Shutdown(absl::ToChronoTime(absl::Now()));
    queues_.reset();
  }

  using Reader = std::unique_ptr<grpc::ClientReader<HealthCheckResponse>>;

  Reader Watch(grpc::ClientContext& context) {
    HealthCheckRequest request;
    return stub_->Watch(&context, request);
  }
  // Returns the status that the reader receives next, or UNKNOWN at the end.
  static HealthCheckResponse::ServingStatus Next(Reader& reader) {
    HealthCheckResponse response;
    return reader->Read(&response) ? response.status() : HealthCheckResponse::UNKNOWN;
  }

  Health health_;
  grpc::AsyncGenericService streams_;
  const StreamExchange::Handle serve_ = [this](StreamExchange& exchange) {
    EXPECT_TRUE(health_.ServeStream(exchange.context().method(), exchange));
  };
  std::unique_ptr<CallQueues> queues_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::health::v1::Health::Stub> stub_;
};

// The last status arrives even if the status changes while a message is being written.
TEST_F(HealthTest, TheLastThatAWatcherHearsIsTrue) {
  health_.Set("", true);
  grpc::ClientContext context;
  Reader reader = Watch(context);
  ASSERT_EQ(Next(reader), HealthCheckResponse::SERVING);
  for (int round = 0; round < 5; ++round) {
    AwaitQuiet();  // It has been written.
    for (const bool serving : {false, true, false}) health_.Set("", serving);
    EXPECT_EQ(Next(reader), HealthCheckResponse::NOT_SERVING);
    auto more = std::async(std::launch::async, [&] { return Next(reader); });
    AwaitQuiet();
    EXPECT_EQ(more.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
    health_.Set("", true);
    EXPECT_EQ(more.get(), HealthCheckResponse::SERVING);
  }
}

TEST_F(HealthTest, ConnectionsWithoutAnAddressHaveTheirNumberTogether) {
  grpc::ClientContext contexts[3];
  Reader first = Watch(contexts[0]), second = Watch(contexts[1]);
  EXPECT_EQ(Next(first), HealthCheckResponse::SERVICE_UNKNOWN);
  EXPECT_EQ(Next(second), HealthCheckResponse::SERVICE_UNKNOWN);
  Reader third = Watch(contexts[2]);
  ASSERT_EQ(Next(third), HealthCheckResponse::UNKNOWN);
  EXPECT_EQ(third->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

}  // namespace
}  // namespace tessera
