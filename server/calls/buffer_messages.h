// Conversions between messages about buffers and the types of the store.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "server/buffers/buffer_store.h"
#include "server/devices/devices.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// The placement that means all devices of the server that are of the same kind as the first one.
inline constexpr std::string_view kAllDevices = "all";

// Sets the devices of a new buffer according to a message's fields `device` and `placement`. If
// both are empty, the buffer goes to the first device. Returns the errors of Devices::Find, or
// INVALID_ARGUMENT / BAD_PLACEMENT {field, value}.
absl::Status SetPlace(const std::string& device,
                      const google::protobuf::RepeatedPtrField<std::string>& placement,
                      const Devices& devices, BufferSpec& spec);

// Returns the spec of the buffer that a client requests, or the errors of MakeArrayType, SetPlace
// and FromProto(ttl).
absl::StatusOr<BufferSpec> MakeSpec(const std::string& name, const v1::BufferSpec& proto,
                                    const Devices& devices);

// Returns the spec of the buffer for the result of an operation that runs on the device, the errors
// of SetPlace, or INVALID_ARGUMENT / BAD_TTL.
absl::StatusOr<BufferSpec> MakeSpec(const v1::BufferTarget& target, const ArrayType& type,
                                    Device& device, const Devices& devices);

void SetBuffer(const BufferInfo& info, v1::Buffer* out);

}  // namespace tessera
