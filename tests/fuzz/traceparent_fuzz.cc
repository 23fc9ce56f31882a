// The traceparent header.
#include <algorithm>

#include "server/rpc/trace.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = tessera::Text(data, size);
  const tessera::Trace trace = tessera::ParseTraceparent(text);
  if (!trace.known) return 0;
  const auto is_hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  tessera::Require(std::all_of(trace.trace_id.begin(), trace.trace_id.end(), is_hex) &&
                       std::all_of(trace.parent_id.begin(), trace.parent_id.end(), is_hex),
                   "ids that are no hexadecimal digits");
  tessera::Require(text.substr(3, 32) == trace.id(), "another trace than the text names");
  return 0;
}
