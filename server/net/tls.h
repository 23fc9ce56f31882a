// TLS of the listeners: certificate and key from files that may be replaced while the server runs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/security/server_credentials.h"
#include "server/net/user_mark.h"
#include "server/net/watched_file.h"

namespace tessera {

// Paths of PEM files.
struct TlsFiles {
  std::string certificate;  // the server's, followed by the intermediate ones
  std::string key;
  std::string client_ca;  // CAs that sign clients' certificates; empty: clients need none
};

// When a certificate is valid.
struct CertificateLife {
  absl::Time begin, end;
  bool Covers(absl::Time time) const { return begin <= time && time < end; }
};

// The certificate, key and CAs in use. Thread safe. Messages name files, and never quote them.
class ServerTls : public std::enable_shared_from_this<ServerTls> {
 public:
  // INVALID_ARGUMENT / BAD_CERTIFICATE {file} for files that cannot be used. A certificate that is
  // not currently valid is used, but logged.
  static absl::StatusOr<std::shared_ptr<ServerTls>> Open(const TlsFiles& files);

  // Returns credentials that also check the files at every handshake. Keep them for as long as the
  // server that uses them. mark: the mark of the connections that use them; null: none.
  std::shared_ptr<grpc::ServerCredentials> MakeCredentials(UserMark* mark = nullptr);

  // Reads the files again if they have changed, or in any case if asked, and logs the result. The
  // certificate in use stays if the files cannot be used, or if it is currently valid and theirs is
  // not. Warns once a day of a certificate that expires soon or is not valid.
  void Reload(bool asked);

  // The life of the certificate in use.
  CertificateLife life() const;
  // Whether the files could not be used when they were last read.
  bool stale() const;

 private:
  class Credentials;
  struct Pair {
    std::string certificate, key, client_ca;  // PEM
    CertificateLife life;
  };

  explicit ServerTls(TlsFiles files) : files_(std::move(files)) {}
  // REQUIRES, here and for the functions below: the caller holds files_mutex_.
  void ReloadLocked(bool asked);
  absl::Status LoadLocked();
  void GiveNotice();
  std::array<FileStamp, 3> StampsNow() const;

  const TlsFiles files_;
  // Held while the files are read, which may take long. mutex_ is only locked briefly, and may be
  // locked while files_mutex_ is held. Changing the pair in use needs both.
  std::mutex files_mutex_;
  mutable std::mutex mutex_;
  std::array<FileStamp, 3> stamps_;               // when the files were last read
  absl::Time next_try_ = absl::InfiniteFuture();  // of a certificate that is not valid yet
  absl::Time next_notice_;
  Pair in_use_;
  std::uint64_t generation_ = 0;  // of the pair in use; 0: there is none
  bool stale_ = false;
};

}  // namespace tessera
