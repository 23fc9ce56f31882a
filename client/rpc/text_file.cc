#include "client/rpc/text_file.h"

#include <fstream>
#include <ios>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/client_and_server/word_lines.h"

namespace tessera {

absl::StatusOr<std::string> ReadTextFile(const std::string& file, std::size_t most) {
  std::ifstream in(file, std::ios::binary);
  std::string text;
  char part[1 << 14];
  while (in && text.size() <= most << 20) {
    in.read(part, sizeof part);
    text.append(part, static_cast<std::size_t>(in.gcount()));
  }
  if (in.bad() || text.empty()) return absl::InvalidArgumentError("cannot be read, or is empty");
  if (text.size() > most << 20)
    return absl::InvalidArgumentError(absl::StrCat("is larger than ", most, " MiB"));
  text.erase(0, text.size() - BehindByteOrderMark(text).size());
  return text;
}

}  // namespace tessera
