// Finds the results of a program by its steps:
//
//   tessera::Program program;
//   const auto scores = program.Matmul("queries", "items", false, true, {}, {.scratch = true});
//   program.Name("best", program.Reduce(tessera::ReduceOp::kMax, scores));
//   absl::StatusOr<tessera::ProgramResults> results =
//       tessera::ProgramResults::Execute(client, program);
//   absl::StatusOr<double> best = results->Real("best");
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/arrays.h"
#include "client/client.h"

namespace tessera {

// Identifies a step or one of its results, by the ProgramStep that a method of Program returned or
// by the name that was passed to Program::Name.
struct StepKey {
  StepKey(ProgramStep step) : key(step) {}               // NOLINT(google-explicit-constructor)
  StepKey(const char* name) : key(std::string(name)) {}  // NOLINT(google-explicit-constructor)
  StepKey(std::string name) : key(std::move(name)) {}    // NOLINT(google-explicit-constructor)

  std::variant<ProgramStep, std::string> key;
};

// Every method returns the step's error if the step failed, INVALID_ARGUMENT / UNKNOWN_STEP {step}
// if the program has no such step, and FAILED_PRECONDITION / OTHER_RESULT if the step has another
// kind of result. Const methods are thread safe.
class ProgramResults {
 public:
  // Calls Client::Execute and returns its errors.
  static absl::StatusOr<ProgramResults> Execute(Client& client, const Program& program,
                                                const CallOptions& call = {});
  // response: the response of Client::Execute or AsyncClient::Execute for this program.
  ProgramResults(const Program& program, v1::ExecuteResponse response)
      : names_(program.names()), response_(std::move(response)) {}

  const v1::ExecuteResponse& response() const { return response_; }
  absl::Status StatusOf(const StepKey& step) const;
  // Returns the number that a Dot, or a Reduce without axes, returned. Integers beyond 2^53 are
  // rounded.
  absl::StatusOr<double> Real(const StepKey& step) const;
  // Returns the number that ALL, ANY or an operation on integers returned.
  absl::StatusOr<std::int64_t> Integer(const StepKey& step) const;
  // Returns the position that ARGMIN or ARGMAX without axes returned.
  absl::StatusOr<std::int64_t> Index(const StepKey& step) const;
  // Returns an array that is in the response.
  absl::StatusOr<v1::Tensor> Tensor(const StepKey& step) const;
  // Returns the new buffer of a step with a target.
  absl::StatusOr<v1::Buffer> Buffer(const StepKey& step) const;
  // Returns the elements of an array in the response, as Elements<T> in client/arrays.h does.
  template <class T>
  absl::StatusOr<std::vector<T>> Values(const StepKey& step) const {
    const absl::StatusOr<v1::Tensor> tensor = Tensor(step);
    if (!tensor.ok()) return tensor.status();
    return Elements<T>(*tensor);
  }

 private:
  // The response for a step, and which of the step's results is meant.
  struct Found {
    const v1::StepResult* result;
    std::uint32_t output;
  };
  absl::StatusOr<Found> Find(const StepKey& step) const;
  template <class T, class Member>
  absl::StatusOr<T> Take(const StepKey& step, Member member, const char* wanted) const;

  std::map<std::string, ProgramStep> names_;
  v1::ExecuteResponse response_;
};

}  // namespace tessera
