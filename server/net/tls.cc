#include "server/net/tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <algorithm>
#include <ctime>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "grpc/grpc.h"
#include "grpc/grpc_security.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
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
using Context = std::unique_ptr<SSL_CTX, Release<SSL_CTX_free>>;
using Key = std::unique_ptr<EVP_PKEY, Release<EVP_PKEY_free>>;

absl::Status Bad(const std::string& file, std::string_view why) {
  ERR_clear_error();  // the error queue belongs to the thread, and gRPC reads it too
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_CERTIFICATE",
                   absl::StrCat("cannot use ", file, " for TLS: ", Absl(why)), {{"file", file}});
}

Bio Open(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Whether the PEM reader has stopped at the end of the text, and not at a block that it cannot
// read.
bool AtEnd() {
  const unsigned long error = ERR_peek_last_error();  // NOLINT(google-runtime-int): OpenSSL's
  ERR_clear_error();
  return ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
}

// Whether every PEM block in a text is complete, whatever it contains. There may be comments
// between blocks. A line that begins a block but is not read as one, or a last line that begins
// with a dash, belongs to a block that was cut off.
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

// Returns all certificates of a file in order. Returns an error if any of them cannot be read, or
// if OpenSSL would refuse it in a handshake, for example because its key is too small.
absl::StatusOr<std::vector<Certificate>> ParseCertificates(const std::string& file,
                                                           const std::string& text) {
  const Bio bio = Open(text);
  std::vector<Certificate> all;
  while (X509* one = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) all.emplace_back(one);
  if (!AtEnd() || all.empty())
    return Bad(file, "it contains no PEM certificate, or a damaged certificate");
  const Context context(SSL_CTX_new(TLS_method()));
  bool usable =
      context != nullptr && SSL_CTX_use_certificate(context.get(), all.front().get()) == 1;
  for (const Certificate& one : all)
    usable = usable && SSL_CTX_add1_chain_cert(context.get(), one.get()) == 1;
  if (usable) return all;
  return Bad(file, absl::StrCat("OpenSSL refuses a certificate in it (",
                                ERR_reason_error_string(ERR_peek_last_error()), ")"));
}

absl::StatusOr<std::string> ReadFile(const std::string& file) {
  absl::StatusOr<std::string> text = ReadWatched(file);
  if (text.ok()) {
    ERR_clear_error();
    if (IsWhole(*text)) return text;
    return Bad(file, "a PEM block in it is cut off or damaged");
  }
  const absl::string_view why = text.status().message();
  return Bad(file, std::string_view(why.data(), why.size()));
}

// Never requests a password, so a key that needs one is rejected.
Key ParseKey(const std::string& text) {
  const auto no_password = [](char*, int, int, void*) { return -1; };
  return Key(PEM_read_bio_PrivateKey(Open(text).get(), nullptr, no_password, nullptr));
}

// Converts a time from a certificate. Returns `otherwise` if it is not valid.
absl::Time TimeOf(const ASN1_TIME* time, absl::Time otherwise) {
  std::tm utc = {};
  return ASN1_TIME_to_tm(time, &utc) == 1 ? absl::FromTM(utc, absl::UTCTimeZone()) : otherwise;
}

std::string DayText(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", time, absl::UTCTimeZone());
}

// The log warns of a certificate's expiry when an eighth of its lifetime is left, but at most this
// long in advance. Certificates with a lifetime of a day are renewed just before they expire.
constexpr absl::Duration kLongestNotice = absl::Hours(7 * 24);
// How often the log warns.
constexpr absl::Duration kNoticeInterval = absl::Hours(24);

}  // namespace

// Fetches the certificate at every handshake; gRPC's C++ interface has no such credentials.
class ServerTls::Credentials final : public grpc::ServerCredentials {
 public:
  Credentials(std::shared_ptr<ServerTls> source, UserMark* mark)
      : source_(std::move(source)),
        credentials_(grpc_ssl_server_credentials_create_with_options(
            grpc_ssl_server_credentials_create_options_using_config_fetcher(
                source_->files_.peer_ca.empty()
                    ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                    : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY,
                &Fetch, this))) {
    if (mark != nullptr) mark->AddTo(credentials_.get());
  }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_.get());
  }

  // gRPC calls this at every handshake.
  static grpc_ssl_certificate_config_reload_status Fetch(
      void* self, grpc_ssl_server_certificate_config** config) {
    ServerTls& source = *static_cast<Credentials*>(self)->source_;
    std::uint64_t& seen = static_cast<Credentials*>(self)->seen_;
    {
      // Only one handshake at a time reads the files, because their file system may hang. Other
      // handshakes use the current pair.
      const std::unique_lock reading(source.files_mutex_, std::try_to_lock);
      if (reading.owns_lock()) source.ReloadLocked(/*asked=*/false);
    }
    const std::lock_guard lock(source.mutex_);
    // If clients need certificates, every handshake gets a new configuration. No client can then
    // resume a session, which would not check again whether its certificate is still valid.
    if (std::exchange(seen, source.generation_) == source.generation_ &&
        source.files_.peer_ca.empty())
      return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const TlsPem& in_use = source.in_use_;
    const grpc_ssl_pem_key_cert_pair pair = {in_use.key.c_str(), in_use.certificate.c_str()};
    // gRPC 1.51 aborts if it gets no root certificates, even if it requests no client certificates
    // and never uses the roots. In that case it gets the server's certificate.
    const std::string& roots = in_use.peer_ca.empty() ? in_use.certificate : in_use.peer_ca;
    *config = grpc_ssl_server_certificate_config_create(roots.c_str(), &pair, 1);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const std::shared_ptr<ServerTls> source_;
  std::uint64_t seen_ = 0;  // the generation that gRPC has; guarded by the source's mutex_
  const std::unique_ptr<grpc_server_credentials, Release<grpc_server_credentials_release>>
      credentials_;
};

absl::StatusOr<TlsPem> ReadTls(const TlsFiles& files) {
  TlsPem pem;
  if (!files.certificate.empty()) {
    ASSIGN_OR_RETURN(pem.certificate, ReadFile(files.certificate));
    ASSIGN_OR_RETURN(pem.key, ReadFile(files.key));
    ASSIGN_OR_RETURN(const std::vector<Certificate> chain,
                     ParseCertificates(files.certificate, pem.certificate));
    const Key key = ParseKey(pem.key);
    if (key == nullptr) return Bad(files.key, "it contains no PEM key, or a key with a password");
    if (X509_check_private_key(chain.front().get(), key.get()) != 1)
      return Bad(files.key, absl::StrCat("it is not the key of ", files.certificate));
    pem.life = {TimeOf(X509_get0_notBefore(chain.front().get()), absl::InfinitePast()),
                TimeOf(X509_get0_notAfter(chain.front().get()), absl::InfiniteFuture())};
  }
  if (!files.peer_ca.empty()) {
    ASSIGN_OR_RETURN(pem.peer_ca, ReadFile(files.peer_ca));
    RETURN_IF_ERROR(ParseCertificates(files.peer_ca, pem.peer_ca).status());
  }
  return pem;
}

absl::StatusOr<std::shared_ptr<ServerTls>> ServerTls::Open(const TlsFiles& files) {
  std::shared_ptr<ServerTls> tls(new ServerTls(files));
  const std::lock_guard lock(tls->files_mutex_);
  RETURN_IF_ERROR(tls->LoadLocked());
  tls->GiveNotice();
  return tls;
}

std::shared_ptr<grpc::ServerCredentials> ServerTls::MakeCredentials(UserMark* mark) {
  return std::make_shared<Credentials>(shared_from_this(), mark);
}

void ServerTls::Reload(bool asked) {
  const std::lock_guard lock(files_mutex_);
  ReloadLocked(asked);
  if (absl::Now() >= next_notice_) GiveNotice();
}

CertificateLife ServerTls::life() const {
  const std::lock_guard lock(mutex_);
  return in_use_.life;
}

bool ServerTls::stale() const {
  const std::lock_guard lock(mutex_);
  return stale_;
}

void ServerTls::ReloadLocked(bool asked) {
  if (!asked && StampsNow() == stamps_ && absl::Now() < next_try_) return;
  const absl::Status status = LoadLocked();
  {
    const std::lock_guard lock(mutex_);
    stale_ = !status.ok();
  }
  if (status.ok()) {
    spdlog::info("TLS: the files {} and are in effect",
                 asked ? "have been read again" : "have changed");
    GiveNotice();
  } else {
    const absl::string_view message = status.message();
    spdlog::error("TLS: {}; the current certificate stays in effect",
                  std::string_view(message.data(), message.size()));
  }
}

absl::Status ServerTls::LoadLocked() {
  stamps_ = StampsNow();  // taken first, so a change during the read is noticed
  next_try_ = absl::InfiniteFuture();
  ASSIGN_OR_RETURN(TlsPem pem, ReadTls(files_));
  const CertificateLife& life = pem.life;
  const absl::Time now = absl::Now();
  if (generation_ > 0 && in_use_.life.Covers(now) && !life.Covers(now)) {
    if (now >= life.end)
      return Bad(files_.certificate, absl::StrCat("it has been invalid since ", DayText(life.end)));
    next_try_ = life.begin;
    return Bad(files_.certificate, absl::StrCat("it is not valid before ", DayText(life.begin)));
  }
  const std::lock_guard lock(mutex_);
  in_use_ = std::move(pem);
  ++generation_;
  return absl::OkStatus();
}

void ServerTls::GiveNotice() {
  const CertificateLife& life = in_use_.life;
  const absl::Time now = absl::Now();
  const absl::Duration notice = std::min(kLongestNotice, (life.end - life.begin) / 8);
  if (now >= life.end) {
    spdlog::error("TLS: {} has been invalid since {}: clients refuse it", files_.certificate,
                  DayText(life.end));
  } else if (now < life.begin) {
    spdlog::error("TLS: {} is not valid before {}: clients refuse it until then",
                  files_.certificate, DayText(life.begin));
  } else if (now >= life.end - notice) {
    spdlog::warn("TLS: {} is valid only until {}", files_.certificate, DayText(life.end));
  } else {
    next_notice_ = life.end - notice;
    return;
  }
  next_notice_ = now + kNoticeInterval;
  // If the certificate becomes valid or expires before the next warning is due, it is logged then.
  for (const absl::Time change : {life.begin, life.end})
    if (change > now) next_notice_ = std::min(next_notice_, change);
}

std::array<FileStamp, 3> ServerTls::StampsNow() const {
  return {StampOf(files_.certificate), StampOf(files_.key), StampOf(files_.peer_ca)};
}

}  // namespace tessera
