// A program of operations on one stream: what Execute does, without the call around it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/compute.h"
#include "kernels/run/product_top_k.h"
#include "server/buffers/buffer_store.h"
#include "server/compute/operands.h"
#include "server/compute/operations.h"
#include "server/core.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// Call Prepare, Plan, Run and Answer in this order, each once. An error in a step affects only that
// step and the steps that need its result; these functions return the errors of the whole program.
// For one thread at a time. The core, the caller's tenant and the request outlive it.
class ProgramRun {
 public:
  ProgramRun(Core& core, const Caller& caller, const v1::ExecuteRequest& request)
      : core_(core),
        store_(caller.tenant->store()),
        sees_all_(caller.sees_all()),
        request_(request) {}

  // Whether a step stores a buffer.
  bool Stores() const;

  // Finds all buffers at one point in time, and returns the device to run on.
  absl::StatusOr<Device*> Prepare();

  std::size_t steps() const { return steps_.size(); }
  // Whether a step asks for the device's clock.
  bool timed() const;
  // Returns the least time that the device needs for all steps together, in microseconds. It is
  // infinite if a step does more than run its default strategy on memory that the device reaches.
  // Called at most once, after Prepare.
  double LeastMicroseconds(const Device& device);

  // Checks every step, and allocates all device memory.
  absl::Status Plan(Stream& stream);
  // Runs what can run, and synchronises the stream.
  absl::Status Run(Stream& stream);

  // Bytes of host memory that the program needs in addition to its request.
  std::uint64_t memory() const;
  // Bytes of host memory that its inline results need in addition to that. REQUIRES: Plan is done.
  std::uint64_t answer_memory() const { return 3 * inline_bytes_; }
  // Releases the operands. chores: they free the memory, for a thread that must not; null: this
  // thread frees it.
  void Release(Chores* chores);

  // Gives buffers their names, and fills in the response.
  absl::Status Answer(Stream& stream, v1::ExecuteResponse& response);

 private:
  // The place of an array, or of a scalar that a later step uses: in the program's block at
  // `offset` or, with a draft, in the buffer's memory.
  struct Place {
    void* memory = nullptr;
    std::uint64_t offset = 0;
    std::unique_ptr<ResultDraft> draft;
  };
  // The places given out so far. Inline results are at the beginning of the block, inline operands
  // at its end, and everything else is between them.
  struct Layout {
    std::uint64_t in_answer = 0;   // bytes of the response
    std::uint64_t inline_end = 0;  // of the block
    std::uint64_t total = 0;       // of the block
    int inline_arrays = 0;
  };
  struct Step {
    Operation operation;
    std::uint32_t index = 0;
    absl::Status status;
    Sources sources;
    Views views;
    ResultType result;
    // How many operands of later steps are its results.
    std::uint32_t readers = 0;
    // Whether it may share a launch with its neighbours.
    bool batched = false;
    // The place of each of its arrays.
    std::array<Place, kMostResults> places;
    // After the check, the stats are those of its strategy by itself.
    ScalarResult outcome;
    // For a product that selects: the TopK runs in place of all of its steps, and the others have
    // no result.
    const ProductTopKStrategy* selection = nullptr;
    // For that TopK: the Matmul, and the Map or, if there is none, the Matmul again.
    const Step* matmul = nullptr;
    const Step* scores = nullptr;

    bool IsFolded() const { return selection != nullptr && matmul == nullptr; }
  };

  absl::Status CollectSources(Step& step, const v1::Step& message);
  // Finds the types of all operands and results.
  absl::Status FindTypes(Step& step);
  // Makes all other checks that need no memory.
  absl::Status Check(Step& step, Stream& stream);
  // Finds products that select among the checked steps.
  void FindSelections(const Device& device);
  void FindSelection(Step& top_k, const Device& device);
  // Returns the step whose whole result the operand is. Returns null if anything else sees that
  // result, or if the request says how the step computes it.
  Step* FoldableAt(const OperandSource& source);
  static ProductTopK SelectionOf(const Step& top_k, const Step& matmul, const Step& scores);
  // Makes views of its operands at their addresses, as far as those are known.
  void MakeViews(Step& step, const Device& device);
  // Fails the step if one that it needs has failed.
  void Inherit(Step& step) const;

  // Opens the buffers of results. Takes one block for everything else, which includes inline
  // operands and operands on other devices, and the scratch memory that steps take one after
  // another. All of it is taken in advance: if other calls leave too little, the program fails
  // before its first step and can be sent again.
  absl::Status TakeMemory(Stream& stream);
  // Returns the most scratch memory that a step takes in addition to `beside` bytes. A step for
  // which the limit leaves too little does not count; it will fail by itself.
  std::uint64_t MostScratch(std::uint64_t beside, const Stream& stream) const;
  // Gives the step's results their places.
  absl::Status PlaceResults(Step& step, Layout& layout, Device& device);
  absl::Status OpenDraft(const v1::BufferTarget& target, const ArrayType& type, Device& device,
                         Place& place);
  // Copies inline operands to the block from `begin` on, one after another in the order of the
  // request.
  absl::Status SendTensors(Stream& stream, std::uint64_t begin);
  // Copies buffers of other devices, each once, and fails the steps whose buffers cannot be copied.
  void FetchBuffers(Stream& stream);

  absl::Status RunSteps(Stream& stream, PreparedOperands::Call& prepared);
  absl::Status RunStep(Step& step, Stream& stream);
  // Whether the next step shares a launch with the steps from `first` to the one before it.
  bool Joins(std::size_t first, std::size_t next, const Device& device);
  absl::Status RunBatch(std::size_t first, std::size_t end, Stream& stream);
  // Stores a scalar where later steps read it.
  absl::Status StoreScalar(const Step& step, Stream& stream);

  // arrays: the inline results as they lie in the block.
  absl::Status AnswerStep(Step& step, const std::string& arrays, const Device& device,
                          v1::StepResult& result);

  Core& core_;
  BufferStore& store_;
  const bool sees_all_;
  const v1::ExecuteRequest& request_;
  std::vector<Step> steps_;
  bool typed_ = false;  // whether the types of all steps have been found
  double expected_seconds_ = 0;
  // The block; inline results are at its beginning.
  char* block_ = nullptr;
  std::uint64_t inline_bytes_ = 0;
};

}  // namespace tessera
