// Lays out a program's block of memory.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <vector>

#include "kernels/device/budget.h"
#include "kernels/program/program.h"

namespace tessera {
namespace {

using Kind = PlannedOperand::Kind;

// Adds an array to a block of *end bytes, and returns its offset. The end stays below 2^63, however
// many arrays there are.
std::uint64_t AddTo(std::uint64_t* end, std::uint64_t bytes) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
  const std::uint64_t offset = *end;
  const std::uint64_t rounded = (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  *end = std::min(kMost, offset + std::min(kMost, rounded));
  return offset;
}

// Calls f(type, offset) for each array with that destination that the step computes. A step that
// does not run is skipped.
template <class F>
void ForArrays(PlannedStep& step, Destination destination, const F& f) {
  if (!step.status.ok() || step.folded) return;
  for (std::size_t a = 0; a < step.destinations.size() && !step.result.scalar; ++a)
    if (step.destinations[a] == destination) f(step.result.arrays[a], step.offsets[a]);
}

// Calls f(operand) for each operand of that kind.
template <class F>
void ForOperands(ProgramPlan& program, Kind kind, const F& f) {
  for (PlannedStep& step : program.steps)
    for (PlannedOperand& operand : step.operands)
      if (step.status.ok() && operand.kind == kind) f(operand);
}

// Returns for each step the last step that reads its results, or the step itself if none does.
std::vector<std::size_t> LastReaders(const ProgramPlan& program) {
  std::vector<std::size_t> last(program.steps.size());
  std::iota(last.begin(), last.end(), std::size_t{0});
  const auto reads = [&](const PlannedStep& step, std::size_t reader) {
    for (const PlannedOperand& operand : step.operands)
      if (operand.kind == Kind::kResult) last[operand.step] = std::max(last[operand.step], reader);
  };
  for (std::size_t i = 0; i < program.steps.size(); ++i) {
    const PlannedStep& step = program.steps[i];
    reads(step, i);
    if (step.selection == nullptr) continue;
    reads(program.steps[step.product], i);
    reads(program.steps[step.scores], i);
  }
  return last;
}

// Places each scratch array in the first gap behind *end that is large enough. It may take the
// place of arrays whose last readers are earlier steps, because the steps that write arrays run one
// after another.
void PlaceScratchArrays(ProgramPlan& program, std::uint64_t* end) {
  struct Place {
    std::uint64_t begin, end;
    std::size_t last;
  };
  const std::uint64_t begin = *end;
  const std::vector<std::size_t> last = LastReaders(program);
  std::vector<Place> taken;  // in the order of their addresses
  for (std::size_t i = 0; i < program.steps.size(); ++i) {
    std::erase_if(taken, [i](const Place& place) { return place.last < i; });
    ForArrays(program.steps[i], Destination::kScratch,
              [&](const ArrayType& type, std::uint64_t& offset) {
                std::uint64_t size = 0, next = begin;
                AddTo(&size, type.bytes());
                auto place = taken.begin();
                while (place != taken.end() && place->begin - next < size) next = (place++)->end;
                offset = AddTo(&next, type.bytes());
                taken.insert(place, {offset, next, last[i]});
                *end = std::max(*end, next);
              });
  }
}

}  // namespace

BlockLayout LayOut(ProgramPlan& program) {
  BlockLayout layout;
  for (PlannedStep& step : program.steps) {
    ForArrays(step, Destination::kResponse, [&](const ArrayType& type, std::uint64_t& offset) {
      offset = AddTo(&layout.end, type.bytes());
      ++layout.response_arrays;
    });
  }
  layout.response_end = layout.end;
  PlaceScratchArrays(program, &layout.end);
  for (PlannedStep& step : program.steps)
    if (step.status.ok() && step.result.scalar && step.readers > 0)
      step.offsets[0] = AddTo(&layout.end, kScalarBytes);
  std::unordered_map<const void*, std::uint64_t> places;
  ForOperands(program, Kind::kElsewhere, [&](PlannedOperand& operand) {
    const auto [place, is_new] = places.try_emplace(operand.array, layout.end);
    if (is_new) AddTo(&layout.end, operand.type.bytes());
    operand.offset = place->second;
  });
  layout.inline_begin = layout.end;
  ForOperands(program, Kind::kInline, [&](PlannedOperand& operand) {
    operand.offset = AddTo(&layout.end, operand.type.bytes());
  });
  return layout;
}

std::uint64_t MostScratch(const ProgramPlan& program, std::uint64_t taken, const Stream& stream) {
  // The most memory that is lost between blocks of scratch memory, which begin at multiples of the
  // alignment.
  constexpr std::uint64_t kGaps = 16 * kBlockAlignment;
  const Budget* budget = stream.scratch_budget();
  const std::uint64_t limit =
      budget == nullptr ? std::numeric_limits<std::int64_t>::max() : budget->limit();
  std::uint64_t most = 0;
  for (const PlannedStep& step : program.steps) {
    if (!step.status.ok() || step.batched || step.folded) continue;
    const std::uint64_t bytes =
        step.selection == nullptr
            ? step.outcome.stats.scratch_bytes
            : ProductTopKScratch(SelectionOf(program, step), *step.selection, stream.device());
    if (bytes == 0 || bytes > limit) continue;
    std::uint64_t all = taken;
    AddTo(&all, bytes + kGaps);
    if (all <= limit) most = std::max(most, all - taken);
  }
  return most;
}

void PlaceResults(ProgramPlan& program) {
  if (program.block == nullptr) return;
  for (PlannedStep& step : program.steps)
    for (std::size_t a = 0; a < step.memory.size(); ++a)
      if (a >= step.destinations.size() || step.destinations[a] != Destination::kBuffer)
        step.memory[a] = program.block + step.offsets[a];
}

void MakeViews(const ProgramPlan& program, PlannedStep& step) {
  for (std::size_t i = 0; i < step.operands.size(); ++i) {
    const PlannedOperand& operand = step.operands[i];
    const void* const data = operand.kind == Kind::kResident ? operand.array
                             : operand.kind == Kind::kResult
                                 ? program.steps[operand.step].memory[operand.output]
                             : program.block == nullptr ? nullptr
                                                        : program.block + operand.offset;
    // Before memory is allocated, an address is only an offset.
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(data) +
                                   reinterpret_cast<std::uintptr_t>(operand.view.data);
    step.views[i].data =
        reinterpret_cast<const void*>(address);  // NOLINT(performance-no-int-to-ptr)
  }
}

}  // namespace tessera
