// The three files of TLS, separated by lines of "====": the certificate, the key, and the CA of the
// clients.
#include <fstream>
#include <string>

#include "kernels/base/error.h"
#include "server/net/tls.h"
#include "tests/fuzz/fuzz.h"
#include "tests/temporary_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const tessera::TemporaryFile files[3];
  std::string text(tessera::Text(data, size));
  int parts = 0;
  for (const tessera::TemporaryFile& file : files) {
    const std::size_t end = std::min(text.find("\n====\n"), text.size());
    std::ofstream(file.path(), std::ios::binary) << text.substr(0, end);
    ++parts;
    if (end == text.size()) break;
    text.erase(0, end + 6);
  }
  tessera::TlsFiles names{files[0].path(), files[1].path(), parts == 3 ? files[2].path() : ""};
  const auto credentials = tessera::ServerTls::Open(names);
  if (credentials.ok()) {
    (*credentials)->MakeCredentials();
  } else {
    tessera::Require(tessera::ErrorReason(credentials.status()) == "BAD_CERTIFICATE",
                     "an error of another kind: " + credentials.status().ToString());
  }
  return 0;
}
