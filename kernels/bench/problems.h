// The problems that strategy_bench times: a fixed list, and random ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "kernels/bench/rig.h"

namespace tessera::bench {

// One way to solve a problem.
struct Candidate {
  std::string name;
  bool chosen = false;  // the default of a request that names no strategy
  bool vendor = false;  // a call of the vendor's library, directly or by a strategy
  bool peer = false;    // a call of the vendor's library that is not a strategy
  // Enqueues the work, with operands in different memory at every call. Throws DeviceError.
  std::function<void()> launch;
};

struct Case {
  std::string operation, dtype;
  std::string size;  // for a random problem, with its transposes, pitches and byte offsets
  // The work of the problem if every input is read once and every output is written once.
  double bytes = 0, flops = 0;
  bool lone = false;            // whether the device is idle before each launch (Rig::kIdle)
  std::vector<float> features;  // MatmulFeatures of a random product
  std::vector<Candidate> candidates;
  // Returns the largest error of the last launch. It is null for most operations.
  std::function<double()> error;
};

class Problems {
 public:
  explicit Problems(Rig& rig);

  // Returns the fixed list. Vectors have at most 2^max_exponent elements.
  std::vector<Case> All(int max_exponent);

  // Begins a sequence of random problems. Must be called before Random.
  void Seed(std::uint64_t seed);
  // Returns the next random problem of an operation (matmul, dot, reduce, reduce_axes or batch), or
  // of any of them if it is empty. Extents are log-uniform, and operands have any alignment and
  // pitch and may be transposed. The candidates are the vendor's calls, and the strategies whose
  // estimate is at most kBeyond times the lowest one and whose error bound does not exceed that of
  // the default or of the vendor's strategy.
  Case Random(const std::string& operation);
  static constexpr double kBeyond = 30;

  // Whether a request that names no strategy may get this strategy.
  static bool MayBeDefault(const Candidate& candidate);

 private:
  struct Expression;

  Case Make(std::string operation, DType dtype, std::string size, std::size_t operand_bytes,
            std::size_t result_bytes, double flops);
  template <class Problem>
  void AddStrategies(Case& out, const Problem& like, const std::function<void(Problem&)>& place,
                     bool (*wanted)(const Strategy<Problem>&) = nullptr);
  // Adds a call of the vendor's library, if this host has it.
  void AddPeer(Case& out, std::string name, std::function<void()> launch);
  // Returns memory for an operand of n elements that begins `offset` elements after a multiple of
  // 256 bytes.
  void* Place(DType dtype, std::int64_t n, std::int64_t offset = 0);

  Case Dot(DType dtype, std::int64_t n, std::int64_t a_off = 0, std::int64_t b_off = 0);
  Case Reduce(DType dtype, ReduceOp op, std::int64_t n, std::int64_t offset = 0);
  Case ReduceAxes(DType dtype, std::int64_t outer, std::int64_t length, std::int64_t inner);
  Case Batch(bool dot, std::int64_t count, std::int64_t n);
  Case Matmul(const MatmulProblem& p, std::int64_t a_off = 0, std::int64_t b_off = 0);
  Case Matmul(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k);
  Case Stack(DType dtype, std::int64_t products, std::int64_t m, std::int64_t n, std::int64_t k);
  Case Add(DType dtype, std::int64_t n);
  Case Map(DType dtype, std::int64_t n, const Expression& expression);
  Case MappedReduce(DType dtype, std::int64_t n, const Expression& expression);
  Case WindowSum(DType dtype, std::int64_t n, std::int64_t radius);
  Case TopK(DType dtype, std::int64_t rows, std::int64_t n, std::int64_t k, bool rising = false);
  Case Scan(DType dtype, std::int64_t outer, std::int64_t length, std::int64_t inner);
  Case Sort(DType dtype, std::int64_t rows, std::int64_t n, bool indices);
  Case Take(DType dtype, std::int64_t rows, std::int64_t row);
  // Returns n random I64 in [0, length), in the device's memory.
  Memory RandomIndices(std::int64_t n, std::int64_t length);
  Case SearchSorted(DType dtype, std::int64_t n, std::int64_t length);
  Case SumByLabel(DType dtype, std::int64_t n, std::int64_t inner, std::int64_t length);
  Case Linalg(DType dtype, LinalgFunction function, std::int64_t stack, std::int64_t side);
  Case Histogram(DType dtype, std::int64_t n, std::int64_t bins, bool one_bin);
  Case Select(DType dtype, std::int64_t n, std::int64_t one_in, bool indices);
  void AddVectors(std::vector<Case>& all, DType dtype, int exponent, int top);
  void AddTopKs(std::vector<Case>& all, DType dtype);
  void AddScans(std::vector<Case>& all, DType dtype);
  void AddSorts(std::vector<Case>& all, DType dtype);
  void AddTakes(std::vector<Case>& all, DType dtype);
  void AddSearches(std::vector<Case>& all, DType dtype);
  void AddByteProducts(std::vector<Case>& all);
  void AddHistograms(std::vector<Case>& all, DType dtype);
  void AddSumsByLabel(std::vector<Case>& all, DType dtype);
  void AddDecompositions(std::vector<Case>& all, DType dtype);
  void AddSelects(std::vector<Case>& all, DType dtype);
  void AddMatrices(std::vector<Case>& all, DType dtype);
  void AddCeilings(std::vector<Case>& all);

  Case RandomMatmul();
  // Returns a log-uniform number from 1 to most.
  std::int64_t Extent(double most);
  bool Chance(double probability) { return std::bernoulli_distribution(probability)(random_); }
  template <class T>
  T OneOf(std::initializer_list<T> values) {
    return values.begin()[random_() % values.size()];
  }
  // Returns how many elements after a multiple of 256 bytes an operand begins; usually 0.
  std::int64_t Offset();

  Rig& rig_;
  const bool peers_;  // whether this host has the vendor's libraries
  bool is_random_ = false;
  std::mt19937_64 random_;
  double most_bytes_ = 0;  // for the operands of a random problem
  double most_flops_ = 0;  // for a random product
};

}  // namespace tessera::bench
