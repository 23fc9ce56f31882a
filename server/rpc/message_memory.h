// Bounds the memory that a message takes once it is parsed, from its bytes: two bytes may become an
// object of fifty.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/byte_buffer.h"

namespace tessera {

// The most repeats of a field in a message of some type, counted in the message and in all messages
// inside it.
struct RepeatLimit {
  std::string_view message;  // full names
  std::string_view field;
  std::string_view name;  // in errors
  std::string_view reason;
  std::size_t most = 0;
};
// The most steps of one program, so that no program takes much of the host's memory or keeps the
// store's lock for long.
inline constexpr std::size_t kMaxSteps = 4096;

struct MessageBound {
  // An upper bound of what the message takes while it is parsed in an arena, and afterwards.
  std::size_t bytes = 0;
  const RepeatLimit* exceeded = nullptr;  // the first limit that it exceeds
  std::size_t repeats = 0;                // of the field with that limit

  bool operator==(const MessageBound&) const = default;
};
// Returns INVALID_ARGUMENT / the limit's reason {field, value, limit} if the message exceeds a limit.
absl::Status CheckRepeats(const MessageBound& bound);

// How much memory the parts of a message of a type take. Types that contain themselves have no
// layout.
class MessageLayout {
 public:
  explicit MessageLayout(const google::protobuf::Descriptor& type) : MessageLayout(type, type) {}

  // Returns the layout of a generated type.
  template <class Message>
  static const MessageLayout& Of() {
    static const MessageLayout layout(*Message::descriptor());
    return layout;
  }

  // Returns nothing if the bytes are not a valid message. Takes time in proportion to the bytes, and
  // no memory.
  std::optional<MessageBound> Bound(const grpc::ByteBuffer& bytes) const;
  std::optional<MessageBound> Bound(std::string_view bytes) const;

 private:
  // whole: the outermost message, whose limits apply.
  MessageLayout(const google::protobuf::Descriptor& type,
                const google::protobuf::Descriptor& whole);

  struct Field {
    enum class Kind { kNone, kNumber, kNumbers, kText, kMessage };
    Kind kind = Kind::kNone;
    google::protobuf::internal::WireFormatLite::WireType wire_type{};  // of one element
    std::size_t element = 0;  // size of one in the array of a repeated field
    bool repeated = false;
    int limit = -1;  // the limit that the field counts for; -1: none
    std::unique_ptr<const MessageLayout> message;
  };
  class Scan;
  template <class Stream>
  std::optional<MessageBound> BoundOf(Stream& stream, std::size_t size) const;

  std::size_t bytes_;          // of an empty message
  std::vector<Field> fields_;  // by number
};

// Messages of at most this many bytes are not worth a scan, which takes 0.1 to 0.2 us: fifty times
// as much memory is less than what gRPC takes for a call.
inline constexpr std::size_t kSmallMessage = 256;

}  // namespace tessera
