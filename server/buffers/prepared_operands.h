// Copies that operations have prepared of resident operands (kernels/device/prepared.h), kept on a
// device for the next call with the same operand. They stay valid because READY buffers never
// change. They take the memory that buffers leave of the device's limit. A copy is forgotten when
// buffers or calls need the memory, when its own buffer is gone, or when newer copies are to be
// kept. No call finds a forgotten copy; its memory is freed when the calls that use it have ended.
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

// Thread safe. Memory is allocated and freed on the caller's thread, never under the lock.
class PreparedOperands final : public SpareMemory {
 public:
  // Smaller copies are not worth keeping.
  static constexpr std::size_t kLeastBytes = 64 << 10;
  // The number of copies that are remembered, whether kept or only seen once.
  static constexpr std::size_t kMost = 256;
  // After copies have been forgotten, buffers that need their memory wait this long for the calls
  // that use them. The time runs for all buffers together: a later buffer, or the next one of a
  // program, does not wait for it again.
  static constexpr std::chrono::milliseconds kPatience{300};

  // Becomes the device's spare memory. budget: what the device's buffers are charged to. Both
  // arguments outlive this object.
  PreparedOperands(Device& device, Budget& budget);
  ~PreparedOperands() override;
  PreparedOperands(const PreparedOperands&) = delete;
  PreparedOperands& operator=(const PreparedOperands&) = delete;

  // Held for a buffer that was refused and may be tried again. While a claim exists, nothing new is
  // kept, so what it frees is left for buffers.
  class Claim {
   public:
    explicit Claim(PreparedOperands& of);
    ~Claim();
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

    // These wait for calls that use copies, at most kPatience. REQUIRES: the caller holds no lock
    // and nothing that calls need in order to end, and its own call has not been given any copy.
    //
    // Forgets the least recently used copies until the budget has room for `bytes`. It takes copies
    // in use only if the others do not suffice, and forgets nothing if all together would not
    // suffice.
    void MakeRoom(std::uint64_t bytes);
    // Forgets all copies and waits until some memory has been freed since frees() returned `frees`,
    // if there is any to free.
    void MakeAllRoom(std::uint64_t frees);

   private:
    PreparedOperands& of_;
  };
  // The number of copies freed so far.
  std::uint64_t frees() const override { return frees_.load(std::memory_order_acquire); }

  // Forgets all copies without waiting.
  void Clear() noexcept override;
  // Forgets all copies. Their memory is freed with the returned pointers.
  std::vector<std::shared_ptr<const void>> ForgetAll();
  // Forgets the copies of buffers that are gone. Their memory is freed with the returned pointers.
  std::vector<std::shared_ptr<const void>> Sweep();
  // Bytes that the copies take of the budget.
  std::uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  enum class State {
    kSeen,    // once; has no memory
    kMaking,  // by a call that has not ended
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
  // Keeps what the operations of one call prepare, which run one after another on one stream of the
  // device. It keeps nothing that is seen for the first time, that another call is making, or that
  // there is no memory for.
  class Call final : public Keeper {
   public:
    // Returns the operand of the call that has the address, or null.
    using FindBuffer = absl::FunctionRef<std::shared_ptr<const Buffer>(const void*)>;
    // The arguments, and what `find` refers to, outlive it.
    Call(PreparedOperands& of, Stream& stream, FindBuffer find);
    // Forgets copies that are not finished. REQUIRES: the stream's work is done.
    ~Call() override;
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    PreparedMemory Keep(const Preparation& what, std::size_t bytes) override;
    // Ends an operation. done: whether all of its work is done or enqueued, so that the next
    // operation on the stream can use what it made; otherwise that is forgotten. Returns the bytes
    // of copies that the operation found.
    std::uint64_t EndOperation(bool done);
    // Makes the operations' copies available to all calls. REQUIRES: the stream has been
    // synchronised, and no operation failed on the device.
    void Finish();

   private:
    // Drops these entries. REQUIRES: none of them is ready; the caller holds the mutex.
    void Forget(std::vector<std::shared_ptr<Entry>>& entries);

    PreparedOperands& of_;
    Stream& stream_;
    const FindBuffer find_;
    std::vector<std::shared_ptr<Entry>> making_;  // by this operation
    std::vector<std::shared_ptr<Entry>> made_;    // by earlier operations
    std::vector<std::shared_ptr<Entry>> found_;
    std::uint64_t found_bytes_ = 0;
  };

 private:
  using Doomed = std::vector<std::shared_ptr<const void>>;
  // Returns the entry and moves it to the front. If there is none, adds one that has been seen
  // once, and returns null. The caller holds the mutex.
  std::shared_ptr<Entry> Find(const std::shared_ptr<const Buffer>& buffer, const Preparation& what,
                              Doomed& doomed);
  // Allocates memory for an entry that is to be made. Returns false if there is none.
  bool Allocate(Entry& entry, std::size_t bytes);
  // The caller of these functions holds the mutex.
  //
  // Notes that entries with memory leave the list.
  void NoteForgotten();
  // Takes the least recently used entries from the list until they have `bytes` bytes: only those
  // that no call uses, or all. Returns how many bytes they have.
  std::uint64_t Unlink(std::uint64_t bytes, bool used_too, Entries& doomed);
  // Waits until memory has been freed since frees() returned `frees`, or until no entry has memory.
  // Returns false if kPatience passes before that.
  bool AwaitFree(std::unique_lock<std::mutex>& lock, std::uint64_t frees);

  Device& device_;
  Budget& budget_;
  std::mutex mutex_;
  std::condition_variable freed_;
  // These change only under the mutex.
  std::atomic<std::uint64_t> bytes_{0};  // of all entries, including forgotten ones
  std::atomic<std::uint64_t> frees_{0};
  int claims_ = 0;
  // When the calls that use forgotten copies have had kPatience to end.
  std::chrono::steady_clock::time_point patience_ends_{};
  Entries entries_;
};

}  // namespace tessera
