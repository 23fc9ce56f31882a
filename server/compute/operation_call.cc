#include "server/compute/operation_call.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "server/calls/buffer_messages.h"
#include "server/compute/shard_team.h"

namespace tessera {

absl::StatusOr<Device*> OperationCall::Prepare() {
  if (Stores()) RETURN_IF_ERROR(RequireWrite());
  ASSIGN_OR_RETURN(operation_, Make());
  NoteStrategy(operation_.options.strategy);
  for (const v1::Result* destination : operation_.destinations) {
    if (destination->has_scratch()) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RESULT",
                       "only a step of a program can keep its result in scratch memory",
                       {{"field", "result"}});
    }
  }
  ASSIGN_OR_RETURN(sources_, FindSources(operation_.operands, store(), awaited()));
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
    ASSIGN_OR_RETURN(View view, PlaceOnStream(devices(), source, stream));
    views.push_back(view);
  }
  ASSIGN_OR_RETURN(ResultType type, TypeOf(operation_.spec, views));
  if (type.uncounted) {
    RETURN_IF_ERROR(CheckBeforeCount(stream, views, type));
    RunOptions options;
    devices().SetLimits(stream.device(), options);
    RETURN_IF_ERROR(CountResults(operation_.spec, stream, views, options));
    ASSIGN_OR_RETURN(type, TypeOf(operation_.spec, views));
  }
  ASSIGN_OR_RETURN(ScalarResult result, type.scalar ? RunWith(stream, views, {})
                                                    : RunArrays(stream, views, type.arrays));
  if (type.scalar) response_.SetValue(result, type);
  v1::ExecutionStats& stats = response_.stats();
  SetStats(result.stats, stream.device(), sources_, stats);
  NoteStrategy(result.stats.strategy);
  if (operation_.options.timing) NoteKernel(result.stats.kernel_us);
  stats.set_queue_us(queue_us());
  stats.set_total_us(total_us());
  return absl::OkStatus();
}

absl::Status OperationCall::CheckBeforeCount(Stream& stream, const Views& views,
                                             const ResultType& type) {
  for (std::size_t i = 0; i < type.arrays.size(); ++i) {
    const v1::Result& destination = *operation_.destinations[i];
    if (!destination.has_buffer()) continue;
    ASSIGN_OR_RETURN(const BufferSpec spec,
                     MakeSpec(destination.buffer(), type.arrays[i], stream.device(), devices()));
    RETURN_IF_ERROR(store().Check(spec));
  }
  // No pace is set: the time depends on the count, so it cannot be compared with a limit yet.
  RunOptions options = operation_.options;
  options.check_only = true;
  return tessera::Run(operation_.spec, stream, views, {}, options).status();
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
  RETURN_IF_ERROR(PlanArrays(stream.device(), types, drafts));
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
  RETURN_IF_ERROR(AnswerArrays(stream, types, memory, drafts));
  return result;
}

absl::Status OperationCall::PlanArrays(Device& device, absl::Span<const ArrayType> types,
                                       Drafts& drafts) {
  std::uint64_t inline_bytes = 0;
  for (std::size_t i = 0; i < types.size(); ++i) {
    const v1::Result& destination = *operation_.destinations[i];
    if (destination.has_buffer()) {
      ASSIGN_OR_RETURN(BufferSpec spec,
                       MakeSpec(destination.buffer(), types[i], device, devices()));
      drafts[i].emplace(store(), std::move(spec));
    }
    if (!IsInline(destination)) continue;
    RETURN_IF_ERROR(CheckInline(types[i], inline_bytes));
    inline_bytes += types[i].bytes();
  }
  return inline_bytes == 0 ? absl::OkStatus() : ChargeAnswer(inline_bytes);
}

absl::Status OperationCall::AnswerArrays(Stream& stream, absl::Span<const ArrayType> types,
                                         absl::Span<void* const> memory, Drafts& drafts) {
  absl::InlinedVector<ResultDraft*, kMostResults> results;
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (drafts[i].has_value()) results.push_back(&*drafts[i]);
    if (!IsInline(*operation_.destinations[i])) continue;
    v1::Tensor& tensor = response_.tensor(i);
    SetType(types[i], tensor);
    std::string& data = *tensor.mutable_data();
    data.resize(types[i].bytes());
    RETURN_IF_ERROR(CopyToHost(stream, data.data(), memory[i], data.size()));
  }
  if (!results.empty() && stream.stopped()) return CallerLeft();
  ASSIGN_OR_RETURN(std::vector<BufferInfo> sealed, ResultDraft::SealAll(results));
  auto info = sealed.begin();
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
