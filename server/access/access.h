// Access control: the callers in the --tokens file, with their roles and tenants.
//
// The file has a line for each caller, and contains no secrets:
//
//   # caller, role, tenant, quotas
//   2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b write vision bytes=4Gi
//   dns:trainer.example.org                                          write vision
//   uid:1000                                                         read  vision
//
// The first word of a line is the SHA-256 of a token, a name in a client's certificate (cn:, dns:
// or uri:), or a user of this host that connects through a unix socket (uid:). A call with a token
// belongs to the token's line, regardless of its certificate and user. A call without a token
// belongs to the first line that matches.
//
// A quota (bytes, buffers or calls) applies to the tenant and may be given on any of its lines.
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

// Returns the role that a method needs, or kAdmin for a method that is not in kMethods.
Role RoleFor(std::string_view method);

// The tenant and the role of a call.
struct Caller {
  Tenant* tenant = nullptr;
  Role role = Role::kNone;

  // Whether the caller may see what all tenants together use.
  bool sees_all() const { return role == Role::kAdmin; }
  // Returns PERMISSION_DENIED / ROLE_TOO_SMALL {method, role, needed} unless the caller has the
  // role. `what` is the subject of the error message.
  absl::Status Require(Role needed, std::string_view method, std::string_view what) const;
};

using TokenHash = std::array<unsigned char, 32>;  // SHA-256

struct TokenFile {
  struct Line {
    TokenHash hash;    // the hash of a token, if name is empty
    std::string name;  // "cn:NAME", "dns:NAME" in lower case, "uri:URI" or "uid:NUMBER"
    Role role;
    std::string tenant;
  };
  std::vector<Line> lines;
  std::map<std::string, Quotas> quotas;  // one entry for each tenant in the file
};

// Parses the text of a --tokens file. For a bad line, returns INVALID_ARGUMENT with a message that
// begins with the line's number and never quotes the line.
absl::StatusOr<TokenFile> ParseTokens(std::string_view text);

// Thread safe. Finding a caller takes no lock. A call keeps the tenant and the role that it had
// when it began.
class Access {
 public:
  // `file` is the --tokens file. If it is empty, every caller is an admin of the unnamed tenant.
  // Returns INVALID_ARGUMENT / BAD_TOKENS {file} if the file cannot be used. The tenants must
  // outlive the result.
  static absl::StatusOr<std::unique_ptr<Access>> Open(const std::string& file, Tenants& tenants);

  // Whether there is a file, in which case only the callers in it are served.
  bool restricted() const { return !file_.empty(); }
  // Whether any line of the file names a certificate.
  bool names_certificates() const;

  // Returns the tenant and role of a call. Errors: UNAUTHENTICATED / BAD_TOKEN, whose message does
  // not say what is wrong, and PERMISSION_DENIED / ROLE_TOO_SMALL.
  absl::StatusOr<Caller> Admit(std::string_view method, const grpc::ServerContext& context) const;

  // Whether a line of the file admits a user of this host, or the server runs as this user. Without
  // a file, true for every user.
  bool KnowsUser(uid_t user) const;
  // Whether a line of the file names this user.
  bool NamesUser(uid_t user) const;

  // Reads the file again if it has changed or if `asked` is true, and logs the result. If the file
  // cannot be used, the current lines stay in effect. Only one thread at a time may call this.
  void Reload(bool asked);
  // Whether the last attempt to use the file has failed.
  bool stale() const { return stale_.load(std::memory_order_relaxed); }

 private:
  // The lines in effect.
  class Table;

  Access(std::string file, Tenants& tenants) : file_(std::move(file)), tenants_(tenants) {}
  absl::Status Load();
  const Table& Current() const;

  const std::string file_;
  Tenants& tenants_;
  FileStamp stamp_;  // the file's state when it was last read
  std::atomic<bool> stale_{false};
  // Identifies the table: no other table in the process has the same number.
  std::atomic<std::uint64_t> generation_{0};
  mutable std::mutex mutex_;
  std::shared_ptr<const Table> table_;
};

}  // namespace tessera
