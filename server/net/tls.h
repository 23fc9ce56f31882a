// TLS for the listeners. The certificate and the key come from files that may be replaced while the
// server runs.
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
  std::string certificate;  // the server's, then intermediate certificates; may be empty
  std::string key;
  std::string peer_ca;  // CAs that sign the peers' certificates; empty if peers need none
};

// When a certificate is valid.
struct CertificateLife {
  absl::Time begin, end;
  bool Covers(absl::Time time) const { return begin <= time && time < end; }
};

// The contents of TlsFiles.
struct TlsPem {
  std::string certificate, key, peer_ca;
  CertificateLife life;  // of the certificate
};

// Reads the files. Returns INVALID_ARGUMENT / BAD_CERTIFICATE {file} if a file cannot be used. A
// certificate may be used even if it is not currently valid.
absl::StatusOr<TlsPem> ReadTls(const TlsFiles& files);

// The certificate, key and CAs that are in effect. Thread safe. Error messages name files, but
// never quote them.
class ServerTls : public std::enable_shared_from_this<ServerTls> {
 public:
  // Errors: those of ReadTls. The log reports a certificate that is not currently valid.
  static absl::StatusOr<std::shared_ptr<ServerTls>> Open(const TlsFiles& files);

  // Returns credentials that also check the files for changes at every handshake. They must outlive
  // the server that uses them. `mark` is the mark for connections with these credentials, or null.
  std::shared_ptr<grpc::ServerCredentials> MakeCredentials(UserMark* mark = nullptr);

  // Reads the files again if they have changed or if `asked` is true, and logs the result. The
  // current certificate stays in effect if the files cannot be used, or if it is valid now and the
  // new one is not. Warns once a day about a certificate that expires soon or is not valid.
  void Reload(bool asked);

  // When the current certificate is valid.
  CertificateLife life() const;
  // Whether the last attempt to use the files has failed.
  bool stale() const;

 private:
  class Credentials;

  explicit ServerTls(TlsFiles files) : files_(std::move(files)) {}
  // REQUIRES, here and for the functions below: the caller holds files_mutex_.
  void ReloadLocked(bool asked);
  absl::Status LoadLocked();
  void GiveNotice();
  std::array<FileStamp, 3> StampsNow() const;

  const TlsFiles files_;
  // Held while the files are read, which may take a long time. mutex_ is only locked briefly, and
  // may be locked while files_mutex_ is held. A thread that changes in_use_ holds both.
  std::mutex files_mutex_;
  mutable std::mutex mutex_;
  std::array<FileStamp, 3> stamps_;               // the files' state when last read
  absl::Time next_try_ = absl::InfiniteFuture();  // for a certificate that is not valid yet
  absl::Time next_notice_;
  TlsPem in_use_;
  std::uint64_t generation_ = 0;  // generation of in_use_; initially 0
  bool stale_ = false;
};

}  // namespace tessera
