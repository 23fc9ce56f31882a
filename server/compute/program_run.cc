#include "server/compute/program_run.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "server/calls/buffer_messages.h"
#include "server/calls/device_call.h"
#include "server/compute/shard_team.h"
#include "server/rpc/convert.h"

namespace tessera {
namespace {

using Kind = PlannedOperand::Kind;

// The maximum number of bytes that a result adds to the response, apart from an array's data.
constexpr std::uint64_t kResultBytes = 512;
// The maximum number of bytes of tags and lengths around an error.
constexpr std::uint64_t kFraming = 32;
// The 4 MiB that clients accept, minus kMaxInlineResult.
constexpr std::uint64_t kAnswerMargin = 64 << 10;

absl::Status BadOperand(std::string_view field, std::string_view what, std::uint32_t value) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPERAND", what,
                   {{"field", std::string(field)}, {"value", absl::StrCat(value)}});
}

}  // namespace

// --- Before the queue ---

std::uint64_t ProgramRun::memory() const {
  std::uint64_t bytes = 4 * kHeap;
  for (const v1::Step& step : request_.steps()) {
    const OperationSize size = SizeOf(step);
    bytes += sizeof(Step) + sizeof(PlannedStep) + size.bytes +
             size.operands * sizeof(BufferStore::Wanted);
    if (size.operands <= kOperandsInPlace) continue;
    // Vectors at least double their capacity when they grow.
    const std::size_t places = std::max(size.operands, 2 * kOperandsInPlace);
    bytes += places * (sizeof(OperandSource) + sizeof(PlannedOperand) + sizeof(View)) + 3 * kHeap;
  }
  return bytes;
}

absl::StatusOr<Device*> ProgramRun::Prepare(Awaited& awaited) {
  const auto count = static_cast<std::size_t>(request_.steps_size());
  steps_.resize(count);
  program_.steps.resize(count);
  for (std::size_t i = 0; i < count; ++i)
    program_.steps[i].status =
        Read(request_.steps(static_cast<int>(i)), static_cast<std::uint32_t>(i));
  FindBuffers(awaited);
  DeviceBytes bytes;
  std::unordered_set<const Buffer*> seen;
  for (const Step& step : steps_)
    for (const OperandSource& source : step.sources)
      if (source.buffer != nullptr && seen.insert(source.buffer.get()).second)
        bytes.Add(*source.buffer, 0, source.type.bytes());
  Device* const most = bytes.Most();
  Device& device = most != nullptr ? *most : devices_.First();
  for (std::size_t i = 0; i < count; ++i) {
    PlannedStep& step = program_.steps[i];
    devices_.SetLimits(device, step.options);
    for (std::size_t o = 0; o < step.operands.size(); ++o) {
      const OperandSource& source = steps_[i].sources[o];
      PlannedOperand& operand = step.operands[o];
      operand.type = source.type;
      if (source.buffer == nullptr) continue;
      const bool moves = source.IsElsewhere(device);
      operand.kind = moves ? Kind::kElsewhere : Kind::kResident;
      operand.array = moves ? static_cast<const void*>(source.buffer.get()) : source.buffer->data();
      operand.sharded = source.buffer->shards().size() > 1;
    }
  }
  return &device;
}

absl::Status ProgramRun::Read(const v1::Step& message, std::uint32_t index) {
  ASSIGN_OR_RETURN(Operation operation, MakeOperation(message));
  PlannedStep& step = program_.steps[index];
  Step& own = steps_[index];
  step.spec = std::move(operation.spec);
  step.options = operation.options;
  own.destinations = operation.destinations;
  for (const v1::Result* destination : own.destinations) {
    step.destinations.push_back(destination->has_buffer()    ? Destination::kBuffer
                                : destination->has_scratch() ? Destination::kScratch
                                : destination->has_none()    ? Destination::kNone
                                                             : Destination::kResponse);
  }
  const std::size_t operands = operation.operands.size();
  step.operands.resize(operands);
  step.views.reserve(operands);
  own.sources.resize(operands);
  absl::Status status;
  for (std::size_t o = 0; o < operands; ++o) {
    own.sources[o].named = operation.operands[o];
    const Named& named = own.sources[o].named;
    absl::Status read = Read(named, index, step.operands[o], own.sources[o].type);
    if (!read.ok()) status.Update(OfOperand(named.name, read));
  }
  return status;
}

absl::Status ProgramRun::Read(const Named& named, std::uint32_t index, PlannedOperand& operand,
                              ArrayType& type) {
  const v1::Operand& message = *named.operand;
  operand.kind = Kind::kInline;
  operand.name = named.name;
  if (message.has_view()) {
    const v1::View& view = message.view();
    operand.window = Window{view.offset(), ToSpan(view.shape()), ToSpan(view.strides())};
  }
  RETURN_IF_ERROR(CheckVersion(message));
  if (message.has_step()) {
    if (message.step() >= index)
      return BadOperand("step", "a step can use only the results of earlier steps", message.step());
    operand.kind = Kind::kResult;
    operand.step = message.step();
    operand.output = message.output();
    return absl::OkStatus();
  }
  if (message.has_tensor()) {
    ASSIGN_OR_RETURN(type, TensorType(message.tensor()));
  } else if (message.buffer().empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPERAND",
                     "an operand must name a buffer or a step, or carry a tensor",
                     {{"field", "source"}});
  }
  return message.output() == 0 ? absl::OkStatus() : BadOutput(message.output());
}

void ProgramRun::FindBuffers(Awaited& awaited) {
  std::size_t operands = 0;
  for (const Step& step : steps_) operands += step.sources.size();
  std::vector<BufferStore::Wanted> wanted;
  wanted.reserve(operands);
  for (const Step& step : steps_)
    for (const OperandSource& source : step.sources)
      wanted.push_back({source.named.operand->buffer(), source.named.operand->version()});
  store_.FindAll(absl::MakeSpan(wanted), awaited);
  auto found = wanted.begin();
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    for (OperandSource& source : steps_[i].sources) {
      BufferStore::Wanted& one = *found++;
      SetErrorMetadata(one.status, "operand", source.named.name);
      program_.steps[i].status.Update(one.status);
      if (one.buffer != nullptr) source.type = one.buffer->type();
      source.buffer = std::move(one.buffer);
    }
    MarkScattered(program_.steps[i].spec, absl::MakeSpan(steps_[i].sources));
  }
}

bool ProgramRun::Stores() const {
  return std::any_of(request_.steps().begin(), request_.steps().end(),
                     [](const v1::Step& step) { return tessera::Stores(step); });
}

bool ProgramRun::timed() const {
  return std::any_of(program_.steps.begin(), program_.steps.end(),
                     [](const PlannedStep& step) { return step.options.timing; });
}

void ProgramRun::FindTypesOnce() {
  if (!typed_) FindTypes(program_);
  typed_ = true;
}

double ProgramRun::LeastMicroseconds(const Device& device) {
  FindTypesOnce();
  double least = 0;
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const PlannedStep& step = program_.steps[i];
    if (!step.status.ok()) continue;  // the step will be refused
    const Sources& sources = steps_[i].sources;
    const bool plain = step.options.strategy.empty() &&
                       std::all_of(sources.begin(), sources.end(),
                                   [&](const auto& source) { return source.IsReached(device); });
    if (!plain) return std::numeric_limits<double>::infinity();
    least += tessera::LeastMicroseconds(step.spec, step.views, device.info().backend) +
             TravelMicroseconds(sources, steps_[i].destinations, &step.result, device);
  }
  return least;
}

void ProgramRun::Release(Chores* chores) {
  for (Step& step : steps_)
    for (OperandSource& source : step.sources)
      if (chores != nullptr) chores->Release(std::move(source.buffer));
  steps_ = std::vector<Step>();
  program_ = ProgramPlan();
}

// --- Memory ---

absl::Status ProgramRun::Plan(Stream& stream) {
  FindTypesOnce();
  RETURN_IF_ERROR(CheckSteps(program_, stream, devices_.max_operation_seconds()));
  FuseSelections(program_, stream.device());
  return TakeMemory(stream);
}

absl::Status ProgramRun::TakeMemory(Stream& stream) {
  std::uint64_t in_answer = std::max(kAnswerMargin, kResultBytes * steps_.size()) - kAnswerMargin;
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    PlannedStep& step = program_.steps[i];
    InheritFailure(program_, step);
    if (!step.status.ok() || step.folded) continue;
    step.status = OpenResults(i, stream.device(), &in_answer);
    if (!step.status.ok()) steps_[i].drafts = {};
  }
  layout_ = LayOut(program_);
  const ScratchMark begin = stream.MarkScratch();
  const std::uint64_t most = MostScratch(program_, layout_.end, stream);
  absl::StatusOr<void*> block = Scratch(stream, layout_.end + most);
  if (!block.ok()) return block.status();
  stream.RewindScratch(begin);
  block = Scratch(stream, layout_.end);
  if (!block.ok()) return block.status();
  program_.block = static_cast<char*>(*block);
  PlaceResults(program_);
  // Inline results are copied to the host together, including the gaps between them.
  if (layout_.response_arrays > 1) {
    RETURN_IF_ERROR(Zero(stream, program_.block, layout_.response_end));
  }
  RETURN_IF_ERROR(SendTensors(stream));
  FetchBuffers(stream);
  return absl::OkStatus();
}

absl::Status ProgramRun::OpenResults(std::size_t index, Device& device, std::uint64_t* in_answer) {
  PlannedStep& step = program_.steps[index];
  Step& own = steps_[index];
  std::uint64_t bytes = *in_answer;
  for (std::size_t a = 0; a < own.destinations.size() && !step.result.scalar; ++a) {
    const ArrayType& type = step.result.arrays[a];
    if (step.destinations[a] == Destination::kResponse) {
      RETURN_IF_ERROR(CheckInline(type, bytes));
      bytes += type.bytes();
    }
    if (step.destinations[a] != Destination::kBuffer) continue;
    ASSIGN_OR_RETURN(BufferSpec spec,
                     MakeSpec(own.destinations[a]->buffer(), type, device, devices_));
    // CountStep opens the buffer of a result whose length is not known yet.
    if (step.result.uncounted) {
      RETURN_IF_ERROR(store_.Check(spec));
      continue;
    }
    own.drafts[a] = std::make_unique<ResultDraft>(store_, std::move(spec));
    ASSIGN_OR_RETURN(step.memory[a], own.drafts[a]->Open());
  }
  *in_answer = bytes;
  return absl::OkStatus();
}

absl::Status ProgramRun::CountStep(std::size_t index, Stream& stream) {
  PlannedStep& step = program_.steps[index];
  RETURN_IF_ERROR(CountResults(step.spec, stream, step.views, step.options));
  ASSIGN_OR_RETURN(step.result, TypeOf(step.spec, step.views));
  std::uint64_t in_answer = 0;  // 0: the largest possible results were counted earlier
  const absl::Status opened = OpenResults(index, stream.device(), &in_answer);
  if (!opened.ok()) steps_[index].drafts = {};
  return opened;
}

absl::Status ProgramRun::SendTensors(Stream& stream) {
  static constexpr char kGap[kBlockAlignment] = {};
  std::vector<HostBytes> pieces;
  std::uint64_t end = layout_.inline_begin;
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const PlannedStep& step = program_.steps[i];
    for (std::size_t o = 0; o < step.operands.size() && step.status.ok(); ++o) {
      if (step.operands[o].kind != Kind::kInline) continue;
      const std::string& data = steps_[i].sources[o].named.operand->tensor().data();
      pieces.push_back({kGap, step.operands[o].offset - end});
      pieces.push_back({data.data(), data.size()});
      end = step.operands[o].offset + data.size();
    }
  }
  if (end == layout_.inline_begin) return absl::OkStatus();
  return CopyToDevice(stream, program_.block + layout_.inline_begin, pieces);
}

void ProgramRun::FetchBuffers(Stream& stream) {
  std::unordered_map<const Buffer*, absl::Status> fetched;
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    PlannedStep& step = program_.steps[i];
    for (std::size_t o = 0; o < step.operands.size() && step.status.ok(); ++o) {
      if (step.operands[o].kind != Kind::kElsewhere) continue;
      OperandSource& source = steps_[i].sources[o];
      const Buffer& buffer = *source.buffer;
      const auto [entry, is_new] = fetched.try_emplace(&buffer);
      if (is_new) {
        source.moved_bytes = buffer.type().bytes();
        entry->second = FetchElsewhere(devices_, buffer, 0, source.moved_bytes, stream,
                                       program_.block + step.operands[o].offset);
      }
      if (!entry->second.ok()) step.status = OfOperand(source.named.name, entry->second);
    }
  }
}

std::uint64_t ProgramRun::answer_memory() const {
  // The memory of a result's objects and of their encoded form. An array is contained in both, and
  // there is a third copy, which came from the device.
  constexpr std::uint64_t kObjects = 256, kStats = 512, kError = 1024;
  std::uint64_t bytes = layout_.response_end;
  for (const PlannedStep& step : program_.steps) {
    if (!step.status.ok()) {
      bytes += kError + 4 * step.status.message().size();
      continue;
    }
    bytes += kObjects + (request_.stats() ? kStats + 32 * step.operands.size() : 0);
    for (std::size_t a = 0; a < step.destinations.size() && !step.result.scalar; ++a) {
      if (step.destinations[a] == Destination::kResponse)
        bytes += 2 * step.result.arrays[a].bytes();
      if (step.destinations[a] == Destination::kBuffer)
        bytes += DescriptionBytes(devices_.list().size());
    }
  }
  return bytes;
}

// --- On the stream ---

absl::Status ProgramRun::Run(Stream& stream) {
  const auto find = [this](const void* address) -> std::shared_ptr<const Buffer> {
    for (const Step& step : steps_)
      if (auto buffer = BufferAt(step.sources, address); buffer != nullptr) return buffer;
    return nullptr;
  };
  // While CountStep opens a buffer, the program may hold no prepared operand (BufferStore::Create).
  const auto opens_buffers = [](const PlannedStep& step) {
    const auto& destinations = step.destinations;
    return step.status.ok() && step.result.uncounted &&
           std::find(destinations.begin(), destinations.end(), Destination::kBuffer) !=
               destinations.end();
  };
  std::optional<PreparedOperands::Call> prepared;
  if (std::none_of(program_.steps.begin(), program_.steps.end(), opens_buffers))
    prepared.emplace(store_.prepared(stream.device()), stream, find);
  const auto run = [&](const PlannedStep& step) -> absl::StatusOr<ScalarResult> {
    const auto index = static_cast<std::size_t>(&step - program_.steps.data());
    const Step& own = steps_[index];
    RunOptions options = step.options;
    options.enqueue_only = true;
    std::optional<ShardTeam> team =
        ShardTeam::Of(devices_, step.spec, own.destinations, own.sources, stream.device());
    if (team.has_value()) options.team = &*team;
    if (step.result.uncounted) RETURN_IF_ERROR(CountStep(index, stream));
    absl::StatusOr<ScalarResult> result = RunStep(program_, step, stream, options);
    const std::uint64_t bytes = prepared.has_value() ? prepared->EndOperation(result.ok()) : 0;
    if (result.ok()) result->stats.prepared_bytes = bytes;
    return result;
  };
  absl::Status status = RunSteps(program_, stream, run);
  const absl::Status arrived = Synchronize(stream);
  status.Update(arrived);
  if (!status.ok()) return status;
  if (stream.stopped()) return CallerLeft();
  if (prepared.has_value()) prepared->Finish();
  return absl::OkStatus();
}

// --- The response ---

absl::Status ProgramRun::Answer(Stream& stream, v1::ExecuteResponse& response) {
  std::string arrays(layout_.response_end, '\0');
  absl::Status status = CopyToHost(stream, arrays.data(), program_.block, arrays.size());
  if (!status.ok()) return status;
  response.set_device(stream.device().info().name);
  response.mutable_results()->Reserve(static_cast<int>(steps_.size()));
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    v1::StepResult& result = *response.add_results();
    absl::Status& of_step = program_.steps[i].status;
    if (of_step.ok()) of_step = AnswerStep(i, arrays, stream.device(), result);
  }
  AnswerErrors(response);
  const auto failed = static_cast<std::uint64_t>(
      std::count_if(program_.steps.begin(), program_.steps.end(),
                    [](const PlannedStep& step) { return !step.status.ok(); }));
  metrics_.CountSteps(steps_.size() - failed, failed);
  return absl::OkStatus();
}

void ProgramRun::AnswerErrors(v1::ExecuteResponse& response) {
  std::uint64_t room = kMaxInlineResult + kAnswerMargin / 2;
  room -= std::min<std::uint64_t>(room, response.ByteSizeLong());
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    absl::Status& status = program_.steps[i].status;
    if (status.ok()) continue;
    SetErrorMetadata(status, "step", absl::StrCat(i));
    v1::StepError error = ToStepError(status, sees_all_);
    const std::uint64_t rest = kResultBytes * (steps_.size() - i);
    if (error.ByteSizeLong() + rest > room) {
      error =
          ToStepError(MakeError(status.code(), ErrorReason(status),
                                "this error is left out, because the response has too many errors",
                                {{"step", absl::StrCat(i)}}),
                      sees_all_);
    }
    room -= std::min<std::uint64_t>(room, error.ByteSizeLong() + kFraming);
    *response.mutable_results(static_cast<int>(i))->mutable_error() = std::move(error);
  }
}

absl::Status ProgramRun::AnswerStep(std::size_t index, const std::string& arrays,
                                    const Device& device, v1::StepResult& result) {
  const PlannedStep& step = program_.steps[index];
  Step& own = steps_[index];
  const OperationResponse response =
      OperationResponse::In(request_.steps(static_cast<int>(index)), result);
  if (step.result.scalar) response.SetValue(step.outcome, step.result);
  absl::InlinedVector<ResultDraft*, kMostResults> results;
  for (std::size_t a = 0; a < step.destinations.size() && !step.result.scalar; ++a) {
    if (own.drafts[a] != nullptr) results.push_back(own.drafts[a].get());
    if (step.destinations[a] != Destination::kResponse) continue;
    const ArrayType& type = step.result.arrays[a];
    v1::Tensor& tensor = response.tensor(a);
    SetType(type, tensor);
    tensor.mutable_data()->assign(arrays, step.offsets[a], type.bytes());
  }
  ASSIGN_OR_RETURN(std::vector<BufferInfo> sealed, ResultDraft::SealAll(results));
  auto info = sealed.begin();
  for (std::size_t a = 0; a < own.drafts.size(); ++a)
    if (own.drafts[a] != nullptr) SetBuffer(*info++, &response.buffer(a));
  if (request_.stats()) SetStats(step.outcome.stats, device, own.sources, response.stats());
  return absl::OkStatus();
}

}  // namespace tessera
