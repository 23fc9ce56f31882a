// Who may call what: the callers that the file of --tokens knows, their roles, and the tenants that
// they belong to.
//
// The file has a line for each, and says nothing that lets anyone in:
//
//   # who, role, tenant, quotas
//   2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b write vision bytes=4Gi
//   dns:trainer.example.org                                          write vision
//   uid:1000                                                         read  vision
//
// A caller is who has the token of that SHA-256; or a client with a certificate of that name (cn:,
// dns: or uri:); or a process of that user, by a unix socket. A call with a token is the token's,
// whatever else it has; without one it is that of the first line that fits.
//
// A quota (bytes, buffers or calls) is that of the tenant, and may stand in any line of it.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "grpcpp/server_context.h"
#include "server/access/methods.h"
#include "server/access/tenant.h"
#include "server/net/watched_file.h"

namespace tessera {

std::string_view Name(Role role);

// The role that a method needs; one without a rule needs kAdmin.
Role RoleFor(std::string_view method);

// Whom a call comes from.
struct Caller {
  Tenant* tenant = nullptr;
  Role role = Role::kNone;

  // Whether it may see what all tenants together use.
  bool sees_all() const { return role == Role::kAdmin; }
  // PERMISSION_DENIED / ROLE_TOO_SMALL {method, role, needed} unless the caller has the role. what:
  // what needs it, as the message begins.
  absl::Status Require(Role needed, std::string_view method, std::string_view what) const;
};

using TokenHash = std::array<unsigned char, 32>;  // SHA-256

struct TokenFile {
  struct Line {
    TokenHash hash;    // of a token, if name is empty
    std::string name;  // "cn:NAME", "dns:NAME" in lower case, "uri:URI" or "uid:NUMBER"
    Role role;
    std::string tenant;
  };
  std::vector<Line> lines;
  std::map<std::string, Quotas> quotas;  // of every tenant that a line names
};

// INVALID_ARGUMENT with a message that begins with the number of the line, and never quotes it.
absl::StatusOr<TokenFile> ParseTokens(std::string_view text);

// Thread safe. Finding a caller takes no lock; calls go on as whom they began.
class Access {
 public:
  // file: empty: everyone is the unnamed tenant's admin. INVALID_ARGUMENT / BAD_TOKENS {file} for
  // one that cannot be used. The tenants outlive it.
  static absl::StatusOr<std::unique_ptr<Access>> Open(const std::string& file, Tenants& tenants);

  // Whether only callers that a file knows are served.
  bool restricted() const { return !file_.empty(); }
  // Whether lines of the file name certificates.
  bool names_certificates() const;

  // Whom a call comes from. UNAUTHENTICATED / BAD_TOKEN, in the same words whatever is wrong;
  // PERMISSION_DENIED / ROLE_TOO_SMALL.
  absl::StatusOr<Caller> Admit(std::string_view method, const grpc::ServerContext& context) const;

  // Whether a user of this host has a line, or is the one that the server runs as, or nobody needs
  // a line.
  bool KnowsUser(uid_t user) const;
  // Whether a user has a line.
  bool NamesUser(uid_t user) const;

  // Reads the file again if it has changed, or in any case if asked, and logs the result. If the
  // file cannot be used, the lines in use stay. Not for several threads at once.
  void Reload(bool asked);
  // Whether the file could not be used when it was last read.
  bool stale() const { return stale_.load(std::memory_order_relaxed); }

 private:
  // The lines in use.
  class Table;

  Access(std::string file, Tenants& tenants) : file_(std::move(file)), tenants_(tenants) {}
  absl::Status Load();
  const Table& Current() const;

  const std::string file_;
  Tenants& tenants_;
  FileStamp stamp_;  // when the file was last read
  std::atomic<bool> stale_{false};
  // Differs from that of every other table of the process.
  std::atomic<std::uint64_t> generation_{0};
  mutable std::mutex mutex_;
  std::shared_ptr<const Table> table_;
};

}  // namespace tessera
