// Compares the strategies of one operation on operands that a server holds. Reports each strategy's
// device time, its rate, the rate's share of the device's ceiling, and whether the results agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/output.h"
#include "client/client.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// The elements of a large array that are compared: offset, offset + step, ..., up to the last
// element.
struct BenchSample {
  std::uint64_t offset = 0;
  std::uint64_t step = 1;
  std::uint64_t count = 0;
};
inline constexpr std::uint64_t kBenchSample = std::uint64_t{1} << 20;
// Selects all elements if there are at most kBenchSample, and otherwise at most that many.
BenchSample SampleOf(std::uint64_t elements);

// The elements of a result that SampleOf selects, in row-major order. The type can hold every
// double and every 64-bit integer.
using BenchValues = std::vector<long double>;

struct BenchAnswer {
  v1::ExecutionStats stats;
  BenchValues values;              // empty unless they were requested
  std::uint64_t result_bytes = 0;  // the size of an array result
  DType dtype = DType::kF64;       // the type to which the values are rounded
};

// Returns the scale of the rounding error of `value`, which is at index i of BenchValues. The error
// is at most roundoff * scale (see ExecutionStats). A scale of 0 means that the value is exact.
using BenchScale = std::function<long double(std::size_t i, long double value)>;

struct BenchProblem {
  std::string title;                    // the report's title: "reduce sum of x, f32 [1000]"
  std::string operation;                // its name in ListStrategies
  std::vector<std::string> strategies;  // the strategies to time, in the report's order
  std::uint64_t operand_bytes = 0;      // each operand counts once
  double operations = 0;                // if above 0, the rate counts operations, not bytes
  std::string unit = "B/s";             // the unit of the rate
  int repeat = 20;                      // timed calls per strategy
  // Calls the operation once, with timing. `strategy` may be any name.
  std::function<absl::StatusOr<BenchAnswer>(const std::string& strategy, bool with_values)> run;
  // Returns the scale. It is called once, if there are results to compare.
  std::function<absl::StatusOr<BenchScale>()> scale;
};

// The rate that counts as 100 %.
struct BenchCeiling {
  double rate = 0;     // bytes or operations per second; 0 if unknown
  std::string source;  // how the rate was measured, or why it was not
};

struct BenchReport {
  struct Row {
    std::string strategy;
    std::vector<double> kernel_us;  // one value per call, sorted
    double median_us = 0;
    double rate = 0;  // bytes or operations per second
    double roundoff = 0;
    long double difference = 0;  // the largest difference from the reference's values
    bool agrees = true;
  };
  struct Skipped {
    std::string strategy;
    std::string reason;
  };

  std::string title;
  std::string operation;
  std::string device;
  std::string unit;  // the unit of rates
  double work = 0;   // the bytes or operations of one call
  int repeat = 0;
  BenchCeiling ceiling;
  std::string reference;  // the strategy with which the others are compared
  std::vector<Row> rows;
  std::vector<Skipped> skipped;
};

// Calls every strategy once to warm it up and to get its result, then times the strategies with
// interleaved calls. A strategy is skipped if the server refuses it as unsupported or refuses its
// launch parameters, or if its call takes too long. Any other error ends the run. If no strategy is
// left, the run ends with the first refusal. A strategy is not called again once it has had three
// timed calls and used kBenchPatience of device time.
absl::StatusOr<BenchReport> RunBench(const BenchProblem& problem);
inline constexpr absl::Duration kBenchPatience = absl::Seconds(5);

// Returns RESULTS_DISAGREE if a strategy and the reference differ by more than their bounds allow.
absl::Status CheckAgreement(const BenchReport& report);

// The buffers of one run, which are deleted when the run ends.
class BenchScratch {
 public:
  // The buffers expire after TemporaryTtl(limits), in case this process ends before it deletes
  // them.
  BenchScratch(Client& client, const v1::Limits& limits);
  ~BenchScratch();
  BenchScratch(const BenchScratch&) = delete;
  BenchScratch& operator=(const BenchScratch&) = delete;

  // Returns a target that the run owns. A name always means the same buffer, which each result
  // replaces.
  ResultBuffer Target(std::string_view name);
  // Returns the elements of a result that SampleOf selects.
  absl::StatusOr<BenchValues> Fetch(const v1::Buffer& buffer);

 private:
  Client& client_;
  const std::string prefix_;
  const absl::Duration ttl_;
  std::vector<std::string> names_;
};

BenchValues ToValues(const v1::Scalar& value);
BenchValues ToValues(DType dtype, std::string_view elements);

// Returns the rate at which the server's Dot reads arrays too large for the device's caches. The
// server makes them from a single element, so none of their bytes are sent.
BenchCeiling MeasureBandwidth(Client& client, BenchScratch& scratch, const v1::Device& device);

Json ToJson(const BenchReport& report);
// Returns a chart with one bar per strategy, at most `columns` columns wide. If `utf8` is set, the
// bars have a resolution of an eighth of a column. Otherwise, they consist of '#'.
std::string ChartText(const BenchReport& report, std::size_t columns, bool utf8);

}  // namespace tessera
