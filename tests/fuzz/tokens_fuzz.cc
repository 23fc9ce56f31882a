// The token file with its roles and tenants.
#include "server/access/access.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto file = tessera::ParseTokens(tessera::Text(data, size));
  if (!file.ok()) return 0;
  for (const auto& line : file->lines) {
    tessera::Require(!line.tenant.empty() && line.role != tessera::Role::kNone,
                     "a token without a role or a tenant");
    tessera::Require(file->quotas.count(line.tenant) == 1, "a tenant without quotas");
  }
  return 0;
}
