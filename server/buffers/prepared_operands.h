// Prepared operands: copies that operations have made of resident operands
// (kernels/device/prepared.h) and that a device keeps for later calls with the same operand. They
// stay valid because READY buffers never change. They use the part of the device's memory limit
// that buffers do not use. A copy is forgotten when buffers or calls need its memory, when its
// buffer is gone, or when newer copies replace it. Calls do not find a forgotten copy. Its memory
// is freed when the calls that use it have ended.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/compute.h"
#include "kernels/device/prepared.h"
#include "server/buffers/charge.h"

namespace tessera {

class Buffer;

// Thread safe. Memory is allocated and freed on the caller's thread, and never while the lock is
// held.
class PreparedOperands final : public SpareMemory {
 public:
  // The size of the smallest copy that is worth keeping.
  static constexpr std::size_t kLeastBytes = 64 << 10;
  // The maximum number of entries, including entries for copies that have been seen only once.
  static constexpr std::size_t kMost = 256;
  // When copies are forgotten, buffers that need their memory wait for the calls that use the
  // copies, but no longer than this. The time begins when the copies are forgotten, so later
  // buffers, such as further buffers of the same program, do not wait again.
  static constexpr std::chrono::milliseconds kPatience{300};

  // Makes this object the device's spare memory. `budget` is the budget for the device's buffers.
  // Both arguments must outlive this object.
  PreparedOperands(Device& device, Budget& budget);
  ~PreparedOperands() override;
  PreparedOperands(const PreparedOperands&) = delete;
  PreparedOperands& operator=(const PreparedOperands&) = delete;

  // Held while the allocation of a buffer that was refused for lack of memory is retried. While a
  // claim exists, no new copies are kept, so the memory that it frees is left for buffers.
  class Claim {
   public:
    explicit Claim(PreparedOperands& of);
    ~Claim();
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

    // These functions wait for calls that use copies, but no longer than kPatience. REQUIRES: the
    // caller holds no lock and nothing that calls need in order to end, and its own call has not
    // been given any copy.
    //
    // Forgets the least recently used copies until the budget has `bytes` bytes free. Forgets
    // copies in use only if the unused ones are not enough, and forgets nothing if all copies
    // together are not enough.
    void MakeRoom(std::uint64_t bytes);
    // Forgets all copies. Waits until some memory has been freed since frees() returned `frees`, or
    // until there is none to free.
    void MakeAllRoom(std::uint64_t frees);

   private:
    PreparedOperands& of_;
  };
  // The number of copies freed so far.
  std::uint64_t frees() const override { return frees_.load(std::memory_order_acquire); }

  // Forgets all copies without waiting.
  void Clear() noexcept override;
  // Forgets all copies. Their memory is freed when the returned pointers are destroyed.
  std::vector<std::shared_ptr<const void>> ForgetAll();
  // Forgets the copies of buffers that are gone. Their memory is freed when the returned pointers
  // are destroyed.
  std::vector<std::shared_ptr<const void>> Sweep();
  // The size of all copies, as charged to the budget.
  std::uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  enum class State {
    kSeen,    // seen once; has no memory
    kMaking,  // being made by a call that has not ended
    kReady,
  };
  struct Entry {
    explicit Entry(PreparedOperands& of) : owner(of) {}
    ~Entry() { Free(); }
    // Frees the memory, and only then its charge. REQUIRES: the caller does not hold the mutex.
    void Free();
    std::uint64_t bytes() const { return charge.amount(); }
    PreparedOperands& owner;
    std::weak_ptr<const Buffer> buffer;
    Preparation what;
    State state = State::kSeen;
    Charge charge;  // changes only under the mutex
    Memory memory;
  };
  using Entries = std::list<std::shared_ptr<Entry>>;  // the most recently used first

 public:
  // Keeps the copies that the operations of one call prepare. The operations run one after another
  // on one stream of the device. A copy is not kept when it is seen for the first time, while
  // another call is making it, or if there is no memory for it.
  class Call final : public Keeper {
   public:
    // Returns the call's operand at the address, or null.
    using FindBuffer = absl::FunctionRef<std::shared_ptr<const Buffer>(const void*)>;
    // The arguments, and the objects that `find` refers to, must outlive this object.
    Call(PreparedOperands& of, Stream& stream, FindBuffer find);
    // Forgets copies that are not finished. REQUIRES: the stream's work is done.
    ~Call() override;
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    PreparedMemory Keep(const Preparation& what, std::size_t bytes) override;
    // Ends an operation. `done` says whether all of its work is done or enqueued. If so, the next
    // operation on the stream can use the copies that it made; otherwise, these copies are
    // forgotten. Returns the number of bytes in the copies that the operation found.
    std::uint64_t EndOperation(bool done);
    // Makes the operations' copies available to all calls. REQUIRES: the stream has been
    // synchronised, and no operation failed on the device.
    void Finish();

   private:
    // Forgets these entries. REQUIRES: none of them is ready, and the caller holds the mutex.
    void Forget(std::vector<std::shared_ptr<Entry>>& entries);

    PreparedOperands& of_;
    Stream& stream_;
    const FindBuffer find_;
    std::vector<std::shared_ptr<Entry>> making_;  // being made by this operation
    std::vector<std::shared_ptr<Entry>> made_;    // made by earlier operations
    std::vector<std::shared_ptr<Entry>> found_;
    std::uint64_t found_bytes_ = 0;
  };

 private:
  using Doomed = std::vector<std::shared_ptr<const void>>;
  // Returns the entry of a copy and moves it to the front. If there is none, adds one in state
  // kSeen, and returns null. The caller holds the mutex.
  std::shared_ptr<Entry> Find(const std::shared_ptr<const Buffer>& buffer, const Preparation& what,
                              Doomed& doomed);
  // Allocates memory for an entry. Returns false if there is too little.
  bool Allocate(Entry& entry, std::size_t bytes);
  // The caller of these functions holds the mutex.
  //
  // Notes that entries with memory have left the list, which restarts the grace period (kPatience).
  void NoteForgotten();
  // Moves the least recently used entries from the list to `doomed` until the moved entries have at
  // least `bytes` bytes. Skips entries that a call uses unless used_too is true. Returns the size
  // of the moved entries.
  std::uint64_t Unlink(std::uint64_t bytes, bool used_too, Entries& doomed);
  // Waits until memory has been freed since frees() returned `frees`, or until no entry has memory.
  // Returns false if kPatience passes before that.
  bool AwaitFree(std::unique_lock<std::mutex>& lock, std::uint64_t frees);

  Device& device_;
  Budget& budget_;
  std::mutex mutex_;
  std::condition_variable freed_;
  // These change only under the mutex.
  std::atomic<std::uint64_t> bytes_{0};  // memory of all entries, including forgotten ones
  std::atomic<std::uint64_t> frees_{0};
  int claims_ = 0;
  // The end of the grace period (kPatience) for the calls that use forgotten copies.
  std::chrono::steady_clock::time_point patience_ends_{};
  Entries entries_;
};

}  // namespace tessera
