#include "server/calls/buffer_messages.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "server/clock.h"
#include "server/rpc/convert.h"

namespace tessera {
namespace {

// Returns the devices of a placement, the errors of Devices::Find, or INVALID_ARGUMENT /
// BAD_PLACEMENT.
absl::StatusOr<std::vector<Device*>> FindPlacement(
    const google::protobuf::RepeatedPtrField<std::string>& names, const Devices& all) {
  const auto bad = [](std::string_view message, const std::string& value) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_PLACEMENT", message,
                     {{"field", "placement"}, {"value", value}});
  };
  std::vector<Device*> devices;
  if (names.size() == 1 && names[0] == kAllDevices) {
    const Backend kind = all.First().info().backend;
    for (const std::unique_ptr<Device>& device : all.list()) {
      if (!device->lost() && device->info().backend == kind) devices.push_back(device.get());
    }
    if (devices.empty()) return DeviceLostError(all.First());
    return devices;
  }
  for (const std::string& name : names) {
    if (name.empty() || name == kAllDevices)
      return bad("a placement must be a list of device names, or only \"all\"", name);
    absl::StatusOr<Device*> device = all.Find(name);
    if (!device.ok()) {
      absl::Status status = device.status();
      SetErrorMetadata(status, "field", "placement");
      return status;
    }
    if (std::find(devices.begin(), devices.end(), *device) != devices.end())
      return bad("a placement must not name a device twice", name);
    if (!devices.empty() && (*device)->info().backend != devices.front()->info().backend)
      return bad("the devices of a placement must be of the same kind", name);
    devices.push_back(*device);
  }
  return devices;
}

}  // namespace

absl::Status SetPlace(const std::string& device,
                      const google::protobuf::RepeatedPtrField<std::string>& placement,
                      const Devices& all, BufferSpec& spec) {
  if (placement.empty()) {
    ASSIGN_OR_RETURN(spec.device, all.Find(device));
    spec.placement.clear();
    return absl::OkStatus();
  }
  if (!device.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_PLACEMENT",
                     "a buffer may have a device or a placement, but not both",
                     {{"field", "device"}, {"value", device}});
  }
  ASSIGN_OR_RETURN(spec.placement, FindPlacement(placement, all));
  spec.device = spec.placement.front();
  return absl::OkStatus();
}

absl::StatusOr<BufferSpec> MakeSpec(const std::string& name, const v1::BufferSpec& proto,
                                    const Devices& all) {
  BufferSpec spec{.name = name, .replace = proto.replace()};
  ASSIGN_OR_RETURN(spec.type, MakeArrayType(proto.dtype(), proto.shape(), "spec"));
  RETURN_IF_ERROR(SetPlace(proto.device(), proto.placement(), all, spec));
  RETURN_IF_ERROR(SetTtl(proto, spec.ttl));
  return spec;
}

absl::StatusOr<BufferSpec> MakeSpec(const v1::BufferTarget& target, const ArrayType& type,
                                    Device& device, const Devices& all) {
  BufferSpec spec{
      .name = target.name(), .type = type, .device = &device, .replace = target.replace()};
  if (!target.placement().empty()) {
    absl::StatusOr<std::vector<Device*>> placement = FindPlacement(target.placement(), all);
    if (!placement.ok()) return placement.status();
    if (std::find(placement->begin(), placement->end(), &device) == placement->end()) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_PLACEMENT",
                       "a result's devices must include the one where the operation runs",
                       {{"field", "placement"},
                        {"value", absl::StrJoin(target.placement(), ", ")},
                        {"device", device.info().name}});
    }
    spec.placement = *std::move(placement);
    spec.reached_by = &device;
  }
  RETURN_IF_ERROR(SetTtl(target, spec.ttl));
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
    *out->mutable_expire_time() = ToProto(info.expire_time + WallAhead());
  }
  out->set_device(buffer.device().info().name);
  if (buffer.shards().size() > 1) {
    for (const Shard& shard : buffer.shards()) {
      v1::Shard* part = out->add_shards();
      part->set_device(shard.device->info().name);
      part->set_begin(shard.begin);
      part->set_end(shard.end);
    }
  }
  out->set_version(info.version);
  if (info.checksum.has_value()) out->set_crc32c(*info.checksum);
}

}  // namespace tessera
