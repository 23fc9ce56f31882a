// A program of operations, planned and run on one stream. Call the passes in the order of their
// declarations. An error in a step is the status of that step, and affects only the steps that need
// its result. Only one thread at a time may use a program.
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

// A window of an array, in elements: the arguments of MakeView.
struct Window {
  std::int64_t offset = 0;
  absl::Span<const std::int64_t> shape;
  absl::Span<const std::int64_t> strides;
};

struct PlannedOperand {
  enum class Kind : std::uint8_t {
    kResult,     // a result of an earlier step
    kResident,   // an array that the device can access
    kElsewhere,  // an array that is copied from another device into the program's block
    kInline,     // an array that is copied from the host into the program's block
  };
  Kind kind = Kind::kResult;
  std::string_view name;         // used in error messages
  std::uint32_t step = 0;        // of kResult
  std::uint32_t output = 0;      // for kResult: which of the step's arrays
  std::optional<Window> window;  // none: the whole array
  // The type of the whole array. For kResult, FindTypes sets it.
  ArrayType type;
  // For kResident, the array's address; for kElsewhere, an address that identifies the array.
  const void* array = nullptr;
  bool sharded = false;      // across several devices
  std::uint64_t offset = 0;  // in the program's block; set by LayOut
  View view;                 // relative to the array's beginning; set by FindTypes
};

// Where an array that a step computes is stored. kNone means that the step does not compute it.
enum class Destination : std::uint8_t { kResponse, kScratch, kBuffer, kNone };

struct PlannedStep {
  // Set before the first pass. If the options set no strategy, launch or timing, the operation may
  // be computed in any way that gives the same bits.
  OperationSpec spec;
  RunOptions options;
  absl::InlinedVector<PlannedOperand, 2> operands;
  absl::InlinedVector<Destination, kMostResults> destinations;  // none for a number

  absl::Status status;
  ResultType result;                   // set by FindTypes
  absl::InlinedVector<View, 2> views;  // set by FindTypes, and with addresses by MakeViews
  std::uint32_t readers = 0;  // the number of operands of later steps that are results of this step
  bool batched = false;       // may share a launch with adjacent steps
  std::array<std::uint64_t, kMostResults> offsets{};  // in the block; set by LayOut
  // Where each result is stored. Set before RunSteps for kBuffer, and by PlaceResults otherwise.
  std::array<void*, kMostResults> memory{};
  // Unless the step is batched, CheckSteps fills in outcome.stats for the chosen strategy, as if
  // the step ran alone. RunSteps replaces the whole outcome of a step that it runs.
  ScalarResult outcome;

  // Set by FuseSelections on a TopK that also computes the steps before it: the strategy that
  // computes the product, the scores and the TopK together.
  const ProductTopKStrategy* selection = nullptr;
  // If `selection` is set: the indices of the steps that are the product and the scores. Without a
  // Map, they are the same step.
  std::uint32_t product = 0;
  std::uint32_t scores = 0;
  bool folded = false;  // computed by a later step, and has no results

  // Whether the options leave it to the server how to compute the result.
  bool IsPlain() const;
};

struct ProgramPlan {
  std::vector<PlannedStep> steps;
  char* block = nullptr;  // the memory of everything that LayOut places
};

// Fails the step with FAILED_PRECONDITION / STEP_FAILED {failed_step} if a step that it needs has
// failed.
void InheritFailure(const ProgramPlan& program, PlannedStep& step);

// Pass 1. Finds the types of all operands and results, and counts readers.
void FindTypes(ProgramPlan& program);

// Pass 2. Does all other checks that need no memory, and finds which steps may be batched. The
// stream then expects the seconds of all steps together.
// FAILED_PRECONDITION / OPERATION_TOO_LONG {estimate_seconds, limit_seconds} if the steps together
// are expected to take longer than max_seconds.
absl::Status CheckSteps(ProgramPlan& program, Stream& stream, double max_seconds);

// Pass 3. Finds each Matmul, Map and TopK in sequence that one kernel computes faster
// (kernels/problem/product_top_k.h).
void FuseSelections(ProgramPlan& program, const Device& device);

// Everything in the block begins at a multiple of this number of bytes.
inline constexpr std::uint64_t kBlockAlignment = 256;
// The number of bytes reserved for a scalar, and the offset in them of the unrounded value.
inline constexpr std::uint64_t kScalarBytes = 2 * kBlockAlignment;
inline constexpr std::uint64_t kUnrounded = kBlockAlignment;

// The block of a program, in bytes from its beginning: arrays of the response, then scratch arrays,
// scalars and copies from other devices, then inline operands.
struct BlockLayout {
  std::uint64_t response_end = 0;
  std::uint64_t inline_begin = 0;
  std::uint64_t end = 0;
  int response_arrays = 0;
};
// Pass 4. Places everything in the block. Copies of the same array are stored once.
BlockLayout LayOut(ProgramPlan& program);
// Returns the largest amount of scratch memory that a step needs. `taken` is the number of bytes of
// the stream's budget that are already taken. A step that would exceed the budget's limit does not
// count, because it will fail anyway.
std::uint64_t MostScratch(const ProgramPlan& program, std::uint64_t taken, const Stream& stream);
// Sets the addresses of results in program.block.
void PlaceResults(ProgramPlan& program);

// Pass 5. Runs the steps that can run, and stores scalars where later steps read them. `run` calls
// RunStep for a step that is not part of a batch. Returns an error if no later step can succeed.
// Does not synchronise the stream.
using StepRunner = absl::FunctionRef<absl::StatusOr<ScalarResult>(PlannedStep& step)>;
absl::Status RunSteps(ProgramPlan& program, Stream& stream, StepRunner run);
absl::StatusOr<ScalarResult> RunStep(const ProgramPlan& program, const PlannedStep& step,
                                     Stream& stream, const RunOptions& options);

// Sets the views of a step's operands. While an array has no address yet, its view has an offset.
void MakeViews(const ProgramPlan& program, PlannedStep& step);
// Returns the steps of a fused TopK as one request.
ProductTopK SelectionOf(const ProgramPlan& program, const PlannedStep& top_k);

}  // namespace tessera
