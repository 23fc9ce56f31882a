// Runs many small operations in a few calls.
#include <algorithm>
#include <cstddef>
#include <deque>
#include <functional>
#include <stop_token>
#include <utility>
#include <vector>

#include "client/async.h"
#include "client/client.h"
#include "client/rpc/connection.h"

namespace tessera {
namespace {

// With these limits, a call is long enough to have little overhead, short enough for several calls
// to be under way, and acceptable to any server.
constexpr int kMaxSteps = 1000;
constexpr std::size_t kMaxBytes = 1 << 20;
constexpr std::size_t kCallsUnderWay = 4;

// Executes `steps` steps. add(program, i) adds step i to a program, and get(result) returns the
// response in a step's result.
template <class Response, class Add, class Get>
std::vector<absl::StatusOr<Response>> InPrograms(Client& client, std::size_t steps,
                                                 const CallOptions& call, const Add& add,
                                                 const Get& get) {
  struct Part {
    Future<v1::ExecuteResponse> answer;
    int steps;
  };
  std::vector<absl::StatusOr<Response>> responses;
  responses.reserve(steps);
  std::deque<Part> parts;
  const auto collect = [&] {
    const std::stop_callback cancel(call.cancel, [&] { parts.front().answer.Cancel(); });
    absl::StatusOr<v1::ExecuteResponse> answer = parts.front().answer.Get();
    for (int i = 0; i < parts.front().steps; ++i) {
      if (!answer.ok()) {
        responses.push_back(answer.status());
      } else if (absl::Status status = Client::StatusOf(answer->results(i)); !status.ok()) {
        responses.push_back(std::move(status));
      } else {
        responses.push_back(std::move(*get(*answer->mutable_results(i))));
      }
    }
    parts.pop_front();
  };
  for (std::size_t next = 0; next < steps && !call.cancel.stop_requested();) {
    Program program;
    program.WantStats();
    std::size_t bytes = 0;
    while (next < steps && bytes < kMaxBytes && program.request().steps_size() < kMaxSteps) {
      add(program, next++);
      bytes += program.request().steps().rbegin()->ByteSizeLong();
    }
    if (parts.size() == kCallsUnderWay) collect();
    const int count = program.request().steps_size();
    parts.push_back({client.Async().Execute(program, call), count});
  }
  while (!parts.empty()) collect();
  responses.resize(steps, Cancelled());
  return responses;
}

}  // namespace

std::vector<absl::StatusOr<v1::DotResponse>> Client::Dots(
    absl::Span<const std::pair<Operand, Operand>> pairs, const CallOptions& call) {
  return InPrograms<v1::DotResponse>(
      *this, pairs.size(), call,
      [&](Program& program, std::size_t i) { program.Dot(pairs[i].first, pairs[i].second); },
      [](v1::StepResult& result) { return result.mutable_dot(); });
}

std::vector<absl::StatusOr<v1::ReduceResponse>> Client::Reduces(ReduceOp op,
                                                                absl::Span<const Operand> operands,
                                                                const CallOptions& call) {
  return InPrograms<v1::ReduceResponse>(
      *this, operands.size(), call,
      [&](Program& program, std::size_t i) { program.Reduce(op, operands[i]); },
      [](v1::StepResult& result) { return result.mutable_reduce(); });
}

}  // namespace tessera
