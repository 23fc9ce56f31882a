// The Execute method.
#pragma once

#include <optional>

#include "google/protobuf/arena.h"
#include "grpcpp/grpcpp.h"
#include "server/calls/device_call.h"
#include "server/compute/program_run.h"

namespace tessera {

// Reads its request and writes its response as bytes, in an arena, so that a step costs no
// allocation.
class ExecuteCall final : public DeviceCall {
 public:
  using Exchange = UnaryExchangeOf<grpc::ByteBuffer, grpc::ByteBuffer>;

  ExecuteCall(Core& core, Exchange& exchange)
      : DeviceCall(core, "Execute", exchange),
        exchange_(exchange),
        response_(exchange.response()) {}

 private:
  absl::StatusOr<Device*> Prepare() override;
  TaskSize SizeOn(const Device& device) override;
  absl::Status RunOn(Stream& stream) override;
  void Release(Chores* chores) override;

  Exchange& exchange_;
  grpc::ByteBuffer& response_;
  std::optional<google::protobuf::Arena> arena_;
  std::optional<ProgramRun> program_;
};

}  // namespace tessera
