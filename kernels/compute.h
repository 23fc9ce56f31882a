// The one header of kernels/ for the rest of the project: open a device, hold memory on it, run an
// operation.
//
// Nothing here throws. Errors are absl::Status with a reason and figures (error.h). Device and
// memory functions are thread safe; functions that take a Stream need that stream to themselves for
// the call, and leave it synchronised.
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

// Names OpenDevice accepts on this machine: "cuda:0", "cuda:1", ..., then "cpu". Never fails: no
// driver, no GPU or a CPU build leave "cpu" alone.
std::vector<std::string> VisibleDevices();

// "cpu", "cuda" (the first GPU), "cuda:N", "auto" (the first GPU, else the CPU), or "cpu:N": one of
// any number of devices that stand for many GPUs where there are none.
// INVALID_ARGUMENT / BAD_DEVICE for a malformed name; FAILED_PRECONDITION / DEVICE_UNAVAILABLE,
// with the cause.
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(std::string_view name);

absl::StatusOr<std::unique_ptr<Stream>> MakeStream(Device& device);
// The two of Device, with errors as they come from MakeStream.
absl::Status KeepRoom(Device& device);
absl::StatusOr<std::unique_ptr<Stream>> MakeLargeStream(Device& device);

// The shards of an array of so many bytes that is divided evenly among the devices, in their order:
// one at least, at multiples of the first device's ShardUnit. A device that would have none of the
// array has no shard. REQUIRES: there are devices.
std::vector<Shard> MakeShards(absl::Span<Device* const> devices, std::uint64_t bytes);
// What the shard, one of `count` of its array, takes of its device's memory.
std::uint64_t AllocationBytes(const Shard& shard, std::size_t count);

// Device memory with an owner. Movable; frees on destruction, when no work that uses it may be in
// flight.
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
  Device* device_ = nullptr;                // of memory on one device
  std::unique_ptr<ShardedMemory> sharded_;  // of memory on several
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// RESOURCE_EXHAUSTED / GPU_MEMORY_EXHAUSTED or, on the CPU, HOST_MEMORY_EXHAUSTED {requested, free,
// total}.
absl::StatusOr<Memory> Allocate(Device& device, std::size_t bytes);
// shards: of MakeShards. Also FAILED_PRECONDITION / PLACEMENT_UNSUPPORTED {device, cause}: the
// devices do not reach each other's memory.
absl::StatusOr<Memory> Allocate(absl::Span<const Shard> shards);

// bytes > 0 of host memory that copies of the device reach without a detour; it may outlive the
// device. May wait for the device's work, and so may its end. RESOURCE_EXHAUSTED /
// HOST_MEMORY_EXHAUSTED.
absl::StatusOr<StagingMemory> MakeStaging(Device& device, std::size_t bytes);
// Device::RegisterHost. RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED.
absl::StatusOr<HostRegistration> RegisterHost(Device& device, void* memory, std::size_t bytes);

// Returns how many threads run the host loops of a thread that drives streams of the device, that
// thread included.
int LoopThreads(const Device& device);
// Prepares the calling thread to drive streams of the device. If shares_loops, its host loops run
// on LoopThreads(device) threads from then on, which are created now and belong to it; otherwise on
// the calling thread alone. OpenMP ends the process if it cannot create them.
void PrepareThread(const Device& device, bool shares_loops);

// Whether the device still answers: cheap enough to ask every second. UNAVAILABLE / DEVICE_LOST
// when it does not, which device.lost() says from then on as well.
absl::Status Probe(Device& device);

// Begins a request on a stream: scratch of the request before is gone.
absl::Status BeginRequest(Stream& stream);
// Ends it: waits for its work and gives its scratch memory back to the device and to the stream's
// budget, all but a block of 1 MiB a stream (on CUDA: and one of page-locked host memory), which
// the budget does not count and which serves small requests without an allocation. Gives back even
// when the wait fails.
absl::Status EndRequest(Stream& stream);
// Scratch memory on the stream until the request ends; null for 0 bytes. RESOURCE_EXHAUSTED /
// SCRATCH_EXHAUSTED {requested, free, total} when the stream's budget (Stream::SetScratchBudget)
// has no room, before anything is allocated.
absl::StatusOr<void*> Scratch(Stream& stream, std::size_t bytes);
// host may be reused on return. Call Synchronize before another stream reads the bytes.
absl::Status CopyToDevice(Stream& stream, void* device, const void* host, std::size_t bytes);
// The same of pieces, one behind the other.
absl::Status CopyToDevice(Stream& stream, void* device, std::span<const HostBytes> pieces);
// host: staging memory of the device or memory that is registered, which stays until Synchronize.
absl::Status CopyPinnedToDevice(Stream& stream, void* device, const void* host, std::size_t bytes);
// The bytes are in host on return. Copied once if host is in staging memory of the device, or in
// memory that is registered.
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

// Checks rank, signs and the size in bytes (which must fit 63 bits): INVALID_ARGUMENT / BAD_SHAPE
// {shape, ...}.
absl::StatusOr<ArrayType> MakeArrayType(DType dtype, absl::Span<const std::int64_t> shape);

// The whole array at data.
View WholeView(const ArrayType& type, const void* data);

// A window of the array at data: offset and strides in elements; no strides: row-major without
// gaps. INVALID_ARGUMENT / BAD_VIEW {field, value, limit} unless every element it can name lies in
// the array. At null its data is the offset in bytes, as an address.
absl::StatusOr<View> MakeView(const ArrayType& type, const void* data, std::int64_t offset,
                              absl::Span<const std::int64_t> shape,
                              absl::Span<const std::int64_t> strides);

// "[3, 4]"
std::string ToString(const Shape& shape);

// --- Operations ---------------------------------------------------------------------------------

// The devices that work on an operation together, each on the part of the operands that it has.
class Team {
 public:
  virtual ~Team() = default;
  // The memory that they share: shards of the array at that address. All of them reach all
  // operands.
  virtual const void* data() const = 0;
  virtual absl::Span<const Shard> shards() const = 0;
  // A stream of each of these devices, in the order of the shards: `own` on its device, on the
  // others streams that stop with it. They stay until the team goes. May wait for other teams.
  // UNAVAILABLE / DEVICE_LOST.
  virtual absl::StatusOr<std::vector<Stream*>> Assemble(Stream& own) = 0;
};

struct RunOptions {
  std::string_view strategy;  // empty: Choose
  Launch launch;
  bool timing = false;
  // Of the stream's device: what a call is expected to take, before it allocates or launches
  // anything, and what it did take afterwards. Null: no limits.
  Pace* pace = nullptr;
  // Limits of what is expected, gathers of operands included: of any strategy, and of a strategy
  // other than the one that Choose picks for the problem. Beyond them FAILED_PRECONDITION /
  // OPERATION_TOO_LONG {strategy, estimate_seconds, limit_seconds}.
  double max_seconds = std::numeric_limits<double>::infinity();
  double max_slow_seconds = std::numeric_limits<double>::infinity();
  // Makes all checks and leaves it at that: nothing is asked, allocated or launched, and no memory
  // of operands is read, whose addresses may be null.
  bool check_only = false;
  // Who works on it beside the stream's device, where the operation can be shared out and is worth
  // it; null: nobody. With it, enqueue_only does not count.
  Team* team = nullptr;
  // For operations whose result is an array: returns once the work is enqueued. Whoever calls
  // synchronises the stream before the result is read from elsewhere, and before operands go.
  bool enqueue_only = false;
};

struct Stats {
  std::string_view strategy;
  double kernel_us = 0;  // with timing
  std::uint64_t bytes = 0;
  std::uint64_t flops = 0;
  double roundoff = 0;
  double estimate_seconds = 0;       // by options.pace, else 0
  int devices = 1;                   // that worked
  std::uint64_t moved_bytes = 0;     // of operands, between devices that share the work out
  std::uint64_t prepared_bytes = 0;  // of operands, by an earlier request; set by the server
  std::uint64_t scratch_bytes = 0;   // scratch memory that it takes at most; with check_only
};

struct ScalarResult {
  Scalar value;
  bool integer = false;  // whether value.integer holds the result, else value.real
  Stats stats;
};

// Where an operation's array result goes: memory, or who is asked for it once everything that can
// be checked has been, right before the work begins. What is asked outlives the call; an error of
// its ends the operation. null counts as memory only where the result has no elements.
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

// An expression on the way into an operation or out of it. Its operand 0 is what the operation
// would take or give without it, and `with` are the others, from 1 on.
struct MapStage {
  const Expression& expression;
  absl::Span<const View> with;
};

// What an operation's array result will be: all checks of the operands, none of the strategy.
// in: null, or what makes the array that is folded of x. Shapes are broadcast.
absl::StatusOr<ArrayType> ReduceAxesType(const View& x, ReduceOp op, absl::Span<const int> axes,
                                         bool keep_dims, const MapStage* in = nullptr);
// The same of a whole array, where the result is an array of rank 0.
absl::StatusOr<ArrayType> ReduceType(const View& x, ReduceOp op, const MapStage* in = nullptr);
// out_of: null, or what makes the result of the product, whose dtype is then out_dtype. Its other
// operands are broadcast to the product's shape.
absl::StatusOr<ArrayType> MatmulType(const View& a, const View& b, bool transpose_a,
                                     bool transpose_b, DType out_dtype,
                                     const MapStage* out_of = nullptr);
absl::StatusOr<ArrayType> AddType(const View& a, const View& b);
absl::StatusOr<ArrayType> WindowSumType(const View& x, std::int64_t radius);
// Shapes of operands are broadcast as in NumPy.
absl::StatusOr<ArrayType> MapType(absl::Span<const View> operands, const Expression& expression);
// Of the values; those of the indices, I64, have the same shape. axis: in [-rank, rank).
absl::StatusOr<ArrayType> TopKType(const View& x, std::int64_t k, int axis);

// Each checks, chooses or finds the strategy, asks for the output, gathers strided operands where
// the strategy needs contiguous ones, launches, and waits. out holds the result's type, computed
// above. Errors: those of ComputeService in proto/tessera/v1/compute.proto, among them
//   RESOURCE_EXHAUSTED / SCRATCH_EXHAUSTED {requested, free, total}: copies of operands and of
//     results do not fit the stream's scratch budget. Where they exceed its limit, an operation
//     that names no strategy falls back on ChooseInPlace: by configuration, never by load, since
//     another strategy has other bits.
//   CANCELLED / CANCELLED: stream.stopped() said so meanwhile, and the result is not worth reading.
// Dot and Reduce by the strategies that are chosen, Add, Map, and copies take strided and repeated
// operands as they are, or in pieces of bounded size. What an expression makes for Reduce is
// computed where it is folded or in pieces of bounded size; it is scratch memory of the array's
// size for named strategies that are no trees, for Matmul, and for a folded outermost axis, but for
// columns that go in parts beyond the limit. Else results have the bits of Map into an array and
// the operation on it.
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

// Whether a Dot or a Reduce of these operands may be part of a batch: they are numbers, contiguous
// and short.
bool FitsBatch(const View& operand);

// Many short vectors at once, with a launch for a thousand of them: results[i] is, bit by bit and
// with its Stats, what RunDot or RunReduce gives operands[i] by the strategy they choose. A result
// does not depend on what else is in the batch. operand(i, o) is operand o of problem i, of
// results.size(); all have one dtype and meet FitsBatch. Errors: those of RunDot and RunReduce, of
// the first operands at fault, and then nothing has run.
using BatchOperand = absl::FunctionRef<const View&(std::size_t problem, int operand)>;
absl::Status RunDotBatch(Stream& stream, BatchOperand operand, absl::Span<ScalarResult> results);
absl::Status RunReduceBatch(Stream& stream, ReduceOp op, BatchOperand operand,
                            absl::Span<ScalarResult> results);

// Writes a view's elements to out in row-major order, without gaps and as elements of dtype
// (kernels/same_bits/convert.h says how), and waits. Of the options, pace and max_seconds count.
absl::Status RunCopy(Stream& stream, const View& view, DType dtype, const Output& out,
                     const RunOptions& options = {});
// The same to memory of another device: directly where Stream::ReachesPeer, else by way of the
// host. It goes in pieces, of which `from` has two in its scratch memory where the view has gaps or
// elements are converted. view is on the device of `from`, out on that of `to`; both streams are
// the caller's for the call. Looks at stopped() of both between pieces.
absl::Status RunCopyAcross(Stream& from, const View& view, DType dtype, Stream& to, void* out,
                           const RunOptions& options = {});

// Runs strategies of the stream's device on small problems, so that their code is loaded, libraries
// and the stream have what they set up at their first call, and the pace knows the strategies
// before the first request: every available strategy, on F32 operands (on a CPU, where that takes
// no time, on all types) and the default strategies on all; or, unless every_strategy, the default
// strategies of Dot, Reduce and Matmul alone, for a second stream of a device, which teaches the
// pace nothing. Takes some 60 MB of device memory for the time being. A strategy that fails is left
// out; the Status is of the memory and of the stream itself, and DEVICE_LOST.
absl::Status WarmUp(Stream& stream, Pace& pace, bool every_strategy);

// --- The table ----------------------------------------------------------------------------------

// The strategies of one operation, slowest lesson first, both backends. The list in strategies.cc
// is the only one.
template <class Problem>
absl::Span<const Strategy<Problem>* const> Strategies();

// What the strategy needs and this device does not offer, in words; empty: nothing.
template <class Problem>
std::string Missing(const Strategy<Problem>& strategy, const Device& device);

// The fastest correct strategy for the problem on the device, or null when no strategy takes its
// dtype.
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

// The strategy to take instead where the scratch memory of Choose's exceeds the stream's limit: one
// that needs none worth mentioning. Null where there is no other.
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
  Cost cost;  // of the reference problem: 2^20 f32 elements; axes and matmul: 1024 a side; windows:
              // radius 8; map: a * b + c; top_k: the 100 largest of 16 rows
  double roundoff = 0;
};

std::vector<StrategyInfo> ListStrategies(absl::Span<Device* const> devices);

}  // namespace tessera
