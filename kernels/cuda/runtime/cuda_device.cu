// A GPU as a device, and its streams. Each stream is a CUDA stream with scratch memory, staging
// slots and a result cell.
#include "kernels/cuda/runtime/cuda_device.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda_profiler_api.h"
#include "kernels/cuda/runtime/cublas_loader.h"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/partition.h"
#include "kernels/cuda/runtime/shards.h"

namespace tessera {
namespace {

// A PCIe 5 link transfers one slot in about 20 us, and a core fills a slot in about 90 us. The time
// to start a copy is negligible in comparison. A slot stays in the core's cache.
constexpr std::size_t kSlotBytes = std::size_t{1} << 20;
// The mailbox's ticket has its own sectors, because the slots are read while it is written.
constexpr std::size_t kTicketBytes = 256;
constexpr std::size_t kMailboxBytes = kTicketBytes + Mailbox::kSlots * sizeof(ulonglong2);
// The pool rounds sizes up to multiples of this number of bytes.
constexpr std::size_t kPoolUnit = 512;
// A thread polls for this long and then sleeps, so that streams do not each keep a core busy. Small
// operations finish within this time, and waking a sleeping thread would take about as long again.
constexpr std::chrono::microseconds kPollTime{50};
// The last kTailBytes of a long copy take a third of a millisecond over PCIe 5, which is long
// enough for a sleeping thread to wake up: on some virtual machines, waking up takes 250 us.
constexpr std::size_t kTailBytes = std::size_t{16} << 20;
constexpr std::chrono::microseconds kTailPollTime{500};

DeviceError::Kind KindOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return DeviceError::Kind::kOutOfMemory;
    // Errors after which "the process must be terminated and relaunched" (CUDA runtime API,
    // cudaError_t), hardware errors, and errors of a context that has been destroyed.
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorExternalDevice:
    case cudaErrorContextIsDestroyed:
    case cudaErrorDeviceUninitialized:
    case cudaErrorCudartUnloading:
    case cudaErrorMpsClientTerminated:
    case cudaErrorMpsRpcFailure:
    case cudaErrorUnknown:
      return DeviceError::Kind::kLost;
    default:
      return DeviceError::Kind::kFailed;
  }
}

// Calls query() until it returns something other than "not ready", but at most for `time`. Returns
// false if the time runs out.
template <class Query>
bool Poll(Query query, std::chrono::microseconds time = kPollTime) {
  const auto deadline = std::chrono::steady_clock::now() + time;
  do {
    const cudaError_t status = query();
    if (status != cudaErrorNotReady) {
      CheckCuda(status, "work on the stream");
      return true;
    }
    cudaGetLastError();  // "not ready" is not an error
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// Whether the copy engines can read and write this host memory directly.
bool IsPinned(const void* host) {
  cudaPointerAttributes attributes{};
  CUDA_CHECK(cudaPointerGetAttributes(&attributes, host));
  return attributes.type == cudaMemoryTypeHost;
}

void Wait(const Event& event) {
  if (!Poll([&] { return cudaEventQuery(event.get()); }))
    CUDA_CHECK(cudaEventSynchronize(event.get()));
}

// Copies from or to page-locked memory. If the copy is long, the thread waits for it and wakes up
// shortly before the end, so that the next copy can begin immediately.
void CopyPinned(void* out, const void* data, std::size_t bytes, cudaMemcpyKind kind,
                cudaStream_t stream, const Event& event) {
  const std::size_t head = bytes > 2 * kTailBytes ? bytes - kTailBytes : 0;
  if (head > 0) {
    CopyByShards(out, data, head, kind, stream);
    CUDA_CHECK(cudaEventRecord(event.get(), stream));
  }
  CopyByShards(static_cast<char*>(out) + head, static_cast<const char*>(data) + head, bytes - head,
               kind, stream);
  if (head == 0) return;
  CUDA_CHECK(cudaEventSynchronize(event.get()));
  Poll([&] { return cudaStreamQuery(stream); }, kTailPollTime);
}

}  // namespace

void ThrowCudaError(cudaError_t error, const char* call, std::uint64_t requested) {
  cudaGetLastError();
  throw DeviceError(KindOf(error), call, cudaGetErrorName(error), requested);
}

// --- Owners ---

void CudaDeleter::operator()(cudaStream_t stream) const noexcept {
  if (cudaStreamDestroy(stream) != cudaSuccess) cudaGetLastError();
}

void CudaDeleter::operator()(cudaEvent_t event) const noexcept {
  if (cudaEventDestroy(event) != cudaSuccess) cudaGetLastError();
}

void CudaDeleter::operator()(void* pinned) const noexcept {
  if (cudaFreeHost(pinned) != cudaSuccess) cudaGetLastError();
}

StreamHandle MakeStreamHandle(bool first) {
  int usual = 0, most = 0;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&usual, &most));
  cudaStream_t stream = nullptr;
  CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, first ? most : usual));
  return StreamHandle(stream);
}

Event MakeEvent(bool timed) {
  const unsigned flags = cudaEventBlockingSync | (timed ? 0 : cudaEventDisableTiming);
  cudaEvent_t event = nullptr;
  CUDA_CHECK(cudaEventCreateWithFlags(&event, flags));
  return Event(event);
}

PinnedMemory MakePinnedMemory(std::size_t bytes) {
  // With unified addressing, mapped memory has the same address on the device and on the host.
  void* memory = nullptr;
  const cudaError_t error =
      cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw DeviceError(DeviceError::Kind::kOutOfHostMemory, "cudaHostAlloc", cudaGetErrorName(error),
                      bytes);
  }
  CheckCuda(error, "cudaHostAlloc");
  return PinnedMemory(memory);
}

// --- Device ---

int CudaDeviceCount() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

std::string CudaUnavailableReason() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess) return count > 0 ? "" : "there is no GPU";
  cudaGetLastError();
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) return "there is no CUDA driver";
  return std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
}

std::unique_ptr<Device> OpenCudaDevice(int ordinal) {
  return std::make_unique<CudaDevice>(ordinal);
}

namespace {

std::mutex open_mutex;
std::multiset<int>& OpenDevices() {
  static std::multiset<int> ordinals;
  return ordinals;
}

}  // namespace

std::vector<int> CudaDevice::OpenOrdinals() {
  const std::lock_guard lock(open_mutex);
  const std::set<int> ordinals(OpenDevices().begin(), OpenDevices().end());
  return {ordinals.begin(), ordinals.end()};
}

CudaDevice::CudaDevice(int ordinal) : ordinal_(ordinal) {
  Use();
  cudaDeviceProp properties{};
  CUDA_CHECK(cudaGetDeviceProperties(&properties, ordinal));
  info_.name = "cuda:" + std::to_string(ordinal);
  info_.model = properties.name;
  info_.backend = Backend::kCuda;
  info_.compute_capability = 10 * properties.major + properties.minor;
  info_.multiprocessors = properties.multiProcessorCount;
  info_.memory_bytes = properties.totalGlobalMem;
  info_.shard_unit = kCudaShardUnit;
  char pci_bus_id[32];
  CUDA_CHECK(cudaDeviceGetPCIBusId(pci_bus_id, sizeof pci_bus_id, ordinal));
  info_.pci_bus_id = pci_bus_id;
  stream_ = MakeStreamHandle();

  cudaMemPoolProps pool{};
  pool.allocType = cudaMemAllocationTypePinned;
  pool.location.type = cudaMemLocationTypeDevice;
  pool.location.id = ordinal;
  CUDA_CHECK(cudaMemPoolCreate(&pool_, &pool));
  // The pool keeps unused memory. By default it would return that memory to the driver at every
  // synchronisation.
  std::uint64_t threshold = UINT64_MAX;
  const cudaError_t error =
      cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &threshold);
  if (error != cudaSuccess) {
    cudaMemPoolDestroy(pool_);
    ThrowCudaError(error, "cudaMemPoolSetAttribute(cudaMemPoolAttrReleaseThreshold)");
  }
  const std::lock_guard lock(open_mutex);
  OpenDevices().insert(ordinal);
}

CudaDevice::~CudaDevice() {
  {
    const std::lock_guard lock(open_mutex);
    OpenDevices().erase(OpenDevices().find(ordinal_));
  }
  if (cudaSetDevice(ordinal_) != cudaSuccess ||
      cudaStreamSynchronize(stream_.get()) != cudaSuccess ||
      cudaMemPoolDestroy(pool_) != cudaSuccess)
    cudaGetLastError();
}

std::uint64_t CudaDevice::FreeBytes() const {
  std::size_t free = 0, total = 0;
  std::uint64_t reserved = 0, used = 0;
  cudaError_t error = cudaSetDevice(ordinal_);
  if (error == cudaSuccess) error = cudaMemGetInfo(&free, &total);
  if (error == cudaSuccess)
    error = cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &reserved);
  if (error == cudaSuccess)
    error = cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrUsedMemCurrent, &used);
  if (error != cudaSuccess) {
    cudaGetLastError();
    if (KindOf(error) == DeviceError::Kind::kLost) MarkLost();
    return 0;
  }
  // Other threads may use the pool between the two queries, so the difference may be negative.
  return free + (reserved > used ? reserved - used : 0);
}

void CudaDevice::Probe() {
  Use();
  // This stream has next to no work, so the query returns immediately. A failure that ended the
  // context is reported by the next query on any stream.
  const cudaError_t status = cudaStreamQuery(stream_.get());
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
  } else {
    CheckCuda(status, "cudaStreamQuery");
  }
}

void CudaDevice::SetProfiling(bool on) noexcept {
  if (cudaSetDevice(ordinal_) != cudaSuccess ||
      (on ? cudaProfilerStart() : cudaProfilerStop()) != cudaSuccess)
    cudaGetLastError();
}

std::size_t CudaDevice::AllocationBytes(std::size_t bytes) const {
  return bytes > SIZE_MAX - kPoolUnit ? SIZE_MAX : (bytes + kPoolUnit - 1) / kPoolUnit * kPoolUnit;
}

void CudaDevice::Trim() {
  Use();
  CUDA_CHECK(cudaMemPoolTrimTo(pool_, 0));
}

bool CudaDevice::OpenTo(const CudaDevice& peer) {
  if (peer.ordinal() == ordinal_) return true;
  const std::lock_guard lock(peers_mutex_);
  if (const auto known = peers_.find(peer.ordinal()); known != peers_.end()) return known->second;
  int possible = 0;
  CUDA_CHECK(cudaDeviceCanAccessPeer(&possible, peer.ordinal(), ordinal_));
  if (possible != 0) {
    Use();
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = peer.ordinal();
    access.flags = cudaMemAccessFlagsProtReadWrite;
    CUDA_CHECK(cudaMemPoolSetAccess(pool_, &access, 1));
  }
  // After an exception above there is no entry, so the next call retries: the cause may have been a
  // temporary lack of memory.
  return peers_[peer.ordinal()] = possible != 0;
}

void* CudaDevice::Allocate(std::size_t bytes) {
  Use();
  void* memory = nullptr;
  cudaError_t error = cudaMallocFromPoolAsync(&memory, bytes, pool_, stream_.get());
  if (error == cudaErrorMemoryAllocation) {
    // The pool may have enough unused memory, but in fragments. The driver can combine fragments
    // that the pool returns to it.
    cudaGetLastError();
    Trim();
    error = cudaMallocFromPoolAsync(&memory, bytes, pool_, stream_.get());
  }
  if (error != cudaSuccess) ThrowCudaError(error, "cudaMallocFromPoolAsync", bytes);
  // After this wait, all streams can use the memory, not only later work on this stream.
  CUDA_CHECK(cudaStreamSynchronize(stream_.get()));
  return memory;
}

void CudaDevice::Free(void* memory) noexcept {
  // After the wait the memory counts as free. The wait is short, because the stream carries no
  // kernels or copies.
  if (cudaSetDevice(ordinal_) != cudaSuccess ||
      cudaFreeAsync(memory, stream_.get()) != cudaSuccess ||
      cudaStreamSynchronize(stream_.get()) != cudaSuccess)
    cudaGetLastError();
}

std::unique_ptr<ShardedMemory> CudaDevice::AllocateShards(std::span<const Shard> shards) {
  return MakeCudaShards(shards);
}

StagingMemory CudaDevice::MakeStaging(std::size_t bytes) {
  Use();
  return {MakePinnedMemory(bytes).release(), [](void* memory) noexcept { CudaDeleter()(memory); }};
}

HostRegistration CudaDevice::RegisterHost(void* memory, std::size_t bytes) {
  const auto unregister = [](void* registered) noexcept {
    if (cudaHostUnregister(registered) != cudaSuccess) cudaGetLastError();
  };
  Use();
  const cudaError_t error = cudaHostRegister(memory, bytes, cudaHostRegisterPortable);
  if (error == cudaErrorHostMemoryAlreadyRegistered) {
    // Another GPU has registered the memory, and a registration applies to all GPUs.
    cudaGetLastError();
    return {nullptr, unregister};
  }
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw DeviceError(DeviceError::Kind::kOutOfHostMemory, "cudaHostRegister",
                      cudaGetErrorName(error), bytes);
  }
  CheckCuda(error, "cudaHostRegister");
  return {memory, unregister};
}

std::unique_ptr<Stream> CudaDevice::MakeStream() {
  Use();
  return std::make_unique<CudaStream>(*this, MakeHandle());
}

void CudaDevice::KeepRoom() {
  Use();
  keeps_room_ = true;
  try {
    large_ = std::make_unique<Partition>(ordinal_);
    info_.multiprocessors = large_->multiprocessors();
  } catch (const DeviceError& error) {
    if (error.kind() != DeviceError::Kind::kUnsupported) throw;
    // Streams from MakeStream still have priority over large streams, even without a partition.
  }
}

StreamHandle CudaDevice::MakeLargeHandle() const {
  return large_ != nullptr ? large_->MakeStream() : MakeStreamHandle();
}

std::unique_ptr<Stream> CudaDevice::MakeLargeStream() {
  Use();
  return std::make_unique<CudaStream>(*this, MakeLargeHandle());
}

// --- Stream ---

CudaStream::CudaStream(CudaDevice& device, StreamHandle handle)
    : Stream(device,
             {[&device](std::size_t bytes) {
                return device.WithSpare([&] { return device.Allocate(bytes); });
              },
              [&device](void* memory) { device.Free(memory); }},
             {[&device](std::size_t bytes) {
                device.Use();
                return MakePinnedMemory(bytes).release();
              },
              [](void* memory) { CudaDeleter()(memory); }}),
      device_(device),
      stream_(std::move(handle)) {
  device_.Use();
  idle_ = MakeEvent(/*timed=*/false);
  start_ = MakeEvent(/*timed=*/true);
  stop_ = MakeEvent(/*timed=*/true);
  result_ = MakePinnedMemory(sizeof(Scalar));
  *result() = Scalar{};
  // All memory of fixed size is allocated here. Page-locking waits for work that is running on the
  // device, and no request should have to wait for such work.
  for (Slot& slot : slots_) {
    slot.done = MakeEvent(/*timed=*/false);
    slot.memory = MakePinnedMemory(kSlotBytes);
  }
  try {
    mailbox_ = AllocateZeros(kMailboxBytes);
    tickets_ = AllocateZeros(kTickets * sizeof(std::uint32_t));
    Synchronize();
  } catch (...) {
    FreeAll();
    throw;
  }
}

CudaStream::~CudaStream() {
  try {
    device_.Use();
    Synchronize();
  } catch (const DeviceError&) {
    // The device is lost. Nothing is running on it, and the calls below fail silently.
  }
  if (cublas_ != nullptr) LoadCublas()->destroy(cublas_);
  FreeAll();
}

void CudaStream::FreeAll() noexcept {
  if (tickets_ != nullptr) device_.Free(tickets_);
  if (mailbox_ != nullptr) device_.Free(mailbox_);
}

void CudaStream::Trim() {
  device_.Use();
  // Usually, Synchronize returns immediately. After a failed request, it keeps a kernel that is
  // still running from writing to freed memory or to the next request's result.
  std::exception_ptr failure;
  try {
    Synchronize();
  } catch (const DeviceError&) {
    failure = std::current_exception();  // the charges are still returned
  }
  Stream::Trim();
  if (failure != nullptr) std::rethrow_exception(failure);
}

CudaStream::Slot& CudaStream::NextSlot() {
  Slot& slot = slots_[next_slot_];
  next_slot_ = 1 - next_slot_;
  return slot;
}

void CudaStream::CopyToDevice(void* device, std::span<const HostBytes> pieces) {
  device_.Use();
  auto* to = static_cast<char*>(device);
  std::size_t begin = 0;  // offset within pieces.front()
  while (!pieces.empty()) {
    Slot& slot = NextSlot();
    Wait(slot.done);  // the device may still be reading the slot's previous data
    auto* staged = static_cast<char*>(slot.memory.get());
    std::size_t size = 0;
    while (!pieces.empty() && size < kSlotBytes) {
      const HostBytes& piece = pieces.front();
      const std::size_t part = std::min(piece.size - begin, kSlotBytes - size);
      if (part > 0) std::memcpy(staged + size, static_cast<const char*>(piece.data) + begin, part);
      size += part;
      begin += part;
      if (begin == piece.size) {
        pieces = pieces.subspan(1);
        begin = 0;
      }
    }
    if (size == 0) break;
    CopyByShards(to, staged, size, cudaMemcpyHostToDevice, handle());
    CUDA_CHECK(cudaEventRecord(slot.done.get(), handle()));
    to += size;
  }
}

void CudaStream::CopyPinnedToDevice(void* device, const void* host, std::size_t bytes) {
  device_.Use();
  CopyPinned(device, host, bytes, cudaMemcpyHostToDevice, handle(), idle_);
}

void CudaStream::CopyToHost(void* host, const void* device, std::size_t bytes) {
  device_.Use();
  if (bytes > 0 && IsPinned(host)) {
    CopyPinned(host, device, bytes, cudaMemcpyDeviceToHost, handle(), idle_);
    Synchronize();
    return;
  }
  auto* to = static_cast<char*>(host);
  const auto* from = static_cast<const char*>(device);
  // The slot and the size of the copy that was started last.
  Slot* arriving = nullptr;
  std::size_t arriving_size = 0;
  while (bytes > 0 || arriving != nullptr) {
    Slot* started = nullptr;
    const std::size_t size = std::min(bytes, kSlotBytes);
    if (size > 0) {
      // The copy need not wait for the slot. Any copy to the device that reads the slot is earlier
      // on the stream, and the previous round has already copied the slot's last data to the host.
      started = &NextSlot();
      CopyByShards(started->memory.get(), from, size, cudaMemcpyDeviceToHost, handle());
      CUDA_CHECK(cudaEventRecord(started->done.get(), handle()));
      from += size;
      bytes -= size;
    }
    if (arriving != nullptr) {
      Wait(arriving->done);
      std::memcpy(to, arriving->memory.get(), arriving_size);
      to += arriving_size;
    }
    arriving = started;
    arriving_size = size;
  }
}

bool CudaStream::ReachesPeer(Stream& peer) {
  auto* other = dynamic_cast<CudaStream*>(&peer);
  return other != nullptr && other->device().OpenTo(device_) && device_.OpenTo(other->device());
}

void CudaStream::CopyToPeer(Stream& peer, void* out, const void* data, std::size_t bytes) {
  const int to = static_cast<CudaStream&>(peer).device().ordinal();
  device_.Use();
  ForShardParts(out, to, data, device_.ordinal(), bytes,
                [&](void* written, const void* read, std::size_t part, int writer, int reader) {
                  CUDA_CHECK(cudaMemcpyPeerAsync(written, writer, read, reader, part, handle()));
                });
}

void CudaStream::WaitFor(Stream& other) {
  auto& before = static_cast<CudaStream&>(other);
  before.device_.Use();
  CUDA_CHECK(cudaEventRecord(before.idle_.get(), before.handle()));
  device_.Use();
  CUDA_CHECK(cudaStreamWaitEvent(handle(), before.idle_.get(), 0));
}

void CudaStream::Zero(void* device, std::size_t bytes) {
  device_.Use();
  ForShardParts(device, 0, device, 0, bytes,
                [&](void* part, const void*, std::size_t size, int, int) {
                  CUDA_CHECK(cudaMemsetAsync(part, 0, size, handle()));
                });
}

void CudaStream::Gather(const View& view, void* out) {
  device_.Use();
  GatherAsync(view, out, handle());
}

void CudaStream::Count(const View& view) {
  device_.Use();
  CountAsync(view, Tickets(), result(), handle());
}

void CudaStream::Convert(const void* in, DType from, void* out, DType to, std::int64_t n) {
  device_.Use();
  ConvertAsync(in, from, out, to, n, handle());
}

void CudaStream::Synchronize() {
  if (!busy_) return;
  device_.Use();
  if (!Poll([&] { return cudaStreamQuery(stream_.get()); })) {
    CUDA_CHECK(cudaEventRecord(idle_.get(), stream_.get()));
    CUDA_CHECK(cudaEventSynchronize(idle_.get()));
  }
  busy_ = false;
}

double CudaStream::Time(const std::function<void()>& work) {
  device_.Use();
  CUDA_CHECK(cudaEventRecord(start_.get(), handle()));
  work();
  device_.Use();
  CUDA_CHECK(cudaEventRecord(stop_.get(), handle()));
  Synchronize();
  float milliseconds = 0;
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start_.get(), stop_.get()));
  return 1e3 * static_cast<double>(milliseconds);
}

Mailbox CudaStream::mailbox() {
  auto* bytes = static_cast<unsigned char*>(mailbox_);
  return {reinterpret_cast<unsigned*>(bytes), reinterpret_cast<ulonglong2*>(bytes + kTicketBytes)};
}

void CudaStream::ClearMailbox() {
  CUDA_CHECK(cudaMemsetAsync(mailbox_, 0, kMailboxBytes, handle()));
}

void CudaStream::ClearTicket() { CUDA_CHECK(cudaMemsetAsync(mailbox_, 0, kTicketBytes, handle())); }

void* CudaStream::AllocateZeros(std::size_t bytes) {
  void* memory = device_.WithSpare([&] { return device_.Allocate(bytes); });
  const cudaError_t error = cudaMemsetAsync(memory, 0, bytes, handle());
  if (error != cudaSuccess) {
    device_.Free(memory);
    ThrowCudaError(error, "cudaMemsetAsync");
  }
  return memory;
}

cublasContext* CudaStream::Cublas() {
  if (cublas_ == nullptr) {
    const CublasApi& api = *LoadCublas();
    cublasHandle_t handle = nullptr;
    if (api.create(&handle) != CUBLAS_STATUS_SUCCESS) {
      // cuBLAS allocates its workspace from the driver. Returns spare memory and the pool's unused
      // memory to the driver, and retries.
      cudaGetLastError();
      device_.FreeSpare();
      device_.Trim();
      CUBLAS_CHECK(api.create(&handle));
    }
    cublas_ = handle;
    CUBLAS_CHECK(api.set_stream(handle, stream_.get()));
  }
  this->handle();  // marks the stream as busy: the library enqueues work
  return cublas_;
}

}  // namespace tessera
