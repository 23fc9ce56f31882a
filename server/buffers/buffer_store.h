// The server's named arrays: their names, their memory, and the limits on that memory.
//
// A name has at most one READY buffer, which is immutable, and any number of drafts, which are
// buffers that are being written. A draft becomes READY in one step. If it was created with
// `replace`, it then replaces the READY buffer of the same name, so the last draft to become READY
// wins. A reference to a buffer keeps the buffer's memory, even if the name is deleted or reused.
#pragma once

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
#include "server/buffers/arrival.h"
#include "server/buffers/charge.h"
#include "server/buffers/prepared_operands.h"
#include "server/clock.h"

namespace tessera {

// A typed array in device memory. Once it is READY, it never changes. The store and the device must
// outlive it.
class Buffer {
 public:
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const std::string& name() const { return name_; }
  const ArrayType& type() const { return type_; }
  // The parts of the array on its devices: one shard, or several for a sharded buffer.
  absl::Span<const Shard> shards() const { return shards_; }
  // The device of the first shard.
  Device& device() const { return *shards_.front().device; }
  // Whether a shard is on the device. If so, the device's streams can access the memory.
  bool IsOn(const Device& device) const;
  // Returns the device of the shard that contains the byte, or of the last shard for a byte beyond
  // the end of the array.
  Device& DeviceOf(std::uint64_t byte) const;
  std::uint64_t version() const { return version_; }
  absl::Time create_time() const { return create_time_; }
  void* data() const { return origin_ != nullptr ? origin_->data() : memory_.data(); }
  // The CRC-32C of the bytes, if each byte was written exactly once and with a checksum.
  std::optional<std::uint32_t> checksum() const { return checksum_; }
  // The buffer that owns the memory: another buffer if this one is a link, otherwise this one.
  const Buffer& owner() const { return origin_ != nullptr ? *origin_ : *this; }
  // The arrival of the bytes if the buffer was restored from a snapshot; otherwise null.
  const std::shared_ptr<Arrival>& arrival() const { return owner().arrival_; }

 private:
  friend class BufferStore;
  Buffer(std::string name, const ArrayType& type, std::vector<Shard> shards, std::uint64_t version,
         absl::Time create_time = SteadyNow())
      : name_(std::move(name)),
        type_(type),
        shards_(std::move(shards)),
        version_(version),
        create_time_(create_time) {}

  const std::string name_;
  const ArrayType type_;
  const std::vector<Shard> shards_;
  std::uint64_t version_;
  const absl::Time create_time_;
  std::optional<std::uint32_t> checksum_;
  std::shared_ptr<Arrival> arrival_;
  // Members are destroyed in reverse order: first the memory is freed, then the charges of this
  // store end, and then the charges of all stores.
  Charge count_;
  std::vector<Charge> bytes_;  // one per shard
  Charge own_count_;
  std::vector<Charge> own_bytes_;
  Memory memory_;
  // The buffer that owns the memory, if this one is a link.
  std::shared_ptr<const Buffer> origin_;
};

// A half-open range of bytes.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  friend bool operator==(const Range&, const Range&) = default;
};

// A set of bytes, kept as ranges that neither overlap nor touch. A range has the CRC-32C of its
// bytes if this checksum can be computed from those of the ranges that were added.
class RangeSet {
 public:
  // If the range overlaps existing ones, the resulting range has no checksum.
  void Add(Range range, std::optional<std::uint32_t> checksum = std::nullopt);
  void Remove(Range range);
  // Returns the gaps in [0, size) in order, but at most `limit` of them.
  std::vector<Range> Missing(std::uint64_t size, std::size_t limit) const;
  // Returns the length of the range that begins at 0.
  std::uint64_t Prefix() const;
  // Returns the checksum of [0, size), once nothing is missing.
  std::optional<std::uint32_t> Checksum(std::uint64_t size) const;
  std::size_t count() const { return ranges_.size(); }
  // Whether adding the range would increase the number of ranges.
  bool Separate(Range range) const;

 private:
  struct Tail {
    std::uint64_t end = 0;
    std::optional<std::uint32_t> checksum;
  };
  std::map<std::uint64_t, Tail> ranges_;  // sorted by begin
};

// Returns the text for messages and metadata, for example "0-1048576, 2097152-4194304".
std::string ToString(const std::vector<Range>& ranges);

// A buffer that is being written. It is used through the store, whose mutex guards the members that
// change.
class Draft {
 public:
  const Buffer& buffer() const { return *buffer_; }

  enum class Kind {
    kRanges,  // written and sealed by any call that knows its name and version
    kStream,  // written and sealed by one upload, and visible to all calls
    kResult,  // the result of an operation, invisible until it is READY
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
  // These two members are only used for kRanges.
  absl::Time last_use_;
  std::list<Draft*>::iterator idle_place_;  // in the list of idle drafts
};

// The state of a buffer at one point in time, as it is reported to clients.
struct BufferInfo {
  std::shared_ptr<const Buffer> buffer;
  std::uint64_t version = 0;
  bool ready = false;
  std::uint64_t committed_bytes = 0;
  absl::Time expire_time = absl::InfiniteFuture();  // infinite for a draft
  std::optional<std::uint32_t> checksum;            // only for a READY buffer
  std::vector<Range> missing;  // gaps in a draft; at most BufferStore::kMostMissing
};

struct BufferSpec {
  std::string name;
  ArrayType type;
  Device* device = nullptr;
  // The devices among which the array is divided (MakeShards), instead of `device`.
  std::vector<Device*> placement;
  // For a result: a device that must be able to access it. If the placement gives that device no
  // shard, the whole array is placed there.
  Device* reached_by = nullptr;
  std::optional<absl::Duration> ttl;
  bool replace = false;
  Draft::Kind kind = Draft::Kind::kRanges;
};

// Thread safe. Memory is allocated and freed on the caller's thread, and never while the lock is
// held. The store must outlive its buffers, and the devices must outlive the store.
class BufferStore {
 public:
  static constexpr std::size_t kMostMissing = 100;
  static constexpr std::size_t kMostDrafts = 16;  // maximum that Drafts returns

  // How much memory the buffers of a device may take.
  struct DeviceLimit {
    Device* device;
    std::uint64_t limit;  // bytes
  };
  struct Limits {
    absl::Duration default_ttl = absl::InfiniteDuration();
    absl::Duration max_ttl = absl::InfiniteDuration();
    // How long a draft may go without a write before it is removed.
    absl::Duration idle_draft = absl::Seconds(60);
    std::uint64_t buffers = 100'000;  // READY, drafts, and nameless buffers still in use
    std::size_t ranges = 4096;        // maximum in one draft
    // Returns an error for a name that belongs to another server, and OK otherwise. If the function
    // is empty, all names belong to this server.
    std::function<absl::Status(std::string_view name)> foreign = {};
  };
  BufferStore(const std::vector<DeviceLimit>& devices, const Limits& limits);
  // Returns another store, with its own names. Its buffers count toward the same limits as those of
  // this store.
  std::unique_ptr<BufferStore> MakeAnother() const;

  // Sets limits for this store only, in addition to the limits on all stores together: a number of
  // bytes on each device, and a number of buffers. The store keeps what it already holds.
  void SetQuotas(std::uint64_t bytes, std::uint64_t buffers);

  // Creates a draft and allocates its memory. Before Create fails for lack of memory, expired
  // buffers and prepared operands are forgotten. That may take up to PreparedOperands::kPatience,
  // because calls may still be using the prepared operands. The caller must therefore hold nothing
  // that such a call needs in order to end: no lock, no stream that calls share, and no prepared
  // operand that was given to its own call. For this reason, calls open their results before they
  // launch anything, and a program that opens buffers later is given no prepared operands. While a
  // draft without `replace` exists, no other draft without `replace` can be created under its name.
  // Errors: INVALID_ARGUMENT / BAD_NAME, BAD_TTL; ALREADY_EXISTS / BUFFER_EXISTS;
  // RESOURCE_EXHAUSTED / QUOTA_EXCEEDED, TOO_MANY_BUFFERS, TENANT_QUOTA_EXCEEDED {quota, requested,
  // used, limit}, GPU_MEMORY_EXHAUSTED, HOST_MEMORY_EXHAUSTED; FAILED_PRECONDITION /
  // PLACEMENT_UNSUPPORTED.
  absl::StatusOr<std::shared_ptr<Draft>> Create(const BufferSpec& spec);
  // Returns the error that Create would return now for an invalid name or ttl, or because the name
  // is taken. Allocates no memory.
  absl::Status Check(const BufferSpec& spec);

  // Returns the draft of kind kRanges that has the version. For version 0, returns the only such
  // draft of the name. Errors: NOT_FOUND / BUFFER_NOT_FOUND; FAILED_PRECONDITION / BUFFER_SEALED,
  // VERSION_MISMATCH, VERSION_REQUIRED {versions} with the oldest 16, or BUFFER_NOT_READY if
  // another call owns the draft.
  absl::StatusOr<std::shared_ptr<Draft>> FindDraft(std::string_view name, std::uint64_t version);

  // Begins a write, and returns the address where its bytes go. EndWrite or AbandonWrite must
  // follow. Errors: INVALID_ARGUMENT / BAD_RANGE {offset, size, limit}; RESOURCE_EXHAUSTED /
  // TOO_MANY_RANGES {limit}; and the errors of CheckOpen.
  absl::StatusOr<void*> BeginWrite(Draft& draft, std::uint64_t offset, std::uint64_t size);
  // Extends a write by the bytes of this range, which begins at the write's end. EndWrite must then
  // cover these bytes too. Returns the errors of BeginWrite except TOO_MANY_RANGES.
  absl::StatusOr<void*> ExtendWrite(Draft& draft, std::uint64_t offset, std::uint64_t size);
  // Ends a write. `done` says whether the bytes are on the device. `checksum` is the CRC-32C of
  // these bytes.
  void EndWrite(Draft& draft, std::uint64_t offset, std::uint64_t size, bool done,
                std::optional<std::uint32_t> checksum = std::nullopt);
  // Ends a write that has written nothing, so the earlier contents stay valid.
  void AbandonWrite(Draft& draft);
  // Returns the errors of BeginWrite except TOO_MANY_RANGES, but begins no write.
  absl::Status CheckWrite(const Draft& draft, std::uint64_t offset, std::uint64_t size);
  // Returns an error unless the draft can still become READY: NOT_FOUND / BUFFER_NOT_FOUND if it
  // was deleted, or FAILED_PRECONDITION / BUFFER_SEALED.
  absl::Status CheckOpen(const Draft& draft);

  // Makes a draft READY. Errors: FAILED_PRECONDITION / BUFFER_NOT_READY {missing} if bytes are
  // missing or a write is in flight; FAILED_PRECONDITION / CHECKSUM_UNKNOWN; DATA_LOSS /
  // BAD_CHECKSUM; ALREADY_EXISTS / BUFFER_EXISTS. `sender` sent the checksum.
  absl::StatusOr<BufferInfo> Seal(Draft& draft, std::optional<std::uint32_t> checksum = {},
                                  std::string_view sender = "the client");
  // Seals several drafts in one step: all become READY, or none does.
  absl::StatusOr<std::vector<BufferInfo>> SealAll(absl::Span<Draft* const> drafts);
  // Seals the draft that FindDraft would return. Also succeeds if the draft of this version has
  // already been sealed and its buffer still exists.
  absl::StatusOr<BufferInfo> Seal(std::string_view name, std::uint64_t version,
                                  std::optional<std::uint32_t> checksum);
  // Forgets a draft, unless it has been sealed.
  void Discard(Draft& draft);

  // Creates another READY buffer that shares the memory of a READY buffer and takes no memory
  // itself. Returns the errors of Find for the source, and those of Create and Seal.
  absl::StatusOr<BufferInfo> Link(std::string_view source, std::uint64_t version,
                                  const BufferSpec& link);

  // A buffer that an earlier server has saved in a snapshot.
  struct Restored {
    BufferSpec spec;  // its ttl, kind and `replace` have no effect
    std::uint64_t version = 0;
    absl::Time create_time;
    absl::Time expire_time = absl::InfiniteFuture();
    std::uint32_t checksum = 0;
    std::shared_ptr<Arrival> arrival;
    std::shared_ptr<const Buffer> origin;  // the owner of the memory, for a link
  };
  // Adds a READY buffer whose bytes are still to be written. Its arrival ends once they have been
  // written or, if there is no memory for the buffer, with the errors of Create. Called only before
  // the first call arrives.
  std::shared_ptr<const Buffer> Restore(const Restored& restored);
  // The greatest version that the store has given out.
  std::uint64_t last_version();
  // From now on, the store gives out only versions above `last`.
  void SkipVersions(std::uint64_t last);

  // Returns a READY buffer; version 0 means any version. If its bytes are still to arrive, the
  // caller must wait for `awaited` before it uses them. Errors: NOT_FOUND / BUFFER_NOT_FOUND
  // {name}; FAILED_PRECONDITION / VERSION_MISMATCH, or BUFFER_NOT_READY {name, missing}, the latter
  // also if the bytes are still to arrive and `awaited` is null; and the error with which their
  // arrival ended.
  absl::StatusOr<BufferInfo> Find(std::string_view name, std::uint64_t version,
                                  Awaited* awaited = nullptr);

  struct Wanted {
    std::string_view name;
    std::uint64_t version = 0;
    absl::Status status;
    std::shared_ptr<const Buffer> buffer;
  };
  // Finds several buffers in one step, each as Find does, and skips entries without a name.
  void FindAll(absl::Span<Wanted> wanted, Awaited& awaited);

  // Returns the READY buffer or, if there is none, the newest visible draft. With a version,
  // returns the buffer or draft that has it. Errors: NOT_FOUND / BUFFER_NOT_FOUND;
  // FAILED_PRECONDITION / VERSION_MISMATCH.
  absl::StatusOr<BufferInfo> Get(std::string_view name, std::uint64_t version);
  // Returns the newest kMostDrafts visible drafts of a name, in order of version.
  std::vector<BufferInfo> Drafts(std::string_view name);
  BufferInfo Describe(const Draft& draft);
  // Returns at most `limit` buffers whose names come after `after`, in order of name, each as Get
  // returns it.
  std::vector<BufferInfo> List(std::string_view prefix, std::string_view after, std::size_t limit);
  // Sets the ttl, which counts from now or, for a draft, from when it becomes READY. Without a ttl,
  // the buffer never expires. Returns the errors of Get, or INVALID_ARGUMENT / BAD_TTL.
  absl::StatusOr<BufferInfo> SetTtl(std::string_view name, std::uint64_t version,
                                    std::optional<absl::Duration> ttl);
  // Deletes the READY buffer and the visible drafts of a name. If a version is given, deletes only
  // the buffer or draft with this version. Returns the errors of Get.
  absl::Status Delete(std::string_view name, std::uint64_t version);

  // Forgets expired buffers and idle drafts. Their memory is freed when the returned pointers are
  // destroyed. (Look-ups do not find an expired buffer even before it is forgotten.)
  std::vector<std::shared_ptr<const void>> Sweep(absl::Time now);

  // Forgets all buffers and drafts that have a shard on a lost device, and the prepared operands
  // kept there. Their memory is freed when the returned pointers are destroyed.
  std::vector<std::shared_ptr<const void>> Evict(const Device& device);

  // The number of named buffers on a device, including drafts of results, and their total size in
  // bytes. A sharded buffer counts on the device of its first shard, but each of its bytes counts
  // on the device that holds it.
  struct Tally {
    std::uint64_t ready = 0;
    std::uint64_t ready_bytes = 0;
    std::uint64_t writing = 0;
    std::uint64_t writing_bytes = 0;
  };
  Tally tally(const Device& device);

  // The limits on all stores together.
  const Budget& budget(const Device& device) const { return *shared_->bytes.at(&device); }
  const Budget& count() const { return shared_->count; }
  PreparedOperands& prepared(const Device& device) const { return *shared_->prepared.at(&device); }
  // The limits on this store only.
  const Quota& own_bytes(const Device& device) const { return own_bytes_.at(&device); }
  const Quota& own_count() const { return own_count_; }

 private:
  struct Ready {
    std::shared_ptr<Buffer> buffer;
    absl::Time expire_time;
    std::uint64_t draft_version = 0;  // the version of its draft
  };
  using ReadyMap = std::map<std::string, Ready, std::less<>>;
  using DraftsOfName = std::map<std::uint64_t, std::shared_ptr<Draft>>;  // by version, never empty
  using DraftMap = std::map<std::string, DraftsOfName, std::less<>>;
  using Doomed = std::vector<std::shared_ptr<const void>>;  // freed after the lock is released

  // The caller of these functions holds the mutex.
  // A version of 0 means any version.
  Ready* FindReady(std::string_view name, absl::Time now, std::uint64_t version = 0);
  // Returns the newest visible draft, or the draft with the version if one is given. Returns null
  // if there is none.
  std::shared_ptr<Draft> FindVisible(std::string_view name, std::uint64_t version);
  absl::StatusOr<std::shared_ptr<Draft>> FindDraftLocked(std::string_view name,
                                                         std::uint64_t version);
  absl::StatusOr<BufferInfo> FindLocked(std::string_view name, std::uint64_t version,
                                        absl::Time now);
  absl::Status NotFound(std::string_view name) const;
  // Returns the error that Get returns for a version that no buffer or draft has.
  absl::Status Absent(std::string_view name, std::uint64_t version, absl::Time now);
  // Returns an error if no buffer of this server may have the name.
  absl::Status CheckName(std::string_view name) const;
  absl::Status CheckFree(const BufferSpec& spec, absl::Time now);
  absl::Status CheckOpenLocked(const Draft& draft);
  absl::Status CheckWriteLocked(const Draft& draft, std::uint64_t offset, std::uint64_t size);
  // Returns the checksum of a draft's bytes for its READY buffer, if it is known.
  static std::optional<std::uint32_t> ChecksumOf(const Draft& draft);
  // Returns the error that keeps a draft from becoming READY now, or OK.
  absl::Status CheckSealLocked(const Draft& draft, std::optional<std::uint32_t> checksum,
                               absl::Time now, std::string_view sender = "the client");
  // REQUIRES: CheckSealLocked returns OK.
  BufferInfo SealLocked(Draft& draft, absl::Time now, Doomed& doomed);
  void SetExpiry(const std::string& name, Ready& ready, absl::Time expire_time);
  void Unlink(ReadyMap::iterator it, Doomed& doomed);
  void Unlink(Draft& draft, Draft::State state, Doomed& doomed);
  void Touch(Draft& draft, absl::Time now);
  // Adds `change`, which is 1 or -1, to the device's number of buffers.
  void CountReady(const Buffer& buffer, int change);
  void CountWriting(const Buffer& buffer, int change);
  // These charge one buffer to the limit of this store, or of all stores together.
  absl::StatusOr<Charge> TakeOwnCount();
  absl::StatusOr<Charge> TakeCount();
  // Allocates the memory and charges it.
  absl::Status Reserve(Buffer& buffer);
  // Repeats make(), which has failed for lack of memory for the shards, for as long as forgetting
  // prepared operands frees memory. `refused` is the error of the first attempt. `frees` is the
  // value of FreesOf(shards) before that attempt.
  absl::StatusOr<std::shared_ptr<Buffer>> MakeAgain(
      absl::Span<const Shard> shards, absl::Status refused, std::vector<std::uint64_t> frees,
      absl::FunctionRef<absl::StatusOr<std::shared_ptr<Buffer>>()> make);
  // Makes one attempt of Link, with a valid name and ttl, without sweeping expired buffers.
  absl::StatusOr<BufferInfo> LinkOnce(std::string_view source, std::uint64_t version,
                                      const BufferSpec& link, absl::Duration ttl);
  // Returns PreparedOperands::frees of each shard's device.
  std::vector<std::uint64_t> FreesOf(absl::Span<const Shard> shards) const;
  static BufferInfo Info(const Ready& ready);
  static BufferInfo Info(const Draft& draft);

  absl::StatusOr<absl::Duration> CheckTtl(std::optional<absl::Duration> ttl) const;

  // The budgets and prepared operands that the stores of a server share.
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
  std::list<Draft*> idle_;  // drafts of kRanges, the least recently used first
};

// A buffer for a call's result, which the call writes as a whole. It is discarded unless it is
// sealed. Not thread safe.
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

  // Creates the draft, and returns its memory or the errors of BufferStore::Create.
  absl::StatusOr<void*> Open();
  // REQUIRES: Open has succeeded.
  const Buffer& buffer() const { return draft_->buffer(); }
  // Makes the buffer READY; called once its bytes are written. Returns the errors of
  // BufferStore::Seal.
  absl::StatusOr<BufferInfo> Seal();
  // Seals several drafts of one store in one step: all become READY, or none does.
  static absl::StatusOr<std::vector<BufferInfo>> SealAll(absl::Span<ResultDraft* const> results);

 private:
  BufferStore& store_;
  BufferSpec spec_;
  std::shared_ptr<Draft> draft_;
};

}  // namespace tessera
