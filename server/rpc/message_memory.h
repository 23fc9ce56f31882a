// How much memory a message will take once it is parsed, from its bytes alone: two of them may be
// an object of fifty.
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

// How often the messages of one type may repeat a field, all of its places together.
struct RepeatLimit {
  std::string_view message;  // full names
  std::string_view field;
  std::string_view name;  // in errors
  std::string_view reason;
  std::size_t most = 0;
};
// Steps of one program, so that no program takes much of the host's memory or keeps the store's
// lock for long.
inline constexpr std::size_t kMaxSteps = 4096;

struct MessageBound {
  // At least as much as the message takes while it is parsed in an arena, and from then on.
  std::size_t bytes = 0;
  const RepeatLimit* exceeded = nullptr;  // the first limit beyond which it goes
  std::size_t repeats = 0;                // of that field

  bool operator==(const MessageBound&) const = default;
};
// INVALID_ARGUMENT / the limit's reason {field, value, limit} when the message exceeds a limit.
absl::Status CheckRepeats(const MessageBound& bound);

// What the parts of a message of a type take. Types that contain themselves have none.
class MessageLayout {
 public:
  explicit MessageLayout(const google::protobuf::Descriptor& type) : MessageLayout(type, type) {}

  // Of a generated type.
  template <class Message>
  static const MessageLayout& Of() {
    static const MessageLayout layout(*Message::descriptor());
    return layout;
  }

  // None: the bytes are no valid message. Takes time in proportion to the bytes, and no memory.
  std::optional<MessageBound> Bound(const grpc::ByteBuffer& bytes) const;
  std::optional<MessageBound> Bound(std::string_view bytes) const;

 private:
  // whole: the message that this one is a part of, whose limits count.
  MessageLayout(const google::protobuf::Descriptor& type,
                const google::protobuf::Descriptor& whole);

  struct Field {
    enum class Kind { kNone, kNumber, kNumbers, kText, kMessage };
    Kind kind = Kind::kNone;
    google::protobuf::internal::WireFormatLite::WireType wire_type{};  // of one element
    std::size_t element = 0;  // what one takes in the array of a field that is repeated
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

// Up to so many bytes a message is not worth a look, which takes 0.1 to 0.2 us: fifty times as much
// is less than what gRPC takes for a call.
inline constexpr std::size_t kSmallMessage = 256;

}  // namespace tessera
