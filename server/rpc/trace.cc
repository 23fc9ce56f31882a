#include "server/rpc/trace.h"

#include <algorithm>
#include <iterator>
#include <random>
#include <string>

#include "grpcpp/grpcpp.h"

namespace tessera {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";

bool IsHex(std::string_view text) { return text.find_first_not_of(kHexDigits) == text.npos; }

bool IsId(std::string_view text) { return IsHex(text) && text.find_first_not_of('0') != text.npos; }

}  // namespace

Trace ParseTraceparent(std::string_view text) {
  // version - trace-id - parent-id - flags
  constexpr std::size_t kSize = 2 + 1 + 32 + 1 + 16 + 1 + 2;
  Trace trace;
  if (text.size() < kSize || text[2] != '-' || text[35] != '-' || text[52] != '-') return trace;
  const std::string_view version = text.substr(0, 2), id = text.substr(3, 32),
                         parent = text.substr(36, 16), flags = text.substr(53, 2);
  if (!IsHex(version) || version == "ff" || !IsId(id) || !IsId(parent) || !IsHex(flags))
    return trace;
  // Later versions may have more fields.
  if (text.size() > kSize && (version == "00" || text[kSize] != '-')) return trace;
  std::copy(id.begin(), id.end(), trace.trace_id.begin());
  std::copy(parent.begin(), parent.end(), trace.parent_id.begin());
  trace.known = true;
  trace.sampled = kHexDigits.find(flags[1]) % 2 == 1;
  return trace;
}

std::array<char, 16> MakeSpanId() {
  thread_local std::mt19937_64 random{std::random_device{}()};
  std::uint64_t bits = 0;
  while (bits == 0) bits = random();
  std::array<char, 16> id;
  for (char& digit : id) {
    digit = kHexDigits[bits & 15];
    bits >>= 4;
  }
  return id;
}

// client_metadata() allocates memory for each entry. That takes 0.2 us for the one or two entries
// of a call. The alternative is to depend on gRPC's internals, which the next version may change.
Trace BeginTrace(grpc::ServerContextBase& context) {
  const auto [first, end] = context.client_metadata().equal_range("traceparent");
  if (first == end || std::next(first) != end) return {};
  Trace trace = ParseTraceparent({first->second.data(), first->second.size()});
  if (!trace.known) return {};
  trace.span_id = MakeSpanId();
  std::string answer = "00-";
  answer.append(trace.trace_id.data(), trace.trace_id.size()).append("-");
  answer.append(trace.span_id.data(), trace.span_id.size());
  context.AddTrailingMetadata("traceresponse", answer + (trace.sampled ? "-01" : "-00"));
  return trace;
}

}  // namespace tessera
