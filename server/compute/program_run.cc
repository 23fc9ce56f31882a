#include "server/compute/program_run.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/error.h"
#include "server/calls/buffer_messages.h"
#include "server/calls/device_call.h"
#include "server/compute/shard_team.h"
#include "server/rpc/convert.h"

namespace tessera {
namespace {

using absl::StatusCode;

// Arrays in the program's block begin at multiples of this.
constexpr std::uint64_t kAlignment = 256;
// The size of a scalar's place in the block, and where in it the value is before it is rounded.
constexpr std::uint64_t kScalarBytes = 2 * kAlignment;
constexpr std::uint64_t kUnrounded = kAlignment;

// The most bytes that a result takes in the response, besides the data of an array.
constexpr std::uint64_t kResultBytes = 512;
// The most bytes of tags and lengths around an error.
constexpr std::uint64_t kFraming = 32;
// The 4 MiB that clients receive, less kMaxInlineResult.
constexpr std::uint64_t kAnswerMargin = 64 << 10;

absl::Status StepFailed(std::uint32_t step) {
  return MakeError(StatusCode::kFailedPrecondition, "STEP_FAILED",
                   absl::StrCat("it needs the result of step ", step, ", which failed"),
                   {{"failed_step", absl::StrCat(step)}});
}

// Whether the error ends the whole program, because no later step can succeed.
bool EndsProgram(const absl::Status& status, const Stream& stream) {
  return !status.ok() && (stream.stopped() || stream.device().lost());
}

const void* At(const char* block, std::uint64_t offset) {
  return block == nullptr ? nullptr : block + offset;
}

// Adds an array to a block of *total bytes, and returns its offset. The total stays below 2^63,
// however many arrays there are.
std::uint64_t AddTo(std::uint64_t* total, std::uint64_t bytes) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
  const std::uint64_t offset = *total;
  const std::uint64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  *total = std::min(kMost, offset + std::min(kMost, rounded));
  return offset;
}

}  // namespace

// --- Before the queue ---

std::uint64_t ProgramRun::memory() const {
  std::uint64_t bytes = 3 * kHeap;
  for (const v1::Step& step : request_.steps()) {
    const OperationSize size = SizeOf(step);
    bytes += sizeof(Step) + size.bytes + size.operands * sizeof(BufferStore::Wanted);
    if (size.operands <= kOperandsInPlace) continue;
    // Vectors at least double their capacity when they grow.
    const std::size_t places = std::max(size.operands, 2 * kOperandsInPlace);
    bytes += places * (sizeof(OperandSource) + sizeof(View)) + 2 * kHeap;
  }
  return bytes;
}

void ProgramRun::Release(Chores* chores) {
  for (Step& step : steps_)
    for (OperandSource& source : step.sources)
      if (chores != nullptr) chores->Release(std::move(source.buffer));
  steps_.clear();
}

absl::StatusOr<Device*> ProgramRun::Prepare() {
  steps_.resize(static_cast<std::size_t>(request_.steps_size()));
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    steps_[i].index = static_cast<std::uint32_t>(i);
    steps_[i].status = CollectSources(steps_[i], request_.steps(static_cast<int>(i)));
  }
  std::size_t operands = 0;
  for (const Step& step : steps_) operands += step.sources.size();
  std::vector<BufferStore::Wanted> wanted;
  wanted.reserve(operands);
  for (const Step& step : steps_) {
    for (const OperandSource& source : step.sources) {
      const v1::Operand& operand = *source.named.operand;
      wanted.push_back({operand.buffer(), operand.version()});
    }
  }
  store_.FindAll(absl::MakeSpan(wanted));
  DeviceBytes bytes;
  std::unordered_set<const Buffer*> seen;
  auto found = wanted.begin();
  for (Step& step : steps_) {
    for (OperandSource& source : step.sources) {
      BufferStore::Wanted& one = *found++;
      SetErrorMetadata(one.status, "operand", source.named.name);
      step.status.Update(one.status);
      if (one.buffer == nullptr) continue;
      source.type = one.buffer->type();
      if (seen.insert(one.buffer.get()).second)
        bytes.Add(*one.buffer, 0, one.buffer->type().bytes());
      source.buffer = std::move(one.buffer);
    }
    MarkScattered(step.operation.spec, absl::MakeSpan(step.sources));
  }
  Device* const device = bytes.Most();
  return device != nullptr ? device : &core_.FirstDevice();
}

absl::Status ProgramRun::CollectSources(Step& step, const v1::Step& message) {
  absl::StatusOr<Operation> made = MakeOperation(message);
  if (!made.ok()) return made.status();
  step.operation = *std::move(made);
  const NamedOperands operands = std::move(step.operation.operands);
  step.operation.operands.clear();
  step.sources.reserve(operands.size());
  step.views.reserve(operands.size());
  absl::Status status;
  for (const Named& named : operands) {
    const v1::Operand& operand = *named.operand;
    OperandSource source{.named = named};
    if (operand.has_tensor()) {
      absl::StatusOr<ArrayType> type = TensorType(operand.tensor());
      if (type.ok()) source.type = *type;
      if (!type.ok()) status.Update(OfOperand(named, type.status()));
    } else if (operand.has_step() && operand.step() < step.index) {
      ++steps_[operand.step()].readers;
    } else if (operand.has_step()) {
      status.Update(OfOperand(
          named, MakeError(StatusCode::kInvalidArgument, "BAD_OPERAND",
                           "a step can use only the results of earlier steps",
                           {{"field", "step"}, {"value", absl::StrCat(operand.step())}})));
    } else if (operand.buffer().empty()) {
      status.Update(
          OfOperand(named, MakeError(StatusCode::kInvalidArgument, "BAD_OPERAND",
                                     "it must name a buffer or a step, or carry a tensor",
                                     {{"field", "source"}})));
    }
    if (!operand.has_step() && operand.output() != 0) status.Update(BadOutput(named));
    step.sources.push_back(std::move(source));
  }
  return status;
}

bool ProgramRun::Stores() const {
  return std::any_of(steps_.begin(), steps_.end(),
                     [](const Step& step) { return step.operation.Stores(); });
}

bool ProgramRun::timed() const {
  return std::any_of(steps_.begin(), steps_.end(),
                     [](const Step& step) { return step.operation.timing; });
}

// --- Checks ---

double ProgramRun::LeastMicroseconds(const Device& device) {
  double least = 0;
  for (Step& step : steps_) {
    step.status = FindTypes(step);
    if (!step.status.ok()) continue;  // it will be refused
    const Operation& operation = step.operation;
    const bool plain = operation.strategy.empty() &&
                       std::all_of(step.sources.begin(), step.sources.end(),
                                   [&](const auto& source) { return source.IsReached(device); });
    least += plain ? tessera::LeastMicroseconds(operation, step.sources, device) +
                         AnswerMicroseconds(operation.destinations, step.result, device)
                   : std::numeric_limits<double>::infinity();
  }
  typed_ = true;
  return least;
}

absl::Status ProgramRun::FindTypes(Step& step) {
  if (!step.status.ok()) return step.status;
  step.views.clear();
  for (OperandSource& source : step.sources) {
    const v1::Operand& operand = *source.named.operand;
    if (operand.has_step()) {
      const Step& earlier = steps_[operand.step()];
      if (!earlier.status.ok()) return StepFailed(operand.step());
      if (operand.output() >= earlier.result.arrays.size()) return BadOutput(source.named);
      source.type = earlier.result.arrays[operand.output()];
    }
    absl::StatusOr<View> view = MakeView(operand, source.type, nullptr);
    if (!view.ok()) return OfOperand(source.named, view.status());
    source.view = *view;
    step.views.push_back(*view);
  }
  absl::StatusOr<ResultType> result = TypeOf(step.operation.spec, step.views);
  if (!result.ok()) return result.status();
  step.result = *std::move(result);
  return absl::OkStatus();
}

absl::Status ProgramRun::Check(Step& step, Stream& stream) {
  if (!typed_) step.status = FindTypes(step);
  Inherit(step);
  if (!step.status.ok()) return step.status;
  MakeViews(step, stream.device());
  const Operation& operation = step.operation;
  step.batched = operation.IsPlain() && !operation.timing &&
                 FitsBatch(operation.spec, step.result, step.views);
  if (step.batched) return absl::OkStatus();
  RunOptions options = operation.Options(core_, stream.device());
  options.check_only = true;
  const Output nowhere[kMostResults] = {nullptr, nullptr};
  absl::StatusOr<ScalarResult> checked =
      tessera::Run(operation.spec, stream, step.views, nowhere, options);
  if (!checked.ok()) return checked.status();
  expected_seconds_ += checked->stats.estimate_seconds;
  step.outcome.stats = checked->stats;
  return absl::OkStatus();
}

// --- Products that select ---

void ProgramRun::FindSelections(const Device& device) {
  for (Step& step : steps_)
    if (step.status.ok() && step.operation.Is<TopKSpec>()) FindSelection(step, device);
}

void ProgramRun::FindSelection(Step& top_k, const Device& device) {
  const Shape& shape = top_k.views[0].shape;
  const int axis = std::get<TopKSpec>(top_k.operation.spec).axis;
  if (!top_k.operation.IsPlain() || shape.rank != 2 || axis % 2 == 0) return;
  Step* const scores = FoldableAt(top_k.sources[0]);
  if (scores == nullptr) return;
  Step* matmul = scores->operation.Is<MatmulSpec>() ? scores : nullptr;
  if (scores->operation.Is<MapSpec>()) {
    for (const OperandSource& source : scores->sources) {
      Step* const step = FoldableAt(source);
      const auto* product =
          step == nullptr ? nullptr : std::get_if<MatmulSpec>(&step->operation.spec);
      if (product != nullptr && !product->expression.has_value()) matmul = step;
    }
  }
  if (matmul == nullptr) return;
  if (top_k.outcome.stats.strategy != "threshold") return;
  top_k.selection = ChooseProductTopK(SelectionOf(top_k, *matmul, *scores),
                                      matmul->outcome.stats.strategy, device);
  if (top_k.selection == nullptr) return;
  top_k.matmul = matmul;
  top_k.scores = scores;
  // The memory that all of them read and write is counted in the TopK, as their time is.
  for (Step* step : {matmul, scores}) {
    step->selection = top_k.selection;
    step->outcome.stats.strategy = top_k.selection->name;
    step->outcome.stats.bytes = 0;
  }
}

ProgramRun::Step* ProgramRun::FoldableAt(const OperandSource& source) {
  const v1::Operand& operand = *source.named.operand;
  if (!operand.has_step() || operand.has_view()) return nullptr;
  Step& step = steps_[operand.step()];
  if (!step.status.ok() || step.readers != 1) return nullptr;
  const bool shared =
      std::any_of(step.sources.begin(), step.sources.end(), [](const OperandSource& one) {
        return one.buffer != nullptr && one.buffer->shards().size() > 1;
      });
  const Operation& operation = step.operation;
  const bool in_scratch =
      operation.destinations.size() == 1 && operation.destinations[0]->has_scratch();
  return operation.IsPlain() && !operation.timing && !shared && in_scratch ? &step : nullptr;
}

ProductTopK ProgramRun::SelectionOf(const Step& top_k, const Step& matmul, const Step& scores) {
  const auto& product = std::get<MatmulSpec>(matmul.operation.spec);
  const auto& selects = std::get<TopKSpec>(top_k.operation.spec);
  ProductTopK request{.a = matmul.views[0],
                      .b = matmul.views[1],
                      .transpose_a = product.transpose_a,
                      .transpose_b = product.transpose_b,
                      .out_dtype = product.out_dtype.value_or(matmul.views[0].dtype),
                      .k = selects.k,
                      .smallest = selects.smallest};
  if (&scores != &matmul) {
    request.expression = &std::get<MapSpec>(scores.operation.spec).expression;
    request.operands.assign(scores.views.begin(), scores.views.end());
    for (std::size_t i = 0; i < scores.sources.size(); ++i) {
      const v1::Operand& operand = *scores.sources[i].named.operand;
      if (operand.has_step() && operand.step() == matmul.index)
        request.product = static_cast<int>(i);
    }
  } else if (product.expression.has_value()) {
    request.expression = &*product.expression;
    request.operands.assign(matmul.views.begin() + 1, matmul.views.end());
    // The result has the product's shape, and the product has the type of the operands' product.
    request.operands[0] = WholeView({request.out_dtype, matmul.result.arrays[0].shape}, nullptr);
  }
  return request;
}

void ProgramRun::MakeViews(Step& step, const Device& device) {
  for (std::size_t i = 0; i < step.sources.size(); ++i) {
    const OperandSource& source = step.sources[i];
    const v1::Operand& operand = *source.named.operand;
    const bool moves = source.buffer == nullptr || source.IsElsewhere(device);
    const void* data = operand.has_step() ? steps_[operand.step()].places[operand.output()].memory
                       : moves            ? At(block_, source.offset)
                                          : source.buffer->data();
    // Before memory is allocated, an address is only an offset.
    const std::uintptr_t address =
        reinterpret_cast<std::uintptr_t>(data) + reinterpret_cast<std::uintptr_t>(source.view.data);
    step.views[i].data =
        reinterpret_cast<const void*>(address);  // NOLINT(performance-no-int-to-ptr)
  }
}

// --- Memory ---

absl::Status ProgramRun::TakeMemory(Stream& stream) {
  const std::uint64_t all_results = kResultBytes * steps_.size();
  Layout layout;
  layout.in_answer = std::max(kAnswerMargin, all_results) - kAnswerMargin;
  // The rest of the block begins at the latest possible end of the inline results.
  for (const Step& step : steps_) {
    if (!step.status.ok() || step.result.scalar) continue;
    const Destinations& destinations = step.operation.destinations;
    for (std::size_t a = 0; a < destinations.size(); ++a) {
      if (IsInline(*destinations[a]))
        AddTo(&layout.total, std::min(step.result.arrays[a].bytes(), kMaxInlineResult));
    }
  }
  layout.total =
      std::min(layout.total, kMaxInlineResult + kMostResults * kAlignment * steps_.size());
  std::unordered_map<const Buffer*, std::uint64_t> places;  // of buffers copied from other devices
  for (Step& step : steps_) {
    Inherit(step);
    if (!step.status.ok()) continue;
    const Layout before = layout;
    step.status = PlaceResults(step, layout, stream.device());
    if (!step.status.ok()) {
      // Its places are free for the other steps.
      layout = before;
      step.places = {};
      continue;
    }
    for (OperandSource& source : step.sources) {
      if (!source.IsElsewhere(stream.device())) continue;
      const auto [place, is_new] = places.try_emplace(source.buffer.get(), layout.total);
      if (is_new) AddTo(&layout.total, source.type.bytes());
      source.offset = place->second;
    }
  }
  const std::uint64_t tensors = layout.total;
  for (Step& step : steps_) {
    if (!step.status.ok()) continue;
    for (OperandSource& source : step.sources)
      if (source.named.operand->has_tensor())
        source.offset = AddTo(&layout.total, source.type.bytes());
  }
  inline_bytes_ = layout.inline_end;
  const ScratchMark begin = stream.MarkScratch();
  absl::StatusOr<void*> block = Scratch(stream, layout.total + MostScratch(layout.total, stream));
  if (!block.ok()) return block.status();
  stream.RewindScratch(begin);
  block = Scratch(stream, layout.total);
  if (!block.ok()) return block.status();
  block_ = static_cast<char*>(*block);
  for (Step& step : steps_) {
    for (Place& place : step.places)
      if (place.draft == nullptr && block_ != nullptr) place.memory = block_ + place.offset;
  }
  // Inline results are copied to the host in one piece, with the gaps between them.
  if (layout.inline_arrays > 1) {
    if (absl::Status status = Zero(stream, block_, inline_bytes_); !status.ok()) return status;
  }
  if (absl::Status status = SendTensors(stream, tensors); !status.ok()) return status;
  FetchBuffers(stream);
  return absl::OkStatus();
}

std::uint64_t ProgramRun::MostScratch(std::uint64_t beside, const Stream& stream) const {
  // Blocks of scratch memory begin at multiples of kAlignment.
  constexpr std::uint64_t kGaps = 16 * kAlignment;
  const Budget* budget = stream.scratch_budget();
  const std::uint64_t limit =
      budget == nullptr ? std::numeric_limits<std::int64_t>::max() : budget->limit();
  std::uint64_t most = 0;
  for (const Step& step : steps_) {
    if (!step.status.ok() || step.batched || step.IsFolded()) continue;
    const std::uint64_t bytes = step.selection != nullptr
                                    ? ProductTopKScratch(SelectionOf(step, *step.matmul, *step.scores),
                                                         *step.selection, stream.device())
                                    : step.outcome.stats.scratch_bytes;
    if (bytes == 0 || bytes > limit) continue;
    std::uint64_t all = beside;
    AddTo(&all, bytes + kGaps);
    if (all <= limit) most = std::max(most, all - beside);
  }
  return most;
}

absl::Status ProgramRun::PlaceResults(Step& step, Layout& layout, Device& device) {
  if (step.IsFolded()) return absl::OkStatus();
  if (step.result.scalar) {
    if (step.readers > 0) step.places[0].offset = AddTo(&layout.total, kScalarBytes);
    return absl::OkStatus();
  }
  const Destinations& destinations = step.operation.destinations;
  for (std::size_t a = 0; a < destinations.size(); ++a) {
    const ArrayType& type = step.result.arrays[a];
    if (destinations[a]->has_buffer()) {
      absl::Status opened = OpenDraft(destinations[a]->buffer(), type, device, step.places[a]);
      if (!opened.ok()) return opened;
    } else if (destinations[a]->has_scratch()) {
      step.places[a].offset = AddTo(&layout.total, type.bytes());
    } else {
      if (absl::Status fits = CheckInline(type, layout.in_answer); !fits.ok()) return fits;
      layout.in_answer += type.bytes();
      ++layout.inline_arrays;
      step.places[a].offset = AddTo(&layout.inline_end, type.bytes());
    }
  }
  return absl::OkStatus();
}

absl::Status ProgramRun::OpenDraft(const v1::BufferTarget& target, const ArrayType& type,
                                   Device& device, Place& place) {
  absl::StatusOr<BufferSpec> spec = MakeSpec(target, type, device, core_);
  if (!spec.ok()) return spec.status();
  place.draft = std::make_unique<ResultDraft>(store_, *std::move(spec));
  absl::StatusOr<void*> memory = place.draft->Open();
  if (memory.ok()) place.memory = *memory;
  return memory.status();
}

absl::Status ProgramRun::SendTensors(Stream& stream, std::uint64_t begin) {
  static constexpr char kGap[kAlignment] = {};
  std::vector<HostBytes> pieces;
  std::uint64_t end = begin;
  for (const Step& step : steps_) {
    if (!step.status.ok()) continue;
    for (const OperandSource& source : step.sources) {
      if (!source.named.operand->has_tensor()) continue;
      const std::string& data = source.named.operand->tensor().data();
      pieces.push_back({kGap, source.offset - end});
      pieces.push_back({data.data(), data.size()});
      end = source.offset + data.size();
    }
  }
  return end == begin ? absl::OkStatus() : CopyToDevice(stream, block_ + begin, pieces);
}

void ProgramRun::FetchBuffers(Stream& stream) {
  std::unordered_map<const Buffer*, absl::Status> fetched;
  for (Step& step : steps_) {
    for (OperandSource& source : step.sources) {
      if (!step.status.ok() || !source.IsElsewhere(stream.device())) continue;
      const Buffer& buffer = *source.buffer;
      const auto [entry, is_new] = fetched.try_emplace(&buffer);
      if (is_new) {
        source.moved_bytes = buffer.type().bytes();
        entry->second =
            FetchElsewhere(core_, buffer, 0, source.moved_bytes, stream, block_ + source.offset);
      }
      if (!entry->second.ok()) step.status = OfOperand(source.named, entry->second);
    }
  }
}

void ProgramRun::Inherit(Step& step) const {
  if (!step.status.ok()) return;
  for (const OperandSource& source : step.sources) {
    const v1::Operand& operand = *source.named.operand;
    if (operand.has_step() && !steps_[operand.step()].status.ok())
      step.status = StepFailed(operand.step());
  }
}

// --- On the stream ---

absl::Status ProgramRun::Plan(Stream& stream) {
  for (Step& step : steps_) step.status = Check(step, stream);
  const double limit = core_.options().max_operation_seconds;
  if (expected_seconds_ > limit) {
    return MakeError(
        StatusCode::kFailedPrecondition, "OPERATION_TOO_LONG",
        absl::StrFormat(
            "the steps together are expected to take %.3g s, at most %.3g s are allowed",
            expected_seconds_, limit),
        {{"estimate_seconds", absl::StrFormat("%.3g", expected_seconds_)},
         {"limit_seconds", absl::StrFormat("%.3g", limit)}});
  }
  FindSelections(stream.device());
  return TakeMemory(stream);
}

absl::Status ProgramRun::Run(Stream& stream) {
  const auto find = [this](const void* address) -> std::shared_ptr<const Buffer> {
    for (const Step& step : steps_)
      if (auto buffer = BufferAt(step.sources, address); buffer != nullptr) return buffer;
    return nullptr;
  };
  PreparedOperands::Call prepared(core_.tenants().prepared(stream.device()), stream, find);
  absl::Status status = RunSteps(stream, prepared);
  const absl::Status arrived = Synchronize(stream);
  if (!status.ok()) return status;
  if (!arrived.ok()) return arrived;
  if (stream.stopped()) return CallerLeft();
  prepared.Finish();
  return absl::OkStatus();
}

absl::Status ProgramRun::RunSteps(Stream& stream, PreparedOperands::Call& prepared) {
  for (std::size_t i = 0; i < steps_.size();) {
    Step& step = steps_[i];
    Inherit(step);
    if (step.status.ok()) MakeViews(step, stream.device());
    if (!step.status.ok() || step.IsFolded()) {
      ++i;
      continue;
    }
    std::size_t end = i + 1;
    if (step.batched) {
      while (end < steps_.size() && Joins(i, end, stream.device())) ++end;
    }
    if (end - i > 1) {
      if (absl::Status status = RunBatch(i, end, stream); !status.ok()) return status;
    } else {
      const ScratchMark before = stream.MarkScratch();
      step.status = RunStep(step, stream);
      stream.RewindScratch(before);  // the next step runs after this one
      step.outcome.stats.prepared_bytes = prepared.EndOperation(step.status.ok());
      if (EndsProgram(step.status, stream)) return step.status;
    }
    for (; i < end; ++i) {
      if (steps_[i].status.ok() && steps_[i].result.scalar && steps_[i].readers > 0)
        steps_[i].status = StoreScalar(steps_[i], stream);
    }
  }
  return absl::OkStatus();
}

absl::Status ProgramRun::RunStep(Step& step, Stream& stream) {
  RunOptions options = step.operation.Options(core_, stream.device());
  options.enqueue_only = true;
  std::optional<ShardTeam> team =
      ShardTeam::Of(core_, step.operation, step.sources, stream.device());
  if (team.has_value()) options.team = &*team;
  const Output outputs[kMostResults] = {step.places[0].memory, step.places[1].memory};
  const auto run = [&]() -> absl::StatusOr<ScalarResult> {
    if (step.selection == nullptr)
      return tessera::Run(step.operation.spec, stream, step.views, outputs, options);
    const absl::StatusOr<Stats> stats =
        RunProductTopK(stream, SelectionOf(step, *step.matmul, *step.scores), *step.selection,
                       outputs[0], outputs[1], options);
    if (!stats.ok()) return stats.status();
    return ScalarResult{.stats = *stats};
  };
  absl::StatusOr<ScalarResult> outcome = run();
  if (outcome.ok()) step.outcome = *outcome;
  return outcome.status();
}

bool ProgramRun::Joins(std::size_t first, std::size_t next, const Device& device) {
  Step& step = steps_[next];
  const Step& like = steps_[first];
  if (!step.batched || !SharesBatch(step.operation.spec, step.views[0], like.operation.spec,
                                    like.views[0]))
    return false;
  for (const OperandSource& source : step.sources) {
    const v1::Operand& operand = *source.named.operand;
    if (operand.has_step() && operand.step() >= first) return false;
  }
  Inherit(step);
  if (step.status.ok()) MakeViews(step, device);
  return step.status.ok();
}

absl::Status ProgramRun::RunBatch(std::size_t first, std::size_t end, Stream& stream) {
  const std::size_t count = end - first;
  std::vector<ScalarResult> results(count);
  const auto operand = [&](std::size_t i, int o) -> const View& {
    return steps_[first + i].views[static_cast<std::size_t>(o)];
  };
  const absl::Status status = tessera::RunBatch(steps_[first].operation.spec, stream, operand,
                                                absl::MakeSpan(results));
  if (EndsProgram(status, stream)) return status;
  for (std::size_t i = 0; i < count; ++i) {
    steps_[first + i].status = status;
    steps_[first + i].outcome = results[i];
  }
  return absl::OkStatus();
}

absl::Status ProgramRun::StoreScalar(const Step& step, Stream& stream) {
  const Scalar& value = step.outcome.value;
  const DType dtype = step.result.arrays[0].dtype;
  void* const memory = step.places[0].memory;
  if (IsInteger(dtype)) {
    const std::int64_t integer = step.result.is_index ? value.index : value.integer;
    // Little endian: the lower bytes of a value that fits them.
    return CopyToDevice(stream, memory, &integer, SizeOf(dtype));
  }
  char* unrounded = static_cast<char*>(memory) + kUnrounded;
  absl::Status status = CopyToDevice(stream, unrounded, &value.real, sizeof value.real);
  if (!status.ok()) return status;
  return RunCopy(stream, WholeView({DType::kF64, {}}, unrounded), dtype, memory);
}

// --- The answer ---

absl::Status ProgramRun::Answer(Stream& stream, v1::ExecuteResponse& response) {
  std::string arrays(inline_bytes_, '\0');
  absl::Status status = CopyToHost(stream, arrays.data(), block_, arrays.size());
  if (!status.ok()) return status;
  response.set_device(stream.device().info().name);
  response.mutable_results()->Reserve(static_cast<int>(steps_.size()));
  for (Step& step : steps_) {
    v1::StepResult& result = *response.add_results();
    if (step.status.ok()) step.status = AnswerStep(step, arrays, stream.device(), result);
  }
  // Errors are written in full as long as the response is small enough for clients.
  std::uint64_t room = kMaxInlineResult + kAnswerMargin / 2;
  room -= std::min<std::uint64_t>(room, response.ByteSizeLong());
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    if (steps_[i].status.ok()) continue;
    SetErrorMetadata(steps_[i].status, "step", absl::StrCat(i));
    v1::StepError error = ToStepError(steps_[i].status, sees_all_);
    const std::uint64_t rest = kResultBytes * (steps_.size() - i);
    if (error.ByteSizeLong() + rest > room) {
      error = ToStepError(
          MakeError(steps_[i].status.code(), ErrorReason(steps_[i].status),
                    "left out: the response has too many errors", {{"step", absl::StrCat(i)}}),
          sees_all_);
    }
    room -= std::min<std::uint64_t>(room, error.ByteSizeLong() + kFraming);
    *response.mutable_results(static_cast<int>(i))->mutable_error() = std::move(error);
  }
  const auto failed = static_cast<std::uint64_t>(
      std::count_if(steps_.begin(), steps_.end(), [](const Step& s) { return !s.status.ok(); }));
  core_.metrics().CountSteps(steps_.size() - failed, failed);
  return absl::OkStatus();
}

absl::Status ProgramRun::AnswerStep(Step& step, const std::string& arrays, const Device& device,
                                    v1::StepResult& result) {
  const OperationResponse response =
      OperationResponse::In(request_.steps(static_cast<int>(step.index)), result);
  if (step.result.scalar) response.SetValue(step.outcome, step.result);
  const Destinations& destinations = step.operation.destinations;
  absl::InlinedVector<ResultDraft*, kMostResults> results;
  for (std::size_t a = 0; a < destinations.size() && !step.result.scalar; ++a) {
    const Place& place = step.places[a];
    if (place.draft != nullptr) {
      results.push_back(place.draft.get());
    } else if (IsInline(*destinations[a])) {
      const ArrayType& type = step.result.arrays[a];
      v1::Tensor& tensor = response.tensor(a);
      SetType(type, tensor);
      tensor.mutable_data()->assign(arrays, place.offset, type.bytes());
    }
  }
  absl::StatusOr<std::vector<BufferInfo>> sealed = ResultDraft::SealAll(results);
  if (!sealed.ok()) return sealed.status();
  auto info = sealed->begin();
  for (std::size_t a = 0; a < destinations.size(); ++a)
    if (step.places[a].draft != nullptr) SetBuffer(*info++, &response.buffer(a));
  if (request_.stats()) SetStats(step.outcome.stats, device, step.sources, response.stats());
  return absl::OkStatus();
}

}  // namespace tessera
