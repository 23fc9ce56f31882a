// Runs the program of a call of Execute.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/program/program.h"
#include "server/access/access.h"
#include "server/buffers/buffer_store.h"
#include "server/compute/operands.h"
#include "server/compute/operations.h"
#include "server/devices/chores.h"
#include "server/devices/devices.h"
#include "server/observe/metrics.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// Prepare, Plan, Run and Answer must be called in this order, each once. An error in a step affects
// only that step and the steps that need its result; these functions return the errors that affect
// the whole program. Not thread safe. The devices, the metrics, the caller's tenant and the
// request must outlive this object.
class ProgramRun {
 public:
  ProgramRun(const Devices& devices, Metrics& metrics, const Caller& caller,
             const v1::ExecuteRequest& request)
      : devices_(devices),
        metrics_(metrics),
        store_(caller.tenant->store()),
        sees_all_(caller.sees_all()),
        request_(request) {}

  // Returns the host memory that the program needs in addition to its request, in bytes.
  std::uint64_t memory() const;
  // Reads the request, finds all buffers at one point in time, and returns the device to run on.
  // The buffers' bytes may be used once everything in `awaited` has arrived.
  absl::StatusOr<Device*> Prepare(Awaited& awaited);

  std::size_t steps() const { return steps_.size(); }
  // Whether a step stores a buffer.
  bool Stores() const;
  // Whether a step requests timing by the device's clock.
  bool timed() const;
  // Returns the minimum time that the device needs for all steps together, in microseconds. It is
  // infinite if a step names a strategy, or has an operand that is neither inline nor entirely in
  // the device's memory.
  double LeastMicroseconds(const Device& device);

  // Checks every step, and allocates all device memory except the buffers of a Select.
  absl::Status Plan(Stream& stream);
  // Returns the host memory that the response needs in addition to memory(), in bytes.
  std::uint64_t answer_memory() const;
  // Runs all steps that can run, and synchronises the stream.
  absl::Status Run(Stream& stream);
  // Gives buffers their names, and fills in the response.
  absl::Status Answer(Stream& stream, v1::ExecuteResponse& response);
  // Releases the operands. Their memory is freed by a thread of `chores`, or by the calling thread
  // if `chores` is null.
  void Release(Chores* chores);

 private:
  // The operands and results that the server holds for a step of the program.
  struct Step {
    Sources sources;
    Destinations destinations;
    std::array<std::unique_ptr<ResultDraft>, kMostResults> drafts;  // for results in buffers
  };

  // Converts a step, except for its buffers.
  absl::Status Read(const v1::Step& message, std::uint32_t index);
  absl::Status Read(const Named& named, std::uint32_t index, PlannedOperand& operand,
                    ArrayType& type);
  void FindBuffers(Awaited& awaited);
  void FindTypesOnce();

  // Opens the buffers of results. Allocates one block for everything else, and the scratch memory
  // that the steps use one after another. All memory except the buffers of a Select is allocated in
  // advance: if other calls leave too little, the program fails before its first step and can be
  // sent again.
  absl::Status TakeMemory(Stream& stream);
  // Opens the buffers of a step's results, or only checks them if the results are not counted yet.
  // Adds the size of its inline results to *in_answer.
  absl::Status OpenResults(std::size_t index, Device& device, std::uint64_t* in_answer);
  // Counts the results of a step whose length depends on its operands, and opens their buffers.
  absl::Status CountStep(std::size_t index, Stream& stream);
  // Copies inline operands to the block, in the order of the request.
  absl::Status SendTensors(Stream& stream);
  // Copies each buffer on another device once, and fails the steps whose buffers cannot be copied.
  void FetchBuffers(Stream& stream);

  // `arrays` is the part of the block that holds the inline results.
  absl::Status AnswerStep(std::size_t index, const std::string& arrays, const Device& device,
                          v1::StepResult& result);
  // Writes the errors of the steps. Once the response would become too large for clients, further
  // errors are shortened.
  void AnswerErrors(v1::ExecuteResponse& response);

  const Devices& devices_;
  Metrics& metrics_;
  BufferStore& store_;
  const bool sees_all_;
  const v1::ExecuteRequest& request_;
  std::vector<Step> steps_;
  ProgramPlan program_;
  bool typed_ = false;
  BlockLayout layout_;
};

}  // namespace tessera
