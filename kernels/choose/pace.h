// How long a strategy will take: the figures of its cost model, at rates that a device of its kind
// has, times a factor that is measured for the strategy. Asked before anything is allocated or
// launched, because nothing stops a kernel that runs.
//
// Right within a factor of about three for calls that take milliseconds or more, which is what a
// limit of seconds needs. Short calls are launches and waiting, which nobody limits.
#pragma once

#include <atomic>
#include <memory>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// What has been learned about one device. Thread safe; nothing ever waits.
class Pace {
 public:
  explicit Pace(const DeviceInfo& info);

  // Seconds that the strategy is expected to take; finite and >= 0 whatever the problem, which may
  // have extents whose product does not fit 64 bits. REQUIRES: a problem that the strategy takes.
  template <class Problem>
  double Estimate(const Strategy<Problem>& strategy, const Problem& problem) const;

  // The strategy took so long for the problem. What took less than kMatters teaches nothing, being
  // mostly launches, and neither does what should have taken less than a tenth of that: it waited
  // for something else. Of one call the factor moves by a third at most, so that a moment in which
  // the device was busy with something else does not count for much. The first call of a kind that
  // has not been calibrated moves it further, by kMostApart at most.
  template <class Problem>
  void Learn(const Strategy<Problem>& strategy, const Problem& problem, double seconds);
  // Two problems of the strategy, the second much larger, in quiet and on a CPU both small enough
  // to stay on one thread: their difference is the rate, and what both of them took the overhead,
  // which does not grow. The factor is then what this says, and Learn moves it no further than by
  // kMostApart.
  template <class Problem>
  void Calibrate(const Strategy<Problem>& strategy, const Problem& small, double small_seconds,
                 const Problem& large, double large_seconds);
  // The problem has been refused. A strategy that nobody may run teaches nothing, so that what was
  // learned of it in a bad moment would stand for ever: each refusal takes some of it back.
  template <class Problem>
  void Forget(const Strategy<Problem>& strategy, const Problem& problem);

  // The same for writing a view's elements to contiguous memory as elements of `to`: Stream::Gather
  // and, for another type, Stream::Convert.
  double EstimateCopy(const View& view, DType to) const;
  void LearnCopy(const View& view, DType to, double seconds);
  void ForgetCopy(const View& view, DType to);

  static constexpr double kMatters = 1e-3;  // seconds
  static constexpr double kMostApart = 8;

 private:
  // A problem's time is max(factor * work, memory, latency), all in seconds: its arithmetic and
  // the chains of it that one core does; what its loads and stores take at best, so that a rate
  // that was measured in a cache does not promise too much; and what the longest chain of steps
  // takes on a device that runs many at once.
  struct Model {
    double work = 0, memory = 0, latency = 0;
  };
  // factor: what was learned; base: what it was calibrated to, or what was expected before the
  // first call; 0 for nothing yet. One word, so that both are read and replaced together.
  struct Rate {
    float base = 0, factor = 0;
  };
  using Slot = std::atomic<Rate>;
  static_assert(Slot::is_always_lock_free);

  template <class Problem>
  Model ModelOf(const Strategy<Problem>& strategy, const Problem& problem, double units) const;
  Model ModelOfCopy(const View& view, DType to) const;
  static double Seconds(const Model& model, const Rate& rate);
  Rate RateOf(int strategy, int kind) const;
  void Update(int strategy, int kind, const Model& model, double seconds);
  void Forget(int strategy, int kind);

  const Backend backend_;
  const double units_;  // threads or SMs
  // [strategy of any operation][kind: dtype and what is done], see pace.cc.
  const std::unique_ptr<Slot[]> slots_;
};

}  // namespace tessera
