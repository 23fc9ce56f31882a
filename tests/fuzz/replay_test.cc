// A target with four faults, one for each way in which a process can fail. replay_test.py makes
// TARGET_replay find them.
#include "tests/fuzz/fuzz.h"

namespace {

// Trusts the length in the first byte.
int Sum(const std::uint8_t* data, std::size_t size) {
  int sum = 0;
  for (std::size_t i = 0; size > 0 && i < data[0]; ++i) sum += data[1 + i];
  return sum;
}

// Returns the number that the digits in the text form, plus one.
int Next(std::string_view text) {
  long number = 0;
  for (const char c : text)
    if (c >= '0' && c <= '9') number = (number * 10 + (c - '0')) % (1L << 31);
  return static_cast<int>(number) + 1;
}

bool Begins(std::string_view text, std::string_view word) { return text.rfind(word, 0) == 0; }
bool Has(std::string_view text, std::string_view word) { return text.find(word) != text.npos; }

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = tessera::Text(data, size);
  volatile int result = 0;
  if (Begins(text, "sum")) result = Sum(data + 3, size - 3);
  if (Begins(text, "next")) result = Next(text);
  tessera::Require(!Has(text, "left") || !Has(text, "right"), "both words");
  while (Begins(text, "wait") && size > 9) result = 0;
  return result - result;
}
