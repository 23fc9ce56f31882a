// Random problems: extents log-uniform, operands of any alignment and pitch, either transposed.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/bench/rig.h"

namespace tessera::bench {

// A way to solve a problem. launch enqueues it, with operands elsewhere at every call; throws
// DeviceError.
struct Candidate {
  std::string name;
  bool chosen = false;    // what a request gets that names none
  bool strategy = false;  // it could be the default
  bool vendor = false;    // it is the vendor's
  std::function<void()> launch;
};

struct RandomProblem {
  std::string operation, dtype;
  std::string shape;            // extents, transposes, pitches, and bytes off a multiple of 256
  std::vector<float> features;  // of a product: kernels/choose/tuning.h
  // Strategies whose cost model is within kBeyond of the least, and whose error bound is within the
  // chosen one's or the vendor's; and the vendor's calls.
  std::vector<Candidate> candidates;
};

// Makes random problems for one device.
class Problems {
 public:
  Problems(Rig& rig, std::uint64_t seed);

  // operation: matmul, dot, reduce, reduce_axes or batch; empty: any of them.
  RandomProblem Next(const std::string& operation);

  // How many times as long as the fastest a strategy may take by the cost models.
  static constexpr double kBeyond = 30;

 private:
  RandomProblem Matmul();
  RandomProblem Dot();
  RandomProblem Reduce();
  RandomProblem ReduceAxes();
  RandomProblem Batch();

  // Log-uniform from 1 to most.
  std::int64_t Extent(double most);
  bool Chance(double probability) { return std::bernoulli_distribution(probability)(random_); }
  template <class T>
  T OneOf(std::initializer_list<T> values);
  // Elements that an operand is off a multiple of 256 bytes: mostly none.
  std::int64_t Offset();
  template <class Problem>
  void AddStrategies(RandomProblem& out, const Problem& like,
                     const std::function<void(Problem&)>& place);

  Rig& rig_;
  std::mt19937_64 random_;
  double most_bytes_;  // of the operands of a problem
  double most_flops_;  // of a product
};

}  // namespace tessera::bench
