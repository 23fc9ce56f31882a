#include "client/cli/operands.h"

#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/npy.h"
#include "client/slice.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

absl::StatusOr<Operand> ReadInlineOperand(Session& session, const std::string& path) {
  constexpr std::uint64_t kRoom = std::uint64_t{64} << 10;  // for the rest of the request
  absl::StatusOr<NpyFile> file = NpyFile::Open(path);
  if (!file.ok()) return file.status();
  const NpyHeader& header = file->header();
  const auto limits = session.Limits();
  if (!limits.ok()) return limits.status();
  if (const std::uint64_t message = limits->max_message_bytes();
      header.data_bytes + kRoom > message) {
    return MakeError(absl::StatusCode::kInvalidArgument, "OPERAND_TOO_LARGE",
                     absl::StrCat(path, " has ", HumanBytes(header.data_bytes),
                                  ", but an inline operand may have at most ",
                                  HumanBytes(message - std::min(message, kRoom))));
  }
  v1::Tensor tensor;
  tensor.set_dtype(static_cast<v1::Dtype>(header.dtype));
  tensor.mutable_shape()->Add(header.shape.begin(), header.shape.end());
  tensor.mutable_data()->resize(header.data_bytes);
  absl::Status status = file->Read(0, absl::MakeSpan(*tensor.mutable_data()));
  if (!status.ok()) return status;
  return Operand(std::move(tensor));
}

}  // namespace

absl::StatusOr<Operand> ResolveOperand(Session& session, const std::string& text) {
  absl::StatusOr<ParsedOperand> parsed = ParseOperand(text);
  if (!parsed.ok()) return parsed.status();
  if (parsed->kind == ParsedOperand::Kind::kFile) return ReadInlineOperand(session, parsed->name);
  Operand operand =
      parsed->kind == ParsedOperand::Kind::kStep
          ? Operand(ProgramStep{.number = parsed->step, .output = parsed->indices ? 1u : 0u})
          : Operand(parsed->name);
  if (!parsed->subscripts.empty()) {
    const auto response = session.client.GetBuffer(parsed->name);
    if (!response.ok()) return response.status();
    const auto& shape = response->buffer().shape();
    auto view = ResolveSubscripts(
        parsed->subscripts,
        absl::MakeConstSpan(shape.data(), static_cast<std::size_t>(shape.size())));
    if (!view.ok()) return view.status();
    parsed->view = *std::move(view);
  }
  if (parsed->view) {
    v1::View view;
    view.set_offset(parsed->view->offset);
    view.mutable_shape()->Add(parsed->view->shape.begin(), parsed->view->shape.end());
    view.mutable_strides()->Add(parsed->view->strides.begin(), parsed->view->strides.end());
    operand.view = std::move(view);
  }
  return operand;
}

std::string Input::type() const {
  return absl::StrCat(DtypeText(static_cast<v1::Dtype>(dtype)), " ", ShapeText(shape));
}

absl::StatusOr<Input> ResolveInput(Session& session, const std::string& text) {
  auto operand = ResolveOperand(session, text);
  if (!operand.ok()) return operand.status();
  Input input{*std::move(operand), text};
  const auto describe = [&](v1::Dtype dtype, const auto& shape) {
    input.dtype = static_cast<DType>(dtype);
    input.shape.assign(shape.begin(), shape.end());
  };
  if (const auto* tensor = std::get_if<v1::Tensor>(&input.operand.source)) {
    describe(tensor->dtype(), tensor->shape());
  } else {
    const auto response = session.client.GetBuffer(std::get<std::string>(input.operand.source));
    if (!response.ok()) return response.status();
    describe(response->buffer().dtype(), response->buffer().shape());
    input.version = response->buffer().version();
  }
  if (const auto& view = input.operand.view)
    input.shape.assign(view->shape().begin(), view->shape().end());
  return input;
}

void AddLaunch(CLI::App& command, Launch& launch) {
  constexpr std::int64_t kMost = std::numeric_limits<std::uint32_t>::max();
  const auto add = [&](const std::string& flag, std::uint32_t& out, const std::string& what) {
    command.add_option(flag, out, what + "; default: the strategy's")
        ->check(CLI::Range(std::int64_t{0}, kMost));
  };
  add("--block-size", launch.block_size, "Threads per block");
  add("--grid-size", launch.grid_size, "Blocks");
  add("--items-per-thread", launch.items_per_thread, "Elements per thread");
}

absl::StatusOr<std::vector<int>> ParseAxes(const std::string& text) {
  std::vector<int> axes;
  if (text.empty()) return axes;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    if (!absl::SimpleAtoi(part, &axes.emplace_back())) {
      return BadOption("--axes takes whole numbers, as in 0,1 or -1");
    }
  }
  return axes;
}

}  // namespace tessera
