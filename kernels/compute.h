// The one header of kernels/ for the rest of the project: it opens devices, holds memory on them,
// and runs operations.
//
// Nothing here throws. Errors are absl::Status with a reason and metadata (error.h). Functions of
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

// name: "cpu", "cuda" (the first GPU), "cuda:N", "auto" (the first GPU, or else the CPU), or
// "cpu:N", one of any number of CPU devices that simulate several GPUs. INVALID_ARGUMENT /
// BAD_DEVICE for a malformed name; FAILED_PRECONDITION / DEVICE_UNAVAILABLE with the cause.
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(std::string_view name);

absl::StatusOr<std::unique_ptr<Stream>> MakeStream(Device& device);
// Device::KeepRoom and Device::MakeLargeStream, with errors as a Status.
absl::Status KeepRoom(Device& device);
absl::StatusOr<std::unique_ptr<Stream>> MakeLargeStream(Device& device);

// Divides an array of `bytes` bytes evenly among the devices, in their order. Returns at least one
// shard; shards begin at multiples of the first device's ShardUnit. A device that would get no
// bytes has no shard. REQUIRES: there are devices.
std::vector<Shard> MakeShards(absl::Span<Device* const> devices, std::uint64_t bytes);
// Returns how much of its device's memory a shard takes; count: the number of shards of its array.
std::uint64_t AllocationBytes(const Shard& shard, std::size_t count);

// Owned device memory. Movable. The destructor frees it; no work that uses it may be in flight
// then.
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
// shards: returned by MakeShards. It may also fail with FAILED_PRECONDITION / PLACEMENT_UNSUPPORTED
// {device, cause}: the devices do not reach each other's memory.
absl::StatusOr<Memory> Allocate(absl::Span<const Shard> shards);

// Allocates bytes > 0 of host memory that the device's copies reach directly; it may outlive the
// device. It may wait for the device's work, and so may freeing the memory. RESOURCE_EXHAUSTED /
// HOST_MEMORY_EXHAUSTED.
absl::StatusOr<StagingMemory> MakeStaging(Device& device, std::size_t bytes);
// Calls Device::RegisterHost. RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED.
absl::StatusOr<HostRegistration> RegisterHost(Device& device, void* memory, std::size_t bytes);

// Returns how many threads run the host loops of a thread that drives streams of the device,
// including that thread.
int LoopThreads(const Device& device);
// Prepares the calling thread to drive streams of the device. If shares_loops, its host loops run
// on LoopThreads(device) threads from then on; these are created immediately and belong to it.
// Otherwise they run only on the calling thread. OpenMP ends the process if it cannot create the
// threads.
void PrepareThread(const Device& device, bool shares_loops);

// Checks that the device still responds; cheap enough to call every second. If not, returns
// UNAVAILABLE / DEVICE_LOST, and device.lost() is true from then on.
absl::Status Probe(Device& device);

// Begins a request on a stream, which invalidates the previous request's scratch memory.
absl::Status BeginRequest(Stream& stream);
// Ends the request: waits for its work, and gives its scratch memory back to the device and to the
// stream's budget, even if the wait fails. The stream keeps a block of 1 MiB (on CUDA also one of
// page-locked host memory), which the budget does not count and which serves small requests without
// an allocation.
absl::Status EndRequest(Stream& stream);
// Returns scratch memory on the stream, valid until the request ends; null for 0 bytes. If the
// stream's budget (Stream::SetScratchBudget) has no room, it returns RESOURCE_EXHAUSTED /
// SCRATCH_EXHAUSTED {requested, free, total} before anything is allocated.
absl::StatusOr<void*> Scratch(Stream& stream, std::size_t bytes);
// host may be reused on return. Call Synchronize before another stream reads the bytes.
absl::Status CopyToDevice(Stream& stream, void* device, const void* host, std::size_t bytes);
// Copies several pieces, one after the other.
absl::Status CopyToDevice(Stream& stream, void* device, std::span<const HostBytes> pieces);
// host: staging memory of the device or registered memory, which must not change until Synchronize.
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

// Checks the rank, the signs and the size in bytes (which must fit 63 bits). INVALID_ARGUMENT /
// BAD_SHAPE {shape, ...}.
absl::StatusOr<ArrayType> MakeArrayType(DType dtype, absl::Span<const std::int64_t> shape);

// Returns a view of the whole array at data.
View WholeView(const ArrayType& type, const void* data);

// Returns a view of part of the array at data; offset and strides count elements. Without strides,
// the view is row-major without gaps. INVALID_ARGUMENT / BAD_VIEW {field, value, limit} unless
// every element of the view lies in the array. If data is null, the view's data is the offset in
// bytes, as an address.
absl::StatusOr<View> MakeView(const ArrayType& type, const void* data, std::int64_t offset,
                              absl::Span<const std::int64_t> shape,
                              absl::Span<const std::int64_t> strides);

// Returns text such as "[3, 4]".
std::string ToString(const Shape& shape);

// --- Operations ---------------------------------------------------------------------------------

// The devices that compute an operation together, each on the part of the operands that it has.
class Team {
 public:
  virtual ~Team() = default;
  // The memory that the devices share: shards of the array at that address. All of the devices
  // reach all operands.
  virtual const void* data() const = 0;
  virtual absl::Span<const Shard> shards() const = 0;
  // Returns a stream of each of these devices, in the order of the shards: `own` for its device,
  // and for the others streams with the same cancellation flag. The streams stay until the team is
  // destroyed. It may wait for other teams. UNAVAILABLE / DEVICE_LOST.
  virtual absl::StatusOr<std::vector<Stream*>> Assemble(Stream& own) = 0;
};

struct RunOptions {
  std::string_view strategy;  // empty: Choose picks it
  Launch launch;
  bool timing = false;
  // Of the stream's device. It estimates a call's time before the call allocates or launches
  // anything, and learns the time that the call has taken. Null: no limits.
  Pace* pace = nullptr;
  // Limits of the estimate, including gathers of operands: for any strategy, and for a strategy
  // other than the one that Choose picks for the problem. Beyond them, FAILED_PRECONDITION /
  // OPERATION_TOO_LONG {strategy, estimate_seconds, limit_seconds}.
  double max_seconds = std::numeric_limits<double>::infinity();
  double max_slow_seconds = std::numeric_limits<double>::infinity();
  // Only checks the call: it does not get the output, allocate, launch, or read memory of operands,
  // and the addresses of operands may be null.
  bool check_only = false;
  // The devices that help the stream's device where the operation can be shared out and is worth
  // it; null: none. With a team, enqueue_only is ignored.
  Team* team = nullptr;
  // For operations whose result is an array: returns once the work is enqueued. The caller must
  // synchronise the stream before the result is read elsewhere and before the operands are freed.
  bool enqueue_only = false;
};

struct Stats {
  std::string_view strategy;
  double kernel_us = 0;  // with timing
  std::uint64_t bytes = 0;
  std::uint64_t flops = 0;
  double roundoff = 0;
  double estimate_seconds = 0;       // by options.pace, otherwise 0
  int devices = 1;                   // devices that took part
  std::uint64_t moved_bytes = 0;     // operands moved between devices of the team
  std::uint64_t prepared_bytes = 0;  // operands that an earlier request prepared; set by the server
  std::uint64_t scratch_bytes = 0;   // the most scratch memory it takes; with check_only
};

struct ScalarResult {
  Scalar value;
  bool integer = false;  // whether value.integer holds the result rather than value.real
  Stats stats;
};

// Where an operation's array result goes: memory, or a function that returns memory. The function
// is called after all checks, right before the work begins. It must outlive the call, and its error
// ends the operation. null is allowed as memory only if the result has no elements.
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

// An expression applied to an operation's input or result. Its operand 0 is what the operation
// would take or return without it; `with` are its other operands, from 1 on.
struct MapStage {
  const Expression& expression;
  absl::Span<const View> with;
};

// Return the type of an operation's array result. They make all checks of the operands, and none of
// the strategy. in: null, or the expression that computes the array to fold from x. Shapes are
// broadcast.
absl::StatusOr<ArrayType> ReduceAxesType(const View& x, ReduceOp op, absl::Span<const int> axes,
                                         bool keep_dims, const MapStage* in = nullptr);
// For a whole array the result is an array of rank 0.
absl::StatusOr<ArrayType> ReduceType(const View& x, ReduceOp op, const MapStage* in = nullptr);
// out_of: null, or the expression that computes the result from the product, whose dtype is then
// out_dtype. Its other operands are broadcast to the product's shape.
absl::StatusOr<ArrayType> MatmulType(const View& a, const View& b, bool transpose_a,
                                     bool transpose_b, DType out_dtype,
                                     const MapStage* out_of = nullptr);
absl::StatusOr<ArrayType> AddType(const View& a, const View& b);
absl::StatusOr<ArrayType> WindowSumType(const View& x, std::int64_t radius);
// Operand shapes are broadcast as in NumPy.
absl::StatusOr<ArrayType> MapType(absl::Span<const View> operands, const Expression& expression);
// Returns the type of the values; the indices, I64, have the same shape. axis: in [-rank, rank).
absl::StatusOr<ArrayType> TopKType(const View& x, std::int64_t k, int axis);

// Each function checks its arguments, chooses or finds the strategy, gets the output, gathers
// strided operands where the strategy needs contiguous ones, launches, and waits. out holds the
// result's type, computed above. Errors are those of ComputeService in
// proto/tessera/v1/compute.proto, among them
//   RESOURCE_EXHAUSTED / SCRATCH_EXHAUSTED {requested, free, total}: copies of operands and of
//     results do not fit the stream's scratch budget. If they exceed its limit, an operation that
//     names no strategy falls back on ChooseInPlace. This depends on configuration and never on
//     load, since another strategy gives other bits.
//   CANCELLED / CANCELLED: stream.stopped() became true, and the result is not valid.
// Dot and Reduce (by their default strategies), Add, Map, and copies take strided and broadcast
// operands in place or in pieces of bounded size. An expression's result for Reduce is computed
// where it is folded, or in pieces of bounded size. Scratch memory for a whole array is needed in
// three cases: Reduce by a named strategy that is not a tree, Matmul with an expression, and a
// folded outermost axis, unless that exceeds the limit and columns are folded in parts. Apart from
// those parts, results have the bits of Map into an array followed by the operation on it.
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
absl::StatusOr<Stats> RunWindowSum(Stream& stream, const View& x, std::int64_t radius,
                                   const Output& out, const RunOptions& options);
absl::StatusOr<Stats> RunMap(Stream& stream, absl::Span<const View> operands,
                             const Expression& expression, const Output& out,
                             const RunOptions& options);
absl::StatusOr<Stats> RunTopK(Stream& stream, const View& x, std::int64_t k, int axis,
                              bool smallest, const Output& values, const Output& indices,
                              const RunOptions& options);

// Whether a Dot or a Reduce of such operands may be part of a batch: they must be numbers,
// contiguous and short.
bool FitsBatch(const View& operand);

// Computes many short vectors together, about a thousand per launch. results[i], with its Stats,
// equals bit by bit what RunDot or RunReduce returns for operands[i] by its default strategy. A
// result does not depend on what else is in the batch. operand(i, o) is operand o of problem i, for
// i below results.size(); all operands have one dtype and meet FitsBatch. Errors are those of
// RunDot and RunReduce for the first invalid operands, and then nothing has run.
using BatchOperand = absl::FunctionRef<const View&(std::size_t problem, int operand)>;
absl::Status RunDotBatch(Stream& stream, BatchOperand operand, absl::Span<ScalarResult> results);
absl::Status RunReduceBatch(Stream& stream, ReduceOp op, BatchOperand operand,
                            absl::Span<ScalarResult> results);

// Writes a view's elements to out in row-major order, without gaps, as elements of dtype
// (kernels/same_bits/convert.h says how), and waits. It honours only the options pace and
// max_seconds.
absl::Status RunCopy(Stream& stream, const View& view, DType dtype, const Output& out,
                     const RunOptions& options = {});
// Likewise to memory of another device: directly where Stream::ReachesPeer, and otherwise through
// the host. It copies pieces; `from` has two of them in its scratch memory if the view has gaps or
// elements are converted. view is on the device of `from`, and out on that of `to`. The caller must
// have exclusive use of both streams. It checks stopped() of both between pieces.
absl::Status RunCopyAcross(Stream& from, const View& view, DType dtype, Stream& to, void* out,
                           const RunOptions& options = {});

// Runs strategies of the stream's device on small problems before the first request, so that their
// code is loaded, libraries and the stream have done their setup, and the pace knows the
// strategies. With every_strategy, it runs every available strategy on F32 operands (on a CPU,
// where that is fast, on all types) and the default strategies on all types. Otherwise it runs only
// the default strategies of Dot, Reduce and Matmul, for a second stream of a device, and the pace
// learns nothing. It takes some 60 MB of device memory temporarily. A strategy that fails is left
// out; the Status covers the memory, the stream itself, and DEVICE_LOST.
absl::Status WarmUp(Stream& stream, Pace& pace, bool every_strategy);

// --- The table ----------------------------------------------------------------------------------

// Returns the strategies of one operation for both backends, slowest lesson first. The list in
// strategies.cc is the only one.
template <class Problem>
absl::Span<const Strategy<Problem>* const> Strategies();

// Returns in words what the strategy needs that this device does not offer; empty if nothing.
template <class Problem>
std::string Missing(const Strategy<Problem>& strategy, const Device& device);

// Returns the fastest correct strategy for the problem on the device, or null if no strategy takes
// its dtype.
template <class Problem>
const Strategy<Problem>* Choose(const Problem& problem, const Device& device);
#define TESSERA_DECLARE(Operation)                                              \
  template <>                                                                   \
  absl::Span<const Strategy<Operation##Problem>* const> Strategies();           \
  template <>                                                                   \
  const Strategy<Operation##Problem>* Choose(const Operation##Problem& problem, \
                                             const Device& device);
TESSERA_OPERATIONS(TESSERA_DECLARE)
#undef TESSERA_DECLARE

// Returns the strategy to use if the scratch memory of Choose's exceeds the stream's limit: one
// that needs almost none. Returns null if there is none.
template <class Problem>
const Strategy<Problem>* ChooseInPlace(const Problem&, const Device&) {
  return nullptr;
}
template <>
const Strategy<MatmulProblem>* ChooseInPlace(const MatmulProblem& problem, const Device& device);

// A strategy of the table without its problem type, for lists.
struct StrategyInfo {
  std::string_view operation, name, summary, source;
  Backend backend = Backend::kCpu;
  DTypes dtypes;
  int min_compute_capability = 0;
  LaunchLimits limits;
  bool deterministic = false;
  bool vendor = false;
  bool available = false;  // on any of the devices given
  bool chosen = false;     // for the reference problem, on any of the devices given
  std::string needs;       // when not available
  Cost cost;  // for the reference problem: 2^20 f32 elements; axes and matmul: 1024 per side;
              // windows: radius 8; map: a * b + c; top_k: the 100 largest of 16 rows
  double roundoff = 0;
};

std::vector<StrategyInfo> ListStrategies(absl::Span<Device* const> devices);

}  // namespace tessera
