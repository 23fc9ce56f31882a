#include "kernels/client_and_server/word_lines.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"
#include "kernels/base/error.h"

namespace tessera {

std::string_view BehindByteOrderMark(std::string_view text) {
  constexpr std::string_view kMark = "\xEF\xBB\xBF";
  return text.substr(text.substr(0, kMark.size()) == kMark ? kMark.size() : 0);
}

std::string Trimmed(std::string_view text) {
  return std::string(absl::StripAsciiWhitespace(Absl(BehindByteOrderMark(text))));
}

std::vector<WordLine> WordLines(std::string_view text) {
  std::vector<WordLine> lines;
  std::size_t number = 0;
  for (absl::string_view line : absl::StrSplit(Absl(BehindByteOrderMark(text)), '\n')) {
    ++number;
    line = line.substr(0, line.find('#'));
    std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (!words.empty()) lines.push_back({number, std::move(words)});
  }
  return lines;
}

bool IsPlainName(absl::string_view text) {
  constexpr std::size_t kLongest = 64;
  return !text.empty() && text.size() <= kLongest &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
         });
}

}  // namespace tessera
