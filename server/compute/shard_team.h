// The devices that hold the shards of a call's operands and that work on the call together.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/compute.h"
#include "server/compute/operands.h"
#include "server/compute/operations.h"
#include "server/devices/devices.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// Used for one operation, by one thread. The devices and the buffer must outlive it.
class ShardTeam final : public Team {
 public:
  // Returns the team for an operation that runs on the device. There is no team if no operand is
  // sharded, or if some device of the first sharded operand cannot access all other operands and
  // results. A product is divided according to its first operand. Its second operand may be on one
  // device only, originally or as a copy.
  static std::optional<ShardTeam> Of(const Devices& devices, const OperationSpec& spec,
                                     const Destinations& destinations,
                                     absl::Span<const OperandSource> sources, const Device& device);

  ShardTeam(ShardTeam&&) = default;
  ~ShardTeam() override;

  const void* data() const override { return buffer_->data(); }
  absl::Span<const Shard> shards() const override { return buffer_->shards(); }
  absl::StatusOr<std::vector<Stream*>> Assemble(Stream& own) override;

 private:
  static std::optional<ShardTeam> Of(const Devices& devices,
                                     absl::Span<const OperandSource> sources, const Device& device,
                                     bool by_first);
  // Whether all devices can access memory with this placement. An empty placement means memory of
  // the operation's device.
  bool Reaches(const google::protobuf::RepeatedPtrField<std::string>& placement) const;

  ShardTeam(const Devices& devices, const Buffer& buffer) : devices_(&devices), buffer_(&buffer) {}

  const Devices* devices_;
  const Buffer* buffer_;
  std::vector<Devices::Member> streams_;
};

}  // namespace tessera
