#include "client/credentials.h"

#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

absl::Status Bad(std::string_view message, const std::string& file) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_CREDENTIALS", message,
                   {{"file", file}});
}

absl::Status ReadFile(const std::string& file, std::string& text) {
  if (file.empty()) return absl::OkStatus();
  std::ifstream in(file, std::ios::binary);
  text.assign(std::istreambuf_iterator<char>(in), {});
  if (in.bad() || text.empty()) {
    return Bad(absl::StrCat("cannot read ", file, ", or it is empty"), file);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(
    const ClientOptions& options) {
  if (options.tls_cert.empty() != options.tls_key.empty())
    return Bad("a client's certificate and its key go together",
               options.tls_cert.empty() ? options.tls_key : options.tls_cert);
  if (options.tls_ca.empty()) {
    if (!options.tls_cert.empty())
      return Bad("a client's certificate needs the CA of the server's", options.tls_cert);
    return grpc::InsecureChannelCredentials();
  }
  grpc::SslCredentialsOptions ssl;
  for (auto [file, text] : {std::pair(&options.tls_ca, &ssl.pem_root_certs),
                            std::pair(&options.tls_cert, &ssl.pem_cert_chain),
                            std::pair(&options.tls_key, &ssl.pem_private_key)}) {
    if (absl::Status status = ReadFile(*file, *text); !status.ok()) return status;
  }
  return grpc::SslCredentials(ssl);
}

}  // namespace tessera
