#include "server/buffer_messages.h"

#include "server/convert.h"

namespace tessera {

absl::StatusOr<BufferSpec> MakeSpec(const std::string& name, const v1::BufferSpec& proto,
                                    const Core& core) {
  BufferSpec spec{.name = name, .replace = proto.replace()};
  absl::StatusOr<ArrayType> type = MakeArrayType(proto.dtype(), proto.shape(), "spec");
  if (!type.ok()) return type.status();
  spec.type = *type;
  absl::StatusOr<Device*> device = core.FindDevice(proto.device());
  if (!device.ok()) return device.status();
  spec.device = *device;
  if (absl::Status status = SetTtl(proto, spec.ttl); !status.ok()) return status;
  return spec;
}

absl::StatusOr<BufferSpec> MakeSpec(const v1::BufferTarget& target, const ArrayType& type,
                                    Device& device) {
  BufferSpec spec{
      .name = target.name(), .type = type, .device = &device, .replace = target.replace()};
  if (absl::Status status = SetTtl(target, spec.ttl); !status.ok()) return status;
  return spec;
}

void SetBuffer(const BufferInfo& info, v1::Buffer* out) {
  const Buffer& buffer = *info.buffer;
  out->set_name(buffer.name());
  out->set_dtype(ToProto(buffer.type().dtype));
  SetShape(buffer.type().shape, out->mutable_shape());
  out->set_size_bytes(buffer.type().bytes());
  out->set_state(info.ready ? v1::Buffer::STATE_READY : v1::Buffer::STATE_WRITING);
  out->set_committed_bytes(info.committed_bytes);
  *out->mutable_create_time() = ToProto(buffer.create_time());
  if (info.expire_time != absl::InfiniteFuture()) {
    *out->mutable_expire_time() = ToProto(info.expire_time);
  }
  out->set_device(buffer.device().info().name);
  out->set_version(info.version);
  if (info.checksum.has_value()) out->set_crc32c(*info.checksum);
}

}  // namespace tessera
