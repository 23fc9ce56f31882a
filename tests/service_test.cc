// The services as a client sees them, on the CPU device, each error with its code, reason and
// figures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "kernels/base/element.h"
#include "tests/test_server.h"

namespace tessera {
namespace {

using grpc::StatusCode;
using testing::ElementsAre;
using testing::HasSubstr;

template <class T>
std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <class T>
std::vector<T> Values(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

v1::Operand Named(const std::string& name) {
  v1::Operand operand;
  operand.set_buffer(name);
  return operand;
}

template <class T>
v1::Operand Inline(v1::Dtype dtype, const std::vector<std::int64_t>& shape,
                   const std::vector<T>& values) {
  v1::Operand operand;
  operand.mutable_tensor()->set_dtype(dtype);
  operand.mutable_tensor()->mutable_shape()->Assign(shape.begin(), shape.end());
  operand.mutable_tensor()->set_data(Bytes(values));
  return operand;
}

v1::Operand InView(v1::Operand operand, std::int64_t offset, const std::vector<std::int64_t>& shape,
                   const std::vector<std::int64_t>& strides = {}) {
  operand.mutable_view()->set_offset(offset);
  operand.mutable_view()->mutable_shape()->Assign(shape.begin(), shape.end());
  operand.mutable_view()->mutable_strides()->Assign(strides.begin(), strides.end());
  return operand;
}

class ServiceTest : public testing::Test {
 protected:
  ServiceTest() : ServiceTest(TestOptions()) {}
  explicit ServiceTest(const Options& options, std::vector<std::unique_ptr<Device>> devices = {})
      : server_(options, std::move(devices)) {}

  // After each error the server must answer as ever.
  void TearDown() override { ExpectWorks(); }
  void ExpectWorks() {
    v1::DotResponse response;
    const v1::Operand x = Inline<float>(v1::DTYPE_F32, {3}, {1, 2, 3});
    ASSERT_TRUE(Dot(x, x, &response).ok());
    ASSERT_EQ(response.value().real(), 14);
  }

  grpc::Status Dot(const v1::Operand& a, const v1::Operand& b, v1::DotResponse* response,
                   const std::string& strategy = "") {
    v1::DotRequest request;
    *request.mutable_a() = a;
    *request.mutable_b() = b;
    request.set_strategy(strategy);
    return Call(&v1::ComputeService::Stub::Dot, request, response);
  }

  template <class Request, class Response>
  grpc::Status Call(grpc::Status (v1::ComputeService::Stub::*method)(grpc::ClientContext*,
                                                                     const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    return (server_.compute().*method)(&context, request, response);
  }
  template <class Request, class Response>
  grpc::Status Call(grpc::Status (v1::BufferService::Stub::*method)(grpc::ClientContext*,
                                                                    const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    return (server_.buffers().*method)(&context, request, response);
  }

  grpc::Status Create(const std::string& name, const std::vector<std::int64_t>& shape,
                      v1::CreateBufferResponse* response = nullptr) {
    v1::CreateBufferRequest request;
    request.set_name(name);
    request.mutable_spec()->set_dtype(v1::DTYPE_F32);
    request.mutable_spec()->mutable_shape()->Assign(shape.begin(), shape.end());
    v1::CreateBufferResponse ignored;
    return Call(&v1::BufferService::Stub::CreateBuffer, request,
                response == nullptr ? &ignored : response);
  }
  grpc::Status Get(const std::string& name, v1::GetBufferResponse* response) {
    v1::GetBufferRequest request;
    request.set_name(name);
    return Call(&v1::BufferService::Stub::GetBuffer, request, response);
  }
  grpc::Status Seal(const std::string& name, v1::SealBufferResponse* response) {
    v1::SealBufferRequest request;
    request.set_name(name);
    return Call(&v1::BufferService::Stub::SealBuffer, request, response);
  }
  grpc::Status Delete(const std::string& name) {
    v1::DeleteBufferRequest request;
    request.set_name(name);
    v1::DeleteBufferResponse response;
    return Call(&v1::BufferService::Stub::DeleteBuffer, request, &response);
  }
  grpc::Status Upload(const std::vector<v1::UploadRequest>& messages,
                      v1::UploadResponse* response = nullptr) {
    grpc::ClientContext context;
    v1::UploadResponse ignored;
    auto writer = server_.buffers().Upload(&context, response == nullptr ? &ignored : response);
    for (const v1::UploadRequest& message : messages) {
      if (!writer->Write(message)) break;
    }
    writer->WritesDone();
    return writer->Finish();
  }

  // A message that creates a buffer of so many floats.
  static v1::UploadRequest First(const std::string& name, std::int64_t floats,
                                 const std::string& data = "") {
    v1::UploadRequest message;
    message.set_name(name);
    message.mutable_spec()->set_dtype(v1::DTYPE_F32);
    message.mutable_spec()->add_shape(floats);
    message.set_data(data);
    return message;
  }
  static v1::UploadRequest More(const std::string& data) {
    v1::UploadRequest message;
    message.set_data(data);
    return message;
  }
  static v1::UploadRequest At(const std::string& name, std::uint64_t offset,
                              const std::string& data) {
    v1::UploadRequest message;
    message.set_name(name);
    message.set_offset(offset);
    message.set_data(data);
    return message;
  }

  TestServer server_;
};

// --- Uploads and downloads ----------------------------------------------------------------------

TEST_F(ServiceTest, UploadsInOneStreamAndDownloads) {
  std::vector<float> values(700'000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const std::string bytes = Bytes(values);
  std::vector<v1::UploadRequest> messages = {First("a", 700'000)};
  for (std::size_t at = 0; at < bytes.size(); at += 1'000'001) {
    messages.push_back(More(bytes.substr(at, 1'000'001)));
  }
  v1::UploadResponse response;
  ASSERT_TRUE(Upload(messages, &response).ok());
  EXPECT_EQ(response.received_bytes(), bytes.size());
  EXPECT_EQ(response.buffer().state(), v1::Buffer::STATE_READY);
  EXPECT_EQ(response.buffer().committed_bytes(), bytes.size());
  EXPECT_EQ(response.buffer().size_bytes(), bytes.size());
  EXPECT_EQ(response.buffer().device(), "cpu");
  EXPECT_FALSE(response.buffer().has_expire_time());
  EXPECT_EQ(server_.used_bytes(), Charged(bytes.size()));

  std::string data;
  ASSERT_TRUE(server_.Fetch("a", &data).ok());
  EXPECT_EQ(data, bytes);
  ASSERT_TRUE(server_.Fetch("a", &data, 1'500'000, 10).ok());
  EXPECT_EQ(data, bytes.substr(1'500'000, 10));
  ASSERT_TRUE(server_.Fetch("a", &data, bytes.size() - 3, 100).ok());
  EXPECT_EQ(data, bytes.substr(bytes.size() - 3));
  ASSERT_TRUE(server_.Fetch("a", &data, bytes.size()).ok());
  EXPECT_EQ(data, "");
  ExpectError(server_.Fetch("a", &data, bytes.size() + 1), StatusCode::INVALID_ARGUMENT,
              "BAD_RANGE", {{"offset", "2800001"}, {"limit", "2800000"}});
  ASSERT_TRUE(Delete("a").ok());
  EXPECT_EQ(server_.used_bytes(), 0u);
}

TEST_F(ServiceTest, ScalarsAndEmptyArrays) {
  ASSERT_TRUE(server_.Put<double>("scalar", v1::DTYPE_F64, {}, {2.5}).ok());
  ASSERT_TRUE(server_.Put<float>("empty", v1::DTYPE_F32, {0, 7}, {}).ok());
  std::string data;
  ASSERT_TRUE(server_.Fetch("scalar", &data).ok());
  EXPECT_THAT(Values<double>(data), ElementsAre(2.5));
  ASSERT_TRUE(server_.Fetch("empty", &data).ok());
  EXPECT_EQ(data, "");
  v1::DotResponse response;
  ASSERT_TRUE(Dot(InView(Named("empty"), 0, {0}), InView(Named("empty"), 0, {0}), &response).ok());
  EXPECT_EQ(response.value().real(), 0);
  ASSERT_TRUE(
      Dot(InView(Named("scalar"), 0, {4}, {0}), InView(Named("scalar"), 0, {4}, {0}), &response)
          .ok());
  EXPECT_EQ(response.value().real(), 25);
}

TEST_F(ServiceTest, EveryDtypeTravels) {
  for (int dtype = v1::DTYPE_F32; dtype <= v1::DTYPE_I64; ++dtype) {
    const std::string name = absl::StrCat("d", dtype);
    const std::size_t size = SizeOf(static_cast<DType>(dtype));
    std::vector<char> bytes(5 * size);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 37);
    ASSERT_TRUE(server_.Put(name, static_cast<v1::Dtype>(dtype), {5}, bytes).ok());
    std::string data;
    ASSERT_TRUE(server_.Fetch(name, &data).ok());
    EXPECT_EQ(data, Bytes(bytes));
  }
}

TEST_F(ServiceTest, RepeatedFirstMessagesStayValid) {
  std::vector<v1::UploadRequest> messages;
  for (std::uint64_t i = 0; i < 4; ++i) {
    messages.push_back(First("a", 4, "abcd"));
    messages.back().set_offset(4 * i);
  }
  EXPECT_TRUE(Upload(messages).ok());

  v1::UploadRequest other = First("b", 4, "abcd");
  messages = {First("b", 8, "abcd"), other};
  ExpectError(Upload(messages), StatusCode::INVALID_ARGUMENT, "BAD_MESSAGE", {{"field", "spec"}});
  messages = {First("b", 4, "abcd"), First("c", 4, "abcd")};
  ExpectError(Upload(messages), StatusCode::INVALID_ARGUMENT, "BAD_MESSAGE",
              {{"field", "name"}, {"value", "c"}, {"expected", "b"}});
  v1::GetBufferResponse got;
  ExpectError(Get("b", &got), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND", {{"name", "b"}});
}

TEST_F(ServiceTest, UploadsThatLieAboutTheirSize) {
  ExpectError(Upload({First("a", 4, "0123456789abcdef"), More("x")}), StatusCode::INVALID_ARGUMENT,
              "BAD_RANGE", {{"offset", "16"}, {"size", "1"}, {"limit", "16"}});
  ExpectError(Upload({First("a", 4, "0123"), More("89ab")}), StatusCode::INVALID_ARGUMENT,
              "MISSING_DATA", {{"name", "a"}, {"size", "16"}, {"missing", "8-16"}});
  ExpectError(Upload({First("a", 4)}), StatusCode::INVALID_ARGUMENT, "MISSING_DATA",
              {{"missing", "0-16"}});
  v1::UploadRequest beyond = First("a", 4, "0123");
  beyond.set_offset(std::numeric_limits<std::uint64_t>::max());
  ExpectError(Upload({beyond}), StatusCode::INVALID_ARGUMENT, "BAD_RANGE", {{"limit", "16"}});
  ExpectError(Upload({}), StatusCode::INVALID_ARGUMENT, "BAD_MESSAGE", {{"field", "name"}});
  v1::GetBufferResponse got;
  ExpectError(Get("a", &got), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND");
  EXPECT_EQ(server_.used_bytes(), 0u);
}

TEST_F(ServiceTest, BrokenUploadLeavesNothing) {
  {
    grpc::ClientContext context;
    v1::UploadResponse response;
    auto writer = server_.buffers().Upload(&context, &response);
    writer->Write(First("a", 1000, "abcd"));
    ASSERT_TRUE(Eventually([&] {
      v1::GetBufferResponse got;
      return Get("a", &got).ok() && got.buffer().committed_bytes() == 4;
    }));
    EXPECT_EQ(server_.used_bytes(), Charged(4000));
    context.TryCancel();
    EXPECT_EQ(writer->Finish().error_code(), StatusCode::CANCELLED);
  }
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == 0; }));
  v1::GetBufferResponse got;
  ExpectError(Get("a", &got), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND");
}

TEST_F(ServiceTest, BrokenUploadOfACreatedBufferResumes) {
  ASSERT_TRUE(Create("a", {4}).ok());
  {
    grpc::ClientContext context;
    v1::UploadResponse response;
    auto writer = server_.buffers().Upload(&context, &response);
    writer->Write(At("a", 0, "0123"));
    writer->Write(More("4567"));
    ASSERT_TRUE(Eventually([&] {
      v1::GetBufferResponse got;
      return Get("a", &got).ok() && got.buffer().committed_bytes() == 8;
    }));
    context.TryCancel();
    (void)writer->Finish();
  }
  v1::GetBufferResponse got;
  ASSERT_TRUE(Get("a", &got).ok());
  EXPECT_EQ(got.buffer().state(), v1::Buffer::STATE_WRITING);
  ASSERT_EQ(got.missing_size(), 1);
  EXPECT_EQ(got.missing(0).begin(), 8u);
  EXPECT_EQ(got.missing(0).end(), 16u);
  v1::SealBufferResponse sealed;
  ExpectError(Seal("a", &sealed), StatusCode::FAILED_PRECONDITION, "BUFFER_NOT_READY",
              {{"name", "a"}, {"missing", "8-16"}});
  std::string data;
  ExpectError(server_.Fetch("a", &data), StatusCode::FAILED_PRECONDITION, "BUFFER_NOT_READY",
              {{"missing", "8-16"}});
  v1::DotResponse dot;
  ExpectError(Dot(Named("a"), Named("a"), &dot), StatusCode::FAILED_PRECONDITION,
              "BUFFER_NOT_READY", {{"name", "a"}, {"missing", "8-16"}});

  v1::UploadResponse uploaded;
  ASSERT_TRUE(Upload({At("a", 8, "89abcdef")}, &uploaded).ok());
  EXPECT_EQ(uploaded.buffer().state(), v1::Buffer::STATE_WRITING);
  EXPECT_EQ(uploaded.buffer().committed_bytes(), 16u);
  EXPECT_EQ(uploaded.received_bytes(), 8u);
  ASSERT_TRUE(Seal("a", &sealed).ok());
  EXPECT_EQ(sealed.buffer().state(), v1::Buffer::STATE_READY);
  v1::SealBufferRequest again;
  again.set_name("a");
  again.set_version(sealed.buffer().version());
  EXPECT_TRUE(Call(&v1::BufferService::Stub::SealBuffer, again, &sealed).ok());
  ExpectError(Seal("a", &sealed), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND", {{"name", "a"}});
  ASSERT_TRUE(server_.Fetch("a", &data).ok());
  EXPECT_EQ(data, "0123456789abcdef");
  ExpectError(Upload({At("a", 0, "x")}), StatusCode::FAILED_PRECONDITION, "BUFFER_SEALED",
              {{"name", "a"}});
  ExpectError(Upload({At("b", 0, "x")}), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND",
              {{"name", "b"}});
  ExpectError(Seal("b", &sealed), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND", {{"name", "b"}});
}

TEST_F(ServiceTest, ParallelStreamsFillDisjointRanges) {
  constexpr std::int64_t kFloats = 1 << 20;
  constexpr std::size_t kStreams = 4;
  std::vector<float> values(kFloats);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const std::string bytes = Bytes(values);
  ASSERT_TRUE(Create("a", {kFloats}).ok());
  std::vector<std::thread> threads;
  for (std::size_t s = 0; s < kStreams; ++s) {
    threads.emplace_back([&, s] {
      const std::size_t part = bytes.size() / kStreams;
      std::vector<v1::UploadRequest> messages = {At("a", s * part, "")};
      for (std::size_t at = s * part; at < (s + 1) * part; at += 65536) {
        messages.push_back(More(bytes.substr(at, 65536)));
      }
      EXPECT_TRUE(Upload(messages).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  v1::SealBufferResponse sealed;
  ASSERT_TRUE(Seal("a", &sealed).ok());
  std::string data;
  ASSERT_TRUE(server_.Fetch("a", &data).ok());
  EXPECT_EQ(data, bytes);
}

TEST_F(ServiceTest, TwoClientsOnOneName) {
  grpc::ClientContext context;
  v1::UploadResponse response;
  auto writer = server_.buffers().Upload(&context, &response);
  writer->Write(First("a", 2, "abcd"));
  ASSERT_TRUE(Eventually([&] {
    v1::GetBufferResponse got;
    return Get("a", &got).ok();
  }));
  ExpectError(Upload({First("a", 2, "12345678")}), StatusCode::ALREADY_EXISTS, "BUFFER_EXISTS",
              {{"name", "a"}});
  ExpectError(Upload({At("a", 0, "x")}), StatusCode::FAILED_PRECONDITION, "BUFFER_NOT_READY");
  v1::SealBufferResponse sealed;
  ExpectError(Seal("a", &sealed), StatusCode::FAILED_PRECONDITION, "BUFFER_NOT_READY");
  writer->Write(More("efgh"));
  writer->WritesDone();
  ASSERT_TRUE(writer->Finish().ok());
  std::string data;
  ASSERT_TRUE(server_.Fetch("a", &data).ok());
  EXPECT_EQ(data, "abcdefgh");
  ExpectError(Upload({First("a", 2, "12345678")}), StatusCode::ALREADY_EXISTS, "BUFFER_EXISTS");
  ExpectError(Create("a", {2}), StatusCode::ALREADY_EXISTS, "BUFFER_EXISTS", {{"name", "a"}});
}

TEST_F(ServiceTest, RacingUploadsOfOneNameLeaveOneWhole) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::string data(400'000, static_cast<char>('a' + t));
      for (int i = 0; i < 10; ++i) {
        v1::UploadRequest first = First("a", 100'000, data.substr(0, 200'000));
        first.mutable_spec()->set_replace(true);
        const grpc::Status status = Upload({first, More(data.substr(200'000))});
        EXPECT_TRUE(status.ok()) << status.error_message();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string data;
  ASSERT_TRUE(server_.Fetch("a", &data).ok());
  EXPECT_EQ(data, std::string(400'000, data[0])) << "never half of one and half of another";
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == Charged(400'000); }));
}

TEST_F(ServiceTest, SpecsThatCannotBe) {
  v1::UploadRequest bad = First("a", 1, "abcd");
  bad.mutable_spec()->set_dtype(v1::DTYPE_UNSPECIFIED);
  ExpectError(Upload({bad}), StatusCode::INVALID_ARGUMENT, "BAD_DTYPE", {{"value", "0"}});
  bad.mutable_spec()->set_dtype(static_cast<v1::Dtype>(99));
  ExpectError(Upload({bad}), StatusCode::INVALID_ARGUMENT, "BAD_DTYPE", {{"value", "99"}});
  ExpectError(Upload({First("a", -1)}), StatusCode::INVALID_ARGUMENT, "BAD_SHAPE",
              {{"value", "*"}, {"limit", "*"}});
  ExpectError(Create("a", std::vector<std::int64_t>(9, 1)), StatusCode::INVALID_ARGUMENT,
              "BAD_SHAPE", {{"value", "9"}, {"limit", "8"}});
  ExpectError(Create("a", {std::int64_t{1} << 40, std::int64_t{1} << 40}),
              StatusCode::INVALID_ARGUMENT, "BAD_SHAPE");
}

TEST_F(ServiceTest, NamesTtlsAndDevicesThatCannotBe) {
  ExpectError(Create("no spaces", {1}), StatusCode::INVALID_ARGUMENT, "BAD_NAME",
              {{"field", "name"}, {"value", "no spaces"}});
  ExpectError(Create("", {1}), StatusCode::INVALID_ARGUMENT, "BAD_NAME");
  ExpectError(Create(std::string(5000, 'x'), {1}), StatusCode::INVALID_ARGUMENT, "BAD_NAME",
              {{"value", "*"}});
  v1::UploadRequest bad = First("a", 1, "abcd");
  for (const std::int64_t seconds : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 62}) {
    bad.mutable_spec()->mutable_ttl()->set_seconds(seconds);
    ExpectError(Upload({bad}), StatusCode::INVALID_ARGUMENT, "BAD_TTL",
                {{"field", "ttl"}, {"value", "*"}});
  }
  bad = First("a", 1, "abcd");
  bad.mutable_spec()->set_device("cuda:7");
  ExpectError(Upload({bad}), StatusCode::INVALID_ARGUMENT, "BAD_DEVICE",
              {{"value", "cuda:7"}, {"valid", "cpu"}});
}

TEST_F(ServiceTest, MessagesOverTheCap) {
  constexpr std::size_t size = 5 << 20;
  v1::UploadRequest large = First("a", static_cast<std::int64_t>(size / 4), std::string(size, 'x'));
  ExpectError(Upload({large}), StatusCode::INVALID_ARGUMENT, "BAD_MESSAGE",
              {{"field", "message"}, {"value", "*"}, {"limit", "4259840"}});
  v1::DotResponse response;
  const v1::Operand x = Inline(v1::DTYPE_F32, {1'200'000}, std::vector<float>(1'200'000));
  ExpectError(Dot(x, Named("a"), &response), StatusCode::INVALID_ARGUMENT, "BAD_MESSAGE",
              {{"field", "message"}, {"value", "*"}, {"limit", "4259840"}});
  v1::UploadRequest fits = First("a", 1 << 20, std::string(4 << 20, 'x'));
  EXPECT_TRUE(Upload({fits}).ok()) << "4 MiB of data are what the interface promises";
}

TEST_F(ServiceTest, MemoryLimit) {
  ASSERT_TRUE(Create("a", {50 << 20}).ok());
  ExpectError(Create("b", {20 << 20}), StatusCode::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED",
              {{"requested", std::to_string(80 << 20)},
               {"free", std::to_string(56 << 20)},
               {"total", std::to_string(256 << 20)}});
  ASSERT_TRUE(Delete("a").ok());
  EXPECT_TRUE(Create("b", {20 << 20}).ok());
  EXPECT_EQ(server_.used_bytes(), std::uint64_t{80} << 20);
}

// --- What is known about buffers ----------------------------------------------------------------

TEST_F(ServiceTest, GetReplaceAndVersions) {
  ASSERT_TRUE(server_.Put<float>("a", v1::DTYPE_F32, {1, 2}, {1, 2}).ok());
  v1::GetBufferResponse before;
  ASSERT_TRUE(Get("a", &before).ok());
  EXPECT_THAT(before.buffer().shape(), ElementsAre(1, 2));
  EXPECT_EQ(before.buffer().dtype(), v1::DTYPE_F32);
  EXPECT_EQ(before.buffer().state(), v1::Buffer::STATE_READY);
  EXPECT_GT(before.buffer().create_time().seconds(), 0);
  ExpectError(server_.Put<float>("a", v1::DTYPE_F32, {1}, {3}), StatusCode::ALREADY_EXISTS,
              "BUFFER_EXISTS", {{"name", "a"}});
  ASSERT_TRUE(server_.Put<float>("a", v1::DTYPE_F32, {1}, {3}, true).ok());
  v1::GetBufferResponse after;
  ASSERT_TRUE(Get("a", &after).ok());
  EXPECT_GT(after.buffer().version(), before.buffer().version());
  EXPECT_THAT(after.buffer().shape(), ElementsAre(1));
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == Charged(4); }));
}

TEST_F(ServiceTest, ListPages) {
  for (const char* name : {"x/1", "x/2", "x/3", "y"}) {
    ASSERT_TRUE(server_.Put<float>(name, v1::DTYPE_F32, {1}, {1}).ok());
  }
  ASSERT_TRUE(Create("x/4", {1}).ok());
  v1::ListBuffersRequest request;
  request.set_prefix("x/");
  request.set_page_size(2);
  std::vector<std::string> names;
  int pages = 0;
  do {
    v1::ListBuffersResponse response;
    ASSERT_TRUE(Call(&v1::BufferService::Stub::ListBuffers, request, &response).ok());
    EXPECT_LE(response.buffers_size(), 2);
    for (const v1::Buffer& buffer : response.buffers()) names.push_back(buffer.name());
    request.set_page_token(response.next_page_token());
    ++pages;
  } while (!request.page_token().empty());
  EXPECT_THAT(names, ElementsAre("x/1", "x/2", "x/3", "x/4"));
  EXPECT_EQ(pages, 2);

  v1::ListBuffersResponse response;
  request.clear_page_token();
  ASSERT_TRUE(Call(&v1::BufferService::Stub::ListBuffers, request, &response).ok());
  const std::string token = response.next_page_token();
  request.set_prefix("");
  request.set_page_token(token);
  ExpectError(Call(&v1::BufferService::Stub::ListBuffers, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_PAGE", {{"field", "page_token"}});
  request.set_page_token("!!!");
  ExpectError(Call(&v1::BufferService::Stub::ListBuffers, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_PAGE", {{"field", "page_token"}});
  request.clear_page_token();
  for (const int size : {-1, 1001}) {
    request.set_page_size(size);
    ExpectError(Call(&v1::BufferService::Stub::ListBuffers, request, &response),
                StatusCode::INVALID_ARGUMENT, "BAD_PAGE",
                {{"field", "page_size"}, {"value", std::to_string(size)}, {"limit", "1000"}});
  }
  request.set_page_size(0);
  response.Clear();
  ASSERT_TRUE(Call(&v1::BufferService::Stub::ListBuffers, request, &response).ok());
  EXPECT_EQ(response.buffers_size(), 5);
}

TEST_F(ServiceTest, CopiesOfWholeBuffersViewsAndCasts) {
  ASSERT_TRUE(
      server_.Put<float>("x", v1::DTYPE_F32, {2, 3}, {1, 2.5f, -3.75f, 4e9f, -5e9f, NAN}).ok());
  v1::CopyBufferRequest request;
  v1::CopyBufferResponse response;
  const auto copy = [&](const std::string& name) {
    request.set_source("x");
    request.set_name(name);
    response.Clear();
    const grpc::Status status = Call(&v1::BufferService::Stub::CopyBuffer, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    std::string data;
    EXPECT_TRUE(server_.Fetch(name, &data).ok());
    return data;
  };
  const std::string whole = copy("whole");
  EXPECT_EQ(response.buffer().state(), v1::Buffer::STATE_READY);
  EXPECT_EQ(response.buffer().name(), "whole");
  EXPECT_EQ(response.buffer().dtype(), v1::DTYPE_F32);
  EXPECT_THAT(response.buffer().shape(), ElementsAre(2, 3));
  EXPECT_FALSE(response.buffer().has_expire_time());
  std::string original;
  ASSERT_TRUE(server_.Fetch("x", &original).ok());
  EXPECT_EQ(whole, original);

  // A window read backwards, with a lease.
  request.mutable_view()->set_offset(4);
  request.mutable_view()->add_shape(2);
  request.mutable_view()->add_strides(-3);
  request.mutable_ttl()->set_seconds(40);
  EXPECT_THAT(Values<float>(copy("window")), ElementsAre(-5e9f, 2.5f));
  EXPECT_TRUE(response.buffer().has_expire_time());

  // The transpose.
  request.Clear();
  for (std::int64_t extent : {3, 2}) request.mutable_view()->add_shape(extent);
  for (std::int64_t stride : {1, 3}) request.mutable_view()->add_strides(stride);
  EXPECT_THAT(Values<float>(copy("transpose")),
              ElementsAre(1, 4e9f, 2.5f, -5e9f, -3.75f, testing::IsNan()));
  EXPECT_THAT(response.buffer().shape(), ElementsAre(3, 2));

  // Casts to integers truncate and saturate; NaN becomes 0.
  request.Clear();
  request.set_dtype(v1::DTYPE_I32);
  EXPECT_THAT(Values<std::int32_t>(copy("i32")),
              ElementsAre(1, 2, -3, std::numeric_limits<std::int32_t>::max(),
                          std::numeric_limits<std::int32_t>::min(), 0));
  request.set_dtype(v1::DTYPE_I64);
  EXPECT_THAT(Values<std::int64_t>(copy("i64")),
              ElementsAre(1, 2, -3, 4'000'000'000, -5'000'000'000, 0));
  request.set_dtype(v1::DTYPE_F64);
  EXPECT_THAT(Values<double>(copy("f64")), ElementsAre(1, 2.5, -3.75, 4e9, -5e9, testing::IsNan()));
  request.mutable_view()->add_shape(4);
  request.set_dtype(v1::DTYPE_F16);
  EXPECT_EQ(copy("f16"), Bytes<Half>({Half(1), Half(2.5f), Half(-3.75f), Half(INFINITY)}));
  request.set_dtype(v1::DTYPE_BF16);
  EXPECT_EQ(copy("bf16"),
            Bytes<BFloat16>({BFloat16(1), BFloat16(2.5f), BFloat16(-3.75f), BFloat16(4e9f)}));

  // One element many times, and none.
  request.Clear();
  request.mutable_view()->add_shape(100'000);
  request.mutable_view()->add_strides(0);
  EXPECT_EQ(Values<float>(copy("ones")), std::vector<float>(100'000, 1.0f));
  request.mutable_view()->set_shape(0, 0);
  EXPECT_EQ(copy("nothing"), "");

  // Over itself.
  request.Clear();
  request.set_replace(true);
  request.set_dtype(v1::DTYPE_F64);
  const std::uint64_t version = response.buffer().version();
  EXPECT_EQ(copy("x").size(), 48u);
  EXPECT_GT(response.buffer().version(), version);
}

TEST_F(ServiceTest, CopiesThatCannotBe) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
  ASSERT_TRUE(Create("open", {3}).ok());
  const std::uint64_t used = server_.used_bytes();
  v1::CopyBufferRequest good;
  good.set_source("x");
  good.set_name("y");
  const auto expect = [&](const auto& change, StatusCode code, const std::string& reason,
                          const std::map<std::string, std::string>& metadata = {}) {
    v1::CopyBufferRequest request = good;
    change(request);
    v1::CopyBufferResponse response;
    ExpectError(Call(&v1::BufferService::Stub::CopyBuffer, request, &response), code, reason,
                metadata);
    EXPECT_EQ(server_.used_bytes(), used);
  };
  const StatusCode invalid = StatusCode::INVALID_ARGUMENT;
  expect([](auto& r) { r.set_source("none"); }, StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND",
         {{"name", "none"}});
  expect([](auto& r) { r.set_source("open"); }, StatusCode::FAILED_PRECONDITION, "BUFFER_NOT_READY",
         {{"missing", "*"}});
  expect([](auto& r) { r.set_name("x"); }, StatusCode::ALREADY_EXISTS, "BUFFER_EXISTS");
  expect([](auto& r) { r.set_name("not a name"); }, invalid, "BAD_NAME");
  expect([](auto& r) { r.mutable_ttl()->set_seconds(-1); }, invalid, "BAD_TTL");
  expect([](auto& r) { r.set_device("tpu"); }, invalid, "BAD_DEVICE");
  expect([](auto& r) { r.set_dtype(static_cast<v1::Dtype>(77)); }, invalid, "BAD_DTYPE");
  expect([](auto& r) { r.mutable_view()->add_shape(4); }, invalid, "BAD_VIEW");
  expect(
      [](auto& r) {
        r.mutable_view()->add_shape(1 << 30);
        r.mutable_view()->add_strides(0);
      },
      StatusCode::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED",
      {{"requested", std::to_string(std::int64_t{4} << 30)}, {"free", "*"}, {"total", "*"}});
  // The size in the new type does not fit 63 bits.
  expect(
      [](auto& r) {
        r.mutable_view()->add_shape(std::int64_t{1} << 60);
        r.mutable_view()->add_strides(0);
        r.set_dtype(v1::DTYPE_F64);
      },
      invalid, "BAD_SHAPE");
  v1::GetBufferResponse got;
  ExpectError(Get("y", &got), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND");
}

TEST_F(ServiceTest, TtlEndsABuffer) {
  v1::UploadRequest first = First("a", 1, "abcd");
  first.mutable_spec()->mutable_ttl()->set_nanos(100'000'000);
  v1::UploadResponse uploaded;
  ASSERT_TRUE(Upload({first}, &uploaded).ok());
  EXPECT_TRUE(uploaded.buffer().has_expire_time());
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == 0; }));
  v1::GetBufferResponse got;
  ExpectError(Get("a", &got), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND", {{"name", "a"}});

  ASSERT_TRUE(Upload({First("b", 1, "abcd")}).ok());
  v1::UpdateBufferRequest update;
  v1::UpdateBufferResponse updated;
  update.set_name("b");
  update.mutable_ttl()->set_seconds(3600);
  ASSERT_TRUE(Call(&v1::BufferService::Stub::UpdateBuffer, update, &updated).ok());
  EXPECT_TRUE(updated.buffer().has_expire_time());
  update.mutable_ttl()->set_seconds(-1);
  ExpectError(Call(&v1::BufferService::Stub::UpdateBuffer, update, &updated),
              StatusCode::INVALID_ARGUMENT, "BAD_TTL");
  update.clear_ttl();
  ASSERT_TRUE(Call(&v1::BufferService::Stub::UpdateBuffer, update, &updated).ok());
  EXPECT_FALSE(updated.buffer().has_expire_time());
  update.set_name("c");
  ExpectError(Call(&v1::BufferService::Stub::UpdateBuffer, update, &updated), StatusCode::NOT_FOUND,
              "BUFFER_NOT_FOUND", {{"name", "c"}});
  ExpectError(Delete("c"), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND", {{"name", "c"}});
}

// --- Operations ---------------------------------------------------------------------------------

TEST_F(ServiceTest, DotOfResidentInlineAndViewedOperands) {
  ASSERT_TRUE(server_.Put<double>("x", v1::DTYPE_F64, {2, 3}, {1, 2, 3, 4, 5, 6}).ok());
  v1::DotRequest request;
  *request.mutable_a() = InView(Named("x"), 5, {3}, {-2});
  *request.mutable_b() = Inline<double>(v1::DTYPE_F64, {3}, {1, 10, 100});
  request.set_strategy("cpu_serial");
  request.set_timing(true);
  v1::DotResponse response;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Dot, request, &response).ok());
  EXPECT_EQ(response.value().real(), 6 + 40 + 200);
  EXPECT_EQ(response.stats().strategy(), "cpu_serial");
  EXPECT_EQ(response.stats().device(), "cpu");
  EXPECT_GT(response.stats().kernel_us(), 0);
  EXPECT_GT(response.stats().bytes(), 0u);
  EXPECT_GT(response.stats().flops(), 0u);
  EXPECT_GT(response.stats().roundoff(), 0);
}

TEST_F(ServiceTest, ReduceToScalars) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2, 2}, {3, -4, 1, 2}).ok());
  const std::map<v1::ReduceOp, double> expected = {{v1::REDUCE_OP_SUM, 2},
                                                   {v1::REDUCE_OP_PRODUCT, -24},
                                                   {v1::REDUCE_OP_MIN, -4},
                                                   {v1::REDUCE_OP_MAX, 3},
                                                   {v1::REDUCE_OP_ARGMIN, -4},
                                                   {v1::REDUCE_OP_ARGMAX, 3},
                                                   {v1::REDUCE_OP_MEAN, 0.5},
                                                   {v1::REDUCE_OP_NORM_L1, 10},
                                                   {v1::REDUCE_OP_NORM_L2, std::sqrt(30)},
                                                   {v1::REDUCE_OP_SUM_SQUARES, 30},
                                                   {v1::REDUCE_OP_VARIANCE, 7.25}};
  for (const auto& [op, value] : expected) {
    v1::ReduceRequest request;
    *request.mutable_x() = Named("x");
    request.set_op(op);
    v1::ReduceResponse response;
    ASSERT_TRUE(Call(&v1::ComputeService::Stub::Reduce, request, &response).ok()) << op;
    EXPECT_DOUBLE_EQ(response.value().real(), value) << op;
    EXPECT_EQ(response.index(), op == v1::REDUCE_OP_ARGMIN ? 1 : 0) << op;
  }
}

TEST_F(ServiceTest, LogicalReductionsAndIntegers) {
  const auto reduce = [&](const v1::Operand& x, v1::ReduceOp op) {
    v1::ReduceRequest request;
    *request.mutable_x() = x;
    request.set_op(op);
    v1::ReduceResponse response;
    const grpc::Status status = Call(&v1::ComputeService::Stub::Reduce, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.value();
  };
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const v1::Operand some = Inline<float>(v1::DTYPE_F32, {3}, {0, kNan, -0.0f});
  const v1::Operand every = Inline<float>(v1::DTYPE_F32, {2}, {kNan, 1e-45f});
  const v1::Operand none = Inline<float>(v1::DTYPE_F32, {0}, {});
  using testing::Pair;
  const auto logical = [&](const v1::Operand& x) {
    return std::make_pair(reduce(x, v1::REDUCE_OP_ALL).integer(),
                          reduce(x, v1::REDUCE_OP_ANY).integer());
  };
  EXPECT_THAT(logical(some), Pair(0, 1));
  EXPECT_THAT(logical(every), Pair(1, 1));
  EXPECT_THAT(logical(none), Pair(1, 0));
  EXPECT_EQ(reduce(some, v1::REDUCE_OP_ALL).value_case(), v1::Scalar::kInteger);

  const v1::Operand i = Inline<std::int32_t>(v1::DTYPE_I32, {3}, {2'000'000'000, 2'000'000'000, 2});
  EXPECT_EQ(reduce(i, v1::REDUCE_OP_SUM).integer(), 4'000'000'002);
  EXPECT_EQ(reduce(i, v1::REDUCE_OP_MAX).integer(), 2'000'000'000);
  EXPECT_EQ(reduce(i, v1::REDUCE_OP_MEAN).value_case(), v1::Scalar::kReal);
  EXPECT_DOUBLE_EQ(reduce(i, v1::REDUCE_OP_MEAN).real(), 4'000'000'002.0 / 3);
}

TEST_F(ServiceTest, OperationsOfEveryDtype) {
  const auto check = [&](v1::Dtype dtype, const std::string& name, auto one, auto two, auto three,
                         auto five) {
    SCOPED_TRACE(v1::Dtype_Name(dtype));
    using T = decltype(one);
    ASSERT_TRUE(server_.Put<T>(name, dtype, {1, 2}, {one, two}).ok());
    const bool integer = dtype == v1::DTYPE_I32 || dtype == v1::DTYPE_I64;
    v1::DotResponse dot;
    ASSERT_TRUE(Dot(Named(name), Named(name), &dot).ok());
    EXPECT_EQ(integer ? static_cast<double>(dot.value().integer()) : dot.value().real(), 5);
    v1::AddRequest add;
    *add.mutable_a() = Named(name);
    *add.mutable_b() = InView(Named(name), 1, {1, 2}, {2, -1});
    v1::AddResponse sum;
    ASSERT_TRUE(Call(&v1::ComputeService::Stub::Add, add, &sum).ok());
    EXPECT_EQ(sum.tensor().dtype(), dtype);
    EXPECT_EQ(sum.tensor().data(), Bytes<T>({three, three}));
    v1::MatmulRequest matmul;
    *matmul.mutable_a() = *matmul.mutable_b() = Named(name);
    matmul.set_transpose_b(true);
    v1::MatmulResponse product;
    const grpc::Status status = Call(&v1::ComputeService::Stub::Matmul, matmul, &product);
    if (dtype == v1::DTYPE_I64) {
      ExpectError(status, StatusCode::INVALID_ARGUMENT, "BAD_DTYPE", {{"dtype", "i64"}});
    } else {
      ASSERT_TRUE(status.ok()) << status.error_message();
      EXPECT_EQ(product.tensor().data(), Bytes<T>({five}));
    }
    v1::WindowSumRequest window;
    *window.mutable_x() = InView(Named(name), 0, {2});
    window.set_radius(1);
    v1::WindowSumResponse sums;
    ASSERT_TRUE(Call(&v1::ComputeService::Stub::WindowSum, window, &sums).ok());
    if (integer) {
      EXPECT_EQ(sums.tensor().dtype(), v1::DTYPE_I64);
      EXPECT_THAT(Values<std::int64_t>(sums.tensor().data()), ElementsAre(3, 3));
    } else {
      EXPECT_EQ(sums.tensor().dtype(), dtype);
      EXPECT_EQ(sums.tensor().data(), Bytes<T>({three, three}));
    }
  };
  check(v1::DTYPE_F32, "f32", 1.0f, 2.0f, 3.0f, 5.0f);
  check(v1::DTYPE_F64, "f64", 1.0, 2.0, 3.0, 5.0);
  check(v1::DTYPE_F16, "f16", Half(1), Half(2), Half(3), Half(5));
  check(v1::DTYPE_BF16, "bf16", BFloat16(1), BFloat16(2), BFloat16(3), BFloat16(5));
  check(v1::DTYPE_I32, "i32", std::int32_t{1}, std::int32_t{2}, std::int32_t{3}, std::int32_t{5});
  check(v1::DTYPE_I64, "i64", std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, std::int64_t{5});
}

TEST_F(ServiceTest, WindowSumOfViewsAndIntoBuffers) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2, 3}, {1, 2, 3, 4, 5, 6}).ok());
  v1::WindowSumRequest request;
  *request.mutable_x() = InView(Named("x"), 5, {6}, {-1});
  request.set_radius(2);
  request.set_strategy("cpu");
  request.set_timing(true);
  v1::WindowSumResponse response;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::WindowSum, request, &response).ok());
  EXPECT_THAT(response.tensor().shape(), ElementsAre(6));
  EXPECT_THAT(Values<float>(response.tensor().data()), ElementsAre(15, 18, 20, 15, 10, 6));
  EXPECT_EQ(response.stats().strategy(), "cpu");
  EXPECT_GT(response.stats().kernel_us(), 0);
  // Far wider than the array, and the narrowest.
  request.set_radius(std::numeric_limits<std::int64_t>::max());
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::WindowSum, request, &response).ok());
  EXPECT_THAT(Values<float>(response.tensor().data()), testing::Each(21));
  request.set_radius(0);
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::WindowSum, request, &response).ok());
  EXPECT_THAT(Values<float>(response.tensor().data()), ElementsAre(6, 5, 4, 3, 2, 1));

  // Into the buffer it reads.
  v1::BufferTarget* target = request.mutable_result()->mutable_buffer();
  target->set_name("x");
  ExpectError(Call(&v1::ComputeService::Stub::WindowSum, request, &response),
              StatusCode::ALREADY_EXISTS, "BUFFER_EXISTS", {{"name", "x"}});
  target->set_replace(true);
  response.Clear();
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::WindowSum, request, &response).ok());
  EXPECT_FALSE(response.has_tensor());
  std::string data;
  ASSERT_TRUE(server_.Fetch("x", &data).ok());
  EXPECT_THAT(Values<float>(data), ElementsAre(6, 5, 4, 3, 2, 1));

  *request.mutable_x() = Inline<double>(v1::DTYPE_F64, {0}, {});
  request.clear_result();
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::WindowSum, request, &response).ok());
  EXPECT_EQ(response.tensor().data(), "");
}

TEST_F(ServiceTest, ErrorsOfWindowSum) {
  v1::WindowSumRequest request;
  v1::WindowSumResponse response;
  const auto call = [&] { return Call(&v1::ComputeService::Stub::WindowSum, request, &response); };
  *request.mutable_x() = Inline<float>(v1::DTYPE_F32, {2}, {1, 2});
  request.set_radius(-1);
  ExpectError(call(), StatusCode::INVALID_ARGUMENT, "BAD_RADIUS", {{"value", "-1"}});
  request.set_radius(1);
  request.set_strategy("widest");
  ExpectError(call(), StatusCode::INVALID_ARGUMENT, "UNKNOWN_STRATEGY", {{"valid", "*"}});
  request.clear_strategy();
  *request.mutable_x() = Inline<float>(v1::DTYPE_F32, {1, 2}, {1, 2});
  ExpectError(call(), StatusCode::INVALID_ARGUMENT, "BAD_SHAPE");
  *request.mutable_x() = Named("none");
  ExpectError(call(), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND", {{"name", "none"}});
  *request.mutable_x() =
      InView(Inline<double>(v1::DTYPE_F64, {}, {1}), 0, {(4 << 20) / 8 + 1}, {0});
  ExpectError(call(), StatusCode::INVALID_ARGUMENT, "RESULT_TOO_LARGE", {{"limit", "4128768"}});
  request.mutable_x()->mutable_view()->set_shape(0, std::int64_t{1} << 30);
  request.mutable_result()->mutable_buffer()->set_name("huge");
  ExpectError(call(), StatusCode::RESOURCE_EXHAUSTED, "SCRATCH_EXHAUSTED",
              {{"requested", std::to_string(std::int64_t{8} << 30)}});
}

TEST_F(ServiceTest, ReduceAlongAxes) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2, 3}, {1, 2, 3, 4, 5, 6}).ok());
  v1::ReduceRequest request;
  *request.mutable_x() = Named("x");
  request.set_op(v1::REDUCE_OP_SUM);
  request.add_axes(1);
  request.set_keep_dims(true);
  v1::ReduceResponse response;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Reduce, request, &response).ok());
  EXPECT_THAT(response.tensor().shape(), ElementsAre(2, 1));
  EXPECT_THAT(Values<float>(response.tensor().data()), ElementsAre(6, 15));
  EXPECT_FALSE(response.has_value());

  request.set_op(v1::REDUCE_OP_ARGMAX);
  request.set_axes(0, -2);
  request.set_keep_dims(false);
  request.mutable_result()->mutable_buffer()->set_name("winners");
  response.Clear();
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Reduce, request, &response).ok());
  EXPECT_EQ(response.buffer().name(), "winners");
  EXPECT_EQ(response.buffer().dtype(), v1::DTYPE_I64);
  std::string data;
  ASSERT_TRUE(server_.Fetch("winners", &data).ok());
  EXPECT_THAT(Values<std::int64_t>(data), ElementsAre(1, 1, 1));
}

TEST_F(ServiceTest, MatmulAndAddIntoBuffersThatMayBeTheirOperands) {
  ASSERT_TRUE(server_.Put<float>("a", v1::DTYPE_F32, {2, 3}, {1, 2, 3, 4, 5, 6}).ok());
  v1::MatmulRequest matmul;
  *matmul.mutable_a() = Named("a");
  *matmul.mutable_b() = Named("a");
  matmul.set_transpose_b(true);
  v1::MatmulResponse product;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Matmul, matmul, &product).ok());
  EXPECT_THAT(product.tensor().shape(), ElementsAre(2, 2));
  EXPECT_THAT(Values<float>(product.tensor().data()), ElementsAre(14, 32, 32, 77));

  matmul.mutable_result()->mutable_buffer()->set_name("a");
  ExpectError(Call(&v1::ComputeService::Stub::Matmul, matmul, &product), StatusCode::ALREADY_EXISTS,
              "BUFFER_EXISTS", {{"name", "a"}});
  matmul.mutable_result()->mutable_buffer()->set_replace(true);
  product.Clear();
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Matmul, matmul, &product).ok());
  EXPECT_EQ(product.buffer().state(), v1::Buffer::STATE_READY);

  v1::AddRequest add;
  *add.mutable_a() = Named("a");
  *add.mutable_b() = InView(Inline<float>(v1::DTYPE_F32, {2}, {100, 200}), 0, {2, 2}, {0, 1});
  add.mutable_result()->set_inline_(true);
  v1::AddResponse sum;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Add, add, &sum).ok());
  EXPECT_THAT(Values<float>(sum.tensor().data()), ElementsAre(114, 232, 132, 277));
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == Charged(16); }))
      << "the old a is gone";
}

TEST_F(ServiceTest, FailedOperationLeavesNoBuffer) {
  v1::AddRequest add;
  *add.mutable_a() = Inline<float>(v1::DTYPE_F32, {2}, {1, 2});
  *add.mutable_b() = Inline<float>(v1::DTYPE_F32, {2}, {1, 2});
  add.set_strategy("nope");
  v1::BufferTarget* target = add.mutable_result()->mutable_buffer();
  target->set_name("sum");
  v1::AddResponse sum;
  ExpectError(Call(&v1::ComputeService::Stub::Add, add, &sum), StatusCode::INVALID_ARGUMENT,
              "UNKNOWN_STRATEGY", {{"valid", "*"}});
  v1::GetBufferResponse got;
  ExpectError(Get("sum", &got), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND");
  EXPECT_EQ(server_.used_bytes(), 0u);
  add.clear_strategy();
  target->mutable_ttl()->set_seconds(-4);
  ExpectError(Call(&v1::ComputeService::Stub::Add, add, &sum), StatusCode::INVALID_ARGUMENT,
              "BAD_TTL");
  target->mutable_ttl()->set_seconds(40);
  target->set_name("not a name");
  ExpectError(Call(&v1::ComputeService::Stub::Add, add, &sum), StatusCode::INVALID_ARGUMENT,
              "BAD_NAME", {{"value", "not a name"}});
  target->set_name("sum");
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Add, add, &sum).ok());
  EXPECT_TRUE(sum.buffer().has_expire_time());
}

TEST_F(ServiceTest, ErrorsOfOperands) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
  const v1::Operand x = Named("x");
  v1::DotResponse response;
  ExpectError(Dot(x, Named("y"), &response), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND",
              {{"name", "y"}});
  ExpectError(Dot(x, v1::Operand(), &response), StatusCode::INVALID_ARGUMENT, "BAD_OPERAND",
              {{"field", "source"}});
  ExpectError(Dot(x, Inline<float>(v1::DTYPE_F32, {4}, {1, 2, 3}), &response),
              StatusCode::INVALID_ARGUMENT, "BAD_OPERAND",
              {{"field", "tensor.data"}, {"value", "12"}, {"expected", "16"}});
  ExpectError(Dot(x, Inline<float>(v1::DTYPE_UNSPECIFIED, {3}, {1, 2, 3}), &response),
              StatusCode::INVALID_ARGUMENT, "BAD_DTYPE");
  ExpectError(Dot(x, Inline<float>(v1::DTYPE_F32, {-3}, {}), &response),
              StatusCode::INVALID_ARGUMENT, "BAD_SHAPE");
  ExpectError(Dot(x, Inline<float>(v1::DTYPE_F32, {2}, {1, 2}), &response),
              StatusCode::INVALID_ARGUMENT, "BAD_SHAPE", {{"a", "[3]"}, {"b", "[2]"}});
  ExpectError(Dot(x, Inline<double>(v1::DTYPE_F64, {3}, {1, 2, 3}), &response),
              StatusCode::INVALID_ARGUMENT, "BAD_DTYPE", {{"a", "f32"}, {"b", "f64"}});
  ExpectError(Dot(x, InView(x, 1, {3}), &response), StatusCode::INVALID_ARGUMENT, "BAD_VIEW",
              {{"field", "*"}, {"value", "*"}, {"limit", "*"}});
  ExpectError(Dot(x, InView(x, 0, {3}, {std::numeric_limits<std::int64_t>::max()}), &response),
              StatusCode::INVALID_ARGUMENT, "BAD_VIEW");
  ExpectError(Dot(x, InView(x, 0, {3}, {1, 1}), &response), StatusCode::INVALID_ARGUMENT,
              "BAD_VIEW");
}

TEST_F(ServiceTest, ErrorsOfStrategies) {
  const v1::Operand x = Inline<float>(v1::DTYPE_F32, {3}, {1, 2, 3});
  v1::DotResponse response;
  const grpc::Status unknown = Dot(x, x, &response, "fastest");
  ExpectError(unknown, StatusCode::INVALID_ARGUMENT, "UNKNOWN_STRATEGY", {{"valid", "*"}});
  EXPECT_THAT(DetailsOf(unknown).metadata["valid"], HasSubstr("cpu_serial"));
  const std::string long_name(100'000, 's');
  ExpectError(Dot(x, x, &response, long_name), StatusCode::INVALID_ARGUMENT, "UNKNOWN_STRATEGY");

  v1::MatmulRequest matmul;
  *matmul.mutable_a() = *matmul.mutable_b() = Inline<std::int32_t>(v1::DTYPE_I32, {1, 1}, {3});
  matmul.set_strategy("cpu_library");
  v1::MatmulResponse product;
  ExpectError(Call(&v1::ComputeService::Stub::Matmul, matmul, &product),
              StatusCode::FAILED_PRECONDITION, "STRATEGY_UNSUPPORTED",
              {{"strategy", "cpu_library"}, {"dtype", "i32"}, {"needs", "operands of f32, f64"}});

  v1::DotRequest request;
  *request.mutable_a() = x;
  *request.mutable_b() = x;
  request.set_strategy("cpu_serial");
  request.mutable_launch()->set_block_size(64);
  ExpectError(Call(&v1::ComputeService::Stub::Dot, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_LAUNCH", {{"value", "64"}, {"range", "*"}});
}

TEST_F(ServiceTest, ErrorsOfReductions) {
  v1::ReduceRequest request;
  v1::ReduceResponse response;
  *request.mutable_x() = Inline<float>(v1::DTYPE_F32, {0}, {});
  request.set_op(v1::REDUCE_OP_MIN);
  ExpectError(Call(&v1::ComputeService::Stub::Reduce, request, &response),
              StatusCode::INVALID_ARGUMENT, "EMPTY_INPUT", {{"op", "*"}});
  *request.mutable_x() = Inline<float>(v1::DTYPE_F32, {2}, {1, 2});
  request.clear_op();
  ExpectError(Call(&v1::ComputeService::Stub::Reduce, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_OPERATION", {{"field", "op"}, {"value", "0"}});
  request.set_op(v1::REDUCE_OP_SUM);
  request.add_axes(1);
  ExpectError(Call(&v1::ComputeService::Stub::Reduce, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_AXES", {{"axis", "1"}, {"rank", "1"}});
  request.set_axes(0, 0);
  request.add_axes(-1);
  ExpectError(Call(&v1::ComputeService::Stub::Reduce, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_AXES");
  request.clear_axes();
  request.mutable_result()->mutable_buffer()->set_name("r");
  ExpectError(Call(&v1::ComputeService::Stub::Reduce, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_AXES", {{"field", "axes"}});
}

TEST_F(ServiceTest, ResultsTooLargeForAResponse) {
  v1::AddRequest add;
  *add.mutable_a() =
      InView(Inline<double>(v1::DTYPE_F64, {}, {1}), 0, {kMaxInlineResult / 8 + 1}, {0});
  *add.mutable_b() = add.a();
  v1::AddResponse sum;
  ExpectError(Call(&v1::ComputeService::Stub::Add, add, &sum), StatusCode::INVALID_ARGUMENT,
              "RESULT_TOO_LARGE", {{"size", "4128776"}, {"limit", "4128768"}});
  add.mutable_a()->mutable_view()->set_shape(0, kMaxInlineResult / 8);
  *add.mutable_b() = add.a();
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Add, add, &sum).ok());
  EXPECT_EQ(Values<double>(sum.tensor().data()), std::vector<double>(kMaxInlineResult / 8, 2.0));
  v1::MatmulRequest matmul;
  *matmul.mutable_a() = InView(Inline<float>(v1::DTYPE_F32, {}, {1}), 0, {1 << 14, 0}, {0, 0});
  *matmul.mutable_b() = InView(Inline<float>(v1::DTYPE_F32, {}, {1}), 0, {0, 1 << 14}, {0, 0});
  matmul.mutable_result()->mutable_buffer()->set_name("huge");
  v1::MatmulResponse product;
  ExpectError(Call(&v1::ComputeService::Stub::Matmul, matmul, &product),
              StatusCode::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED",
              {{"requested", std::to_string(std::int64_t{1} << 30)}});
}

TEST_F(ServiceTest, ListStrategiesFilters) {
  v1::ListStrategiesRequest request;
  v1::ListStrategiesResponse response;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::ListStrategies, request, &response).ok());
  const int all = response.strategies_size();
  int defaults = 0;
  for (const v1::Strategy& row : response.strategies()) {
    EXPECT_FALSE(row.name().empty());
    EXPECT_GT(row.dtypes_size(), 0);
    EXPECT_NE(row.available(), !row.needs().empty()) << row.name();
    defaults += row.default_();
  }
  EXPECT_EQ(defaults, 6) << "one an operation";
  request.set_operation("dot");
  request.set_backend("cpu");
  response.Clear();
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::ListStrategies, request, &response).ok());
  EXPECT_GT(response.strategies_size(), 0);
  EXPECT_LT(response.strategies_size(), all);
  for (const v1::Strategy& row : response.strategies()) EXPECT_EQ(row.operation(), "dot");
  request.set_operation("sort");
  ExpectError(Call(&v1::ComputeService::Stub::ListStrategies, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_OPERATION",
              {{"field", "operation"}, {"value", "sort"}, {"valid", "*"}});
  request.set_operation("");
  request.set_backend("tpu");
  ExpectError(Call(&v1::ComputeService::Stub::ListStrategies, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_OPERATION",
              {{"field", "backend"}, {"value", "tpu"}, {"valid", "cpu, cuda"}});
}

TEST_F(ServiceTest, ServerInfo) {
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(
      Call(&v1::ComputeService::Stub::GetServerInfo, v1::GetServerInfoRequest(), &info).ok());
  ASSERT_EQ(info.devices_size(), 1);
  EXPECT_EQ(info.devices(0).name(), "cpu");
  EXPECT_EQ(info.devices(0).buffer_limit_bytes(), 256u << 20);
  EXPECT_EQ(info.devices(0).workers(), 2);
  EXPECT_EQ(info.devices(0).waiting(), 0u);
  EXPECT_EQ(info.limits().max_message_bytes(), 4259840u);
  EXPECT_EQ(info.limits().max_inline_result_bytes(), (4u << 20) - (64u << 10));
  EXPECT_EQ(info.limits().queue_length(), 1024u);
  EXPECT_FALSE(info.limits().has_max_ttl());
  EXPECT_FALSE(info.version().empty());
}

// --- Limits and devices -------------------------------------------------------------------------

Options WithTtls() {
  Options options = TestOptions();
  options.default_ttl = absl::Seconds(50);
  options.max_ttl = absl::Seconds(100);
  options.upload_timeout = absl::Milliseconds(150);
  return options;
}

class LimitsTest : public ServiceTest {
 protected:
  LimitsTest() : ServiceTest(WithTtls()) {}
};

TEST_F(LimitsTest, Ttls) {
  v1::UploadResponse uploaded;
  ASSERT_TRUE(Upload({First("a", 1, "abcd")}, &uploaded).ok());
  EXPECT_EQ(uploaded.buffer().expire_time().seconds() - uploaded.buffer().create_time().seconds(),
            50);
  v1::UploadRequest first = First("b", 1, "abcd");
  first.mutable_spec()->mutable_ttl()->set_seconds(101);
  ExpectError(Upload({first}), StatusCode::INVALID_ARGUMENT, "BAD_TTL", {{"limit", "1m40s"}});
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(
      Call(&v1::ComputeService::Stub::GetServerInfo, v1::GetServerInfoRequest(), &info).ok());
  EXPECT_EQ(info.limits().default_ttl().seconds(), 50);
  EXPECT_EQ(info.limits().max_ttl().seconds(), 100);
}

TEST_F(LimitsTest, IdleUploadsEnd) {
  grpc::ClientContext context;
  v1::UploadResponse response;
  auto writer = server_.buffers().Upload(&context, &response);
  writer->Write(First("a", 1000, "abcd"));
  ExpectError(writer->Finish(), StatusCode::DEADLINE_EXCEEDED, "UPLOAD_IDLE", {{"limit", "150ms"}});
  EXPECT_EQ(server_.used_bytes(), 0u);

  ASSERT_TRUE(Create("b", {10}).ok());
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == 0; }))
      << "nobody writes the created buffer";
}

std::vector<std::unique_ptr<Device>> TwoDevices() {
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::make_unique<FakeDevice>("fake:0"));
  devices.push_back(std::make_unique<FakeDevice>("fake:1"));
  return devices;
}

class TwoDevicesTest : public ServiceTest {
 protected:
  TwoDevicesTest() : ServiceTest(TestOptions(), TwoDevices()) {}
};

TEST_F(TwoDevicesTest, OperationsRunWhereTheirOperandsLive) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2}, {1, 2}).ok());
  ASSERT_TRUE(server_.Put<float>("y", v1::DTYPE_F32, {2}, {3, 4}, false, "fake:1").ok());
  v1::DotResponse response;
  ASSERT_TRUE(Dot(Named("x"), Named("x"), &response).ok());
  EXPECT_EQ(response.stats().device(), "fake:0");
  ASSERT_TRUE(Dot(Inline<float>(v1::DTYPE_F32, {2}, {1, 1}), Named("y"), &response).ok());
  EXPECT_EQ(response.stats().device(), "fake:1");
  EXPECT_EQ(response.value().real(), 7);
  ExpectError(Dot(Named("x"), Named("y"), &response), StatusCode::FAILED_PRECONDITION,
              "DEVICE_MISMATCH", {{"x", "fake:0"}, {"y", "fake:1"}});
  EXPECT_EQ(server_.used_bytes(0), Charged(8));
  EXPECT_EQ(server_.used_bytes(1), Charged(8));
}

TEST_F(TwoDevicesTest, CopiesBringOperandsTogether) {
  // Larger than a chunk of the way over the host, with a cast and a view that has to be gathered.
  constexpr std::int64_t kRows = 1000, kColumns = 700;
  std::vector<std::int32_t> x(kRows * kColumns);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::int32_t>(i % 1000);
  ASSERT_TRUE(server_.Put<std::int32_t>("x", v1::DTYPE_I32, {kRows, kColumns}, x).ok());
  v1::CopyBufferRequest request;
  request.set_source("x");
  request.set_name("y");
  request.set_device("fake:1");
  request.set_dtype(v1::DTYPE_F64);
  for (std::int64_t extent : {kColumns, kRows}) request.mutable_view()->add_shape(extent);
  for (std::int64_t stride : {std::int64_t{1}, kColumns})
    request.mutable_view()->add_strides(stride);
  v1::CopyBufferResponse response;
  const grpc::Status status = Call(&v1::BufferService::Stub::CopyBuffer, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.buffer().device(), "fake:1");
  EXPECT_EQ(server_.used_bytes(1), Charged(std::uint64_t{kRows * kColumns} * 8));
  std::string data;
  ASSERT_TRUE(server_.Fetch("y", &data).ok());
  const std::vector<double> y = Values<double>(data);
  for (std::int64_t column = 0; column < kColumns; ++column) {
    for (std::int64_t row = 0; row < kRows; ++row) {
      ASSERT_EQ(y[static_cast<std::size_t>(column * kRows + row)],
                x[static_cast<std::size_t>(row * kColumns + column)]);
    }
  }
}

}  // namespace
}  // namespace tessera
