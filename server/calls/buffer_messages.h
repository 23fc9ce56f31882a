// Between the messages about buffers and the store.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "server/core.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// What a placement calls all devices of the server of the kind of the first one.
inline constexpr std::string_view kAllDevices = "all";

// Where a new buffer goes, from the fields device and placement of a message; without both, the
// first device. The errors of Core::FindDevice; INVALID_ARGUMENT / BAD_PLACEMENT {field, value}.
absl::Status SetPlace(const std::string& device,
                      const google::protobuf::RepeatedPtrField<std::string>& placement,
                      const Core& core, BufferSpec& spec);

// What a client asks for. The errors of MakeArrayType, SetPlace and FromProto of a ttl.
absl::StatusOr<BufferSpec> MakeSpec(const std::string& name, const v1::BufferSpec& proto,
                                    const Core& core);

// The buffer of a result of an operation that runs on the device. The errors of SetPlace;
// INVALID_ARGUMENT / BAD_TTL.
absl::StatusOr<BufferSpec> MakeSpec(const v1::BufferTarget& target, const ArrayType& type,
                                    Device& device, const Core& core);

void SetBuffer(const BufferInfo& info, v1::Buffer* out);

}  // namespace tessera
