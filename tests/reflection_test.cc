// What the server says about its services, in both versions of the protocol, and the end of idle
// streams. The client is gRPC's own, over an in-process channel.
#include "server/status/reflection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "google/protobuf/descriptor.pb.h"
#include "grpc/reflection/v1/reflection.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "server/clock.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

struct V1 {
  using Service = grpc::reflection::v1::ServerReflection;
  using Request = grpc::reflection::v1::ServerReflectionRequest;
  using Response = grpc::reflection::v1::ServerReflectionResponse;
};
struct V1Alpha {
  using Service = grpc::reflection::v1alpha::ServerReflection;
  using Request = grpc::reflection::v1alpha::ServerReflectionRequest;
  using Response = grpc::reflection::v1alpha::ServerReflectionResponse;
};

template <class Version>
class ReflectionTest : public testing::Test {
 protected:
  using Request = typename Version::Request;
  using Response = typename Version::Response;

  ReflectionTest() {
    // Descriptors are known once their messages are linked.
    google::protobuf::LinkMessageReflection<v1::DotRequest>();
    grpc::ServerBuilder builder;
    builder.RegisterAsyncGenericService(&streams_);
    queues_ = std::make_unique<CallQueues>(builder);
    server_ = builder.BuildAndStart();
    queues_->Accept([this](CallQueue& queue) { new StreamExchange(streams_, queue, serve_); });
    stub_ = Version::Service::NewStub(server_->InProcessChannel({}));
  }
  ~ReflectionTest() override {
    server_->Shutdown(absl::ToChronoTime(absl::Now()));
    queues_.reset();
  }

  // A stream of requests.
  class Stream {
   public:
    explicit Stream(typename Version::Service::Stub& stub)
        : stream_(stub.ServerReflectionInfo(&context_)) {}
    // Returns whether there is a response. Without a request, nothing is sent.
    bool Ask(const Request* request = nullptr) {
      if (request != nullptr) stream_->Write(*request);
      return stream_->Read(&response_);
    }
    const Response& response() const { return response_; }
    grpc::Status Finish() {
      stream_->WritesDone();
      return stream_->Finish();
    }
    void Cancel() { context_.TryCancel(); }

   private:
    grpc::ClientContext context_;
    Response response_;
    const std::unique_ptr<grpc::ClientReaderWriter<Request, Response>> stream_;
  };

  // Sends one request on a separate stream.
  Response Ask(const Request& request) {
    Stream stream(*stub_);
    EXPECT_TRUE(stream.Ask(&request));
    EXPECT_TRUE(stream.Finish().ok());
    return stream.response();
  }
  // Returns a request that has a response.
  static Request List() {
    Request request;
    request.set_list_services("*");
    return request;
  }

  static std::vector<std::string> FilesOf(const Response& response) {
    std::vector<std::string> names;
    for (const std::string& bytes : response.file_descriptor_response().file_descriptor_proto()) {
      google::protobuf::FileDescriptorProto file;
      EXPECT_TRUE(file.ParseFromString(bytes));
      names.push_back(file.name());
    }
    return names;
  }

  Reflection reflection_{{"a.First", "b.Second"}};
  grpc::AsyncGenericService streams_;
  const StreamExchange::Handle serve_ = [this](StreamExchange& exchange) {
    EXPECT_TRUE(reflection_.Serve(exchange.context().method(), exchange));
  };
  std::unique_ptr<CallQueues> queues_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<typename Version::Service::Stub> stub_;
};

using Versions = testing::Types<V1, V1Alpha>;
TYPED_TEST_SUITE(ReflectionTest, Versions);

TYPED_TEST(ReflectionTest, ListsServicesInOrder) {
  typename TypeParam::Request request;
  request.set_host("h");
  request.set_list_services("*");
  const auto response = this->Ask(request);
  EXPECT_EQ(response.valid_host(), "h");
  EXPECT_EQ(response.original_request().list_services(), "*");
  std::vector<std::string> names;
  for (const auto& service : response.list_services_response().service()) {
    names.push_back(service.name());
  }
  EXPECT_THAT(names, ElementsAre("a.First", "b.Second", "grpc.reflection.v1.ServerReflection",
                                 "grpc.reflection.v1alpha.ServerReflection"));
}

TYPED_TEST(ReflectionTest, AFileComesFirstAndThenItsImportsEachOnce) {
  typename TypeParam::Request by_symbol;
  by_symbol.set_file_containing_symbol("tessera.v1.DotRequest");
  typename TypeParam::Request by_name;
  by_name.set_file_by_filename("tessera/v1/compute.proto");
  const std::vector<std::string> files = this->FilesOf(this->Ask(by_symbol));
  ASSERT_THAT(files, testing::Not(IsEmpty()));
  EXPECT_EQ(files.front(), "tessera/v1/compute.proto");
  EXPECT_EQ(std::set(files.begin(), files.end()).size(), files.size());
  EXPECT_EQ(std::count(files.begin(), files.end(), "tessera/v1/buffer.proto"), 1);
  EXPECT_EQ(this->FilesOf(this->Ask(by_name)), files);
}

TYPED_TEST(ReflectionTest, WhatIsNotThereIsNotFound) {
  std::vector<typename TypeParam::Request> requests(4);
  requests[0].set_file_by_filename("none.proto");
  requests[1].set_file_containing_symbol("none.None");
  requests[2].mutable_file_containing_extension()->set_containing_type("none.None");
  requests[3].set_all_extension_numbers_of_type("none.None");
  for (const auto& request : requests) {
    EXPECT_EQ(this->Ask(request).error_response().error_code(), grpc::StatusCode::NOT_FOUND)
        << request.ShortDebugString();
  }
  EXPECT_EQ(this->Ask({}).error_response().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  // Types of this project have no extensions.
  requests[3].set_all_extension_numbers_of_type("tessera.v1.DotRequest");
  const auto none = this->Ask(requests[3]).all_extension_numbers_response();
  EXPECT_EQ(none.base_type_name(), "tessera.v1.DotRequest");
  EXPECT_THAT(none.extension_number(), IsEmpty());
}

TYPED_TEST(ReflectionTest, OneStreamAnswersManyQuestions) {
  typename TestFixture::Stream stream(*this->stub_);
  typename TypeParam::Request request;
  for (const std::string symbol : {"tessera.v1.DotRequest", "none", "tessera.v1.ReduceRequest"}) {
    request.set_file_containing_symbol(symbol);
    ASSERT_TRUE(stream.Ask(&request));
    EXPECT_EQ(stream.response().original_request().file_containing_symbol(), symbol);
    EXPECT_EQ(stream.response().has_error_response(), symbol == "none");
  }
  EXPECT_TRUE(stream.Finish().ok());
}

TYPED_TEST(ReflectionTest, LargeRequestsAreRefused) {
  typename TypeParam::Request request;
  request.set_file_containing_symbol(std::string(60'000, 'x'));
  EXPECT_EQ(this->Ask(request).error_response().error_code(), grpc::StatusCode::NOT_FOUND);

  request.set_file_containing_symbol(std::string(66'000, 'x'));
  typename TestFixture::Stream stream(*this->stub_);
  EXPECT_FALSE(stream.Ask(&request));
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), testing::HasSubstr("65536 bytes"));
}

// A request ends the idle time.
TYPED_TEST(ReflectionTest, StreamsEndThatRestForAMinute) {
  typename TestFixture::Stream stream(*this->stub_);
  const auto request = this->List();
  ASSERT_TRUE(stream.Ask(&request));
  AdvanceSteadyNow(absl::Seconds(30));
  const absl::Time asked = SteadyNow();
  ASSERT_TRUE(stream.Ask(&request));
  this->reflection_.EndIdleStreams(asked + absl::Minutes(1));
  ASSERT_TRUE(stream.Ask(&request));
  this->reflection_.EndIdleStreams(SteadyNow() + absl::Seconds(55));
  ASSERT_TRUE(stream.Ask(&request));
  this->reflection_.EndIdleStreams(SteadyNow() + absl::Seconds(61));
  EXPECT_FALSE(stream.Ask());
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(status.error_message(), testing::HasSubstr("idle"));
}

TYPED_TEST(ReflectionTest, TheNumberOfStreamsIsBounded) {
  constexpr int kMost = 128;
  std::deque<typename TestFixture::Stream> streams;
  const auto request = this->List();
  const auto open = [&] { return streams.emplace_back(*this->stub_).Ask(&request); };
  for (int i = 0; i < kMost; ++i) ASSERT_TRUE(open()) << i;
  EXPECT_FALSE(open());
  EXPECT_EQ(streams.back().Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  // The stream's slot is free again when the server has noticed the end of the stream.
  EXPECT_TRUE(streams.front().Finish().ok());
  const absl::Time give_up = absl::Now() + absl::Seconds(20);
  while (!open() && absl::Now() < give_up) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_LT(absl::Now(), give_up);
  for (auto& stream : streams) stream.Cancel();
}

}  // namespace
}  // namespace tessera
