#include "kernels/bench/problems.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "kernels/choose/pace.h"
#include "kernels/choose/tuning.h"
#include "kernels/problem/matmul.h"
#include "kernels/same_bits/batch.h"
#ifdef TESSERA_WITH_CUDA
#include "kernels/bench/peers.h"
#endif

namespace tessera::bench {
namespace {

// The only strategy that is never a default, because its first call tries several algorithms.
constexpr std::string_view kNoDefault = "cublas_lt";

bool HasVendor([[maybe_unused]] Rig& rig) {
#ifdef TESSERA_WITH_CUDA
  return rig.gpu() && HasPeers();
#else
  return false;
#endif
}

// Returns memory for an operand of n elements that begins `offset` elements after a multiple of 256
// bytes.
void* Place(Rig& rig, DType dtype, std::int64_t n, std::int64_t offset) {
  const std::size_t size = SizeOf(dtype);
  auto* begin =
      static_cast<char*>(rig.Operands(dtype).Next(static_cast<std::size_t>(n + offset) * size));
  return begin + static_cast<std::size_t>(offset) * size;
}

std::string Off(std::int64_t offset, DType dtype) {
  return offset == 0 ? "" : absl::StrCat(" +", offset * static_cast<std::int64_t>(SizeOf(dtype)));
}

}  // namespace

Problems::Problems(Rig& rig, std::uint64_t seed)
    : rig_(rig),
      random_(seed),
      most_bytes_(rig.gpu() ? 0x1p30 : 0x1p25),
      most_flops_(rig.gpu() ? 0x1p41 : 0x1p31) {
  // Includes space for offsets and alignment.
  const auto most = static_cast<std::size_t>(most_bytes_) + (std::size_t{1} << 16);
  for (DType dtype : kAllDTypes) rig_.Need(dtype, most);
  rig_.NeedOutput(most);
}

std::int64_t Problems::Extent(double most) {
  return std::llround(
      std::exp2(std::uniform_real_distribution<double>(0, std::log2(most))(random_)));
}

template <class T>
T Problems::OneOf(std::initializer_list<T> values) {
  return values.begin()[random_() % values.size()];
}

std::int64_t Problems::Offset() { return Chance(0.75) ? 0 : OneOf<std::int64_t>({1, 2, 3, 4, 8}); }

template <class Problem>
void Problems::AddStrategies(RandomProblem& out, const Problem& like,
                             const std::function<void(Problem&)>& place) {
  const Pace pace(rig_.device().info());
  Problem placed = like;
  place(placed);
  const Strategy<Problem>* chosen = Choose(placed, rig_.device());
  std::vector<const Strategy<Problem>*> able;
  double least = std::numeric_limits<double>::infinity();
  double bound = chosen->roundoff(placed);
  for (const Strategy<Problem>* strategy : Strategies<Problem>()) {
    if (!strategy->dtypes.Contains(like.dtype) || !Missing(*strategy, rig_.device()).empty() ||
        !Refusal(*strategy, placed).empty())
      continue;
    able.push_back(strategy);
    least = std::min(least, pace.Estimate(*strategy, placed));
    if (strategy->vendor) bound = std::max(bound, strategy->roundoff(placed));
  }
  for (const Strategy<Problem>* strategy : able) {
    const bool slow = pace.Estimate(*strategy, placed) > kBeyond * std::max(least, 10e-6);
    if (strategy != chosen && !strategy->vendor && (slow || strategy->roundoff(placed) > bound))
      continue;
    out.candidates.push_back({.name = std::string(strategy->name),
                              .chosen = strategy == chosen,
                              .strategy = strategy->name != kNoDefault,
                              .vendor = strategy->vendor,
                              .launch = [this, like, place, strategy] {
                                Problem p = like;
                                place(p);
                                strategy->launch(p, rig_.stream());
                              }});
  }
}

RandomProblem Problems::Next(const std::string& operation) {
  std::string which = operation;
  if (which.empty())
    which = OneOf<const char*>({"matmul", "matmul", "matmul", "matmul", "matmul", "dot", "reduce",
                                "reduce", "reduce_axes", "batch"});
  if (which == "dot") return Dot();
  if (which == "reduce") return Reduce();
  if (which == "reduce_axes") return ReduceAxes();
  if (which == "batch") return Batch();
  return Matmul();
}

RandomProblem Problems::Matmul() {
  MatmulProblem p;
  p.dtype = OneOf({DType::kF32, DType::kF32, DType::kBF16, DType::kBF16, DType::kF16, DType::kF16,
                   DType::kF64, DType::kF64, DType::kI32});
  p.out_dtype = p.dtype;
  const auto size = static_cast<double>(SizeOf(p.dtype));
  std::int64_t a_rows = 0, b_rows = 0;
  double bytes = 0, flops = 0;
  // In practice, many products have extents that are multiples of 64, and matrices without offsets
  // or gaps between rows.
  const bool round = Chance(0.25);
  const auto extent = [&](double most) {
    const std::int64_t any = Extent(most);
    return round && any > 64 ? (any + 63) / 64 * 64 : any;
  };
  // Tables of vectors have one longer extent.
  const bool is_long = Chance(0.1);
  std::int64_t* const long_extent = OneOf({&p.m, &p.n, &p.k});
  do {
    p.m = extent(0x1p15), p.n = extent(0x1p15), p.k = extent(0x1p15);
    if (is_long) *long_extent = extent(0x1p21);
    p.transpose_a = Chance(0.5), p.transpose_b = Chance(0.5);
    const auto pitch = [&](std::int64_t columns) {
      if (round || Chance(0.5)) return columns;
      return Chance(0.5) ? (columns + 7) / 8 * 8 : columns + OneOf<std::int64_t>({1, 5, 8, 64});
    };
    p.lda = pitch(p.transpose_a ? p.m : p.k), p.ldb = pitch(p.transpose_b ? p.k : p.n);
    a_rows = p.transpose_a ? p.k : p.m, b_rows = p.transpose_b ? p.n : p.k;
    bytes = size * static_cast<double>(std::max(a_rows * p.lda + b_rows * p.ldb, p.m * p.n));
    flops = 2.0 * static_cast<double>(p.m * p.n) * static_cast<double>(p.k);
  } while (bytes > most_bytes_ || flops > most_flops_);
  const std::int64_t a_off = round ? 0 : Offset(), b_off = round ? 0 : Offset();

  RandomProblem out{.operation = "matmul", .dtype = std::string(Name(p.dtype))};
  out.shape = absl::StrCat(p.m, " x ", p.n, " x ", p.k, p.transpose_a ? " a^T" : "",
                           p.transpose_b ? " b^T" : "");
  if (p.lda != (p.transpose_a ? p.m : p.k)) absl::StrAppend(&out.shape, " lda ", p.lda);
  if (p.ldb != (p.transpose_b ? p.k : p.n)) absl::StrAppend(&out.shape, " ldb ", p.ldb);
  absl::StrAppend(&out.shape, Off(a_off, p.dtype), Off(b_off, p.dtype));
  const std::function<void(MatmulProblem&)> place = [this, a_rows, b_rows, a_off,
                                                     b_off](MatmulProblem& q) {
    q.a = Place(rig_, q.dtype, a_rows * q.lda, a_off);
    q.b = Place(rig_, q.dtype, b_rows * q.ldb, b_off);
    q.c = rig_.Output(static_cast<std::size_t>(q.m * q.n) * SizeOf(q.out_dtype));
  };
  MatmulProblem placed = p;
  place(placed);
  const MatmulFeatures features = FeaturesOf(placed);
  out.features.assign(features.begin(), features.end());
  AddStrategies(out, p, place);
  return out;
}

RandomProblem Problems::Dot() {
  DotProblem p;
  p.dtype = OneOf({DType::kF32, DType::kF32, DType::kF64, DType::kF16, DType::kBF16});
  p.n = Extent(most_bytes_ / 2 / static_cast<double>(SizeOf(p.dtype)));
  const std::int64_t a_off = Offset(), b_off = Offset();
  RandomProblem out{.operation = "dot", .dtype = std::string(Name(p.dtype))};
  out.shape = absl::StrCat(p.n, Off(a_off, p.dtype), Off(b_off, p.dtype));
  AddStrategies<DotProblem>(out, p, [this, a_off, b_off](DotProblem& q) {
    q.a = Place(rig_, q.dtype, q.n, a_off);
    q.b = Place(rig_, q.dtype, q.n, b_off);
    q.result = rig_.stream().result();
  });
  return out;
}

RandomProblem Problems::Reduce() {
  ReduceProblem p;
  p.dtype = OneOf(
      {DType::kF32, DType::kF32, DType::kF64, DType::kF16, DType::kBF16, DType::kI32, DType::kI64});
  p.op = OneOf({ReduceOp::kSum, ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kArgMax, ReduceOp::kMean,
                ReduceOp::kNormL2, ReduceOp::kVariance});
  p.n = Extent(most_bytes_ / static_cast<double>(SizeOf(p.dtype)));
  const std::int64_t offset = Offset();
  RandomProblem out{.operation = absl::StrCat("reduce_", std::string(Name(p.op))),
                    .dtype = std::string(Name(p.dtype))};
  out.shape = absl::StrCat(p.n, Off(offset, p.dtype));
  AddStrategies<ReduceProblem>(out, p, [this, offset](ReduceProblem& q) {
    q.x = Place(rig_, q.dtype, q.n, offset);
    q.result = rig_.stream().result();
  });
#ifdef TESSERA_WITH_CUDA
  if (HasVendor(rig_) && p.dtype == DType::kF32) {
    const auto add = [&](const char* name, Peer peer) {
      out.candidates.push_back({.name = name, .vendor = true, .launch = [this, p, offset, peer] {
                                  const void* x = Place(rig_, p.dtype, p.n, offset);
                                  LaunchPeer(peer, rig_.stream(), static_cast<const float*>(x),
                                             p.n);
                                }});
    };
    if (p.op == ReduceOp::kSum) add("cub_sum", Peer::kCubSum);
    if (p.op == ReduceOp::kMax) add("cub_max", Peer::kCubMax);
    if (p.op == ReduceOp::kArgMax) add("cub_argmax", Peer::kCubArgMax);
    if (p.op == ReduceOp::kNormL2) add("cublas_nrm2", Peer::kCublasNrm2);
  }
#endif
  return out;
}

// SUM along one axis; the vendor has a call for rows of f32.
RandomProblem Problems::ReduceAxes() {
  ReduceAxesProblem p;
  p.dtype = OneOf({DType::kF32, DType::kF32, DType::kF32, DType::kF64, DType::kBF16});
  const auto size = static_cast<double>(SizeOf(p.dtype));
  do {
    p.outer = Extent(0x1p20);
    p.length = Extent(0x1p20);
    p.inner = Chance(0.6) ? 1 : Extent(0x1p15);
  } while (size * static_cast<double>(p.outer) * static_cast<double>(p.length) *
                   static_cast<double>(p.inner) >
               most_bytes_ ||
           8.0 * static_cast<double>(p.outer * p.inner) > most_bytes_);
  RandomProblem out{.operation = "reduce_axes", .dtype = std::string(Name(p.dtype))};
  out.shape = absl::StrCat(p.outer, " x ", p.length, " x ", p.inner);
  const std::int64_t n = p.outer * p.length * p.inner;
  AddStrategies<ReduceAxesProblem>(out, p, [this, n](ReduceAxesProblem& q) {
    q.x = Place(rig_, q.dtype, n, 0);
    q.out = rig_.Output(static_cast<std::size_t>(q.outer * q.inner) * 8);
  });
#ifdef TESSERA_WITH_CUDA
  if (HasVendor(rig_) && p.dtype == DType::kF32 && p.inner == 1) {
    out.candidates.push_back({.name = "cub_segmented", .vendor = true, .launch = [this, p, n] {
                                const void* x = Place(rig_, p.dtype, n, 0);
                                LaunchRowSums(rig_.stream(), static_cast<const float*>(x), p.outer,
                                              p.length);
                              }});
  }
#endif
  return out;
}

// Many short Dots, launched in the same way as by a program.
RandomProblem Problems::Batch() {
  constexpr std::int64_t kMost = kBatchBytes / 4;
  const std::int64_t n = Extent(kMost), count = Extent(4096);
  RandomProblem out{.operation = "batch", .dtype = "f32"};
  out.shape = absl::StrCat(count, " dots of ", n);
  const auto items = std::make_shared<std::vector<DotItem>>(static_cast<std::size_t>(count));
  out.candidates.push_back(
      {.name = "batch", .chosen = true, .strategy = true, .launch = [this, n, count, items] {
         const auto* a = static_cast<const float*>(Place(rig_, DType::kF32, count * n, 0));
         const auto* b = static_cast<const float*>(Place(rig_, DType::kF32, count * n, 0));
         auto* results = static_cast<Scalar*>(
             rig_.stream().HostScratch(static_cast<std::size_t>(count) * sizeof(Scalar)));
         for (std::int64_t i = 0; i < count; ++i)
           (*items)[static_cast<std::size_t>(i)] = {{a + i * n, b + i * n}, n};
         LaunchBatch(DType::kF32, *items, results, rig_.stream());
       }});
#ifdef TESSERA_WITH_CUDA
  if (HasVendor(rig_)) {
    out.candidates.push_back({.name = "cublas_batched", .vendor = true, .launch = [this, n, count] {
                                const void* a = Place(rig_, DType::kF32, count * n, 0);
                                const void* b = Place(rig_, DType::kF32, count * n, 0);
                                LaunchDots(rig_.stream(), static_cast<const float*>(a),
                                           static_cast<const float*>(b), count, n);
                              }});
  }
#endif
  return out;
}

}  // namespace tessera::bench
