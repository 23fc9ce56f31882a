// Between the messages about buffers and the store.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "server/core.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// What a client asks for. The errors of MakeArrayType, Core::FindDevice and FromProto of a ttl.
absl::StatusOr<BufferSpec> MakeSpec(const std::string& name, const v1::BufferSpec& proto,
                                    const Core& core);

// The buffer of a result. INVALID_ARGUMENT / BAD_TTL.
absl::StatusOr<BufferSpec> MakeSpec(const v1::BufferTarget& target, const ArrayType& type,
                                    Device& device);

void SetBuffer(const BufferInfo& info, v1::Buffer* out);

}  // namespace tessera
