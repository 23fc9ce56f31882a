// The host code that the CUDA device and its strategies share: checked calls, owners of CUDA
// objects, the device and the stream. Only .cu files include this header.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/device/device.h"

struct cublasContext;  // cublasHandle_t is a pointer to it

namespace tessera {

// --- Errors ---

// Throws DeviceError with CUDA's name for the error. Its kind says whether the device is still
// usable. Clears the error, so that the next call on this thread does not report it again.
// `requested` is the size of a failed allocation in bytes.
[[noreturn]] void ThrowCudaError(cudaError_t error, const char* call, std::uint64_t requested = 0);

inline void CheckCuda(cudaError_t error, const char* call) {
  if (error != cudaSuccess) [[unlikely]]
    ThrowCudaError(error, call);
}

// Wraps every call that returns a cudaError_t, except in destructors.
#define CUDA_CHECK(expr) ::tessera::CheckCuda((expr), #expr)

// Must directly follow kernel<<<...>>>(...), which returns no status.
#define CUDA_CHECK_LAUNCH(kernel) ::tessera::CheckCuda(cudaGetLastError(), "launch of " #kernel)

// Lets the blocks of a kernel use this much dynamic shared memory, which may be more than 48 KiB.
template <class... Parameters>
void AllowSharedBytes(void (*kernel)(Parameters...), std::size_t bytes) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)));
}

// --- Owners ---

// Deleters ignore and clear errors, because on a lost device every release fails, and no caller
// could handle such an error.
struct CudaDeleter {
  void operator()(cudaStream_t stream) const noexcept;
  void operator()(cudaEvent_t event) const noexcept;
  void operator()(void* pinned) const noexcept;
};

using StreamHandle = std::unique_ptr<CUstream_st, CudaDeleter>;
using Event = std::unique_ptr<CUevent_st, CudaDeleter>;
using PinnedMemory = std::unique_ptr<void, CudaDeleter>;

// The following functions create objects on the device that is current on the calling thread.

// Creates a stream that does not wait for the legacy default stream. If `first` is set, the blocks
// of this stream have priority over those of other streams when they wait for space on an SM.
StreamHandle MakeStreamHandle(bool first = false);
// Creates an event on which cudaEventSynchronize sleeps instead of spinning. Only timed events
// record timestamps.
Event MakeEvent(bool timed);
// Allocates page-locked host memory. Kernels may use its address unchanged. Throws kOutOfHostMemory
// if no such memory is left.
PinnedMemory MakePinnedMemory(std::size_t bytes);

// --- Device ---

class Partition;  // kernels/cuda/runtime/partition.h

// One GPU with a memory pool. The pool keeps the memory that it has obtained, so an allocation
// takes microseconds and freeing memory does not stall the kernels of other streams.
class CudaDevice final : public Device {
 public:
  // Throws DeviceError.
  explicit CudaDevice(int ordinal);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  // Counts the pool's unused memory as free. Returns 0 on a lost device.
  std::uint64_t FreeBytes() const override;
  void* Allocate(std::size_t bytes) override;
  std::size_t AllocationBytes(std::size_t bytes) const override;
  void Free(void* memory) noexcept override;
  std::unique_ptr<ShardedMemory> AllocateShards(std::span<const Shard> shards) override;
  StagingMemory MakeStaging(std::size_t bytes) override;
  HostRegistration RegisterHost(void* memory, std::size_t bytes) override;
  std::unique_ptr<Stream> MakeStream() override;
  void KeepRoom() override;
  std::unique_ptr<Stream> MakeLargeStream() override;
  void Probe() override;
  void SetProfiling(bool on) noexcept override;

  int ordinal() const { return ordinal_; }
  // Makes this device current on the calling thread. Every entry point begins with this call,
  // because a process may have several devices and a thread may serve all of them.
  void Use() const { CUDA_CHECK(cudaSetDevice(ordinal_)); }
  // These create the handles for MakeStream and MakeLargeStream. REQUIRES: the device is current.
  StreamHandle MakeHandle() const { return MakeStreamHandle(/*first=*/keeps_room_); }
  StreamHandle MakeLargeHandle() const;
  // Returns the pool's unused memory to the driver, for allocations that do not come from the pool.
  void Trim();
  // Gives another GPU access to this GPU's memory if the hardware allows it. Returns whether the
  // other GPU has access.
  bool OpenTo(const CudaDevice& peer);
  // Returns the ordinals of the GPUs that the process has open as devices, without duplicates.
  static std::vector<int> OpenOrdinals();

 private:
  const int ordinal_;
  StreamHandle stream_;  // orders allocations and frees; carries no other work
  cudaMemPool_t pool_ = nullptr;
  std::mutex peers_mutex_;
  std::map<int, bool> peers_;  // results of OpenTo, by ordinal
  bool keeps_room_ = false;
  std::unique_ptr<Partition> large_;  // for streams of large operations; null: all SMs
};

// --- Stream ---

// Memory through which the blocks of a launch pass values to each other. It is all zeros whenever
// no kernel of the stream is running: a kernel that writes to it restores the zeros before it ends,
// so no launch has to begin with a memset.
struct Mailbox {
  // A slot consists of 16 bytes, half of which are flags. A tree has at most kTreeMaxChunks chunks,
  // and the value of a chunk (at most 56 bytes) needs at most seven slots.
  static constexpr std::size_t kSlots = 7 * 18432;
  unsigned* ticket = nullptr;
  ulonglong2* slots = nullptr;
};

class CudaStream final : public Stream {
 public:
  // `handle` is a new handle that was created on the device. Throws DeviceError. REQUIRES: device
  // outlives the stream.
  CudaStream(CudaDevice& device, StreamHandle handle);
  // Waits for the stream's work.
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  CudaDevice& device() const { return device_; }
  // Returns the handle for enqueuing work. The work runs after all earlier work of the stream.
  cudaStream_t handle() {
    busy_ = true;
    return stream_.get();
  }
  void Trim() override;
  Scalar* result() override { return static_cast<Scalar*>(result_.get()); }
  void CopyToDevice(void* device, std::span<const HostBytes> pieces) override;
  void CopyPinnedToDevice(void* device, const void* host, std::size_t bytes) override;
  void CopyToHost(void* host, const void* device, std::size_t bytes) override;
  bool ReachesPeer(Stream& peer) override;
  void CopyToPeer(Stream& peer, void* out, const void* data, std::size_t bytes) override;
  void WaitFor(Stream& other) override;
  void Zero(void* device, std::size_t bytes) override;
  void Gather(const View& view, void* out) override;
  void Count(const View& view) override;
  void Convert(const void* in, DType from, void* out, DType to, std::int64_t n) override;
  void Synchronize() override;
  double Time(const std::function<void()>& work) override;

  Mailbox mailbox();
  // ClearMailbox enqueues a memset of the mailbox, for an operation that ends before it has
  // received all values. ClearTicket clears only the mailbox's ticket, after kernels whose values
  // go to another stream's mailbox.
  void ClearMailbox();
  void ClearTicket();
  // Returns kTickets counters in device memory, which are zero whenever no kernel of the stream is
  // running. A kernel resets the counters that it has used, so no launch begins with a memset.
  static constexpr std::size_t kTickets = 4096;
  std::uint32_t* Tickets() { return static_cast<std::uint32_t*>(tickets_); }

  // Returns the cuBLAS handle that enqueues on this stream. It is created on first use. REQUIRES:
  // CublasMissing() is empty.
  cublasContext* Cublas();

 private:
  // Pinned memory through which data passes between pageable memory and the device. The event
  // `done` is recorded after the slot's last copy.
  struct Slot {
    PinnedMemory memory;
    Event done;
  };

  Slot& NextSlot();
  void FreeAll() noexcept;
  // Allocates device memory that is zero for all later work of the stream.
  void* AllocateZeros(std::size_t bytes);

  CudaDevice& device_;
  StreamHandle stream_;
  Event idle_, start_, stop_;
  PinnedMemory result_;
  Slot slots_[2];
  int next_slot_ = 0;
  void* mailbox_ = nullptr;
  void* tickets_ = nullptr;
  cublasContext* cublas_ = nullptr;
  // Whether work has been enqueued since Synchronize last waited.
  bool busy_ = false;
};

// Casts a stream of a CUDA device and makes the device current on the calling thread. Every
// strategy's launch begins with it. REQUIRES: stream belongs to a CUDA device.
inline CudaStream& Cuda(Stream& stream) {
  auto& cuda = static_cast<CudaStream&>(stream);
  cuda.device().Use();
  return cuda;
}

// Enqueues the copy of a view's elements to out, in row-major order and without gaps. REQUIRES: the
// view's device is current.
void GatherAsync(const View& view, void* out, cudaStream_t stream);

// Like GatherAsync, for the elements [first, first + count) in row-major order.
void GatherRangeAsync(const View& view, std::int64_t first, std::int64_t count, void* out,
                      cudaStream_t stream);

// Enqueues the count of a view's bytes that are not 0, which goes to result->integer. `counters`:
// Tickets of the stream. REQUIRES: the view's device is current.
void CountAsync(const View& view, std::uint32_t* counters, Scalar* result, cudaStream_t stream);

// Enqueues the conversion of n contiguous elements. REQUIRES: their device is current.
void ConvertAsync(const void* in, DType from, void* out, DType to, std::int64_t n,
                  cudaStream_t stream);

}  // namespace tessera
