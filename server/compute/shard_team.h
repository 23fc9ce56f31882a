// The devices over which a call's operands are sharded, which work on the call together.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/compute.h"
#include "server/compute/operands.h"
#include "server/compute/operations.h"
#include "server/core.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// For one operation and one thread. The core and the buffer outlive it.
class ShardTeam final : public Team {
 public:
  // Returns the team of an operation that runs on the device. There is none if no operand is
  // sharded, or if not all devices of the first sharded operand reach every other operand and
  // result. A product is divided by its first operand; the other one may be on one device, or have
  // been copied to it.
  static std::optional<ShardTeam> Of(Core& core, const OperationSpec& spec,
                                     const Destinations& destinations,
                                     absl::Span<const OperandSource> sources, const Device& device);

  ShardTeam(ShardTeam&&) = default;
  ~ShardTeam() override;

  const void* data() const override { return buffer_->data(); }
  absl::Span<const Shard> shards() const override { return buffer_->shards(); }
  absl::StatusOr<std::vector<Stream*>> Assemble(Stream& own) override;

 private:
  static std::optional<ShardTeam> Of(Core& core, absl::Span<const OperandSource> sources,
                                     const Device& device, bool by_first);
  // Whether all devices can access memory with this placement; an empty one means memory of the
  // operation's device.
  bool Reaches(const google::protobuf::RepeatedPtrField<std::string>& placement) const;

  ShardTeam(Core& core, const Buffer& buffer) : core_(&core), buffer_(&buffer) {}

  Core* core_;
  const Buffer* buffer_;
  std::vector<Core::Bridge> streams_;
};

}  // namespace tessera
