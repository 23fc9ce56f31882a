// token: generates a token for a server with --tokens.
#include <openssl/evp.h>
#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command.h"
#include "kernels/client_and_server/word_lines.h"

namespace tessera {
namespace {

// A token of 256 random bits cannot be guessed.
constexpr std::size_t kTokenBytes = 32;

struct TokenFlags {
  std::string role = "write";
  std::string tenant = "default";
};

void MakeToken(Session& session, const TokenFlags& flags) {
  std::string random(kTokenBytes, '\0');
  if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    throw CommandError(absl::InternalError(absl::StrCat("getrandom: ", std::strerror(errno))));
  }
  const std::string token = absl::StrCat("tessera_", absl::WebSafeBase64Escape(random));
  std::string hash(EVP_MAX_MD_SIZE, '\0');
  unsigned int size = 0;
  if (EVP_Digest(token.data(), token.size(), reinterpret_cast<unsigned char*>(hash.data()), &size,
                 EVP_sha256(), nullptr) != 1)
    throw CommandError(absl::InternalError("OpenSSL has no SHA-256"));
  hash.resize(size);
  const std::string line =
      absl::StrCat(absl::BytesToHexString(hash), " ", flags.role, " ", flags.tenant);
  session.document = {{"token", token}, {"line", line}};
  if (!session.json) {
    std::cout << "token, for the caller: " << token << "\nline, for the file of --tokens: " << line
              << '\n';
  }
}

}  // namespace

void AddToken(CLI::App& app, Command& chosen) {
  const auto [command, flags] = AddCommand(
      app, chosen, "token",
      "Generate a token, and the line that admits it to a server with --tokens", MakeToken);
  command->add_option("--role", flags->role, "The token's role: read, write or admin")
      ->type_name("ROLE")
      ->check(CLI::IsMember({"read", "write", "admin"}))
      ->capture_default_str();
  command->add_option("--tenant", flags->tenant, "Tenant whose buffers the token gives access to")
      ->type_name("NAME")
      ->check(
          [](const std::string& name) {
            return IsPlainName(name) ? ""
                                     : "a tenant's name must have 1 to 64 characters of A-Z, a-z, "
                                       "0-9, '.', '_' and '-'";
          },
          "")
      ->capture_default_str();
}

}  // namespace tessera
