// A program of operations, planned and run on one stream. Call the passes in the order of their
// declarations. An error in a step is the status of that step, and affects only the steps that need
// its result. For one thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/compute.h"
#include "kernels/run/operation.h"
#include "kernels/run/product_top_k.h"

namespace tessera {

// A window of an array, in elements, as MakeView takes it.
struct Window {
  std::int64_t offset = 0;
  absl::Span<const std::int64_t> shape;
  absl::Span<const std::int64_t> strides;
};

struct ProgramOperand {
  enum class Kind : std::uint8_t {
    kResult,     // a result of an earlier step
    kResident,   // an array that the device reaches
    kElsewhere,  // an array that is copied from another device into the program's block
    kInline,     // an array that is copied from the host into the program's block
  };
  Kind kind = Kind::kResult;
  std::string_view name;         // in errors
  std::uint32_t step = 0;        // of kResult
  std::uint32_t output = 0;      // of kResult: which of the step's arrays
  std::optional<Window> window;  // none: the whole array
  // The whole array, for kResult from FindTypes on.
  ArrayType type;
  // Of kResident: the address. Of kElsewhere: an address that tells arrays apart.
  const void* array = nullptr;
  bool sharded = false;      // over several devices
  std::uint64_t offset = 0;  // in the program's block, from LayOut on
  View view;                 // as if the array began at address 0, from FindTypes on
};

// Where an array goes that a step computes.
enum class Destination : std::uint8_t { kResponse, kScratch, kBuffer };

struct ProgramStep {
  // Set before the first pass. An operation without a strategy, a launch and timing in its options
  // may be computed in any way that gives the same bits.
  OperationSpec spec;
  RunOptions options;
  absl::InlinedVector<ProgramOperand, 2> operands;
  absl::InlinedVector<Destination, kMostResults> destinations;  // none for a number

  absl::Status status;
  ResultType result;                   // from FindTypes on
  absl::InlinedVector<View, 2> views;  // from FindTypes on; their addresses as far as known
  std::uint32_t readers = 0;           // operands of later steps that are its results
  bool batched = false;                // may share a launch with its neighbours
  std::array<std::uint64_t, kMostResults> offsets{};  // in the block, from LayOut on
  // The memory of each result: for kBuffer set before RunSteps, for the others by PlaceResults.
  std::array<void*, kMostResults> memory{};
  // From CheckSteps on the stats of its strategy by itself; from RunSteps on the outcome.
  ScalarResult outcome;

  // Set by FuseSelections: the TopK of a product that selects runs in place of all its steps.
  const ProductTopKStrategy* selection = nullptr;
  // Of that TopK: the steps of the product and of the scores; without a Map both are the same.
  std::uint32_t product = 0;
  std::uint32_t scores = 0;
  bool folded = false;  // computed by a later step; it has no results

  // Whether the options leave it to the server how to compute the result.
  bool IsPlain() const;
};

struct Program {
  std::vector<ProgramStep> steps;
  char* block = nullptr;  // the memory of everything that LayOut places
};

// Fails the step with FAILED_PRECONDITION / STEP_FAILED {failed_step} if a step that it needs has
// failed.
void InheritFailure(const Program& program, ProgramStep& step);

// Pass 1. Finds the types of all operands and results, and counts readers.
void FindTypes(Program& program);

// Pass 2. Makes all other checks that need no memory, and finds which steps may be batched.
// FAILED_PRECONDITION / OPERATION_TOO_LONG {estimate_seconds, limit_seconds} if the steps together
// are expected to take longer than max_seconds.
absl::Status CheckSteps(Program& program, Stream& stream, double max_seconds);

// Pass 3. Finds a Matmul, a Map and a TopK of its result that one kernel computes faster
// (kernels/problem/product_top_k.h).
void FuseSelections(Program& program, const Device& device);

// The block of a program, in bytes from its beginning: arrays of the response, then scratch arrays,
// scalars and copies from other devices, then inline operands.
struct BlockLayout {
  std::uint64_t response_end = 0;
  std::uint64_t inline_begin = 0;
  std::uint64_t end = 0;
  int response_arrays = 0;
};
// Pass 4. Places everything in the block. Copies of one array share a place.
BlockLayout LayOut(Program& program);
// Returns the most scratch memory that a step takes in addition to `beside` bytes of the stream's
// budget. A step for which the limit leaves too little does not count; it will fail by itself.
std::uint64_t MostScratch(const Program& program, std::uint64_t beside, const Stream& stream);
// Sets the addresses of results in program.block.
void PlaceResults(Program& program);

// Pass 5. Runs the steps that can run, and stores scalars where later steps read them. `run` runs a
// step that is not part of a batch, by RunStep. Returns an error if no later step can succeed. Does
// not synchronise the stream.
using StepRunner = absl::FunctionRef<absl::StatusOr<ScalarResult>(ProgramStep& step)>;
absl::Status RunSteps(Program& program, Stream& stream, StepRunner run);
absl::StatusOr<ScalarResult> RunStep(const Program& program, const ProgramStep& step,
                                     Stream& stream, const RunOptions& options);

// Makes the views of a step's operands at their addresses, as far as those are known.
void MakeViews(const Program& program, ProgramStep& step);
// The steps of a fused TopK as one request.
ProductTopK SelectionOf(const Program& program, const ProgramStep& top_k);

}  // namespace tessera
