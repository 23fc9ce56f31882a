#include "server/rpc/message_memory.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/message.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "kernels/base/error.h"
#include "kernels/problem/map.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Upper bounds on the memory that protobuf 3.21 and glibc use.

// Counted once per message, because the last block of its arena may be mostly empty.
constexpr std::size_t kBlock = 8192;
// Returns the memory for an object in an arena, including the pointer to its destructor. If the
// object does not fit into the rest of a block, that rest, which is smaller than the object, stays
// unused.
constexpr std::size_t InArena(std::size_t bytes) {
  bytes += 16;
  return bytes <= 512 ? bytes + bytes / 8 : 2 * bytes;
}
// Returns the memory for a heap allocation. The size of a large one is rounded up to pages.
constexpr std::size_t OnHeap(std::size_t bytes) {
  return bytes + 32 + (bytes < 100'000 ? 0 : 4096);
}
// Returns the memory for an element of a repeated field. Arrays double as they grow, and an arena
// keeps the arrays that have become too small, so the arrays take up to four times the memory of
// the elements. The same amount may be left unused at the ends of blocks.
constexpr std::size_t InArrays(std::size_t element) { return 8 * element; }
// Protobuf reserves the memory of a string of up to this size at once, and doubles the capacity of
// a longer string as it grows.
constexpr std::size_t kReservedAtOnce = 50'000'000;
constexpr std::size_t Text(std::size_t length) {
  const std::size_t buffer = length <= kReservedAtOnce ? length : 3 * length;
  return InArena(sizeof(std::string)) + (length < sizeof(std::string) / 2 ? 0 : OnHeap(buffer + 1));
}
// The fixed memory of a message that has unknown fields, and the memory for each unknown field. The
// fields are in a vector on the heap. While it grows, two vectors exist.
constexpr std::size_t kUnknownFields = InArena(32) + OnHeap(0);
constexpr std::size_t kUnknownField = 3 * 16;
constexpr std::size_t kUnknownGroup = OnHeap(24);
constexpr std::size_t UnknownText(std::size_t length) {
  return OnHeap(sizeof(std::string)) + OnHeap(length <= kReservedAtOnce ? length + 1 : 3 * length);
}

bool SkipNumber(CodedInputStream& in, WireFormatLite::WireType type) {
  std::uint64_t value = 0;
  switch (type) {
    case WireFormatLite::WIRETYPE_VARINT:
      return in.ReadVarint64(&value);
    case WireFormatLite::WIRETYPE_FIXED64:
      return in.Skip(8);
    case WireFormatLite::WIRETYPE_FIXED32:
      return in.Skip(4);
    default:
      return false;
  }
}

// Reads the length of a field, which must end within the message around it.
bool ReadLength(CodedInputStream& in, int& length) {
  std::uint32_t value = 0;
  if (!in.ReadVarint32(&value)) return false;
  length = static_cast<int>(value);
  return length >= 0 && length <= in.BytesUntilLimit();
}

// Counts the numbers in the next `length` bytes.
bool CountNumbers(CodedInputStream& in, WireFormatLite::WireType type, int length,
                  std::size_t& count) {
  if (type != WireFormatLite::WIRETYPE_VARINT) {
    count = static_cast<std::size_t>(length) / (type == WireFormatLite::WIRETYPE_FIXED64 ? 8 : 4);
    return in.Skip(length);
  }
  count = 0;
  while (length > 0) {
    const void* data = nullptr;
    int size = 0;
    if (!in.GetDirectBufferPointer(&data, &size)) return false;
    size = std::min(size, length);
    const auto* bytes = static_cast<const std::uint8_t*>(data);
    count += static_cast<std::size_t>(
        std::count_if(bytes, bytes + size, [](std::uint8_t byte) { return byte < 0x80; }));
    if (!in.Skip(size)) return false;
    length -= size;
  }
  return true;
}

// Without limits, a message of many empty nodes, operands or steps would need dozens of times its
// size in memory. In a program, an expression that is too long fails only its own step.
constexpr std::size_t kAllOperands = kMaxSteps * kMostOperands, kAllNodes = kMaxSteps * kMostNodes;
constexpr std::string_view kBad = "BAD_EXPRESSION";
constexpr RepeatLimit kLimits[] = {
    {"tessera.v1.MapRequest", "tessera.v1.MapRequest.operands", "operands", kBad, kMostOperands},
    {"tessera.v1.MapRequest", "tessera.v1.Expression.nodes", "expression.nodes", kBad, kMostNodes},
    {"tessera.v1.ReduceRequest", "tessera.v1.ReduceRequest.with", "with", kBad, kMostOperands - 1},
    {"tessera.v1.ReduceRequest", "tessera.v1.Expression.nodes", "expression.nodes", kBad,
     kMostNodes},
    {"tessera.v1.MatmulRequest", "tessera.v1.MatmulRequest.with", "with", kBad, kMostOperands - 1},
    {"tessera.v1.MatmulRequest", "tessera.v1.Expression.nodes", "expression.nodes", kBad,
     kMostNodes},
    {"tessera.v1.ExecuteRequest", "tessera.v1.ExecuteRequest.steps", "steps", "TOO_MANY_STEPS",
     kMaxSteps},
    {"tessera.v1.ExecuteRequest", "tessera.v1.MapRequest.operands", "operands", kBad, kAllOperands},
    {"tessera.v1.ExecuteRequest", "tessera.v1.ReduceRequest.with", "with", kBad, kAllOperands},
    {"tessera.v1.ExecuteRequest", "tessera.v1.MatmulRequest.with", "with", kBad, kAllOperands},
    {"tessera.v1.ExecuteRequest", "tessera.v1.Expression.nodes", "expression.nodes", kBad,
     kAllNodes},
};

}  // namespace

absl::Status CheckRepeats(const MessageBound& bound) {
  if (bound.exceeded == nullptr) return absl::OkStatus();
  const RepeatLimit& limit = *bound.exceeded;
  return MakeError(absl::StatusCode::kInvalidArgument, limit.reason,
                   absl::StrCat("the request has ", bound.repeats, " ", Absl(limit.name),
                                ", but at most ", limit.most, " are allowed"),
                   {{"field", std::string(limit.name)},
                    {"value", absl::StrCat(bound.repeats)},
                    {"limit", absl::StrCat(limit.most)}});
}

MessageLayout::MessageLayout(const google::protobuf::Descriptor& type,
                             const google::protobuf::Descriptor& whole)
    : bytes_(google::protobuf::MessageFactory::generated_factory()
                 ->GetPrototype(&type)
                 ->SpaceUsedLong()) {
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& from = *type.field(i);
    const auto number = static_cast<std::size_t>(from.number());
    if (fields_.size() <= number) fields_.resize(number + 1);
    Field& field = fields_[number];
    field.repeated = from.is_repeated();
    for (std::size_t l = 0; l < std::size(kLimits); ++l)
      if (kLimits[l].message == whole.full_name() && kLimits[l].field == from.full_name())
        field.limit = static_cast<int>(l);
    field.wire_type =
        WireFormatLite::WireTypeForFieldType(static_cast<WireFormatLite::FieldType>(from.type()));
    switch (from.cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        field.kind = Field::Kind::kMessage;
        field.element = sizeof(void*);
        field.message =
            std::unique_ptr<const MessageLayout>(new MessageLayout(*from.message_type(), whole));
        break;
      case FieldDescriptor::CPPTYPE_STRING:
        field.kind = Field::Kind::kText;
        field.element = sizeof(void*);
        break;
      default:
        field.kind = field.repeated ? Field::Kind::kNumbers : Field::Kind::kNumber;
        field.element = sizeof(std::uint64_t);
    }
  }
}

class MessageLayout::Scan {
 public:
  explicit Scan(CodedInputStream& in) : in_(in) {}

  // Reads a message that ends at the stream's limit. `merged` says whether an earlier field may
  // have begun this message. A string may then replace another one while both exist.
  bool Read(const MessageLayout& layout, bool merged) {
    bytes_ += InArena(layout.bytes_);
    std::bitset<64> seen;
    // The number of groups around the current field. No message type has groups, so every field in
    // a group is unknown.
    int groups = 0;
    bool knows_all = true;  // whether the message or group has had no unknown field so far
    while (const std::uint32_t tag = in_.ReadTag()) {
      const auto number = static_cast<std::size_t>(WireFormatLite::GetTagFieldNumber(tag));
      const WireFormatLite::WireType type = WireFormatLite::GetTagWireType(tag);
      const Field* const field =
          groups == 0 && number < layout.fields_.size() ? &layout.fields_[number] : nullptr;
      if (field != nullptr && field->limit >= 0) ++repeats_[static_cast<std::size_t>(field->limit)];
      if (field != nullptr && type == WireFormatLite::WIRETYPE_LENGTH_DELIMITED &&
          field->kind > Field::Kind::kNumber) {
        const bool again = !field->repeated && (merged || (number < seen.size() && seen[number]));
        if (number < seen.size()) seen.set(number);
        if (!ReadParts(*field, again)) return false;
      } else if (field != nullptr && field->kind != Field::Kind::kNone &&
                 type == field->wire_type) {
        if (field->repeated) bytes_ += InArrays(field->element);
        if (!SkipNumber(in_, type)) return false;
      } else {
        if (type == WireFormatLite::WIRETYPE_END_GROUP) {
          if (groups-- == 0) return false;
          knows_all = false;
          continue;
        }
        bytes_ += kUnknownField + (knows_all ? kUnknownFields : 0);
        knows_all = type == WireFormatLite::WIRETYPE_START_GROUP;
        if (knows_all) {
          bytes_ += kUnknownGroup;
          ++groups;
        } else if (!SkipUnknown(type)) {
          return false;
        }
      }
    }
    return groups == 0 && in_.ConsumedEntireMessage();
  }

  MessageBound bound() const {
    for (std::size_t l = 0; l < std::size(kLimits); ++l)
      if (repeats_[l] > kLimits[l].most) return {bytes_, &kLimits[l], repeats_[l]};
    return {bytes_};
  }

 private:
  // Reads a field that begins with its length.
  bool ReadParts(const Field& field, bool again) {
    int length = 0;
    if (!ReadLength(in_, length)) return false;
    if (field.kind == Field::Kind::kNumbers) {
      std::size_t count = 0;
      if (!CountNumbers(in_, field.wire_type, length, count)) return false;
      bytes_ += InArrays(field.element) * count;
      return true;
    }
    if (field.repeated) bytes_ += InArrays(field.element);
    if (field.kind == Field::Kind::kText) {
      const auto size = static_cast<std::size_t>(length);
      bytes_ += Text(size) + (again ? size : 0);
      return in_.Skip(length);
    }
    const CodedInputStream::Limit outer = in_.PushLimit(length);
    if (!Read(*field.message, again)) return false;
    in_.PopLimit(outer);
    return true;
  }

  bool SkipUnknown(WireFormatLite::WireType type) {
    if (type != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) return SkipNumber(in_, type);
    int length = 0;
    if (!ReadLength(in_, length)) return false;
    bytes_ += UnknownText(static_cast<std::size_t>(length));
    return in_.Skip(length);
  }

  CodedInputStream& in_;
  std::size_t bytes_ = kBlock;
  std::array<std::size_t, std::size(kLimits)> repeats_{};
};

template <class Stream>
std::optional<MessageBound> MessageLayout::BoundOf(Stream& stream, std::size_t size) const {
  if (size > std::numeric_limits<int>::max()) return std::nullopt;
  CodedInputStream in(&stream);
  in.PushLimit(static_cast<int>(size));
  Scan scan(in);
  if (!scan.Read(*this, false)) return std::nullopt;
  return scan.bound();
}

std::optional<MessageBound> MessageLayout::Bound(const grpc::ByteBuffer& bytes) const {
  grpc::ByteBuffer same = bytes;
  grpc::ProtoBufferReader reader(&same);
  return BoundOf(reader, bytes.Length());
}

std::optional<MessageBound> MessageLayout::Bound(std::string_view bytes) const {
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()));
  return BoundOf(stream, bytes.size());
}

}  // namespace tessera
