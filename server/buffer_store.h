// The named arrays of the server: which names exist, the memory behind them, and how much of it
// there may be.
//
// A name has at most one READY buffer, which is immutable, and at most one draft, a buffer that is
// being written. A draft becomes READY in one step, and takes the place of the READY buffer of its
// name when it was created to replace it. Whoever holds a buffer keeps its memory, whatever happens
// to the name.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/budget.h"
#include "kernels/compute.h"

namespace tessera {

// A typed array in device memory. Everything but the bytes is constant. The store and the device
// outlive it.
class Buffer {
 public:
  ~Buffer() { Release(); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const std::string& name() const { return name_; }
  const ArrayType& type() const { return type_; }
  Device& device() const { return device_; }
  std::uint64_t version() const { return version_; }
  absl::Time create_time() const { return create_time_; }
  void* data() const { return memory_.data(); }

 private:
  friend class BufferStore;
  Buffer(std::string name, const ArrayType& type, Device& device, std::uint64_t version,
         Budget& budget, Memory memory)
      : name_(std::move(name)),
        type_(type),
        device_(device),
        version_(version),
        create_time_(absl::Now()),
        budget_(budget),
        memory_(std::move(memory)) {}
  void Release();

  const std::string name_;
  const ArrayType type_;
  Device& device_;
  const std::uint64_t version_;
  const absl::Time create_time_;
  Budget& budget_;
  Memory memory_;
};

// Half-open range of bytes.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  friend bool operator==(const Range&, const Range&) = default;
};

// A set of bytes, kept as disjoint ranges that do not touch.
class RangeSet {
 public:
  void Add(Range range);
  void Remove(Range range);
  // The gaps of [0, size), in order, at most limit of them.
  std::vector<Range> Missing(std::uint64_t size, std::size_t limit) const;
  // Length of the range that begins at 0.
  std::uint64_t Prefix() const;

 private:
  std::map<std::uint64_t, std::uint64_t> ranges_;  // begin -> end
};

// "0-1048576, 2097152-4194304": how ranges look in messages and metadata.
std::string ToString(const std::vector<Range>& ranges);

// A buffer that is being written. Handled through the store, which guards what changes.
class Draft {
 public:
  const Buffer& buffer() const { return *buffer_; }

 private:
  friend class BufferStore;
  enum class State { kOpen, kSealed, kGone };
  std::shared_ptr<const Buffer> buffer_;
  bool replace_ = false;
  bool exclusive_ = false;
  State state_ = State::kOpen;
  absl::Time expire_time_;
  absl::Time last_use_;
  RangeSet written_;
  int writes_in_flight_ = 0;
};

// What a client is told about a buffer: the state at one moment.
struct BufferInfo {
  std::shared_ptr<const Buffer> buffer;
  bool ready = false;
  std::uint64_t committed_bytes = 0;
  absl::Time expire_time = absl::InfiniteFuture();
  std::vector<Range> missing;  // of a draft; at most BufferStore::kMostMissing
};

struct BufferSpec {
  std::string name;
  ArrayType type;
  Device* device = nullptr;
  std::optional<absl::Duration> ttl;
  bool replace = false;
  // Whether only the holder of the draft writes and seals it, as opposed to anyone who knows the
  // name.
  bool exclusive = false;
};

// Thread safe. Memory is never allocated or freed under the lock. Outlives its buffers; outlived by
// the devices.
class BufferStore {
 public:
  static constexpr std::size_t kMostMissing = 100;

  struct Place {
    Device* device;
    std::uint64_t limit;  // bytes
  };
  struct Limits {
    absl::Duration default_ttl = absl::InfiniteDuration();
    absl::Duration max_ttl = absl::InfiniteDuration();
    // How long a draft may go without a write before it is removed.
    absl::Duration idle_draft = absl::Seconds(60);
  };
  BufferStore(const std::vector<Place>& places, const Limits& limits);

  // Takes the memory and the name. INVALID_ARGUMENT / BAD_NAME, BAD_TTL; ALREADY_EXISTS /
  // BUFFER_EXISTS; RESOURCE_EXHAUSTED / QUOTA_EXCEEDED, GPU_MEMORY_EXHAUSTED.
  absl::StatusOr<std::shared_ptr<Draft>> Create(const BufferSpec& spec);

  // The draft of a name that anyone may write. NOT_FOUND / BUFFER_NOT_FOUND; FAILED_PRECONDITION /
  // BUFFER_SEALED, or BUFFER_NOT_READY when another call owns it.
  absl::StatusOr<std::shared_ptr<Draft>> FindDraft(std::string_view name);

  // Where bytes of a draft go; EndWrite must follow. INVALID_ARGUMENT / BAD_RANGE {offset, size,
  // limit}; NOT_FOUND / BUFFER_NOT_FOUND when it was deleted meanwhile; FAILED_PRECONDITION /
  // BUFFER_SEALED.
  absl::StatusOr<void*> BeginWrite(Draft& draft, std::uint64_t offset, std::uint64_t size);
  // done: whether the bytes are on the device.
  void EndWrite(Draft& draft, std::uint64_t offset, std::uint64_t size, bool done);

  // Draft -> READY. FAILED_PRECONDITION / BUFFER_NOT_READY {missing} until every byte is there and
  // no write in flight.
  absl::StatusOr<BufferInfo> Seal(const std::shared_ptr<Draft>& draft);
  // The same by name; a READY buffer counts as sealed.
  absl::StatusOr<BufferInfo> Seal(std::string_view name);
  // Forgets a draft, unless it has been sealed.
  void Discard(Draft& draft);

  // A READY buffer that fill writes in one go: all of the above in turn. Nothing is left of it when
  // fill fails.
  absl::StatusOr<BufferInfo> CreateFrom(const BufferSpec& spec,
                                        absl::FunctionRef<absl::Status(void* memory)> fill);

  // A READY buffer. NOT_FOUND / BUFFER_NOT_FOUND {name}; FAILED_PRECONDITION / BUFFER_NOT_READY
  // {name, missing}.
  absl::StatusOr<std::shared_ptr<const Buffer>> Find(std::string_view name);
  // READY or, without such, the draft. NOT_FOUND / BUFFER_NOT_FOUND.
  absl::StatusOr<BufferInfo> Get(std::string_view name);
  BufferInfo Describe(const Draft& draft);
  // At most limit buffers with names above `after`, in order of name.
  std::vector<BufferInfo> List(std::string_view prefix, std::string_view after, std::size_t limit);
  // ttl from now; none: for ever. NOT_FOUND / BUFFER_NOT_FOUND; INVALID_ARGUMENT / BAD_TTL.
  absl::StatusOr<BufferInfo> SetTtl(std::string_view name, std::optional<absl::Duration> ttl);
  // READY buffer and draft. NOT_FOUND / BUFFER_NOT_FOUND.
  absl::Status Delete(std::string_view name);

  // Gives back the memory of expired buffers and of idle drafts. (To look-ups, buffers are gone
  // once they expire.)
  void Sweep(absl::Time now);

  const Budget& budget(const Device& device) const { return *budgets_.at(&device); }

 private:
  struct Ready {
    std::shared_ptr<const Buffer> buffer;
    absl::Time expire_time;
  };
  using ReadyMap = std::map<std::string, Ready, std::less<>>;
  using DraftMap = std::map<std::string, std::shared_ptr<Draft>, std::less<>>;

  // These need the mutex.
  Ready* FindReady(std::string_view name, absl::Time now);
  absl::Status CheckFree(const BufferSpec& spec, absl::Time now);
  absl::StatusOr<BufferInfo> SealLocked(Draft& draft, Ready& replaced);
  static BufferInfo Info(const Ready& ready);
  static BufferInfo Info(const Draft& draft);

  absl::StatusOr<absl::Time> ExpireTime(std::optional<absl::Duration> ttl, absl::Time from) const;

  const Limits limits_;
  std::map<const Device*, std::unique_ptr<Budget>> budgets_;

  std::mutex mutex_;
  ReadyMap ready_;
  DraftMap drafts_;
  std::uint64_t last_version_ = 0;
  absl::Time next_expiry_ = absl::InfiniteFuture();  // no READY buffer expires before
};

}  // namespace tessera
