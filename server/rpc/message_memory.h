// How much memory a message will take once it is parsed, from its bytes alone: two of them may be
// an object of fifty.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/byte_buffer.h"

namespace tessera {

// What the parts of a message of a type take. Types that contain themselves have none.
class MessageLayout {
 public:
  explicit MessageLayout(const google::protobuf::Descriptor& type);

  // Of a generated type.
  template <class Message>
  static const MessageLayout& Of() {
    static const MessageLayout layout(*Message::descriptor());
    return layout;
  }

  // At least as much as a message takes while it is parsed in an arena, and from then on; none: it
  // is not valid. Takes time in proportion to the bytes, and no memory.
  std::optional<std::size_t> Bound(const grpc::ByteBuffer& bytes) const;
  std::optional<std::size_t> Bound(std::string_view bytes) const;

 private:
  struct Field {
    enum class Kind { kNone, kNumber, kNumbers, kText, kMessage };
    Kind kind = Kind::kNone;
    google::protobuf::internal::WireFormatLite::WireType wire_type{};  // of one element
    std::size_t element = 0;  // what one takes in the array of a field that is repeated
    bool repeated = false;
    std::unique_ptr<const MessageLayout> message;
  };
  class Scan;

  std::size_t bytes_;          // of an empty message
  std::vector<Field> fields_;  // by number
};

// Up to so many bytes a message is not worth a look, which takes 0.1 to 0.2 us: fifty times as much
// is less than what gRPC takes for a call.
inline constexpr std::size_t kSmallMessage = 256;

}  // namespace tessera
