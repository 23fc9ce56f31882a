// Computes, from the bytes of a message, a bound on the memory of the parsed message. Two bytes may
// become an object of fifty bytes.
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

// The maximum number of repeats of a field in a message of some type, counted in the message and in
// all messages inside it.
struct RepeatLimit {
  std::string_view message;  // full names
  std::string_view field;
  std::string_view name;  // the name in errors
  std::string_view reason;
  std::size_t most = 0;
};
// The maximum number of steps in a program. It keeps a program from taking much of the host's
// memory or holding the store's lock for long.
inline constexpr std::size_t kMaxSteps = 4096;

struct MessageBound {
  // An upper bound on the memory that the message takes while it is parsed in an arena, and
  // afterwards.
  std::size_t bytes = 0;
  const RepeatLimit* exceeded = nullptr;  // the first limit that it exceeds
  std::size_t repeats = 0;                // repeats of the field with that limit

  bool operator==(const MessageBound&) const = default;
};
// Returns INVALID_ARGUMENT / the limit's reason {field, value, limit} if the message exceeds a
// limit.
absl::Status CheckRepeats(const MessageBound& bound);

// The memory that the parts of a message type take. Types that contain themselves have no layout.
class MessageLayout {
 public:
  explicit MessageLayout(const google::protobuf::Descriptor& type) : MessageLayout(type, type) {}

  // Returns the layout of a generated type.
  template <class Message>
  static const MessageLayout& Of() {
    static const MessageLayout layout(*Message::descriptor());
    return layout;
  }

  // Returns the bound for a message, or nothing if the bytes are not a valid message. The time is
  // proportional to the number of bytes. Allocates no memory.
  std::optional<MessageBound> Bound(const grpc::ByteBuffer& bytes) const;
  std::optional<MessageBound> Bound(std::string_view bytes) const;

 private:
  // `whole` is the outermost message; its limits apply.
  MessageLayout(const google::protobuf::Descriptor& type,
                const google::protobuf::Descriptor& whole);

  struct Field {
    enum class Kind { kNone, kNumber, kNumbers, kText, kMessage };
    Kind kind = Kind::kNone;
    google::protobuf::internal::WireFormatLite::WireType wire_type{};  // an element's
    std::size_t element = 0;  // size of one element in a repeated field's array
    bool repeated = false;
    int limit = -1;  // the limit that the field counts toward; -1 for none
    std::unique_ptr<const MessageLayout> message;
  };
  class Scan;
  template <class Stream>
  std::optional<MessageBound> BoundOf(Stream& stream, std::size_t size) const;

  std::size_t bytes_;          // size of an empty message
  std::vector<Field> fields_;  // sorted by number
};

// Messages of at most this many bytes are not scanned, because a scan takes 0.1 to 0.2 us and fifty
// times this much memory is less than gRPC uses for a call.
inline constexpr std::size_t kSmallMessage = 256;

}  // namespace tessera
