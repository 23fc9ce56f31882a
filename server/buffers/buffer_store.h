// The named arrays of the server: which names exist, the memory behind them, and how much of it
// there may be.
//
// A name has at most one READY buffer, which is immutable, and any number of drafts, buffers that
// are being written. A draft becomes READY in one step, and takes the place of the READY buffer of
// its name when it was created to replace it: the last one to become READY wins. Whoever holds a
// buffer keeps its memory, whatever happens to the name.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/compute.h"
#include "server/buffers/charge.h"
#include "server/buffers/prepared_operands.h"
#include "server/clock.h"

namespace tessera {

// A typed array in device memory. Everything but the bytes is constant once it is READY. The store
// and the device outlive it.
class Buffer {
 public:
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const std::string& name() const { return name_; }
  const ArrayType& type() const { return type_; }
  // Where it is: one shard, or of a sharded buffer several.
  absl::Span<const Shard> shards() const { return shards_; }
  // Of the first shard.
  Device& device() const { return *shards_.front().device; }
  // Whether streams of the device reach its memory: it has a shard.
  bool IsOn(const Device& device) const;
  // Of the shard that has the byte; beyond the end of the array, that of the last.
  Device& DeviceOf(std::uint64_t byte) const;
  std::uint64_t version() const { return version_; }
  absl::Time create_time() const { return create_time_; }
  void* data() const { return origin_ != nullptr ? origin_->data() : memory_.data(); }
  // CRC-32C of the bytes, when every one of them came with a checksum, and once.
  std::optional<std::uint32_t> checksum() const { return checksum_; }

 private:
  friend class BufferStore;
  Buffer(std::string name, const ArrayType& type, std::vector<Shard> shards, std::uint64_t version)
      : name_(std::move(name)), type_(type), shards_(std::move(shards)), version_(version) {}

  const std::string name_;
  const ArrayType type_;
  const std::vector<Shard> shards_;
  std::uint64_t version_;
  const absl::Time create_time_ = SteadyNow();
  std::optional<std::uint32_t> checksum_;
  // The memory goes first, and only then it counts as free: of what all stores share, and of what
  // this one may have.
  Charge count_;
  std::vector<Charge> bytes_;  // of each device
  Charge own_count_;
  std::vector<Charge> own_bytes_;
  Memory memory_;
  // Whose memory it is, of a link.
  std::shared_ptr<const Buffer> origin_;
};

// Half-open range of bytes.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  friend bool operator==(const Range&, const Range&) = default;
};

// A set of bytes, kept as disjoint ranges that do not touch, each with the CRC-32C of its bytes as
// far as that follows from the checksums of what was added.
class RangeSet {
 public:
  // A range that overlaps what is there leaves no checksum.
  void Add(Range range, std::optional<std::uint32_t> checksum = std::nullopt);
  void Remove(Range range);
  // The gaps of [0, size), in order, at most limit of them.
  std::vector<Range> Missing(std::uint64_t size, std::size_t limit) const;
  // Length of the range that begins at 0.
  std::uint64_t Prefix() const;
  // Of [0, size), once nothing is missing.
  std::optional<std::uint32_t> Checksum(std::uint64_t size) const;
  std::size_t count() const { return ranges_.size(); }
  // Whether adding the range leaves one range more than there are.
  bool Separate(Range range) const;

 private:
  struct Tail {
    std::uint64_t end = 0;
    std::optional<std::uint32_t> checksum;
  };
  std::map<std::uint64_t, Tail> ranges_;  // by begin
};

// "0-1048576, 2097152-4194304": how ranges look in messages and metadata.
std::string ToString(const std::vector<Range>& ranges);

// A buffer that is being written. Handled through the store, which guards what changes.
class Draft {
 public:
  const Buffer& buffer() const { return *buffer_; }

  enum class Kind {
    kRanges,  // written and sealed by anyone who knows name and version
    kStream,  // written and sealed by one upload, and seen by all
    kResult,  // of an operation: nobody sees it before it is READY
  };

 private:
  friend class BufferStore;
  enum class State { kOpen, kSealed, kGone };
  std::shared_ptr<Buffer> buffer_;
  Kind kind_ = Kind::kRanges;
  bool replace_ = false;
  State state_ = State::kOpen;
  absl::Duration ttl_ = absl::InfiniteDuration();
  RangeSet written_;
  int writes_in_flight_ = 0;
  // Of kRanges: the place among the idle ones.
  absl::Time last_use_;
  std::list<Draft*>::iterator idle_place_;
};

// What a client is told about a buffer: the state at one moment.
struct BufferInfo {
  std::shared_ptr<const Buffer> buffer;
  std::uint64_t version = 0;
  bool ready = false;
  std::uint64_t committed_bytes = 0;
  absl::Time expire_time = absl::InfiniteFuture();  // of a draft: always
  std::optional<std::uint32_t> checksum;            // of a READY one
  std::vector<Range> missing;                       // of a draft; at most BufferStore::kMostMissing
};

struct BufferSpec {
  std::string name;
  ArrayType type;
  Device* device = nullptr;
  // Instead of device: the devices among which the array is divided (MakeShards).
  std::vector<Device*> placement;
  // Of a result: a device that has to reach it. Where it would have no shard, the whole array lies
  // there.
  Device* reached_by = nullptr;
  std::optional<absl::Duration> ttl;
  bool replace = false;
  Draft::Kind kind = Draft::Kind::kRanges;
};

// Thread safe. Memory is never allocated or freed under the lock, but on the thread of the caller.
// Outlives its buffers; outlived by the devices.
class BufferStore {
 public:
  static constexpr std::size_t kMostMissing = 100;
  static constexpr std::size_t kMostDrafts = 16;  // that Drafts lists

  // What the buffers of a device may take.
  struct DeviceLimit {
    Device* device;
    std::uint64_t limit;  // bytes
  };
  struct Limits {
    absl::Duration default_ttl = absl::InfiniteDuration();
    absl::Duration max_ttl = absl::InfiniteDuration();
    // How long a draft may go without a write before it is removed.
    absl::Duration idle_draft = absl::Seconds(60);
    std::uint64_t buffers = 100'000;  // READY ones, drafts, and those that only their users hold
    std::size_t ranges = 4096;        // that a draft's bytes may be in
    // Says that a name is not this server's: the error for it, or OK. Empty: all names are.
    std::function<absl::Status(std::string_view name)> foreign = {};
  };
  BufferStore(const std::vector<DeviceLimit>& devices, const Limits& limits);
  // A store with names of its own, whose buffers count together with those of this one.
  std::unique_ptr<BufferStore> MakeAnother() const;

  // What this store alone may hold from now on, beside the limits of all: bytes on each device, and
  // buffers. What it holds stays.
  void SetQuotas(std::uint64_t bytes, std::uint64_t buffers);

  // Takes the memory; what has expired, and what is kept of operands, is forgotten before anything
  // is refused for want of room. It waits for calls that use what is kept, a moment at most
  // (PreparedOperands::kPatience), and so may not be called with what such a call needs to end: a
  // lock, a stream that others take in turns, or, by a call, after it has been given any of that.
  // Calls open their results before they launch anything. A draft that does not replace claims its
  // name against others of its kind. INVALID_ARGUMENT / BAD_NAME, BAD_TTL; ALREADY_EXISTS /
  // BUFFER_EXISTS; RESOURCE_EXHAUSTED / QUOTA_EXCEEDED, TOO_MANY_BUFFERS, TENANT_QUOTA_EXCEEDED
  // {quota, requested, used, limit}, GPU_MEMORY_EXHAUSTED, HOST_MEMORY_EXHAUSTED;
  // FAILED_PRECONDITION / PLACEMENT_UNSUPPORTED.
  absl::StatusOr<std::shared_ptr<Draft>> Create(const BufferSpec& spec);
  // What Create would say now of the name, the ttl and the claim, before it looks for memory.
  absl::Status Check(const BufferSpec& spec);

  // The draft that anyone may write: of that version, or the only one of its name (version 0).
  // NOT_FOUND / BUFFER_NOT_FOUND; FAILED_PRECONDITION / BUFFER_SEALED, VERSION_MISMATCH,
  // VERSION_REQUIRED {versions}, of the oldest 16, or BUFFER_NOT_READY when another call owns it.
  absl::StatusOr<std::shared_ptr<Draft>> FindDraft(std::string_view name, std::uint64_t version);

  // Where bytes of a draft go; EndWrite must follow, or AbandonWrite. INVALID_ARGUMENT / BAD_RANGE
  // {offset, size, limit}; RESOURCE_EXHAUSTED / TOO_MANY_RANGES {limit}; and the errors of
  // CheckOpen.
  absl::StatusOr<void*> BeginWrite(Draft& draft, std::uint64_t offset, std::uint64_t size);
  // More of a write that has begun, right behind its end, which EndWrite then counts in. No other
  // write follows from it. The errors of BeginWrite but TOO_MANY_RANGES.
  absl::StatusOr<void*> ExtendWrite(Draft& draft, std::uint64_t offset, std::uint64_t size);
  // done: whether the bytes are on the device. checksum: the CRC-32C of what was written.
  void EndWrite(Draft& draft, std::uint64_t offset, std::uint64_t size, bool done,
                std::optional<std::uint32_t> checksum = std::nullopt);
  // Nothing has been written: what was there stays.
  void AbandonWrite(Draft& draft);
  // Returns the errors of BeginWrite except TOO_MANY_RANGES, before a write begins or where there
  // is nothing to write.
  absl::Status CheckWrite(const Draft& draft, std::uint64_t offset, std::uint64_t size);
  // Whether a draft can still become READY: NOT_FOUND / BUFFER_NOT_FOUND when it was deleted,
  // FAILED_PRECONDITION / BUFFER_SEALED.
  absl::Status CheckOpen(const Draft& draft);

  // Draft -> READY. FAILED_PRECONDITION / BUFFER_NOT_READY {missing} until every byte is there and
  // no write in flight, CHECKSUM_UNKNOWN; DATA_LOSS / BAD_CHECKSUM; ALREADY_EXISTS / BUFFER_EXISTS.
  // replaced: what nobody has under its name any more.
  absl::StatusOr<BufferInfo> Seal(Draft& draft, std::optional<std::uint32_t> checksum = {});
  // The same for several drafts at one moment: all become READY, or none does.
  absl::StatusOr<std::vector<BufferInfo>> SealAll(absl::Span<Draft* const> drafts);
  // The same for a draft of FindDraft; one that was sealed by this version, and is there, counts.
  absl::StatusOr<BufferInfo> Seal(std::string_view name, std::uint64_t version,
                                  std::optional<std::uint32_t> checksum);
  // Forgets a draft, unless it has been sealed.
  void Discard(Draft& draft);

  // Another name for the memory of a READY buffer: a READY buffer of its own, which takes no bytes.
  // The errors of Find for the source; those of Create and Seal.
  absl::StatusOr<BufferInfo> Link(std::string_view source, std::uint64_t version,
                                  const BufferSpec& link);

  // A READY buffer. version 0: any. NOT_FOUND / BUFFER_NOT_FOUND {name}; FAILED_PRECONDITION /
  // BUFFER_NOT_READY {name, missing}, VERSION_MISMATCH.
  absl::StatusOr<BufferInfo> Find(std::string_view name, std::uint64_t version);

  struct Wanted {
    std::string_view name;
    std::uint64_t version = 0;
    absl::Status status;
    std::shared_ptr<const Buffer> buffer;
  };
  // The same for several at one moment; those without a name are left out.
  void FindAll(absl::Span<Wanted> wanted);

  // READY or, without such, the newest draft that can be seen; with a version, what has it.
  // NOT_FOUND / BUFFER_NOT_FOUND; FAILED_PRECONDITION / VERSION_MISMATCH.
  absl::StatusOr<BufferInfo> Get(std::string_view name, std::uint64_t version);
  // The drafts of a name that can be seen, the newest kMostDrafts, in order of version.
  std::vector<BufferInfo> Drafts(std::string_view name);
  BufferInfo Describe(const Draft& draft);
  // At most limit buffers with names above `after`, in order of name: of each what Get gives.
  std::vector<BufferInfo> List(std::string_view prefix, std::string_view after, std::size_t limit);
  // ttl from now, or for a draft from when it is READY; none: for ever. The errors of Get;
  // INVALID_ARGUMENT / BAD_TTL.
  absl::StatusOr<BufferInfo> SetTtl(std::string_view name, std::uint64_t version,
                                    std::optional<absl::Duration> ttl);
  // READY buffer and the drafts that can be seen; with a version, what has it. The errors of Get.
  absl::Status Delete(std::string_view name, std::uint64_t version);

  // Forgets expired buffers and idle drafts. (To look-ups, buffers are gone once they expire.)
  // Their memory goes with what is returned.
  std::vector<std::shared_ptr<const void>> Sweep(absl::Time now);

  // Forgets all buffers and drafts that have a shard on a device that is lost, and what is kept of
  // operands there. Their memory goes with what is returned.
  std::vector<std::shared_ptr<const void>> Evict(const Device& device);

  // The buffers of a device that have a name, drafts of results included, and their bytes. A
  // sharded one counts where its first shard is, its bytes where they are.
  struct Tally {
    std::uint64_t ready = 0;
    std::uint64_t ready_bytes = 0;
    std::uint64_t writing = 0;
    std::uint64_t writing_bytes = 0;
  };
  Tally tally(const Device& device);

  // Of all stores together.
  const Budget& budget(const Device& device) const { return *shared_->bytes.at(&device); }
  const Budget& count() const { return shared_->count; }
  PreparedOperands& prepared(const Device& device) const { return *shared_->prepared.at(&device); }
  // Of this one.
  const Quota& own_bytes(const Device& device) const { return own_bytes_.at(&device); }
  const Quota& own_count() const { return own_count_; }

 private:
  struct Ready {
    std::shared_ptr<Buffer> buffer;
    absl::Time expire_time;
    std::uint64_t draft_version = 0;  // what its draft was addressed by
  };
  using ReadyMap = std::map<std::string, Ready, std::less<>>;
  using DraftsOfName = std::map<std::uint64_t, std::shared_ptr<Draft>>;  // by version, none empty
  using DraftMap = std::map<std::string, DraftsOfName, std::less<>>;
  using Doomed = std::vector<std::shared_ptr<const void>>;  // freed after the lock

  // These need the mutex.
  Ready* FindReady(std::string_view name, absl::Time now);
  // The newest that can be seen, or the one of a version; null where there is none.
  std::shared_ptr<Draft> FindVisible(std::string_view name, std::uint64_t version);
  absl::StatusOr<std::shared_ptr<Draft>> FindDraftLocked(std::string_view name,
                                                         std::uint64_t version);
  absl::StatusOr<BufferInfo> FindLocked(std::string_view name, std::uint64_t version,
                                        absl::Time now);
  absl::Status NotFound(std::string_view name) const;
  // What Get reports when nothing has the version.
  absl::Status Absent(std::string_view name, std::uint64_t version, absl::Time now);
  // Whether a buffer of the name may be made at all.
  absl::Status CheckName(std::string_view name) const;
  absl::Status CheckFree(const BufferSpec& spec, absl::Time now);
  absl::Status CheckOpenLocked(const Draft& draft);
  absl::Status CheckWriteLocked(const Draft& draft, std::uint64_t offset, std::uint64_t size);
  // Returns the checksum of a draft's bytes for its READY buffer, if it is known.
  static std::optional<std::uint32_t> ChecksumOf(const Draft& draft);
  // Returns the error that keeps a draft from becoming READY now, or OK.
  absl::Status CheckSealLocked(const Draft& draft, std::optional<std::uint32_t> checksum,
                               absl::Time now);
  // REQUIRES: CheckSealLocked returns OK.
  BufferInfo SealLocked(Draft& draft, absl::Time now, Doomed& doomed);
  void SetExpiry(const std::string& name, Ready& ready, absl::Time expire_time);
  void Unlink(ReadyMap::iterator it, Doomed& doomed);
  void Unlink(Draft& draft, Draft::State state, Doomed& doomed);
  void Touch(Draft& draft, absl::Time now);
  // One more, or with -1 one less, of the device's buffers.
  void CountReady(const Buffer& buffer, int change);
  void CountWriting(const Buffer& buffer, int change);
  // The memory and what it is charged to.
  absl::Status Reserve(Buffer& buffer);
  // A second attempt at what make() was refused, for want of memory in which the shards are to lie,
  // and more as long as what is kept of operands makes room for them. frees: FreesOf(shards) before
  // the first one.
  absl::StatusOr<std::shared_ptr<Buffer>> MakeAgain(
      absl::Span<const Shard> shards, absl::Status refused, std::vector<std::uint64_t> frees,
      absl::FunctionRef<absl::StatusOr<std::shared_ptr<Buffer>>()> make);
  // Link, with a name and a time to live that are right, while what has expired still counts.
  absl::StatusOr<BufferInfo> LinkOnce(std::string_view source, std::uint64_t version,
                                      const BufferSpec& link, absl::Duration ttl);
  // Of each shard's device, PreparedOperands::frees.
  std::vector<std::uint64_t> FreesOf(absl::Span<const Shard> shards) const;
  static BufferInfo Info(const Ready& ready);
  static BufferInfo Info(const Draft& draft);

  absl::StatusOr<absl::Duration> CheckTtl(std::optional<absl::Duration> ttl) const;

  // What the stores of a server have together.
  struct Shared {
    explicit Shared(std::uint64_t buffers) : count(buffers) {}
    std::map<const Device*, std::unique_ptr<Budget>> bytes;
    std::map<const Device*, std::unique_ptr<PreparedOperands>> prepared;
    Budget count;
  };
  BufferStore(std::shared_ptr<Shared> shared, const Limits& limits);

  const Limits limits_;
  const std::shared_ptr<Shared> shared_;
  std::map<const Device*, Quota> own_bytes_;
  Quota own_count_;

  std::mutex mutex_;
  ReadyMap ready_;
  DraftMap drafts_;
  std::map<const Device*, Tally> tallies_;
  std::uint64_t last_version_;
  std::set<std::pair<absl::Time, std::string_view>> expiries_;  // the names are ready_'s keys
  std::list<Draft*> idle_;  // drafts of kRanges, the one that was used longest ago first
};

// A buffer that one call writes as a whole, for its result. Gone unless it is sealed. One thread.
class ResultDraft {
 public:
  ResultDraft(BufferStore& store, BufferSpec spec) : store_(store), spec_(std::move(spec)) {
    spec_.kind = Draft::Kind::kResult;
  }
  ~ResultDraft() {
    if (draft_ != nullptr) store_.Discard(*draft_);
  }
  ResultDraft(const ResultDraft&) = delete;
  ResultDraft& operator=(const ResultDraft&) = delete;

  // Takes the memory. The errors of BufferStore::Create.
  absl::StatusOr<void*> Open();
  // REQUIRES: it is open.
  const Buffer& buffer() const { return draft_->buffer(); }
  // Once the bytes are there. The errors of BufferStore::Seal.
  absl::StatusOr<BufferInfo> Seal();
  // The same for several drafts of one store: all become READY at one moment, or none does.
  static absl::StatusOr<std::vector<BufferInfo>> SealAll(absl::Span<ResultDraft* const> results);

 private:
  BufferStore& store_;
  BufferSpec spec_;
  std::shared_ptr<Draft> draft_;
};

}  // namespace tessera
