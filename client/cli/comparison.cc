#include "client/cli/comparison.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "client/cli/command.h"
#include "kernels/base/element.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

double Median(absl::Span<const double> sorted) {
  if (sorted.empty()) return 0;
  const std::size_t half = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// Returns why a strategy is skipped, or "" if the error is not about the strategy.
std::string Refusal(const absl::Status& error) {
  const std::string reason = ErrorReason(error);
  if (reason == "STRATEGY_UNSUPPORTED") return "needs " + ErrorMetadata(error)["needs"];
  if (reason == "BAD_LAUNCH") {
    auto metadata = ErrorMetadata(error);
    return metadata["field"] + " is " + metadata["value"] + ", but must be " + metadata["range"];
  }
  if (error.code() == absl::StatusCode::kDeadlineExceeded) return "takes longer than --timeout";
  return "";
}

// Returns the spacing of a type's subnormal numbers.
long double SpacingOf(DType dtype) {
  if (dtype == DType::kF16) return 0x1p-24L;
  if (dtype == DType::kBF16) return 0x1p-133L;
  return dtype == DType::kF32 ? 0x1p-149L : 0x1p-1074L;
}

// Whether the values of two strategies with these roundoffs may both be correct.
bool Agree(long double a, long double b, double roundoff_a, double roundoff_b, long double scale,
           DType dtype) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return true;
  if (scale == 0) return false;
  // Partial sums may overflow in one order of additions but not in another.
  if (!std::isfinite(a) || !std::isfinite(b)) {
    const long double largest = dtype == DType::kF16 ? 65504.0L : 0x1p127L;
    return !(scale < largest);
  }
  const long double bound =
      (static_cast<long double>(roundoff_a) + static_cast<long double>(roundoff_b)) * scale +
      2 * UnitRoundoff(dtype) * std::max(std::abs(a), std::abs(b)) + 2 * SpacingOf(dtype);
  return !(std::abs(a - b) > bound);
}

// Compares every strategy with the one that has the tightest bound.
absl::Status Compare(const BenchProblem& problem, const std::vector<BenchAnswer>& answers,
                     BenchReport& report) {
  const auto best = static_cast<std::size_t>(
      std::min_element(report.rows.begin(), report.rows.end(),
                       [](const auto& a, const auto& b) { return a.roundoff < b.roundoff; }) -
      report.rows.begin());
  const BenchReport::Row& reference = report.rows[best];
  report.reference = reference.strategy;
  if (report.rows.size() < 2) return absl::OkStatus();
  const absl::StatusOr<BenchScale> scale = problem.scale();
  if (!scale.ok()) return scale.status();
  const BenchValues& wanted = answers[best].values;
  for (std::size_t r = 0; r < report.rows.size(); ++r) {
    BenchReport::Row& row = report.rows[r];
    const BenchValues& values = answers[r].values;
    row.agrees = values.size() == wanted.size();
    for (std::size_t i = 0; i < std::min(values.size(), wanted.size()); ++i) {
      if (values[i] == wanted[i]) continue;
      row.difference = std::max(row.difference, std::abs(values[i] - wanted[i]));
      row.agrees &= Agree(values[i], wanted[i], row.roundoff, reference.roundoff,
                          (*scale)(i, wanted[i]), answers[r].dtype);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BenchReport> RunBench(const BenchProblem& problem) {
  BenchReport report;
  report.title = problem.title;
  report.operation = problem.operation;
  report.repeat = problem.repeat;
  report.unit = problem.unit;
  absl::Status refusal;
  std::vector<BenchAnswer> answers;
  for (const std::string& strategy : problem.strategies) {
    absl::StatusOr<BenchAnswer> answer = problem.run(strategy, /*with_values=*/true);
    if (answer.ok()) {
      report.rows.push_back({.strategy = strategy, .roundoff = answer->stats.roundoff()});
      answers.push_back(*std::move(answer));
      continue;
    }
    std::string reason = Refusal(answer.status());
    if (reason.empty()) return answer.status();
    refusal.Update(answer.status());
    report.skipped.push_back({strategy, std::move(reason)});
  }
  if (report.rows.empty()) {
    return refusal.ok() ? absl::InternalError("the server lists no strategy of this operation")
                        : refusal;
  }
  report.device = answers[0].stats.device();
  report.work = problem.operations > 0
                    ? problem.operations
                    : static_cast<double>(problem.operand_bytes + answers[0].result_bytes);
  if (absl::Status status = Compare(problem, answers, report); !status.ok()) return status;

  // Calls are interleaved, so that a drop in the clock rate or another process affects all
  // strategies alike.
  std::vector<double> used_us(report.rows.size(), 0);
  for (int round = 0; round < problem.repeat; ++round) {
    for (std::size_t r = 0; r < report.rows.size(); ++r) {
      constexpr int kLeast = 3;
      if (round >= kLeast && used_us[r] >= absl::ToDoubleMicroseconds(kBenchPatience)) continue;
      const auto answer = problem.run(report.rows[r].strategy, /*with_values=*/false);
      if (!answer.ok()) return answer.status();
      report.rows[r].kernel_us.push_back(answer->stats.kernel_us());
      used_us[r] += answer->stats.kernel_us();
    }
  }
  for (BenchReport::Row& row : report.rows) {
    std::sort(row.kernel_us.begin(), row.kernel_us.end());
    row.median_us = Median(row.kernel_us);
    row.rate = row.median_us > 0 ? report.work / row.median_us * 1e6 : 0;
  }
  return report;
}

absl::Status CheckAgreement(const BenchReport& report) {
  for (const BenchReport::Row& row : report.rows) {
    if (row.agrees) continue;
    return MakeError(absl::StatusCode::kInternal, "RESULTS_DISAGREE",
                     absl::StrCat("'", row.strategy, "' differs from '", report.reference, "' by ",
                                  absl::StrFormat("%g", static_cast<double>(row.difference)),
                                  ", which is more than the sum of their error bounds"),
                     {{"strategy", row.strategy}, {"reference", report.reference}});
  }
  return absl::OkStatus();
}

// --- Scratch -------------------------------------------------------------------------------------

BenchScratch::BenchScratch(Client& client, const v1::Limits& limits)
    : client_(client),
      prefix_(absl::StrCat("tessera-cli/", ::getpid(), "-", absl::GetCurrentTimeNanos(), "/")),
      ttl_(TemporaryTtl(limits)) {}

BenchScratch::~BenchScratch() {
  // Deleting a buffer fails if no result was stored in it.
  for (const std::string& name : names_) client_.DeleteBuffer(name).IgnoreError();
}

ResultBuffer BenchScratch::Target(std::string_view name) {
  std::string full = prefix_ + std::string(name);
  if (std::find(names_.begin(), names_.end(), full) == names_.end()) names_.push_back(full);
  return {.name = std::move(full), .ttl = ttl_, .replace = true};
}

absl::StatusOr<BenchValues> BenchScratch::Fetch(const v1::Buffer& buffer) {
  const auto dtype = static_cast<DType>(buffer.dtype());
  const std::uint64_t elements = buffer.size_bytes() / SizeOf(dtype);
  std::string name = buffer.name();
  std::uint64_t count = elements;
  if (const BenchSample sample = SampleOf(elements); sample.step > 1) {
    Operand source(name);
    source.view.emplace();
    source.view->set_offset(static_cast<std::int64_t>(sample.offset));
    source.view->add_shape(static_cast<std::int64_t>(sample.count));
    source.view->add_strides(static_cast<std::int64_t>(sample.step));
    const auto copy = client_.CopyBuffer(source, Target("sample"));
    if (!copy.ok()) return copy.status();
    name = copy->name();
    count = sample.count;
  }
  std::string bytes(count * SizeOf(dtype), '\0');
  const auto fetched = client_.Download(name, absl::MakeSpan(bytes.data(), bytes.size()));
  if (!fetched.ok()) return fetched.status();
  return ToValues(dtype, bytes);
}

BenchSample SampleOf(std::uint64_t elements) {
  if (elements <= kBenchSample) return {0, 1, elements};
  // An odd step keeps the sample from aligning with tiles.
  const std::uint64_t step = ((elements - 1) / kBenchSample + 1) | 1u;
  return {(elements - 1) % step, step, (elements - 1) / step + 1};
}

BenchValues ToValues(const v1::Scalar& value) {
  if (value.value_case() == v1::Scalar::kInteger)
    return {static_cast<long double>(value.integer())};
  return {static_cast<long double>(value.real())};
}

BenchValues ToValues(DType dtype, std::string_view elements) {
  BenchValues values(elements.size() / SizeOf(dtype));
  DispatchDType(dtype, [&]<class T>(T element) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::memcpy(&element, elements.data() + i * sizeof(T), sizeof(T));
      values[i] = static_cast<long double>(static_cast<ValueOf<T>>(element));
    }
  });
  return values;
}

// --- Ceilings ------------------------------------------------------------------------------------

namespace {

constexpr int kCeilingCalls = 9;

double MeasureRate(Client& client, BenchScratch& scratch, const v1::Device& device,
                   std::int64_t elements) {
  const float one = 1;
  const ResultBuffer seed = scratch.Target("one");
  OrThrow(
      client.Upload(seed.name, DType::kF32, {},
                    FromMemory(std::string_view(reinterpret_cast<const char*>(&one), sizeof(one))),
                    {.ttl = seed.ttl, .device = device.name()}));
  std::vector<Operand> operands;
  for (const char* name : {"a", "b"}) {
    Operand repeated(seed.name);
    repeated.view.emplace().add_shape(elements);
    repeated.view->add_strides(0);
    operands.emplace_back(OrThrow(client.CopyBuffer(repeated, scratch.Target(name))).name());
  }
  std::vector<double> us;
  for (int call = 0; call <= kCeilingCalls; ++call) {
    const v1::DotResponse dot = OrThrow(client.Dot(operands[0], operands[1], {.timing = true}));
    if (call > 0) us.push_back(dot.stats().kernel_us());  // the first call is a warm-up
  }
  std::sort(us.begin(), us.end());
  const double bytes = 2 * static_cast<double>(elements) * sizeof(float);
  return Median(us) > 0 ? bytes / Median(us) * 1e6 : 0;
}

}  // namespace

BenchCeiling MeasureBandwidth(Client& client, BenchScratch& scratch, const v1::Device& device) {
  // Each array is several times as large as the caches, but at most an eighth of the free memory.
  const std::uint64_t most = std::uint64_t{device.backend() == "cpu" ? 128u : 256u} << 20;
  constexpr std::uint64_t kLeast = std::uint64_t{32} << 20;
  const std::uint64_t used = std::min(device.buffer_used_bytes(), device.buffer_limit_bytes());
  const std::uint64_t free =
      std::min(device.memory_free_bytes(), device.buffer_limit_bytes() - used);
  const std::uint64_t bytes = std::min(most, free / 8) / 1024 * 1024;
  if (bytes < kLeast) {
    return {0, "not measured: too little memory is free on " + device.name()};
  }
  try {
    return {MeasureRate(client, scratch, device, static_cast<std::int64_t>(bytes / sizeof(float))),
            absl::StrCat("read by the server's dot of two arrays of ", HumanBytes(bytes),
                         " in the same run")};
  } catch (const CommandError& error) {
    return {0, absl::StrCat("not measured: ", error.status.message())};
  }
}

// --- Output --------------------------------------------------------------------------------------

namespace {

double Share(const BenchReport& report, const BenchReport::Row& row) {
  return row.rate / report.ceiling.rate;
}

// Returns a power of ten that suits the report's rates, and the unit with the matching prefix.
std::pair<double, std::string> Prefix(const BenchReport& report) {
  double largest = report.ceiling.rate;
  for (const BenchReport::Row& row : report.rows) largest = std::max(largest, row.rate);
  if (report.unit == "B/s" || largest < 1e12) return {1e9, "G" + report.unit};
  return {1e12, "T" + report.unit};
}

std::string BarText(double part, std::size_t width, bool utf8) {
  const double columns = std::clamp(part, 0.0, 1.0) * static_cast<double>(width);
  if (!utf8) return std::string(static_cast<std::size_t>(std::lround(columns)), '#');
  constexpr std::array<const char*, 8> kEighths = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const auto eighths = static_cast<std::size_t>(std::lround(columns * 8));
  std::string bar;
  for (std::size_t i = 0; i < eighths / 8; ++i) bar += "█";
  return bar + kEighths[eighths % 8];
}

}  // namespace

Json ToJson(const BenchReport& report) {
  Json json;
  json["operation"] = report.operation;
  json["title"] = report.title;
  json["device"] = report.device;
  json["repeat"] = report.repeat;
  json["unit"] = report.unit;
  json["work"] = report.work;
  json["ceiling"] = report.ceiling.rate > 0
                        ? Json{{"rate", report.ceiling.rate}, {"source", report.ceiling.source}}
                        : Json();
  json["reference"] = report.reference;
  json["agree"] = CheckAgreement(report).ok();
  json["strategies"] = Json::array();
  for (const BenchReport::Row& row : report.rows) {
    Json& entry = json["strategies"].emplace_back();
    entry["name"] = row.strategy;
    entry["calls"] = row.kernel_us.size();
    entry["median_us"] = row.median_us;
    entry["min_us"] = row.kernel_us.empty() ? 0 : row.kernel_us.front();
    entry["max_us"] = row.kernel_us.empty() ? 0 : row.kernel_us.back();
    entry["rate"] = row.rate;
    entry["share"] = report.ceiling.rate > 0 ? Json(Share(report, row)) : Json();
    entry["roundoff"] = NumberJson(row.roundoff);
    entry["difference"] = NumberJson(static_cast<double>(row.difference));
    entry["agrees"] = row.agrees;
  }
  json["skipped"] = Json::array();
  for (const BenchReport::Skipped& skipped : report.skipped) {
    json["skipped"].push_back({{"name", skipped.strategy}, {"reason", skipped.reason}});
  }
  return json;
}

std::string ChartText(const BenchReport& report, std::size_t columns, bool utf8) {
  const auto [factor, unit] = Prefix(report);
  std::string text = absl::StrCat(
      Printable(report.title), " on ", Printable(report.device), "\nmedian device time of ",
      report.repeat, report.repeat == 1 ? " call" : " interleaved calls", "\nceiling: ");
  if (report.ceiling.rate > 0)
    absl::StrAppendFormat(&text, "%.1f %s, ", report.ceiling.rate / factor, unit);
  absl::StrAppend(&text, Printable(report.ceiling.source), "\n\n");
  // The numbers come first, so that the bars get the remaining width.
  Table table({"STRATEGY", ">TIME us", ">" + unit, ">CEILING"});
  double longest = 0;
  for (const BenchReport::Row& row : report.rows) {
    longest = std::max(longest, row.rate);
    table.Add({row.strategy, absl::StrFormat("%.1f", row.median_us),
               absl::StrFormat("%.2f", row.rate / factor),
               report.ceiling.rate > 0 ? absl::StrFormat("%.0f %%", 100 * Share(report, row))
                                       : std::string("-")});
  }
  std::stringstream figures;
  table.Print(figures);
  const std::vector<std::string> lines = absl::StrSplit(figures.str(), '\n', absl::SkipEmpty());
  std::size_t width = 0;
  for (const std::string& line : lines) width = std::max(width, line.size());
  constexpr std::size_t kLeastBar = 8;
  constexpr std::size_t kWidestBar = 72;
  const std::size_t left = columns > width + 2 ? columns - width - 2 : 0;
  const std::size_t bar = left < kLeastBar ? 0 : std::min(left, kWidestBar);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    absl::StrAppend(&text, lines[i]);
    if (i > 0 && bar > 0 && longest > 0) {
      absl::StrAppend(&text, std::string(width - lines[i].size() + 2, ' '),
                      BarText(report.rows[i - 1].rate / longest, bar, utf8));
    }
    text += '\n';
  }
  // Strategies that were skipped for the same reason share a line.
  std::map<std::string, std::vector<std::string>> reasons;
  for (const BenchReport::Skipped& skipped : report.skipped)
    reasons[skipped.reason].push_back(skipped.strategy);
  for (const auto& [reason, names] : reasons) {
    absl::StrAppend(&text, "\nnot run: ", Printable(reason), ": ",
                    Printable(absl::StrJoin(names, ", ")));
  }
  if (!reasons.empty()) text += '\n';
  if (report.rows.size() > 1 && CheckAgreement(report).ok()) {
    text += "\nAll results agree within the strategies' error bounds.\n";
  }
  return text;
}

}  // namespace tessera
