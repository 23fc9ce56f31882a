// Reads files whose lines consist of words, with comments that begin with `#`, such as the lists of
// callers and of servers.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

struct WordLine {
  std::size_t number = 0;  // line number in the text, starting at 1
  std::vector<absl::string_view> words;
};

// Returns the text after a UTF-8 byte order mark, which editors on Windows write at the beginning
// of files, or the whole text if there is none.
std::string_view BehindByteOrderMark(std::string_view text);
// Returns the text without a byte order mark, and without whitespace at both ends. Both may go
// unnoticed in files and variables.
std::string Trimmed(std::string_view text);

// Returns the lines that have words; the words point into the text. A byte order mark is skipped.
std::vector<WordLine> WordLines(std::string_view text);

// Whether the text can be a name in such a file: 1 to 64 characters of [a-zA-Z0-9._-].
bool IsPlainName(absl::string_view text);

}  // namespace tessera
