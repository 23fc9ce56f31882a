// Dot and Reduce of parts of longer arrays, whose results have the bits of the whole.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "kernels/compute.h"
#include "kernels/cpu/tree.h"
#include "kernels/run/execute.h"
#include "kernels/run/reduce.h"
#include "kernels/tree_columns.h"

namespace tessera {

absl::Status CheckPart(const ArrayPart& part, std::int64_t n, std::int64_t size, std::int64_t unit,
                       std::string_view unit_name) {
  const auto bad = [&](std::string_view what) {
    return Invalid("BAD_PART",
                   absl::StrCat("elements [", part.first, ", ", part.first, " + ", n,
                                ") of an array of ", part.elements, ": ", Absl(what)),
                   {{"first", absl::StrCat(part.first)},
                    {"elements", absl::StrCat(part.elements)},
                    {std::string(unit_name), absl::StrCat(unit)}});
  };
  if (part.elements < 0 || part.elements > kMostPartBytes / size)
    return bad("there is no array of so many");
  if (part.first < 0 || n > part.elements || part.first > part.elements - n)
    return bad("they are not among its elements");
  const bool begins =
      (unit > 0 ? part.first % unit == 0 : part.first == 0) || part.first == part.elements;
  const bool ends = part.first + n == part.elements || (unit > 0 && n % unit == 0);
  if (begins && ends) return absl::OkStatus();
  return bad(absl::StrCat("a part begins and ends at multiples of ", unit,
                          " elements, or at the end of the array"));
}

namespace {

bool IsCompensated(std::string_view strategy) { return strategy == "compensated"; }

// The strategy that a request of parts names, or the default.
template <class Problem>
absl::StatusOr<const Strategy<Problem>*> FindForParts(std::string_view name, const Problem& whole,
                                                      const Device& device) {
  absl::StatusOr<const Strategy<Problem>*> strategy = Find(name, whole, device);
  if (!strategy.ok() || (*strategy)->launch_part != nullptr) return strategy;
  return Invalid("BAD_PART",
                 absl::StrCat("strategy ", Absl((*strategy)->name),
                              " takes whole arrays; parts are for fixed_tree and compensated"),
                 {{"strategy", std::string((*strategy)->name)}});
}

std::int64_t CountChunks(const Tree& tree, const ArrayPart& part, std::int64_t n) {
  const TreeChunks chunks = ChunksOf(tree, part.first, n);
  return chunks.end - chunks.first;
}

// WholeLaunch of a part, whose values it leaves.
template <class Problem>
struct PartLaunch : WholeLaunch<Problem> {
  const ArrayPart& part;
  const Problem& whole;
  std::size_t bytes;  // of all values
  void** values;

  void Account(const Strategy<Problem>& strategy, Stats& stats) const {
    stats.roundoff = strategy.roundoff(whole);
  }
  void operator()(Stream& stream, const Problem& problem, const Strategy<Problem>& strategy) const {
    *values = stream.HostScratch(bytes);
    if (bytes == 0) return;
    for (const OperandSlot& operand : this->operands)
      if (operand.gather) *operand.as_view = &operand.view;
    const ProfilerRange range(strategy.name);
    if (!stream.stopped()) strategy.launch_part(problem, part, *values, stream);
  }
};

template <class Problem>
absl::StatusOr<ScalarResult> ExecutePart(Stream& stream, Problem& problem, ReduceOp op,
                                         const ArrayPart& part,
                                         absl::Span<const OperandSlot> operands,
                                         RunOptions options) {
  Problem whole = problem;
  whole.n = part.elements;
  whole.launch = options.launch;
  absl::StatusOr<const Strategy<Problem>*> strategy =
      FindForParts(options.strategy, whole, stream.device());
  if (!strategy.ok()) return strategy.status();
  const auto size = static_cast<std::int64_t>(SizeOf(problem.dtype));
  const Tree tree = FixedTree(part.elements, size);
  absl::Status status = CheckPart(part, problem.n, size, tree.chunk, "chunk");
  if (!status.ok()) return status;
  const bool compensated = IsCompensated((*strategy)->name);
  const std::int64_t count = CountChunks(tree, part, problem.n);
  const auto bytes =
      static_cast<std::size_t>(count) * TreeWideBytes(op, problem.dtype, compensated);
  // One device folds a part, and nobody folds it again: that is for who has all of them.
  options.team = nullptr;
  options.enqueue_only = false;
  options.strategy = (*strategy)->name;
  Scalar nothing;
  void* values = nullptr;
  absl::StatusOr<Stats> stats = Execute(
      stream, problem, options,
      [&](Problem& p) {
        p.result = &nothing;
        return absl::OkStatus();
      },
      PartLaunch<Problem>{{operands}, part, whole, bytes, &values});
  if (!stats.ok()) return stats.status();
  ScalarResult result{.stats = *stats};
  if (options.check_only || bytes == 0) return result;
  ClearPadding(op, problem.dtype, compensated, count, values);
  result.values.assign(static_cast<const char*>(values), bytes);
  return result;
}

}  // namespace

absl::StatusOr<ScalarResult> RunDotPart(Stream& stream, const View& a, const View& b,
                                        const ArrayPart& part, const RunOptions& options) {
  if (absl::Status status = CheckSame(a, b); !status.ok()) return status;
  DotProblem problem{.dtype = a.dtype, .n = a.elements()};
  const OperandSlot operands[] = {{a, HasGaps(a), &problem.a, &problem.a_view},
                                  {b, HasGaps(b), &problem.b, &problem.b_view}};
  return ExecutePart(stream, problem, ReduceOp::kSum, part, operands, options);
}

absl::StatusOr<ScalarResult> RunReducePart(Stream& stream, const View& x, ReduceOp op,
                                           const ArrayPart& part, const RunOptions& options) {
  if (absl::Status status = CheckComputed("reduce of a part", x.dtype); !status.ok()) return status;
  if (absl::Status status = CheckFolds(op, x.dtype, part.elements); !status.ok()) return status;
  ReduceProblem problem{.dtype = x.dtype, .op = op, .n = x.elements()};
  const OperandSlot operands[] = {{x, HasGaps(x), &problem.x, &problem.x_view}};
  return ExecutePart(stream, problem, op, part, operands, options);
}

absl::StatusOr<ScalarResult> FinishParts(const Device& device, DType dtype, ReduceOp op,
                                         std::int64_t elements, std::string_view strategy,
                                         std::string_view values) {
  if (absl::Status status = CheckComputed("reduce of a part", dtype); !status.ok()) return status;
  const auto size = static_cast<std::int64_t>(SizeOf(dtype));
  absl::Status status = CheckPart({0, elements}, elements, size, 1, "chunk");
  if (!status.ok()) return status;
  if (status = CheckFolds(op, dtype, elements); !status.ok()) return status;
  const ReduceProblem problem{.dtype = dtype, .op = op, .n = elements};
  absl::StatusOr<const Strategy<ReduceProblem>*> found = FindForParts(strategy, problem, device);
  if (!found.ok()) return found.status();
  const bool compensated = IsCompensated((*found)->name);
  const std::uint64_t expected = static_cast<std::uint64_t>(FixedTree(elements, size).chunks) *
                                 TreeWideBytes(op, dtype, compensated);
  if (values.size() != expected) {
    return Invalid(
        "BAD_PART",
        absl::StrCat("the values of all chunks have ", expected, " bytes, not ", values.size()),
        {{"expected", absl::StrCat(expected)}, {"given", absl::StrCat(values.size())}});
  }
  ScalarResult result{.integer = IsInteger(ScalarDType(op, dtype))};
  FinishTree(op, dtype, compensated, elements, values.data(), &result.value);
  result.stats = {.strategy = (*found)->name, .roundoff = (*found)->roundoff(problem)};
  return result;
}

}  // namespace tessera
