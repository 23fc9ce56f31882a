#include "kernels/cuda/persistent.h"

#include <algorithm>
#include <atomic>

namespace tessera {
namespace {

// Small work is done within this time unless the GPU has other work; a thread that waits longer
// sleeps.
constexpr std::chrono::microseconds kPollTime{50};

// What fits 32 bits of nanoseconds, and is longer than anybody should want.
constexpr std::chrono::microseconds kLongestLinger = std::chrono::seconds(1);

std::uint32_t Read(std::uint32_t& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}

}  // namespace

PersistentKernel::PersistentKernel(const CudaDevice& device, Scalar& result,
                                   std::chrono::microseconds linger)
    : device_(device),
      result_(result),
      linger_ns_(static_cast<std::uint32_t>(
          std::chrono::nanoseconds(std::min(linger, kLongestLinger)).count())) {
  device_.Use();
  stream_ = device_.MakeHandle();
  end_ = MakeEvent(/*timed=*/false);
  door_ = MakePinnedMemory(sizeof(PersistentDoor));
  door() = {};
}

PersistentKernel::~PersistentKernel() {
  device_.DismissPersistent();
  if (cudaSetDevice(device_.ordinal()) != cudaSuccess ||
      cudaStreamSynchronize(stream_.get()) != cudaSuccess)
    cudaGetLastError();
}

bool PersistentKernel::gone() const { return Read(door().left) == number_; }
bool PersistentKernel::done() const { return Read(door().done) == ticket_; }

void PersistentKernel::Begin(Entry entry, unsigned threads, const PersistentWork& work) {
  Wait();
  ++ticket_;
  work_ = work;
  if (entry == entry_ && threads == threads_ && !gone()) {
    Ring();
  } else {
    if (entry_ != nullptr && !gone()) device_.DismissPersistent();  // the new one comes behind it
    entry_ = entry;
    threads_ = threads;
    Launch();
  }
  waiting_ = true;
}

void PersistentKernel::Launch() {
  ++number_;
  entry_<<<1, threads_, 0, stream_.get()>>>(
      PersistentStart{.door = &door(),
                      .work = work_,
                      .result = &result_,
                      .ticket = ticket_,
                      .number = number_,
                      .dismissals = device_.dismissals(),
                      .dismissed = Read(*device_.dismissals()),
                      .linger_ns = linger_ns_});
  CUDA_CHECK_LAUNCH(PersistentKernel);
}

void PersistentKernel::Ring() {
  unsigned char bytes[sizeof work_];
  std::memcpy(bytes, &work_, sizeof bytes);
  for (int i = 0; i < PersistentDoor::kWords; ++i) {
    PersistentDoor::Word& word = door().words[i];
    std::memcpy(word.part, bytes + i * sizeof word.part, sizeof word.part);
    std::atomic_ref(word.ticket).store(ticket_, std::memory_order_release);
  }
}

void PersistentKernel::Wait() {
  if (!waiting_) return;
  waiting_ = false;  // whatever happens
  const auto end = std::chrono::steady_clock::now() + kPollTime;
  while (!done()) {
    const bool late = std::chrono::steady_clock::now() > end;
    if (!late && !gone()) continue;
    // The kernel has left and may have missed the work; or it has not begun, since others hold the
    // GPU, and shall leave right behind its work.
    device_.Use();
    device_.DismissPersistent();
    CUDA_CHECK(cudaEventRecord(end_.get(), stream_.get()));
    CUDA_CHECK(cudaEventSynchronize(end_.get()));
    if (!done()) Launch();
  }
}

}  // namespace tessera
