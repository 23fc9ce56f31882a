// Estimates how long a strategy will take: the costs of its model, at the rates of a device of its
// kind, times a factor measured for the strategy. The estimate is made before anything is allocated
// or launched, because nothing can stop a running kernel.
//
// Estimates are accurate to within a factor of about three for calls that take milliseconds or
// more, which is enough for a limit of seconds. Short calls consist of launches and waiting, and no
// limit concerns them.
#pragma once

#include <atomic>
#include <memory>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// What has been learned about one device. Thread safe and lock-free.
class Pace {
 public:
  explicit Pace(const DeviceInfo& info);

  // Returns the seconds that the strategy is expected to take. The result is finite and >= 0 for
  // any problem, even if the product of its extents does not fit 64 bits. REQUIRES: the strategy
  // takes the problem.
  template <class Problem>
  double Estimate(const Strategy<Problem>& strategy, const Problem& problem) const;

  // Tells the pace how long the strategy took for the problem. A call of less than kMatters teaches
  // nothing, since it consists mostly of launches. Neither does a call that should have taken less
  // than a tenth of that, since it must have waited for something else. One call moves the factor
  // by at most a third, so that a short time in which the device was busy does not count for much.
  // The first call of a kind that has not been calibrated may move it further, by at most
  // kMostApart.
  template <class Problem>
  void Learn(const Strategy<Problem>& strategy, const Problem& problem, double seconds);
  // Takes the times of two problems of the strategy, the second much larger, measured on an idle
  // device and, on a CPU, both small enough to stay on one thread. Their difference gives the rate,
  // and the time that both took is the overhead, which does not grow. The rate sets the factor, and
  // Learn moves it from there by a factor of at most kMostApart.
  template <class Problem>
  void Calibrate(const Strategy<Problem>& strategy, const Problem& small, double small_seconds,
                 const Problem& large, double large_seconds);
  // Tells the pace that the problem has been refused. A strategy that is always refused is never
  // measured again, so a bad measurement of it would remain forever. Each refusal therefore takes
  // some of it back.
  template <class Problem>
  void Forget(const Strategy<Problem>& strategy, const Problem& problem);

  // Likewise for writing a view's elements to contiguous memory as elements of `to`: Stream::Gather
  // and, for another type, Stream::Convert.
  double EstimateCopy(const View& view, DType to) const;
  void LearnCopy(const View& view, DType to, double seconds);
  void ForgetCopy(const View& view, DType to);

  static constexpr double kMatters = 1e-3;  // seconds
  static constexpr double kMostApart = 8;

 private:
  // A problem's time is max(factor * work, memory, latency), all in seconds. work: its arithmetic,
  // and the chains of it that one core computes. memory: the least that its loads and stores take,
  // so that a rate measured in a cache does not promise too much. latency: the time of its longest
  // chain of steps on a device that runs many at the same time.
  struct Model {
    double work = 0, memory = 0, latency = 0;
  };
  // factor: what was learned; base: what it was calibrated to, or what was expected before the
  // first call; 0: nothing yet. They form one word, so that both are read and replaced together.
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
  // [strategy of any operation][kind: dtype and operation], see pace.cc.
  const std::unique_ptr<Slot[]> slots_;
};

}  // namespace tessera
