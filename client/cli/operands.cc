#include "client/cli/operands.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/npy.h"
#include "client/slice.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

Operand ReadInlineOperand(Session& session, const std::string& path) {
  constexpr std::uint64_t kRoom = std::uint64_t{64} << 10;  // for the rest of the request
  const NpyFile file = OrThrow(NpyFile::Open(path));
  const NpyHeader& header = file.header();
  if (const std::uint64_t message = session.Limits().max_message_bytes();
      header.data_bytes + kRoom > message) {
    ThrowInvalid("OPERAND_TOO_LARGE", absl::StrCat(path, " has ", HumanBytes(header.data_bytes),
                                                   ", but an inline operand may have at most ",
                                                   HumanBytes(message - std::min(message, kRoom))));
  }
  v1::Tensor tensor;
  tensor.set_dtype(static_cast<v1::Dtype>(header.dtype));
  tensor.mutable_shape()->Add(header.shape.begin(), header.shape.end());
  tensor.mutable_data()->resize(header.data_bytes);
  OrThrow(file.Read(0, absl::MakeSpan(*tensor.mutable_data())));
  return tensor;
}

}  // namespace

Operand ResolveOperand(Session& session, const std::string& text) {
  ParsedOperand parsed = OrThrow(ParseOperand(text));
  if (parsed.kind == ParsedOperand::Kind::kFile) return ReadInlineOperand(session, parsed.name);
  Operand operand =
      parsed.kind == ParsedOperand::Kind::kStep
          ? Operand(ProgramStep{.number = parsed.step, .output = parsed.indices ? 1u : 0u})
          : Operand(parsed.name);
  if (!parsed.subscripts.empty()) {
    const v1::GetBufferResponse response = OrThrow(session.client.GetBuffer(parsed.name));
    parsed.view = OrThrow(ResolveSubscripts(parsed.subscripts, response.buffer().shape()));
  }
  if (parsed.view) {
    v1::View& view = operand.view.emplace();
    view.set_offset(parsed.view->offset);
    view.mutable_shape()->Add(parsed.view->shape.begin(), parsed.view->shape.end());
    view.mutable_strides()->Add(parsed.view->strides.begin(), parsed.view->strides.end());
  }
  return operand;
}

std::string Input::type() const {
  return absl::StrCat(DtypeText(static_cast<v1::Dtype>(dtype)), " ", ShapeText(shape));
}

Input ResolveInput(Session& session, const std::string& text) {
  Input input{ResolveOperand(session, text), text};
  const auto describe = [&](const auto& array) {
    input.dtype = static_cast<DType>(array.dtype());
    input.shape.assign(array.shape().begin(), array.shape().end());
  };
  if (const auto* tensor = std::get_if<v1::Tensor>(&input.operand.source)) {
    describe(*tensor);
  } else {
    const v1::GetBufferResponse response =
        OrThrow(session.client.GetBuffer(std::get<std::string>(input.operand.source)));
    describe(response.buffer());
    input.version = response.buffer().version();
  }
  if (const auto& view = input.operand.view)
    input.shape.assign(view->shape().begin(), view->shape().end());
  return input;
}

CLI::Option* AddOperand(CLI::App& command, const std::string& name, std::string& text,
                        const std::string& description) {
  return command.add_option(name, text, description)->type_name("OPERAND")->required();
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

}  // namespace tessera
