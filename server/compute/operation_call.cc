#include "server/compute/operation_call.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "server/calls/buffer_messages.h"
#include "server/compute/shard_team.h"

namespace tessera {

absl::StatusOr<Device*> OperationCall::Prepare() {
  if (Stores())
    if (absl::Status status = RequireWrite(); !status.ok()) return status;
  absl::StatusOr<Operation> made = Make();
  if (!made.ok()) return made.status();
  operation_ = *std::move(made);
  NoteStrategy(operation_.options.strategy);
  for (const v1::Result* destination : operation_.destinations) {
    if (destination->has_scratch()) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RESULT",
                       "only a step of a program can keep its result in scratch memory",
                       {{"field", "result"}});
    }
  }
  absl::StatusOr<Sources> sources = FindSources(operation_.operands, store());
  if (!sources.ok()) return sources.status();
  sources_ = *std::move(sources);
  MarkScattered(operation_.spec, absl::MakeSpan(sources_));
  Device* const device = DeviceOf(sources_);
  return device != nullptr ? device : &devices().First();
}

TaskSize OperationCall::SizeOn(const Device& device) {
  for (const OperandSource& source : sources_)
    if (!source.IsReached(device)) return TaskSize::kLarge;
  if (!operation_.options.strategy.empty()) return TaskSize::kLarge;
  Views views;
  for (const OperandSource& source : sources_) views.push_back(source.view);
  const absl::StatusOr<ResultType> type = TypeOf(operation_.spec, views);
  if (!type.ok()) return TaskSize::kTiny;  // it will be refused
  const double least = LeastMicroseconds(operation_.spec, views, device.info().backend) +
                       TravelMicroseconds(sources_, operation_.destinations, &*type, device);
  return SizeOf(least, !operation_.options.timing);
}

absl::Status OperationCall::RunOn(Stream& stream) {
  Views views;
  for (OperandSource& source : sources_) {
    absl::StatusOr<View> view = PlaceOnStream(devices(), source, stream);
    if (!view.ok()) return view.status();
    views.push_back(*view);
  }
  absl::StatusOr<ResultType> type = TypeOf(operation_.spec, views);
  if (!type.ok()) return type.status();
  absl::StatusOr<ScalarResult> result =
      type->scalar ? RunWith(stream, views, {}) : RunArrays(stream, views, type->arrays);
  if (!result.ok()) return result.status();
  if (type->scalar) response_.SetValue(*result, *type);
  v1::ExecutionStats& stats = response_.stats();
  SetStats(result->stats, stream.device(), sources_, stats);
  NoteStrategy(result->stats.strategy);
  if (operation_.options.timing) NoteKernel(result->stats.kernel_us);
  stats.set_queue_us(queue_us());
  stats.set_total_us(total_us());
  return absl::OkStatus();
}

absl::StatusOr<ScalarResult> OperationCall::RunWith(Stream& stream, const Views& views,
                                                    absl::Span<const Output> out) {
  RunOptions options = operation_.options;
  devices().SetLimits(stream.device(), options);
  std::optional<ShardTeam> team =
      ShardTeam::Of(devices(), operation_.spec, operation_.destinations, sources_, stream.device());
  if (team.has_value()) options.team = &*team;
  const auto find = [this](const void* address) { return BufferAt(sources_, address); };
  PreparedOperands::Call prepared(store().prepared(stream.device()), stream, find);
  absl::StatusOr<ScalarResult> result = tessera::Run(operation_.spec, stream, views, out, options);
  if (result.ok()) {
    result->stats.prepared_bytes = prepared.EndOperation(/*done=*/true);
    prepared.Finish();
  }
  return result;
}

absl::StatusOr<ScalarResult> OperationCall::RunArrays(Stream& stream, const Views& views,
                                                      absl::Span<const ArrayType> types) {
  Drafts drafts;
  if (absl::Status status = PlanArrays(stream.device(), types, drafts); !status.ok()) return status;
  std::array<void*, kMostResults> memory{};
  const auto open = [&](std::size_t i) -> absl::StatusOr<void*> {
    if (stream.stopped()) return CallerLeft();
    absl::StatusOr<void*> opened =
        drafts[i].has_value() ? drafts[i]->Open() : Scratch(stream, types[i].bytes());
    if (opened.ok()) memory[i] = *opened;
    return opened;
  };
  const auto first = [&] { return open(0); };
  const auto second = [&] { return open(1); };
  const Output outputs[kMostResults] = {first, second};
  absl::StatusOr<ScalarResult> result = RunWith(stream, views, outputs);
  if (!result.ok()) return result;
  absl::Status answered = AnswerArrays(stream, types, memory, drafts);
  if (!answered.ok()) return answered;
  return result;
}

absl::Status OperationCall::PlanArrays(Device& device, absl::Span<const ArrayType> types,
                                       Drafts& drafts) {
  std::uint64_t inline_bytes = 0;
  for (std::size_t i = 0; i < types.size(); ++i) {
    const v1::Result& destination = *operation_.destinations[i];
    if (destination.has_buffer()) {
      absl::StatusOr<BufferSpec> spec = MakeSpec(destination.buffer(), types[i], device, devices());
      if (!spec.ok()) return spec.status();
      drafts[i].emplace(store(), *std::move(spec));
      continue;
    }
    if (absl::Status status = CheckInline(types[i], inline_bytes); !status.ok()) return status;
    inline_bytes += types[i].bytes();
  }
  return inline_bytes == 0 ? absl::OkStatus() : ChargeAnswer(inline_bytes);
}

absl::Status OperationCall::AnswerArrays(Stream& stream, absl::Span<const ArrayType> types,
                                         absl::Span<void* const> memory, Drafts& drafts) {
  absl::InlinedVector<ResultDraft*, kMostResults> results;
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (drafts[i].has_value()) {
      results.push_back(&*drafts[i]);
      continue;
    }
    v1::Tensor& tensor = response_.tensor(i);
    SetType(types[i], tensor);
    std::string& data = *tensor.mutable_data();
    data.resize(types[i].bytes());
    absl::Status copied = CopyToHost(stream, data.data(), memory[i], data.size());
    if (!copied.ok()) return copied;
  }
  if (!results.empty() && stream.stopped()) return CallerLeft();
  absl::StatusOr<std::vector<BufferInfo>> sealed = ResultDraft::SealAll(results);
  if (!sealed.ok()) return sealed.status();
  auto info = sealed->begin();
  for (std::size_t i = 0; i < types.size(); ++i)
    if (drafts[i].has_value()) SetBuffer(*info++, &response_.buffer(i));
  return absl::OkStatus();
}

void OperationCall::Release(Chores* chores) {
  if (chores != nullptr)
    for (OperandSource& source : sources_) chores->Release(std::move(source.buffer));
  sources_.clear();
  operation_ = {};
}

}  // namespace tessera
