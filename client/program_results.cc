#include "client/program_results.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

absl::Status OtherResult(const char* wanted) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "OTHER_RESULT",
                   absl::StrCat("the step did not give ", wanted));
}

// Calls f with the answer of the step's operation, whatever that is.
template <class F>
auto WithArray(const v1::StepResult& result, F&& f) {
  switch (result.result_case()) {
    case v1::StepResult::kReduce:
      return f(result.reduce());
    case v1::StepResult::kMatmul:
      return f(result.matmul());
    case v1::StepResult::kAdd:
      return f(result.add());
    case v1::StepResult::kWindowSum:
      return f(result.window_sum());
    default:
      return f(v1::AddResponse::default_instance());
  }
}

}  // namespace

absl::StatusOr<const v1::StepResult*> ProgramResults::Find(const StepKey& step) const {
  std::string text;
  std::int64_t number = -1;
  if (const auto* name = std::get_if<std::string>(&step.key)) {
    text = *name;
    if (const auto it = names_.find(*name); it != names_.end()) number = it->second.number;
  } else {
    number = std::get<ProgramStep>(step.key).number;
    text = absl::StrCat(number);
  }
  if (number < 0 || number >= response_.results_size()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "UNKNOWN_STEP",
                     absl::StrCat("the program has no step '", text, "'"), {{"step", text}});
  }
  const v1::StepResult& result = response_.results(static_cast<int>(number));
  if (absl::Status status = Client::StatusOf(result); !status.ok()) return status;
  return &result;
}

absl::Status ProgramResults::StatusOf(const StepKey& step) const { return Find(step).status(); }

absl::StatusOr<v1::Scalar> ProgramResults::Scalar(const StepKey& step) const {
  const auto result = Find(step);
  if (!result.ok()) return result.status();
  if ((*result)->has_dot()) return (*result)->dot().value();
  if ((*result)->reduce().has_value()) return (*result)->reduce().value();
  return OtherResult("a number");
}

absl::StatusOr<double> ProgramResults::Real(const StepKey& step) const {
  const absl::StatusOr<v1::Scalar> scalar = Scalar(step);
  if (!scalar.ok()) return scalar.status();
  return scalar->value_case() == v1::Scalar::kInteger ? static_cast<double>(scalar->integer())
                                                      : scalar->real();
}

absl::StatusOr<std::int64_t> ProgramResults::Integer(const StepKey& step) const {
  const absl::StatusOr<v1::Scalar> scalar = Scalar(step);
  if (!scalar.ok()) return scalar.status();
  if (scalar->value_case() != v1::Scalar::kInteger) return OtherResult("an integer");
  return scalar->integer();
}

absl::StatusOr<std::int64_t> ProgramResults::Index(const StepKey& step) const {
  const auto result = Find(step);
  if (!result.ok()) return result.status();
  if (!(*result)->reduce().has_value()) return OtherResult("an index");
  return (*result)->reduce().index();
}

absl::StatusOr<v1::Tensor> ProgramResults::Tensor(const StepKey& step) const {
  const auto result = Find(step);
  if (!result.ok()) return result.status();
  return WithArray(**result, [](const auto& response) -> absl::StatusOr<v1::Tensor> {
    if (!response.has_tensor()) return OtherResult("an array in the answer");
    return response.tensor();
  });
}

absl::StatusOr<v1::Buffer> ProgramResults::Buffer(const StepKey& step) const {
  const auto result = Find(step);
  if (!result.ok()) return result.status();
  return WithArray(**result, [](const auto& response) -> absl::StatusOr<v1::Buffer> {
    if (!response.has_buffer()) return OtherResult("a buffer");
    return response.buffer();
  });
}

absl::StatusOr<v1::Tensor> ProgramResults::TensorOf(const StepKey& step, v1::Dtype dtype) const {
  absl::StatusOr<v1::Tensor> tensor = Tensor(step);
  if (!tensor.ok() || tensor->dtype() == dtype) return tensor;
  return OtherResult("elements of this type");
}

absl::StatusOr<ProgramResults> ProgramResults::Execute(Client& client, const Program& program,
                                                       const CallOptions& call) {
  absl::StatusOr<v1::ExecuteResponse> response = client.Execute(program, call);
  if (!response.ok()) return response.status();
  return ProgramResults(program, *std::move(response));
}

}  // namespace tessera
