// The operands of an operation, from the request to views on a stream.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/compute.h"
#include "server/buffer_store.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// An operand of a request, under the name that errors call it by.
struct Named {
  std::string_view name;
  const v1::Operand* operand;
};
using NamedOperands = absl::InlinedVector<Named, 2>;

// An operand as a call holds it between its acceptance and its end.
struct Source {
  Named named;
  std::shared_ptr<const Buffer> buffer;  // null: inline, or the result of a step
  ArrayType type;
  View view;                 // as if the array began at address 0
  std::uint64_t offset = 0;  // of an inline operand in the memory of a program

  std::uint64_t version() const { return buffer != nullptr ? buffer->version() : 0; }
};
using Sources = absl::InlinedVector<Source, 2>;
using Views = absl::InlinedVector<View, 2>;

// The error as one of this operand.
absl::Status OfOperand(const Named& named, const absl::Status& status);

// The type of an inline operand: INVALID_ARGUMENT / BAD_OPERAND unless its data has that size.
absl::StatusOr<ArrayType> TensorType(const v1::Tensor& tensor);

// All operands of a call, as they are at one moment, and checked with their views.
absl::StatusOr<Sources> FindSources(absl::Span<const Named> operands, BufferStore& store);

// The one device of those operands that are resident, null when none is. FAILED_PRECONDITION /
// DEVICE_MISMATCH.
absl::StatusOr<Device*> DeviceOf(absl::Span<const Source> sources);

// The operand on the stream's device. Inline data moves to scratch: in a message it has no
// alignment to rely on.
absl::StatusOr<View> PlaceOnStream(const Source& source, Stream& stream);

}  // namespace tessera
