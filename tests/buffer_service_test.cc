// BufferService as a client sees it. Each error is checked with its code, reason and numbers.

#include <limits>

#include "google/protobuf/util/time_util.h"
#include "kernels/client_and_server/crc32c.h"
#include "server/clock.h"
#include "tests/service_fixture.h"

namespace tessera {
namespace {

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

  EXPECT_EQ(Fetched("a"), bytes);
  std::string data;
  for (const auto& [offset, limit] : {std::pair<std::uint64_t, std::uint64_t>{1'500'000, 10},
                                      {bytes.size() - 3, 100},
                                      {bytes.size(), 0}}) {
    ASSERT_TRUE(server_.Fetch("a", &data, offset, limit).ok());
    EXPECT_EQ(data, bytes.substr(offset, limit));
  }
  ExpectError(server_.Fetch("a", &data, bytes.size() + 1), "BAD_RANGE",
              {{"offset", "2800001"}, {"limit", "2800000"}});
  ASSERT_TRUE(Delete("a").ok());
  EXPECT_EQ(server_.used_bytes(), 0u);
}

TEST_F(BufferServiceTest, RepeatedFirstMessagesStayValid) {
  std::vector<v1::UploadRequest> messages;
  for (std::uint64_t i = 0; i < 4; ++i) {
    messages.push_back(First("a", 4, "abcd"));
    messages.back().set_offset(4 * i);
  }
  EXPECT_TRUE(Upload(messages).ok());

  // An offset of 0 counts as an offset.
  v1::UploadRequest back = More("ijkl");
  back.set_offset(0);
  ASSERT_TRUE(Upload({First("back", 2, "abcd"), More("efgh"), back}).ok());
  EXPECT_EQ(Fetched("back"), "ijklefgh");

  ExpectError(Upload({First("b", 8, "abcd"), First("b", 4, "abcd")}), "BAD_MESSAGE",
              {{"field", "spec"}});
  ExpectError(Upload({First("b", 4, "abcd"), First("c", 4, "abcd")}), "BAD_MESSAGE",
              {{"field", "name"}, {"value", "c"}, {"expected", "b"}});
  v1::UploadRequest other = More("efgh");
  other.set_version(7);
  ExpectError(Upload({First("b", 4, "abcd"), other}), "BAD_MESSAGE",
              {{"field", "version"}, {"value", "7"}, {"expected", "0"}});
  ExpectError(Get("b"), "BUFFER_NOT_FOUND", {{"name", "b"}});
}

// A damaged message must not count as a write that never ends.
TEST_F(BufferServiceTest, ADamagedMessageDoesNotKeepABufferFromBeingSealed) {
  ASSERT_TRUE(Create("a", {2}).ok());
  v1::UploadRequest damaged = At("a", 0, "abcdefgh");
  damaged.set_crc32c(Crc32c("abcdefgh", 8) + 1);
  ExpectError(Upload({damaged}), "BAD_CHECKSUM", {{"field", "crc32c"}});
  ASSERT_TRUE(Upload({At("a", 0, "abcdefgh")}).ok());
  EXPECT_TRUE(Seal("a").ok());
}

TEST_F(BufferServiceTest, AMessageWithoutDataHasTheChecksumOfNoBytes) {
  ASSERT_TRUE(Create("a", {2}).ok());
  v1::UploadRequest empty = At("a", 0, "");
  empty.set_crc32c(Crc32c(nullptr, 0));
  EXPECT_TRUE(Upload({empty}).ok());
  empty.set_crc32c(Crc32c(nullptr, 0) + 1);
  ExpectError(Upload({empty}), "BAD_CHECKSUM", {{"field", "crc32c"}});
}

TEST_F(BufferServiceTest, UploadsThatLieAboutTheirSize) {
  ExpectError(Upload({First("a", 4, "0123456789abcdef"), More("x")}), "BAD_RANGE",
              {{"offset", "16"}, {"size", "1"}, {"limit", "16"}});
  ExpectError(Upload({First("a", 4, "0123"), More("89ab")}), "MISSING_DATA",
              {{"name", "a"}, {"size", "16"}, {"missing", "8-16"}});
  ExpectError(Upload({First("a", 4)}), "MISSING_DATA", {{"missing", "0-16"}});
  v1::UploadRequest beyond = First("a", 4, "0123");
  beyond.set_offset(std::numeric_limits<std::uint64_t>::max());
  ExpectError(Upload({beyond}), "BAD_RANGE", {{"limit", "16"}});
  ExpectError(Upload({}), "BAD_MESSAGE", {{"field", "name"}});
  ExpectError(Get("a"), "BUFFER_NOT_FOUND");
  EXPECT_EQ(server_.used_bytes(), 0u);
}

TEST_F(BufferServiceTest, BrokenUploadOfACreatedBufferResumes) {
  ASSERT_TRUE(Create("a", {4}).ok());
  {
    UploadStream upload(server_.buffers());
    upload.Write(At("a", 0, "0123"));
    upload.Write(More("4567"));
    ASSERT_TRUE(Eventually([&] { return Found("a").buffer().committed_bytes() == 8; }));
    upload.context.TryCancel();
    (void)upload.Finish();
  }
  const v1::GetBufferResponse got = Found("a");
  EXPECT_EQ(got.buffer().state(), v1::Buffer::STATE_WRITING);
  EXPECT_EQ(MissingOf(got), "8-16");
  std::string data;
  for (const grpc::Status& status :
       {Seal("a"), server_.Fetch("a", &data), Dot(Named("a"), Named("a"))})
    ExpectError(status, "BUFFER_NOT_READY", {{"name", "a"}, {"missing", "8-16"}});

  v1::UploadResponse uploaded;
  ASSERT_TRUE(Upload({At("a", 8, "89abcdef")}, &uploaded).ok());
  EXPECT_EQ(uploaded.buffer().state(), v1::Buffer::STATE_WRITING);
  EXPECT_EQ(uploaded.buffer().committed_bytes(), 16u);
  EXPECT_EQ(uploaded.received_bytes(), 8u);
  auto seal = Of<v1::SealBufferRequest>("name: 'a'");
  const v1::Buffer sealed = Good<v1::SealBufferResponse>(seal).buffer();
  EXPECT_EQ(sealed.state(), v1::Buffer::STATE_READY);
  seal.set_version(sealed.version());
  EXPECT_TRUE(Call(seal).ok());
  ExpectError(Seal("a"), "BUFFER_NOT_FOUND", {{"name", "a"}});
  EXPECT_EQ(Fetched("a"), "0123456789abcdef");
  ExpectError(Upload({At("a", 0, "x")}), "BUFFER_SEALED", {{"name", "a"}});
  ExpectError(Upload({At("b", 0, "x")}), "BUFFER_NOT_FOUND", {{"name", "b"}});
  ExpectError(Seal("b"), "BUFFER_NOT_FOUND", {{"name", "b"}});
}

TEST_F(BufferServiceTest, TwoClientsOnOneName) {
  UploadStream upload(server_.buffers());
  upload.Write(First("a", 2, "abcd"));
  ASSERT_TRUE(Eventually([&] { return Get("a").ok(); }));
  ExpectError(Upload({First("a", 2, "12345678")}), "BUFFER_EXISTS", {{"name", "a"}});
  ExpectError(Upload({At("a", 0, "x")}), "BUFFER_NOT_READY");
  ExpectError(Seal("a"), "BUFFER_NOT_READY");
  upload.Write(More("efgh"));
  ASSERT_TRUE(upload.Finish().ok());
  EXPECT_EQ(Fetched("a"), "abcdefgh");
  ExpectError(Upload({First("a", 2, "12345678")}), "BUFFER_EXISTS");
  ExpectError(Create("a", {2}), "BUFFER_EXISTS", {{"name", "a"}});
}

TEST_F(BufferServiceTest, RacingUploadsOfOneNameLeaveOneWhole) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      v1::UploadRequest first =
          First("a", 100'000, std::string(200'000, static_cast<char>('a' + t)));
      first.mutable_spec()->set_replace(true);
      for (int i = 0; i < 10; ++i) EXPECT_TRUE(Upload({first, More(first.data())}).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string data = Fetched("a");
  EXPECT_EQ(data, std::string(400'000, data[0])) << "never half of one and half of another";
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == Charged(400'000); }));
}

TEST_F(BufferServiceTest, SpecsThatCannotBe) {
  const auto expect = [&](const std::string& spec, const std::string& reason,
                          const std::map<std::string, std::string>& metadata) {
    ExpectError(Upload({Of<v1::UploadRequest>("name: 'a' data: 'abcd' spec { " + spec + " }")}),
                reason, metadata);
  };
  expect("", "BAD_DTYPE", {{"value", "0"}});
  expect("dtype: 99", "BAD_DTYPE", {{"value", "99"}});
  expect("dtype: DTYPE_F32 shape: -1", "BAD_SHAPE", {{"value", "*"}, {"limit", "*"}});
  expect("dtype: DTYPE_F32 device: 'cuda:7'", "BAD_DEVICE",
         {{"value", "cuda:7"}, {"valid", "cpu"}});
  for (const std::string ttl : {"", "seconds: -1", "seconds: 4611686018427387904",
                                "seconds: 5 nanos: 1000000000", "seconds: 5 nanos: -1"})
    expect("dtype: DTYPE_F32 ttl { " + ttl + " }", "BAD_TTL", {{"field", "ttl"}, {"value", "*"}});
  ExpectError(Create("a", std::vector<std::int64_t>(9, 1)), "BAD_SHAPE",
              {{"value", "9"}, {"limit", "8"}});
  ExpectError(Create("a", {std::int64_t{1} << 40, std::int64_t{1} << 40}), "BAD_SHAPE");
  ExpectError(Create("no spaces", {1}), "BAD_NAME", {{"field", "name"}, {"value", "no spaces"}});
  ExpectError(Create("", {1}), "BAD_NAME");
  ExpectError(Create(std::string(5000, 'x'), {1}), "BAD_NAME", {{"value", "*"}});
}

TEST_F(BufferServiceTest, MessagesOverTheCap) {
  constexpr std::size_t size = 5 << 20;
  v1::UploadRequest large = First("a", static_cast<std::int64_t>(size / 4), std::string(size, 'x'));
  const v1::Operand x = Inline(v1::DTYPE_F32, {1'200'000}, std::vector<float>(1'200'000));
  for (const grpc::Status& status : {Upload({large}), Dot(x, Named("a"))})
    ExpectError(status, "BAD_MESSAGE",
                {{"field", "message"}, {"value", "*"}, {"limit", "4259840"}});
  v1::UploadRequest fits = First("a", 1 << 20, std::string(4 << 20, 'x'));
  EXPECT_TRUE(Upload({fits}).ok()) << "4 MiB of data are what the interface promises";
}

// --- Properties of buffers ----------------------------------------------------------------------

TEST_F(BufferServiceTest, GetReplaceAndVersions) {
  ASSERT_TRUE(server_.Put<float>("a", v1::DTYPE_F32, {1, 2}, {1, 2}).ok());
  const v1::Buffer before = Found("a").buffer();
  EXPECT_THAT(before.shape(), ElementsAre(1, 2));
  EXPECT_EQ(before.dtype(), v1::DTYPE_F32);
  EXPECT_EQ(before.state(), v1::Buffer::STATE_READY);
  EXPECT_GT(before.create_time().seconds(), 0);
  ExpectError(server_.Put<float>("a", v1::DTYPE_F32, {1}, {3}), "BUFFER_EXISTS", {{"name", "a"}});
  ASSERT_TRUE(server_.Put<float>("a", v1::DTYPE_F32, {1}, {3}, true).ok());
  const v1::Buffer after = Found("a").buffer();
  EXPECT_GT(after.version(), before.version());
  EXPECT_THAT(after.shape(), ElementsAre(1));
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == Charged(4); }));
}

TEST_F(BufferServiceTest, ListPages) {
  for (const char* name : {"x/1", "x/2", "x/3", "y"}) {
    ASSERT_TRUE(server_.Put<float>(name, v1::DTYPE_F32, {1}, {1}).ok());
  }
  ASSERT_TRUE(Create("x/4", {1}).ok());
  auto request = Of<v1::ListBuffersRequest>("prefix: 'x/' page_size: 2");
  std::vector<std::string> names, tokens;
  do {
    const auto response = Good<v1::ListBuffersResponse>(request);
    EXPECT_LE(response.buffers_size(), 2);
    for (const v1::Buffer& buffer : response.buffers()) names.push_back(buffer.name());
    request.set_page_token(response.next_page_token());
    tokens.push_back(response.next_page_token());
  } while (!tokens.back().empty());
  EXPECT_THAT(names, ElementsAre("x/1", "x/2", "x/3", "x/4"));
  EXPECT_EQ(tokens.size(), 2u);

  request.clear_prefix();
  for (const std::string& token : {tokens[0], std::string("!!!")}) {
    request.set_page_token(token);
    ExpectError(Call(request), "BAD_PAGE", {{"field", "page_token"}});
  }
  request.clear_page_token();
  for (const int size : {-1, 1001}) {
    request.set_page_size(size);
    ExpectError(Call(request), "BAD_PAGE",
                {{"field", "page_size"}, {"value", std::to_string(size)}, {"limit", "1000"}});
  }
  request.set_page_size(0);
  EXPECT_EQ(Good<v1::ListBuffersResponse>(request).buffers_size(), 5);
}

TEST_F(BufferServiceTest, CopiesOfWholeBuffersViewsAndCasts) {
  ASSERT_TRUE(
      server_.Put<float>("x", v1::DTYPE_F32, {2, 3}, {1, 2.5f, -3.75f, 4e9f, -5e9f, 6}).ok());
  v1::Buffer made;
  const auto copy = [&](const std::string& request) {
    made =
        Good<v1::CopyBufferResponse>(Of<v1::CopyBufferRequest>("source: 'x' " + request)).buffer();
    EXPECT_EQ(made.state(), v1::Buffer::STATE_READY);
    return Fetched(made.name());
  };
  EXPECT_EQ(copy("name: 'whole'"), Fetched("x"));
  EXPECT_EQ(made.name(), "whole");
  EXPECT_EQ(made.dtype(), v1::DTYPE_F32);
  EXPECT_THAT(made.shape(), ElementsAre(2, 3));
  EXPECT_FALSE(made.has_expire_time());
  // A window that is read backwards, with a lease.
  EXPECT_THAT(Values<float>(copy("name: 'window' view { offset: 4 shape: 2 strides: -3 } "
                                 "ttl { seconds: 40 }")),
              ElementsAre(-5e9f, 2.5f));
  EXPECT_TRUE(made.has_expire_time());
  // Copies x over itself.
  const std::uint64_t version = Found("x").buffer().version();
  EXPECT_THAT(Values<double>(copy("name: 'x' replace: true dtype: DTYPE_F64")),
              ElementsAre(1, 2.5, -3.75, 4e9, -5e9, 6));
  EXPECT_GT(made.version(), version);
}

TEST_F(BufferServiceTest, CopiesThatCannotBe) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
  ASSERT_TRUE(Create("open", {3}).ok());
  const std::uint64_t used = server_.used_bytes();
  const auto expect = [&](const std::string& text, const std::string& reason,
                          const std::map<std::string, std::string>& metadata = {}) {
    auto request = Of<v1::CopyBufferRequest>("source: 'x' name: 'y'");
    request.MergeFrom(Of<v1::CopyBufferRequest>(text));
    ExpectError(Call(request), reason, metadata);
    EXPECT_EQ(server_.used_bytes(), used);
  };
  expect("source: 'none'", "BUFFER_NOT_FOUND", {{"name", "none"}});
  expect("source: 'open'", "BUFFER_NOT_READY", {{"missing", "*"}});
  expect("name: 'x'", "BUFFER_EXISTS");
  expect("name: 'not a name'", "BAD_NAME");
  expect("ttl { seconds: -1 }", "BAD_TTL");
  expect("device: 'tpu'", "BAD_DEVICE");
  expect("dtype: 77", "BAD_DTYPE");
  expect("view { shape: 4 }", "BAD_VIEW");
  expect("view { shape: 1073741824 strides: 0 }", "QUOTA_EXCEEDED",
         {{"requested", std::to_string(std::int64_t{4} << 30)}, {"free", "*"}, {"total", "*"}});
  // The size in the new type does not fit into 63 bits.
  expect("view { shape: 1152921504606846976 strides: 0 } dtype: DTYPE_F64", "BAD_SHAPE");
  ExpectError(Get("y"), "BUFFER_NOT_FOUND");
}

TEST_F(BufferServiceTest, TtlEndsABuffer) {
  v1::UploadResponse uploaded;
  ASSERT_TRUE(Upload({Of<v1::UploadRequest>("name: 'a' data: 'abcd' "
                                            "spec { dtype: DTYPE_F32 ttl { nanos: 100000000 } }")},
                     &uploaded)
                  .ok());
  EXPECT_TRUE(uploaded.buffer().has_expire_time());
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == 0; }));
  ExpectError(Get("a"), "BUFFER_NOT_FOUND", {{"name", "a"}});

  ASSERT_TRUE(Upload({First("b", 1, "abcd")}).ok());
  auto update = Of<v1::UpdateBufferRequest>("name: 'b' ttl { seconds: 3600 }");
  EXPECT_TRUE(Good<v1::UpdateBufferResponse>(update).buffer().has_expire_time());
  update.mutable_ttl()->set_seconds(-1);
  ExpectError(Call(update), "BAD_TTL");
  update.clear_ttl();
  EXPECT_FALSE(Good<v1::UpdateBufferResponse>(update).buffer().has_expire_time());
  update.set_name("c");
  ExpectError(Call(update), "BUFFER_NOT_FOUND", {{"name", "c"}});
  ExpectError(Delete("c"), "BUFFER_NOT_FOUND", {{"name", "c"}});
}

// --- Limits and devices --------------------------------------------------------------------------

class LimitsTest : public ServiceTest {
 protected:
  LimitsTest()
      : ServiceTest(With([](Options& options) {
          options.default_ttl = absl::Seconds(50);
          options.max_ttl = absl::Seconds(100);
          options.transfer_timeout = absl::Seconds(1);
        })) {}
};

TEST_F(LimitsTest, Ttls) {
  v1::UploadResponse uploaded;
  ASSERT_TRUE(Upload({First("a", 1, "abcd")}, &uploaded).ok());
  // The ttl counts from the time when the buffer became READY, shortly after it was created.
  const google::protobuf::Duration lives =
      uploaded.buffer().expire_time() - uploaded.buffer().create_time();
  EXPECT_GE(lives.seconds(), 50);
  EXPECT_LT(lives.seconds(), 60);
  v1::UploadRequest first = First("b", 1, "abcd");
  first.mutable_spec()->mutable_ttl()->set_seconds(101);
  ExpectError(Upload({first}), "BAD_TTL", {{"limit", "1m40s"}});
  const auto info = Good<v1::GetServerInfoResponse>(v1::GetServerInfoRequest());
  EXPECT_EQ(info.limits().default_ttl().seconds(), 50);
  EXPECT_EQ(info.limits().max_ttl().seconds(), 100);
}

TEST_F(LimitsTest, IdleUploadsEnd) {
  UploadStream upload(server_.buffers());
  upload.Write(First("a", 1000, "abcd"));
  ExpectError(upload.writer->Finish(), "UPLOAD_IDLE", {{"limit", "1s"}});
  EXPECT_EQ(server_.used_bytes(), 0u);

  ASSERT_TRUE(Create("b", {10}).ok());
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == 0; }))
      << "no stream writes the created buffer";
}

class PatienceTest : public ServiceTest {
 protected:
  PatienceTest()
      : ServiceTest(With([](Options& options) { options.transfer_timeout = absl::Hours(1); })) {}
};

// Together, the messages take longer than a single message may.
TEST_F(PatienceTest, EveryMessageOfAnUploadHasItsTime) {
  UploadStream upload(server_.buffers());
  for (unsigned i = 1; i <= 5; ++i) {
    EXPECT_TRUE(upload.Write(i == 1 ? First("a", 5, "abcd") : More("abcd")));
    EXPECT_TRUE(Eventually([&] {
      v1::GetBufferResponse got;
      return Get("a", &got).ok() && got.buffer().committed_bytes() == 4 * i;
    }));
    AdvanceSteadyNow(absl::Minutes(40));
  }
  const grpc::Status status = upload.Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// The array is larger than a chunk of a copy through the host. The copy has a cast, and a view that
// must be gathered.
class CopyBetweenDevicesTest : public TwoDevicesTest {};

TEST_F(CopyBetweenDevicesTest, CopiesReachTheOtherDevice) {
  std::vector<std::int32_t> x(1000 * 700);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::int32_t>(i % 1000);
  ASSERT_TRUE(server_.Put<std::int32_t>("x", v1::DTYPE_I32, {1000, 700}, x).ok());
  const auto copy = Good<v1::CopyBufferResponse>(
      Of<v1::CopyBufferRequest>("source: 'x' name: 'y' device: 'fake:1' dtype: DTYPE_F64 "
                                "view { shape: [700, 1000] strides: [1, 700] }"));
  EXPECT_EQ(copy.buffer().device(), "fake:1");
  EXPECT_EQ(server_.used_bytes(1), Charged(8 * x.size()));
  const auto y = Values<double>(Fetched("y"));
  for (std::size_t i = 0; i < y.size(); ++i) ASSERT_EQ(y[i], x[i % 1000 * 700 + i / 1000]) << i;
}

}  // namespace
}  // namespace tessera
