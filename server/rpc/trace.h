// The trace that a call belongs to, as its client says: W3C Trace Context
// (https://www.w3.org/TR/trace-context/), in metadata.
#pragma once

#include <array>
#include <string_view>

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace tessera {

// Of a call; its client may have named none.
struct Trace {
  std::array<char, 32> trace_id{};   // lower-case hexadecimal digits, as those that follow
  std::array<char, 16> parent_id{};  // of the client's span
  std::array<char, 16> span_id{};    // of the call itself
  bool known = false;
  bool sampled = false;  // whether the client may have recorded its span

  // Empty: the call belongs to none.
  std::string_view id() const {
    return known ? std::string_view(trace_id.data(), trace_id.size()) : std::string_view();
  }
};

// Reads the value of a traceparent: of version 00, or what that has in common with a later one.
// What is malformed names no trace. The span_id stays empty.
Trace ParseTraceparent(std::string_view text);

// 16 hexadecimal digits at random, not all 0. Thread safe.
std::array<char, 16> MakeSpanId();

// The trace of a call that has arrived, which is answered with it: "traceresponse", in the metadata
// behind the answer. More than one traceparent is none.
Trace BeginTrace(grpc::ServerContextBase& context);

}  // namespace tessera
