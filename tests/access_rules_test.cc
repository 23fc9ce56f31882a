// The token file and the rules for roles.
#include <gtest/gtest.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpc/health/v1/health.pb.h"
#include "grpc/reflection/v1/reflection.pb.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "server/access/access.h"
#include "server/net/unix_socket.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"
#include "tessera/v1/shared_memory.pb.h"
#include "tests/fake_device.h"
#include "tests/fuzz/service_calls.h"

namespace tessera {
namespace {

const std::string kHash = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
const std::string kOther = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

std::string Line(const std::string& rest) { return absl::StrCat(kHash, " ", rest, "\n"); }

TEST(ParseTokens, ReadsHashRoleAndTenant) {
  const std::string upper = absl::AsciiStrToUpper(kOther);
  const auto file = ParseTokens(absl::StrCat("# who\n\n  ", Line("write vision  # of the lab"),
                                             "\t\r\n", upper, "\tadmin\tops-1.x_y"));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->lines.size(), 2u);
  EXPECT_EQ(file->lines[0].hash[0], 0x2b);
  EXPECT_EQ(file->lines[0].hash[31], 0x5b);
  EXPECT_EQ(file->lines[0].role, Role::kWrite);
  EXPECT_EQ(file->lines[0].tenant, "vision");
  EXPECT_EQ(file->lines[1].hash[0], 0x9f);
  EXPECT_EQ(file->lines[1].role, Role::kAdmin);
  EXPECT_EQ(file->lines[1].tenant, "ops-1.x_y");
  EXPECT_EQ(file->quotas.at("vision").bytes, kUnlimited);
}

TEST(ParseTokens, CertificatesAndUsersHaveNames) {
  const auto file = ParseTokens(
      "cn:Trainer write a\ndns:Host.Example.ORG read a\nuri:spiffe://example.org/X admin b "
      "calls=3\n"
      "uid:01000 read b\n");
  ASSERT_TRUE(file.ok()) << file.status();
  std::vector<std::string> names;
  for (const TokenFile::Line& line : file->lines) names.push_back(line.name);
  EXPECT_EQ(names, (std::vector<std::string>{"cn:Trainer", "dns:host.example.org",
                                             "uri:spiffe://example.org/X", "uid:1000"}));
  EXPECT_EQ(file->quotas.at("b").calls, 3u);
}

TEST(ParseTokens, QuotasAreTheTenants) {
  const auto file = ParseTokens(absl::StrCat(Line("read a bytes=4Gi calls=64 bytes=4Gi"), kOther,
                                             " write a buffers=0 calls=64"));
  ASSERT_TRUE(file.ok()) << file.status();
  const Quotas& quotas = file->quotas.at("a");
  EXPECT_EQ(quotas.bytes, std::uint64_t{4} << 30);
  EXPECT_EQ(quotas.buffers, 0u);
  EXPECT_EQ(quotas.calls, 64u);
}

TEST(ParseTokens, MistakesNameTheLineAndNotWhatStandsThere) {
  const std::string secret = "a-token-where-its-hash-belongs";
  const std::string upper = absl::AsciiStrToUpper(kHash);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "it admits no callers"},
      {"# nobody\n", "it admits no callers"},
      {secret, "line 1: it needs a caller, a role and a tenant"},
      {absl::StrCat("\n", secret, " write a"), "line 2: the first word must be a SHA-256"},
      {absl::StrCat(kHash.substr(1), " write a"), "the first word must be a SHA-256"},
      {absl::StrCat(kHash, "00 write a"), "the first word must be a SHA-256"},
      {absl::StrCat("zz", kHash.substr(2), " write a"), "the first word must be a SHA-256"},
      {"cn: write a", "the first word must be a SHA-256"},
      {"email:x@example.org write a", "cn:, dns: or uri: followed by a name"},
      {"uid:root write a", "uid: followed by a number from 0 to 4294967294"},
      {"uid:-1 write a", "the first word must be a SHA-256"},
      {"uid:4294967296 write a", "the first word must be a SHA-256"},
      {"uid:4294967295 write a", "the first word must be a SHA-256"},
      {"cn:Jane Doe write a", "a name that contains a space or # cannot be listed"},
      {"cn:Jane#1 write a", "a name that contains a space or # cannot be listed"},
      {"uid:" + std::to_string(OverflowUser()) + " write a", "line 1: the kernel shows this"},
      {absl::StrCat("cn:", std::string(1025, 'x'), " write a"), "the first word must be a SHA-256"},
      {"uid:7 write a\nuid:007 read b", "line 2: an earlier line names this caller"},
      {"dns:a.org write a\ndns:A.org read b", "line 2: an earlier line names this caller"},
      {Line("Write a"), "the role must be"},
      {Line("none a"), "the role must be"},
      {Line("write a/b"), "a tenant's name must have"},
      {Line("write " + std::string(65, 'a')), "a tenant's name must have"},
      {Line("write a disk=1"), "a quota must be bytes=SIZE"},
      {Line("write a bytes"), "'bytes' must be a size"},
      {Line("write a bytes="), "'bytes' must be a size"},
      {Line("write a bytes=50%"), "'bytes' must be a size"},
      {Line("write a bytes=4194305Ti"), "line 1: 'bytes' must be a size from 1 to 4194304Ti"},
      {Line("write a calls=-1"), "'calls' must be a whole number from 0 to"},
      {Line("write a calls=1.5"), "'calls' must be a whole number from 0 to"},
      {Line("write a calls=+1"), "'calls' must be a whole number from 0 to"},
      {Line("write a buffers=18446744073709551615"),
       "line 1: 'buffers' must be a whole number from 0 to 18446744073709551614"},
      {Line("write a calls=1 calls=2"), "a different value for this quota"},
      {absl::StrCat(Line("write a calls=1"), kOther, " read a calls=2"),
       "line 2: the tenant already has"},
      {absl::StrCat(Line("write a"), Line("read b")), "line 2: an earlier line names this caller"},
      {Line("write a") + upper + " read b", "line 2: an earlier line names this caller"},
  };
  for (const auto& [text, said] : cases) {
    const absl::Status status = ParseTokens(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    const std::string message(status.message());
    EXPECT_NE(message.find(said), std::string::npos) << text << ": " << message;
    for (const std::string& word : {secret, kHash, kHash.substr(1, 8)})
      EXPECT_EQ(message.find(word), std::string::npos) << message;
  }
}

// Returns the methods of the .proto files that define these messages.
template <class... Messages>
std::multiset<std::string> MethodsOf(bool full_names) {
  std::multiset<std::string> names;
  for (const auto* file : {Messages::descriptor()->file()...}) {
    for (int s = 0; s < file->service_count(); ++s) {
      const google::protobuf::ServiceDescriptor& service = *file->service(s);
      for (int m = 0; m < service.method_count(); ++m)
        names.insert(full_names ? service.method(m)->full_name() : service.method(m)->name());
    }
  }
  return names;
}

TEST(MethodRules, EveryMethodOfTheProtocolHasOne) {
  std::multiset<std::string> rules;
  for (const MethodInfo& method : kMethods) {
    rules.emplace(method.name);
    EXPECT_EQ(RoleFor(method.name), method.role);
    EXPECT_NE(method.role, Role::kNone);
  }
  EXPECT_EQ((MethodsOf<v1::GetBufferRequest, v1::DotRequest, v1::RegionRange>(false)), rules);
  EXPECT_EQ(RoleFor("NoSuchMethod"), Role::kAdmin);
}

TEST(FuzzMethods, AreEveryMethodThatTheServerHas) {
  EXPECT_EQ(std::multiset<std::string>(std::begin(kFuzzMethods), std::end(kFuzzMethods)),
            (MethodsOf<v1::GetBufferRequest, v1::DotRequest, v1::RegionRange,
                       grpc::health::v1::HealthCheckRequest,
                       grpc::reflection::v1::ServerReflectionRequest,
                       grpc::reflection::v1alpha::ServerReflectionRequest>(true)));
}

TEST(CallerTest, ARoleCanWhatSmallerOnesCan) {
  const std::vector<Role> roles = {Role::kNone, Role::kRead, Role::kWrite, Role::kAdmin};
  for (const Role has : roles) {
    for (const Role needed : roles) {
      const absl::Status status = Caller{nullptr, has}.Require(needed, "Upload", "Upload");
      EXPECT_EQ(status.ok(), has >= needed);
      if (status.ok()) continue;
      EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
      EXPECT_EQ(ErrorReason(status), "ROLE_TOO_SMALL");
      EXPECT_EQ(ErrorMetadata(status)["needed"], std::string(Name(needed)));
    }
  }
}

class TenantsTest : public testing::Test {
 protected:
  absl::StatusOr<std::shared_ptr<Draft>> Create(Tenant& tenant, const std::string& name,
                                                std::int64_t floats) {
    return tenant.store().Create(
        {.name = name, .type = *MakeArrayType(DType::kF32, {floats}), .device = &device_});
  }

  FakeDevice device_;
  Tenants tenants_{{{&device_, 1 << 20}}, {.buffers = 3}};
};

TEST_F(TenantsTest, QuotasLimitOneTenant) {
  Tenant &a = tenants_.Named("a"), &b = tenants_.Named("b");
  a.SetQuotas({.bytes = 4096, .buffers = 1, .calls = 1});
  const absl::Status bytes = Create(a, "x", 2000).status();
  EXPECT_EQ(ErrorReason(bytes), "TENANT_QUOTA_EXCEEDED");
  EXPECT_EQ(ErrorMetadata(bytes)["quota"], "bytes");
  EXPECT_EQ(ErrorMetadata(bytes)["used"], "0");
  EXPECT_TRUE(Create(b, "x", 2000).ok());
  const auto one = Create(a, "x", 10);
  ASSERT_TRUE(one.ok()) << one.status();
  const absl::Status buffers = Create(a, "y", 10).status();
  EXPECT_EQ(ErrorMetadata(buffers)["quota"], "buffers");
  EXPECT_EQ(ErrorMetadata(buffers)["used"], "1");
  EXPECT_EQ(ErrorMetadata(buffers)["limit"], "1");

  absl::StatusOr<Charge> call = a.BeginCall();
  ASSERT_TRUE(call.ok());
  EXPECT_EQ(ErrorReason(a.BeginCall().status()), "TOO_MANY_CALLS");
  EXPECT_TRUE(b.BeginCall().ok());
  *call = Charge();
  EXPECT_TRUE(a.BeginCall().ok());
}

}  // namespace
}  // namespace tessera
