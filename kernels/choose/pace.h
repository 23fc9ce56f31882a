// Estimates how long a strategy will take: the cost that its model predicts, at the typical rates
// of such a device, times a factor that was measured for the strategy. The estimate is made before
// anything is allocated or launched, because a running kernel cannot be stopped.
//
// For calls that take milliseconds or more, estimates are correct within a factor of about three.
// This accuracy is sufficient for a limit of seconds. Short calls consist mostly of launches and
// waiting, and no limit applies to them.
#pragma once

#include <atomic>
#include <memory>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// The factors learned for one device. Thread safe and lock-free.
class Pace {
 public:
  explicit Pace(const DeviceInfo& info);

  // Returns the seconds that the strategy is expected to take. The result is finite and >= 0 for
  // any problem, even if the product of its extents does not fit in 64 bits. REQUIRES: the strategy
  // accepts the problem.
  template <class Problem>
  double Estimate(const Strategy<Problem>& strategy, const Problem& problem) const;

  // Records how long the strategy took for the problem. A call shorter than kMatters is ignored,
  // because it consists mostly of launches. A call is also ignored if it should have taken less
  // than a tenth of kMatters, because it must have waited for something else. One call changes the
  // factor by at most a third, so that a short time in which the device was busy has little effect.
  // The first call of a kind that has not been calibrated may change the factor further, by up to
  // kMostApart.
  template <class Problem>
  void Learn(const Strategy<Problem>& strategy, const Problem& problem, double seconds);
  // Sets the factor from the times of two problems, the second much larger than the first. The
  // times were measured on an idle device and, on a CPU, with problems small enough to run on one
  // thread. The difference between the two times gives the rate, because the overhead is the same
  // in both. Later calls of Learn change the factor by at most kMostApart in either direction.
  template <class Problem>
  void Calibrate(const Strategy<Problem>& strategy, const Problem& small, double small_seconds,
                 const Problem& large, double large_seconds);
  // Records that the problem has been refused. If a strategy is always refused, it is never
  // measured again, so a bad measurement would remain forever. Each refusal therefore moves the
  // factor part of the way back to the calibrated factor.
  template <class Problem>
  void Forget(const Strategy<Problem>& strategy, const Problem& problem);

  // These functions do the same for a copy of a view's elements to contiguous memory, with the type
  // `to`. The copy uses Stream::Gather and, if the type changes, Stream::Convert.
  double EstimateCopy(const View& view, DType to) const;
  void LearnCopy(const View& view, DType to, double seconds);
  void ForgetCopy(const View& view, DType to);

  static constexpr double kMatters = 1e-3;  // seconds
  static constexpr double kMostApart = 8;

 private:
  // A problem's time is max(factor * work, memory, latency), all in seconds. `work` is the time of
  // its arithmetic, or of the part of the arithmetic that one core computes in sequence if that
  // part takes longer. `memory` is the minimum time of its loads and stores, so that a factor
  // measured on cached data does not make the estimate too low. `latency` is the time of its
  // longest chain of dependent steps, on a device that runs many chains at the same time.
  struct Model {
    double work = 0, memory = 0, latency = 0;
  };
  // `factor` is the learned factor. `base` is the calibrated factor or, without calibration, the
  // factor that was expected before the first call; 0 means that there is none yet. The two form
  // one word, so they are read and replaced atomically.
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
  // Indexed by [strategy of any operation][kind: dtype and operation]; see pace.cc.
  const std::unique_ptr<Slot[]> slots_;
};

}  // namespace tessera
