// One operation from checked operands to a finished result: find the strategy, make operands
// contiguous where they are not, launch, wait. Step 3 of a request's path.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/batch.h"
#include "kernels/compute.h"
#include "kernels/guard.h"
#include "kernels/map_cost.h"
#include "kernels/map_range.h"
#include "kernels/matmul.h"
#include "kernels/profiler_range.h"
#include "kernels/share_out.h"

namespace tessera {
namespace {

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

// --- Finding a strategy -------------------------------------------------------------------------

std::string Names(DTypes dtypes) {
  std::vector<std::string> names;
  for (DType d : kArrayDTypes)
    if (dtypes.Contains(d)) names.emplace_back(Name(d));
  return absl::StrJoin(names, ", ");
}

template <class Problem>
absl::Status Unsupported(std::string_view strategy, const Problem& problem, const Device& device,
                         const std::string& needs) {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "STRATEGY_UNSUPPORTED",
      absl::StrCat("strategy ", Absl(strategy), " of ", Absl(Problem::kOperation),
                   " cannot run this request on ", device.info().name, ": it needs ", needs),
      {{"strategy", std::string(strategy)},
       {"operation", std::string(Problem::kOperation)},
       {"dtype", std::string(Name(problem.dtype))},
       {"device", device.info().name},
       {"needs", needs}});
}

template <class Problem>
absl::Status CheckLaunch(const Strategy<Problem>& strategy, const Launch& launch) {
  struct Knob {
    const char* field;
    std::uint32_t value;
    LaunchLimits::Range range;
  };
  for (const Knob& knob : {Knob{"launch.block_size", launch.block_size, strategy.limits.block_size},
                           Knob{"launch.grid_size", launch.grid_size, strategy.limits.grid_size},
                           Knob{"launch.items_per_thread", launch.items_per_thread,
                                strategy.limits.items_per_thread}}) {
    if (knob.value == 0 || (knob.value >= knob.range.min && knob.value <= knob.range.max)) continue;
    const std::string range = knob.range.max == 0
                                  ? "0 (this strategy has no such knob)"
                                  : absl::StrCat(knob.range.min, " to ", knob.range.max);
    return Invalid("BAD_LAUNCH",
                   absl::StrCat(knob.field, " is ", knob.value, ", strategy ", Absl(strategy.name),
                                " takes ", range),
                   {{"field", knob.field},
                    {"value", absl::StrCat(knob.value)},
                    {"range", range},
                    {"strategy", std::string(strategy.name)}});
  }
  return absl::OkStatus();
}

// The strategy that a request names, or the fastest; checked against the problem's type, the device
// and the launch.
template <class Problem>
absl::StatusOr<const Strategy<Problem>*> Find(std::string_view name, const Problem& problem,
                                              const Device& device) {
  const Strategy<Problem>* found = nullptr;
  if (name.empty()) {
    found = Choose(problem, device);
    if (found == nullptr) {
      DTypes any;
      for (const Strategy<Problem>* strategy : Strategies<Problem>())
        if (Missing(*strategy, device).empty()) any.bits |= strategy->dtypes.bits;
      return Unsupported("(any)", problem, device, absl::StrCat("operands of ", Names(any)));
    }
  } else {
    // A name may have a strategy for each kind of device.
    std::vector<std::string_view> valid;
    for (const Strategy<Problem>* strategy : Strategies<Problem>()) {
      if (std::find(valid.begin(), valid.end(), strategy->name) == valid.end())
        valid.push_back(strategy->name);
      if (strategy->name == name &&
          (found == nullptr || strategy->backend == device.info().backend))
        found = strategy;
    }
    if (found == nullptr) {
      const std::string names =
          absl::StrJoin(valid, ", ", [](std::string* out, std::string_view s) { out->append(s); });
      return Invalid("UNKNOWN_STRATEGY",
                     absl::StrCat("no strategy of ", Absl(Problem::kOperation), " is called '",
                                  Absl(name), "'; there are ", names),
                     {{"strategy", std::string(name)},
                      {"operation", std::string(Problem::kOperation)},
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

// --- What it may cost ---------------------------------------------------------------------------

absl::Status TooLong(std::string_view what, std::string_view strategy, double estimate,
                     double limit, std::string_view advice) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "OPERATION_TOO_LONG",
                   absl::StrFormat("%s is expected to take %.3g s, at most %.3g s are allowed%s",
                                   Absl(what), estimate, limit, Absl(advice)),
                   {{"strategy", std::string(strategy)},
                    {"estimate_seconds", absl::StrFormat("%.3g", estimate)},
                    {"limit_seconds", absl::StrFormat("%.3g", limit)}});
}

// The expected seconds.
template <class Problem>
absl::StatusOr<double> CheckSeconds(const Strategy<Problem>& strategy, const Problem& problem,
                                    const Device& device, double gather_seconds,
                                    const RunOptions& options) {
  const double estimate = gather_seconds + options.pace->Estimate(strategy, problem);
  if (estimate <= std::min(options.max_seconds, options.max_slow_seconds)) return estimate;
  const bool slow = !options.strategy.empty() && Choose(problem, device) != &strategy;
  const double limit =
      slow ? std::min(options.max_seconds, options.max_slow_seconds) : options.max_seconds;
  if (estimate <= limit) return estimate;
  options.pace->Forget(strategy, problem);
  return TooLong(
      absl::StrCat(Absl(Problem::kOperation), " by strategy ", Absl(strategy.name)), strategy.name,
      estimate, limit,
      slow ? "; a request that names no strategy gets the default one of this problem" : "");
}

absl::Status CheckCopySeconds(const View& view, DType dtype, const RunOptions& options) {
  if (options.pace == nullptr) return absl::OkStatus();
  const double estimate = options.pace->EstimateCopy(view, dtype);
  if (estimate <= options.max_seconds) return absl::OkStatus();
  options.pace->ForgetCopy(view, dtype);
  return TooLong("the copy", "", estimate, options.max_seconds, "");
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// --- Running it ---------------------------------------------------------------------------------

absl::Status Cancelled() {
  return MakeError(absl::StatusCode::kCancelled, "CANCELLED",
                   "the caller left while the operation ran");
}

// What work() left, once the stream has been synchronised, or unless `wait`, enqueued: after a
// failure always synchronised, since what is in flight may still use the operands. On a lost device
// that fails as well, and nothing runs any more.
template <class Work>
absl::Status Finished(Stream& stream, const Work& work, bool wait = true) {
  Device& device = stream.device();
  absl::Status status = Guard(device, [&] {
    work();
    if (!wait) return;
    const ProfilerRange range("wait");
    stream.Synchronize();
  });
  if (!status.ok()) {
    Guard(device, [&] { stream.Synchronize(); }).IgnoreError();
    return status;
  }
  return stream.stopped() ? Cancelled() : absl::OkStatus();
}

std::uint64_t SaturatingAdd(std::uint64_t a, std::uint64_t b) {
  return a + b < a ? UINT64_MAX : a + b;
}

std::uint64_t Bytes(const View& view) {
  return static_cast<std::uint64_t>(view.elements()) * SizeOf(view.dtype);
}

// An operand as a view, and where a strategy looks for it.
struct Operand {
  const View& view;
  bool gather;                // the strategy needs a copy: it cannot use the view's own memory
  const void** data;          // in the problem
  const View** as_view = {};  // in the problem, for strategies that read views; null: none does

  Operand(const View& v, bool g, const void** d, const View** a = nullptr)
      : view(v), gather(g), data(d), as_view(a) {
    *data = gather ? nullptr : view.data;
  }
};

bool HasGaps(const View& view) { return view.elements() != 0 && !view.contiguous(); }

// Whether there is nothing to compute: the result has no elements, whatever the other extents are,
// or they are sums without terms. No strategy is asked.
template <class Problem>
bool IsTrivial(const Problem&) {
  return false;
}
bool IsTrivial(const MatmulProblem& p) { return p.m == 0 || p.n == 0 || p.k == 0; }
bool IsTrivial(const MapProblem& p) { return p.n == 0; }
bool IsTrivial(const TopKProblem& p) { return p.rows == 0; }
bool IsTrivial(const ReduceAxesProblem& p) { return p.outer == 0 || p.inner == 0; }

// Writes the result of a trivial problem.
template <class Problem>
void Settle(const Problem&, Stream&) {}
void Settle(const MatmulProblem& p, Stream& stream) {
  if (p.m > 0 && p.n > 0)
    stream.Zero(p.c, static_cast<std::size_t>(p.m * p.n) * SizeOf(p.out_dtype));
}

// Throws DeviceError.
template <class Problem>
void LaunchOn(Stream& stream, const Problem& problem, const Strategy<Problem>& strategy) {
  const ProfilerRange range(strategy.name);
  strategy.launch(problem, stream);
}
// Copies the view's elements to out, in row-major order. Throws DeviceError.
void GatherOn(Stream& stream, const View& view, void* out) {
  const ProfilerRange range("gather");
  stream.Gather(view, out);
}

// One strategy on one problem: the scratch memory that it takes, and how it is launched, in a
// stream's order. Throws DeviceError.
template <class Problem>
struct WholeLaunch {
  absl::Span<const Operand> operands;

  bool Copies(const Operand& operand, const Strategy<Problem>& strategy) const {
    return operand.gather && !(strategy.reads_views && operand.as_view != nullptr);
  }
  std::uint64_t CopyBytes(const Stream&, const Strategy<Problem>& strategy) const {
    std::uint64_t bytes = 0;
    for (const Operand& operand : operands)
      if (Copies(operand, strategy)) bytes = SaturatingAdd(bytes, Bytes(operand.view));
    return bytes;
  }
  // Whether they are copied or read in place.
  double GatherSeconds(const Pace& pace) const {
    double seconds = 0;
    for (const Operand& operand : operands) {
      if (operand.gather) seconds += pace.EstimateCopy(operand.view, operand.view.dtype);
    }
    return seconds;
  }
  Division Divide(const Problem& problem, const Strategy<Problem>& strategy,
                  const Team& team) const {
    return DivisionOf(problem, strategy, team);
  }
  void operator()(Stream& stream, const Problem& problem, const Strategy<Problem>& strategy) const {
    for (const Operand& operand : operands) {
      if (stream.stopped()) return;
      if (Copies(operand, strategy)) {
        void* copy = stream.Scratch(static_cast<std::size_t>(Bytes(operand.view)));
        GatherOn(stream, operand.view, copy);
        *operand.data = copy;
      } else if (operand.gather) {
        *operand.as_view = &operand.view;
      }
    }
    if (!stream.stopped()) LaunchOn(stream, problem, strategy);
  }
};

// The strategy, if its scratch memory is within the limit of the stream's budget; or, for whoever
// leaves the choice to us, another whose is. Both by the limit, not by what is free of it: the same
// request shall have the same bits however busy the server is.
template <class Problem, class Work>
absl::StatusOr<const Strategy<Problem>*> WithinLimit(const Strategy<Problem>* strategy,
                                                     const Problem& problem, bool named,
                                                     const Team* team, const Stream& stream,
                                                     const Work& work) {
  const Budget* budget = stream.scratch_budget();
  if (budget == nullptr) return strategy;
  const auto need = [&](const Strategy<Problem>& r) {
    return SaturatingAdd(work.CopyBytes(stream, r), r.scratch == nullptr ? 0 : r.scratch(problem));
  };
  const std::uint64_t needed = need(*strategy);
  if (needed <= budget->limit()) return strategy;
  if (!named) {
    const Strategy<Problem>* other = ForTeamInPlace(problem, stream.device(), team);
    if (other != nullptr && CheckLaunch(*other, problem.launch).ok() &&
        need(*other) <= budget->limit())
      return other;
  }
  return ScratchExhausted(stream.device(), needed, budget->free(), budget->limit());
}

// What the strategy says of itself for a problem.
template <class Problem>
Stats StatsOf(const Strategy<Problem>& strategy, const Problem& problem) {
  const Cost cost = strategy.cost(problem);
  return {.strategy = strategy.name,
          .bytes = cost.bytes,
          .flops = cost.flops,
          .roundoff = strategy.roundoff(problem)};
}

// place(problem) says where the result goes; work is launched, and may gather, which the measured
// time includes. What else it may have: Account(strategy, stats) for what it costs beside the
// strategy, Settle(problem, stream) for a trivial problem, and LaunchWide(stream, problem, strategy)
// where Strategy::launch_wide alone does not do it.
template <class Problem, class Place, class Work>
absl::StatusOr<Stats> Execute(Stream& stream, Problem& problem, const RunOptions& options,
                              const Place& place, const Work& work) {
  problem.launch = options.launch;
  absl::StatusOr<const Strategy<Problem>*> strategy =
      Find(options.strategy, problem, stream.device());
  if (!strategy.ok()) return strategy.status();
  const bool named = !options.strategy.empty();
  if (!named && options.team != nullptr)
    strategy = ForTeam(problem, **strategy, stream.device(), *options.team);
  strategy = WithinLimit(*strategy, problem, named, options.team, stream, work);
  if (!strategy.ok()) return strategy.status();
  const bool trivial = IsTrivial(problem);
  Stats stats = StatsOf(**strategy, problem);
  if constexpr (requires { work.Account(**strategy, stats); }) work.Account(**strategy, stats);
  double gather_seconds = 0;
  if (options.pace != nullptr && !trivial) {
    gather_seconds = work.GatherSeconds(*options.pace);
    absl::StatusOr<double> estimate =
        CheckSeconds(**strategy, problem, stream.device(), gather_seconds, options);
    if (!estimate.ok()) return estimate.status();
    stats.estimate_seconds = *estimate;
  }
  if (options.check_only) return stats;
  if (absl::Status status = place(problem); !status.ok()) return status;

  std::vector<TeamShare> shares;
  if (options.team != nullptr && !trivial) {
    absl::StatusOr<std::vector<TeamShare>> found =
        ShareOut(*options.team, work.Divide(problem, **strategy, *options.team), stream);
    if (!found.ok()) return found.status();
    shares = *std::move(found);
  }
  stats.devices = std::max<int>(1, static_cast<int>(shares.size()));
  const Stopwatch watch;
  const bool wait = !options.enqueue_only || options.timing || options.team != nullptr;
  absl::Status status = Finished(
      stream,
      [&] {
        if (options.timing) stream.StartTimer();
        if (trivial) {
          if constexpr (requires { work.Settle(problem, stream); }) {
            work.Settle(problem, stream);
          } else {
            Settle(problem, stream);
          }
        } else if (shares.empty()) {
          work(stream, problem, **strategy);
        } else {
          LaunchShares(problem, **strategy, shares, stream, /*wide=*/false);
        }
        if (options.timing) stats.kernel_us = stream.StopTimer();
        AwaitOthers(shares, stream);
        if (trivial || (*strategy)->left_range == nullptr || stream.stopped()) return;
        stream.Synchronize();
        if (!LeftRange(problem, **strategy, shares, stream) || stream.stopped()) return;
        if (options.timing) stream.StartTimer();
        if (!shares.empty()) {
          LaunchShares(problem, **strategy, shares, stream, /*wide=*/true);
        } else if constexpr (requires { work.LaunchWide(stream, problem, **strategy); }) {
          work.LaunchWide(stream, problem, **strategy);
        } else {
          (*strategy)->launch_wide(problem, stream);
        }
        if (options.timing) stats.kernel_us += stream.StopTimer();
        AwaitOthers(shares, stream);
      },
      wait);
  if (!status.ok()) return status;
  // With a gather in it, or help, the time says little about the strategy.
  if (options.pace != nullptr && gather_seconds == 0 && !trivial && wait && shares.empty())
    options.pace->Learn(**strategy, problem, watch.seconds());
  return stats;
}

// For operations that end in an array, whose address goes to *data.
auto PlaceAt(const Output& output, void** data) {
  return [&output, data](const auto&) -> absl::Status {
    absl::StatusOr<void*> memory = output.Get();
    if (memory.ok()) *data = *memory;
    return memory.status();
  };
}

template <class Problem, class Work>
absl::StatusOr<ScalarResult> ExecuteScalar(Stream& stream, Problem& problem, bool integer,
                                           RunOptions options, const Work& work) {
  options.enqueue_only = false;  // the result is read at once
  const auto place = [&stream](Problem& p) {
    p.result = stream.result();
    return absl::OkStatus();
  };
  absl::StatusOr<Stats> stats = Execute(stream, problem, options, place, work);
  if (!stats.ok()) return stats.status();
  return ScalarResult{options.check_only ? Scalar{} : *problem.result, integer, *stats};
}

// --- In pieces ----------------------------------------------------------------------------------

// Elements of `size` bytes in the pieces in which a strided array is copied: on a GPU enough to
// outlast their launches, on the CPU what stays in a cache, or in so many. `copies` of them fit what a stream
// keeps of scratch memory on the CPU, and a quarter of the budget anywhere.
std::int64_t PieceElements(const Stream& stream, std::size_t size, int copies, int caches = 1) {
  std::uint64_t bytes = stream.device().info().backend == Backend::kCuda ? std::uint64_t{32} << 20
                                                                         : std::uint64_t{512} << 10;
  bytes *= static_cast<std::uint64_t>(caches);
  if (const Budget* budget = stream.scratch_budget(); budget != nullptr)
    bytes = std::min(bytes, budget->limit() / 4);
  return std::max<std::int64_t>(
      1, static_cast<std::int64_t>(bytes) / (copies * static_cast<std::int64_t>(size)));
}

// A part of an array whose elements follow each other in row-major order.
struct Piece {
  std::int64_t first = 0;  // index of its first element
  std::array<std::int64_t, kMaxRank> begin{};
  Shape shape;

  // Of an array of which this is a part.
  View Of(const View& view) const {
    std::int64_t offset = 0;
    for (int i = 0; i < shape.rank; ++i)
      offset += begin[static_cast<std::size_t>(i)] * view.strides[static_cast<std::size_t>(i)];
    View part = view;
    part.shape = shape;
    part.data = static_cast<const char*>(view.data) +
                offset * static_cast<std::int64_t>(SizeOf(view.dtype));
    return part;
  }
};

// f(piece) for pieces of at most `most` elements, from first to last, until it is false.
template <class F>
void ForPieces(const Shape& shape, std::int64_t most, const F& f) {
  const std::int64_t n = shape.elements();
  if (n == 0) return;
  // The outermost axis of which a step is not too much; axes before it are walked one by one.
  std::int64_t step = n;  // elements of a step along the axis
  int axis = -1;
  do {
    if (++axis == shape.rank) break;
    step /= shape[axis];
  } while (step > most);
  Piece piece;
  piece.shape = shape;
  if (axis == shape.rank) {
    f(piece);  // a scalar
    return;
  }
  for (int i = 0; i < axis; ++i) piece.shape[i] = 1;
  const std::int64_t steps = most / step;
  while (piece.first < n) {
    std::int64_t& at = piece.begin[static_cast<std::size_t>(axis)];
    piece.shape[axis] = std::min(steps, shape[axis] - at);
    if (!f(piece)) return;
    piece.first += piece.shape[axis] * step;
    at += piece.shape[axis];
    for (int i = axis; i > 0 && piece.begin[static_cast<std::size_t>(i)] == shape[i]; --i) {
      piece.begin[static_cast<std::size_t>(i)] = 0;
      ++piece.begin[static_cast<std::size_t>(i - 1)];
    }
  }
}

void* At(void* data, std::int64_t index, DType dtype) {
  return static_cast<char*>(data) + index * static_cast<std::int64_t>(SizeOf(dtype));
}

// Add piece by piece, where an operand is strided.
struct AddInPieces {
  const View& a;
  const View& b;

  int copies() const { return HasGaps(a) + HasGaps(b); }
  std::int64_t most(const Stream& stream) const {
    return std::min(a.elements(), PieceElements(stream, SizeOf(a.dtype), copies()));
  }
  std::uint64_t CopyBytes(const Stream& stream, const Strategy<AddProblem>&) const {
    if (copies() == 0) return 0;
    return static_cast<std::uint64_t>(most(stream) * copies()) * SizeOf(a.dtype);
  }
  double GatherSeconds(const Pace& pace) const {
    return (HasGaps(a) ? pace.EstimateCopy(a, a.dtype) : 0) +
           (HasGaps(b) ? pace.EstimateCopy(b, b.dtype) : 0);
  }
  Division Divide(const AddProblem& problem, const Strategy<AddProblem>& strategy,
                  const Team& team) const {
    return copies() == 0 ? DivisionOf(problem, strategy, team) : Division();
  }
  void operator()(Stream& stream, AddProblem& problem, const Strategy<AddProblem>& strategy) const {
    if (copies() == 0) return LaunchOn(stream, problem, strategy);
    const std::size_t size = static_cast<std::size_t>(most(stream)) * SizeOf(a.dtype);
    void* const a_copy = HasGaps(a) ? stream.Scratch(size) : nullptr;
    void* const b_copy = HasGaps(b) ? stream.Scratch(size) : nullptr;
    const auto part = [&](const View& view, void* copy, const Piece& piece) {
      const View v = piece.Of(view);
      if (copy == nullptr) return v.data;
      GatherOn(stream, v, copy);
      return static_cast<const void*>(copy);
    };
    AddProblem p = problem;
    ForPieces(a.shape, most(stream), [&](const Piece& piece) {
      p.n = piece.shape.elements();
      p.a = part(a, a_copy, piece);
      p.b = part(b, b_copy, piece);
      p.out = At(problem.out, piece.first, a.dtype);
      if (!stream.stopped()) LaunchOn(stream, p, strategy);
      return !stream.stopped();
    });
  }
};

// --- Axes ---------------------------------------------------------------------------------------

// Which axes of x are folded.
absl::StatusOr<std::array<bool, kMaxRank>> FoldedAxes(const Shape& shape,
                                                      absl::Span<const int> axes) {
  std::array<bool, kMaxRank> folded{};
  const int rank = shape.rank;
  for (int axis : axes) {
    if (axis < -rank || axis >= rank) {
      return Invalid("BAD_AXES",
                     absl::StrCat("axis ", axis, " of an operand of rank ", rank, "; allowed: ",
                                  rank == 0 ? "none" : absl::StrCat(-rank, " to ", rank - 1)),
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

// Whether the operation has a value for so many elements of the type.
absl::Status CheckFolds(ReduceOp op, DType dtype, std::int64_t n) {
  if (!Folds(op, dtype)) {
    return Invalid(
        "BAD_DTYPE",
        absl::StrCat(Absl(Name(op)), " of truth values: sum, mean, all and any fold them"),
        {{"op", std::string(Name(op))}, {"dtype", std::string(Name(dtype))}});
  }
  return n == 0 && NeedsElements(op) ? EmptyInput(op) : absl::OkStatus();
}

// The axes of an array so ordered that folded ones are neighbours, and the three extents that result.
// Axes that are neighbours already stay where they are, which saves a gather.
struct Folding {
  std::vector<int> order;
  std::int64_t outer = 1, length = 1, inner = 1;

  View Of(const View& x) const {
    View ordered = x;
    for (int i = 0; i < x.shape.rank; ++i) {
      const int from = order[static_cast<std::size_t>(i)];
      ordered.shape[i] = x.shape[from];
      ordered.strides[static_cast<std::size_t>(i)] = x.strides[static_cast<std::size_t>(from)];
    }
    return ordered;
  }
};

Folding MakeFolding(const Shape& shape, const std::array<bool, kMaxRank>& folded) {
  const int rank = shape.rank;
  const auto is_folded = [&](int i) { return folded[static_cast<std::size_t>(i)]; };
  int first = 0;
  while (first < rank && !is_folded(first)) ++first;
  int last = rank;
  while (last > first && !is_folded(last - 1)) --last;
  bool neighbours = true;
  for (int i = first; i < last; ++i) neighbours &= is_folded(i);

  Folding folding;
  for (int i = 0; i < rank; ++i)
    if (neighbours || !is_folded(i)) folding.order.push_back(i);
  if (!neighbours)
    for (int i = 0; i < rank; ++i)
      if (is_folded(i)) folding.order.push_back(i);
  for (int from : folding.order) {
    (is_folded(from)              ? folding.length
     : neighbours && from >= last ? folding.inner
                                  : folding.outer) *= shape[from];
  }
  return folding;
}

// Of a whole operand's value: ARG operations give the extreme one, which is of the operand's type.
DType ScalarDType(ReduceOp op, DType dtype) { return IsArg(op) ? dtype : ResultDType(op, dtype); }

// --- Shapes that are broadcast ------------------------------------------------------------------

// The shape that all operands are stretched to: of each axis, counted from the last, the one extent
// that is not 1. names: of an operand in an error.
template <class Names>
absl::StatusOr<Shape> BroadcastShape(absl::Span<const View> operands, const Names& names) {
  Shape shape;
  for (const View& view : operands) shape.rank = std::max(shape.rank, view.shape.rank);
  for (int i = 0; i < shape.rank; ++i) shape[i] = 1;
  for (std::size_t operand = 0; operand < operands.size(); ++operand) {
    const Shape& own = operands[operand].shape;
    for (int i = 0; i < own.rank; ++i) {
      std::int64_t& extent = shape[shape.rank - own.rank + i];
      if (own[i] == extent || own[i] == 1) continue;
      if (extent != 1) {
        return Invalid(
            "BAD_SHAPE",
            absl::StrCat("operand ", names(operand), " has shape ", ToString(own),
                         ", which does not go with ", ToString(shape)),
            {{"operand", names(operand)}, {"shape", ToString(own)}, {"others", ToString(shape)}});
      }
      extent = own[i];
    }
  }
  return shape;
}

// The view stretched to the shape, with strides of 0 where it repeats.
View Broadcast(const View& view, const Shape& shape) {
  View wide{.data = view.data, .dtype = view.dtype, .shape = shape, .strides = {}};
  const auto rank = static_cast<std::size_t>(view.shape.rank);
  const std::size_t before = static_cast<std::size_t>(shape.rank) - rank;
  for (std::size_t i = 0; i < rank; ++i) {
    if (view.shape[static_cast<int>(i)] != 1) wide.strides[before + i] = view.strides[i];
  }
  return wide;
}

std::string NameOfMapOperand(std::size_t i) { return absl::StrCat("operands[", i, "]"); }

absl::StatusOr<MapProgram> CompileFor(absl::Span<const View> operands,
                                      absl::Span<const ExpressionNode> expression,
                                      std::optional<DType> cast = std::nullopt) {
  std::vector<DType> dtypes;
  for (const View& view : operands) dtypes.push_back(view.dtype);
  return CompileExpression(expression, dtypes, cast);
}

// --- Expressions on the way into operations and out of them ---

// Takes the elements as they are.
absl::Span<const ExpressionNode> Identity() {
  static const ExpressionNode node{.kind = ExpressionNode::Kind::kOperand};
  return {&node, 1};
}

// A MapStage that has been checked, as a problem. Stays where it is, for the problem names the program.
class StagedMap {
 public:
  // Of operand 0, which errors call first_name. numeric: truth values become I32.
  static absl::StatusOr<std::unique_ptr<StagedMap>> Make(const View& first, const MapStage& stage,
                                                         std::string_view first_name,
                                                         bool numeric) {
    std::vector<View> operands = {first};
    operands.insert(operands.end(), stage.with.begin(), stage.with.end());
    absl::StatusOr<MapProgram> program = CompileFor(operands, stage.expression);
    if (!program.ok()) return program.status();
    auto staged = std::make_unique<StagedMap>();
    staged->type_.dtype = program->dtype;
    if (numeric && program->dtype == DType::kBool) {
      program = CompileFor(operands, stage.expression, DType::kI32);
      if (!program.ok()) return program.status();
    }
    staged->program_ = *std::move(program);
    const absl::StatusOr<Shape> shape = BroadcastShape(operands, [&](std::size_t i) {
      return i == 0 ? std::string(first_name) : absl::StrCat("with[", i - 1, "]");
    });
    if (!shape.ok()) return shape.status();
    const absl::StatusOr<ArrayType> type = MakeArrayType(
        staged->program_.dtype, {shape->dims.data(), static_cast<std::size_t>(shape->rank)});
    if (!type.ok()) return type.status();
    staged->type_.shape = *shape;
    MapProblem& problem = staged->problem_;
    problem.dtype = type->dtype;
    problem.n = shape->elements();
    problem.program = &staged->program_;
    for (std::size_t i = 0; i < operands.size(); ++i)
      problem.operands[i] = Broadcast(operands[i], *shape);
    return staged;
  }

  // Of what the expression makes, in which truth values are still such.
  const ArrayType& type() const { return type_; }
  MapProblem& problem() { return problem_; }

 private:
  ArrayType type_;
  MapProgram program_;
  MapProblem problem_;
};

// What is folded: x itself, through an expression that changes nothing, where there is no other.
absl::StatusOr<std::unique_ptr<StagedMap>> StageReduce(const View& x, const MapStage* in) {
  const MapStage identity{Identity(), {}};
  return StagedMap::Make(x, in == nullptr ? identity : *in, "x", /*numeric=*/true);
}

// Whether elements are to be computed before they are folded.
bool IsMapped(const View& x, const MapStage* in) {
  return in != nullptr || x.dtype == DType::kBool;
}

// What a map costs beside the operation. in_cache: its result is in device memory neither when it is
// written nor when the operation, which counts that, reads it.
void AccountMap(const MapProblem& map, bool in_cache, Stats& stats) {
  const Cost cost = OnePassCost(map);
  stats.bytes += cost.bytes;
  if (in_cache) stats.bytes -= 2 * static_cast<std::uint64_t>(map.n) * SizeOf(map.dtype);
  stats.flops += cost.flops;
}

double MapSeconds(const MapProblem& map, const Stream& stream, const Pace& pace) {
  return pace.Estimate(*Choose(map, stream.device()), map);
}

// Reduce of what an expression makes: by a strategy that computes its elements as it goes, or from
// scratch memory.
struct FoldMap {
  const MapProblem& map;
  const Stream& stream;

  std::uint64_t CopyBytes(const Stream&, const Strategy<ReduceProblem>& strategy) const {
    return strategy.reads_views ? 0 : static_cast<std::uint64_t>(map.n) * SizeOf(map.dtype);
  }
  double GatherSeconds(const Pace& pace) const { return MapSeconds(map, stream, pace); }
  Division Divide(const ReduceProblem&, const Strategy<ReduceProblem>&, const Team&) const {
    return {};
  }
  void Account(const Strategy<ReduceProblem>& strategy, Stats& stats) const {
    AccountMap(map, /*in_cache=*/strategy.reads_views, stats);
  }
  void operator()(Stream& on, ReduceProblem& problem,
                  const Strategy<ReduceProblem>& strategy) const {
    if (strategy.reads_views) {
      problem.map = &map;
    } else {
      void* const copy = on.Scratch(static_cast<std::size_t>(CopyBytes(on, strategy)));
      LaunchMapRange(map, 0, map.n, copy, on);
      problem.x = copy;
    }
    if (!on.stopped()) LaunchOn(on, problem, strategy);
  }
};

// The same along axes, in pieces of the outermost one: the map's result is [outer, length, inner].
struct FoldMapAxes {
  const MapProblem& map;
  const Stream& stream;
  const ReduceAxesProblem& problem;

  std::int64_t row() const { return problem.length * problem.inner; }
  // Rows of a piece: what stays in a cache of the second level, of each core's on a CPU.
  std::int64_t rows() const {
    const DeviceInfo& info = stream.device().info();
    const int cores = info.backend == Backend::kCpu ? std::max(1, info.multiprocessors) : 1;
    const std::int64_t elements = PieceElements(stream, SizeOf(map.dtype), /*copies=*/1, cores);
    return std::clamp<std::int64_t>(elements / std::max<std::int64_t>(1, row()), 1,
                                    std::max<std::int64_t>(1, problem.outer));
  }
  std::uint64_t CopyBytes(const Stream&, const Strategy<ReduceAxesProblem>&) const {
    return static_cast<std::uint64_t>(rows() * row()) * SizeOf(map.dtype);
  }
  double GatherSeconds(const Pace& pace) const { return MapSeconds(map, stream, pace); }
  Division Divide(const ReduceAxesProblem&, const Strategy<ReduceAxesProblem>&, const Team&) const {
    return {};
  }
  void Account(const Strategy<ReduceAxesProblem>&, Stats& stats) const {
    AccountMap(map, /*in_cache=*/rows() < problem.outer, stats);
  }
  void Fold(Stream& on, ReduceAxesProblem& whole, const Strategy<ReduceAxesProblem>& strategy,
            bool wide) const {
    if (whole.x == nullptr) {
      const std::uint64_t bytes = std::max<std::uint64_t>(1, CopyBytes(on, strategy));
      whole.x = on.Scratch(static_cast<std::size_t>(bytes));
    }
    void* const piece = const_cast<void*>(whole.x);
    for (std::int64_t first = 0; first < whole.outer && !on.stopped();) {
      const std::int64_t end = std::min(whole.outer, first + rows());
      LaunchMapRange(map, first * row(), (end - first) * row(), piece, on);
      ReduceAxesProblem part = PartOf(whole, {&on, first, end});
      part.x = piece;
      part.continues = first > 0;
      if (wide) {
        strategy.launch_wide(part, on);
      } else {
        LaunchOn(on, part, strategy);
      }
      first = end;
    }
  }
  void operator()(Stream& on, ReduceAxesProblem& whole,
                  const Strategy<ReduceAxesProblem>& strategy) const {
    Fold(on, whole, strategy, /*wide=*/false);
  }
  void LaunchWide(Stream& on, ReduceAxesProblem& whole,
                  const Strategy<ReduceAxesProblem>& strategy) const {
    Fold(on, whole, strategy, /*wide=*/true);
  }
};

// Matmul into scratch memory, which the map reads from operand 0.
struct MatmulThenMap {
  WholeLaunch<MatmulProblem> product;
  MapProblem& map;
  const Stream& stream;
  std::uint64_t product_bytes;

  std::uint64_t CopyBytes(const Stream& on, const Strategy<MatmulProblem>& strategy) const {
    return SaturatingAdd(product.CopyBytes(on, strategy), product_bytes);
  }
  double GatherSeconds(const Pace& pace) const {
    return product.GatherSeconds(pace) + MapSeconds(map, stream, pace);
  }
  Division Divide(const MatmulProblem&, const Strategy<MatmulProblem>&, const Team&) const {
    return {};
  }
  void Account(const Strategy<MatmulProblem>&, Stats& stats) const {
    AccountMap(map, /*in_cache=*/false, stats);
  }
  void Settle(MatmulProblem& problem, Stream& on) const {
    if (map.n == 0) return;
    problem.c = on.Scratch(static_cast<std::size_t>(product_bytes));
    tessera::Settle(problem, on);
    Finish(problem, on);
  }
  void operator()(Stream& on, MatmulProblem& problem,
                  const Strategy<MatmulProblem>& strategy) const {
    problem.c = on.Scratch(static_cast<std::size_t>(product_bytes));
    product(on, problem, strategy);
    if (!on.stopped()) Finish(problem, on);
  }
  void Finish(const MatmulProblem& problem, Stream& on) const {
    map.operands[0].data = problem.c;
    LaunchMapRange(map, 0, map.n, map.out, on);
  }
};

// n contiguous elements as another type. Throws DeviceError.
void ConvertOn(Stream& stream, const void* in, DType from, void* out, DType to, std::int64_t n) {
  if (from != DType::kBool && to != DType::kBool) return stream.Convert(in, from, out, to, n);
  const absl::StatusOr<MapProgram> program = CompileExpression(Identity(), {from}, to);
  MapProblem cast{.dtype = to, .n = n, .program = &*program};
  cast.operands[0] = {.data = in, .dtype = from, .shape = {.rank = 1, .dims = {n}}, .strides = {1}};
  LaunchMapRange(cast, 0, n, out, stream);
}

// --- Batches ------------------------------------------------------------------------------------

template <class Problem>
void LaunchBatchOn(std::span<const Problem> problems, Stream& stream) {
  const ProfilerRange range("batch");
#ifdef TESSERA_WITH_CUDA
  if (stream.device().info().backend == Backend::kCuda) return LaunchBatchCuda(problems, stream);
#endif
  LaunchBatchCpu(problems, stream);
}

// Runs the problems, of one dtype and op, into results; integer: whether those are integers.
template <class Problem>
absl::Status ExecuteBatch(Stream& stream, std::vector<Problem>& problems, bool integer,
                          absl::Span<ScalarResult> results) {
  if (problems.empty()) return absl::OkStatus();
  const Strategy<Problem>& strategy = *Choose(problems.front(), stream.device());
  Scalar* scalars = nullptr;
  absl::Status status = Finished(stream, [&] {
    scalars = static_cast<Scalar*>(stream.HostScratch(problems.size() * sizeof(Scalar)));
    for (std::size_t i = 0; i < problems.size(); ++i) {
      scalars[i] = Scalar{};
      problems[i].result = scalars + i;
    }
    LaunchBatchOn(std::span<const Problem>(problems), stream);
    stream.Synchronize();
    for (const Problem& problem : problems) {
      if (strategy.left_range == nullptr || stream.stopped()) return;
      if (strategy.left_range(problem, stream)) strategy.launch_wide(problem, stream);
    }
  });
  if (!status.ok()) return status;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    results[i] = {scalars[i], integer, StatsOf(strategy, problems[i])};
  }
  return absl::OkStatus();
}

// --- Matmul operands ----------------------------------------------------------------------------

// A matrix as the strategies take it: rows or columns without gaps, any pitch.
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

absl::StatusOr<ScalarResult> RunDot(Stream& stream, const View& a, const View& b,
                                    const RunOptions& options) {
  if (absl::Status status = CheckSame(a, b); !status.ok()) return status;
  DotProblem problem{.dtype = a.dtype, .n = a.elements()};
  const Operand operands[] = {{a, HasGaps(a), &problem.a, &problem.a_view},
                              {b, HasGaps(b), &problem.b, &problem.b_view}};
  return ExecuteScalar(stream, problem, IsInteger(a.dtype), options,
                       WholeLaunch<DotProblem>{operands});
}

absl::StatusOr<ScalarResult> RunReduce(Stream& stream, const View& x, ReduceOp op,
                                       const RunOptions& options, const MapStage* in) {
  if (IsMapped(x, in)) {
    absl::StatusOr<std::unique_ptr<StagedMap>> staged = StageReduce(x, in);
    if (!staged.ok()) return staged.status();
    const MapProblem& map = (*staged)->problem();
    const DType dtype = (*staged)->type().dtype;
    if (absl::Status status = CheckFolds(op, dtype, map.n); !status.ok()) return status;
    ReduceProblem problem{.dtype = map.dtype, .op = op, .n = map.n};
    return ExecuteScalar(stream, problem, IsInteger(ScalarDType(op, dtype)), options,
                         FoldMap{map, stream});
  }
  if (absl::Status status = CheckFolds(op, x.dtype, x.elements()); !status.ok()) return status;
  ReduceProblem problem{.dtype = x.dtype, .op = op, .n = x.elements()};
  const Operand operands[] = {{x, HasGaps(x), &problem.x, &problem.x_view}};
  return ExecuteScalar(stream, problem, IsInteger(ScalarDType(op, x.dtype)), options,
                       WholeLaunch<ReduceProblem>{operands});
}

namespace {

// Of the array that is folded.
absl::StatusOr<ArrayType> FoldedType(const View& x, const MapStage* in) {
  if (!IsMapped(x, in)) return ArrayType{x.dtype, x.shape};
  absl::StatusOr<std::unique_ptr<StagedMap>> staged = StageReduce(x, in);
  if (!staged.ok()) return staged.status();
  return (*staged)->type();
}

}  // namespace

absl::StatusOr<ArrayType> ReduceType(const View& x, ReduceOp op, const MapStage* in) {
  const absl::StatusOr<ArrayType> folded = FoldedType(x, in);
  if (!folded.ok()) return folded.status();
  absl::Status status = CheckFolds(op, folded->dtype, folded->shape.elements());
  if (!status.ok()) return status;
  return ArrayType{ResultDType(op, folded->dtype), {}};
}

absl::StatusOr<ArrayType> ReduceAxesType(const View& x, ReduceOp op, absl::Span<const int> axes,
                                         bool keep_dims, const MapStage* in) {
  const absl::StatusOr<ArrayType> of = FoldedType(x, in);
  if (!of.ok()) return of.status();
  absl::StatusOr<std::array<bool, kMaxRank>> folded = FoldedAxes(of->shape, axes);
  if (!folded.ok()) return folded.status();
  std::vector<std::int64_t> shape;
  bool nothing_to_fold = false;
  for (int i = 0; i < of->shape.rank; ++i) {
    if (!(*folded)[static_cast<std::size_t>(i)]) {
      shape.push_back(of->shape[i]);
    } else {
      nothing_to_fold |= of->shape[i] == 0;
      if (keep_dims) shape.push_back(1);
    }
  }
  absl::StatusOr<ArrayType> type = MakeArrayType(ResultDType(op, of->dtype), shape);
  if (!type.ok()) return type;
  const bool empty = nothing_to_fold && type->shape.elements() > 0;
  absl::Status status = CheckFolds(op, of->dtype, empty ? 0 : 1);
  if (!status.ok()) return status;
  return type;
}

absl::StatusOr<Stats> RunReduceAxes(Stream& stream, const View& x, ReduceOp op,
                                    absl::Span<const int> axes, const Output& out,
                                    const RunOptions& options, const MapStage* in) {
  if (absl::Status status = ReduceAxesType(x, op, axes, false, in).status(); !status.ok())
    return status;
  const auto problem_of = [&](const Folding& folding, DType dtype) {
    return ReduceAxesProblem{.dtype = dtype,
                             .op = op,
                             .outer = folding.outer,
                             .length = folding.length,
                             .inner = folding.inner,
                             .x = nullptr,
                             .out = nullptr};
  };
  if (IsMapped(x, in)) {
    absl::StatusOr<std::unique_ptr<StagedMap>> staged = StageReduce(x, in);
    if (!staged.ok()) return staged.status();
    MapProblem& map = (*staged)->problem();
    const Shape& shape = (*staged)->type().shape;
    const Folding folding = MakeFolding(shape, *FoldedAxes(shape, axes));
    for (int i = 0; i < map.program->operands; ++i) {
      View& view = map.operands[static_cast<std::size_t>(i)];
      view = folding.Of(view);
    }
    ReduceAxesProblem problem = problem_of(folding, map.dtype);
    return Execute(stream, problem, options, PlaceAt(out, &problem.out),
                   FoldMapAxes{map, stream, problem});
  }
  const Folding folding = MakeFolding(x.shape, *FoldedAxes(x.shape, axes));
  const View ordered = folding.Of(x);
  ReduceAxesProblem problem = problem_of(folding, x.dtype);
  const Operand operands[] = {{ordered, HasGaps(ordered), &problem.x}};
  return Execute(stream, problem, options, PlaceAt(out, &problem.out),
                 WholeLaunch<ReduceAxesProblem>{operands});
}

namespace {

absl::StatusOr<ArrayType> ProductType(const View& a, const View& b, bool transpose_a,
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

absl::StatusOr<std::unique_ptr<StagedMap>> StageMatmul(const ArrayType& product,
                                                       const MapStage& out_of) {
  absl::StatusOr<std::unique_ptr<StagedMap>> staged =
      StagedMap::Make(WholeView(product, nullptr), out_of, "product", /*numeric=*/false);
  if (!staged.ok() || (*staged)->type().shape == product.shape) return staged;
  // Some other operand stretches the product.
  std::size_t at = 0;
  const auto stretches = [&](const Shape& own) {
    if (own.rank > product.shape.rank) return true;
    for (int i = 1; i <= own.rank; ++i) {
      const std::int64_t extent = own[own.rank - i];
      if (extent != 1 && extent != product.shape[product.shape.rank - i]) return true;
    }
    return false;
  };
  while (!stretches(out_of.with[at].shape)) ++at;
  const std::string name = absl::StrCat("with[", at, "]");
  return Invalid("BAD_SHAPE",
                 absl::StrCat("operand ", name, " has shape ", ToString(out_of.with[at].shape),
                              ", which is not broadcast to ", ToString(product.shape)),
                 {{"operand", name},
                  {"shape", ToString(out_of.with[at].shape)},
                  {"others", ToString(product.shape)}});
}

}  // namespace

absl::StatusOr<ArrayType> MatmulType(const View& a, const View& b, bool transpose_a,
                                     bool transpose_b, DType out_dtype, const MapStage* out_of) {
  absl::StatusOr<ArrayType> product = ProductType(a, b, transpose_a, transpose_b, out_dtype);
  if (!product.ok() || out_of == nullptr) return product;
  absl::StatusOr<std::unique_ptr<StagedMap>> staged = StageMatmul(*product, *out_of);
  if (!staged.ok()) return staged.status();
  return (*staged)->type();
}

absl::StatusOr<Stats> RunMatmul(Stream& stream, const View& a, const View& b, bool transpose_a,
                                bool transpose_b, DType out_dtype, const Output& out,
                                const RunOptions& options, const MapStage* out_of) {
  absl::StatusOr<ArrayType> type = ProductType(a, b, transpose_a, transpose_b, out_dtype);
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
                        .c = nullptr};
  const Operand operands[] = {{a, left.gather && HasGaps(a), &problem.a},
                              {b, right.gather && HasGaps(b), &problem.b}};
  const WholeLaunch<MatmulProblem> product{operands};
  if (out_of == nullptr)
    return Execute(stream, problem, options, PlaceAt(out, &problem.c), product);
  absl::StatusOr<std::unique_ptr<StagedMap>> staged = StageMatmul(*type, *out_of);
  if (!staged.ok()) return staged.status();
  MapProblem& map = (*staged)->problem();
  return Execute(stream, problem, options, PlaceAt(out, &map.out),
                 MatmulThenMap{product, map, stream, type->bytes()});
}

absl::StatusOr<ArrayType> AddType(const View& a, const View& b) {
  if (absl::Status status = CheckSame(a, b); !status.ok()) return status;
  return ArrayType{a.dtype, a.shape};
}

absl::StatusOr<Stats> RunAdd(Stream& stream, const View& a, const View& b, const Output& out,
                             const RunOptions& options) {
  absl::StatusOr<ArrayType> type = AddType(a, b);
  if (!type.ok()) return type.status();
  AddProblem problem{.dtype = a.dtype, .n = a.elements(), .a = a.data, .b = b.data};
  return Execute(stream, problem, options, PlaceAt(out, &problem.out), AddInPieces{a, b});
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

absl::StatusOr<Stats> RunWindowSum(Stream& stream, const View& x, std::int64_t radius,
                                   const Output& out, const RunOptions& options) {
  absl::StatusOr<ArrayType> type = WindowSumType(x, radius);
  if (!type.ok()) return type.status();
  const std::int64_t n = x.elements();
  WindowSumProblem problem{
      .dtype = x.dtype, .n = n, .radius = std::min(radius, std::max<std::int64_t>(0, n - 1))};
  const Operand operands[] = {{x, HasGaps(x), &problem.x}};
  return Execute(stream, problem, options, PlaceAt(out, &problem.out),
                 WholeLaunch<WindowSumProblem>{operands});
}

absl::StatusOr<ArrayType> MapType(absl::Span<const View> operands,
                                  absl::Span<const ExpressionNode> expression) {
  const absl::StatusOr<MapProgram> program = CompileFor(operands, expression);
  if (!program.ok()) return program.status();
  const absl::StatusOr<Shape> shape = BroadcastShape(operands, NameOfMapOperand);
  if (!shape.ok()) return shape.status();
  return MakeArrayType(program->dtype, {shape->dims.data(), static_cast<std::size_t>(shape->rank)});
}

absl::StatusOr<Stats> RunMap(Stream& stream, absl::Span<const View> operands,
                             absl::Span<const ExpressionNode> expression, const Output& out,
                             const RunOptions& options) {
  const absl::StatusOr<ArrayType> type = MapType(operands, expression);
  if (!type.ok()) return type.status();
  const absl::StatusOr<MapProgram> program = CompileFor(operands, expression);
  if (!program.ok()) return program.status();
  MapProblem problem{.dtype = type->dtype, .n = type->shape.elements(), .program = &*program};
  for (std::size_t i = 0; i < operands.size(); ++i)
    problem.operands[i] = Broadcast(operands[i], type->shape);
  return Execute(stream, problem, options, PlaceAt(out, &problem.out), WholeLaunch<MapProblem>{});
}

absl::StatusOr<ArrayType> TopKType(const View& x, std::int64_t k, int axis) {
  absl::StatusOr<std::array<bool, kMaxRank>> chosen = FoldedAxes(x.shape, {axis});
  if (!chosen.ok()) return chosen.status();
  const int at = axis < 0 ? axis + x.shape.rank : axis;
  const std::int64_t most = std::min(x.shape[at], kMostTopK);
  if (k < 1 || k > most) {
    return Invalid("BAD_K",
                   absl::StrCat("k is ", k, ", the axis has ", x.shape[at],
                                " elements; allowed: 1 to ", kMostTopK, " and no more than those"),
                   {{"field", "k"}, {"value", absl::StrCat(k)}, {"limit", absl::StrCat(most)}});
  }
  ArrayType type{x.dtype, x.shape};
  type.shape[at] = k;
  return type;
}

absl::StatusOr<Stats> RunTopK(Stream& stream, const View& x, std::int64_t k, int axis,
                              bool smallest, const Output& values, const Output& indices,
                              const RunOptions& options) {
  const absl::StatusOr<ArrayType> type = TopKType(x, k, axis);
  if (!type.ok()) return type.status();
  // The axis is the last one of what strategies see.
  const int rank = x.shape.rank, at = axis < 0 ? axis + rank : axis, last = rank - 1;
  View rows = x;
  TopKProblem problem{.dtype = x.dtype, .smallest = smallest, .n = x.shape[at], .k = k};
  for (int i = at; i < last; ++i) {
    rows.shape[i] = x.shape[i + 1];
    rows.strides[static_cast<std::size_t>(i)] = x.strides[static_cast<std::size_t>(i) + 1];
    problem.inner *= x.shape[i + 1];
  }
  rows.shape[last] = problem.n;
  rows.strides[static_cast<std::size_t>(last)] = x.strides[static_cast<std::size_t>(at)];
  problem.rows = type->shape.elements() / k;
  const Operand operands[] = {{rows, HasGaps(rows), &problem.x}};
  const auto place = [&](TopKProblem& p) -> absl::Status {
    const absl::StatusOr<void*> first = values.Get();
    if (!first.ok()) return first.status();
    const absl::StatusOr<void*> second = indices.Get();
    if (!second.ok()) return second.status();
    p.values = *first;
    p.indices = static_cast<std::int64_t*>(*second);
    return absl::OkStatus();
  };
  return Execute(stream, problem, options, place, WholeLaunch<TopKProblem>{operands});
}

void LaunchBatch(std::span<const DotProblem> problems, Stream& stream) {
  LaunchBatchOn(problems, stream);
}

void LaunchBatch(std::span<const ReduceProblem> problems, Stream& stream) {
  LaunchBatchOn(problems, stream);
}

bool FitsBatch(const View& operand) {
  return operand.dtype != DType::kBool && operand.contiguous() &&
         operand.elements() <= kBatchBytes / static_cast<std::int64_t>(SizeOf(operand.dtype));
}

absl::Status RunDotBatch(Stream& stream, absl::Span<const DotOperands> operands,
                         absl::Span<ScalarResult> results) {
  std::vector<DotProblem> problems;
  problems.reserve(operands.size());
  for (const auto& [a, b] : operands) {
    if (absl::Status status = CheckSame(a, b); !status.ok()) return status;
    problems.push_back({.dtype = a.dtype, .n = a.elements(), .a = a.data, .b = b.data});
  }
  return ExecuteBatch(stream, problems, !operands.empty() && IsInteger(operands.front().a.dtype),
                      results);
}

absl::Status RunReduceBatch(Stream& stream, ReduceOp op, absl::Span<const View> operands,
                            absl::Span<ScalarResult> results) {
  std::vector<ReduceProblem> problems;
  problems.reserve(operands.size());
  for (const View& x : operands) {
    if (x.elements() == 0 && NeedsElements(op)) return EmptyInput(op);
    problems.push_back({.dtype = x.dtype, .op = op, .n = x.elements(), .x = x.data});
  }
  return ExecuteBatch(stream, problems,
                      !operands.empty() && IsInteger(ScalarDType(op, operands.front().dtype)),
                      results);
}

absl::Status RunCopy(Stream& stream, const View& view, DType dtype, void* out,
                     const RunOptions& options) {
  if (absl::Status status = CheckCopySeconds(view, dtype, options); !status.ok()) return status;
  const Stopwatch watch;
  absl::Status status = Finished(stream, [&] {
    if (dtype == view.dtype) return stream.Gather(view, out);
    if (!HasGaps(view))
      return ConvertOn(stream, view.data, view.dtype, out, dtype, view.elements());
    const std::int64_t most =
        std::min(view.elements(), PieceElements(stream, SizeOf(view.dtype), /*copies=*/1));
    void* const copy = stream.Scratch(static_cast<std::size_t>(most) * SizeOf(view.dtype));
    ForPieces(view.shape, most, [&](const Piece& piece) {
      stream.Gather(piece.Of(view), copy);
      ConvertOn(stream, copy, view.dtype, At(out, piece.first, dtype), dtype,
                piece.shape.elements());
      return !stream.stopped();
    });
  });
  if (status.ok() && options.pace != nullptr) options.pace->LearnCopy(view, dtype, watch.seconds());
  return status;
}

absl::Status RunCopyAcross(Stream& from, const View& view, DType dtype, Stream& to, void* out,
                           const RunOptions& options) {
  if (absl::Status status = CheckCopySeconds(view, dtype, options); !status.ok()) return status;
  if (view.elements() == 0) return absl::OkStatus();
  bool direct = false;
  absl::Status found = Guard(from.device(), [&] { direct = from.ReachesPeer(to); });
  if (!found.ok()) return found;
  const bool converts = dtype != view.dtype, gathers = HasGaps(view);
  const std::size_t size = std::max(SizeOf(view.dtype), SizeOf(dtype));
  // What crosses between two looks at whether to stop. A GPU's bus takes some tenths of a
  // millisecond for the one and the link between two GPUs for the other; what is gathered or
  // converted on the way has to fit in scratch memory.
  const std::int64_t piece_bytes = std::int64_t{direct ? 256 : 4} << 20;
  std::int64_t most = std::min(view.elements(), piece_bytes / static_cast<std::int64_t>(size));
  if (!direct || converts || gathers)
    most = std::min(most, PieceElements(from, size, /*copies=*/2));
  absl::Status sent;
  absl::Status status = Finished(from, [&] {
    const auto scratch = [&](bool wanted, DType of) {
      return wanted ? from.Scratch(static_cast<std::size_t>(most) * SizeOf(of)) : nullptr;
    };
    void* const gathered = scratch(gathers, view.dtype);
    void* const converted = scratch(converts, dtype);
    std::vector<char> chunk(direct ? 0 : static_cast<std::size_t>(most) * SizeOf(dtype));
    ForPieces(view.shape, most, [&](const Piece& piece) {
      const View part = piece.Of(view);
      const std::int64_t n = piece.shape.elements();
      const void* source = part.data;
      if (gathers) {
        from.Gather(part, gathered);
        source = gathered;
      }
      if (converts) {
        ConvertOn(from, source, view.dtype, converted, dtype, n);
        source = converted;
      }
      const std::size_t bytes = static_cast<std::size_t>(n) * SizeOf(dtype);
      void* const place = At(out, piece.first, dtype);
      if (direct) {
        from.CopyToPeer(to, place, source, bytes);
        from.Synchronize();
      } else {
        from.CopyToHost(chunk.data(), source, bytes);
        sent = CopyToDevice(to, place, chunk.data(), bytes);
      }
      return sent.ok() && !from.stopped() && !to.stopped();
    });
  });
  // What is in flight may still write to out.
  sent.Update(Guard(to.device(), [&] { to.Synchronize(); }));
  return sent.ok() ? status : sent;
}

}  // namespace tessera
