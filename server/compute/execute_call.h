// The Execute method.
#pragma once

#include <string_view>

#include "server/calls/device_call.h"
#include "server/compute/program_run.h"

namespace tessera {

class ExecuteCall final : public DeviceCall {
 public:
  using Exchange = UnaryExchangeOf<v1::ExecuteRequest, v1::ExecuteResponse>;

  ExecuteCall(const CallParts& parts, const Devices& devices, std::string_view method,
              Exchange& exchange)
      : DeviceCall(parts, devices, method, exchange),
        response_(exchange.response()),
        program_(devices, parts.records.metrics(), exchange.caller(), exchange.request()) {}

 private:
  absl::StatusOr<Device*> Prepare() override;
  TaskSize SizeOn(const Device& device) override;
  absl::Status RunOn(Stream& stream) override;
  void Release(Chores* chores) override;

  v1::ExecuteResponse& response_;
  ProgramRun program_;
};

}  // namespace tessera
