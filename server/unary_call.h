// Unary calls, from their acceptance until their answers have been sent.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "google/protobuf/message.h"
#include "grpcpp/grpcpp.h"
#include "server/answers.h"
#include "server/core.h"

namespace tessera {

// Holds its ticket and the memory of its messages, which gRPC keeps, until gRPC is done with it;
// then it deletes itself. An answer that nobody takes for --download-timeout ends the call.
class UnaryCall : public grpc::ServerUnaryReactor {
 public:
  UnaryCall(Core& core, std::string_view method, grpc::CallbackServerContext& context)
      : core_(core), method_(method), context_(context) {}

  // UNAVAILABLE / DRAINING; the errors of Core::CheckSize; RESOURCE_EXHAUSTED /
  // HOST_MEMORY_EXHAUSTED.
  absl::Status Accept(std::size_t request_bytes);
  // Host memory for an answer, and for what leads to it, of so many bytes in all: RESOURCE_EXHAUSTED
  // / HOST_MEMORY_EXHAUSTED.
  absl::Status ChargeAnswer(std::size_t bytes);
  // Fills the answer by body(), which gives its Status, and charges it as a message of many parts,
  // whose objects take more than their encoding. What there is no memory for is freed at once.
  template <class Response, class Body>
  absl::Status Fill(Response& answer, Body& body) {
    absl::Status status = body();
    if (!status.ok()) return status;
    status = ChargeAnswer(answer.SpaceUsedLong() + answer.ByteSizeLong());
    if (!status.ok()) answer = Response();
    return status;
  }
  // With the answer in place. Once; the call may not be touched afterwards. Logs what failed.
  void End(const absl::Status& status);

 protected:
  Core& core() const { return core_; }

 private:
  void OnDone() final;
  // Whether gRPC may react on the thread that finds a reason to, rather than hand it to one of its
  // executor: once the call has its answer, what is left to do is short.
  bool InternalInlineable() final { return ended_; }

  Core& core_;
  const std::string_view method_;
  grpc::CallbackServerContext& context_;
  Core::Accepted accepted_;
  Charge answer_memory_;
  Answers::Entry answer_;
  std::atomic<bool> ended_{false};
};

// A unary call that only looks things up: body() gives its Status, and fills the response, at once.
template <class Response, class Body>
grpc::ServerUnaryReactor* Answer(Core& core, std::string_view method,
                                 grpc::CallbackServerContext& context,
                                 const google::protobuf::Message& request, Response& response,
                                 Body body) {
  auto* call = new UnaryCall(core, method, context);
  call->End(Guarded([&]() -> absl::Status {
    absl::Status status = call->Accept(request.ByteSizeLong());
    return status.ok() ? call->Fill(response, body) : status;
  }));
  return call;
}

// A unary call that may take or free memory, or ask the system: body() runs on a thread of the
// chores. Request and response live until the call is done.
template <class Response, class Body>
grpc::ServerUnaryReactor* AnswerLater(Core& core, std::string_view method,
                                      grpc::CallbackServerContext& context,
                                      const google::protobuf::Message& request, Response& response,
                                      Body body) {
  auto* call = new UnaryCall(core, method, context);
  const absl::Status status = Guarded([&]() -> absl::Status {
    if (absl::Status accepted = call->Accept(request.ByteSizeLong()); !accepted.ok())
      return accepted;
    return core.chores().Submit([call, &response, body = std::move(body)]() mutable {
      call->End(Guarded([&] { return call->Fill(response, body); }));
    });
  });
  if (!status.ok()) call->End(status);
  return call;
}

}  // namespace tessera
