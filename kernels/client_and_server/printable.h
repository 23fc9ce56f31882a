// Text from outside, on its way to a log or a terminal.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera {

// The text as one harmless piece of a line: control characters, those that break a line or turn the
// direction of writing, and bytes that are no UTF-8 become escapes (\x1b), and what is longer than
// about `longest` bytes is cut and ends with "...".
std::string Printable(std::string_view text, std::size_t longest = std::string_view::npos);

// The beginning of a text in UTF-8, of at most so many bytes and whole characters.
std::string_view Beginning(std::string_view text, std::size_t longest);

}  // namespace tessera
