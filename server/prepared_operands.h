// What operations have made of resident operands before they read them (kernels/prepared.h), kept on a device for the next
// call with the same operand: READY buffers never change. It takes what the buffers leave of the device's limit, and goes when
// they need it, when its own buffer goes, or when newer is to be kept.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/compute.h"
#include "kernels/prepared.h"
#include "server/charge.h"

namespace tessera {

class Buffer;

// Thread safe. Memory is neither allocated nor freed under the lock, but on the thread of the caller.
class PreparedOperands {
 public:
  // Smaller copies are not worth their place.
  static constexpr std::size_t kLeastBytes = 64 << 10;
  // What is remembered, be it kept or only seen once.
  static constexpr std::size_t kMost = 256;

  // budget: what the device's buffers are charged to. Both outlive this.
  PreparedOperands(Device& device, Budget& budget) : device_(device), budget_(budget) {}

  // Forgets what was used longest ago, until the budget has room for so many bytes; nothing, if all would
  // not do. Whether it has forgotten anything.
  bool MakeRoom(std::uint64_t bytes);
  // Forgets all. Whether any memory was kept.
  bool Clear();
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
    ~Entry() { owner.bytes_.fetch_sub(charge.amount(), std::memory_order_relaxed); }
    PreparedOperands& owner;
    std::weak_ptr<const Buffer> buffer;
    Preparation what;
    State state = State::kSeen;
    Charge charge;
    Memory memory;  // goes first, and only then it counts as free
  };
  using Entries = std::list<std::shared_ptr<Entry>>;  // the one that was used last first

 public:
  // Keeps what the operations of one call prepare, one after the other on one stream of the device. What
  // has been seen for the first time is not kept, nor what another call is making at the moment, nor what
  // there is no memory for.
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
    // At the end of an operation. done: all that it had to do is done or enqueued, so that what it has made
    // is there for the next one on the stream; otherwise that is forgotten. Bytes that the operation has found.
    std::uint64_t EndOperation(bool done);
    // What the operations have made is there for all: the stream has been synchronised, and none has failed
    // on the device.
    void Finish();

   private:
    // Of the entries, none of which is ready. Needs the mutex.
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
  // The entry, now the first, or a new one that has been seen once; null: it was made just now. Needs
  // the mutex.
  std::shared_ptr<Entry> Find(const std::shared_ptr<const Buffer>& buffer, const Preparation& what,
                              Doomed& doomed);
  // Memory for an entry that is to be made. False: there is none.
  bool Allocate(Entry& entry, std::size_t bytes);

  Device& device_;
  Budget& budget_;
  std::atomic<std::uint64_t> bytes_{0};
  std::mutex mutex_;
  Entries entries_;
};

}  // namespace tessera
