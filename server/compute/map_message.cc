#include "server/compute/map_message.h"

#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace tessera {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Counts the fields with that number in a message that ends where the stream or its limit does.
bool CountFields(CodedInputStream& in, int field, std::uint32_t& count) {
  while (const std::uint32_t tag = in.ReadTag()) {
    if (WireFormatLite::GetTagFieldNumber(tag) == field) ++count;
    if (!WireFormatLite::SkipField(&in, tag)) return false;
  }
  return true;
}

// For a malformed message the counts are unspecified: parsing will reject it.
template <class Request>
MapParts CountParts(grpc::ByteBuffer bytes) {
  grpc::ProtoBufferReader reader(&bytes);
  CodedInputStream in(&reader);
  MapParts parts;
  CountMapParts<Request>(in, parts);
  return parts;
}

}  // namespace

bool CountMapParts(CodedInputStream& in, int expression, int operands, MapParts& parts) {
  while (const std::uint32_t tag = in.ReadTag()) {
    const int field = WireFormatLite::GetTagFieldNumber(tag);
    if (field == operands) ++parts.operands;
    if (field == expression &&
        WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      std::uint32_t length = 0;
      if (!in.ReadVarint32(&length)) return false;
      const CodedInputStream::Limit outer = in.PushLimit(static_cast<int>(length));
      if (!CountFields(in, v1::Expression::kNodesFieldNumber, parts.nodes)) return false;
      if (in.BytesUntilLimit() > 0) return false;
      in.PopLimit(outer);
    } else if (!WireFormatLite::SkipField(&in, tag)) {
      return false;
    }
  }
  return true;
}

template <class Request>
std::optional<std::size_t> MapRequestParser<Request>::MemoryBound(const grpc::ByteBuffer& bytes) {
  const MapParts parts = CountParts<Request>(bytes);
  const bool parsed = parts.operands <= MapFields<Request>::kMost && parts.nodes <= kMostNodes;
  return parsed ? MessageLayout::Of<Request>().Bound(bytes) : bytes.Length();
}

template <class Request>
bool MapRequestParser<Request>::Parse(grpc::ByteBuffer& bytes, Request& request) {
  const MapParts parts = CountParts<Request>(bytes);
  bool parsed = true;
  if (parts.operands > MapFields<Request>::kMost) {
    auto& operands = MapFields<Request>::OperandsIn(request);
    while (operands.size() <= MapFields<Request>::kMost) operands.Add();
  } else if (parts.nodes > kMostNodes) {
    while (request.expression().nodes_size() <= kMostNodes)
      request.mutable_expression()->add_nodes();
  } else {
    grpc::ProtoBufferReader reader(&bytes);
    parsed = request.ParseFromZeroCopyStream(&reader);
  }
  bytes.Clear();
  return parsed;
}

template struct MapRequestParser<v1::MapRequest>;
template struct MapRequestParser<v1::ReduceRequest>;
template struct MapRequestParser<v1::MatmulRequest>;

}  // namespace tessera
