// What the server tells of its services, in both versions of the protocol, and the end of streams
// that rest. The client is gRPC's, over an in-process channel.
#include "server/reflection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
    queues_->Accept(
        [this](CallQueue& queue) { new StreamExchange(streams_, queue, serve_, answers_); });
    stub_ = Version::Service::NewStub(server_->InProcessChannel({}));
  }
  ~ReflectionTest() override {
    server_->Shutdown(absl::ToChronoTime(absl::Now()));
    queues_.reset();
  }

  // One question on a stream of its own.
  Response Ask(const Request& request) {
    grpc::ClientContext context;
    auto stream = stub_->ServerReflectionInfo(&context);
    Response response;
    EXPECT_TRUE(stream->Write(request));
    EXPECT_TRUE(stream->Read(&response));
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
    return response;
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

  Answers answers_;
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
}

TYPED_TEST(ReflectionTest, TypesOfThisProjectHaveNoExtensions) {
  typename TypeParam::Request request;
  request.set_all_extension_numbers_of_type("tessera.v1.DotRequest");
  const auto response = this->Ask(request);
  EXPECT_EQ(response.all_extension_numbers_response().base_type_name(), "tessera.v1.DotRequest");
  EXPECT_THAT(response.all_extension_numbers_response().extension_number(), IsEmpty());
}

TYPED_TEST(ReflectionTest, OneStreamAnswersManyQuestions) {
  grpc::ClientContext context;
  auto stream = this->stub_->ServerReflectionInfo(&context);
  typename TypeParam::Request request;
  typename TypeParam::Response response;
  for (const char* symbol : {"tessera.v1.DotRequest", "none", "tessera.v1.ReduceRequest"}) {
    request.set_file_containing_symbol(symbol);
    ASSERT_TRUE(stream->Write(request));
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.original_request().file_containing_symbol(), symbol);
    EXPECT_EQ(response.has_error_response(), std::string_view(symbol) == "none");
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TYPED_TEST(ReflectionTest, LargeRequestsAreRefused) {
  typename TypeParam::Request request;
  request.set_file_containing_symbol(std::string(60'000, 'x'));
  EXPECT_EQ(this->Ask(request).error_response().error_code(), grpc::StatusCode::NOT_FOUND);

  request.set_file_containing_symbol(std::string(66'000, 'x'));
  grpc::ClientContext context;
  auto stream = this->stub_->ServerReflectionInfo(&context);
  typename TypeParam::Response response;
  EXPECT_TRUE(stream->Write(request));
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), testing::HasSubstr("65536 bytes"));
}

TYPED_TEST(ReflectionTest, StreamsEndThatRestForAMinute) {
  grpc::ClientContext context;
  auto stream = this->stub_->ServerReflectionInfo(&context);
  typename TypeParam::Request request;
  typename TypeParam::Response response;
  request.set_list_services("*");
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->Read(&response));
  this->reflection_.EndIdleStreams(SteadyNow() + absl::Seconds(55));
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->Read(&response));
  this->reflection_.EndIdleStreams(SteadyNow() + absl::Seconds(61));
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(status.error_message(), testing::HasSubstr("idle"));
}

TYPED_TEST(ReflectionTest, AQuestionEndsTheRestOfAStream) {
  grpc::ClientContext context;
  auto stream = this->stub_->ServerReflectionInfo(&context);
  typename TypeParam::Request request;
  typename TypeParam::Response response;
  request.set_list_services("*");
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->Read(&response));
  AdvanceSteadyNow(absl::Seconds(30));
  const absl::Time asked = SteadyNow();
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->Read(&response));
  this->reflection_.EndIdleStreams(asked + absl::Minutes(1));
  ASSERT_TRUE(stream->Write(request));
  EXPECT_TRUE(stream->Read(&response));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TYPED_TEST(ReflectionTest, TheNumberOfStreamsIsBounded) {
  constexpr int kMost = 128;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<decltype(this->stub_->ServerReflectionInfo(nullptr))> streams;
  typename TypeParam::Request request;
  typename TypeParam::Response response;
  request.set_list_services("*");
  const auto open = [&] {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(this->stub_->ServerReflectionInfo(contexts.back().get()));
    streams.back()->Write(request);
    return streams.back()->Read(&response);
  };
  for (int i = 0; i < kMost; ++i) ASSERT_TRUE(open()) << i;
  EXPECT_FALSE(open());
  EXPECT_EQ(streams.back()->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  // A place is free again when the server has seen the end of a stream.
  streams.front()->WritesDone();
  EXPECT_TRUE(streams.front()->Finish().ok());
  const absl::Time give_up = absl::Now() + absl::Seconds(20);
  while (!open() && absl::Now() < give_up) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_LT(absl::Now(), give_up);
  for (auto& context : contexts) context->TryCancel();
}

}  // namespace
}  // namespace tessera
