// What operations have made of resident operands before they read them (kernels/device/prepared.h),
// kept on a device for the next call with the same operand: READY buffers never change. It takes
// what the buffers leave of the device's limit, and goes when they or the work of calls need it,
// when its own buffer goes, or when newer is to be kept. What a call uses goes when the call ends;
// from when it has been forgotten on, no other call finds it.
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

// Thread safe. Memory is neither allocated nor freed under the lock, but on the thread of the
// caller.
class PreparedOperands final : public SpareMemory {
 public:
  // Smaller copies are not worth their place.
  static constexpr std::size_t kLeastBytes = 64 << 10;
  // What is remembered, be it kept or only seen once.
  static constexpr std::size_t kMost = 256;
  // For so long after copies have been forgotten, buffers that need their memory wait for the calls
  // that use them to end. It runs for all buffers at once: one that comes later, or the next one of
  // a program, does not wait anew.
  static constexpr std::chrono::milliseconds kPatience{300};

  // Is from here on what the device has as spare memory. budget: what the device's buffers are
  // charged to. Both outlive this.
  PreparedOperands(Device& device, Budget& budget);
  ~PreparedOperands() override;
  PreparedOperands(const PreparedOperands&) = delete;
  PreparedOperands& operator=(const PreparedOperands&) = delete;

  // Of a buffer that has been refused and may be tried again. As long as it lives, nothing is kept
  // anew: what it frees is there for buffers.
  class Claim {
   public:
    explicit Claim(PreparedOperands& of);
    ~Claim();
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

    // These wait for what calls use, by kPatience. REQUIRES: the caller holds no lock, and nothing
    // that calls need in order to end; his own call has not been given any copy.
    //
    // Forgets what was used longest ago, until the budget has room for so many bytes; what calls
    // use, only if the rest does not suffice; nothing, if all would not do.
    void MakeRoom(std::uint64_t bytes);
    // Forgets all, and has some memory freed since frees() was so many, if there is any.
    void MakeAllRoom(std::uint64_t frees);

   private:
    PreparedOperands& of_;
  };
  // Counts what has been freed.
  std::uint64_t frees() const override { return frees_.load(std::memory_order_acquire); }

  // Forgets all, and waits for nobody.
  void Clear() noexcept override;
  // Forgets all. The memory goes with what is returned.
  std::vector<std::shared_ptr<const void>> ForgetAll();
  // Forgets what was made of buffers that are gone. The memory goes with what is returned.
  std::vector<std::shared_ptr<const void>> Sweep();
  // Of the budget.
  std::uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  enum class State {
    kSeen,    // once: without memory
    kMaking,  // by a call that is not done
    kReady,
  };
  struct Entry {
    explicit Entry(PreparedOperands& of) : owner(of) {}
    ~Entry() { Free(); }
    // Frees the memory, and only then lets it count as free. REQUIRES: the mutex is free.
    void Free();
    std::uint64_t bytes() const { return charge.amount(); }
    PreparedOperands& owner;
    std::weak_ptr<const Buffer> buffer;
    Preparation what;
    State state = State::kSeen;
    Charge charge;  // changes with the mutex
    Memory memory;
  };
  using Entries = std::list<std::shared_ptr<Entry>>;  // the one that was used last first

 public:
  // Keeps what the operations of one call prepare, one after the other on one stream of the device.
  // What has been seen for the first time is not kept, nor what another call is making at the
  // moment, nor what there is no memory for.
  class Call final : public Keeper {
   public:
    // The operand of the call that has the address; null: none has.
    using FindBuffer = absl::FunctionRef<std::shared_ptr<const Buffer>(const void*)>;
    // All of them, and what `find` refers to, outlive it.
    Call(PreparedOperands& of, Stream& stream, FindBuffer find);
    // Forgets what has not been finished. REQUIRES: the stream's work is done.
    ~Call() override;
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    PreparedMemory Keep(const Preparation& what, std::size_t bytes) override;
    // At the end of an operation. done: all that it had to do is done or enqueued, so that what it
    // has made is there for the next one on the stream; otherwise that is forgotten. Bytes that the
    // operation has found.
    std::uint64_t EndOperation(bool done);
    // What the operations have made is there for all: the stream has been synchronised, and none
    // has failed on the device.
    void Finish();

   private:
    // Drops these entries. REQUIRES: none of them is ready; the caller holds the mutex.
    void Forget(std::vector<std::shared_ptr<Entry>>& entries);

    PreparedOperands& of_;
    Stream& stream_;
    const FindBuffer find_;
    std::vector<std::shared_ptr<Entry>> making_;  // by this operation
    std::vector<std::shared_ptr<Entry>> made_;    // by those before
    std::vector<std::shared_ptr<Entry>> found_;
    std::uint64_t found_bytes_ = 0;
  };

 private:
  using Doomed = std::vector<std::shared_ptr<const void>>;
  // The entry, now the first, or a new one that has been seen once; null: it was made just now.
  // Needs the mutex.
  std::shared_ptr<Entry> Find(const std::shared_ptr<const Buffer>& buffer, const Preparation& what,
                              Doomed& doomed);
  // Memory for an entry that is to be made. False: there is none.
  bool Allocate(Entry& entry, std::size_t bytes);
  // These need the mutex.
  //
  // Before entries with memory go from the list.
  void NoteForgotten();
  // Takes entries from the list, the one that was used longest ago first, until they have so many
  // bytes: those that no call uses, or all. How many they have.
  std::uint64_t Unlink(std::uint64_t bytes, bool used_too, Entries& doomed);
  // Until memory has been freed since frees() was so many, or there is none. False: not by
  // kPatience.
  bool AwaitFree(std::unique_lock<std::mutex>& lock, std::uint64_t frees);

  Device& device_;
  Budget& budget_;
  std::mutex mutex_;
  std::condition_variable freed_;
  // These change with the mutex.
  std::atomic<std::uint64_t> bytes_{0};  // of all entries, forgotten ones included
  std::atomic<std::uint64_t> frees_{0};
  int claims_ = 0;
  // By when whoever uses what was forgotten has had time to end.
  std::chrono::steady_clock::time_point patience_ends_{};
  Entries entries_;
};

}  // namespace tessera
