// The steps of every operation from a checked problem to a finished result: find the strategy, make
// operands contiguous where the strategy needs it, launch, and wait.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "kernels/base/status_macros.h"
#include "kernels/choose/pace.h"
#include "kernels/compute.h"
#include "kernels/device/guard.h"
#include "kernels/device/profiler_range.h"
#include "kernels/problem/matmul.h"
#include "kernels/team/share_out.h"

namespace tessera {

// --- Errors -------------------------------------------------------------------------------------

absl::Status Invalid(std::string_view reason, const std::string& message,
                     std::initializer_list<std::pair<std::string_view, std::string>> metadata);
absl::Status DtypesDiffer(const View& a, const View& b);
absl::Status ShapesDiffer(std::string_view rule, const View& a, const View& b);
// Checks that dtypes and shapes agree.
absl::Status CheckSame(const View& a, const View& b);
// Returns INVALID_ARGUMENT / BAD_DTYPE for one-byte elements, which most operations do not support.
absl::Status CheckComputed(std::string_view operation, DType dtype);
absl::Status TooLong(std::string_view what, std::string_view strategy, double estimate,
                     double limit, std::string_view advice);
absl::Status CallerHasLeft();

// --- Finding a strategy -------------------------------------------------------------------------

std::string Names(DTypes dtypes);

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
                                  ? "0 (this strategy has no such parameter)"
                                  : absl::StrCat(knob.range.min, " to ", knob.range.max);
    return Invalid("BAD_LAUNCH",
                   absl::StrCat(knob.field, " is ", knob.value, "; strategy ", Absl(strategy.name),
                                " accepts ", range),
                   {{"field", knob.field},
                    {"value", absl::StrCat(knob.value)},
                    {"range", range},
                    {"strategy", std::string(strategy.name)}});
  }
  return absl::OkStatus();
}

// Returns the strategy that a request names, or the default one if it names none. Checks that the
// strategy supports the problem's type, the device and the launch.
template <class Problem>
absl::StatusOr<const Strategy<Problem>*> Find(std::string_view name, const Problem& problem,
                                              const Device& device) {
  DTypes accepted;
  for (const Strategy<Problem>* strategy : Strategies<Problem>())
    accepted.bits |= strategy->dtypes.bits;
  if (!accepted.Contains(problem.dtype))
    RETURN_IF_ERROR(CheckComputed(Problem::kOperation, problem.dtype));
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
    // The same name may denote different strategies on different kinds of devices.
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
                                  Absl(name), "'; the strategies are ", names),
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
  RETURN_IF_ERROR(CheckLaunch(*found, problem.launch));
  return found;
}

// --- Limits on the cost -------------------------------------------------------------------------

// Returns an error if the expected seconds exceed the limit.
template <class Problem>
absl::Status CheckSeconds(const Strategy<Problem>& strategy, const Problem& problem,
                          const Device& device, double estimate, const RunOptions& options) {
  if (estimate <= std::min(options.max_seconds, options.max_slow_seconds)) return absl::OkStatus();
  const bool slow = !options.strategy.empty() && Choose(problem, device) != &strategy;
  const double limit =
      slow ? std::min(options.max_seconds, options.max_slow_seconds) : options.max_seconds;
  if (estimate <= limit) return absl::OkStatus();
  options.pace->Forget(strategy, problem);
  return TooLong(
      absl::StrCat(Absl(Problem::kOperation), " with strategy ", Absl(strategy.name)),
      strategy.name, estimate, limit,
      slow ? "; a request that names no strategy gets the default one for this problem" : "");
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

// Runs work() and synchronises the stream, unless `wait` is false. After a failure it always
// synchronises, since work in flight may still use the operands. On a lost device, the
// synchronisation also fails, but no work is in flight there.
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
  return stream.stopped() ? CallerHasLeft() : absl::OkStatus();
}

// Whether the seconds say how long work takes. Those of work that was stopped are a lower bound.
inline bool Teaches(const absl::Status& status, const Stream& stream, double seconds,
                    double estimate) {
  return status.ok() || (stream.stopped() && seconds > estimate);
}

inline std::uint64_t SaturatingAdd(std::uint64_t a, std::uint64_t b) {
  return a + b < a ? UINT64_MAX : a + b;
}

inline std::uint64_t Bytes(const View& view) {
  return static_cast<std::uint64_t>(view.elements()) * SizeOf(view.dtype);
}

// An operand's view, and the members of the problem from which the strategy reads the operand.
struct OperandSlot {
  const View& view;
  bool gather;  // the strategy cannot use the view's own memory
  const void** data;
  const View** as_view = {};  // for strategies that read views; may be null

  OperandSlot(const View& v, bool g, const void** d, const View** a = nullptr)
      : view(v), gather(g), data(d), as_view(a) {
    *data = gather ? nullptr : view.data;
  }
};

inline bool HasGaps(const View& view) { return view.elements() != 0 && !view.contiguous(); }

// Whether there is nothing to compute, so that no strategy is launched: the result has no elements,
// or all of them are sums without terms.
template <class Problem>
bool IsTrivial(const Problem&) {
  return false;
}
inline bool IsTrivial(const MatmulProblem& p) {
  return p.stack == 0 || p.m == 0 || p.n == 0 || p.k == 0;
}
inline bool IsTrivial(const MapProblem& p) { return p.n == 0; }
inline bool IsTrivial(const TopKProblem& p) { return p.rows == 0; }
inline bool IsTrivial(const ScanProblem& p) { return p.elements() == 0; }
inline bool IsTrivial(const SortProblem& p) { return p.elements() == 0; }
inline bool IsTrivial(const TakeProblem& p) { return p.elements() == 0; }
inline bool IsTrivial(const SelectProblem& p) { return p.count == 0; }
inline bool IsTrivial(const HistogramProblem& p) { return p.bins == 0; }
inline bool IsTrivial(const SearchSortedProblem& p) { return p.n == 0; }
inline bool IsTrivial(const SumByLabelProblem& p) { return p.elements() == 0; }
inline bool IsTrivial(const LinalgProblem& p) { return p.elements() == 0; }
inline bool IsTrivial(const ReduceAxesProblem& p) { return p.outer == 0 || p.inner == 0; }

// Writes the result of a trivial problem.
template <class Problem>
void Settle(const Problem&, Stream&) {}
inline void Settle(const MatmulProblem& p, Stream& stream) {
  if (p.stack > 0 && p.m > 0 && p.n > 0)
    stream.Zero(p.c, static_cast<std::size_t>(p.stack * p.m * p.n) * SizeOf(p.out_dtype));
}
inline void Settle(const SumByLabelProblem& p, Stream& stream) {
  const std::int64_t sums = p.length * p.inner;
  if (sums > 0)
    stream.Zero(p.out,
                static_cast<std::size_t>(sums) * SizeOf(ResultDType(ReduceOp::kSum, p.dtype)));
}

// Throws DeviceError.
template <class Problem>
void LaunchOn(Stream& stream, const Problem& problem, const Strategy<Problem>& strategy) {
  const ProfilerRange range(strategy.name);
  strategy.launch(problem, stream);
}
// Launches one product after another if the strategy does not take a whole stack.
inline void LaunchOn(Stream& stream, const MatmulProblem& problem,
                     const Strategy<MatmulProblem>& strategy) {
  const ProfilerRange range(strategy.name);
  if (problem.stack == 1 || strategy.stacks) return strategy.launch(problem, stream);
  const ScratchMark mark = stream.MarkScratch();
  for (std::int64_t i = 0; i < problem.stack && !stream.stopped(); ++i) {
    strategy.launch(ProductOf(problem, i), stream);
    stream.RewindScratch(mark);
  }
}
// Copies the view's elements to out in row-major order. Throws DeviceError.
inline void GatherOn(Stream& stream, const View& view, void* out) {
  const ProfilerRange range("gather");
  stream.Gather(view, out);
}
// Returns a copy of the view's elements in row-major order, which an earlier request may have made.
inline const void* GatheredOn(Stream& stream, const View& view) {
  const PreparedMemory copy =
      stream.Prepare({"gather", view}, static_cast<std::size_t>(Bytes(view)));
  if (!copy.ready) GatherOn(stream, view, copy.data);
  return copy.data;
}

// Defines how a strategy runs on a problem: what happens besides the strategy's own launch, and
// what that costs. Launches throw DeviceError. The problem must outlive the Work.
template <class Problem>
class Work {
 public:
  using Chosen = Strategy<Problem>;

  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() = default;

  // Enqueues the work in stream order. The measured time includes everything that this function
  // enqueues.
  virtual void Launch(Stream& stream, Problem& problem, const Chosen& strategy) const = 0;
  // Launches again with wider accumulators.
  virtual void LaunchWide(Stream& stream, Problem& problem, const Chosen& strategy) const {
    strategy.wide.launch(problem, stream);
  }
  // Launches one share of a team, which is `part` of the problem.
  virtual void LaunchShare(const Problem& /*whole*/, const Problem& part, const Chosen& strategy,
                           const TeamShare& share, bool wide) const {
    (wide ? strategy.wide.launch : strategy.launch)(part, *share.stream);
  }
  // Writes the result of a trivial problem.
  virtual void Settle(Problem& problem, Stream& stream) const { tessera::Settle(problem, stream); }
  // Return the scratch memory and the expected time that Settle needs.
  virtual std::uint64_t SettleBytes() const { return 0; }
  virtual double SettleSeconds(const Pace&) const { return 0; }

  // Return the scratch memory for copies of operands, and the maximum scratch memory that a launch
  // needs in addition.
  virtual std::uint64_t CopyBytes(const Stream&, const Chosen&) const { return 0; }
  virtual std::uint64_t LaunchBytes(const Problem& problem, const Chosen& strategy) const {
    return LaunchScratch(strategy, problem);
  }
  // Returns the maximum scratch memory of a share, which is `part` of the problem. If the strategy
  // launches all shares itself, `part` is the whole problem.
  virtual std::uint64_t ShareBytes(const Problem& part, const Chosen& strategy) const {
    return LaunchesShares(part, strategy) ? 0 : LaunchBytes(part, strategy);
  }
  // Returns the expected time for copies of operands. It is above 0 even if the strategy reads them
  // in place.
  virtual double GatherSeconds(const Pace&) const { return 0; }
  // Adds the costs of this Work to the costs of the strategy.
  virtual void Account(const Chosen&, Stats&) const {}
  // Returns how a team divides the problem.
  virtual Division Divide(const Problem& problem, const Chosen& strategy, const Team& team) const {
    return DivisionOf(problem, strategy, team);
  }
};

// One launch on whole operands, which are copied if they have gaps and the strategy cannot read
// views.
template <class Problem>
class WholeLaunch final : public Work<Problem> {
 public:
  using Chosen = Strategy<Problem>;
  explicit WholeLaunch(absl::Span<const OperandSlot> operands) : operands_(operands) {}

  std::uint64_t CopyBytes(const Stream&, const Chosen& strategy) const override {
    std::uint64_t bytes = 0;
    for (const OperandSlot& operand : operands_)
      if (Copies(operand, strategy)) bytes = SaturatingAdd(bytes, Bytes(operand.view));
    return bytes;
  }
  double GatherSeconds(const Pace& pace) const override {
    double seconds = 0;
    for (const OperandSlot& operand : operands_) {
      if (operand.gather) seconds += pace.EstimateCopy(operand.view, operand.view.dtype);
    }
    return seconds;
  }
  std::uint64_t ShareBytes(const Problem& part, const Chosen& strategy) const override {
    if constexpr (std::is_same_v<Problem, ReduceAxesProblem>)
      return this->LaunchBytes(part, strategy);
    return Work<Problem>::ShareBytes(part, strategy);
  }
  void Launch(Stream& stream, Problem& problem, const Chosen& strategy) const override {
    for (const OperandSlot& operand : operands_) {
      if (stream.stopped()) return;
      if (Copies(operand, strategy)) {
        *operand.data = GatheredOn(stream, operand.view);
      } else if (operand.gather) {
        *operand.as_view = &operand.view;
      }
    }
    if (!stream.stopped()) LaunchOn(stream, problem, strategy);
  }

 private:
  static bool Copies(const OperandSlot& operand, const Chosen& strategy) {
    return operand.gather && !(strategy.reads_views && operand.as_view != nullptr);
  }

  const absl::Span<const OperandSlot> operands_;
};

// Returns the maximum scratch memory that the work needs with this strategy.
template <class Problem>
std::uint64_t ScratchBytes(const Strategy<Problem>& strategy, const Problem& problem,
                           const Stream& stream, const Work<Problem>& work) {
  if (IsTrivial(problem)) return work.SettleBytes();
  return SaturatingAdd(work.CopyBytes(stream, strategy), work.LaunchBytes(problem, strategy));
}

// Returns the maximum scratch memory that a share needs on its device.
template <class Problem>
std::uint64_t ShareBytes(const Strategy<Problem>& strategy, const Problem& problem,
                         const TeamShare& share, const Work<Problem>& work) {
  if constexpr (requires { PartOf(problem, share); }) {
    if (!LaunchesShares(problem, strategy))
      return work.ShareBytes(PartOf(problem, share), strategy);
  }
  return work.ShareBytes(problem, strategy);
}

// Returns the maximum scratch memory that one device needs. If a team shares the work, this is the
// maximum of a share.
template <class Problem>
std::uint64_t LeastScratchBytes(const Strategy<Problem>& strategy, const Problem& problem,
                                const Team* team, const Stream& stream, const Work<Problem>& work) {
  const std::uint64_t alone = ScratchBytes(strategy, problem, stream, work);
  if (team == nullptr || IsTrivial(problem) || LaunchesShares(problem, strategy)) return alone;
  const std::vector<TeamShare> shares =
      SharesByShard(*team, work.Divide(problem, strategy, *team), stream.device().info().backend);
  std::uint64_t most = 0;
  for (const TeamShare& share : shares)
    if (share.first < share.end) most = std::max(most, ShareBytes(strategy, problem, share, work));
  return shares.empty() ? alone : std::min(most, alone);
}

// Returns the strategy if its scratch memory is within the limit of the stream's budget. Otherwise,
// if the request names no strategy, returns another strategy that is within the limit. The choice
// does not depend on how much of the budget is free, so the same request gives the same bits
// however busy the server is.
template <class Problem>
absl::StatusOr<const Strategy<Problem>*> WithinLimit(const Strategy<Problem>* strategy,
                                                     const Problem& problem, bool named,
                                                     const Team* team, const Stream& stream,
                                                     const Work<Problem>& work) {
  const Budget* budget = stream.scratch_budget();
  if (budget == nullptr) return strategy;
  const auto need = [&](const Strategy<Problem>& r) {
    return LeastScratchBytes(r, problem, team, stream, work);
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

// Returns what the strategy's own models say about a problem.
template <class Problem>
Stats StatsOf(const Strategy<Problem>& strategy, const Problem& problem) {
  const Cost cost = CostOf(strategy, problem);
  return {.strategy = strategy.name,
          .bytes = cost.bytes,
          .flops = cost.flops,
          .roundoff = strategy.roundoff(problem)};
}

// Returns the shares of the problem with their streams, or none if the request's stream does all
// the work.
template <class Problem>
absl::StatusOr<std::vector<TeamShare>> SharesOf(Stream& stream, const Problem& problem,
                                                const Strategy<Problem>& strategy, Team& team,
                                                const Work<Problem>& work) {
  absl::StatusOr<std::vector<TeamShare>> shares =
      ShareOut(team, work.Divide(problem, strategy, team), stream);
  if (!shares.ok()) return shares;
  // If another device lacks scratch memory, the request's own device computes everything, with the
  // same bits, unless that needs more scratch memory than the device's limit.
  const Budget* own = stream.scratch_budget();
  if (own != nullptr && ScratchBytes(strategy, problem, stream, work) > own->limit()) return shares;
  const auto lacks_memory = [&](const TeamShare& share) {
    const Budget* budget = share.stream->scratch_budget();
    return share.stream != &stream && budget != nullptr &&
           budget->free() < ShareBytes(strategy, problem, share, work);
  };
  if (std::any_of(shares->begin(), shares->end(), lacks_memory)) shares->clear();
  return shares;
}

// Launches a problem, and launches it again with wider accumulators if sums have overflowed. If
// `timing` is set, returns the microseconds by the device's clock. Throws DeviceError.
template <class Problem>
double LaunchWork(Stream& stream, Problem& problem, const Strategy<Problem>& strategy,
                  const std::vector<TeamShare>& shares, const Work<Problem>& work, bool timing) {
  double microseconds = 0;
  const bool trivial = IsTrivial(problem);
  const auto launch = [&](bool wide) {
    if (trivial) {
      work.Settle(problem, stream);
    } else if (!shares.empty()) {
      LaunchShares<Problem>(problem, strategy, shares, stream, wide,
                            [&](const TeamShare& share, const Problem& part) {
                              work.LaunchShare(problem, part, strategy, share, wide);
                            });
    } else if (wide) {
      work.LaunchWide(stream, problem, strategy);
    } else {
      work.Launch(stream, problem, strategy);
    }
  };
  const auto run = [&](bool wide) {
    if (timing) {
      microseconds += stream.Time([&] { launch(wide); });
    } else {
      launch(wide);
    }
    AwaitOthers(shares, stream);
  };
  run(/*wide=*/false);
  if (trivial || strategy.wide.left_range == nullptr || stream.stopped()) return microseconds;
  stream.Synchronize();
  if (LeftRange(problem, strategy, shares, stream) && !stream.stopped()) run(/*wide=*/true);
  return microseconds;
}

// Checks, chooses, launches and waits. place(problem) sets where the result goes. It is called when
// nothing but the launch can still fail.
template <class Problem>
absl::StatusOr<Stats> Execute(Stream& stream, Problem& problem, const RunOptions& options,
                              absl::FunctionRef<absl::Status(Problem&)> place,
                              const Work<Problem>& work) {
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
  work.Account(**strategy, stats);
  double gather_seconds = 0;
  if (options.pace != nullptr) {
    if (!trivial) gather_seconds = work.GatherSeconds(*options.pace);
    stats.estimate_seconds = trivial ? work.SettleSeconds(*options.pace)
                                     : gather_seconds + options.pace->Estimate(**strategy, problem);
    RETURN_IF_ERROR(
        CheckSeconds(**strategy, problem, stream.device(), stats.estimate_seconds, options));
  }
  if (options.check_only) {
    stats.scratch_bytes = ScratchBytes(**strategy, problem, stream, work);
    return stats;
  }
  stream.Expect(stats.estimate_seconds);
  RETURN_IF_ERROR(place(problem));

  std::vector<TeamShare> shares;
  if (options.team != nullptr && !trivial) {
    ASSIGN_OR_RETURN(shares, SharesOf(stream, problem, **strategy, *options.team, work));
  }
  stats.devices = std::max<int>(1, static_cast<int>(shares.size()));
  const std::uint64_t found = stream.prepared_found();
  const Stopwatch watch;
  const bool wait = !options.enqueue_only || options.timing || options.team != nullptr;
  absl::Status status = Finished(
      stream,
      [&] {
        stats.kernel_us = LaunchWork(stream, problem, **strategy, shares, work, options.timing);
      },
      wait);
  const double seconds = watch.seconds();
  // The time says little about the strategy if it includes a gather, if other devices shared the
  // work, or if an earlier request had already prepared an operand.
  if (options.pace != nullptr && gather_seconds == 0 && !trivial && wait && shares.empty() &&
      stream.prepared_found() == found && Teaches(status, stream, seconds, stats.estimate_seconds))
    options.pace->Learn(**strategy, problem, seconds);
  if (!status.ok()) return status;
  return stats;
}

// Calls Execute for an operation whose result is an array. The address of the result goes to *data.
template <class Problem>
absl::StatusOr<Stats> ExecuteTo(const Output& output, void** data, Stream& stream, Problem& problem,
                                const RunOptions& options, const Work<Problem>& work) {
  const auto place = [&](Problem&) -> absl::Status {
    absl::StatusOr<void*> memory = output.Get();
    if (memory.ok()) *data = *memory;
    return memory.status();
  };
  return Execute<Problem>(stream, problem, options, place, work);
}

// Calls Execute for an operation whose result is a number.
template <class Problem>
absl::StatusOr<ScalarResult> ExecuteScalar(Stream& stream, Problem& problem, bool integer,
                                           RunOptions options, const Work<Problem>& work) {
  options.enqueue_only = false;  // the result is read immediately
  const auto place = [&stream](Problem& p) {
    p.result = stream.result();
    return absl::OkStatus();
  };
  ASSIGN_OR_RETURN(Stats stats, Execute<Problem>(stream, problem, options, place, work));
  return ScalarResult{options.check_only ? Scalar{} : *problem.result, integer, stats};
}

}  // namespace tessera
