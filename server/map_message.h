// Maps on the wire: how large an expression is, before it is parsed. A node takes two bytes there and
// dozens of times as much in memory.
#pragma once

#include <cstdint>

#include "google/protobuf/io/coded_stream.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/unary_exchange.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// The messages that a MapRequest, or several, repeat.
struct MapParts {
  std::uint32_t operands = 0;
  std::uint32_t nodes = 0;
};

// Adds those of a MapRequest that ends where the stream or its limit does. false: it is no valid
// message.
bool CountMapParts(google::protobuf::io::CodedInputStream& in, MapParts& parts);

// Of a request with more operands or nodes than any expression has it leaves one too many, empty
// ones, which no check lets pass.
template <>
struct RequestParser<v1::MapRequest> {
  static bool Parse(grpc::ByteBuffer& bytes, v1::MapRequest& request);
};

}  // namespace tessera
