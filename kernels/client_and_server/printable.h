// Makes text from outside safe for a log or a terminal.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera {

// Returns the text in a form that is harmless within a line. Control characters, characters that
// break a line or change the direction of writing, and bytes that are not UTF-8 become escapes
// (\x1b). Text longer than about `longest` bytes is cut and ends with "...".
std::string Printable(std::string_view text, std::size_t longest = std::string_view::npos);

// Returns the beginning of a UTF-8 text: at most `longest` bytes, in whole characters.
std::string_view Beginning(std::string_view text, std::size_t longest);

}  // namespace tessera
