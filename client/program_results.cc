#include "client/program_results.h"

#include <variant>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

absl::Status OtherResult(const char* wanted) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "OTHER_RESULT",
                   absl::StrCat("the step did not return ", wanted));
}

// The array and the buffer in an operation's result. Each is null if the result does not have it.
struct Arrays {
  const v1::Tensor* tensor = nullptr;
  const v1::Buffer* buffer = nullptr;
};

Arrays ArraysIn(const v1::StepResult& result, std::uint32_t output) {
  const auto of = [&](const auto& response) -> Arrays {
    if constexpr (requires { response.tensor(); }) {
      return {response.has_tensor() ? &response.tensor() : nullptr,
              response.has_buffer() ? &response.buffer() : nullptr};
    } else if constexpr (requires { response.indices(); }) {
      if (output != 0) {
        return {response.has_indices() ? &response.indices() : nullptr,
                response.has_indices_buffer() ? &response.indices_buffer() : nullptr};
      }
      return {response.has_values() ? &response.values() : nullptr,
              response.has_values_buffer() ? &response.values_buffer() : nullptr};
    } else {
      return {};
    }
  };
  return VisitOperation(result, of, [] { return Arrays(); });
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
  const v1::Tensor* tensor = ArraysIn(*result->result, result->output).tensor;
  if (tensor == nullptr) return OtherResult("an inline array");
  return *tensor;
}

absl::StatusOr<v1::Buffer> ProgramResults::Buffer(const StepKey& step) const {
  const auto result = Find(step);
  if (!result.ok()) return result.status();
  const v1::Buffer* buffer = ArraysIn(*result->result, result->output).buffer;
  if (buffer == nullptr) return OtherResult("a buffer");
  return *buffer;
}

absl::StatusOr<v1::Tensor> ProgramResults::TensorOf(const StepKey& step, DType dtype) const {
  absl::StatusOr<v1::Tensor> tensor = Tensor(step);
  if (tensor.ok() && static_cast<DType>(tensor->dtype()) != dtype)
    return OtherResult("elements of this type");
  return tensor;
}

absl::StatusOr<ProgramResults> ProgramResults::Execute(Client& client, const Program& program,
                                                       const CallOptions& call) {
  absl::StatusOr<v1::ExecuteResponse> response = client.Execute(program, call);
  if (!response.ok()) return response.status();
  return ProgramResults(program, *std::move(response));
}

}  // namespace tessera
