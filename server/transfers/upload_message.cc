#include "server/transfers/upload_message.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "server/rpc/message_memory.h"

namespace tessera {
namespace {

// If a message's slices are smaller than this on average, they are copied into one slice. Each
// slice has a header. It also keeps alive the larger buffer in which it arrived.
constexpr std::size_t kLeastSlice = 256;

// A position in the bytes of slices. Cheap to copy.
class Cursor {
 public:
  Cursor(const std::vector<grpc::Slice>& slices, std::size_t left)
      : slice_(slices.data()), left_(left) {
    SkipEmpty();
  }

  std::size_t left() const { return left_; }

  // Reads the next n bytes, piece by piece. REQUIRES: n <= left().
  template <class Take>
  void Read(std::size_t n, Take take) {
    while (n > 0) {
      const std::size_t size = std::min(n, slice_->size() - at_);
      take(reinterpret_cast<const char*>(slice_->begin()) + at_, size);
      n -= size;
      at_ += size;
      left_ -= size;
      SkipEmpty();
    }
  }

  // Reads a varint of at most `longest` bytes. Returns false if there is none.
  bool ReadVarint(int longest, std::uint64_t& value) {
    value = 0;
    for (int i = 0; i < longest && left_ > 0; ++i) {
      const std::uint8_t byte = slice_->begin()[at_++];
      --left_;
      SkipEmpty();
      value |= std::uint64_t{byte & 0x7fu} << 7 * i;
      if (byte < 0x80) return true;
    }
    return false;
  }

 private:
  // Moves to the next byte, if there is one.
  void SkipEmpty() {
    while (left_ > 0 && at_ == slice_->size()) {
      ++slice_;
      at_ = 0;
    }
  }

  const grpc::Slice* slice_;
  std::size_t at_ = 0;
  std::size_t left_;
};

// The wire types that clients use; groups are left to protobuf.
enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

// Moves past the value of a field. Returns false if the value is a group, is malformed or is cut
// off.
bool SkipValue(std::uint64_t tag, Cursor& cursor) {
  std::uint64_t value = 0;
  switch (tag & 7) {
    case kVarint:
      return cursor.ReadVarint(10, value);
    case kFixed64:
      value = 8;
      break;
    case kBytes:
      if (!cursor.ReadVarint(4, value)) return false;
      break;
    case kFixed32:
      value = 4;
      break;
    default:
      return false;
  }
  if (value > cursor.left()) return false;
  cursor.Read(value, [](const char*, std::size_t) {});
  return true;
}

// Whether the bytes can be parsed in `most` bytes of memory. Returns false if they are not a valid
// message.
bool TakesAtMost(std::size_t most, const std::string& bytes) {
  if (bytes.size() <= kSmallMessage) return true;
  const std::optional<MessageBound> bound = MessageLayout::Of<v1::UploadRequest>().Bound(bytes);
  return bound.has_value() && bound->bytes <= most;
}

}  // namespace

// Extracts the field `data` and leaves the rest, which is small, to protobuf. A message that is
// malformed, or unlike those that clients write, goes to protobuf as a whole, so that only protobuf
// decides which messages are valid.
bool UploadMessage::Parse(const grpc::ByteBuffer& bytes, std::size_t most) {
  constexpr std::uint64_t kDataTag = v1::UploadRequest::kDataFieldNumber << 3 | kBytes;
  Clear();
  const std::size_t size = bytes.Length();
  if (!bytes.Valid() || !bytes.Dump(&slices_).ok()) return false;
  if (slices_.size() > 1 && size / slices_.size() < kLeastSlice) {
    grpc::Slice one;
    if (!bytes.DumpToSingleSlice(&one).ok()) return false;
    slices_ = std::vector<grpc::Slice>(1, one);
  }
  std::string rest;
  for (Cursor cursor(slices_, size); cursor.left() > 0;) {
    Cursor begin = cursor;
    std::uint64_t tag = 0;
    if (!cursor.ReadVarint(4, tag) || tag < 8) return ParseWhole(size, most);
    if (tag == kDataTag) {
      std::uint64_t length = 0;
      if (!cursor.ReadVarint(4, length) || length > cursor.left()) return ParseWhole(size, most);
      // If there are several, the last one counts.
      data_.clear();
      data_size_ = length;
      cursor.Read(length, [&](const char* data, std::size_t n) { data_.push_back({data, n}); });
    } else {
      if (!SkipValue(tag, cursor)) return ParseWhole(size, most);
      begin.Read(begin.left() - cursor.left(),
                 [&](const char* data, std::size_t n) { rest.append(data, n); });
    }
  }
  if (TakesAtMost(most, rest) && header_.ParseFromString(rest)) return true;
  Clear();
  return false;
}

bool UploadMessage::ParseWhole(std::size_t size, std::size_t most) {
  std::string whole;
  whole.reserve(size);
  Cursor(slices_, size).Read(size, [&](const char* data, std::size_t n) { whole.append(data, n); });
  Clear();
  if (!TakesAtMost(most + std::min(size, kUnbounded - most), whole) ||
      !header_.ParseFromString(whole)) {
    Clear();
    return false;
  }
  data_size_ = header_.data().size();
  if (data_size_ > 0) data_.push_back({header_.data().data(), data_size_});
  return true;
}

}  // namespace tessera
