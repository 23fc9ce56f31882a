#include "server/compute/shard_team.h"

#include <algorithm>
#include <memory>

#include "kernels/base/status_macros.h"
#include "server/calls/buffer_messages.h"

namespace tessera {

std::optional<ShardTeam> ShardTeam::Of(const Devices& devices, const OperationSpec& spec,
                                       const Destinations& destinations,
                                       absl::Span<const OperandSource> sources,
                                       const Device& device) {
  const bool by_first = std::holds_alternative<MatmulSpec>(spec);
  std::optional<ShardTeam> team = Of(devices, sources, device, by_first);
  for (const v1::Result* result : destinations) {
    if (team.has_value() && !team->Reaches(result->buffer().placement())) return std::nullopt;
  }
  return team;
}

std::optional<ShardTeam> ShardTeam::Of(const Devices& devices,
                                       absl::Span<const OperandSource> sources,
                                       const Device& device, bool by_first) {
  const auto is_sharded = [](const OperandSource& source) {
    return source.buffer != nullptr && source.buffer->shards().size() > 1;
  };
  const auto first = std::find_if(sources.begin(), sources.end(), is_sharded);
  if (first == sources.end() || !first->buffer->IsOn(device)) return std::nullopt;
  if (by_first && first != sources.begin()) return std::nullopt;
  for (const OperandSource& source : sources) {
    // Devices that share memory with this device can access operands that are only on this device,
    // including copies of operands from other devices.
    if (by_first && (!is_sharded(source) || source.IsElsewhere(device))) continue;
    if (source.buffer == nullptr) return std::nullopt;
    for (const Shard& shard : first->buffer->shards())
      if (!source.buffer->IsOn(*shard.device)) return std::nullopt;
  }
  return ShardTeam(devices, *first->buffer);
}

bool ShardTeam::Reaches(const google::protobuf::RepeatedPtrField<std::string>& placement) const {
  if (placement.empty() || placement[0] == kAllDevices) return true;
  return std::all_of(shards().begin(), shards().end(), [&](const Shard& shard) {
    return std::find(placement.begin(), placement.end(), shard.device->info().name) !=
           placement.end();
  });
}

ShardTeam::~ShardTeam() {
  for (Devices::Member& taken : streams_) {
    // The outcome of the work has already been reported.
    EndRequest(taken.stream).IgnoreError();
    taken.stream.WatchStop(nullptr);
  }
}

absl::StatusOr<std::vector<Stream*>> ShardTeam::Assemble(Stream& own) {
  for (const std::unique_ptr<Device>& device : devices_->list()) {
    if (device.get() == &own.device() || !buffer_->IsOn(*device)) continue;
    if (device->lost()) return DeviceLostError(*device);
    streams_.push_back(devices_->TeamStream(*device));
    Stream& stream = streams_.back().stream;
    stream.WatchStop(own.stop());
    RETURN_IF_ERROR(BeginRequest(stream));
  }
  std::vector<Stream*> streams;
  for (const Shard& shard : shards()) {
    const auto taken = std::find_if(
        streams_.begin(), streams_.end(),
        [&](const Devices::Member& one) { return &one.stream.device() == shard.device; });
    streams.push_back(taken == streams_.end() ? &own : &taken->stream);
  }
  return streams;
}

}  // namespace tessera
