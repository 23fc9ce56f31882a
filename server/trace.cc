#include "server/trace.h"

#include <algorithm>
#include <random>
#include <string>

#include "grpc/slice.h"
#include "grpcpp/grpcpp.h"

namespace tessera {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";

bool IsHex(std::string_view text) { return text.find_first_not_of(kHexDigits) == text.npos; }

bool IsId(std::string_view text) { return IsHex(text) && text.find_first_not_of('0') != text.npos; }

struct RawMetadata;

}  // namespace
}  // namespace tessera

// ServerContext::client_metadata() puts the metadata of a call into a map, with an allocation for
// each. gRPC itself reads them where they have arrived; the context lets every
// ServerAsyncResponseWriter do so.
template <>
class grpc::ServerAsyncResponseWriter<tessera::RawMetadata> {
 public:
  static const grpc_metadata_array& Of(grpc::ServerContextBase& context) {
    return *context.client_metadata_.arr();
  }
};

namespace tessera {

Trace ParseTraceparent(std::string_view text) {
  // version - trace-id - parent-id - flags
  constexpr std::size_t kSize = 2 + 1 + 32 + 1 + 16 + 1 + 2;
  Trace trace;
  if (text.size() < kSize || text[2] != '-' || text[35] != '-' || text[52] != '-') return trace;
  const std::string_view version = text.substr(0, 2), id = text.substr(3, 32),
                         parent = text.substr(36, 16), flags = text.substr(53, 2);
  if (!IsHex(version) || version == "ff" || !IsId(id) || !IsId(parent) || !IsHex(flags))
    return trace;
  // A later version may have more fields.
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

Trace BeginTrace(grpc::ServerContextBase& context) {
  constexpr std::string_view kName = "traceparent";
  const grpc_metadata_array& all = grpc::ServerAsyncResponseWriter<RawMetadata>::Of(context);
  const grpc_metadata* found = nullptr;
  for (std::size_t i = 0; i < all.count; ++i) {
    const grpc_slice& key = all.metadata[i].key;
    if (std::string_view(reinterpret_cast<const char*>(GRPC_SLICE_START_PTR(key)),
                         GRPC_SLICE_LENGTH(key)) != kName)
      continue;
    if (found != nullptr) return {};
    found = &all.metadata[i];
  }
  if (found == nullptr) return {};
  Trace trace = ParseTraceparent({reinterpret_cast<const char*>(GRPC_SLICE_START_PTR(found->value)),
                                  GRPC_SLICE_LENGTH(found->value)});
  if (!trace.known) return {};
  trace.span_id = MakeSpanId();
  std::string answer = "00-";
  answer.append(trace.trace_id.data(), trace.trace_id.size()).append("-");
  answer.append(trace.span_id.data(), trace.span_id.size());
  context.AddTrailingMetadata("traceresponse", answer + (trace.sampled ? "-01" : "-00"));
  return trace;
}

}  // namespace tessera
