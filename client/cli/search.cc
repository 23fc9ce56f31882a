// search: finds nearest neighbours by comparing each query with all vectors.
//
// In ||x - q||^2 = ||x||^2 - 2 x.q + ||q||^2, the last term is the same for all x. One matrix
// product gives the scores of several queries with all vectors, and TopK finds the best scores in
// each row. If not even the scores of one query fit in memory, the vectors are searched in parts
// and the parts' best scores are compared.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/command.h"
#include "client/cli/comparison.h"
#include "client/cli/operands.h"
#include "client/cli/results.h"
#include "client/expression.h"
#include "client/program_results.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

struct SearchFlags {
  std::string vectors;
  std::string queries;
  std::int64_t k = 0;
  std::string metric = "l2";
  std::string indices_file;
  std::string distances_file;
};

// The maximum scratch memory that the scores of one call may use on a device. They are also limited
// to half of the device's scratch memory. The scores are one matrix of products and, for l2, a
// second matrix.
constexpr std::uint64_t kScratchBytes = std::uint64_t{2} << 30;
// The minimum number of vectors in a part. It equals the largest k, so a k that is too large is
// already refused for the first part.
constexpr std::int64_t kLeastPart = 4096;

constexpr std::string_view kTypes = "f32, f64, f16, bf16 or i32";

// Scores are f32 for 16-bit operands and i64 for i32.
DType ScoreType(DType dtype) {
  if (dtype == DType::kF16 || dtype == DType::kBF16) return DType::kF32;
  return IsInteger(dtype) ? DType::kI64 : dtype;
}

// Returns `count` rows of a matrix: begin, begin + every, begin + 2 * every, ...
Operand Rows(const Input& matrix, std::int64_t begin, std::int64_t count, std::int64_t every = 1) {
  if (count == matrix.shape[0]) return matrix.operand;
  const std::int64_t columns = matrix.shape[1];
  Operand rows = matrix.operand;
  if (auto* tensor = std::get_if<v1::Tensor>(&rows.source)) {
    const std::size_t row = static_cast<std::size_t>(columns) * SizeOf(matrix.dtype);
    std::string data;
    for (std::int64_t i = 0; i < count; ++i)
      data.append(tensor->data(), static_cast<std::size_t>(begin + i * every) * row, row);
    tensor->set_data(std::move(data));
    tensor->clear_shape();
    tensor->add_shape(count);
    tensor->add_shape(columns);
    return rows;
  }
  v1::View view;
  const bool strided = rows.view && rows.view->strides_size() > 0;
  const std::int64_t down = strided ? rows.view->strides(0) : columns;
  view.set_offset((rows.view ? rows.view->offset() : 0) + begin * down);
  view.add_shape(count);
  view.add_shape(columns);
  view.add_strides(down * every);
  view.add_strides(strided ? rows.view->strides(1) : 1);
  rows.view = std::move(view);
  return rows;
}

// Whether a value is neither NaN nor infinite.
Expr IsFinite(const Expr& value) {
  return Expr(MapOp::kLess, {Expr(MapOp::kAbs, {value}), std::numeric_limits<double>::infinity()});
}

// Returns (a - b)^2 in f64. Differences of numbers of the other types are exact, or nearly exact,
// in f64.
v1::Expression SquaredDifference() {
  const Expr difference = Cast(Element(0), DType::kF64) - Cast(Element(1), DType::kF64);
  return (difference * difference).ToMessage();
}

std::vector<long double> NumbersOf(const v1::Tensor& tensor) {
  return ToValues(static_cast<DType>(tensor.dtype()), tensor.data());
}

struct Neighbour {
  long double value;  // the squared distance or the product
  std::int64_t index;
};

// One search: its operands and the neighbours found so far.
//
// A centre c, the mean of some of the vectors, is subtracted from vectors and queries. The rounding
// error of the scores then depends on the spread of the vectors, not on their distance from the
// origin. The scores are |x - c|^2 - 2 x (q - c); adding |q|^2 - |c|^2 gives the squared distance.
// If a distance is not much larger than its possible rounding error, it is computed again from the
// differences, in f64. If all or many neighbours of a query are this close, still closer vectors
// may have been missed. The query is then compared with every vector by differences.
class Searcher {
 public:
  Searcher(Session& session, const SearchFlags& flags, Input vectors, Input queries)
      : session_(session),
        flags_(flags),
        l2_(flags.metric == "l2"),
        vectors_(std::move(vectors)),
        queries_(std::move(queries)),
        // With a 16-bit centre, the differences would not be exact.
        centred_(l2_ && (vectors_.dtype == DType::kF32 || vectors_.dtype == DType::kF64) &&
                 vectors_.shape[0] > 0) {}

  void Run() {
    const v1::GetServerInfoResponse info = OrThrow(session_.client.GetServerInfo());
    BenchScratch scratch(session_.client, info.limits());
    const auto queries = static_cast<std::size_t>(queries_.shape[0]);
    found_.resize(queries);
    const std::uint64_t room = RoomOf(info);
    part_ = std::min(vectors_.shape[0], std::max(kLeastPart, static_cast<std::int64_t>(room)));
    const std::size_t block = BlockOf(info, room);
    const InterruptScope interrupts;
    if (l2_ && block < queries) {
      // The norms are stored, because otherwise every call would compute the same sums of squares.
      Program program;
      const ProgramStep norms = AddNorms(program, vectors_.operand, AddCentre(program),
                                         {.target = scratch.Target("norms")});
      norms_ = Operand(OrThrow(Execute(program).Buffer(norms)).name());
    }
    std::size_t begin = 0;
    do {
      Find(begin, std::min(block, queries - begin));
      begin += block;
    } while (begin < queries);
    MeasureAgain();
    FindExactly(std::min(info.limits().max_inline_result_bytes() / (16 * Extent(flags_.k)),
                         room / Extent(part_)));
  }

  // These return the results, with shape [Q, k].
  v1::Tensor indices() const {
    return ToTensor<std::int64_t>(v1::DTYPE_I64, [](const Neighbour& n) { return n.index; });
  }
  v1::Tensor distances() const {
    const auto value = [](const Neighbour& neighbour) { return neighbour.value; };
    const DType dtype = ScoreType(vectors_.dtype);
    if (dtype == DType::kF32) return ToTensor<float>(v1::DTYPE_F32, value);
    if (dtype == DType::kF64) return ToTensor<double>(v1::DTYPE_F64, value);
    return ToTensor<std::int64_t>(v1::DTYPE_I64, [](const Neighbour& neighbour) {
      return neighbour.value < 0x1p63L ? static_cast<std::int64_t>(neighbour.value)
                                       : std::numeric_limits<std::int64_t>::max();
    });
  }
  const std::string& device() const { return device_; }
  int calls() const { return calls_; }

 private:
  // The step that computes the centre, or nullopt if the centre is the origin.
  using Centre = std::optional<ProgramStep>;

  static std::uint64_t Extent(std::int64_t n) {
    return static_cast<std::uint64_t>(std::max<std::int64_t>(n, 1));
  }

  // Returns how many scores of one call fit in the scratch memory of any device.
  std::uint64_t RoomOf(const v1::GetServerInfoResponse& info) const {
    std::uint64_t room = kScratchBytes;
    for (const v1::Device& device : info.devices())
      room = std::min(room, device.scratch_limit_bytes() / 2);
    return room / (SizeOf(ScoreType(vectors_.dtype)) * (l2_ ? 2 : 1));
  }

  // Returns the number of queries per call.
  std::size_t BlockOf(const v1::GetServerInfoResponse& info, std::uint64_t room) const {
    // The server refuses a k larger than the number of vectors. For l2, a response has two more
    // numbers per query.
    const std::uint64_t answer = Extent(std::min(flags_.k, vectors_.shape[0])) *
                                     (SizeOf(ScoreType(vectors_.dtype)) + sizeof(std::int64_t)) +
                                 (l2_ ? 2 * sizeof(double) : 0);
    const std::uint64_t rows = std::min(room / Extent(vectors_.shape[0]),
                                        info.limits().max_inline_result_bytes() / answer);
    return std::clamp<std::uint64_t>(rows, 1, Extent(queries_.shape[0]));
  }

  ProgramResults Execute(const Program& program) {
    OrThrow(InterruptScope::Check());
    ++calls_;
    ProgramResults results = OrThrow(
        ProgramResults::Execute(session_.client, program, {.cancel = InterruptScope::token()}));
    // The first error is the cause. Later ones may be its consequences.
    for (const v1::StepResult& step : results.response().results()) OrThrow(Client::StatusOf(step));
    device_ = results.response().device();
    return results;
  }

  // Adds a step that computes the mean of an evenly spaced sample of the vectors. Elements that are
  // not finite count as 0.
  Centre AddCentre(Program& program) const {
    if (!centred_) return std::nullopt;
    constexpr std::int64_t kSample = 1024;
    const std::int64_t every = std::max<std::int64_t>(1, vectors_.shape[0] / kSample);
    OperationOptions options = {.scratch = true};
    options.expression =
        Where(IsFinite(Element(0)), Element(0), Cast(Expr(0), vectors_.dtype)).ToMessage();
    return program.Reduce(ReduceOp::kMean, Rows(vectors_, 0, vectors_.shape[0] / every, every), {0},
                          false, options);
  }

  // Adds a step that subtracts the centre from each row and computes the sum of squares of each
  // difference, in the type of the scores.
  ProgramStep AddNorms(Program& program, const Operand& rows, const Centre& centre,
                       OperationOptions options) const {
    if (centre) {
      const Expr difference = Element(0) - Element(1);
      options.expression = difference.ToMessage();
      options.with = {*centre};
    } else if (ScoreType(vectors_.dtype) == DType::kF32 && vectors_.dtype != DType::kF32) {
      options.expression = Cast(Element(0), DType::kF32).ToMessage();
    }
    return program.Reduce(ReduceOp::kSumSquares, rows, {1}, false, options);
  }

  // The steps of a search for some queries among the vectors [first, first + count).
  struct Steps {
    ProgramStep best;
    // The following members are used only for l2.
    ProgramStep offsets;                     // |q|^2 - |c|^2 of each query
    ProgramStep query_norms;                 // |q - c|^2 of each query
    std::optional<ProgramStep> largest;      // largest |x - c|^2, or for integers largest |element|
    std::optional<ProgramStep> centre_norm;  // |c|^2, if there is a centre
  };
  Steps Add(Program& program, const Operand& queries, std::int64_t first,
            std::int64_t count) const {
    Steps steps;
    const OperationOptions scratch = {.scratch = true};
    const Operand vectors = Rows(vectors_, first, count);
    const std::int64_t k = first == 0 ? flags_.k : std::min(flags_.k, count);
    const DType type = ScoreType(vectors_.dtype);
    if (!l2_) {
      steps.best = program.TopK(program.Matmul(queries, vectors, false, true, type, scratch), k);
      return steps;
    }
    const Centre centre = AddCentre(program);
    Operand norms =
        norms_ ? *norms_ : Operand(AddNorms(program, vectors, centre, {.scratch = true}));
    if (norms_) {
      norms.view.emplace();
      norms.view->set_offset(first);
      norms.view->add_shape(count);
    }
    const Operand moved =
        centre ? Operand(program.Map({queries, *centre}, Element(0) - Element(1), scratch))
               : queries;
    const ProgramStep products = program.Matmul(moved, vectors, false, true, type, scratch);
    steps.best = program.TopK(program.Map({norms, products}, Element(0) - 2 * Element(1), scratch),
                              k, /*smallest=*/true);
    // The host estimates the rounding error from these numbers. NaN norms are ignored, because
    // their vectors are not neighbours of any query.
    const Expr q = Cast(Element(0), DType::kF64);
    const Expr c = Cast(Element(1), DType::kF64);
    const bool integers = IsInteger(vectors_.dtype);
    OperationOptions largest;
    largest.expression =
        (integers ? Expr(MapOp::kAbs, {q})
                  : Where(Element(0) == Element(0), Element(0), Cast(Expr(0), type)))
            .ToMessage();
    if (vectors_.shape[1] > 0 || !integers)
      steps.largest =
          program.Reduce(ReduceOp::kMax, integers ? vectors : norms, {}, false, largest);
    OperationOptions rows;
    if (centre) rows.with = {*centre};
    rows.expression = (centre ? (q - c) * (q + c) : q * q).ToMessage();
    steps.offsets = integers ? program.Reduce(ReduceOp::kSumSquares, queries, {1})
                             : program.Reduce(ReduceOp::kSum, queries, {1}, false, rows);
    rows.expression = (centre ? (q - c) * (q - c) : q * q).ToMessage();
    steps.query_norms = program.Reduce(ReduceOp::kSum, queries, {1}, false, rows);
    if (centre) {
      OperationOptions squares;
      squares.expression = (q * q).ToMessage();
      steps.centre_norm = program.Reduce(ReduceOp::kSum, *centre, {}, false, squares);
    }
    return steps;
  }

  // Finds the neighbours of some queries. Searches the vectors in parts if not all scores fit in
  // memory.
  void Find(std::size_t begin, std::size_t count) {
    const Operand queries =
        Rows(queries_, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(count));
    const std::int64_t n = vectors_.shape[0];
    std::vector<long double> rounding(count);
    std::int64_t first = 0;
    do {
      Program program;
      const Steps steps = Add(program, queries, first, std::min(part_, n - first));
      const ProgramResults results = Execute(program);
      std::vector<long double> offsets(count);
      if (l2_ && count > 0) {
        offsets = NumbersOf(OrThrow(results.Tensor(steps.offsets)));
        const std::vector<long double> norms =
            NumbersOf(OrThrow(results.Tensor(steps.query_norms)));
        const double largest = steps.largest ? OrThrow(results.Real(*steps.largest)) : 0;
        const double centre = steps.centre_norm ? OrThrow(results.Real(*steps.centre_norm)) : 0;
        for (std::size_t i = 0; i < count; ++i) {
          rounding[i] =
              std::max(rounding[i], RoundingOf(largest, centre, static_cast<double>(norms[i])));
        }
      }
      Take(results, steps.best, first, begin, count,
           [&](long double score, std::size_t i) { return score + offsets[i]; });
      first += part_;
    } while (first < n);
    for (std::size_t i = 0; i < count; ++i) {
      Sort(found_[begin + i]);
      Judge(begin + i, rounding[i]);
    }
  }

  // Appends the best vectors of a part to the neighbours of some queries. value(score, i):
  // returns the neighbour's value, given its score for query begin + i.
  template <class F>
  void Take(const ProgramResults& results, ProgramStep best, std::int64_t first, std::size_t begin,
            std::size_t count, const F& value) {
    const std::vector<long double> scores = NumbersOf(OrThrow(results.Tensor(best)));
    const auto places = OrThrow(results.Values<std::int64_t>(best.indices()));
    const std::size_t k = count == 0 ? 0 : std::min(scores.size(), places.size()) / count;
    for (std::size_t j = 0; j < k * count; ++j)
      found_[begin + j / k].push_back({value(scores[j], j / k), first + places[j]});
  }

  // Returns the largest possible error of a squared distance, or infinity if integers may have
  // overflowed.
  long double RoundingOf(double largest, double centre, double query) const {
    const auto width = static_cast<double>(vectors_.shape[1]);
    if (IsInteger(vectors_.dtype)) {
      return 2 * (width * largest * largest + query) < 0x1p62
                 ? 0
                 : std::numeric_limits<double>::infinity();
    }
    const DType type = ScoreType(vectors_.dtype);
    const double smallest = type == DType::kF64 ? std::numeric_limits<double>::min()
                                                : double{std::numeric_limits<float>::min()};
    const double terms = largest + 2 * (std::sqrt(largest) + std::sqrt(centre)) * std::sqrt(query);
    // The error of a sum of rounded products grows with the square root of their number.
    const double rounding =
        (8 * std::sqrt(width) + 8) * UnitRoundoff(type) * terms + 4 * width * smallest;
    return std::isnan(rounding) ? std::numeric_limits<double>::infinity() : rounding;
  }

  // Sorts neighbours and keeps the first k. NaN comes last, and equal values are in the order of
  // their indices.
  void Sort(std::vector<Neighbour>& found) const {
    std::stable_sort(found.begin(), found.end(), [&](const Neighbour& a, const Neighbour& b) {
      if (std::isnan(a.value) || std::isnan(b.value))
        return !std::isnan(a.value) ? true : std::isnan(b.value) && a.index < b.index;
      if (a.value != b.value) return l2_ ? a.value < b.value : a.value > b.value;
      return a.index < b.index;
    });
    found.resize(std::min(found.size(), static_cast<std::size_t>(flags_.k)));
  }

  // Records what must be computed again: some distances, or the whole query.
  void Judge(std::size_t query, long double rounding) {
    const std::vector<Neighbour>& found = found_[query];
    constexpr long double kClose = 1 << 10;   // in multiples of the rounding error
    constexpr std::ptrdiff_t kFewAgain = 32;  // distances per query
    if (!l2_) {
      // TopK treats NaN as the largest value.
      if (std::any_of(found.begin(), found.end(),
                      [](const Neighbour& n) { return std::isnan(n.value); }))
        exactly_.push_back(query);
      return;
    }
    const auto clear = [&](const Neighbour& n) {
      return std::isfinite(n.value) && n.value >= kClose * rounding;
    };
    const auto close = std::find_if(found.begin(), found.end(), clear) - found.begin();
    const bool all = close == static_cast<std::ptrdiff_t>(found.size());
    if (close > kFewAgain || (all && static_cast<std::int64_t>(found.size()) < vectors_.shape[0])) {
      exactly_.push_back(query);
    } else {
      for (std::ptrdiff_t i = 0; i < close; ++i)
        again_.emplace_back(query, static_cast<std::size_t>(i));
    }
  }

  // Computes the recorded distances again, from differences.
  void MeasureAgain() {
    constexpr std::size_t kSteps = 1000;
    OperationOptions options;
    options.expression = SquaredDifference();
    for (std::size_t begin = 0; begin < again_.size(); begin += kSteps) {
      const std::size_t end = std::min(again_.size(), begin + kSteps);
      Program program;
      for (std::size_t i = begin; i < end; ++i) {
        const auto& [query, place] = again_[i];
        options.with = {Rows(queries_, static_cast<std::int64_t>(query), 1)};
        program.Reduce(ReduceOp::kSum, Rows(vectors_, found_[query][place].index, 1), {}, false,
                       options);
      }
      const ProgramResults results = Execute(program);
      for (std::size_t i = begin; i < end; ++i) {
        found_[again_[i].first][again_[i].second].value =
            OrThrow(results.Real(ProgramStep{.number = static_cast<std::uint32_t>(i - begin)}));
      }
    }
    for (const auto& [query, place] : again_) Sort(found_[query]);
  }

  // Compares the recorded queries with every vector. For l2, uses differences. For products,
  // negates the scores so that NaN comes last. `most` is the maximum number of queries per call.
  void FindExactly(std::uint64_t most) {
    const auto together = static_cast<std::size_t>(std::clamp<std::uint64_t>(most, 1, 256));
    const OperationOptions scratch = {.scratch = true};
    for (std::size_t begin = 0; begin < exactly_.size(); begin += together) {
      const std::size_t end = std::min(exactly_.size(), begin + together);
      for (std::size_t i = begin; i < end; ++i) found_[exactly_[i]].clear();
      for (std::int64_t first = 0; first < vectors_.shape[0]; first += part_) {
        const std::int64_t count = std::min(part_, vectors_.shape[0] - first);
        const Operand vectors = Rows(vectors_, first, count);
        Program program;
        std::vector<ProgramStep> best;
        for (std::size_t i = begin; i < end; ++i) {
          const Operand query = Rows(queries_, static_cast<std::int64_t>(exactly_[i]), 1);
          ProgramStep scores;
          if (l2_) {
            OperationOptions options = scratch;
            options.expression = SquaredDifference();
            options.with = {query};
            scores = program.Reduce(ReduceOp::kSum, vectors, {1}, false, options);
          } else {
            scores = program.Map(
                {program.Matmul(query, vectors, false, true, ScoreType(vectors_.dtype), scratch)},
                -Element(0), scratch);
          }
          best.push_back(program.TopK(scores, std::min(flags_.k, count), /*smallest=*/true));
        }
        const ProgramResults results = Execute(program);
        for (std::size_t i = begin; i < end; ++i) {
          Take(results, best[i - begin], first, exactly_[i], 1,
               [&](long double score, std::size_t) { return l2_ ? score : -score; });
        }
      }
      for (std::size_t i = begin; i < end; ++i) Sort(found_[exactly_[i]]);
    }
  }

  template <class T, class F>
  v1::Tensor ToTensor(v1::Dtype dtype, const F& value) const {
    v1::Tensor tensor;
    tensor.set_dtype(dtype);
    tensor.add_shape(queries_.shape[0]);
    tensor.add_shape(flags_.k);
    std::string& data = *tensor.mutable_data();
    for (const std::vector<Neighbour>& row : found_) {
      for (const Neighbour& neighbour : row) {
        const T element = static_cast<T>(value(neighbour));
        data.append(reinterpret_cast<const char*>(&element), sizeof(element));
      }
    }
    return tensor;
  }

  Session& session_;
  const SearchFlags& flags_;
  const bool l2_;
  const Input vectors_;
  const Input queries_;
  const bool centred_;
  std::int64_t part_ = 0;  // vectors per call
  std::optional<Operand> norms_;
  std::vector<std::vector<Neighbour>> found_;               // the neighbours of each query
  std::vector<std::pair<std::size_t, std::size_t>> again_;  // a query, and one of its neighbours
  std::vector<std::size_t> exactly_;  // the queries that FindExactly compares with every vector
  std::string device_;
  int calls_ = 0;
};

void CheckTypes(const Input& vectors, const Input& queries) {
  const auto refuse = [](const std::string& what, DType to) {
    ThrowInvalid("BAD_DTYPE", absl::StrCat(what, "; 'tessera cp NAME COPY --dtype ", Absl(Name(to)),
                                           "' casts a buffer"));
  };
  for (const Input* input : {&vectors, &queries}) {
    const DType dtype = input->dtype;
    if (dtype == DType::kI64 || dtype == DType::kBool || IsByteInteger(dtype)) {
      // These casts are exact; for i64, only up to 2^53.
      refuse(absl::StrCat("a search takes ", Absl(kTypes), ", and ", input->text, " is ",
                          Absl(Name(dtype))),
             dtype == DType::kI64 ? DType::kF64 : DType::kI32);
    }
  }
  if (vectors.dtype != queries.dtype) {
    refuse(absl::StrCat("vectors are ", Absl(Name(vectors.dtype)), " and queries are ",
                        Absl(Name(queries.dtype)), ": both must have the same type, one of ",
                        Absl(kTypes)),
           vectors.dtype);
  }
}

void Search(Session& session, const SearchFlags& flags) {
  CheckOutputs(session, flags.indices_file, flags.distances_file, false, false);
  Input vectors = ResolveInput(session, flags.vectors);
  Input queries = ResolveInput(session, flags.queries);
  if (vectors.shape.size() != 2 || queries.shape.size() != 2 ||
      vectors.shape[1] != queries.shape[1]) {
    ThrowInvalid("BAD_SHAPE",
                 absl::StrCat("a search takes vectors [N, D] and queries [Q, D], not ",
                              ShapeText(vectors.shape), " and ", ShapeText(queries.shape)));
  }
  CheckTypes(vectors, queries);
  // The versions are fixed, so that all calls read the same arrays.
  vectors.operand.version = vectors.version;
  queries.operand.version = queries.version;
  const auto start = Clock::now();
  Searcher searcher(session, flags, std::move(vectors), std::move(queries));
  searcher.Run();
  session.document["wall_us"] = absl::ToDoubleMicroseconds(Since(start));
  session.document["device"] = searcher.device();
  session.document["calls"] = searcher.calls();
  ReportArrays(session, {{"indices", flags.indices_file, searcher.indices(), {}},
                         {flags.metric == "l2" ? "distances" : "products",
                          flags.distances_file,
                          searcher.distances(),
                          {}}});
}

}  // namespace

void AddSearch(CLI::App& app, Command& chosen) {
  const auto [command, flags] =
      AddCommand(app, chosen, "search",
                 "Nearest neighbours: every query is compared with every vector", Search);
  AddOperand(*command, "vectors", flags->vectors,
             absl::StrCat("Vectors, [N, D] of ", Absl(kTypes)));
  AddOperand(*command, "--queries", flags->queries, "Queries, [Q, D] of the same type");
  command->add_option("--k", flags->k, "How many neighbours of each query, from 1 to 4096")
      ->required();
  command
      ->add_option("--metric", flags->metric,
                   "l2: the smallest squared Euclidean distances; dot: the largest products")
      ->check(CLI::IsMember({"l2", "dot"}))
      ->capture_default_str();
  command
      ->add_option("-o,--output", flags->indices_file,
                   "Save the indices as a .npy file; - is standard output")
      ->type_name("FILE");
  command
      ->add_option("--distances-output", flags->distances_file,
                   "Save the distances, or products, as a .npy file; - is standard output")
      ->type_name("FILE");
  command->footer(
      std::string("Prints the indices [Q, k], and then the squared distances or the products "
                  "[Q, k].\n"
                  "Every vector is compared; equal values are in the order of their indices.\n"
                  "Vectors with NaN are listed last. Squared distances have type f64 for f64, "
                  "64-bit integers\n"
                  "for i32, and f32 for the other types. They are computed from a matrix product. "
                  "Distances so\n"
                  "small that the rounding of the product would show are computed again from the "
                  "differences\n"
                  "in f64; if all neighbours of a query are this close, every vector is compared "
                  "by differences,\n"
                  "which takes longer. The search uses several calls if needed, so that the scores "
                  "of a call\n"
                  "need at most 2 GiB, and at most half of the server's scratch memory.\n\n") +
      std::string(ExitCodesText()));
}

}  // namespace tessera
