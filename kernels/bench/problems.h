// Random problems. Extents are log-uniform, and operands have any alignment and pitch and may be
// transposed.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/bench/rig.h"

namespace tessera::bench {

// One implementation that can solve a problem. launch enqueues it, with operands in different
// memory at every call, and may throw DeviceError.
struct Candidate {
  std::string name;
  bool chosen = false;    // whether it is the default for a request that names no strategy
  bool strategy = false;  // whether it could be the default
  bool vendor = false;    // whether it is a call of the vendor's library
  std::function<void()> launch;
};

struct RandomProblem {
  std::string operation, dtype;
  std::string shape;            // extents, transposes, pitches, and offsets in bytes
  std::vector<float> features;  // for a product: its MatmulFeatures
  // The vendor's calls, and the strategies whose estimate is at most kBeyond times the lowest one
  // and whose error bound does not exceed that of the default or of the vendor's strategy.
  std::vector<Candidate> candidates;
};

// Generates random problems for one device.
class Problems {
 public:
  Problems(Rig& rig, std::uint64_t seed);

  // operation: matmul, dot, reduce, reduce_axes or batch; empty: any of them.
  RandomProblem Next(const std::string& operation);

  // The maximum ratio of a strategy's estimate to the fastest strategy's estimate.
  static constexpr double kBeyond = 30;

 private:
  RandomProblem Matmul();
  RandomProblem Dot();
  RandomProblem Reduce();
  RandomProblem ReduceAxes();
  RandomProblem Batch();

  // Returns a log-uniform number from 1 to most.
  std::int64_t Extent(double most);
  bool Chance(double probability) { return std::bernoulli_distribution(probability)(random_); }
  template <class T>
  T OneOf(std::initializer_list<T> values);
  // Returns how many elements after a multiple of 256 bytes an operand begins; usually 0.
  std::int64_t Offset();
  template <class Problem>
  void AddStrategies(RandomProblem& out, const Problem& like,
                     const std::function<void(Problem&)>& place);

  Rig& rig_;
  std::mt19937_64 random_;
  double most_bytes_;  // for the operands of a problem
  double most_flops_;  // for a product
};

}  // namespace tessera::bench
