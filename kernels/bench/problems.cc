#include "kernels/bench/problems.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/bench/launches.h"
#include "kernels/choose/pace.h"
#include "kernels/choose/tuning.h"
#include "kernels/cuda/matmul/cublas.h"
#include "kernels/expression/expression.h"
#include "kernels/expression/map_cost.h"
#include "kernels/problem/linalg.h"
#include "kernels/problem/matmul.h"
#include "kernels/run/execute.h"
#include "kernels/same_bits/batch.h"
#include "kernels/same_bits/convert.h"

namespace tessera::bench {
namespace {

std::size_t Bytes(DType dtype, std::int64_t n) {
  return static_cast<std::size_t>(n) * SizeOf(dtype);
}

std::string Off(std::int64_t offset, DType dtype) {
  return offset == 0 ? "" : absl::StrCat(" +", offset * static_cast<std::int64_t>(SizeOf(dtype)));
}

template <class Keep>
void KeepOnly(Case& problem, Keep keep) {
  std::erase_if(problem.candidates, [&](const Candidate& c) { return !keep(c); });
}

// Renames the problem, and drops the peers, whose rows would have the same names.
Case Variant(Case problem, std::string operation, std::int64_t n) {
  KeepOnly(problem, [](const Candidate& c) { return !c.peer; });
  problem.operation = std::move(operation);
  problem.size = absl::StrCat(n);
  return problem;
}

// Returns the same problem, timed on an idle device, so that the measurement includes the time that
// the host needs to launch a second kernel. Keeps only the vendor's calls and the strategies that
// are compared with them.
Case Lone(Case problem) {
  KeepOnly(problem, [](const Candidate& c) {
    return c.peer || c.name == "fixed_tree" || c.name == "cublas";
  });
  problem.operation = "lone_" + problem.operation;
  problem.lone = true;
  return problem;
}

// Returns the largest error over some elements of c = a b, relative to the sum of the magnitudes of
// the terms.
double LargestError(Rig& rig, const MatmulProblem& p) {
  constexpr int kElements = 64;
  const Arena& arena = rig.Operands(p.dtype);
  std::mt19937_64 random(2);
  double largest = 0;
  DispatchDType(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (int element = 0; element < kElements; ++element) {
      const auto i = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(p.m));
      const auto j = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(p.n));
      T computed;
      Check(CopyToHost(rig.stream(), &computed, static_cast<const T*>(p.c) + i * p.n + j,
                       sizeof computed));
      long double sum = 0, sizes = 0;
      for (std::int64_t l = 0; l < p.k; ++l) {
        const long double term = static_cast<long double>(arena.Value<T>(p.a, i * p.lda + l)) *
                                 arena.Value<T>(p.b, l * p.ldb + j);
        sum += term;
        sizes += std::abs(term);
      }
      const long double error =
          std::abs(static_cast<long double>(static_cast<ValueOf<T>>(computed)) - sum);
      if (sizes > 0) largest = std::max(largest, static_cast<double>(error / sizes));
    }
  });
  return largest;
}

// Almost all elements are between -Spread and Spread, which is four standard deviations.
double Spread(DType dtype) { return IsInteger(dtype) ? 400 : 4; }

}  // namespace

bool Problems::MayBeDefault(const Candidate& candidate) {
  // The first call of cublas_lt tries several algorithms.
  return !candidate.peer && candidate.name != "cublas_lt";
}

Problems::Problems(Rig& rig)
    : rig_(rig), peers_([&rig] {
        if constexpr (kWithCuda) return rig.gpu() && HasPeers();
        return false;
      }()) {}

Case Problems::Make(std::string operation, DType dtype, std::string size, std::size_t operand_bytes,
                    std::size_t result_bytes, double flops) {
  rig_.Need(dtype, operand_bytes);
  rig_.NeedOutput(result_bytes);
  return {.operation = std::move(operation),
          .dtype = std::string(Name(dtype)),
          .size = std::move(size),
          .bytes = static_cast<double>(operand_bytes + result_bytes),
          .flops = flops};
}

template <class Problem>
void Problems::AddStrategies(Case& out, const Problem& like,
                             const std::function<void(Problem&)>& place,
                             bool (*wanted)(const Strategy<Problem>&)) {
  Problem placed = like;
  if (is_random_) place(placed);  // the default may depend on the operands' alignment
  const Strategy<Problem>* chosen = Choose(placed, rig_.device());
  std::vector<const Strategy<Problem>*> able;
  for (const Strategy<Problem>* strategy : Strategies<Problem>()) {
    if (strategy->dtypes.Contains(like.dtype) && Missing(*strategy, rig_.device()).empty() &&
        Refusal(*strategy, placed).empty() && (wanted == nullptr || wanted(*strategy)))
      able.push_back(strategy);
  }
  if (is_random_) {
    const Pace pace(rig_.device().info());
    double least = std::numeric_limits<double>::infinity(), bound = chosen->roundoff(placed);
    for (const Strategy<Problem>* strategy : able) {
      least = std::min(least, pace.Estimate(*strategy, placed));
      if (strategy->vendor) bound = std::max(bound, strategy->roundoff(placed));
    }
    std::erase_if(able, [&](const Strategy<Problem>* strategy) {
      return strategy != chosen && !strategy->vendor &&
             (pace.Estimate(*strategy, placed) > kBeyond * std::max(least, 10e-6) ||
              strategy->roundoff(placed) > bound);
    });
  }
  for (const Strategy<Problem>* strategy : able) {
    out.candidates.push_back({.name = std::string(strategy->name),
                              .chosen = strategy == chosen,
                              .vendor = strategy->vendor,
                              .launch = [this, like, place, strategy] {
                                Problem p = like;
                                place(p);
                                LaunchOn(rig_.stream(), p, *strategy);
                              }});
  }
}

void Problems::AddPeer(Case& out, std::string name, std::function<void()> launch) {
  if (peers_)
    out.candidates.push_back(
        {.name = std::move(name), .vendor = true, .peer = true, .launch = std::move(launch)});
}

void* Problems::Place(DType dtype, std::int64_t n, std::int64_t offset) {
  return static_cast<char*>(rig_.Operands(dtype).Next(Bytes(dtype, n + offset))) +
         Bytes(dtype, offset);
}

// --- Operations ---

Case Problems::Dot(DType dtype, std::int64_t n, std::int64_t a_off, std::int64_t b_off) {
  Case out = Make("dot", dtype, absl::StrCat(n, Off(a_off, dtype), Off(b_off, dtype)),
                  Bytes(dtype, 2 * n), 0, 2.0 * static_cast<double>(n));
  AddStrategies<DotProblem>(out, {.dtype = dtype, .n = n}, [this, a_off, b_off](DotProblem& p) {
    p.a = Place(p.dtype, p.n, a_off);
    p.b = Place(p.dtype, p.n, b_off);
    p.result = rig_.stream().result();
  });
  return out;
}

Case Problems::Reduce(DType dtype, ReduceOp op, std::int64_t n, std::int64_t offset) {
  // In the fixed list, a sum is simply named "reduce".
  const bool named = is_random_ || op != ReduceOp::kSum;
  Case out = Make(named ? absl::StrCat("reduce_", std::string(Name(op))) : "reduce", dtype,
                  absl::StrCat(n, Off(offset, dtype)), Bytes(dtype, n), 0, static_cast<double>(n));
  AddStrategies<ReduceProblem>(out, {.dtype = dtype, .op = op, .n = n},
                               [this, offset](ReduceProblem& p) {
                                 p.x = Place(p.dtype, p.n, offset);
                                 p.result = rig_.stream().result();
                               });
  if constexpr (kWithCuda) {
    for (const auto& [peer, of, name] : {std::tuple{Peer::kCubSum, ReduceOp::kSum, "cub_sum"},
                                         {Peer::kCubMax, ReduceOp::kMax, "cub_max"},
                                         {Peer::kCubArgMax, ReduceOp::kArgMax, "cub_argmax"},
                                         {Peer::kCublasAsum, ReduceOp::kNormL1, "cublas_asum"},
                                         {Peer::kCublasNrm2, ReduceOp::kNormL2, "cublas_nrm2"}}) {
      if (of != op || dtype != DType::kF32) continue;
      AddPeer(out, name, [this, peer = peer, n, offset] {
        LaunchPeer(peer, rig_.stream(), static_cast<float*>(Place(DType::kF32, n, offset)), n);
      });
    }
  }
  return out;
}

// A SUM along the middle of three axes.
Case Problems::ReduceAxes(DType dtype, std::int64_t outer, std::int64_t length,
                          std::int64_t inner) {
  const std::int64_t n = outer * length * inner;
  const std::size_t out_bytes = Bytes(ResultDType(ReduceOp::kSum, dtype), outer * inner);
  Case out = Make("reduce_axes", dtype, absl::StrCat(outer, "x", length, "x", inner),
                  Bytes(dtype, n), out_bytes, static_cast<double>(n));
  AddStrategies<ReduceAxesProblem>(
      out, {.dtype = dtype, .outer = outer, .length = length, .inner = inner},
      [this, n, out_bytes](ReduceAxesProblem& p) {
        p.x = Place(p.dtype, n);
        p.out = rig_.Output(out_bytes);
      });
  if constexpr (kWithCuda) {
    if (dtype == DType::kF32 && inner == 1)
      AddPeer(out, "cub_segmented", [this, outer, length, n] {
        LaunchRowSums(rig_.stream(), static_cast<float*>(Place(DType::kF32, n)), outer, length);
      });
  }
  return out;
}

// Many short Dots or sums that are launched as a batch, like the steps of a program.
Case Problems::Batch(bool dot, std::int64_t count, std::int64_t n) {
  Case out = Make("batch", DType::kF32, absl::StrCat(count, "x", n),
                  Bytes(DType::kF32, (dot ? 2 : 1) * count * n), 0,
                  static_cast<double>((dot ? 2 : 1) * count * n));
  const auto dots = std::make_shared<std::vector<DotItem>>(static_cast<std::size_t>(count));
  const auto sums = std::make_shared<std::vector<ReduceItem>>(dots->size());
  const auto launch = [this, dot, count, n, dots, sums] {
    const auto* a = static_cast<float*>(Place(DType::kF32, count * n));
    const auto* b = dot ? static_cast<float*>(Place(DType::kF32, count * n)) : nullptr;
    auto* results = static_cast<Scalar*>(rig_.stream().HostScratch(dots->size() * sizeof(Scalar)));
    for (std::size_t i = 0; i < dots->size(); ++i) {
      const std::int64_t at = static_cast<std::int64_t>(i) * n;
      (*sums)[i] = {{a + at}, n};
      if (dot) (*dots)[i] = {{a + at, b + at}, n};
    }
    dot ? LaunchBatch(DType::kF32, *dots, results, rig_.stream())
        : LaunchBatch(DType::kF32, ReduceOp::kSum, *sums, results, rig_.stream());
  };
  out.candidates.push_back({.name = dot ? "dot" : "reduce_sum", .chosen = true, .launch = launch});
  if constexpr (kWithCuda) {
    if (dot)
      AddPeer(out, "cublas_batched", [this, count, n] {
        const auto* a = static_cast<float*>(Place(DType::kF32, count * n));
        const auto* b = static_cast<float*>(Place(DType::kF32, count * n));
        LaunchDots(rig_.stream(), a, b, count, n);
      });
  }
  return out;
}

Case Problems::Matmul(const MatmulProblem& p, std::int64_t a_off, std::int64_t b_off) {
  std::string size =
      p.m == p.n && p.n == p.k ? absl::StrCat(p.m) : absl::StrCat(p.m, "x", p.n, "x", p.k);
  if (p.stack > 1) size = absl::StrCat(p.stack, "x", p.m, "x", p.n, "x", p.k);
  absl::StrAppend(&size, p.transpose_a ? " a^T" : "", p.transpose_b ? " b^T" : "");
  if (p.lda != (p.transpose_a ? p.m : p.k)) absl::StrAppend(&size, " lda ", p.lda);
  if (p.ldb != (p.transpose_b ? p.k : p.n)) absl::StrAppend(&size, " ldb ", p.ldb);
  absl::StrAppend(&size, Off(a_off, p.dtype), Off(b_off, p.dtype));
  const std::size_t out_bytes = Bytes(p.out_dtype, p.stack * p.m * p.n);
  const char* name = p.stack > 1              ? "matmul_stack"
                     : IsByteInteger(p.dtype) ? "matmul_bytes"
                                              : "matmul";
  Case out =
      Make(name, p.dtype, std::move(size), Bytes(p.dtype, p.stack * (p.m * p.k + p.k * p.n)),
           out_bytes, 2.0 * static_cast<double>(p.stack * p.m * p.n) * static_cast<double>(p.k));
  const auto last = std::make_shared<MatmulProblem>();
  const auto place = [this, a_off, b_off, out_bytes, last](MatmulProblem& q) {
    q.a = Place(q.dtype, q.stack * (q.transpose_a ? q.k : q.m) * q.lda, a_off);
    q.b = Place(q.dtype, q.stack * (q.transpose_b ? q.n : q.k) * q.ldb, b_off);
    q.c = rig_.Output(out_bytes);
    *last = q;
  };
  // Launching a kernel for each of many products takes too long.
  constexpr std::int64_t kFewProducts = 64;
  using Wanted = bool (*)(const Strategy<MatmulProblem>&);
  const Wanted takes_stacks = [](const Strategy<MatmulProblem>& s) { return s.stacks; };
  AddStrategies<MatmulProblem>(out, p, place, p.stack > kFewProducts ? takes_stacks : nullptr);
  if (is_random_) {
    const MatmulFeatures features = FeaturesOf(*last);
    out.features.assign(features.begin(), features.end());
    return out;
  }
  if (IsByteInteger(p.dtype)) return out;
  out.error = [this, last] { return LargestError(rig_, *last); };
  if constexpr (kWithCuda) {
    // Adds the vendor's best call for f32 operands that are rounded to TF32.
    if (p.dtype == DType::kF32 && p.stack == 1)
      AddPeer(out, "cublaslt_tf32", [this, p, place] {
        MatmulProblem q = p;
        place(q);
        LaunchCublasLt(q, /*tf32=*/true, rig_.stream());
      });
  }
  return out;
}

Case Problems::Matmul(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k) {
  Case out = Matmul({.dtype = dtype,
                     .out_dtype = MatmulDefaultType(dtype),
                     .m = m,
                     .n = n,
                     .k = k,
                     .lda = k,
                     .ldb = n});
  // The simpler strategies take seconds for the largest products.
  if (out.flops > (dtype == DType::kF32 ? 0x1p40 : 0x1p39))
    KeepOnly(out, [](const Candidate& c) {
      return c.vendor || c.name == "warp_tiled_tma" || c.name == "ozaki_f64" ||
             absl::StartsWith(c.name, "tensor_");
    });
  return out;
}

Case Problems::Stack(DType dtype, std::int64_t products, std::int64_t m, std::int64_t n,
                     std::int64_t k) {
  MatmulProblem p{.dtype = dtype, .out_dtype = dtype, .m = m, .n = n, .k = k, .lda = k, .ldb = n};
  p.stack = products;
  p.stack_rank = 1;
  p.stack_axes[0] = {products, m * k, k * n};
  return Matmul(p);
}

Case Problems::Add(DType dtype, std::int64_t n) {
  const std::size_t bytes = Bytes(dtype, n);
  Case out = Make("add", dtype, absl::StrCat(n), 2 * bytes, bytes, static_cast<double>(n));
  AddStrategies<AddProblem>(out, {.dtype = dtype, .n = n}, [this, bytes](AddProblem& p) {
    p.a = Place(p.dtype, p.n);
    p.b = Place(p.dtype, p.n);
    p.out = rig_.Output(bytes);
  });
  return out;
}

Case Problems::WindowSum(DType dtype, std::int64_t n, std::int64_t radius) {
  const std::size_t out_bytes = Bytes(ResultDType(ReduceOp::kSum, dtype), n);
  Case out = Make(absl::StrCat("window_sum_", radius), dtype, absl::StrCat(n), Bytes(dtype, n),
                  out_bytes, 2.0 * static_cast<double>(radius) * static_cast<double>(n));
  AddStrategies<WindowSumProblem>(out, {.dtype = dtype, .n = n, .radius = radius},
                                  [this, out_bytes](WindowSumProblem& p) {
                                    p.x = Place(p.dtype, p.n);
                                    p.out = rig_.Output(out_bytes);
                                  });
  return out;
}

// The k largest elements of each row. If `rising` is set, every element of an f32 row is larger
// than all previous elements. This is the worst case for a strategy with a threshold. These rows
// are always in the same memory, which is larger than the caches.
Case Problems::TopK(DType dtype, std::int64_t rows, std::int64_t n, std::int64_t k, bool rising) {
  const std::int64_t results = rows * k;
  const std::size_t out_bytes = Bytes(dtype, results) + Bytes(DType::kI64, results);
  Case out = Make(absl::StrCat("top_k_", rising ? "rising_" : "", k), dtype,
                  absl::StrCat(rows, "x", n), Bytes(dtype, rows * n), out_bytes, 0);
  const auto memory = std::make_shared<Memory>();
  AddStrategies<TopKProblem>(
      out, {.dtype = dtype, .rows = rows, .n = n, .k = k},
      [this, results, out_bytes, rising, memory](TopKProblem& p) {
        if (rising && memory->data() == nullptr) {
          std::vector<float> row(static_cast<std::size_t>(p.n));
          std::iota(row.begin(), row.end(), 0.0f);
          *memory = OrDie(Allocate(rig_.device(), Bytes(p.dtype, p.rows * p.n)));
          for (std::int64_t r = 0; r < p.rows; ++r)
            Check(CopyToDevice(rig_.stream(), static_cast<float*>(memory->data()) + r * p.n,
                               row.data(), row.size() * sizeof(float)));
        }
        p.x = rising ? memory->data() : Place(p.dtype, p.rows * p.n);
        p.indices = static_cast<std::int64_t*>(rig_.Output(out_bytes));
        p.values = p.indices + results;
      });
  // A single thread takes seconds for a long row.
  constexpr std::int64_t kLong = std::int64_t{1} << 20;
  if (n > kLong || rising)
    KeepOnly(out, [](const Candidate& c) { return c.name != "heap_thread"; });
  return out;
}

// Running sums along the middle of three axes.
Case Problems::Scan(DType dtype, std::int64_t outer, std::int64_t length, std::int64_t inner) {
  const std::int64_t n = outer * length * inner;
  const std::size_t out_bytes = Bytes(ResultDType(ReduceOp::kSum, dtype), n);
  Case out = Make("scan", dtype, absl::StrCat(outer, "x", length, "x", inner), Bytes(dtype, n),
                  out_bytes, static_cast<double>(n));
  AddStrategies<ScanProblem>(out,
                             {.dtype = dtype, .outer = outer, .length = length, .inner = inner},
                             [this, n, out_bytes](ScanProblem& p) {
                               p.x = Place(p.dtype, n);
                               p.out = rig_.Output(out_bytes);
                             });
  // A single thread or block takes up to seconds for a long row.
  constexpr std::int64_t kLong = std::int64_t{1} << 20;
  if (length > kLong)
    KeepOnly(out, [](const Candidate& c) {
      return c.name != "serial" && c.name != "kogge_stone" && c.name != "brent_kung";
    });
  return out;
}

// Sorts rows by values and indices, or only by values.
Case Problems::Sort(DType dtype, std::int64_t rows, std::int64_t n, bool indices) {
  const std::size_t bytes = Bytes(dtype, rows * n);
  const std::size_t out_bytes = bytes + (indices ? Bytes(DType::kI64, rows * n) : 0);
  Case out = Make(indices ? "sort_with_indices" : "sort", dtype, absl::StrCat(rows, "x", n), bytes,
                  out_bytes, static_cast<double>(rows * n));
  AddStrategies<SortProblem>(out, {.dtype = dtype, .wants_indices = indices, .rows = rows, .n = n},
                             [this, rows, n, out_bytes, indices](SortProblem& p) {
                               p.x = Place(p.dtype, rows * n);
                               auto* const results = static_cast<char*>(rig_.Output(out_bytes));
                               // The indices come first, because they need the larger alignment.
                               if (indices) p.indices = reinterpret_cast<std::int64_t*>(results);
                               p.values = results + (indices ? Bytes(DType::kI64, rows * n) : 0);
                             });
  return out;
}

Memory Problems::RandomIndices(std::int64_t n, std::int64_t length) {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(n));
  std::mt19937_64 random(1);
  for (std::int64_t& index : indices)
    index = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(length));
  const std::size_t bytes = indices.size() * sizeof(std::int64_t);
  Memory memory = OrDie(Allocate(rig_.device(), bytes));
  Check(CopyToDevice(rig_.stream(), memory.data(), indices.data(), bytes));
  return memory;
}

// Takes a quarter of the rows, in random order. The indices are always in the same memory, which is
// smaller than the rows. The ceiling is a copy of as many bytes as are taken.
Case Problems::Take(DType dtype, std::int64_t rows, std::int64_t row) {
  const std::int64_t count = rows / 4;
  const std::size_t moved = Bytes(dtype, count * row);
  Case out = Make("take", dtype, absl::StrCat(rows, "x", row), moved + Bytes(DType::kI64, count),
                  moved, 0);
  const auto memory = std::make_shared<Memory>();
  const TakeProblem like{
      .dtype = dtype, .length = rows, .inner = row, .count = count, .strides = {0, row, 1}};
  AddStrategies<TakeProblem>(out, like, [this, moved, memory](TakeProblem& p) {
    if (memory->data() == nullptr) *memory = RandomIndices(p.count, p.length);
    p.x = Place(p.dtype, p.length * p.inner);
    p.indices = memory->data();
    p.out = rig_.Output(moved);
    p.result = rig_.stream().result();
  });
  return out;
}

// Selects one random element of every `one_in` adjacent ones; returns values or indices. The mask
// is always in the same memory.
Case Problems::Select(DType dtype, std::int64_t n, std::int64_t one_in, bool indices) {
  const std::int64_t count = n / one_in;
  const std::size_t out_bytes = Bytes(indices ? DType::kI64 : dtype, count);
  Case out =
      Make(indices ? "select_indices" : "select", dtype, absl::StrCat(n / one_in, "x", one_in),
           Bytes(DType::kBool, n) + (indices ? 0 : Bytes(dtype, count)), out_bytes, 0);
  const auto memory = std::make_shared<Memory>();
  const SelectProblem like{
      .dtype = dtype, .wants_values = !indices, .wants_indices = indices, .n = n, .count = count};
  AddStrategies<SelectProblem>(out, like, [this, out_bytes, one_in, memory](SelectProblem& p) {
    if (memory->data() == nullptr) {
      std::vector<std::uint8_t> mask(static_cast<std::size_t>(p.n));
      std::mt19937_64 random(1);
      const auto each = static_cast<std::size_t>(one_in);
      for (std::size_t i = 0; i + each <= mask.size(); i += each) mask[i + random() % each] = 1;
      *memory = OrDie(Allocate(rig_.device(), mask.size()));
      Check(CopyToDevice(rig_.stream(), memory->data(), mask.data(), mask.size()));
    }
    p.x = Place(p.dtype, p.n);
    p.mask = memory->data();
    p.values = rig_.Output(out_bytes);
    p.indices = static_cast<std::int64_t*>(p.values);
  });
  return out;
}

// Counts normally distributed elements in equal bins, or in bins so wide that one has all elements.
Case Problems::Histogram(DType dtype, std::int64_t n, std::int64_t bins, bool one_bin) {
  const std::size_t out_bytes = Bytes(DType::kI64, bins);
  Case out = Make(one_bin ? "histogram_one_bin" : "histogram", dtype, absl::StrCat(n, "x", bins),
                  Bytes(dtype, n), out_bytes, 0);
  const HistogramProblem like{.dtype = dtype,
                              .n = n,
                              .bins = bins,
                              .low = one_bin ? -1e30 : -Spread(dtype),
                              .high = one_bin ? 2e30 : Spread(dtype)};
  AddStrategies<HistogramProblem>(out, like, [this, out_bytes](HistogramProblem& p) {
    p.x = Place(p.dtype, p.n);
    p.counts = static_cast<std::int64_t*>(rig_.Output(out_bytes));
  });
  return out;
}

// Looks up normally distributed keys among numbers from -Spread to Spread, which are always in the
// same memory.
Case Problems::SearchSorted(DType dtype, std::int64_t n, std::int64_t length) {
  const std::size_t out_bytes = Bytes(DType::kI64, n);
  Case out = Make("search_sorted", dtype, absl::StrCat(n, "_in_", length),
                  Bytes(dtype, n) + Bytes(dtype, std::min(n, length)), out_bytes, 0);
  const auto memory = std::make_shared<Memory>();
  AddStrategies<SearchSortedProblem>(
      out, {.dtype = dtype, .length = length, .n = n},
      [this, memory, out_bytes](SearchSortedProblem& p) {
        if (memory->data() == nullptr) {
          const std::size_t bytes = Bytes(p.dtype, p.length);
          *memory = OrDie(Allocate(rig_.device(), bytes));
          DispatchDType(p.dtype, [&]<class T>(T) {
            std::vector<T> x(static_cast<std::size_t>(p.length));
            const double spread = Spread(p.dtype),
                         step = 2 * spread / static_cast<double>(p.length);
            for (std::size_t i = 0; i < x.size(); ++i)
              x[i] = ConvertElement<T>(static_cast<double>(i) * step - spread);
            Check(CopyToDevice(rig_.stream(), memory->data(), x.data(), bytes));
          });
        }
        p.x = memory->data();
        p.keys = Place(p.dtype, p.n);
        p.out = static_cast<std::int64_t*>(rig_.Output(out_bytes));
      });
  return out;
}

// Sums rows with random labels, which are always in the same memory.
Case Problems::SumByLabel(DType dtype, std::int64_t n, std::int64_t inner, std::int64_t length) {
  const std::size_t out_bytes = Bytes(ResultDType(ReduceOp::kSum, dtype), length * inner);
  Case out = Make("sum_by_label", dtype, absl::StrCat(n, "x", inner, "_to_", length),
                  Bytes(dtype, n * inner) + Bytes(DType::kI64, n), out_bytes, 0);
  const auto memory = std::make_shared<Memory>();
  AddStrategies<SumByLabelProblem>(out, {.dtype = dtype, .n = n, .inner = inner, .length = length},
                                   [this, memory, out_bytes](SumByLabelProblem& p) {
                                     if (memory->data() == nullptr)
                                       *memory = RandomIndices(p.n, p.length);
                                     p.x = Place(p.dtype, p.elements());
                                     p.labels = memory->data();
                                     p.out = rig_.Output(out_bytes);
                                     p.result = rig_.stream().result();
                                   });
  return out;
}

// Applies the function to square matrices; kSolve has one right side for each.
Case Problems::Linalg(DType dtype, LinalgFunction function, std::int64_t stack, std::int64_t side) {
  LinalgProblem like{.dtype = dtype, .function = function, .stack = stack, .m = side, .n = side};
  if (function == LinalgFunction::kSolve) like.columns = 1;
  const std::size_t out_bytes = Bytes(dtype, like.elements());
  Case out =
      Make("linalg", dtype, absl::StrCat(Absl(Name(function)), "_", stack, "_of_", side, "x", side),
           Bytes(dtype, stack * side * (side + like.columns)), out_bytes,
           static_cast<double>(stack) * LinalgFlops(like));
  AddStrategies<LinalgProblem>(out, like, [this, out_bytes](LinalgProblem& p) {
    p.x = Place(p.dtype, p.stack * p.m * p.n);
    p.b = Place(p.dtype, p.stack * p.n * p.columns);
    p.out = rig_.Output(out_bytes);
    p.result = rig_.stream().result();
  });
  return out;
}

// --- Expressions ---

struct Problems::Expression {
  std::string name;
  int operands;
  std::vector<ExpressionNode> nodes;
  bool has_row = false;  // whether operand 1 is one row, which is broadcast to all rows
};

namespace {

constexpr std::int64_t kRowLength = 8192;

ExpressionNode In(std::uint32_t i) {
  return {.kind = ExpressionNode::Kind::kOperand, .operand = i};
}
ExpressionNode Real(double x) { return {.kind = ExpressionNode::Kind::kReal, .real = x}; }
ExpressionNode Op(MapOp op, absl::InlinedVector<std::uint32_t, kMostArguments> args) {
  return {.kind = ExpressionNode::Kind::kOperation, .op = op, .args = std::move(args)};
}

// Returns a Map that computes n elements of an expression. Its operands have no data yet.
MapProblem MapOf(DType dtype, std::int64_t n, int operands,
                 const std::vector<ExpressionNode>& nodes) {
  MapProblem p = WarmUpMap(n, dtype, nullptr, nullptr);
  const std::vector<DType> dtypes(static_cast<std::size_t>(operands), dtype);
  p.program = new MapProgram(OrDie(CompileExpression(nodes, dtypes)));  // never freed
  for (std::size_t i = 3; i < dtypes.size(); ++i) p.operands[i] = p.operands[0];
  return p;
}

}  // namespace

Case Problems::Map(DType dtype, std::int64_t n, const Expression& expression) {
  MapProblem like = MapOf(dtype, n, expression.operands, expression.nodes);
  const auto operands = static_cast<std::size_t>(expression.operands);
  for (std::size_t i = 0; expression.has_row && i < operands; ++i) {
    View& view = like.operands[i];
    view.shape.rank = 2;
    view.shape[0] = n / kRowLength;
    view.shape[1] = kRowLength;
    view.strides = {i == 1 ? 0 : kRowLength, 1};
  }
  const std::size_t bytes = Bytes(dtype, n);
  Case out = Make(expression.name, dtype, absl::StrCat(n), operands * bytes, bytes,
                  static_cast<double>(like.program->flops) * static_cast<double>(n));
  if (expression.has_row) out.bytes -= static_cast<double>(bytes);
  AddStrategies<MapProblem>(out, like, [this, operands, bytes](MapProblem& p) {
    for (std::size_t i = 0; i < operands; ++i) p.operands[i].data = Place(p.dtype, p.n);
    p.out = rig_.Output(bytes);
  });
  return out;
}

// Sums an expression's result, with the strategies that compute the expression themselves.
Case Problems::MappedReduce(DType dtype, std::int64_t n, const Expression& expression) {
  Case out =
      Make(expression.name, dtype, absl::StrCat(n), Bytes(dtype, 2 * n), 0, static_cast<double>(n));
  const auto map = std::make_shared<MapProblem>(MapOf(dtype, n, 2, expression.nodes));
  AddStrategies<ReduceProblem>(
      out, {.dtype = dtype, .n = n},
      [this, map](ReduceProblem& p) {
        for (std::size_t i = 0; i < 2; ++i) map->operands[i].data = Place(p.dtype, p.n);
        p.map = map.get();
        p.result = rig_.stream().result();
      },
      [](const Strategy<ReduceProblem>& strategy) { return strategy.reads_views; });
  return out;
}

// --- The fixed list ---

// f32 is timed at every other power of two, and the other types at three sizes. The largest arrays
// of the other types all have about the same number of bytes.
std::vector<Case> Problems::All(int max_exponent) {
  std::vector<Case> all;
  for (DType dtype : kAllDTypes) {
    const bool f32 = dtype == DType::kF32;
    const int top = f32 ? max_exponent : std::min(max_exponent, SizeOf(dtype) == 8 ? 27 : 28);
    for (int exponent = 8; exponent <= top; ++exponent) {
      if (f32 ? exponent % 2 == 0 : exponent == 16 || exponent == 22 || exponent == top)
        AddVectors(all, dtype, exponent, top);
    }
    AddTopKs(all, dtype);
    AddScans(all, dtype);
    AddSorts(all, dtype);
    AddTakes(all, dtype);
    AddSelects(all, dtype);
    AddHistograms(all, dtype);
    AddSearches(all, dtype);
    AddSumsByLabel(all, dtype);
    if (dtype == DType::kF32 || dtype == DType::kF64) AddDecompositions(all, dtype);
    AddMatrices(all, dtype);
  }
  AddByteProducts(all);
  AddCeilings(all);
  return all;
}

void Problems::AddVectors(std::vector<Case>& all, DType dtype, int exponent, int top) {
  const Expression multiply_add = {
      "map", 3, {In(0), In(1), In(2), Op(MapOp::kMultiply, {0, 1}), Op(MapOp::kAdd, {3, 2})}};
  const std::vector<Expression> maps = {
      // 2 a + 1
      {"map_scale",
       1,
       {In(0), Real(2), Real(1), Op(MapOp::kMultiply, {0, 1}), Op(MapOp::kAdd, {3, 2})}},
      // (a - b)^2
      {"map_distance",
       2,
       {In(0), In(1), Op(MapOp::kSubtract, {0, 1}), Op(MapOp::kMultiply, {2, 2})}},
      // a < b ? c : d
      {"map_where",
       4,
       {In(0), In(1), In(2), In(3), Op(MapOp::kLess, {0, 1}), Op(MapOp::kWhere, {4, 2, 3})}},
      // a / 2 (1 + tanh(0.79788456 (a + 0.044715 a^3)))
      {"map_gelu",
       1,
       {In(0), Op(MapOp::kMultiply, {0, 0}), Op(MapOp::kMultiply, {1, 0}), Real(0.044715),
        Op(MapOp::kMultiply, {2, 3}), Op(MapOp::kAdd, {0, 4}), Real(0.79788456),
        Op(MapOp::kMultiply, {5, 6}), Op(MapOp::kTanh, {7}), Real(1), Op(MapOp::kAdd, {8, 9}),
        Real(0.5), Op(MapOp::kMultiply, {0, 11}), Op(MapOp::kMultiply, {12, 10})}},
      // a + b, and its tanh: the addition of a bias to a product
      {"map_row", 2, {In(0), In(1), Op(MapOp::kAdd, {0, 1})}, true},
      {"map_tanh_row", 2, {In(0), In(1), Op(MapOp::kAdd, {0, 1}), Op(MapOp::kTanh, {2})}, true},
  };
  const std::vector<Expression> sums = {
      {"mapped_reduce_product", 2, {In(0), In(1), Op(MapOp::kMultiply, {0, 1})}},
      {"mapped_reduce_distance",
       2,
       {In(0), In(1), Op(MapOp::kSubtract, {0, 1}), Op(MapOp::kMultiply, {2, 2})}},
  };
  const bool f32 = dtype == DType::kF32;
  const std::int64_t n = std::int64_t{1} << exponent;
  all.push_back(Dot(dtype, n));
  all.push_back(Reduce(dtype, ReduceOp::kSum, n));
  all.push_back(Add(dtype, n));
  all.push_back(Map(dtype, n, multiply_add));
  if (!IsInteger(dtype) && (exponent == 16 || exponent == 22 || exponent == top))
    for (const Expression& expression : maps) all.push_back(Map(dtype, n, expression));
  if (exponent == 16 || exponent == 22 || exponent == std::min(top, 28))
    for (const Expression& expression : sums) all.push_back(MappedReduce(dtype, n, expression));
  all.push_back(WindowSum(dtype, n, 8));
  if (!f32) return;
  if (rig_.gpu() && exponent <= 22) {
    all.push_back(Lone(Dot(dtype, n)));
    all.push_back(Lone(Reduce(dtype, ReduceOp::kSum, n)));
  }
  if (exponent != 20 && exponent != std::min(top, 28)) return;
  // Sums operands that stay in the caches, if they fit there.
  Case warm = Variant(Reduce(dtype, ReduceOp::kSum, n), "reduce_warm", n);
  for (Candidate& candidate : warm.candidates)
    candidate.launch = [this, dtype, launch = candidate.launch] {
      rig_.Operands(dtype).Rewind();
      launch();
    };
  all.push_back(std::move(warm));
  // These operands begin one element after an aligned address.
  all.push_back(Variant(Dot(dtype, n, 1, 1), "dot_misaligned", n));
  all.push_back(Variant(Reduce(dtype, ReduceOp::kSum, n, 1), "reduce_misaligned", n));
  for (ReduceOp op : {ReduceOp::kMax, ReduceOp::kArgMax, ReduceOp::kNormL1, ReduceOp::kNormL2,
                      ReduceOp::kVariance})
    all.push_back(Reduce(dtype, op, n));
  for (std::int64_t radius : {1, 64, 512}) all.push_back(WindowSum(dtype, n, radius));
}

// Adds problems with many long rows, a few longer ones, and rows that fit in the caches.
void Problems::AddTopKs(std::vector<Case>& all, DType dtype) {
  const int shift = rig_.gpu() ? 0 : 4;  // rows are 16 times shorter on a CPU
  const std::int64_t few = std::int64_t{1} << (24 - shift), many = std::int64_t{1} << (20 - shift);
  for (std::int64_t k : {10, 100}) {
    all.push_back(TopK(dtype, 64, 4096, k));
    all.push_back(TopK(dtype, 8, few, k));
    if (dtype == DType::kF32) all.push_back(TopK(dtype, 1024, many, k));
  }
  if (dtype != DType::kF32) return;
  for (std::int64_t k : {10, 100, 4096}) all.push_back(TopK(dtype, 64, many, k, true));
  all.push_back(TopK(dtype, 1, many, 100));
  all.push_back(TopK(dtype, 100000, 128, 10));
  for (std::int64_t k : {1000, 4096}) all.push_back(TopK(dtype, 8, few, k));
}

// Adds problems with one long row, with many rows, and with columns.
void Problems::AddScans(std::vector<Case>& all, DType dtype) {
  const bool gpu = rig_.gpu();
  const std::int64_t n = std::int64_t{1} << (gpu ? 27 : 23), side = gpu ? 8192 : 2048;
  all.push_back(Scan(dtype, 1, n, 1));
  all.push_back(Scan(dtype, side, side, 1));
  all.push_back(Scan(dtype, 1, side, side));
  if (dtype != DType::kF32) return;
  for (std::int64_t length : {1 << 20, 1 << 24})
    if (length < n) all.push_back(Scan(dtype, 1, length, 1));
  for (std::int64_t length : {16, 128, 1024}) all.push_back(Scan(dtype, n / length, length, 1));
  all.push_back(Scan(dtype, 1, n / 16, 16));
}

// Adds problems with one long row, rows that fit in a block's shared memory, and longer rows.
void Problems::AddSorts(std::vector<Case>& all, DType dtype) {
  const bool gpu = rig_.gpu();
  const std::int64_t n = std::int64_t{1} << (gpu ? 28 : 23);
  for (bool indices : {false, true}) {
    all.push_back(Sort(dtype, 1, n, indices));
    all.push_back(Sort(dtype, n / 4096, 4096, indices));
    if (dtype != DType::kF32) continue;
    for (std::int64_t length : {1 << 20, 1 << 24})
      if (length < n) all.push_back(Sort(dtype, 1, length, indices));
    for (std::int64_t length : {16, 256, 1024, 65536})
      all.push_back(Sort(dtype, n / length, length, indices));
  }
}

// Adds takes of elements and of rows of 16 bytes to 16 KiB. All arrays are of one size in bytes.
void Problems::AddTakes(std::vector<Case>& all, DType dtype) {
  const auto size = static_cast<std::int64_t>(SizeOf(dtype));
  const std::int64_t n = (std::int64_t{1} << (rig_.gpu() ? 30 : 24)) / size;
  all.push_back(Take(dtype, n, 1));
  for (std::int64_t bytes : {16, 64, 128, 512, 516, 2048, 16384}) {
    if (dtype == DType::kF32 || bytes == 512)
      all.push_back(Take(dtype, n / (bytes / size), bytes / size));
  }
}

void Problems::AddSelects(std::vector<Case>& all, DType dtype) {
  for (int exponent : {20, rig_.gpu() ? 28 : 24}) {
    const std::int64_t n = std::int64_t{1} << exponent;
    all.push_back(Select(dtype, n, 2, /*indices=*/false));
    if (dtype != DType::kF32) continue;
    for (std::int64_t one_in : {1, 16, 1000})
      all.push_back(Select(dtype, n, one_in, /*indices=*/false));
    all.push_back(Select(dtype, n, 2, /*indices=*/true));
  }
}

void Problems::AddHistograms(std::vector<Case>& all, DType dtype) {
  for (int exponent : {20, rig_.gpu() ? 28 : 24}) {
    const std::int64_t n = std::int64_t{1} << exponent;
    for (bool one_bin : {false, true}) all.push_back(Histogram(dtype, n, 256, one_bin));
    if (dtype != DType::kF32) continue;
    for (std::int64_t bins : {10, 4096, 1 << 20}) all.push_back(Histogram(dtype, n, bins, false));
  }
}

void Problems::AddSumsByLabel(std::vector<Case>& all, DType dtype) {
  for (int exponent : {20, rig_.gpu() ? 28 : 24}) {
    const std::int64_t n = std::int64_t{1} << exponent;
    all.push_back(SumByLabel(dtype, n, 1, 1 << 16));
    if (dtype != DType::kF32) continue;
    for (std::int64_t length : {1, 1024, 1 << 20}) all.push_back(SumByLabel(dtype, n, 1, length));
    all.push_back(SumByLabel(dtype, n / 128, 128, 1024));
  }
}

void Problems::AddDecompositions(std::vector<Case>& all, DType dtype) {
  for (LinalgFunction function : kAllLinalgFunctions) {
    if (function == LinalgFunction::kCholesky) continue;  // random matrices have none
    all.push_back(Linalg(dtype, function, 1, 64));
    all.push_back(Linalg(dtype, function, 1, 512));
    all.push_back(Linalg(dtype, function, rig_.gpu() ? 65536 : 4096, 32));
    if (function == LinalgFunction::kSolve)
      for (std::int64_t side : {4, 128, 256})
        all.push_back(Linalg(dtype, function, (1 << 22) / side / side, side));
  }
}

void Problems::AddSearches(std::vector<Case>& all, DType dtype) {
  for (int exponent : {20, rig_.gpu() ? 24 : 22}) {
    const std::int64_t n = std::int64_t{1} << exponent;
    all.push_back(SearchSorted(dtype, n, n));
    if (dtype != DType::kF32) continue;
    for (std::int64_t length : {1000, rig_.gpu() ? 1 << 28 : 1 << 24})
      all.push_back(SearchSorted(dtype, n, length));
  }
}

void Problems::AddMatrices(std::vector<Case>& all, DType dtype) {
  const bool f32 = dtype == DType::kF32, gpu = rig_.gpu();
  for (std::int64_t side : {256, 512, 1024, 2048, 4096, 8192, 16384}) {
    if (!gpu && side > 1024) break;
    const bool shown = side == (gpu ? 4096 : 512);
    const bool tensors = gpu && !IsInteger(dtype) && side >= 2048;
    if (f32 || shown || tensors) all.push_back(Matmul(dtype, side, side, side));
    if (side >= 1024 && side <= 8192 && (f32 || side >= (gpu ? 4096 : 1024))) {
      for (const char* what : {"_rows", "_columns"}) {
        const bool rows = what[1] == 'r';
        all.push_back(rows ? ReduceAxes(dtype, side, side, 1) : ReduceAxes(dtype, 1, side, side));
        all.back().size = absl::StrCat(side, what);
      }
    }
  }
  if (f32) {
    all.push_back(Matmul(dtype, 1021, 1031, 1033));  // primes: no tile size divides them
    all.push_back(Matmul(dtype, 1, 4096, 4096));
    for (bool dot : {false, true})
      for (std::int64_t count : {64, 1000, 10000}) all.push_back(Batch(dot, count, 4096));
  }
  const std::array<std::int64_t, 4> stacks[] = {
      {1024, 64, 64, 64},   {256, 512, 512, 64},   {64, 1024, 1024, 1024},
      {4096, 16, 16, 16},   {100'000, 4, 4, 4},    {32, 2048, 128, 2048},
      {10'000, 32, 32, 32}, {1024, 128, 128, 128}, {4096, 1, 128, 128}};
  for (const auto& [products, m, n, k] : stacks)
    if (SizeOf(dtype) >= 2 && !IsInteger(dtype) && (gpu || products * m * n * k <= 1 << 30))
      all.push_back(Stack(dtype, products, m, n, k));
  if (!gpu) return;
  // In 8192 x 1 x 8192, the large operand is contiguous along k.
  const std::vector<std::array<std::int64_t, 3>> shapes = {
      {1, 8192, 8192},     {16, 8192, 8192},   {8192, 1, 8192},
      {8192, 16, 8192},    {64, 8192, 8192},   {256, 8192, 8192},
      {4096, 14336, 4096}, {8192, 1024, 8192}, {4093, 4099, 4111}};
  const bool many = f32 || dtype == DType::kBF16 || dtype == DType::kF16;
  for (const auto& [m, n, k] : shapes)
    if (many || (dtype == DType::kF64 && m == 1)) all.push_back(Matmul(dtype, m, n, k));
  for (std::int64_t k : {1, 8}) all.push_back(Matmul(dtype, 4096, 4096, k));
}

// b is stored as [n, k], which the tensor cores can read in place, or as [k, n].
void Problems::AddByteProducts(std::vector<Case>& all) {
  const std::vector<std::array<std::int64_t, 3>> shapes =
      rig_.gpu()
          ? std::vector<std::array<std::int64_t, 3>>{{1024, 1024, 1024},  {4096, 4096, 4096},
                                                     {8192, 8192, 8192},  {16384, 16384, 16384},
                                                     {4096, 11008, 4096}, {16, 8192, 8192},
                                                     {128, 14336, 4096}}
          : std::vector<std::array<std::int64_t, 3>>{{512, 512, 512}, {1024, 1024, 1024}};
  for (const auto& [m, n, k] : shapes) {
    for (bool transpose : {true, false}) {
      MatmulProblem p{.dtype = DType::kI8, .out_dtype = DType::kI32, .m = m, .n = n, .k = k};
      p.lda = k;
      p.transpose_b = transpose;
      p.ldb = transpose ? k : n;
      all.push_back(Matmul(p));
      if (m >= 4096) KeepOnly(all.back(), [](const Candidate& c) { return c.name == "tensor_i8"; });
    }
  }
}

void Problems::AddCeilings(std::vector<Case>& all) {
  const auto n = std::int64_t{1} << (rig_.gpu() ? 30 : 26);
  const std::size_t bytes = Bytes(DType::kF32, n);
  const auto add = [&](const char* name, DType dtype, std::size_t read, std::size_t written,
                       double flops, std::function<void()> launch) {
    all.push_back(Make("ceiling", dtype, absl::StrCat(read), read, written, flops));
    all.back().candidates.push_back({.name = name, .launch = std::move(launch)});
  };
  add("read", DType::kF32, bytes, 0, 0, [this, n, bytes] {
    LaunchRead(rig_.stream(), Place(DType::kF32, n), bytes, rig_.stream().Scratch(16));
  });
  add("copy", DType::kF32, bytes, bytes, 0, [this, n, bytes] {
    LaunchCopy(rig_.stream(), rig_.Output(bytes), Place(DType::kF32, n), bytes);
  });
  for (DType dtype : {DType::kF32, DType::kF64}) {
    const auto launch = [this, dtype] {
      return LaunchFma(rig_.stream(), dtype == DType::kF64, rig_.stream().Scratch(16));
    };
    add("fma", dtype, 0, 0, launch(), launch);
  }
}

// --- Random problems ---

void Problems::Seed(std::uint64_t seed) {
  is_random_ = true;
  random_.seed(seed);
  most_bytes_ = rig_.gpu() ? 0x1p30 : 0x1p25;
  most_flops_ = rig_.gpu() ? 0x1p41 : 0x1p31;
  // Includes space for offsets and alignment.
  const auto most = static_cast<std::size_t>(most_bytes_) + (std::size_t{1} << 16);
  for (DType dtype : kAllDTypes) rig_.Need(dtype, most);
  rig_.NeedOutput(most);
}

std::int64_t Problems::Extent(double most) {
  return std::llround(
      std::exp2(std::uniform_real_distribution<double>(0, std::log2(most))(random_)));
}

std::int64_t Problems::Offset() { return Chance(0.75) ? 0 : OneOf<std::int64_t>({1, 2, 3, 4, 8}); }

Case Problems::Random(const std::string& operation) {
  std::string which = operation;
  if (which.empty())
    which = OneOf<const char*>({"matmul", "matmul", "matmul", "matmul", "matmul", "dot", "reduce",
                                "reduce", "reduce_axes", "batch"});
  if (which == "dot") {
    const DType dtype = OneOf({DType::kF32, DType::kF32, DType::kF64, DType::kF16, DType::kBF16});
    const std::int64_t n = Extent(most_bytes_ / 2 / static_cast<double>(SizeOf(dtype)));
    const std::int64_t a_off = Offset(), b_off = Offset();
    return Dot(dtype, n, a_off, b_off);
  }
  if (which == "reduce") {
    const DType dtype = OneOf({DType::kF32, DType::kF32, DType::kF64, DType::kF16, DType::kBF16,
                               DType::kI32, DType::kI64});
    const ReduceOp op = OneOf({ReduceOp::kSum, ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kArgMax,
                               ReduceOp::kMean, ReduceOp::kNormL2, ReduceOp::kVariance});
    const std::int64_t n = Extent(most_bytes_ / static_cast<double>(SizeOf(dtype)));
    return Reduce(dtype, op, n, Offset());
  }
  if (which == "reduce_axes") {
    const DType dtype = OneOf({DType::kF32, DType::kF32, DType::kF32, DType::kF64, DType::kBF16});
    for (;;) {
      const std::int64_t outer = Extent(0x1p20), length = Extent(0x1p20);
      const std::int64_t inner = Chance(0.6) ? 1 : Extent(0x1p15);
      const double results = static_cast<double>(outer) * static_cast<double>(inner);
      const double bytes =
          static_cast<double>(SizeOf(dtype)) * results * static_cast<double>(length);
      if (bytes <= most_bytes_ && 8 * results <= most_bytes_)
        return ReduceAxes(dtype, outer, length, inner);
    }
  }
  if (which == "batch") {
    const std::int64_t n = Extent(0.25 * kBatchBytes), count = Extent(4096);
    return Batch(true, count, n);
  }
  return RandomMatmul();
}

Case Problems::RandomMatmul() {
  MatmulProblem p;
  p.dtype = OneOf({DType::kF32, DType::kF32, DType::kBF16, DType::kBF16, DType::kF16, DType::kF16,
                   DType::kF64, DType::kF64, DType::kI32});
  p.out_dtype = p.dtype;
  // In practice, many products have extents that are multiples of 64, and matrices without offsets
  // or gaps between rows.
  const bool round = Chance(0.25);
  const auto extent = [&](double most) {
    const std::int64_t any = Extent(most);
    return round && any > 64 ? (any + 63) / 64 * 64 : any;
  };
  const auto pitch = [&](std::int64_t columns) {
    if (round || Chance(0.5)) return columns;
    return Chance(0.5) ? (columns + 7) / 8 * 8 : columns + OneOf<std::int64_t>({1, 5, 8, 64});
  };
  // In products with a table of vectors, one extent is longer.
  const bool is_long = Chance(0.1);
  std::int64_t* const long_extent = OneOf({&p.m, &p.n, &p.k});
  for (;;) {
    p.m = extent(0x1p15), p.n = extent(0x1p15), p.k = extent(0x1p15);
    if (is_long) *long_extent = extent(0x1p21);
    p.transpose_a = Chance(0.5), p.transpose_b = Chance(0.5);
    p.lda = pitch(p.transpose_a ? p.m : p.k), p.ldb = pitch(p.transpose_b ? p.k : p.n);
    const std::int64_t a = (p.transpose_a ? p.k : p.m) * p.lda;
    const std::int64_t b = (p.transpose_b ? p.n : p.k) * p.ldb;
    const double bytes =
        static_cast<double>(SizeOf(p.dtype)) * static_cast<double>(std::max(a + b, p.m * p.n));
    const double flops = 2.0 * static_cast<double>(p.m * p.n) * static_cast<double>(p.k);
    if (bytes <= most_bytes_ && flops <= most_flops_) break;
  }
  const std::int64_t a_off = round ? 0 : Offset(), b_off = round ? 0 : Offset();
  return Matmul(p, a_off, b_off);
}

}  // namespace tessera::bench
