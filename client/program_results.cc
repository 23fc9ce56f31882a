#include "client/program_results.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

absl::Status OtherResult(const char* wanted) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "OTHER_RESULT",
                   absl::StrCat("the step did not return ", wanted));
}

// Calls f with the array and the buffer in an operation's result. Each is null if the result does
// not have it.
template <class F>
auto WithArray(const v1::StepResult& result, std::uint32_t output, F&& f) {
  const auto of = [&](const auto& response) {
    if constexpr (requires { response.tensor(); }) {
      return f(response.has_tensor() ? &response.tensor() : nullptr,
               response.has_buffer() ? &response.buffer() : nullptr);
    } else if constexpr (requires { response.indices(); }) {
      if (output != 0) {
        return f(response.has_indices() ? &response.indices() : nullptr,
                 response.has_indices_buffer() ? &response.indices_buffer() : nullptr);
      }
      return f(response.has_values() ? &response.values() : nullptr,
               response.has_values_buffer() ? &response.values_buffer() : nullptr);
    } else {
      return f(static_cast<const v1::Tensor*>(nullptr), static_cast<const v1::Buffer*>(nullptr));
    }
  };
  return VisitOperation(result, of, [&] { return of(v1::DotResponse::default_instance()); });
}

}  // namespace

absl::StatusOr<ProgramResults::Found> ProgramResults::Find(const StepKey& step) const {
  std::string text;
  std::int64_t number = -1;
  std::uint32_t output = 0;
  if (const auto* name = std::get_if<std::string>(&step.key)) {
    text = *name;
    if (const auto it = names_.find(*name); it != names_.end()) {
      number = it->second.number;
      output = it->second.output;
    }
  } else {
    number = std::get<ProgramStep>(step.key).number;
    output = std::get<ProgramStep>(step.key).output;
    text = absl::StrCat(number);
  }
  if (number < 0 || number >= response_.results_size()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "UNKNOWN_STEP",
                     absl::StrCat("the program has no step '", text, "'"), {{"step", text}});
  }
  const v1::StepResult& result = response_.results(static_cast<int>(number));
  if (absl::Status status = Client::StatusOf(result); !status.ok()) return status;
  return Found{&result, output};
}

absl::Status ProgramResults::StatusOf(const StepKey& step) const { return Find(step).status(); }

absl::StatusOr<v1::Scalar> ProgramResults::Scalar(const StepKey& step) const {
  const auto result = Find(step);
  if (!result.ok()) return result.status();
  if (result->result->has_dot()) return result->result->dot().value();
  if (result->result->reduce().has_value()) return result->result->reduce().value();
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
  if (!result->result->reduce().has_index()) return OtherResult("an index");
  return result->result->reduce().index();
}

absl::StatusOr<v1::Tensor> ProgramResults::Tensor(const StepKey& step) const {
  const auto result = Find(step);
  if (!result.ok()) return result.status();
  return WithArray(*result->result, result->output,
                   [](const v1::Tensor* tensor, const v1::Buffer*) -> absl::StatusOr<v1::Tensor> {
                     if (tensor == nullptr) return OtherResult("an inline array");
                     return *tensor;
                   });
}

absl::StatusOr<v1::Buffer> ProgramResults::Buffer(const StepKey& step) const {
  const auto result = Find(step);
  if (!result.ok()) return result.status();
  return WithArray(*result->result, result->output,
                   [](const v1::Tensor*, const v1::Buffer* buffer) -> absl::StatusOr<v1::Buffer> {
                     if (buffer == nullptr) return OtherResult("a buffer");
                     return *buffer;
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
