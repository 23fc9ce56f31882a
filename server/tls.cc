#include "server/tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <array>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "grpc/grpc.h"
#include "grpc/grpc_security.h"
#include "kernels/base/error.h"
#include "server/watched_file.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

template <auto release>
struct Release {
  template <class T>
  void operator()(T* object) const {
    release(object);
  }
};
using Bio = std::unique_ptr<BIO, Release<BIO_free_all>>;
using Certificate = std::unique_ptr<X509, Release<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Release<EVP_PKEY_free>>;

constexpr std::string_view kNoCertificate =
    "it holds no certificate in PEM, or one that is damaged";

absl::Status Bad(const std::string& file, std::string_view why) {
  ERR_clear_error();  // the queue is the thread's, and gRPC looks at it as well
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_CERTIFICATE",
                   absl::StrCat("cannot use ", file, " for TLS: ", Absl(why)), {{"file", file}});
}

Bio Open(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Whether the reader of PEM has come to the end of the text, not to a block that it cannot read.
bool AtEnd() {
  const unsigned long error = ERR_peek_last_error();  // NOLINT(google-runtime-int): OpenSSL's
  ERR_clear_error();
  return ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
}

// Whether every block of a text is whole, whatever it holds. Between blocks there may be comments; a
// line that begins a block, or that begins with a dash at the very end, belongs to one that was cut.
bool IsWhole(const std::string& text) {
  std::size_t begun = 0;
  std::string_view last;
  for (const absl::string_view line :
       absl::StrSplit(text, absl::ByAnyChar("\r\n"), absl::SkipEmpty())) {
    if (absl::StartsWith(line, "-----BEGIN")) ++begun;
    last = {line.data(), line.size()};
  }
  const Bio bio = Open(text);
  std::size_t read = 0;
  for (;; ++read) {
    char* name = nullptr;
    char* header = nullptr;
    unsigned char* data = nullptr;
    long size = 0;  // NOLINT(google-runtime-int): OpenSSL's
    if (PEM_read_bio(bio.get(), &name, &header, &data, &size) != 1) break;
    OPENSSL_free(name);
    OPENSSL_free(header);
    OPENSSL_clear_free(data, static_cast<std::size_t>(size));
  }
  const bool cut =
      !last.empty() && last.front() == '-' && !absl::StartsWith(Absl(last), "-----END");
  return AtEnd() && read == begun && !cut;
}

// All of them, in order; none: there is none, or one that cannot be read.
std::vector<Certificate> ParseCertificates(const std::string& text) {
  const Bio bio = Open(text);
  std::vector<Certificate> all;
  while (X509* one = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) all.emplace_back(one);
  if (!AtEnd()) all.clear();
  return all;
}

absl::StatusOr<std::string> ReadFile(const std::string& file) {
  absl::StatusOr<std::string> text = ReadWatched(file);
  if (text.ok()) {
    ERR_clear_error();
    if (IsWhole(*text)) return text;
    return Bad(file, "a block of PEM in it is cut off or damaged");
  }
  const absl::string_view why = text.status().message();
  return Bad(file, std::string_view(why.data(), why.size()));
}

// A key that has a password is not asked for it.
Key ParseKey(const std::string& text) {
  const auto no_password = [](char*, int, int, void*) { return -1; };
  return Key(PEM_read_bio_PrivateKey(Open(text).get(), nullptr, no_password, nullptr));
}

// What gRPC asks for the certificate. Thread safe.
class CertificateSource {
 public:
  explicit CertificateSource(TlsFiles files) : files_(std::move(files)) {}

  // Reads the files, and keeps what they hold for Fetch if it can be used.
  absl::Status Load() {
    const std::lock_guard lock(mutex_);
    return LoadLocked();
  }

  static grpc_ssl_certificate_config_reload_status Fetch(
      void* source, grpc_ssl_server_certificate_config** config) {
    return static_cast<CertificateSource*>(source)->FetchInto(config);
  }

 private:
  grpc_ssl_certificate_config_reload_status FetchInto(grpc_ssl_server_certificate_config** config) {
    // One reads the files, on a file system that may hang; meanwhile others go on with what is in
    // use.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    if (StampsNow() != stamps_) {
      const absl::Status status = LoadLocked();
      if (status.ok()) {
        spdlog::info("TLS: the files have changed and are in use");
      } else {
        const absl::string_view message = status.message();
        spdlog::error("TLS: {}; the certificate in use stays",
                      std::string_view(message.data(), message.size()));
      }
    }
    if (!std::exchange(fresh_, false)) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair = {key_.c_str(), certificate_.c_str()};
    // gRPC 1.51 aborts without roots, also where it asks no client for a certificate and so never
    // uses them: some certificate has to stand there.
    const std::string& roots = client_ca_.empty() ? certificate_ : client_ca_;
    *config = grpc_ssl_server_certificate_config_create(roots.c_str(), &pair, 1);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  absl::Status LoadLocked() {
    stamps_ = StampsNow();  // before the contents: what changes meanwhile is read again
    absl::StatusOr<std::string> certificate = ReadFile(files_.certificate);
    if (!certificate.ok()) return certificate.status();
    absl::StatusOr<std::string> key = ReadFile(files_.key);
    if (!key.ok()) return key.status();
    const std::vector<Certificate> chain = ParseCertificates(*certificate);
    if (chain.empty()) return Bad(files_.certificate, kNoCertificate);
    const Key parsed_key = ParseKey(*key);
    if (parsed_key == nullptr) return Bad(files_.key, "it holds no key in PEM without a password");
    if (X509_check_private_key(chain.front().get(), parsed_key.get()) != 1)
      return Bad(files_.key, absl::StrCat("it is not the key of ", files_.certificate));
    std::string client_ca;
    if (!files_.client_ca.empty()) {
      absl::StatusOr<std::string> text = ReadFile(files_.client_ca);
      if (!text.ok()) return text.status();
      if (ParseCertificates(*text).empty()) return Bad(files_.client_ca, kNoCertificate);
      client_ca = *std::move(text);
    }
    certificate_ = *std::move(certificate);
    key_ = *std::move(key);
    client_ca_ = std::move(client_ca);
    fresh_ = true;
    return absl::OkStatus();
  }

  std::array<FileStamp, 3> StampsNow() const {
    return {StampOf(files_.certificate), StampOf(files_.key), StampOf(files_.client_ca)};
  }

  const TlsFiles files_;
  std::mutex mutex_;
  std::array<FileStamp, 3> stamps_;  // when the files were last read
  std::string certificate_;
  std::string key_;
  std::string client_ca_;
  bool fresh_ = false;  // gRPC has not got them yet
};

// gRPC's C++ interface has no credentials that ask for their certificate.
class TlsCredentials final : public grpc::ServerCredentials {
 public:
  TlsCredentials(std::unique_ptr<CertificateSource> source, bool with_clients, UserMark* mark)
      : source_(std::move(source)),
        credentials_(grpc_ssl_server_credentials_create_with_options(
            grpc_ssl_server_credentials_create_options_using_config_fetcher(
                with_clients ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                             : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
                &CertificateSource::Fetch, source_.get()))) {
    if (mark != nullptr) mark->AddTo(credentials_.get());
  }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_.get());
  }

  const std::unique_ptr<CertificateSource> source_;
  const std::unique_ptr<grpc_server_credentials, Release<grpc_server_credentials_release>>
      credentials_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeTlsCredentials(const TlsFiles& files,
                                                                            UserMark* mark) {
  auto source = std::make_unique<CertificateSource>(files);
  if (absl::Status status = source->Load(); !status.ok()) return status;
  return std::make_shared<TlsCredentials>(std::move(source), !files.client_ca.empty(), mark);
}

}  // namespace tessera
