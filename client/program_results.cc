#include "client/program_results.h"

#include <optional>
#include <variant>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

// What a step's result has. A part is null if the result does not have it.
struct ResultParts {
  const v1::Scalar* number = nullptr;
  std::optional<std::int64_t> index = {};
  const v1::Tensor* tensor = nullptr;
  const v1::Buffer* buffer = nullptr;
};

// output: which of the arrays of a TopK is meant.
ResultParts PartsOf(const v1::StepResult& result, std::uint32_t output) {
  ResultParts parts;
  if (result.has_dot()) parts.number = &result.dot().value();
  if (result.reduce().has_value()) parts.number = &result.reduce().value();
  if (result.reduce().has_index()) parts.index = result.reduce().index();
  const auto find_arrays = [&](const auto& response) {
    if constexpr (requires { response.tensor(); }) {
      if (response.has_tensor()) parts.tensor = &response.tensor();
      if (response.has_buffer()) parts.buffer = &response.buffer();
    } else if constexpr (requires { response.indices(); }) {
      if (output == 0) {
        if (response.has_values()) parts.tensor = &response.values();
        if (response.has_values_buffer()) parts.buffer = &response.values_buffer();
      } else {
        if (response.has_indices()) parts.tensor = &response.indices();
        if (response.has_indices_buffer()) parts.buffer = &response.indices_buffer();
      }
    }
  };
  VisitOperation(result, find_arrays, [] {});
  return parts;
}

absl::Status OtherResult(const char* wanted) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "OTHER_RESULT",
                   absl::StrCat("the step did not return ", wanted));
}

}  // namespace

absl::StatusOr<ProgramResults::Found> ProgramResults::Find(const StepKey& key) const {
  const auto* name = std::get_if<std::string>(&key.key);
  const auto* step = std::get_if<ProgramStep>(&key.key);
  if (name != nullptr)
    if (const auto it = names_.find(*name); it != names_.end()) step = &it->second;
  if (step == nullptr || step->number >= static_cast<std::uint32_t>(response_.results_size())) {
    const std::string text = name != nullptr ? *name : absl::StrCat(step->number);
    return MakeError(absl::StatusCode::kInvalidArgument, "UNKNOWN_STEP",
                     absl::StrCat("the program has no step '", text, "'"), {{"step", text}});
  }
  const v1::StepResult& result = response_.results(static_cast<int>(step->number));
  if (absl::Status status = Client::StatusOf(result); !status.ok()) return status;
  return Found{&result, step->output};
}

// Returns a member of ResultParts.
template <class T, class Member>
absl::StatusOr<T> ProgramResults::Take(const StepKey& step, Member member,
                                       const char* wanted) const {
  const absl::StatusOr<Found> found = Find(step);
  if (!found.ok()) return found.status();
  const auto part = PartsOf(*found->result, found->output).*member;
  if (!part) return OtherResult(wanted);
  return *part;
}

absl::Status ProgramResults::StatusOf(const StepKey& step) const { return Find(step).status(); }

absl::StatusOr<double> ProgramResults::Real(const StepKey& step) const {
  const auto number = Take<v1::Scalar>(step, &ResultParts::number, "a number");
  if (!number.ok()) return number.status();
  return number->has_integer() ? static_cast<double>(number->integer()) : number->real();
}

absl::StatusOr<std::int64_t> ProgramResults::Integer(const StepKey& step) const {
  const auto number = Take<v1::Scalar>(step, &ResultParts::number, "a number");
  if (!number.ok()) return number.status();
  if (!number->has_integer()) return OtherResult("an integer");
  return number->integer();
}

absl::StatusOr<std::int64_t> ProgramResults::Index(const StepKey& step) const {
  return Take<std::int64_t>(step, &ResultParts::index, "an index");
}

absl::StatusOr<v1::Tensor> ProgramResults::Tensor(const StepKey& step) const {
  return Take<v1::Tensor>(step, &ResultParts::tensor, "an inline array");
}

absl::StatusOr<v1::Buffer> ProgramResults::Buffer(const StepKey& step) const {
  return Take<v1::Buffer>(step, &ResultParts::buffer, "a buffer");
}

absl::StatusOr<ProgramResults> ProgramResults::Execute(Client& client, const Program& program,
                                                       const CallOptions& call) {
  absl::StatusOr<v1::ExecuteResponse> response = client.Execute(program, call);
  if (!response.ok()) return response.status();
  return ProgramResults(program, *std::move(response));
}

}  // namespace tessera
