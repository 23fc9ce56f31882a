// BufferService as a client sees it, each error with its code, reason and figures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "google/protobuf/util/time_util.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/element.h"
#include "server/clock.h"
#include "tests/service_fixture.h"

namespace tessera {
namespace {

using grpc::StatusCode;
using testing::ElementsAre;

class BufferServiceTest : public ServiceTest {};

// --- Uploads and downloads ----------------------------------------------------------------------

TEST_F(BufferServiceTest, UploadsInOneStreamAndDownloads) {
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

TEST_F(BufferServiceTest, ScalarsAndEmptyArrays) {
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

TEST_F(BufferServiceTest, EveryDtypeTravels) {
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

TEST_F(BufferServiceTest, RepeatedFirstMessagesStayValid) {
  std::vector<v1::UploadRequest> messages;
  for (std::uint64_t i = 0; i < 4; ++i) {
    messages.push_back(First("a", 4, "abcd"));
    messages.back().set_offset(4 * i);
  }
  EXPECT_TRUE(Upload(messages).ok());

  // An offset of 0 is one.
  v1::UploadRequest back = More("ijkl");
  back.set_offset(0);
  ASSERT_TRUE(Upload({First("back", 2, "abcd"), More("efgh"), back}).ok());
  std::string data;
  ASSERT_TRUE(server_.Fetch("back", &data).ok());
  EXPECT_EQ(data, "ijklefgh");

  v1::UploadRequest other = First("b", 4, "abcd");
  messages = {First("b", 8, "abcd"), other};
  ExpectError(Upload(messages), StatusCode::INVALID_ARGUMENT, "BAD_MESSAGE", {{"field", "spec"}});
  messages = {First("b", 4, "abcd"), First("c", 4, "abcd")};
  ExpectError(Upload(messages), StatusCode::INVALID_ARGUMENT, "BAD_MESSAGE",
              {{"field", "name"}, {"value", "c"}, {"expected", "b"}});
  v1::GetBufferResponse got;
  ExpectError(Get("b", &got), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND", {{"name", "b"}});
}

// What a damaged message would have written does not count as a write that goes on for ever.
TEST_F(BufferServiceTest, ADamagedMessageDoesNotKeepABufferFromBeingSealed) {
  ASSERT_TRUE(Create("a", {2}).ok());
  v1::UploadRequest damaged = At("a", 0, "abcdefgh");
  damaged.set_crc32c(Crc32c("abcdefgh", 8) + 1);
  ExpectError(Upload({damaged}), StatusCode::DATA_LOSS, "BAD_CHECKSUM", {{"field", "crc32c"}});
  ASSERT_TRUE(Upload({At("a", 0, "abcdefgh")}).ok());
  v1::SealBufferResponse sealed;
  EXPECT_TRUE(Seal("a", &sealed).ok());
}

TEST_F(BufferServiceTest, AMessageWithoutDataHasTheChecksumOfNoBytes) {
  ASSERT_TRUE(Create("a", {2}).ok());
  v1::UploadRequest empty = At("a", 0, "");
  empty.set_crc32c(Crc32c(nullptr, 0));
  EXPECT_TRUE(Upload({empty}).ok());
  empty.set_crc32c(Crc32c(nullptr, 0) + 1);
  ExpectError(Upload({empty}), StatusCode::DATA_LOSS, "BAD_CHECKSUM", {{"field", "crc32c"}});
}

TEST_F(BufferServiceTest, OnlyTheFirstMessageOfADownloadDescribesTheBuffer) {
  ASSERT_TRUE(server_.Put<float>("a", v1::DTYPE_F32, {700'000}, std::vector<float>(700'000)).ok());
  grpc::ClientContext context;
  v1::DownloadRequest request;
  request.set_name("a");
  auto reader = server_.buffers().Download(&context, request);
  std::vector<bool> described;
  for (v1::DownloadResponse response; reader->Read(&response);) {
    described.push_back(response.has_buffer());
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_THAT(described, ElementsAre(true, false, false));
}

TEST_F(BufferServiceTest, UploadsThatLieAboutTheirSize) {
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

TEST_F(BufferServiceTest, BrokenUploadLeavesNothing) {
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

TEST_F(BufferServiceTest, BrokenUploadOfACreatedBufferResumes) {
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

TEST_F(BufferServiceTest, ParallelStreamsFillDisjointRanges) {
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

TEST_F(BufferServiceTest, TwoClientsOnOneName) {
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

TEST_F(BufferServiceTest, RacingUploadsOfOneNameLeaveOneWhole) {
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

TEST_F(BufferServiceTest, SpecsThatCannotBe) {
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

TEST_F(BufferServiceTest, NamesTtlsAndDevicesThatCannotBe) {
  ExpectError(Create("no spaces", {1}), StatusCode::INVALID_ARGUMENT, "BAD_NAME",
              {{"field", "name"}, {"value", "no spaces"}});
  ExpectError(Create("", {1}), StatusCode::INVALID_ARGUMENT, "BAD_NAME");
  ExpectError(Create(std::string(5000, 'x'), {1}), StatusCode::INVALID_ARGUMENT, "BAD_NAME",
              {{"value", "*"}});
  v1::UploadRequest bad = First("a", 1, "abcd");
  for (const auto& [seconds, nanos] : {std::pair<std::int64_t, int>{0, 0},
                                       {-1, 0},
                                       {std::int64_t{1} << 62, 0},
                                       {5, 1'000'000'000},
                                       {5, -1}}) {
    bad.mutable_spec()->mutable_ttl()->set_seconds(seconds);
    bad.mutable_spec()->mutable_ttl()->set_nanos(nanos);
    ExpectError(Upload({bad}), StatusCode::INVALID_ARGUMENT, "BAD_TTL",
                {{"field", "ttl"}, {"value", "*"}});
  }
  bad = First("a", 1, "abcd");
  bad.mutable_spec()->set_device("cuda:7");
  ExpectError(Upload({bad}), StatusCode::INVALID_ARGUMENT, "BAD_DEVICE",
              {{"value", "cuda:7"}, {"valid", "cpu"}});
}

TEST_F(BufferServiceTest, MessagesOverTheCap) {
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

TEST_F(BufferServiceTest, MemoryLimit) {
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

TEST_F(BufferServiceTest, GetReplaceAndVersions) {
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

TEST_F(BufferServiceTest, ListPages) {
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

TEST_F(BufferServiceTest, CopiesOfWholeBuffersViewsAndCasts) {
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

TEST_F(BufferServiceTest, CopiesThatCannotBe) {
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

TEST_F(BufferServiceTest, TtlEndsABuffer) {
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

// --- Limits and devices --------------------------------------------------------------------------

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
  // Counted from when it became READY, a moment after it was created.
  const google::protobuf::Duration lives =
      uploaded.buffer().expire_time() - uploaded.buffer().create_time();
  EXPECT_GE(lives.seconds(), 50);
  EXPECT_LT(lives.seconds(), 60);
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

Options WithPatience() {
  Options options = TestOptions();
  options.upload_timeout = absl::Hours(1);
  return options;
}

class PatienceTest : public ServiceTest {
 protected:
  PatienceTest() : ServiceTest(WithPatience()) {}
};

// Messages that together take longer than one may.
TEST_F(PatienceTest, EveryMessageOfAnUploadHasItsTime) {
  grpc::ClientContext context;
  v1::UploadResponse response;
  auto writer = server_.buffers().Upload(&context, &response);
  for (unsigned i = 1; i <= 5; ++i) {
    EXPECT_TRUE(writer->Write(i == 1 ? First("a", 5, "abcd") : More("abcd")));
    EXPECT_TRUE(Eventually([&] {
      v1::GetBufferResponse got;
      return Get("a", &got).ok() && got.buffer().committed_bytes() == 4 * i;
    }));
    AdvanceSteadyNow(absl::Minutes(40));
  }
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

using BuffersOnTwoDevicesTest = TwoDevicesTest;

TEST_F(BuffersOnTwoDevicesTest, CopiesBringOperandsTogether) {
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
