// The Execute method.
#pragma once

#include <optional>

#include "google/protobuf/arena.h"
#include "grpcpp/grpcpp.h"
#include "server/device_call.h"
#include "server/program_run.h"

namespace tessera {

// Reads its message and writes its answer as bytes, in an arena: a step costs no allocation.
class ExecuteCall final : public DeviceCall {
 public:
  ExecuteCall(Core& core, UnaryExchangeOf<grpc::ByteBuffer, grpc::ByteBuffer>& exchange)
      : DeviceCall(core, "Execute", exchange), response_(exchange.response()) {}

  // Like DeviceCall::Start.
  void Start(const grpc::ByteBuffer& request);

 private:
  absl::StatusOr<Device*> Prepare() override;
  TaskSize SizeOn(const Device& device) override;
  absl::Status RunOn(Stream& stream) override;
  void Release() override;

  grpc::ByteBuffer request_;
  grpc::ByteBuffer& response_;
  std::optional<google::protobuf::Arena> arena_;
  Charge memory_;  // of the request, once it is parsed
  std::optional<ProgramRun> program_;
};

}  // namespace tessera
