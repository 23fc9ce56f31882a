// Compares the strategies of one operation on operands that a server holds: device time of each,
// the rate that makes, its share of what the device can do, and whether the answers agree.
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

// Which elements of a large array are compared: offset, offset + step, ... to the last one.
struct BenchSample {
  std::uint64_t offset = 0;
  std::uint64_t step = 1;
  std::uint64_t count = 0;
};
inline constexpr std::uint64_t kBenchSample = std::uint64_t{1} << 20;
// All of them up to kBenchSample, else at most so many.
BenchSample SampleOf(std::uint64_t elements);

// Of a result, the elements of SampleOf in row-major order. Wide enough for every double and every
// 64-bit integer.
using BenchValues = std::vector<long double>;

struct BenchAnswer {
  v1::ExecutionStats stats;
  BenchValues values;              // when they were asked for
  std::uint64_t result_bytes = 0;  // of an array result
  DType dtype = DType::kF64;       // that the values are rounded to
};

// The scale of the rounding error of the value at index i of BenchValues: error <= roundoff *
// scale, see ExecutionStats. 0: the value is exact.
using BenchScale = std::function<long double(std::size_t i, long double value)>;

struct BenchProblem {
  std::string title;                    // of the report: "reduce sum of x, f32 [1000]"
  std::string operation;                // as ListStrategies spells it
  std::vector<std::string> strategies;  // to be timed, in the order of the report
  std::uint64_t operand_bytes = 0;      // each operand once
  double operations = 0;                // > 0: the rate counts arithmetic, else bytes of memory
  std::string unit = "B/s";             // of the rate
  int repeat = 20;                      // timed calls of a strategy
  // Calls the operation once, with timing. May be called with any name.
  std::function<absl::StatusOr<BenchAnswer>(const std::string& strategy, bool with_values)> run;
  // Asked for once, when there are answers to compare.
  std::function<absl::StatusOr<BenchScale>()> scale;
};

// What a share of 100 % means.
struct BenchCeiling {
  double rate = 0;     // bytes or operations a second; 0: not known
  std::string source;  // how it was found, or why not
};

struct BenchReport {
  struct Row {
    std::string strategy;
    std::vector<double> kernel_us;  // one per call, sorted
    double median_us = 0;
    double rate = 0;  // bytes or operations a second
    double roundoff = 0;
    long double difference = 0;  // the largest from the reference's value
    bool agrees = true;
  };
  struct Skipped {
    std::string strategy;
    std::string reason;
  };

  std::string title;
  std::string operation;
  std::string device;
  std::string unit;  // of rates
  double work = 0;   // of one call, in that unit times seconds
  int repeat = 0;
  BenchCeiling ceiling;
  std::string reference;  // the strategy that the others are compared with
  std::vector<Row> rows;
  std::vector<Skipped> skipped;
};

// Calls every strategy once to warm it up and to have its answer, then times them in turn. What the
// server refuses as unsupported, with the launch given, or for taking too long is skipped; any
// other error ends the run, and so does a run without a strategy, with the first refusal. A
// strategy that has been called three times and has used kBenchPatience of device time is not
// called again.
absl::StatusOr<BenchReport> RunBench(const BenchProblem& problem);
inline constexpr absl::Duration kBenchPatience = absl::Seconds(5);

// RESULTS_DISAGREE when some strategy differs from the reference by more than both bounds allow.
absl::Status CheckAgreement(const BenchReport& report);

// Buffers of one run, deleted when it ends.
class BenchScratch {
 public:
  // They expire after TemporaryTtl(limits), should this process end before it deletes them.
  BenchScratch(Client& client, const v1::Limits& limits);
  ~BenchScratch();
  BenchScratch(const BenchScratch&) = delete;
  BenchScratch& operator=(const BenchScratch&) = delete;

  // A target that the run owns; the same one for the same name, replaced by each result.
  ResultBuffer Target(std::string_view name);
  // The elements of such a buffer.
  absl::StatusOr<BenchValues> Fetch(const v1::Buffer& buffer);

 private:
  Client& client_;
  const std::string prefix_;
  const absl::Duration ttl_;
  std::vector<std::string> names_;
};

BenchValues ToValues(const v1::Scalar& value);

// The rate at which the server's own Dot reads arrays too large for the device's caches. They are
// made on the server from a single element; none of their bytes travel.
BenchCeiling MeasureBandwidth(Client& client, BenchScratch& scratch, const v1::Device& device);

Json ToJson(const BenchReport& report);
// A bar per strategy, at most so many columns wide. Blocks of an eighth of a column with utf8, else
// '#'.
std::string ChartText(const BenchReport& report, std::size_t columns, bool utf8);

}  // namespace tessera
