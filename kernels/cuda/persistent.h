// A kernel that stays on the device for a while after its work, and polls host memory for more: what
// it finds there begins without a launch. A launch and the wait for its end take 9 us on an H200,
// after 10 ms of rest 40; work for a kernel that stays takes 3.5 us of both (medians of
// 2000, one block that folds two operands of 16 KiB; driver 580, 2026-11-24). It holds one block's
// share of an SM, and leaves when anybody launches another kernel. Included by .cu files only.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>

#include "kernels/cuda/cuda.h"

namespace tessera {

// What the kernel is asked to do: a reduction of n elements of one operand or two.
struct PersistentWork {
  const void* x[2];
  std::int32_t n;
  std::uint16_t op;
  std::uint16_t mirror;
};

// In page-locked memory between the host and one kernel.
struct PersistentDoor {
  // Host to kernel: the work in words of 16 bytes, which a thread reads at once, each with the ticket
  // of the work behind its part.
  struct Word {
    std::uint32_t part[3];
    std::uint32_t ticket;
  };
  static constexpr int kWords = sizeof(PersistentWork) / sizeof(Word::part);
  static_assert(sizeof(PersistentWork) == kWords * sizeof(Word::part));
  alignas(64) Word words[kWords];
  // Kernel to host: the ticket of the last work that is done, and which kernel has stopped looking.
  alignas(64) std::uint32_t done;
  std::uint32_t left;
};

// What a kernel begins with.
struct PersistentStart {
  PersistentDoor* door;
  PersistentWork work;
  Scalar* result;  // where results go
  std::uint32_t ticket;
  std::uint32_t number;             // of the kernel, for PersistentDoor::left
  const std::uint32_t* dismissals;  // it leaves when they are others than
  std::uint32_t dismissed;
  std::uint32_t linger_ns;  // and when it has waited for so long
};

// One thread at a time. Throws DeviceError.
class PersistentKernel {
 public:
  // A kernel that does the work of its start and of its door, one after the other.
  using Entry = void (*)(PersistentStart);

  // device and result outlive it. linger: how long a kernel waits for more, a second at most.
  PersistentKernel(const CudaDevice& device, Scalar& result, std::chrono::microseconds linger);
  // Waits until the kernel has left.
  ~PersistentKernel();
  PersistentKernel(const PersistentKernel&) = delete;
  PersistentKernel& operator=(const PersistentKernel&) = delete;

  // Begins the work, behind what has been begun before. Blocks of `threads`.
  void Begin(Entry entry, unsigned threads, const PersistentWork& work);
  // Until what has been begun is done, if anything has.
  void Wait();

 private:
  PersistentDoor& door() const { return *static_cast<PersistentDoor*>(door_.get()); }
  bool gone() const;
  bool done() const;
  void Launch();
  void Ring();

  const CudaDevice& device_;
  Scalar& result_;
  const std::uint32_t linger_ns_;
  StreamHandle stream_;
  Event end_;
  PinnedMemory door_;
  // The kernel that runs, or ran last, and what it was given last.
  Entry entry_ = nullptr;
  unsigned threads_ = 0;
  PersistentWork work_ = {};
  std::uint32_t ticket_ = 0;
  std::uint32_t number_ = 0;
  bool waiting_ = false;
};

// Begins the fold of fixed_tree, with its bits, on the stream's persistent kernel. False, and nothing
// has happened, unless there is one and the problem suits it: contiguous operands of up to
// kBatchBytes (kernels/batch.h), and no wish about the launch.
bool BeginPersistent(const DotProblem& problem, CudaStream& stream);
bool BeginPersistent(const ReduceProblem& problem, CudaStream& stream);

}  // namespace tessera
