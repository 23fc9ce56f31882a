// Expressions on the wire: how large they are, before they are parsed. A node takes two bytes there
// and dozens of times as much in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "google/protobuf/io/coded_stream.h"
#include "grpcpp/support/byte_buffer.h"
#include "kernels/problem/map.h"
#include "server/calls/unary_exchange.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// The messages that a request with an expression, or several, repeat.
struct MapParts {
  std::uint32_t operands = 0;
  std::uint32_t nodes = 0;
};

// Where a request has its expression and the operands that it repeats, and how many of these it may
// have.
template <class Request>
struct MapFields;
template <>
struct MapFields<v1::MapRequest> {
  static constexpr int kExpression = v1::MapRequest::kExpressionFieldNumber;
  static constexpr int kOperands = v1::MapRequest::kOperandsFieldNumber;
  static constexpr int kMost = kMostOperands;
  static auto& OperandsIn(v1::MapRequest& request) { return *request.mutable_operands(); }
};
// Operand 0 is not among those that are repeated.
template <class Request>
struct StageFields {
  static constexpr int kExpression = Request::kExpressionFieldNumber;
  static constexpr int kOperands = Request::kWithFieldNumber;
  static constexpr int kMost = kMostOperands - 1;
  static auto& OperandsIn(Request& request) { return *request.mutable_with(); }
};
template <>
struct MapFields<v1::ReduceRequest> : StageFields<v1::ReduceRequest> {};
template <>
struct MapFields<v1::MatmulRequest> : StageFields<v1::MatmulRequest> {};

// Adds those of a request that ends where the stream or its limit does, with these numbers of the
// fields. false: it is no valid message.
bool CountMapParts(google::protobuf::io::CodedInputStream& in, int expression, int operands,
                   MapParts& parts);
template <class Request>
bool CountMapParts(google::protobuf::io::CodedInputStream& in, MapParts& parts) {
  return CountMapParts(in, MapFields<Request>::kExpression, MapFields<Request>::kOperands, parts);
}

// Of a request with more operands or nodes than any expression has it leaves one too many, empty
// ones, which no check lets pass.
template <class Request>
struct MapRequestParser {
  static std::optional<std::size_t> MemoryBound(const grpc::ByteBuffer& bytes);
  static bool Parse(grpc::ByteBuffer& bytes, Request& request);
};
template <>
struct RequestParser<v1::MapRequest> : MapRequestParser<v1::MapRequest> {};
template <>
struct RequestParser<v1::ReduceRequest> : MapRequestParser<v1::ReduceRequest> {};
template <>
struct RequestParser<v1::MatmulRequest> : MapRequestParser<v1::MatmulRequest> {};

}  // namespace tessera
