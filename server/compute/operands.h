// Finds the operands of a request and places them on a stream.
#pragma once

#include <memory>
#include <string_view>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/compute.h"
#include "kernels/run/operation.h"
#include "server/buffers/buffer_store.h"
#include "server/devices/devices.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// An operand of a request, with the name that errors use for it.
struct Named {
  std::string_view name;
  const v1::Operand* operand;
};
// The number of operands that a vector holds in place. Memory is allocated if there are more.
inline constexpr std::size_t kOperandsInPlace = 2;
using NamedOperands = absl::InlinedVector<Named, kOperandsInPlace>;

// An operand that a call holds from its acceptance to its end.
struct OperandSource {
  Named named;
  std::shared_ptr<const Buffer> buffer;  // null for inline data and steps' results
  ArrayType type;
  View view;                      // as if the array began at address 0
  std::uint64_t moved_bytes = 0;  // copied from another device for this operand
  bool scattered = false;         // a device of the operation cannot access it

  // Whether the operand must be copied to the device, because it is on another device or scattered.
  bool IsElsewhere(const Device& device) const {
    return buffer != nullptr && (scattered || !buffer->IsOn(device));
  }
  // Whether the operand is inline or entirely in this device's memory.
  bool IsReached(const Device& device) const {
    return buffer == nullptr || (!IsElsewhere(device) && buffer->shards().size() == 1);
  }
  std::uint64_t version() const { return buffer != nullptr ? buffer->version() : 0; }
};
using Sources = absl::InlinedVector<OperandSource, kOperandsInPlace>;
using Views = absl::InlinedVector<View, kOperandsInPlace>;

// Returns the type of an inline operand, or INVALID_ARGUMENT / BAD_OPERAND if its data does not
// have the size of that type.
absl::StatusOr<ArrayType> TensorType(const v1::Tensor& tensor);

// Returns INVALID_ARGUMENT / BAD_OPERAND {field, value} if an operand that is not a buffer has a
// version.
absl::Status CheckVersion(const v1::Operand& operand);

// Finds all operands of a call at one point in time, and checks their views. Their bytes may be
// used once everything in `awaited` has arrived.
absl::StatusOr<Sources> FindSources(absl::Span<const Named> operands, BufferStore& store,
                                    Awaited& awaited);

// Returns the buffer of the resident operand that contains the address, or null if there is none.
std::shared_ptr<const Buffer> BufferAt(absl::Span<const OperandSource> sources,
                                       const void* address);

// For a product of two operands, marks b as scattered if it is too small to have a shard on
// every device that has a shard of a.
void MarkScattered(const OperationSpec& spec, absl::Span<OperandSource> sources);

// Counts, for each device, the bytes of a call's operands that the device can access. The call runs
// on the device to which the fewest bytes must be copied.
class DeviceBytes {
 public:
  // Adds the bytes [begin, end) of the buffer. Every device of the buffer can access all of them.
  void Add(const Buffer& buffer, std::uint64_t begin, std::uint64_t end);
  // Returns the device that can access the most bytes. Among several, returns the one that has the
  // most bytes in its own memory or, if that is not unique, the one that was added first. Returns
  // null if nothing was added.
  Device* Most() const;

 private:
  struct Entry {
    Device* device;
    std::uint64_t reached = 0;
    std::uint64_t own = 0;
  };
  absl::InlinedVector<Entry, 2> entries_;
};

// Returns the device that has the most bytes of the resident operands, as DeviceBytes counts them,
// or null if no operand is resident.
Device* DeviceOf(absl::Span<const OperandSource> sources);

// Copies a range of a buffer on another device to memory of the stream's device. The range must
// begin and end at an element boundary. Returns the errors of RunCopyAcross, or DEVICE_LOST for
// either device.
absl::Status FetchElsewhere(const Devices& devices, const Buffer& buffer, std::uint64_t offset,
                            std::uint64_t bytes, Stream& stream, void* out);

// Returns the operand's view on the stream's device. Copies inline data to scratch memory, because
// its alignment in a message is arbitrary. Copies an operand on another device to scratch memory
// too, from its first element to its last, and sets source.moved_bytes.
absl::StatusOr<View> PlaceOnStream(const Devices& devices, OperandSource& source, Stream& stream);

}  // namespace tessera
