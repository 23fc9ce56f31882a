#include "kernels/client_and_server/printable.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace tessera {
namespace {

// Returns the length of the UTF-8 sequence that text begins with; 0 if there is none.
std::size_t SequenceLength(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  const std::size_t length = lead < 0x80                   ? 1
                             : lead >= 0xc2 && lead < 0xe0 ? 2
                             : lead >= 0xe0 && lead < 0xf0 ? 3
                             : lead >= 0xf0 && lead < 0xf5 ? 4
                                                           : 0;
  if (length == 0 || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  // These are the beginnings of overlong forms, surrogates, and code points above U+10FFFF.
  if ((lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xed && byte(1) >= 0xa0) ||
      (lead == 0xf0 && byte(1) < 0x90) || (lead == 0xf4 && byte(1) >= 0x90)) {
    return 0;
  }
  return length;
}

// Whether the sequence is a C1 control, or a character that breaks a line or changes the direction
// of writing.
bool IsInvisible(std::string_view sequence) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(sequence[i]); };
  if (sequence.size() == 2)
    return (byte(0) == 0xc2 && byte(1) < 0xa0) || (byte(0) == 0xd8 && byte(1) == 0x9c);  // U+061C
  if (sequence.size() != 3 || byte(0) != 0xe2) return false;
  return (byte(1) == 0x80 && (byte(2) == 0x8e || byte(2) == 0x8f ||      // U+200E, U+200F
                              (byte(2) >= 0xa8 && byte(2) <= 0xae))) ||  // U+2028 to U+202E
         (byte(1) == 0x81 && byte(2) >= 0xa6 && byte(2) <= 0xa9);        // U+2066 to U+2069
}

}  // namespace

std::string Printable(std::string_view text, std::size_t longest) {
  std::string out;
  while (!text.empty() && out.size() < longest) {
    const std::size_t length = SequenceLength(text);
    const auto lead = static_cast<unsigned char>(text[0]);
    const bool control = lead < 0x20 || lead == 0x7f || IsInvisible(text.substr(0, length));
    if (length == 0 || control) {
      for (std::size_t i = 0; i < std::max<std::size_t>(length, 1); ++i) {
        absl::StrAppendFormat(&out, "\\x%02x", static_cast<unsigned char>(text[i]));
      }
      text.remove_prefix(std::max<std::size_t>(length, 1));
    } else {
      out.append(text.substr(0, length));
      text.remove_prefix(length);
    }
  }
  if (!text.empty()) out += "...";
  return out;
}

std::string_view Beginning(std::string_view text, std::size_t longest) {
  if (text.size() <= longest) return text;
  std::size_t end = longest;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end);
}

}  // namespace tessera
