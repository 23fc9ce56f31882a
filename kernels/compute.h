// The main header of kernels/ for the rest of the project. Its functions open devices, allocate
// memory on them and run operations.
//
// Nothing here throws. Errors are absl::Status with a reason and metadata (error.h). Functions on
// devices and memory are thread safe. A function that takes a Stream needs exclusive use of it
// during the call, and leaves it synchronised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/error.h"
#include "kernels/device/device.h"
#include "kernels/expression/expression.h"
#include "kernels/problem/strategy.h"

namespace tessera {

class Pace;  // kernels/choose/pace.h

// --- Devices ------------------------------------------------------------------------------------

// Returns the names that OpenDevice accepts on this machine: "cuda:0", "cuda:1", ..., then "cpu".
// It never fails: without a driver, a GPU or a CUDA build it returns only "cpu".
std::vector<std::string> VisibleDevices();

// `name` is "cpu", "cuda" (the first GPU), "cuda:N", "auto" (the first GPU, or else the CPU), or
// "cpu:N" for any N (CPU devices that simulate several GPUs). INVALID_ARGUMENT / BAD_DEVICE for a
// malformed name; FAILED_PRECONDITION / DEVICE_UNAVAILABLE, with the cause, for any other failure.
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(std::string_view name);

absl::StatusOr<std::unique_ptr<Stream>> MakeStream(Device& device);
// Call Device::KeepRoom and Device::MakeLargeStream, and return errors as a Status.
absl::Status KeepRoom(Device& device);
absl::StatusOr<std::unique_ptr<Stream>> MakeLargeStream(Device& device);

// Divides an array of `bytes` bytes evenly among the devices, in their order. Returns at least one
// shard; shards begin at multiples of the first device's shard_unit. A device that would get no
// bytes gets no shard. REQUIRES: devices is not empty.
std::vector<Shard> MakeShards(absl::Span<Device* const> devices, std::uint64_t bytes);
// Returns how many bytes of its device's memory a shard needs. `count` is the array's number of
// shards.
std::uint64_t AllocationBytes(const Shard& shard, std::size_t count);

// Owned device memory. Movable. The destructor frees it, so no work that uses it may be in flight
// at that point.
class Memory {
 public:
  Memory() = default;
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();

  void* data() const { return data_; }  // null when size() is 0
  std::size_t size() const { return size_; }

 private:
  friend absl::StatusOr<Memory> Allocate(Device& device, std::size_t bytes);
  friend absl::StatusOr<Memory> Allocate(absl::Span<const Shard> shards);
  Memory(Device* device, void* data, std::size_t size)
      : device_(device), data_(data), size_(size) {}
  Memory(std::unique_ptr<ShardedMemory> sharded, std::size_t size)
      : sharded_(std::move(sharded)), data_(sharded_->data()), size_(size) {}
  Device* device_ = nullptr;                // for memory on one device
  std::unique_ptr<ShardedMemory> sharded_;  // for memory on several devices
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// Errors: RESOURCE_EXHAUSTED / GPU_MEMORY_EXHAUSTED or, on the CPU, HOST_MEMORY_EXHAUSTED
// {requested, free, total}.
absl::StatusOr<Memory> Allocate(Device& device, std::size_t bytes);
// `shards` is the result of MakeShards. The call may also fail with FAILED_PRECONDITION /
// PLACEMENT_UNSUPPORTED {device, cause} if the devices cannot reach each other's memory.
absl::StatusOr<Memory> Allocate(absl::Span<const Shard> shards);

// Allocates host memory that the device's copies reach directly. The memory may outlive the device.
// Allocating and freeing it may wait for the device's work. REQUIRES: bytes > 0. RESOURCE_EXHAUSTED
// / HOST_MEMORY_EXHAUSTED.
absl::StatusOr<StagingMemory> MakeStaging(Device& device, std::size_t bytes);
// Calls Device::RegisterHost. RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED.
absl::StatusOr<HostRegistration> RegisterHost(Device& device, void* memory, std::size_t bytes);

// Returns how many threads run the host loops of a thread that drives streams of the device,
// including that thread.
int LoopThreads(const Device& device);
// Prepares the calling thread to drive streams of the device. If shares_loops is set, its host
// loops run on LoopThreads(device) threads from then on; these threads are created immediately and
// belong to the calling thread. Otherwise its loops run only on the calling thread. OpenMP ends the
// process if it cannot create the threads.
void PrepareThread(const Device& device, bool shares_loops);

// Checks that the device still responds; this is cheap enough to do every second. If the device
// does not respond, returns UNAVAILABLE / DEVICE_LOST, and device.lost() is true from then on.
absl::Status Probe(Device& device);

// Begins a request on a stream, which invalidates the previous request's scratch memory.
absl::Status BeginRequest(Stream& stream);
// Ends the request: waits for its work, and returns its scratch memory to the device and to the
// stream's budget, even if the wait fails. The stream keeps a block of 1 MiB (on CUDA also one of
// page-locked host memory), so that small requests need no allocation. The budget does not count
// this block.
absl::Status EndRequest(Stream& stream);
// Returns scratch memory on the stream, valid until the request ends; null for 0 bytes. If the
// stream's budget (Stream::SetScratchBudget) has too little left, returns RESOURCE_EXHAUSTED /
// SCRATCH_EXHAUSTED {requested, free, total} before anything is allocated.
absl::StatusOr<void*> Scratch(Stream& stream, std::size_t bytes);
// host may be reused on return. Call Synchronize before another stream reads the bytes.
absl::Status CopyToDevice(Stream& stream, void* device, const void* host, std::size_t bytes);
// Copies several pieces, one after the other.
absl::Status CopyToDevice(Stream& stream, void* device, std::span<const HostBytes> pieces);
// `host` is staging memory of the device or registered memory, and must not change until
// Synchronize.
absl::Status CopyPinnedToDevice(Stream& stream, void* device, const void* host, std::size_t bytes);
// The bytes are in host on return. They are copied only once if host is in staging memory of the
// device or in registered memory.
absl::Status CopyToHost(Stream& stream, void* host, const void* device, std::size_t bytes);
// Fills device memory with zero bytes, in stream order.
absl::Status Zero(Stream& stream, void* device, std::size_t bytes);
absl::Status Synchronize(Stream& stream);

// --- Arrays -------------------------------------------------------------------------------------

struct ArrayType {
  DType dtype = DType::kF32;
  Shape shape;
  std::uint64_t bytes() const {
    return static_cast<std::uint64_t>(shape.elements()) * SizeOf(dtype);
  }
};

// Checks the rank, that no extent is negative, and that the size in bytes fits in 63 bits.
// INVALID_ARGUMENT / BAD_SHAPE {shape, ...}.
absl::StatusOr<ArrayType> MakeArrayType(DType dtype, absl::Span<const std::int64_t> shape);

// Returns a view of the whole array at data.
View WholeView(const ArrayType& type, const void* data);

// Returns a view of part of the array at data; offset and strides count elements. Without strides,
// the view is row-major without gaps. INVALID_ARGUMENT / BAD_VIEW {field, value, limit} unless
// every element of the view is in the array. If data is null, the view's data pointer is the offset
// in bytes.
absl::StatusOr<View> MakeView(const ArrayType& type, const void* data, std::int64_t offset,
                              absl::Span<const std::int64_t> shape,
                              absl::Span<const std::int64_t> strides);

// Returns text such as "[3, 4]".
std::string ToString(const Shape& shape);

// --- Operations ---------------------------------------------------------------------------------

// The devices that compute an operation together. Each works on the part of the operands that it
// holds.
class Team {
 public:
  virtual ~Team() = default;
  // The address of the sharded array that the team works on; shards() returns its shards. Every
  // device of the team reaches all operands.
  virtual const void* data() const = 0;
  virtual absl::Span<const Shard> shards() const = 0;
  // Returns one stream per device, in the order of the shards: `own` for its own device, and for
  // every other device a stream with the same cancellation flag. The streams stay valid until the
  // team is destroyed. The call may wait for other teams. UNAVAILABLE / DEVICE_LOST.
  virtual absl::StatusOr<std::vector<Stream*>> Assemble(Stream& own) = 0;
};

struct RunOptions {
  std::string_view strategy;  // empty: Choose picks it
  Launch launch;
  bool timing = false;
  // The pace of the stream's device. It estimates a call's time before the call allocates or
  // launches anything, and learns from the time that the call then takes. If it is null, there are
  // no limits.
  Pace* pace = nullptr;
  // Limits on the estimated time, which includes the time to gather operands. max_seconds applies
  // to any strategy, and max_slow_seconds to a strategy other than the one that Choose picks. If
  // the estimate exceeds a limit, the call fails with FAILED_PRECONDITION / OPERATION_TOO_LONG
  // {strategy, estimate_seconds, limit_seconds}.
  double max_seconds = std::numeric_limits<double>::infinity();
  double max_slow_seconds = std::numeric_limits<double>::infinity();
  // If set, the call is only checked: nothing calls Output::Get, allocates, launches or reads
  // operands, whose addresses may be null.
  bool check_only = false;
  // Whether the seconds that the stream expects already include this call.
  bool expected = false;
  // The devices that share the work with the stream's device if the operation can be divided and is
  // large enough for that. If it is null, no device shares the work. With a team, enqueue_only is
  // ignored.
  Team* team = nullptr;
  // For operations whose result is an array: returns once the work is enqueued. The caller must
  // synchronise the stream before the result is read elsewhere and before the operands are freed.
  bool enqueue_only = false;
};

struct Stats {
  std::string_view strategy;
  double kernel_us = 0;  // set if timing is requested
  std::uint64_t bytes = 0;
  std::uint64_t flops = 0;
  double roundoff = 0;
  double estimate_seconds = 0;       // from options.pace; 0 if that is null
  int devices = 1;                   // devices that took part
  std::uint64_t moved_bytes = 0;     // operands moved between the team's devices
  std::uint64_t prepared_bytes = 0;  // operands that an earlier request prepared; set by the server
  std::uint64_t scratch_bytes = 0;   // maximum scratch memory of the call; if check_only
};

struct ScalarResult {
  Scalar value;
  bool integer = false;  // whether the result is in value.integer, not in value.real
  Stats stats;
};

// Where an operation's array result goes: memory, or a function that returns memory. The function
// is called after all checks, right before the work begins. It must outlive the call, and its error
// ends the operation. The memory may be null only if the result has no elements.
class Output {
 public:
  Output(void* memory) : memory_(memory) {}  // NOLINT(google-explicit-constructor)
  template <class F,
            std::enable_if_t<std::is_invocable_r_v<absl::StatusOr<void*>, const F&>, int> = 0>
  Output(const F& ask) : ask_(ask) {}  // NOLINT(google-explicit-constructor)

  absl::StatusOr<void*> Get() const { return ask_.has_value() ? (*ask_)() : memory_; }

 private:
  void* memory_ = nullptr;
  std::optional<absl::FunctionRef<absl::StatusOr<void*>()>> ask_;
};

// An expression applied to an operation's input or result. Operand 0 of the expression is the input
// or result that the operation would have without the expression. `with` holds the other operands,
// starting with operand 1.
struct MapStage {
  const Expression& expression;
  absl::Span<const View> with;
};

// These functions return the type of an operation's array result. They check everything about the
// operands and nothing about the strategy. `in` is null, or the expression that computes the folded
// array from x and its other operands, whose shapes are broadcast.
absl::StatusOr<ArrayType> ReduceAxesType(const View& x, ReduceOp op, absl::Span<const int> axes,
                                         bool keep_dims, const MapStage* in = nullptr);
// The result of folding a whole array is an array of rank 0.
absl::StatusOr<ArrayType> ReduceType(const View& x, ReduceOp op, const MapStage* in = nullptr);
// `out_of` is null, or the expression that computes the result from the product. In either case,
// `out_dtype` is the dtype of the product. The expression's other operands are broadcast to the
// product's shape.
absl::StatusOr<ArrayType> MatmulType(const View& a, const View& b, bool transpose_a,
                                     bool transpose_b, DType out_dtype,
                                     const MapStage* out_of = nullptr);
absl::StatusOr<ArrayType> AddType(const View& a, const View& b);
// Operand shapes are broadcast as in NumPy.
absl::StatusOr<ArrayType> MapType(absl::Span<const View> operands, const Expression& expression);
// Returns the type of the values; the indices, I64, have the same shape. `axis` is in [-rank,
// rank).
absl::StatusOr<ArrayType> TopKType(const View& x, std::int64_t k, int axis);

// Each function checks its arguments, chooses or finds the strategy, gets the output, gathers
// strided operands where the strategy needs contiguous ones, launches, and waits. out receives a
// result of the type that the functions above return. Errors are those of ComputeService in
// proto/tessera/v1/compute.proto, among them
//   RESOURCE_EXHAUSTED / SCRATCH_EXHAUSTED {requested, free, total}: copies of operands and of
//     results do not fit in the stream's scratch budget. If they exceed the budget's limit, an
//     operation that names no strategy falls back on ChooseInPlace. The fallback depends on
//     configuration and never on load, because another strategy gives different bits.
//   CANCELLED / CANCELLED: stream.stopped() became true, and the result is not valid.
// Dot and Reduce (with their default strategies), Add, Map and copies read strided and broadcast
// operands in place or in pieces of bounded size. If an expression computes the input of Reduce, it
// is evaluated during the fold, or in pieces of bounded size. Scratch memory for a whole array is
// needed in three cases: Reduce with a named strategy that is not a tree, Matmul with an
// expression, and a fold of an expression along the outermost axis. If such a fold needs more than
// the limit, the columns are folded in parts. Otherwise, the result has the same bits as if Map
// wrote the expression's result to an array and the operation then ran on that array.
absl::StatusOr<ScalarResult> RunDot(Stream& stream, const View& a, const View& b,
                                    const RunOptions& options);
absl::StatusOr<ScalarResult> RunReduce(Stream& stream, const View& x, ReduceOp op,
                                       const RunOptions& options, const MapStage* in = nullptr);
absl::StatusOr<Stats> RunReduceAxes(Stream& stream, const View& x, ReduceOp op,
                                    absl::Span<const int> axes, const Output& out,
                                    const RunOptions& options, const MapStage* in = nullptr);
absl::StatusOr<Stats> RunMatmul(Stream& stream, const View& a, const View& b, bool transpose_a,
                                bool transpose_b, DType out_dtype, const Output& out,
                                const RunOptions& options, const MapStage* out_of = nullptr);
absl::StatusOr<Stats> RunAdd(Stream& stream, const View& a, const View& b, const Output& out,
                             const RunOptions& options);
absl::StatusOr<Stats> RunMap(Stream& stream, absl::Span<const View> operands,
                             const Expression& expression, const Output& out,
                             const RunOptions& options);
absl::StatusOr<Stats> RunTopK(Stream& stream, const View& x, std::int64_t k, int axis,
                              bool smallest, const Output& values, const Output& indices,
                              const RunOptions& options);

// Whether a Dot or a Reduce with this operand may be part of a batch: the operand must be numeric,
// contiguous and short.
bool FitsBatch(const View& operand);

// Run many short problems together, about a thousand per launch. results[i], including its Stats,
// equals bit for bit what RunDot or RunReduce returns for problem i with its default strategy. A
// result does not depend on what else is in the batch. operand(i, o) returns operand o of problem
// i, for i < results.size(). All operands must have the same dtype and meet FitsBatch. If any
// operand is invalid, nothing runs, and the error is that of RunDot or RunReduce for the first
// invalid problem.
using BatchOperand = absl::FunctionRef<const View&(std::size_t problem, int operand)>;
absl::Status RunDotBatch(Stream& stream, BatchOperand operand, absl::Span<ScalarResult> results);
absl::Status RunReduceBatch(Stream& stream, ReduceOp op, BatchOperand operand,
                            absl::Span<ScalarResult> results);

// Writes a view's elements to out in row-major order, without gaps, converted to dtype as
// kernels/same_bits/convert.h describes, and waits. Of the options, only pace and max_seconds have
// an effect.
absl::Status RunCopy(Stream& stream, const View& view, DType dtype, const Output& out,
                     const RunOptions& options = {});
// Does the same with out on another device, in pieces. The copy is direct if Stream::ReachesPeer
// returns true, and otherwise goes through the host. If the view has gaps or elements are
// converted, the scratch memory of `from` holds two pieces. view is on the device of `from`, and
// out on the device of `to`. The caller must have exclusive use of both streams, and stopped() of
// both is checked between pieces.
absl::Status RunCopyAcross(Stream& from, const View& view, DType dtype, Stream& to, void* out,
                           const RunOptions& options = {});

// Runs strategies of the stream's device on small problems before the first request, so that their
// code is loaded, libraries and the stream have done their setup, and the pace is calibrated. If
// every_strategy is set, it runs every available strategy on F32 operands (on a CPU,
// where that is fast, on all types) and the default strategies on all types. Otherwise, which is
// enough for a device's other streams, only the default strategies of Dot, Reduce and Matmul run,
// and the pace learns nothing. Some 80 MB of device memory are needed temporarily. A strategy that
// fails is skipped. The Status reports only a failed allocation, a failure of the stream itself, or
// DEVICE_LOST.
absl::Status WarmUp(Stream& stream, Pace& pace, bool every_strategy);

// --- The table ----------------------------------------------------------------------------------

// Returns the strategies of one operation for both backends, roughly from slowest to fastest.
// strategies.cc has the only such list.
template <class Problem>
absl::Span<const Strategy<Problem>* const> Strategies();

// Describes the requirement of the strategy that this device does not meet. The result is empty if
// the device meets all of them.
template <class Problem>
std::string Missing(const Strategy<Problem>& strategy, const Device& device);

// Returns the fastest correct strategy for the problem on the device, or null if no strategy
// accepts its dtype.
template <class Problem>
const Strategy<Problem>* Choose(const Problem& problem, const Device& device);
// Returns a problem with that many F32 elements, for estimates and lists.
template <class Problem>
Problem ReferenceProblem(std::int64_t elements);
#define TESSERA_DECLARE(Operation, name)                                        \
  template <>                                                                   \
  absl::Span<const Strategy<Operation##Problem>* const> Strategies();           \
  template <>                                                                   \
  const Strategy<Operation##Problem>* Choose(const Operation##Problem& problem, \
                                             const Device& device);             \
  template <>                                                                   \
  Operation##Problem ReferenceProblem(std::int64_t elements);
TESSERA_OPERATIONS(TESSERA_DECLARE)
#undef TESSERA_DECLARE

// Returns a strategy that needs almost no scratch memory, for use if the strategy that Choose
// returns needs more than the stream's limit. Returns null if there is none.
template <class Problem>
const Strategy<Problem>* ChooseInPlace(const Problem&, const Device&) {
  return nullptr;
}
template <>
const Strategy<MatmulProblem>* ChooseInPlace(const MatmulProblem& problem, const Device& device);

// Returns what the problem costs with the strategy, by the strategy's own model. A strategy without
// `stacks` computes the products of a stack one after another.
template <class Problem>
Cost CostOf(const Strategy<Problem>& strategy, const Problem& problem) {
  if constexpr (std::is_same_v<Problem, MatmulProblem>) {
    if (problem.stack != 1) {
      const auto products = static_cast<std::uint64_t>(problem.stack);
      Cost cost = strategy.cost(LeastAlignedProduct(problem));
      cost.bytes *= products;
      cost.flops *= products;
      cost.atomics *= products;
      if (!strategy.stacks) cost.depth *= products;
      return cost;
    }
  }
  return strategy.cost(problem);
}

// Returns the maximum scratch memory of a launch, in bytes.
template <class Problem>
std::uint64_t LaunchScratch(const Strategy<Problem>& strategy, const Problem& problem) {
  if (strategy.scratch == nullptr) return 0;
  if constexpr (std::is_same_v<Problem, MatmulProblem>) {
    if (problem.stack != 1 && !strategy.stacks)
      return strategy.scratch(LeastAlignedProduct(problem));
  }
  return strategy.scratch(problem);
}

// Describes a strategy of the table without its problem type, for lists.
struct StrategyInfo {
  std::string_view operation, name, summary, source;
  Backend backend = Backend::kCpu;
  DTypes dtypes;
  int min_compute_capability = 0;
  LaunchLimits limits;
  bool deterministic = false;
  bool vendor = false;
  bool available = false;  // on any of the given devices
  bool chosen = false;     // for the reference problem, on any of the given devices
  std::string needs;       // when not available
  Cost cost;  // for the reference problem: 2^20 f32 elements; axes and matmul: 1024 per side;
              // windows: radius 8; map: a * b + c; top_k: the 100 largest of 16 rows; take: 2^14
              // rows of 64 elements; select: half of the elements; histogram: 256 even bins;
              // search_sorted: as many elements as keys; sum_by_label: 1024 labels
  double roundoff = 0;
};

std::vector<StrategyInfo> ListStrategies(absl::Span<Device* const> devices);

}  // namespace tessera
