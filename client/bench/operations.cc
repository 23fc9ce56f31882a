#include "client/bench/operations.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "client/bench/transfers.h"

namespace tessera::bench {
namespace {

// method(stub, ...) calls one method, either on the stub itself or on stub.async().
template <class Stub, class Request, class Response, class Method>
class UnaryCall final : public Call {
 public:
  UnaryCall(Stub& stub, Request request, Method method)
      : stub_(stub), request_(std::move(request)), method_(method) {}
  void Start() override {
    context_.emplace();
    method_(*stub_.async(), &*context_, &request_, &response_,
            [this](const grpc::Status& status) { done(status); });
  }
  grpc::Status Run() override {
    context_.emplace();
    return method_(stub_, &*context_, request_, &response_);
  }

 private:
  Stub& stub_;
  const Request request_;
  const Method method_;
  std::optional<grpc::ClientContext> context_;
  Response response_;
};

template <class Response, class Stub, class Request, class Method>
std::unique_ptr<Call> Unary(Stub& stub, Request request, Method method) {
  return std::make_unique<UnaryCall<Stub, Request, Response, Method>>(stub, std::move(request),
                                                                      method);
}

std::unique_ptr<Call> Ping(Channels& channels, int caller, std::int64_t) {
  return Unary<grpc::health::v1::HealthCheckResponse>(
      channels.health(caller), grpc::health::v1::HealthCheckRequest(),
      [](auto& stub, auto&&... of_call) { return stub.Check(of_call...); });
}

void PutVectors(Channels& channels, std::int64_t elements) {
  for (const char* name : {"a", "b"})
    Put(channels.buffers(0), BufferName(name, elements), {elements});
}

std::unique_ptr<Call> Dot(Channels& channels, int caller, std::int64_t elements) {
  v1::DotRequest request;
  request.mutable_a()->set_buffer(BufferName("a", elements));
  request.mutable_b()->set_buffer(BufferName("b", elements));
  return Unary<v1::DotResponse>(channels.compute(caller), std::move(request),
                                [](auto& stub, auto&&... of_call) { return stub.Dot(of_call...); });
}

std::unique_ptr<Call> Reduce(Channels& channels, int caller, std::int64_t elements) {
  v1::ReduceRequest request;
  request.mutable_x()->set_buffer(BufferName("a", elements));
  request.set_op(v1::REDUCE_OP_SUM);
  return Unary<v1::ReduceResponse>(
      channels.compute(caller), std::move(request),
      [](auto& stub, auto&&... of_call) { return stub.Reduce(of_call...); });
}

void PutMatrices(Channels& channels, std::int64_t side) {
  for (const char* name : {"ma", "mb"})
    Put(channels.buffers(0), BufferName(name, side), {side, side});
}

std::unique_ptr<Call> Matmul(Channels& channels, int caller, std::int64_t side) {
  v1::MatmulRequest request;
  request.mutable_a()->set_buffer(BufferName("ma", side));
  request.mutable_b()->set_buffer(BufferName("mb", side));
  v1::BufferTarget& result = *request.mutable_result()->mutable_buffer();
  result.set_name(BufferName("product", caller));
  result.set_replace(true);
  return Unary<v1::MatmulResponse>(
      channels.compute(caller), std::move(request),
      [](auto& stub, auto&&... of_call) { return stub.Matmul(of_call...); });
}

// The number of elements in the operands of programs.
constexpr std::int64_t kProgramElements = 4096;

void PutForPrograms(Channels& channels, std::int64_t) { PutVectors(channels, kProgramElements); }

std::unique_ptr<Call> Program(Channels& channels, int caller, v1::ExecuteRequest request) {
  return Unary<v1::ExecuteResponse>(
      channels.compute(caller), std::move(request),
      [](auto& stub, auto&&... of_call) { return stub.Execute(of_call...); });
}

// A program of `steps` Dots. Consecutive Dots have different operands.
std::unique_ptr<Call> Dots(Channels& channels, int caller, std::int64_t steps) {
  v1::ExecuteRequest request;
  for (std::int64_t i = 0; i < steps; ++i) {
    v1::DotRequest& dot = *request.add_steps()->mutable_dot();
    dot.mutable_a()->set_buffer(BufferName(i % 2 == 0 ? "a" : "b", kProgramElements));
    dot.mutable_b()->set_buffer(BufferName("b", kProgramElements));
  }
  return Program(channels, caller, std::move(request));
}

// A program of ten operations, each on the result of the previous one: nine Adds and a Reduce.
std::unique_ptr<Call> Chain(Channels& channels, int caller, std::int64_t) {
  v1::ExecuteRequest request;
  const std::string buffer = BufferName("a", kProgramElements);
  for (std::uint32_t i = 0; i < 9; ++i) {
    v1::AddRequest& add = *request.add_steps()->mutable_add();
    if (i == 0) {
      add.mutable_a()->set_buffer(buffer);
    } else {
      add.mutable_a()->set_step(i - 1);
    }
    add.mutable_b()->set_buffer(buffer);
    add.mutable_result()->set_scratch(true);
  }
  v1::ReduceRequest& reduce = *request.add_steps()->mutable_reduce();
  reduce.mutable_x()->set_step(8);
  reduce.set_op(v1::REDUCE_OP_SUM);
  return Program(channels, caller, std::move(request));
}

constexpr std::array kOperations = {
    Operation{"ping", "", nullptr, Ping},
    Operation{"dot", "elements", PutVectors, Dot},
    Operation{"reduce", "elements", PutVectors, Reduce},
    Operation{"matmul", "side", PutMatrices, Matmul},
    Operation{"dots", "steps", PutForPrograms, Dots},
    Operation{"chain", "", PutForPrograms, Chain},
    Operation{"upload", "MiB", nullptr, MakeUpload},
    Operation{"download", "MiB", PutForDownload, MakeDownload},
    Operation{"upload_shared", "MiB", nullptr, MakeSharedUpload},
    Operation{"download_shared", "MiB", PutForDownload, MakeSharedDownload},
};

}  // namespace

std::span<const Operation> Operations() { return kOperations; }

const Operation* FindOperation(std::string_view name) {
  const auto found =
      std::find_if(kOperations.begin(), kOperations.end(),
                   [&](const Operation& operation) { return operation.name == name; });
  return found == kOperations.end() ? nullptr : &*found;
}

std::uint64_t WorkOf(const Operation& operation, std::int64_t size) {
  if (operation.size_unit == "MiB") return static_cast<std::uint64_t>(size) << 20;
  return operation.size_unit == "steps" ? static_cast<std::uint64_t>(size) : 1;
}

}  // namespace tessera::bench
