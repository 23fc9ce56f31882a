#include "client/rpc/credentials.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/rpc/address.h"
#include "client/rpc/text_file.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/word_lines.h"

namespace tessera {
namespace {

absl::Status Bad(std::string_view message, const std::string& file) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_CREDENTIALS", message,
                   {{"file", file}});
}

constexpr std::size_t kLargestFile = 1;  // MiB

absl::Status ReadFile(const std::string& file, std::string& text) {
  if (file.empty()) return absl::OkStatus();
  absl::StatusOr<std::string> read = ReadTextFile(file, kLargestFile);
  if (!read.ok()) return Bad(absl::StrCat(file, " ", read.status().message()), file);
  text = *std::move(read);
  return absl::OkStatus();
}

// Checks that gRPC can use the certificates and the key, because gRPC reports errors in them only
// in its log.
absl::Status CheckPem(const ClientOptions& options, const grpc::SslCredentialsOptions& ssl) {
  using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
  using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
  using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
  const auto open = [](const std::string& text) {
    return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), BIO_free);
  };
  const auto certificate = [&](const std::string& text) {
    return Certificate(PEM_read_bio_X509(open(text).get(), nullptr, nullptr, nullptr), X509_free);
  };
  const auto no_password = [](char*, int, int, void*) { return -1; };
  absl::Status status;
  if (certificate(ssl.pem_root_certs) == nullptr)
    status = Bad(absl::StrCat(options.tls_ca, " contains no PEM certificate"), options.tls_ca);
  if (status.ok() && !ssl.pem_cert_chain.empty()) {
    const Certificate own = certificate(ssl.pem_cert_chain);
    const Key key(
        PEM_read_bio_PrivateKey(open(ssl.pem_private_key).get(), nullptr, no_password, nullptr),
        EVP_PKEY_free);
    const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_method()),
                                                                    SSL_CTX_free);
    if (own == nullptr) {
      status =
          Bad(absl::StrCat(options.tls_cert, " contains no PEM certificate"), options.tls_cert);
    } else if (key == nullptr) {
      status = Bad(absl::StrCat(options.tls_key, " contains no PEM key without a password"),
                   options.tls_key);
    } else if (X509_check_private_key(own.get(), key.get()) != 1) {
      status = Bad(absl::StrCat(options.tls_key, " is not the key of ", options.tls_cert),
                   options.tls_key);
    } else if (context == nullptr || SSL_CTX_use_certificate(context.get(), own.get()) != 1) {
      // For example because its key is too small.
      status = Bad(absl::StrCat("OpenSSL refuses the certificate in ", options.tls_cert, " (",
                                ERR_reason_error_string(ERR_peek_last_error()), ")"),
                   options.tls_cert);
    }
  }
  ERR_clear_error();  // gRPC uses the same per-thread error queue
  return status;
}

constexpr std::size_t kLongestToken = 1024;
constexpr std::chrono::seconds kTokenAge{1};

// Returns the metadata value for a token, which comes from the file if one is given.
absl::StatusOr<std::string> Bearer(std::string text, const std::string& file) {
  if (absl::Status status = ReadFile(file, text); !status.ok()) return status;
  const std::string token = Trimmed(text);
  if (token.empty() || token.size() > kLongestToken ||
      !std::all_of(token.begin(), token.end(), absl::ascii_isgraph))
    return Bad("a token must be 1 to 1024 ASCII characters without spaces", file);
  return absl::StrCat("Bearer ", token);
}

}  // namespace

Authorization::Authorization(const ClientOptions& options)
    : file_(options.token_file), has_token_(!options.token.empty() || !file_.empty()) {
  if (!has_token_) return;
  absl::StatusOr<std::string> value = Bearer(options.token, file_);
  if (value.ok() && options.tls_ca.empty() && !StaysHere(options.server)) {
    value = Bad(absl::StrCat("a token would be sent unencrypted to ", options.server,
                             ": no CA for the server's certificate is given"),
                file_);
  }
  status_ = value.status();
  if (value.ok()) value_ = *std::move(value);
  read_ = std::chrono::steady_clock::now();
}

void Authorization::AddTo(grpc::ClientContext& context) {
  if (!has_token_) return;
  const std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (!file_.empty() && now - read_ >= kTokenAge) {
    read_ = now;
    // If the file is just being replaced, it may be unreadable or incomplete. The previous token
    // then stays.
    if (absl::StatusOr<std::string> value = Bearer("", file_); value.ok())
      value_ = *std::move(value);
  }
  context.AddMetadata("authorization", value_);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(
    const ClientOptions& options) {
  if (options.tls_cert.empty() != options.tls_key.empty())
    return Bad("a client's certificate and its key must be given together",
               options.tls_cert.empty() ? options.tls_key : options.tls_cert);
  if (options.tls_ca.empty()) {
    if (!options.tls_cert.empty())
      return Bad("a client certificate was given without a CA certificate to verify the server",
                 options.tls_cert);
    return grpc::InsecureChannelCredentials();
  }
  grpc::SslCredentialsOptions ssl;
  for (auto [file, text] : {std::pair(&options.tls_ca, &ssl.pem_root_certs),
                            std::pair(&options.tls_cert, &ssl.pem_cert_chain),
                            std::pair(&options.tls_key, &ssl.pem_private_key)}) {
    if (absl::Status status = ReadFile(*file, *text); !status.ok()) return status;
  }
  if (absl::Status status = CheckPem(options, ssl); !status.ok()) return status;
  return grpc::SslCredentials(ssl);
}

}  // namespace tessera
