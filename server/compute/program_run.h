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

// Call Prepare, Plan, Run and Answer in this order, each once. A step that fails keeps its Status
// to itself and to those that need its result; what concerns the whole program is the Status of
// these functions. One thread at a time. Core, the caller's tenant and request outlive it.
class ProgramRun {
 public:
  ProgramRun(Core& core, const Caller& caller, const v1::ExecuteRequest& request)
      : core_(core),
        store_(caller.tenant->store()),
        sees_all_(caller.sees_all()),
        request_(request) {}

  // Whether a step leaves a buffer behind.
  bool Stores() const;

  // Finds all buffers, as they are at one moment: the device to run on.
  absl::StatusOr<Device*> Prepare();

  std::size_t steps() const { return steps_.size(); }
  // Whether a step asks for the device's clock.
  bool timed() const;
  // After Prepare, at most once. The least that the device needs for all steps together, as
  // LeastMicroseconds of one; infinite where a step does more than run its default strategy on what
  // the device reaches.
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

  // Gives buffers their names, and fills in everything.
  absl::Status Answer(Stream& stream, v1::ExecuteResponse& response);

 private:
  // Where an array is, or a scalar that is used: in the program's block at `offset` or, with a
  // draft, in the buffer's memory.
  struct Place {
    void* memory = nullptr;
    std::uint64_t offset = 0;
    std::unique_ptr<ResultDraft> draft;
  };
  // What has a place so far. Inline results lie at the begin of the block, inline operands at its
  // end, all else between them.
  struct Layout {
    std::uint64_t in_answer = 0;   // bytes of the answer
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
    // Operands of later steps that are its results.
    std::uint32_t readers = 0;
    // Whether it may share a launch with its neighbours.
    bool batched = false;
    // Of each of its arrays.
    std::array<Place, kMostResults> places;
    // Once it has been checked, the stats are those of its strategy by itself.
    ScalarResult outcome;
    // Of a product that selects: the TopK is run in place of all its steps, and the others have no
    // result.
    const ProductTopKStrategy* selection = nullptr;
    // Of the TopK among them: Matmul, and Map or, if there is none, Matmul again.
    const Step* matmul = nullptr;
    const Step* scores = nullptr;

    bool IsFolded() const { return selection != nullptr && matmul == nullptr; }
  };

  absl::Status CollectSources(Step& step, const v1::Step& message);
  // The types of all operands and results.
  absl::Status FindTypes(Step& step);
  // All else that can be checked before there is memory.
  absl::Status Check(Step& step, Stream& stream);
  // Finds products that select among the checked steps.
  void FindSelections(const Device& device);
  void FindSelection(Step& top_k, const Device& device);
  // The step whose result the operand is, all of it, if nobody else ever sees that, and if how the
  // step comes to it is left to the server.
  Step* FoldableAt(const OperandSource& source);
  static ProductTopK SelectionOf(const Step& top_k, const Step& matmul, const Step& scores);
  // Its operands at their addresses, as far as those are known.
  void MakeViews(Step& step, const Device& device);
  // Fails the step if one that it needs has failed.
  void Inherit(Step& step) const;

  // Opens the buffers of results; one block for all else, and in it inline operands and those of
  // other devices; and room for what steps take of scratch memory as they run, one after the other.
  // All at once: where other calls leave too little, the program fails before its first step and
  // can be sent again.
  absl::Status TakeMemory(Stream& stream);
  // What the step that needs most scratch memory takes, beside so many bytes; a step for which the
  // limit leaves no room beside these does not count, and will fail by itself.
  std::uint64_t MostScratch(std::uint64_t beside, const Stream& stream) const;
  // Where the step's results go.
  absl::Status PlaceResults(Step& step, Layout& layout, Device& device);
  absl::Status OpenDraft(const v1::BufferTarget& target, const ArrayType& type, Device& device,
                         Place& place);
  // Inline operands, which lie one behind the other from `begin` of the block on, as they stand in
  // the request.
  absl::Status SendTensors(Stream& stream, std::uint64_t begin);
  // Copies buffers of other devices, each once, and fails the steps whose buffers do not come.
  void FetchBuffers(Stream& stream);

  absl::Status RunSteps(Stream& stream, PreparedOperands::Call& prepared);
  absl::Status RunStep(Step& step, Stream& stream);
  // Whether the next step shares a launch with those from the first to the one before it.
  bool Joins(std::size_t first, std::size_t next, const Device& device);
  absl::Status RunBatch(std::size_t first, std::size_t end, Stream& stream);
  // Leaves a scalar where later steps see it.
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
  // Of the block: inline results lie at its begin.
  char* block_ = nullptr;
  std::uint64_t inline_bytes_ = 0;
};

}  // namespace tessera
