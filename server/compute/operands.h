// The operands of an operation, from the request to views on a stream.
#pragma once

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/compute.h"
#include "kernels/run/operation.h"
#include "server/buffers/buffer_store.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

class Core;

// An operand of a request, under the name that errors call it by.
struct Named {
  std::string_view name;
  const v1::Operand* operand;
};
// How many operands are held in place; more are allocated.
inline constexpr std::size_t kOperandsInPlace = 2;
using NamedOperands = absl::InlinedVector<Named, kOperandsInPlace>;

// An operand as a call holds it between its acceptance and its end.
struct OperandSource {
  Named named;
  std::shared_ptr<const Buffer> buffer;  // null: inline, or the result of a step
  ArrayType type;
  View view;                      // as if the array began at address 0
  std::uint64_t offset = 0;       // of an operand that moves to the memory of a program
  std::uint64_t moved_bytes = 0;  // that were copied from another device for this operand
  bool scattered = false;  // some devices that are to share the operation out do not reach it

  // Whether it has to be copied to the device: it is resident on another one, or scattered.
  bool IsElsewhere(const Device& device) const {
    return buffer != nullptr && (scattered || !buffer->IsOn(device));
  }
  // Whether the device has all of it in its memory, and no other device has a part.
  bool IsReached(const Device& device) const {
    return buffer == nullptr || (!IsElsewhere(device) && buffer->shards().size() == 1);
  }
  std::uint64_t version() const { return buffer != nullptr ? buffer->version() : 0; }
};
using Sources = absl::InlinedVector<OperandSource, kOperandsInPlace>;
using Views = absl::InlinedVector<View, kOperandsInPlace>;

// The error as one of this operand.
absl::Status OfOperand(const Named& named, const absl::Status& status);

// INVALID_ARGUMENT / BAD_OPERAND: the operand asks for an array that what it names does not have.
absl::Status BadOutput(const Named& named);

// The type of an inline operand: INVALID_ARGUMENT / BAD_OPERAND unless its data has that size.
absl::StatusOr<ArrayType> TensorType(const v1::Tensor& tensor);

// All operands of a call, as they are at one moment, and checked with their views.
absl::StatusOr<Sources> FindSources(absl::Span<const Named> operands, BufferStore& store);

// The operand that has the address, where it lies; null: it is no resident one's.
std::shared_ptr<const Buffer> BufferAt(absl::Span<const OperandSource> sources,
                                       const void* address);

// Of a product without an expression: b is scattered if it is too small for every device that has a
// part of a to have one of b.
void MarkScattered(const OperationSpec& spec, absl::Span<OperandSource> sources);

// Adds up what a call needs of each device, to run where the fewest bytes have to move.
class DeviceBytes {
 public:
  // Bytes [begin, end) of the buffer, which all its devices reach.
  void Add(const Buffer& buffer, std::uint64_t begin, std::uint64_t end);
  // The device that reaches most bytes; of those that reach as many the one that has most; where
  // two have as many, the one added first. Null when nothing has been.
  Device* Most() const;

 private:
  struct Entry {
    Device* device;
    std::uint64_t reached = 0;
    std::uint64_t own = 0;
  };
  absl::InlinedVector<Entry, 2> entries_;
};

// The device that has most bytes of the resident operands, as DeviceBytes counts them. Null when
// none is resident.
Device* DeviceOf(absl::Span<const OperandSource> sources);

// Copies bytes of a buffer of another device, from one element to another, to memory of the
// stream's. Errors of RunCopyAcross, and DEVICE_LOST of either device.
absl::Status FetchElsewhere(Core& core, const Buffer& buffer, std::uint64_t offset,
                            std::uint64_t bytes, Stream& stream, void* out);

// The operand on the stream's device. Inline data moves to scratch: in a message it has no
// alignment to rely on. So does what another device has: all from the operand's first element to
// its last, which source.moved_bytes then has.
absl::StatusOr<View> PlaceOnStream(Core& core, OperandSource& source, Stream& stream);

}  // namespace tessera
