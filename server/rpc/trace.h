// The trace that a call belongs to. The client names the trace in metadata, as W3C Trace Context
// specifies (https://www.w3.org/TR/trace-context/).
#pragma once

#include <array>
#include <string_view>

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace tessera {

// The trace of a call. If the client has named none, `known` is false.
struct Trace {
  std::array<char, 32> trace_id{};   // lower-case hexadecimal digits, as in the next two
  std::array<char, 16> parent_id{};  // the client's span
  std::array<char, 16> span_id{};    // the call's own span
  bool known = false;
  bool sampled = false;  // whether the client may have recorded its span

  // Empty if the call belongs to no trace.
  std::string_view id() const {
    return known ? std::string_view(trace_id.data(), trace_id.size()) : std::string_view();
  }
};

// Parses a traceparent of version 00, or the part of a later version that has the same format. A
// malformed value names no trace. Does not set span_id.
Trace ParseTraceparent(std::string_view text);

// Returns 16 random hexadecimal digits, not all 0. Thread safe.
std::array<char, 16> MakeSpanId();

// Returns the trace of a call that has arrived, and adds it to the response's trailing metadata as
// "traceresponse". More than one traceparent counts as none.
Trace BeginTrace(grpc::ServerContextBase& context);

}  // namespace tessera
