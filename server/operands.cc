#include "server/operands.h"

#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "server/convert.h"

namespace tessera {

using absl::StatusCode;

absl::Status OfOperand(const Named& named, const absl::Status& status) {
  const std::string name(named.name);
  absl::Status about(status.code(),
                     absl::StrCat("operand ", name, ": ", std::string(status.message())));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { about.SetPayload(url, payload); });
  SetErrorMetadata(about, "operand", name);
  return about;
}

absl::StatusOr<ArrayType> TensorType(const v1::Tensor& tensor) {
  absl::StatusOr<ArrayType> type = MakeArrayType(tensor.dtype(), tensor.shape(), "tensor");
  if (!type.ok() || tensor.data().size() == type->bytes()) return type;
  return MakeError(StatusCode::kInvalidArgument, "BAD_OPERAND",
                   "the data of an inline operand does not fit its dtype and shape",
                   {{"field", "tensor.data"},
                    {"value", absl::StrCat(tensor.data().size())},
                    {"expected", absl::StrCat(type->bytes())}});
}

absl::StatusOr<Sources> FindSources(absl::Span<const Named> operands, BufferStore& store) {
  absl::InlinedVector<BufferStore::Wanted, 2> wanted;
  for (const Named& named : operands) {
    const v1::Operand& operand = *named.operand;
    if (!operand.has_tensor() && (!operand.has_buffer() || operand.buffer().empty())) {
      return OfOperand(named,
                       MakeError(StatusCode::kInvalidArgument, "BAD_OPERAND",
                                 "it must name a buffer or carry a tensor", {{"field", "source"}}));
    }
    wanted.push_back({operand.buffer(), operand.version()});
  }
  store.FindAll(absl::MakeSpan(wanted));
  Sources sources;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const Named& named = operands[i];
    if (!wanted[i].status.ok()) {
      SetErrorMetadata(wanted[i].status, "operand", named.name);
      return wanted[i].status;
    }
    absl::StatusOr<ArrayType> type = wanted[i].buffer != nullptr
                                         ? wanted[i].buffer->type()
                                         : TensorType(named.operand->tensor());
    if (!type.ok()) return OfOperand(named, type.status());
    const absl::StatusOr<View> view = MakeView(*named.operand, *type, nullptr);
    if (!view.ok()) return OfOperand(named, view.status());
    sources.push_back({named, std::move(wanted[i].buffer), *type, *view});
  }
  return sources;
}

absl::StatusOr<Device*> DeviceOf(absl::Span<const Source> sources) {
  const Buffer* first = nullptr;
  for (const Source& source : sources) {
    const Buffer* buffer = source.buffer.get();
    if (first == nullptr) first = buffer;
    if (buffer != nullptr && &buffer->device() != &first->device()) {
      return MakeError(StatusCode::kFailedPrecondition, "DEVICE_MISMATCH",
                       "the operands live on different devices; copy one to the other's",
                       {{first->name(), first->device().info().name},
                        {buffer->name(), buffer->device().info().name}});
    }
  }
  return first != nullptr ? &first->device() : nullptr;
}

absl::StatusOr<View> PlaceOnStream(const Source& source, Stream& stream) {
  const void* begin = nullptr;
  if (source.buffer != nullptr) {
    begin = source.buffer->data();
  } else {
    const std::string& data = source.named.operand->tensor().data();
    absl::StatusOr<void*> memory = Scratch(stream, data.size());
    if (!memory.ok()) return memory.status();
    absl::Status status = CopyToDevice(stream, *memory, data.data(), data.size());
    if (!status.ok()) return status;
    begin = *memory;
  }
  View view = source.view;
  view.data = static_cast<const char*>(begin) + reinterpret_cast<std::uintptr_t>(view.data);
  return view;
}

}  // namespace tessera
