// Unary calls that run one operation.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/buffers/buffer_store.h"
#include "server/calls/device_call.h"
#include "server/compute/operands.h"
#include "server/compute/operations.h"

namespace tessera {

// A call that holds its operands from its acceptance to its end, and fills in the response.
class OperationCall : public DeviceCall {
 protected:
  OperationCall(const CallParts& parts, const Devices& devices, std::string_view method,
                UnaryExchange& exchange, OperationResponse response)
      : DeviceCall(parts, devices, method, exchange), response_(response) {}

 private:
  // Whether the request stores a result.
  virtual bool Stores() const = 0;
  // Converts the request to an operation. Called once.
  virtual absl::StatusOr<Operation> Make() = 0;

  absl::StatusOr<Device*> Prepare() final;
  TaskSize SizeOn(const Device& device) final;
  absl::Status RunOn(Stream& stream) final;
  void Release(Chores* chores) final;

  // The drafts of the result arrays that become buffers.
  using Drafts = std::array<std::optional<ResultDraft>, kMostResults>;

  // Checks what can be checked before the length of the results is known.
  absl::Status CheckBeforeCount(Stream& stream, const Views& views, const ResultType& type);
  absl::StatusOr<ScalarResult> RunWith(Stream& stream, const Views& views,
                                       absl::Span<const Output> out);
  absl::StatusOr<ScalarResult> RunArrays(Stream& stream, const Views& views,
                                         absl::Span<const ArrayType> types);
  // Creates a draft for each array that becomes a buffer, and reserves space in the response for
  // the others.
  absl::Status PlanArrays(Device& device, absl::Span<const ArrayType> types, Drafts& drafts);
  // Fills in the response. Buffers get their names only after everything else has succeeded.
  absl::Status AnswerArrays(Stream& stream, absl::Span<const ArrayType> types,
                            absl::Span<void* const> memory, Drafts& drafts);

  Operation operation_;
  OperationResponse response_;
  Sources sources_;
};

template <class Request, class Response>
class OperationCallOf final : public OperationCall {
 public:
  OperationCallOf(const CallParts& parts, const Devices& devices, std::string_view method,
                  UnaryExchangeOf<Request, Response>& exchange)
      : OperationCall(parts, devices, method, exchange, OperationResponse(exchange.response())),
        request_(exchange.request()) {}

 private:
  bool Stores() const override { return tessera::Stores(request_); }
  absl::StatusOr<Operation> Make() override { return MakeOperation(request_); }

  const Request& request_;
};

}  // namespace tessera
