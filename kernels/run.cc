// One operation from checked operands to a finished result: find the row, make operands contiguous
// where they are not, launch, wait. Step 3 of a request's path.
#include <algorithm>
#include <array>
#include <chrono>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/compute.h"
#include "kernels/guard.h"
#include "kernels/matmul.h"

namespace tessera {
namespace {

absl::string_view Absl(std::string_view s) { return {s.data(), s.size()}; }

absl::Status Invalid(std::string_view reason, const std::string& message,
                     std::initializer_list<std::pair<std::string_view, std::string>> metadata) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message, metadata);
}

absl::Status DtypesDiffer(const View& a, const View& b) {
  return Invalid("BAD_DTYPE",
                 absl::StrCat("operands have dtypes ", Absl(Name(a.dtype)), " and ",
                              Absl(Name(b.dtype)), ", which must agree"),
                 {{"a", std::string(Name(a.dtype))}, {"b", std::string(Name(b.dtype))}});
}

absl::Status ShapesDiffer(std::string_view rule, const View& a, const View& b) {
  return Invalid("BAD_SHAPE",
                 absl::StrCat("operands have shapes ", ToString(a.shape), " and ",
                              ToString(b.shape), ": ", Absl(rule)),
                 {{"a", ToString(a.shape)}, {"b", ToString(b.shape)}});
}

absl::Status CheckSame(const View& a, const View& b) {
  if (a.dtype != b.dtype) return DtypesDiffer(a, b);
  if (!(a.shape == b.shape)) return ShapesDiffer("they must agree", a, b);
  return absl::OkStatus();
}

// --- Finding a row
// ---------------------------------------------------------------------------------------------------

std::string Names(DTypes dtypes) {
  std::vector<std::string> names;
  for (DType d : {DType::kF32, DType::kF64, DType::kF16, DType::kBF16, DType::kI32, DType::kI64})
    if (dtypes.Contains(d)) names.emplace_back(Name(d));
  return absl::StrJoin(names, ", ");
}

template <class Problem>
absl::Status Unsupported(std::string_view strategy, const Problem& problem, const Device& device,
                         const std::string& needs) {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "STRATEGY_UNSUPPORTED",
      absl::StrCat("strategy ", Absl(strategy), " of ", Absl(kOperation<Problem>),
                   " cannot run this request on ", device.info().name, ": it needs ", needs),
      {{"strategy", std::string(strategy)},
       {"operation", std::string(kOperation<Problem>)},
       {"dtype", std::string(Name(problem.dtype))},
       {"device", device.info().name},
       {"needs", needs}});
}

template <class Problem>
absl::Status CheckLaunch(const Strategy<Problem>& row, const Launch& launch) {
  struct Knob {
    const char* field;
    std::uint32_t value;
    LaunchLimits::Range range;
  };
  for (const Knob& knob :
       {Knob{"launch.block_size", launch.block_size, row.limits.block_size},
        Knob{"launch.grid_size", launch.grid_size, row.limits.grid_size},
        Knob{"launch.items_per_thread", launch.items_per_thread, row.limits.items_per_thread}}) {
    if (knob.value == 0 || (knob.value >= knob.range.min && knob.value <= knob.range.max)) continue;
    const std::string range = knob.range.max == 0
                                  ? "0 (this strategy has no such knob)"
                                  : absl::StrCat(knob.range.min, " to ", knob.range.max);
    return Invalid("BAD_LAUNCH",
                   absl::StrCat(knob.field, " is ", knob.value, ", strategy ", Absl(row.name),
                                " takes ", range),
                   {{"field", knob.field},
                    {"value", absl::StrCat(knob.value)},
                    {"range", range},
                    {"strategy", std::string(row.name)}});
  }
  return absl::OkStatus();
}

// The row that a request names, or the fastest; checked against the problem's type, the device and
// the launch.
template <class Problem>
absl::StatusOr<const Strategy<Problem>*> Find(std::string_view name, const Problem& problem,
                                              const Device& device) {
  const Strategy<Problem>* found = nullptr;
  if (name.empty()) {
    found = Choose(problem, device);
    if (found == nullptr) {
      DTypes any;
      for (const Strategy<Problem>* row : Strategies<Problem>())
        if (Missing(*row, device).empty()) any.bits |= row->dtypes.bits;
      return Unsupported("(any)", problem, device, absl::StrCat("operands of ", Names(any)));
    }
  } else {
    // A name may have a row for each kind of device.
    std::vector<std::string_view> valid;
    for (const Strategy<Problem>* row : Strategies<Problem>()) {
      if (std::find(valid.begin(), valid.end(), row->name) == valid.end())
        valid.push_back(row->name);
      if (row->name == name && (found == nullptr || row->backend == device.info().backend))
        found = row;
    }
    if (found == nullptr) {
      const std::string names =
          absl::StrJoin(valid, ", ", [](std::string* out, std::string_view s) { out->append(s); });
      return Invalid("UNKNOWN_STRATEGY",
                     absl::StrCat("no strategy of ", Absl(kOperation<Problem>), " is called '",
                                  Absl(name), "'; there are ", names),
                     {{"strategy", std::string(name)},
                      {"operation", std::string(kOperation<Problem>)},
                      {"valid", names}});
    }
    if (std::string needs = Missing(*found, device); !needs.empty())
      return Unsupported(name, problem, device, needs);
    if (!found->dtypes.Contains(problem.dtype)) {
      return Unsupported(name, problem, device, absl::StrCat("operands of ", Names(found->dtypes)));
    }
    if (std::string needs = Refusal(*found, problem); !needs.empty())
      return Unsupported(name, problem, device, needs);
  }
  if (absl::Status status = CheckLaunch(*found, problem.launch); !status.ok()) return status;
  return found;
}

// --- What it may cost
// ------------------------------------------------------------------------------------------------

absl::Status TooLong(std::string_view what, std::string_view strategy, double estimate,
                     double limit, std::string_view advice) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "OPERATION_TOO_LONG",
                   absl::StrFormat("%s is expected to take %.3g s, at most %.3g s are allowed%s",
                                   Absl(what), estimate, limit, Absl(advice)),
                   {{"strategy", std::string(strategy)},
                    {"estimate_seconds", absl::StrFormat("%.3g", estimate)},
                    {"limit_seconds", absl::StrFormat("%.3g", limit)}});
}

// Seconds to make operands contiguous.
double GatherSeconds(const RunOptions& options, std::initializer_list<const View*> gathered) {
  double seconds = 0;
  if (options.pace == nullptr) return seconds;
  for (const View* view : gathered) {
    if (view->elements() != 0 && !view->contiguous())
      seconds += options.pace->EstimateCopy(*view, view->dtype);
  }
  return seconds;
}

template <class Problem>
absl::Status CheckSeconds(const Strategy<Problem>& row, const Problem& problem,
                          const Device& device, double gather_seconds, const RunOptions& options) {
  if (options.pace == nullptr) return absl::OkStatus();
  const double estimate = gather_seconds + options.pace->Estimate(row, problem);
  if (estimate <= std::min(options.max_seconds, options.max_slow_seconds)) return absl::OkStatus();
  const bool slow = !options.strategy.empty() && Choose(problem, device) != &row;
  const double limit =
      slow ? std::min(options.max_seconds, options.max_slow_seconds) : options.max_seconds;
  if (estimate <= limit) return absl::OkStatus();
  options.pace->Forget(row, problem);
  return TooLong(
      absl::StrCat(Absl(kOperation<Problem>), " by strategy ", Absl(row.name)), row.name, estimate,
      limit, slow ? "; a request that names no strategy gets the default one of this problem" : "");
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// --- Running it
// ------------------------------------------------------------------------------------------------------

// The elements of a view in row-major order without gaps: the view's own memory, or a copy in the
// lane's scratch.
const void* Contiguous(Lane& lane, const View& view) {
  if (view.elements() == 0 || view.contiguous()) return view.data;
  void* copy = lane.Scratch(static_cast<std::size_t>(view.elements()) * SizeOf(view.dtype));
  lane.Gather(view, copy);
  return copy;
}

// prepare(problem) fills in the operands' addresses; it may gather, which the measured time
// includes, and the limits of options: about gather_seconds of it.
template <class Problem, class Prepare>
absl::StatusOr<Stats> ExecuteRow(Lane& lane, Problem& problem, const Strategy<Problem>& row,
                                 const RunOptions& options, double gather_seconds,
                                 const Prepare& prepare) {
  Device& device = lane.device();
  if (absl::Status status = CheckSeconds(row, problem, device, gather_seconds, options);
      !status.ok())
    return status;
  const bool timing = options.timing;
  const Stopwatch watch;
  Stats stats;
  absl::Status status = Guard(device, [&] {
    if (timing) lane.StartTimer();
    prepare(problem);
    row.launch(problem, lane);
    if (timing) stats.kernel_us = lane.StopTimer();
    lane.Synchronize();
  });
  if (!status.ok()) {
    // What is in flight may still use the operands; on a lost device this fails as well, and
    // nothing runs any more.
    Guard(device, [&] { lane.Synchronize(); }).IgnoreError();
    return status;
  }
  // With a gather in it, the time says little about the row.
  if (options.pace != nullptr && gather_seconds == 0)
    options.pace->Learn(row, problem, watch.seconds());
  const Cost cost = row.cost(problem);
  stats.strategy = row.name;
  stats.bytes = cost.bytes;
  stats.flops = cost.flops;
  stats.roundoff = row.roundoff(problem);
  return stats;
}

template <class Problem, class Prepare>
absl::StatusOr<Stats> Execute(Lane& lane, Problem& problem, const RunOptions& options,
                              std::initializer_list<const View*> gathered, const Prepare& prepare) {
  problem.launch = options.launch;
  absl::StatusOr<const Strategy<Problem>*> row = Find(options.strategy, problem, lane.device());
  if (!row.ok()) return row.status();
  const double gather_seconds = GatherSeconds(options, gathered);
  absl::StatusOr<Stats> stats = ExecuteRow(lane, problem, **row, options, gather_seconds, prepare);
  if (absl::IsResourceExhausted(stats.status()) && options.strategy.empty()) {
    // Whoever leaves the choice to us has asked for a product, not for the fastest row's copies.
    const Strategy<Problem>* other = ChooseInPlace(problem, lane.device());
    if (other != nullptr && other != *row && CheckLaunch(*other, problem.launch).ok())
      return ExecuteRow(lane, problem, *other, options, gather_seconds, prepare);
  }
  return stats;
}

template <class Problem, class Prepare>
absl::StatusOr<ScalarResult> ExecuteScalar(Lane& lane, Problem& problem, bool integer,
                                           const RunOptions& options,
                                           std::initializer_list<const View*> gathered,
                                           const Prepare& prepare) {
  absl::StatusOr<Stats> stats = Execute(lane, problem, options, gathered, [&](Problem& p) {
    p.result = lane.result();
    prepare(p);
  });
  if (!stats.ok()) return stats.status();
  return ScalarResult{*problem.result, integer, *stats};
}

// --- Axes
// ------------------------------------------------------------------------------------------------------------

// Which axes of x are folded.
absl::StatusOr<std::array<bool, kMaxRank>> FoldedAxes(const View& x, absl::Span<const int> axes) {
  std::array<bool, kMaxRank> folded{};
  const int rank = x.shape.rank;
  for (int axis : axes) {
    if (axis < -rank || axis >= rank) {
      return Invalid("BAD_AXES",
                     absl::StrCat("axis ", axis, " of an operand of rank ", rank,
                                  "; allowed: ", -rank, " to ", rank - 1),
                     {{"axis", absl::StrCat(axis)}, {"rank", absl::StrCat(rank)}});
    }
    bool& flag = folded[static_cast<std::size_t>(axis < 0 ? axis + rank : axis)];
    if (flag) {
      return Invalid("BAD_AXES", absl::StrCat("axis ", axis, " is named twice"),
                     {{"axis", absl::StrCat(axis)}, {"rank", absl::StrCat(rank)}});
    }
    flag = true;
  }
  return folded;
}

absl::Status EmptyInput(ReduceOp op) {
  return Invalid("EMPTY_INPUT", "this reduction has no value for an empty input",
                 {{"op", absl::StrCat(static_cast<int>(op))}});
}

absl::Status EmptySegment(ReduceOp op, std::size_t segment) {
  return Invalid("EMPTY_INPUT",
                 absl::StrCat("this reduction has no value for an empty input, which segment ",
                              segment, " is"),
                 {{"op", absl::StrCat(static_cast<int>(op))}, {"segment", absl::StrCat(segment)}});
}

// x with its axes reordered so that folded ones are neighbours, and the three extents that result.
// Axes that are neighbours already stay where they are, which saves a gather.
struct Folding {
  View x;
  std::int64_t outer = 1, length = 1, inner = 1;
};

Folding MakeFolding(const View& x, const std::array<bool, kMaxRank>& folded) {
  const int rank = x.shape.rank;
  const auto is_folded = [&](int i) { return folded[static_cast<std::size_t>(i)]; };
  int first = 0;
  while (first < rank && !is_folded(first)) ++first;
  int last = rank;
  while (last > first && !is_folded(last - 1)) --last;
  bool neighbours = true;
  for (int i = first; i < last; ++i) neighbours &= is_folded(i);

  std::vector<int> order;
  for (int i = 0; i < rank; ++i)
    if (neighbours || !is_folded(i)) order.push_back(i);
  if (!neighbours)
    for (int i = 0; i < rank; ++i)
      if (is_folded(i)) order.push_back(i);

  Folding folding;
  folding.x = x;
  for (int i = 0; i < rank; ++i) {
    const int from = order[static_cast<std::size_t>(i)];
    folding.x.shape[i] = x.shape[from];
    folding.x.strides[static_cast<std::size_t>(i)] = x.strides[static_cast<std::size_t>(from)];
    (is_folded(from)              ? folding.length
     : neighbours && from >= last ? folding.inner
                                  : folding.outer) *= x.shape[from];
  }
  return folding;
}

// --- Batches
// ---------------------------------------------------------------------------------------------------------

const Batch<DotBatchProblem>& BatchOf([[maybe_unused]] const Lane& lane, const DotBatchProblem&) {
#ifdef TESSERA_WITH_CUDA
  if (lane.device().info().backend == Backend::kCuda) return kDotBatchCuda;
#endif
  return kDotBatchCpu;
}

const Batch<ReduceBatchProblem>& BatchOf([[maybe_unused]] const Lane& lane,
                                         const ReduceBatchProblem&) {
#ifdef TESSERA_WITH_CUDA
  if (lane.device().info().backend == Backend::kCuda) return kReduceBatchCuda;
#endif
  return kReduceBatchCpu;
}

// each: what one element of a segment costs.
template <class Problem>
absl::StatusOr<Stats> ExecuteBatch(Lane& lane, Problem problem, const Batch<Problem>& batch,
                                   absl::Span<Scalar> results, const Cost& each, bool timing) {
  Stats stats;
  stats.strategy = "batch";
  if (problem.count == 0) return stats;
  std::int64_t longest = 0, elements = 0;
  for (std::int64_t i = 0; i < problem.count; ++i) {
    longest = std::max(longest, problem.segments[i].n);
    elements += problem.segments[i].n;
  }
  Device& device = lane.device();
  absl::Status status = Guard(device, [&] {
    problem.results = static_cast<Scalar*>(lane.HostScratch(results.size() * sizeof(Scalar)));
    batch.launch(problem, lane, timing);
    if (timing) stats.kernel_us = lane.StopTimer();
    lane.Synchronize();
    stats.roundoff = batch.roundoff(problem, longest, device);
  });
  if (!status.ok()) {
    // What is in flight may still read the operands.
    Guard(device, [&] { lane.Synchronize(); }).IgnoreError();
    return status;
  }
  std::copy_n(problem.results, results.size(), results.begin());
  stats.bytes = static_cast<std::uint64_t>(elements) * SizeOf(problem.dtype) * each.bytes;
  stats.flops = static_cast<std::uint64_t>(elements) * each.flops;
  return stats;
}

// --- Matmul operands
// -------------------------------------------------------------------------------------------------

// A matrix as the rows take it: rows or columns without gaps, any pitch.
struct MatrixOperand {
  View view;
  std::int64_t pitch = 0;
  bool transpose = false;
  bool gather = false;
};

MatrixOperand MakeMatrixOperand(const View& view, bool transpose) {
  const std::int64_t rows = view.shape[0], columns = view.shape[1];
  const std::int64_t row_stride = view.strides[0], column_stride = view.strides[1];
  const std::int64_t least_pitch = std::max<std::int64_t>(1, columns);
  MatrixOperand operand{view, least_pitch, transpose, false};
  if ((columns <= 1 || column_stride == 1) && (rows <= 1 || row_stride >= least_pitch)) {
    if (rows > 1) operand.pitch = row_stride;
  } else if ((rows <= 1 || row_stride == 1) &&
             (columns <= 1 || column_stride >= std::max<std::int64_t>(1, rows))) {
    // Columns without gaps: the transpose of what is stored.
    operand.pitch = columns > 1 ? column_stride : std::max<std::int64_t>(1, rows);
    operand.transpose = !transpose;
  } else {
    operand.gather = true;
  }
  return operand;
}

}  // namespace

absl::StatusOr<ScalarResult> RunDot(Lane& lane, const View& a, const View& b,
                                    const RunOptions& options) {
  if (absl::Status status = CheckSame(a, b); !status.ok()) return status;
  DotProblem problem{.dtype = a.dtype, .n = a.elements()};
  return ExecuteScalar(lane, problem, IsInteger(a.dtype), options, {&a, &b}, [&](DotProblem& p) {
    p.a = Contiguous(lane, a);
    p.b = Contiguous(lane, b);
  });
}

absl::StatusOr<ScalarResult> RunReduce(Lane& lane, const View& x, ReduceOp op,
                                       const RunOptions& options) {
  if (x.elements() == 0 && NeedsElements(op)) return EmptyInput(op);
  ReduceProblem problem{.dtype = x.dtype, .op = op, .n = x.elements()};
  // ARG operations give the extreme value, which is of the operand's type.
  const DType value = IsArg(op) ? x.dtype : ResultDType(op, x.dtype);
  return ExecuteScalar(lane, problem, IsInteger(value), options, {&x},
                       [&](ReduceProblem& p) { p.x = Contiguous(lane, x); });
}

absl::StatusOr<ArrayType> ReduceAxesType(const View& x, ReduceOp op, absl::Span<const int> axes,
                                         bool keep_dims) {
  absl::StatusOr<std::array<bool, kMaxRank>> folded = FoldedAxes(x, axes);
  if (!folded.ok()) return folded.status();
  std::vector<std::int64_t> shape;
  bool nothing_to_fold = false;
  for (int i = 0; i < x.shape.rank; ++i) {
    if (!(*folded)[static_cast<std::size_t>(i)]) {
      shape.push_back(x.shape[i]);
    } else {
      nothing_to_fold |= x.shape[i] == 0;
      if (keep_dims) shape.push_back(1);
    }
  }
  absl::StatusOr<ArrayType> type = MakeArrayType(ResultDType(op, x.dtype), shape);
  if (type.ok() && nothing_to_fold && NeedsElements(op) && type->shape.elements() > 0)
    return EmptyInput(op);
  return type;
}

absl::StatusOr<Stats> RunReduceAxes(Lane& lane, const View& x, ReduceOp op,
                                    absl::Span<const int> axes, void* out,
                                    const RunOptions& options) {
  if (absl::Status status = ReduceAxesType(x, op, axes, false).status(); !status.ok())
    return status;
  const Folding folding = MakeFolding(x, *FoldedAxes(x, axes));
  ReduceAxesProblem problem{.dtype = x.dtype,
                            .op = op,
                            .outer = folding.outer,
                            .length = folding.length,
                            .inner = folding.inner,
                            .x = nullptr,
                            .out = out};
  return Execute(lane, problem, options, {&folding.x},
                 [&](ReduceAxesProblem& p) { p.x = Contiguous(lane, folding.x); });
}

absl::StatusOr<ArrayType> MatmulType(const View& a, const View& b, bool transpose_a,
                                     bool transpose_b, DType out_dtype) {
  if (a.dtype != b.dtype) return DtypesDiffer(a, b);
  if (a.shape.rank != 2 || b.shape.rank != 2) return ShapesDiffer("both must have rank 2", a, b);
  const std::int64_t a_k = a.shape[transpose_a ? 0 : 1];
  const std::int64_t b_k = b.shape[transpose_b ? 1 : 0];
  if (a_k != b_k) {
    return ShapesDiffer(absl::StrCat("the inner extents ", a_k, " and ", b_k, " must agree"), a, b);
  }
  if (!IsMatmulPair(a.dtype, out_dtype)) {
    return Invalid(
        "BAD_DTYPE",
        absl::StrCat("no strategy turns ", Absl(Name(a.dtype)), " operands into ",
                     Absl(Name(out_dtype))),
        {{"dtype", std::string(Name(a.dtype))}, {"out_dtype", std::string(Name(out_dtype))}});
  }
  return MakeArrayType(out_dtype, {a.shape[transpose_a ? 1 : 0], b.shape[transpose_b ? 0 : 1]});
}

absl::StatusOr<Stats> RunMatmul(Lane& lane, const View& a, const View& b, bool transpose_a,
                                bool transpose_b, DType out_dtype, void* out,
                                const RunOptions& options) {
  absl::StatusOr<ArrayType> type = MatmulType(a, b, transpose_a, transpose_b, out_dtype);
  if (!type.ok()) return type.status();
  const MatrixOperand left = MakeMatrixOperand(a, transpose_a);
  const MatrixOperand right = MakeMatrixOperand(b, transpose_b);
  MatmulProblem problem{.dtype = a.dtype,
                        .out_dtype = out_dtype,
                        .m = type->shape[0],
                        .n = type->shape[1],
                        .k = a.shape[transpose_a ? 0 : 1],
                        .lda = left.pitch,
                        .transpose_a = left.transpose,
                        .ldb = right.pitch,
                        .transpose_b = right.transpose,
                        .c = out};
  View gathered[2];  // without elements unless there is something to gather
  gathered[0].shape.rank = gathered[1].shape.rank = 1;
  if (left.gather) gathered[0] = a;
  if (right.gather) gathered[1] = b;
  return Execute(lane, problem, options, {&gathered[0], &gathered[1]}, [&](MatmulProblem& p) {
    p.a = left.gather ? Contiguous(lane, a) : a.data;
    p.b = right.gather ? Contiguous(lane, b) : b.data;
  });
}

absl::StatusOr<ArrayType> AddType(const View& a, const View& b) {
  if (absl::Status status = CheckSame(a, b); !status.ok()) return status;
  return ArrayType{a.dtype, a.shape};
}

absl::StatusOr<Stats> RunAdd(Lane& lane, const View& a, const View& b, void* out,
                             const RunOptions& options) {
  absl::StatusOr<ArrayType> type = AddType(a, b);
  if (!type.ok()) return type.status();
  AddProblem problem{.dtype = a.dtype, .n = a.elements(), .out = out};
  return Execute(lane, problem, options, {&a, &b}, [&](AddProblem& p) {
    p.a = Contiguous(lane, a);
    p.b = Contiguous(lane, b);
  });
}

absl::StatusOr<ArrayType> WindowSumType(const View& x, std::int64_t radius) {
  if (x.shape.rank != 1) {
    return Invalid(
        "BAD_SHAPE",
        absl::StrCat("the operand has shape ", ToString(x.shape), ", a window sum takes rank 1"),
        {{"x", ToString(x.shape)}});
  }
  if (radius < 0) {
    return Invalid("BAD_RADIUS", absl::StrCat("radius is ", radius, ", allowed: 0 and above"),
                   {{"field", "radius"}, {"value", absl::StrCat(radius)}, {"limit", "0"}});
  }
  return ArrayType{ResultDType(ReduceOp::kSum, x.dtype), x.shape};
}

absl::StatusOr<Stats> RunWindowSum(Lane& lane, const View& x, std::int64_t radius, void* out,
                                   const RunOptions& options) {
  absl::StatusOr<ArrayType> type = WindowSumType(x, radius);
  if (!type.ok()) return type.status();
  const std::int64_t n = x.elements();
  WindowSumProblem problem{.dtype = x.dtype,
                           .n = n,
                           .radius = std::min(radius, std::max<std::int64_t>(0, n - 1)),
                           .out = out};
  return Execute(lane, problem, options, {&x},
                 [&](WindowSumProblem& p) { p.x = Contiguous(lane, x); });
}

absl::StatusOr<Stats> RunDotBatch(Lane& lane, DType dtype, absl::Span<const DotSegment> segments,
                                  absl::Span<Scalar> results, bool timing) {
  const DotBatchProblem problem{.dtype = dtype,
                                .segments = segments.data(),
                                .count = static_cast<std::int64_t>(segments.size())};
  return ExecuteBatch(lane, problem, BatchOf(lane, problem), results, {.bytes = 2, .flops = 2},
                      timing);
}

absl::StatusOr<Stats> RunReduceBatch(Lane& lane, DType dtype, ReduceOp op,
                                     absl::Span<const ReduceSegment> segments,
                                     absl::Span<Scalar> results, bool timing) {
  if (NeedsElements(op)) {
    for (std::size_t i = 0; i < segments.size(); ++i)
      if (segments[i].n == 0) return EmptySegment(op, i);
  }
  const ReduceBatchProblem problem{.dtype = dtype,
                                   .op = op,
                                   .segments = segments.data(),
                                   .count = static_cast<std::int64_t>(segments.size())};
  return ExecuteBatch(lane, problem, BatchOf(lane, problem), results, {.bytes = 1, .flops = 1},
                      timing);
}

absl::Status RunCopy(Lane& lane, const View& view, DType dtype, void* out,
                     const RunOptions& options) {
  Device& device = lane.device();
  if (options.pace != nullptr) {
    const double estimate = options.pace->EstimateCopy(view, dtype);
    if (estimate > options.max_seconds) {
      options.pace->ForgetCopy(view, dtype);
      return TooLong("the copy", "", estimate, options.max_seconds, "");
    }
  }
  const Stopwatch watch;
  absl::Status status = Guard(device, [&] {
    if (dtype == view.dtype) {
      lane.Gather(view, out);
    } else {
      lane.Convert(Contiguous(lane, view), view.dtype, out, dtype, view.elements());
    }
    lane.Synchronize();
  });
  // What is in flight may still write to out.
  if (!status.ok()) Guard(device, [&] { lane.Synchronize(); }).IgnoreError();
  if (status.ok() && options.pace != nullptr) options.pace->LearnCopy(view, dtype, watch.seconds());
  return status;
}

}  // namespace tessera
