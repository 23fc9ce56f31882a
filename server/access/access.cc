#include "server/access/access.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "grpc/grpc_security_constants.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/word_lines.h"
#include "server/net/unix_socket.h"
#include "server/net/user_mark.h"
#include "server/options.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

using absl::StatusCode;

constexpr std::size_t kLongestToken = 1024;
constexpr std::size_t kLongestCertificateName = 1024;
constexpr std::string_view kScheme = "bearer ";

absl::Status Bad(std::size_t line, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("line ", line, ": ", Absl(why)));
}

std::optional<TokenHash> ParseHash(absl::string_view text) {
  TokenHash hash;
  if (text.size() != 2 * hash.size() ||
      !std::all_of(text.begin(), text.end(), absl::ascii_isxdigit))
    return std::nullopt;
  const std::string bytes = absl::HexStringToBytes(text);
  std::memcpy(hash.data(), bytes.data(), hash.size());
  return hash;
}

constexpr absl::string_view kUser = "uid:";
constexpr absl::string_view kNoSpaces = " (a name that contains a space or # cannot be listed)";

// A kind of name in the file: its prefix, and the gRPC property that has such names.
struct NameKind {
  absl::string_view prefix;
  const char* property;
};
constexpr NameKind kNames[] = {{"cn:", GRPC_X509_CN_PROPERTY_NAME},
                               {"dns:", GRPC_PEER_DNS_PROPERTY_NAME},
                               {"uri:", GRPC_PEER_URI_PROPERTY_NAME},
                               {kUser, UserMark::kProperty}};

// Returns a name in the form in which names in the file are compared with callers' names.
std::string NameOf(absl::string_view prefix, absl::string_view name) {
  return absl::StrCat(prefix, prefix == "dns:" ? absl::AsciiStrToLower(name) : std::string(name));
}

// Parses a name such as "cn:NAME". Returns nothing if the text is not a valid name.
std::optional<std::string> ParseName(absl::string_view text) {
  for (const NameKind& kind : kNames) {
    absl::string_view name = text;
    if (!absl::ConsumePrefix(&name, kind.prefix)) continue;
    if (name.empty() || name.size() > kLongestCertificateName) return std::nullopt;
    if (kind.prefix != kUser) return NameOf(kind.prefix, name);
    uid_t user = 0;
    if (!absl::SimpleAtoi(name, &user) || !absl::ascii_isdigit(name.front()) ||
        user == static_cast<uid_t>(-1))  // stands for no user
      return std::nullopt;
    return absl::StrCat(kUser, user);
  }
  return std::nullopt;
}

std::optional<Role> ParseRole(absl::string_view text) {
  for (const Role role : {Role::kRead, Role::kWrite, Role::kAdmin})
    if (Absl(Name(role)) == text) return role;
  return std::nullopt;
}

// Parses a quota such as "bytes=4Gi". Returns what is wrong with the text, or "" if nothing is.
std::string ParseQuota(absl::string_view text, Quotas& quotas) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits('=', 1));
  const auto& [name, value] = parts;
  std::uint64_t* quota = name == "bytes"     ? &quotas.bytes
                         : name == "buffers" ? &quotas.buffers
                         : name == "calls"   ? &quotas.calls
                                             : nullptr;
  if (quota == nullptr) return "a quota must be bytes=SIZE, buffers=N or calls=N";
  std::uint64_t number = 0;
  if (name == "bytes") {
    const absl::StatusOr<MemoryLimit> size = ParseMemoryLimit({value.data(), value.size()});
    if (!size.ok() || size->bytes == 0)
      return "'bytes' must be a size from 1 to 4194304Ti, such as 500M or 4Gi";
    number = size->bytes;
  } else if (!absl::SimpleAtoi(value, &number) || !absl::ascii_isdigit(value.front()) ||
             number == kUnlimited) {
    return absl::StrCat("'", name, "' must be a whole number from 0 to ", kUnlimited - 1);
  }
  if (*quota != kUnlimited && *quota != number)
    return "the tenant already has a different value for this quota";
  *quota = number;
  return "";
}

std::uint64_t NextGeneration() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

// Returns false if OpenSSL fails. The algorithm is looked up only once, and each thread keeps its
// own state, because every look-up in OpenSSL 3 takes a process-wide lock.
bool Sha256(const grpc::string_ref& text, TokenHash& hash) {
  struct Free {
    void operator()(EVP_MD_CTX* state) const { EVP_MD_CTX_free(state); }
  };
  static const EVP_MD* const algorithm = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  thread_local const std::unique_ptr<EVP_MD_CTX, Free> state(EVP_MD_CTX_new());
  return algorithm != nullptr && state != nullptr &&
         EVP_DigestInit_ex2(state.get(), algorithm, nullptr) == 1 &&
         EVP_DigestUpdate(state.get(), text.data(), text.size()) == 1 &&
         EVP_DigestFinal_ex(state.get(), hash.data(), nullptr) == 1;
}

bool HasToken(const grpc::ServerContext& context) {
  return context.client_metadata().find("authorization") != context.client_metadata().end();
}

// Returns the token of a call, or nothing if there is none or more than one.
std::optional<grpc::string_ref> TokenOf(const grpc::ServerContext& context) {
  const auto [first, end] = context.client_metadata().equal_range("authorization");
  if (first == end || std::next(first) != end) return std::nullopt;
  const grpc::string_ref value = first->second;
  if (value.size() <= kScheme.size() || value.size() > kScheme.size() + kLongestToken ||
      !absl::StartsWithIgnoreCase({value.data(), value.size()}, Absl(kScheme)))
    return std::nullopt;
  return value.substr(kScheme.size());
}

}  // namespace

std::string_view Name(Role role) {
  switch (role) {
    case Role::kRead:
      return "read";
    case Role::kWrite:
      return "write";
    case Role::kAdmin:
      return "admin";
    case Role::kNone:
      break;
  }
  return "none";
}

Role RoleFor(std::string_view method) {
  for (const MethodInfo& one : kMethods)
    if (one.name == method) return one.role;
  return Role::kAdmin;
}

absl::Status Caller::Require(Role needed, std::string_view method, std::string_view what) const {
  if (role >= needed) return absl::OkStatus();
  return MakeError(StatusCode::kPermissionDenied, "ROLE_TOO_SMALL",
                   absl::StrCat(Absl(what), " needs the role ", Absl(Name(needed)),
                                ", and the caller has ", Absl(Name(role))),
                   {{"method", std::string(method)},
                    {"role", std::string(Name(role))},
                    {"needed", std::string(Name(needed))}});
}

absl::StatusOr<TokenFile> ParseTokens(std::string_view text) {
  TokenFile file;
  std::set<std::string> seen;
  for (const auto& [number, words] : WordLines(text)) {
    if (words.size() < 3)
      return Bad(number, absl::StrCat("it needs a caller, a role and a tenant", kNoSpaces));
    const std::optional<TokenHash> hash = ParseHash(words[0]);
    const std::optional<std::string> name = ParseName(words[0]);
    if (!hash.has_value() && !name.has_value()) {
      return Bad(number,
                 "the first word must be a SHA-256 in 64 hex digits, cn:, dns: or uri: followed by "
                 "a name, or uid: followed by a number from 0 to 4294967294");
    }
    if (name == absl::StrCat(kUser, OverflowUser())) {
      return Bad(number,
                 "the kernel shows this user's number for every user outside a user namespace, so "
                 "the line would admit all of them");
    }
    const std::optional<Role> role = ParseRole(words[1]);
    if (!role.has_value())
      return Bad(number, absl::StrCat("the role must be read, write or admin", kNoSpaces));
    if (!IsPlainName(words[2]))
      return Bad(number, "a tenant's name must have 1 to 64 characters of [a-zA-Z0-9._-]");
    const std::string tenant(words[2]);
    if (!seen.insert(name.value_or(absl::AsciiStrToLower(words[0]))).second)
      return Bad(number, "an earlier line names this caller");
    Quotas& quotas = file.quotas[tenant];
    for (std::size_t i = 3; i < words.size(); ++i)
      if (const std::string why = ParseQuota(words[i], quotas); !why.empty())
        return Bad(number, why);
    file.lines.push_back({hash.value_or(TokenHash{}), name.value_or(""), *role, tenant});
  }
  if (file.lines.empty()) return absl::InvalidArgumentError("it admits no callers");
  return file;
}

// --- Access --------------------------------------------------------------------------------------

// Immutable.
class Access::Table {
 public:
  Table(const TokenFile& file, Tenants& tenants) {
    for (std::size_t i = 0; i < file.lines.size(); ++i) {
      const TokenFile::Line& line = file.lines[i];
      const Caller caller = {&tenants.Named(line.tenant), line.role};
      if (line.name.empty()) {
        entries_[KeyOf(line.hash)].push_back({line.hash, caller});
      } else {
        names_.emplace(line.name, Named{i, caller});
        if (!absl::StartsWith(line.name, kUser)) names_certificates_ = true;
      }
    }
  }

  // Returns null if no line has this token. The time it takes reveals at most a part of a hash.
  const Caller* Find(const TokenHash& hash) const {
    const auto found = entries_.find(KeyOf(hash));
    if (found == entries_.end()) return nullptr;
    for (const Entry& entry : found->second)
      if (CRYPTO_memcmp(entry.hash.data(), hash.data(), hash.size()) == 0) return &entry.caller;
    return nullptr;
  }

  // Returns the caller of the first line that matches the call's connection, or null if none does.
  const Caller* Find(const grpc::ServerContext& context) const {
    if (names_.empty()) return nullptr;
    const std::shared_ptr<const grpc::AuthContext> connection = context.auth_context();
    const Named* first = nullptr;
    for (const NameKind& kind : kNames) {
      for (const grpc::string_ref& name : connection->FindPropertyValues(kind.property)) {
        const auto found = names_.find(NameOf(kind.prefix, {name.data(), name.size()}));
        if (found != names_.end() && (first == nullptr || found->second.line < first->line))
          first = &found->second;
      }
    }
    return first == nullptr ? nullptr : &first->caller;
  }

  bool NamesUser(uid_t user) const { return names_.contains(absl::StrCat(kUser, user)); }
  bool names_certificates() const { return names_certificates_; }

 private:
  struct Entry {
    TokenHash hash;
    Caller caller;
  };
  static std::uint64_t KeyOf(const TokenHash& hash) {
    std::uint64_t key = 0;
    std::memcpy(&key, hash.data(), sizeof key);
    return key;
  }

  struct Named {
    std::size_t line;
    Caller caller;
  };

  absl::flat_hash_map<std::uint64_t, std::vector<Entry>> entries_;
  absl::flat_hash_map<std::string, Named> names_;
  bool names_certificates_ = false;
};

absl::StatusOr<std::unique_ptr<Access>> Access::Open(const std::string& file, Tenants& tenants) {
  std::unique_ptr<Access> access(new Access(file, tenants));
  if (access->restricted()) {
    // The first use of SHA-256 loads OpenSSL's configuration. This happens here, in a thread that
    // lasts as long as the server, and not in a thread that handles the first call.
    TokenHash hash;
    if (!Sha256("", hash)) {
      return MakeError(StatusCode::kInternal, "INTERNAL", "OpenSSL has no SHA-256");
    }
    if (absl::Status status = access->Load(); !status.ok()) return status;
  }
  return access;
}

absl::Status Access::Load() {
  stamp_ = StampOf(file_);  // taken first, so a change during the read is noticed
  absl::StatusOr<std::string> text = ReadWatched(file_, /*refuse_writable=*/true);
  absl::StatusOr<TokenFile> tokens;
  if (text.ok()) {
    tokens = ParseTokens(*text);
  } else {
    tokens = text.status();
  }
  if (!tokens.ok()) {
    return MakeError(
        StatusCode::kInvalidArgument, "BAD_TOKENS",
        absl::StrCat("cannot use ", file_, " as --tokens: ", tokens.status().message()),
        {{"file", file_}});
  }
  for (const TokenFile::Line& line : tokens->lines) {
    absl::string_view user = line.name;
    uid_t number = 0;
    if (absl::ConsumePrefix(&user, kUser) && absl::SimpleAtoi(user, &number) && !HasUser(number)) {
      spdlog::warn(
          "--tokens: {} admits no callers, because the server runs in a user namespace (that of a "
          "container, or of systemd's PrivateUsers=) that does not have this user",
          line.name);
    }
  }
  for (const auto& [name, quotas] : tokens->quotas) tenants_.Named(name).SetQuotas(quotas);
  auto table = std::make_shared<const Table>(*tokens, tenants_);
  const std::lock_guard lock(mutex_);
  table_ = std::move(table);
  generation_.store(NextGeneration(), std::memory_order_release);
  return absl::OkStatus();
}

void Access::Reload(bool asked) {
  if (!restricted() || (!asked && StampOf(file_) == stamp_)) return;
  const absl::Status status = Load();
  stale_.store(!status.ok(), std::memory_order_relaxed);
  if (status.ok()) {
    spdlog::info("--tokens: the file {} and is in effect",
                 asked ? "has been read again" : "has changed");
  } else {
    const absl::string_view message = status.message();
    spdlog::error("{}; the current lines stay in effect",
                  std::string_view(message.data(), message.size()));
  }
}

const Access::Table& Access::Current() const {
  // Each thread keeps a reference to the table that it last used, so that threads do not contend
  // for a reference count.
  thread_local std::uint64_t generation = 0;
  thread_local std::shared_ptr<const Table> table;
  if (generation != generation_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex_);
    table = table_;
    generation = generation_.load(std::memory_order_relaxed);
  }
  return *table;
}

bool Access::names_certificates() const { return restricted() && Current().names_certificates(); }

bool Access::KnowsUser(uid_t user) const {
  return !restricted() || IsOwnUser(user) || NamesUser(user);
}

bool Access::NamesUser(uid_t user) const { return restricted() && Current().NamesUser(user); }

absl::StatusOr<Caller> Access::Admit(std::string_view method,
                                     const grpc::ServerContext& context) const {
  if (!restricted()) return Caller{&tenants_.unnamed(), Role::kAdmin};
  const Caller* caller = nullptr;
  if (!HasToken(context)) {
    caller = Current().Find(context);
  } else if (const std::optional<grpc::string_ref> token = TokenOf(context); token.has_value()) {
    TokenHash hash;
    if (Sha256(*token, hash)) caller = Current().Find(hash);
  }
  if (caller == nullptr) {
    return MakeError(StatusCode::kUnauthenticated, "BAD_TOKEN",
                     "the call needs a token that this server knows, as metadata "
                     "'authorization: Bearer TOKEN', or a known certificate or local user");
  }
  if (absl::Status status = caller->Require(RoleFor(method), method, method); !status.ok())
    return status;
  return *caller;
}

}  // namespace tessera
