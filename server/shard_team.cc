#include "server/shard_team.h"

#include <algorithm>
#include <memory>

namespace tessera {

std::optional<ShardTeam> ShardTeam::Of(Core& core, absl::Span<const Source> sources,
                                       const Device& device) {
  const auto first = std::find_if(sources.begin(), sources.end(), [](const Source& source) {
    return source.buffer != nullptr && source.buffer->shards().size() > 1;
  });
  if (first == sources.end() || !first->buffer->IsOn(device)) return std::nullopt;
  for (const Source& source : sources) {
    if (source.buffer == nullptr) return std::nullopt;
    for (const Shard& shard : first->buffer->shards())
      if (!source.buffer->IsOn(*shard.device)) return std::nullopt;
  }
  return ShardTeam(core, *first->buffer);
}

ShardTeam::~ShardTeam() {
  for (Core::Bridge& taken : streams_) {
    // What became of the work has been told.
    EndRequest(taken.stream).IgnoreError();
    taken.stream.WatchStop(nullptr);
  }
}

absl::StatusOr<std::vector<Stream*>> ShardTeam::Assemble(Stream& own) {
  for (const std::unique_ptr<Device>& device : core_->devices()) {
    if (device.get() == &own.device() || !buffer_->IsOn(*device)) continue;
    if (device->lost()) return DeviceLostError(*device);
    streams_.push_back(core_->TeamStream(*device));
    Stream& stream = streams_.back().stream;
    stream.WatchStop(own.stop());
    if (absl::Status status = BeginRequest(stream); !status.ok()) return status;
  }
  std::vector<Stream*> streams;
  for (const Shard& shard : shards()) {
    const auto taken = std::find_if(streams_.begin(), streams_.end(), [&](const Core::Bridge& one) {
      return &one.stream.device() == shard.device;
    });
    streams.push_back(taken == streams_.end() ? &own : &taken->stream);
  }
  return streams;
}

}  // namespace tessera
