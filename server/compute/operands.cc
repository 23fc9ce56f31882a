#include "server/compute/operands.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "server/rpc/convert.h"

namespace tessera {

using absl::StatusCode;

namespace {

// The range of bytes from a view's lowest element to its highest.
struct Extent {
  std::uint64_t begin = 0;  // an address, like the view's data
  std::uint64_t end = 0;
  std::uint64_t bytes() const { return end - begin; }
};

Extent ExtentOf(const View& view) {
  const auto first = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(view.data));
  if (view.elements() == 0) return {first, first};
  std::int64_t lowest = 0, highest = 0;
  for (int i = 0; i < view.shape.rank; ++i) {
    const std::int64_t reach = (view.shape[i] - 1) * view.strides[static_cast<std::size_t>(i)];
    (reach < 0 ? lowest : highest) += reach;
  }
  const auto size = static_cast<std::int64_t>(SizeOf(view.dtype));
  return {first + static_cast<std::uint64_t>(lowest * size),
          first + static_cast<std::uint64_t>((highest + 1) * size)};
}

}  // namespace

absl::StatusOr<ArrayType> TensorType(const v1::Tensor& tensor) {
  absl::StatusOr<ArrayType> type = MakeArrayType(tensor.dtype(), tensor.shape(), "tensor");
  if (!type.ok()) return type;
  if (tensor.data().size() == type->bytes()) {
    const HostBytes bytes{tensor.data().data(), tensor.data().size()};
    RETURN_IF_ERROR(CheckElements(type->dtype, bytes, 0));
    return type;
  }
  return MakeError(StatusCode::kInvalidArgument, "BAD_OPERAND",
                   "the data of an inline operand does not fit its dtype and shape",
                   {{"field", "tensor.data"},
                    {"value", absl::StrCat(tensor.data().size())},
                    {"expected", absl::StrCat(type->bytes())}});
}

absl::Status CheckVersion(const v1::Operand& operand) {
  if (operand.version() == 0 || operand.has_buffer()) return absl::OkStatus();
  return MakeError(StatusCode::kInvalidArgument, "BAD_OPERAND", "only buffers have versions",
                   {{"field", "version"}, {"value", absl::StrCat(operand.version())}});
}

absl::StatusOr<Sources> FindSources(absl::Span<const Named> operands, BufferStore& store,
                                    Awaited& awaited) {
  absl::InlinedVector<BufferStore::Wanted, 2> wanted;
  for (const Named& named : operands) {
    const v1::Operand& operand = *named.operand;
    if (!operand.has_tensor() && (!operand.has_buffer() || operand.buffer().empty())) {
      return OfOperand(named.name, MakeError(StatusCode::kInvalidArgument, "BAD_OPERAND",
                                             "an operand must name a buffer or carry a tensor",
                                             {{"field", "source"}}));
    }
    if (operand.output() != 0) return OfOperand(named.name, BadOutput(operand.output()));
    if (const absl::Status status = CheckVersion(operand); !status.ok())
      return OfOperand(named.name, status);
    wanted.push_back({operand.buffer(), operand.version()});
  }
  store.FindAll(absl::MakeSpan(wanted), awaited);
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
    if (!type.ok()) return OfOperand(named.name, type.status());
    const absl::StatusOr<View> view = MakeView(*named.operand, *type, nullptr);
    if (!view.ok()) return OfOperand(named.name, view.status());
    sources.push_back({named, std::move(wanted[i].buffer), *type, *view});
  }
  return sources;
}

std::shared_ptr<const Buffer> BufferAt(absl::Span<const OperandSource> sources,
                                       const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  for (const OperandSource& source : sources) {
    if (source.buffer == nullptr) continue;
    const auto begin = reinterpret_cast<std::uintptr_t>(source.buffer->data());
    if (at >= begin && at - begin < source.buffer->type().bytes()) return source.buffer;
  }
  return nullptr;
}

void MarkScattered(const OperationSpec& spec, absl::Span<OperandSource> sources) {
  if (!std::holds_alternative<MatmulSpec>(spec) || sources.size() != 2) return;
  const auto shards_of = [](const OperandSource& source) {
    return source.buffer == nullptr ? absl::Span<const Shard>() : source.buffer->shards();
  };
  const absl::Span<const Shard> a = shards_of(sources[0]), b = shards_of(sources[1]);
  if (a.size() < 2 || b.size() < 2) return;
  const bool is_small = sources[1].type.bytes() <= a.size() * a.front().device->info().shard_unit;
  sources[1].scattered = is_small && std::any_of(a.begin(), a.end(), [&](const Shard& shard) {
                           return !sources[1].buffer->IsOn(*shard.device);
                         });
}

void DeviceBytes::Add(const Buffer& buffer, std::uint64_t begin, std::uint64_t end) {
  for (const Shard& shard : buffer.shards()) {
    auto entry = std::find_if(entries_.begin(), entries_.end(),
                              [&](const Entry& one) { return one.device == shard.device; });
    if (entry == entries_.end()) entry = entries_.insert(entry, Entry{shard.device});
    entry->reached += end - begin;
    const std::uint64_t first = std::max(begin, shard.begin), last = std::min(end, shard.end);
    if (first < last) entry->own += last - first;
  }
}

Device* DeviceBytes::Most() const {
  const auto most =
      std::max_element(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
        return std::pair(a.reached, a.own) < std::pair(b.reached, b.own);
      });
  return most == entries_.end() ? nullptr : most->device;
}

Device* DeviceOf(absl::Span<const OperandSource> sources) {
  DeviceBytes bytes;
  for (const OperandSource& source : sources) {
    if (source.buffer == nullptr) continue;
    const Extent extent = ExtentOf(source.view);
    bytes.Add(*source.buffer, extent.begin, extent.end);
  }
  return bytes.Most();
}

absl::Status FetchElsewhere(const Devices& devices, const Buffer& buffer, std::uint64_t offset,
                            std::uint64_t bytes, Stream& stream, void* out) {
  Device& device = buffer.device();
  const DType dtype = buffer.type().dtype;
  const View view{.data = static_cast<const char*>(buffer.data()) + offset,
                  .dtype = dtype,
                  .shape = {.rank = 1, .dims = {static_cast<std::int64_t>(bytes / SizeOf(dtype))}},
                  .strides = {1}};
  RunOptions options;
  devices.SetLimits(device, options);
  ASSIGN_OR_RETURN(const Devices::Bridge bridge, devices.BridgeTo(device));
  return RunCopyAcross(*bridge, view, dtype, stream, out, options);
}

absl::StatusOr<View> PlaceOnStream(const Devices& devices, OperandSource& source, Stream& stream) {
  View view = source.view;
  const auto begin_at = [&](const void* begin) {
    view.data = static_cast<const char*>(begin) + reinterpret_cast<std::uintptr_t>(view.data);
  };
  if (source.IsElsewhere(stream.device())) {
    const Extent extent = ExtentOf(view);
    ASSIGN_OR_RETURN(void* memory, Scratch(stream, extent.bytes()));
    absl::Status status =
        FetchElsewhere(devices, *source.buffer, extent.begin, extent.bytes(), stream, memory);
    if (!status.ok()) return OfOperand(source.named.name, status);
    source.moved_bytes = extent.bytes();
    // The first element is not at the lowest address if a stride is negative.
    const std::uint64_t first = reinterpret_cast<std::uintptr_t>(view.data) - extent.begin;
    view.data = memory == nullptr ? nullptr : static_cast<const char*>(memory) + first;
  } else if (source.buffer != nullptr) {
    begin_at(source.buffer->data());
  } else {
    const std::string& data = source.named.operand->tensor().data();
    ASSIGN_OR_RETURN(void* memory, Scratch(stream, data.size()));
    RETURN_IF_ERROR(CopyToDevice(stream, memory, data.data(), data.size()));
    begin_at(memory);
  }
  return view;
}

}  // namespace tessera
