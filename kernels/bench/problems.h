// Random problems: log-uniform extents, operands of any alignment and pitch, either one transposed.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/bench/rig.h"

namespace tessera::bench {

// One implementation that can solve a problem. launch enqueues it, with operands in other memory at
// every call; it may throw DeviceError.
struct Candidate {
  std::string name;
  bool chosen = false;    // the default of a request that names no strategy
  bool strategy = false;  // it could be the default
  bool vendor = false;    // it belongs to the vendor
  std::function<void()> launch;
};

struct RandomProblem {
  std::string operation, dtype;
  std::string shape;            // extents, transposes, pitches, and bytes off a multiple of 256
  std::vector<float> features;  // for a product: kernels/choose/tuning.h
  // Strategies whose estimate is within kBeyond times the least, and whose error bound is within
  // that of the default or the vendor; and the vendor's calls.
  std::vector<Candidate> candidates;
};

// Makes random problems for one device.
class Problems {
 public:
  Problems(Rig& rig, std::uint64_t seed);

  // operation: matmul, dot, reduce, reduce_axes or batch; empty: any of them.
  RandomProblem Next(const std::string& operation);

  // How many times the fastest strategy's estimate another strategy's estimate may be.
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
  // Elements by which an operand is off a multiple of 256 bytes; mostly none.
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
