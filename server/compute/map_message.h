// Counts the parts of expressions before they are parsed: a node takes two bytes on the wire, and
// dozens of times as much in memory.
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

// How many operands and nodes are repeated in one or several requests with an expression.
struct MapParts {
  std::uint32_t operands = 0;
  std::uint32_t nodes = 0;
};

// The fields of a request's expression and of the operands that it repeats, and how many operands
// it may repeat.
template <class Request>
struct MapFields;
template <>
struct MapFields<v1::MapRequest> {
  static constexpr int kExpression = v1::MapRequest::kExpressionFieldNumber;
  static constexpr int kOperands = v1::MapRequest::kOperandsFieldNumber;
  static constexpr int kMost = kMostOperands;
  static auto& OperandsIn(v1::MapRequest& request) { return *request.mutable_operands(); }
};
// Operand 0 is not in the repeated field.
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

// Adds the parts of a request that ends where the stream or its limit does. expression, operands:
// the numbers of these fields. Returns false if the message is not valid.
bool CountMapParts(google::protobuf::io::CodedInputStream& in, int expression, int operands,
                   MapParts& parts);
template <class Request>
bool CountMapParts(google::protobuf::io::CodedInputStream& in, MapParts& parts) {
  return CountMapParts(in, MapFields<Request>::kExpression, MapFields<Request>::kOperands, parts);
}

// A request with too many operands or nodes is not parsed. Instead it gets empty ones, one more
// than allowed, which every check rejects.
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
