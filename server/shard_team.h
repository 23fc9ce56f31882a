// The devices that a call's operands are sharded over, as those that work on it together.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/compute.h"
#include "server/core.h"
#include "server/operands.h"

namespace tessera {

// For one operation. One thread; the core and the buffer outlive it.
class ShardTeam final : public Team {
 public:
  // The team of an operation that runs on the device; none where no operand is sharded, or where one
  // is not within reach of all devices of the first that is.
  static std::optional<ShardTeam> Of(Core& core, absl::Span<const Source> sources,
                                     const Device& device);

  ShardTeam(ShardTeam&&) = default;
  ~ShardTeam() override;

  const void* data() const override { return buffer_->data(); }
  absl::Span<const Shard> shards() const override { return buffer_->shards(); }
  absl::StatusOr<std::vector<Stream*>> Assemble(Stream& own) override;

 private:
  ShardTeam(Core& core, const Buffer& buffer) : core_(&core), buffer_(&buffer) {}

  Core* core_;
  const Buffer* buffer_;
  std::vector<Core::Bridge> streams_;
};

}  // namespace tessera
