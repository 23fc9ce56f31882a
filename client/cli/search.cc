// search: nearest neighbours, by comparing with all.
//
// ||x - q||^2 = ||x||^2 - 2 x.q + ||q||^2, whose last term is the same for all x: one product of
// matrices gives the scores of some queries with all vectors, and TopK the best of each row. Where not
// even the scores of one query fit, the best of parts of the vectors are compared.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/command.h"
#include "client/cli/comparison.h"
#include "client/cli/operands.h"
#include "client/cli/results.h"
#include "client/expression.h"
#include "client/program_results.h"

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

// Of the scores of one call, a matrix of products and of l2 another one: so much of the scratch memory
// of a device at most, and no more than half of it.
constexpr std::uint64_t kScratchBytes = std::uint64_t{2} << 30;
// The vectors of a part at least: as many as the largest k, which is refused in the first one if at all.
constexpr std::int64_t kLeastPart = 4096;

constexpr std::string_view kTypes = "f32, f64, f16, bf16 or i32";

// Scores are f32 of 16-bit operands, i64 of i32.
DType ScoreType(DType dtype) {
  if (dtype == DType::kF16 || dtype == DType::kBF16) return DType::kF32;
  return IsInteger(dtype) ? DType::kI64 : dtype;
}

// The rows [begin, begin + count) of a matrix.
Operand Rows(const Input& matrix, std::int64_t begin, std::int64_t count) {
  if (count == matrix.shape[0]) return matrix.operand;
  const std::int64_t columns = matrix.shape[1];
  Operand rows = matrix.operand;
  if (auto* tensor = std::get_if<v1::Tensor>(&rows.source)) {
    const std::size_t row = static_cast<std::size_t>(columns) * SizeOf(matrix.dtype);
    tensor->set_data(tensor->data().substr(static_cast<std::size_t>(begin) * row,
                                           static_cast<std::size_t>(count) * row));
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
  view.add_strides(down);
  view.add_strides(strided ? rows.view->strides(1) : 1);
  rows.view = std::move(view);
  return rows;
}

// Adds the step that sums the squares of each row, in the type of scores.
ProgramStep AddNorms(Program& program, const Operand& rows, DType dtype, bool keep_dims,
                     OperationOptions options) {
  if (ScoreType(dtype) == DType::kF32 && dtype != DType::kF32)
    options.expression = Cast(Element(0), DType::kF32).ToMessage();
  return program.Reduce(ReduceOp::kSumSquares, rows, {1}, keep_dims, options);
}

// One search: its operands, and what has been found.
class Searcher {
 public:
  Searcher(Session& session, const SearchFlags& flags, Input vectors, Input queries)
      : session_(session),
        flags_(flags),
        l2_(flags.metric == "l2"),
        vectors_(std::move(vectors)),
        queries_(std::move(queries)) {}

  absl::Status Run() {
    const auto info = session_.client.GetServerInfo();
    if (!info.ok()) return info.status();
    BenchScratch scratch(session_.client, info->limits());
    const std::int64_t queries = queries_.shape[0];
    const std::uint64_t room = RoomOf(*info);
    part_ = std::min(vectors_.shape[0], std::max(kLeastPart, static_cast<std::int64_t>(room)));
    const std::int64_t block = BlockOf(*info, room);
    if (l2_ && block < queries) {
      // Every call would sum the same squares again.
      Program program;
      const ProgramStep norms = AddNorms(program, vectors_.operand, vectors_.dtype, false,
                                         {.target = scratch.Target("norms")});
      const auto results = Execute(program);
      if (!results.ok()) return results.status();
      const auto buffer = results->Buffer(norms);
      if (!buffer.ok()) return buffer.status();
      norms_ = Operand(buffer->name());
    }
    const InterruptScope interrupts;
    std::int64_t begin = 0;
    do {
      absl::Status status = InterruptScope::Check();
      status.Update(part_ < vectors_.shape[0] ? FindByParts(begin)
                                              : Find(begin, std::min(block, queries - begin)));
      if (!status.ok()) return status;
      begin += block;
    } while (begin < queries);
    return absl::OkStatus();
  }

  const v1::Tensor& indices() const { return indices_; }
  const v1::Tensor& distances() const { return distances_; }
  const std::string& device() const { return device_; }
  int calls() const { return calls_; }

 private:
  // Scores that the scratch memory of a device takes in a call.
  std::uint64_t RoomOf(const v1::GetServerInfoResponse& info) const {
    std::uint64_t room = kScratchBytes;
    for (const v1::Device& device : info.devices())
      room = std::min(room, device.scratch_limit_bytes() / 2);
    return room / (SizeOf(ScoreType(vectors_.dtype)) * (l2_ ? 2 : 1));
  }

  // How many queries go into a call.
  std::int64_t BlockOf(const v1::GetServerInfoResponse& info, std::uint64_t room) const {
    const auto extent = [](std::int64_t n) {
      return static_cast<std::uint64_t>(std::max<std::int64_t>(n, 1));
    };
    // The server refuses a k beyond the vectors.
    const std::uint64_t answer = extent(std::min(flags_.k, vectors_.shape[0])) *
                                 (SizeOf(ScoreType(vectors_.dtype)) + sizeof(std::int64_t));
    const std::uint64_t rows = std::min(room / extent(vectors_.shape[0]),
                                        info.limits().max_inline_result_bytes() / answer);
    return static_cast<std::int64_t>(std::clamp<std::uint64_t>(rows, 1, extent(queries_.shape[0])));
  }

  absl::StatusOr<ProgramResults> Execute(const Program& program) {
    ++calls_;
    auto results = ProgramResults::Execute(session_.client, program);
    if (!results.ok()) return results;
    // The first error is no consequence of another one.
    for (const v1::StepResult& step : results->response().results())
      if (absl::Status status = Client::StatusOf(step); !status.ok()) return status;
    device_ = results->response().device();
    return results;
  }

  // The scores of the queries with vectors [first, first + count).
  ProgramStep AddScores(Program& program, const Operand& queries, std::int64_t first,
                        std::int64_t count) const {
    const OperationOptions scratch = {.scratch = true};
    const Operand vectors = Rows(vectors_, first, count);
    const ProgramStep products =
        program.Matmul(queries, vectors, false, true, ScoreType(vectors_.dtype), scratch);
    if (!l2_) return products;
    Operand norms = norms_ ? *norms_ : AddNorms(program, vectors, vectors_.dtype, false, scratch);
    if (norms_) {
      norms.view.emplace();
      norms.view->set_offset(first);
      norms.view->add_shape(count);
    }
    return program.Map({norms, products}, Element(0) - 2 * Element(1), scratch);
  }

  // The distances, or products, of the best scores.
  ProgramStep AddDistances(Program& program, const Operand& queries, ProgramStep best) const {
    if (!l2_) return best;
    const ProgramStep own = AddNorms(program, queries, queries_.dtype, true, {.scratch = true});
    // Rounding must not make a distance negative.
    return program.Map({best, own}, Expr(MapOp::kMaximum, {Element(0) + Element(1), Expr(0)}));
  }

  absl::Status Find(std::int64_t begin, std::int64_t count) {
    const Operand queries = Rows(queries_, begin, count);
    Program program;
    const ProgramStep best =
        program.TopK(AddScores(program, queries, 0, vectors_.shape[0]), flags_.k, /*smallest=*/l2_,
                     std::nullopt, {.scratch = l2_});
    const ProgramStep distances = AddDistances(program, queries, best);
    const auto results = Execute(program);
    if (!results.ok()) return results.status();
    absl::Status status = Append(results->Tensor(best.indices()), indices_);
    status.Update(Append(results->Tensor(distances), distances_));
    return status;
  }

  // Of one query: the best k of each part of the vectors, one behind the other, and of those the best.
  // They are in the order of their indices where they are equal, as TopK leaves them.
  absl::Status FindByParts(std::int64_t begin) {
    const Operand query = Rows(queries_, begin, 1);
    const std::int64_t n = vectors_.shape[0];
    v1::Tensor scores;
    std::vector<std::int64_t> indices;
    for (std::int64_t first = 0; first < n; first += part_) {
      if (absl::Status status = InterruptScope::Check(); !status.ok()) return status;
      const std::int64_t count = std::min(part_, n - first);
      Program program;
      const ProgramStep best = program.TopK(AddScores(program, query, first, count),
                                            first == 0 ? flags_.k : std::min(flags_.k, count), l2_);
      const auto results = Execute(program);
      if (!results.ok()) return results.status();
      const auto part = results->Tensor(best);
      if (!part.ok()) return part.status();
      const auto places = results->Values<std::int64_t>(best.indices());
      if (!places.ok()) return places.status();
      scores.set_dtype(part->dtype());
      scores.mutable_data()->append(part->data());
      for (std::int64_t place : *places) indices.push_back(first + place);
    }
    scores.add_shape(1);
    scores.add_shape(static_cast<std::int64_t>(indices.size()));
    Program program;
    const ProgramStep best = program.TopK(scores, flags_.k, l2_, std::nullopt, {.scratch = l2_});
    const ProgramStep distances = AddDistances(program, query, best);
    const auto results = Execute(program);
    if (!results.ok()) return results.status();
    auto found = results->Tensor(best.indices());
    if (!found.ok()) return found.status();
    auto places = results->Values<std::int64_t>(best.indices());
    if (!places.ok()) return places.status();
    for (std::int64_t& place : *places) place = indices[static_cast<std::size_t>(place)];
    found->set_data(places->data(), places->size() * sizeof(std::int64_t));
    absl::Status status = Append(std::move(found), indices_);
    status.Update(Append(results->Tensor(distances), distances_));
    return status;
  }

  // Puts the rows of one call behind those of the calls before it.
  static absl::Status Append(absl::StatusOr<v1::Tensor> rows, v1::Tensor& all) {
    if (!rows.ok()) return rows.status();
    if (all.shape_size() == 0) {
      all = *std::move(rows);
    } else {
      all.set_shape(0, all.shape(0) + rows->shape(0));
      all.mutable_data()->append(rows->data());
    }
    return absl::OkStatus();
  }

  Session& session_;
  const SearchFlags& flags_;
  const bool l2_;
  const Input vectors_;
  const Input queries_;
  std::int64_t part_ = 0;  // vectors of a call
  std::optional<Operand> norms_;
  v1::Tensor indices_;
  v1::Tensor distances_;
  std::string device_;
  int calls_ = 0;
};

// What holds the values of a type that a search does not take; of i64, those up to 2^53.
DType CastFor(DType dtype) { return dtype == DType::kI64 ? DType::kF64 : DType::kI32; }

absl::Status CheckTypes(const Input& vectors, const Input& queries) {
  const auto refusal = [](const std::string& what, DType to) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_DTYPE",
        absl::StrCat(what, "; 'tessera cp NAME COPY --dtype ", Absl(Name(to)), "' casts a buffer"));
  };
  for (const Input* input : {&vectors, &queries}) {
    const DType dtype = input->dtype;
    if (dtype == DType::kI64 || dtype == DType::kBool || IsByteInteger(dtype)) {
      return refusal(absl::StrCat("a search takes ", Absl(kTypes), ", and ", input->text, " is ",
                                  Absl(Name(dtype))),
                     CastFor(dtype));
    }
  }
  if (vectors.dtype != queries.dtype) {
    return refusal(absl::StrCat("vectors are ", Absl(Name(vectors.dtype)), " and queries ",
                                Absl(Name(queries.dtype)), ": a search takes both of one type, ",
                                Absl(kTypes)),
                   vectors.dtype);
  }
  return absl::OkStatus();
}

absl::Status Search(Session& session, const SearchFlags& flags) {
  if (absl::Status status =
          CheckOutputs(session, flags.indices_file, flags.distances_file, false, false);
      !status.ok())
    return status;
  auto vectors = ResolveInput(session, flags.vectors);
  if (!vectors.ok()) return vectors.status();
  auto queries = ResolveInput(session, flags.queries);
  if (!queries.ok()) return queries.status();
  if (vectors->shape.size() != 2 || queries->shape.size() != 2 ||
      vectors->shape[1] != queries->shape[1]) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SHAPE",
                     absl::StrCat("a search takes vectors [N, D] and queries [Q, D], not ",
                                  ShapeText(vectors->shape), " and ", ShapeText(queries->shape)));
  }
  if (absl::Status status = CheckTypes(*vectors, *queries); !status.ok()) return status;
  // Every call reads the arrays that the first one has read.
  vectors->operand.version = vectors->version;
  queries->operand.version = queries->version;
  const auto start = Clock::now();
  Searcher searcher(session, flags, *std::move(vectors), *std::move(queries));
  if (absl::Status status = searcher.Run(); !status.ok()) return status;
  const absl::Duration wall = Since(start);
  absl::Status status = ReportPart(session, "indices", [&](Session& part) {
    return DeliverResult(part, flags.indices_file, searcher.indices(), {});
  });
  const char* name = flags.metric == "l2" ? "distances" : "products";
  status.Update(ReportPart(session, name, [&](Session& part) {
    return DeliverResult(part, flags.distances_file, searcher.distances(), {});
  }));
  if (session.json) {
    session.document["device"] = searcher.device();
    session.document["calls"] = searcher.calls();
    session.document["wall_us"] = absl::ToDoubleMicroseconds(wall);
  }
  return status;
}

}  // namespace

void AddSearch(CLI::App& app, Command& chosen) {
  auto flags = std::make_shared<SearchFlags>();
  CLI::App* command =
      app.add_subcommand("search", "Nearest neighbours: every query is compared with every vector");
  command->add_option("vectors", flags->vectors, absl::StrCat("Vectors, [N, D] of ", Absl(kTypes)))
      ->type_name("OPERAND")
      ->required();
  command->add_option("--queries", flags->queries, "What is looked for, [Q, D] of the same type")
      ->type_name("OPERAND")
      ->required();
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
  command->footer(std::string("Prints the indices [Q, k], then the distances, which are squared, "
                              "or the products [Q, k].\n"
                              "Every vector is compared; equal ones come in the order of their "
                              "indices.\n"
                              "Squared distances are |q|^2 - 2 q x + |x|^2, in f32 of f32, f16 and "
                              "bf16, in f64 of f64, and of\n"
                              "i32 in 64-bit integers, which wrap from 2^63 on. Their rounding is "
                              "that of the squares: where\n"
                              "vectors lie much farther from the origin than from each other, "
                              "subtract their mean first, or\n"
                              "use f64. Many queries are searched for in several calls, and one "
                              "query among very many vectors\n"
                              "as well, so that their scores take no more than 2 GiB or half of "
                              "the server's scratch memory.\n\n") +
                  std::string(ExitCodesText()));
  command->callback(
      [flags, &chosen] { chosen = [flags](Session& s) { return Search(s, *flags); }; });
}

}  // namespace tessera
