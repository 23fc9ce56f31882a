// BufferService as a client sees it: the numbers in errors, limits, and cases that take time or
// several callers. fuzz_model_test has random requests of every kind.

#include "kernels/client_and_server/crc32c.h"
#include "server/clock.h"
#include "tests/service_fixture.h"

namespace tessera {
namespace {

class BufferServiceTest : public ServiceTest {};

// --- Uploads ------------------------------------------------------------------------------------

TEST_F(BufferServiceTest, ErrorsOfUploadsHaveTheirNumbers) {
  const std::string spec = "spec { dtype: DTYPE_F32 shape: 4 }", a = "name: 'a' " + spec;
  struct Case {
    std::vector<std::string> messages;
    const char* reason;
    std::map<std::string, std::string> metadata;
  };
  const Case cases[] = {
      {{}, "BAD_MESSAGE", {{"field", "name"}}},
      {{a + "data: 'abcd'", "name: 'a' spec { dtype: DTYPE_F32 shape: 8 }"},
       "BAD_MESSAGE",
       {{"field", "spec"}}},
      {{a + "data: 'abcd'", "name: 'b'"},
       "BAD_MESSAGE",
       {{"field", "name"}, {"value", "b"}, {"expected", "a"}}},
      {{a + "data: 'abcd'", "data: 'efgh' version: 7"},
       "BAD_MESSAGE",
       {{"field", "version"}, {"value", "7"}, {"expected", "0"}}},
      {{a + "buffer_crc32c: 7", "buffer_crc32c: 8"}, "BAD_MESSAGE", {{"field", "buffer_crc32c"}}},
      {{"data: 'abcd'"}, "BAD_MESSAGE", {{"field", "name"}}},
      {{a + "data: '0123456789abcdef'", "data: 'x'"},
       "BAD_RANGE",
       {{"offset", "16"}, {"size", "1"}, {"limit", "16"}}},
      {{a + "data: '0123'", "data: '89ab'"},
       "MISSING_DATA",
       {{"name", "a"}, {"size", "16"}, {"missing", "8-16"}}},
      {{a}, "MISSING_DATA", {{"missing", "0-16"}}},
      {{"name: 'no spaces' " + spec}, "BAD_NAME", {{"field", "name"}, {"value", "no spaces"}}},
      {{"name: 'a' spec { dtype: 99 }"}, "BAD_DTYPE", {{"value", "99"}}},
      {{"name: 'a' spec { dtype: DTYPE_F32 shape: -1 }"},
       "BAD_SHAPE",
       {{"value", "*"}, {"limit", "*"}}},
      {{"name: 'a' spec { dtype: DTYPE_F32 device: 'cuda:7' }"},
       "BAD_DEVICE",
       {{"value", "cuda:7"}, {"valid", "cpu"}}},
      {{"name: 'a' spec { dtype: DTYPE_F32 ttl { seconds: -1 } }"},
       "BAD_TTL",
       {{"field", "ttl"}, {"value", "*"}}}};
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::PrintToString(c.messages));
    std::vector<v1::UploadRequest> messages;
    for (const std::string& text : c.messages) messages.push_back(Of<v1::UploadRequest>(text));
    ExpectError(Upload(messages), c.reason, c.metadata);
  }
  ExpectError(Get("a"), "BUFFER_NOT_FOUND", {{"name", "a"}});
  EXPECT_EQ(server_.used_bytes(), 0u);
}

TEST_F(BufferServiceTest, AMessageWithoutDataHasTheChecksumOfNoBytes) {
  ASSERT_TRUE(Create("a", {2}).ok());
  v1::UploadRequest empty = At("a", 0, "");
  empty.set_crc32c(Crc32c(nullptr, 0));
  EXPECT_TRUE(Upload({empty}).ok());
  empty.set_crc32c(Crc32c(nullptr, 0) + 1);
  ExpectError(Upload({empty}), "BAD_CHECKSUM", {{"field", "crc32c"}});
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
}

// --- Lists and copies ---------------------------------------------------------------------------

// A token continues the list that it came from, and no other.
TEST_F(BufferServiceTest, TokensOfPagesBelongToTheirLists) {
  for (const char* name : {"x/1", "x/2", "y"}) ASSERT_TRUE(Create(name, {1}).ok());
  auto request = Of<v1::ListBuffersRequest>("prefix: 'x/' page_size: 1");
  const std::string token = Good<v1::ListBuffersResponse>(request).next_page_token();
  request.set_page_token(token);
  EXPECT_EQ(Good<v1::ListBuffersResponse>(request).buffers(0).name(), "x/2");
  request.clear_prefix();
  ExpectError(Call(request), "BAD_PAGE", {{"field", "page_token"}});
  request.clear_page_token();
  request.set_page_size(1001);
  ExpectError(Call(request), "BAD_PAGE",
              {{"field", "page_size"}, {"value", "1001"}, {"limit", "1000"}});
}

TEST_F(BufferServiceTest, CopiesThatAreTooLarge) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
  auto request = Of<v1::CopyBufferRequest>("source: 'x' name: 'y' view { shape: 0 strides: 0 }");
  request.mutable_view()->set_shape(0, std::int64_t{1} << 30);
  ExpectError(
      Call(request), "QUOTA_EXCEEDED",
      {{"requested", std::to_string(std::int64_t{4} << 30)}, {"free", "*"}, {"total", "*"}});
  // The size in the new type does not fit in 63 bits.
  request.mutable_view()->set_shape(0, std::int64_t{1} << 60);
  request.set_dtype(v1::DTYPE_F64);
  ExpectError(Call(request), "BAD_SHAPE");
  EXPECT_TRUE(IsGone("y"));
}

// --- Limits and devices --------------------------------------------------------------------------

using LimitsTest = Changed<ServiceTest, [](Options& options) {
  options.default_ttl = absl::Seconds(50);
  options.max_ttl = absl::Seconds(100);
}>;

TEST_F(LimitsTest, Ttls) {
  v1::UploadResponse uploaded;
  AdvanceSteadyNow(absl::Hours(1));  // as if the wall clock had been set back
  const std::int64_t before = absl::ToUnixSeconds(absl::Now());
  ASSERT_TRUE(Upload({First("a", 1, "abcd")}, &uploaded).ok());
  // The ttl counts from the time when the buffer became READY. It may be wrong by a second.
  const std::int64_t ends = uploaded.buffer().expire_time().seconds();
  EXPECT_GE(ends, before + 49);
  EXPECT_LE(ends, absl::ToUnixSeconds(absl::Now()) + 51);
  v1::UploadRequest first = First("b", 1, "abcd");
  first.mutable_spec()->mutable_ttl()->set_seconds(101);
  ExpectError(Upload({first}), "BAD_TTL", {{"limit", "1m40s"}});
  const auto info = Good<v1::GetServerInfoResponse>(v1::GetServerInfoRequest());
  EXPECT_EQ(info.limits().default_ttl().seconds(), 50);
  EXPECT_EQ(info.limits().max_ttl().seconds(), 100);
}

using PatienceTest =
    Changed<ServiceTest, [](Options& options) { options.transfer_timeout = absl::Hours(1); }>;

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
