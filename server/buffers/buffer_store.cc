#include "server/buffers/buffer_store.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "kernels/client_and_server/crc32c.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestName = 128;
constexpr std::size_t kRangesInErrors = 16;
constexpr std::size_t kVersionsInErrors = 16;
// The latest time, in seconds, that a Timestamp can represent: the end of the year 9999.
const absl::Time kLatest = absl::FromUnixSeconds(253402300799);

absl::Status Sealed(std::string_view name) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "BUFFER_SEALED",
                   absl::StrCat("buffer '", Absl(name), "' is READY and cannot change"),
                   {{"name", std::string(name)}});
}

std::string Hex(std::uint32_t checksum) {
  return absl::StrCat("0x", absl::Hex(checksum, absl::kZeroPad8));
}

// Compares checksums of the buffer's bytes. `expected` is the sender's checksum, if the sender sent
// one. `actual` is the server's checksum, if it is known.
absl::Status CheckChecksum(const std::string& name, std::optional<std::uint32_t> expected,
                           std::optional<std::uint32_t> actual, std::string_view sender) {
  if (!expected.has_value() || expected == actual) return absl::OkStatus();
  if (!actual.has_value()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "CHECKSUM_UNKNOWN",
                     absl::StrCat("buffer '", name,
                                  "' cannot be checked, because some of its bytes were written "
                                  "more than once or without a checksum"),
                     {{"name", name}});
  }
  return MakeError(absl::StatusCode::kDataLoss, "BAD_CHECKSUM",
                   absl::StrCat("the bytes of buffer '", name, "' have CRC-32C ", Hex(*actual),
                                ", but ", Absl(sender), " expects ", Hex(*expected)),
                   {{"expected", Hex(*expected)}, {"actual", Hex(*actual)}});
}

absl::Status Exists(std::string_view name, std::string_view why) {
  return MakeError(absl::StatusCode::kAlreadyExists, "BUFFER_EXISTS",
                   absl::StrCat("buffer '", Absl(name), "' ", Absl(why)),
                   {{"name", std::string(name)}});
}

absl::Status NotReady(std::string_view name, const std::vector<Range>& missing) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "BUFFER_NOT_READY",
                   absl::StrCat("buffer '", Absl(name), "' is still being written"),
                   {{"name", std::string(name)}, {"missing", ToString(missing)}});
}

absl::Status NotReady(const Draft& draft, const RangeSet& written) {
  const Buffer& buffer = draft.buffer();
  return NotReady(buffer.name(), written.Missing(buffer.type().bytes(), kRangesInErrors + 1));
}

absl::Status VersionMismatch(std::string_view name, std::uint64_t expected, std::uint64_t actual) {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "VERSION_MISMATCH",
      absl::StrCat("buffer '", Absl(name), "' has version ", actual, ", not ", expected),
      {{"name", std::string(name)},
       {"expected", absl::StrCat(expected)},
       {"actual", absl::StrCat(actual)}});
}

std::vector<Shard> ShardsOf(const BufferSpec& spec) {
  const std::uint64_t bytes = spec.type.bytes();
  if (spec.placement.empty()) return {{spec.device, 0, bytes}};
  std::vector<Shard> shards = MakeShards(spec.placement, bytes);
  const bool reached = spec.reached_by == nullptr ||
                       std::any_of(shards.begin(), shards.end(), [&](const Shard& shard) {
                         return shard.device == spec.reached_by;
                       });
  if (reached) return shards;
  return {{spec.reached_by, 0, bytes}};
}

absl::Time Expiry(absl::Time from, absl::Duration ttl) { return std::min(from + ttl, kLatest); }

}  // namespace

bool Buffer::IsOn(const Device& device) const {
  return std::any_of(shards_.begin(), shards_.end(),
                     [&](const Shard& shard) { return shard.device == &device; });
}

Device& Buffer::DeviceOf(std::uint64_t byte) const {
  const auto shard = std::find_if(shards_.begin(), shards_.end() - 1,
                                  [&](const Shard& one) { return byte < one.end; });
  return *shard->device;
}

void RangeSet::Add(Range range, std::optional<std::uint32_t> checksum) {
  if (range.begin >= range.end) return;
  auto it = ranges_.upper_bound(range.begin);
  if (it != ranges_.begin() && std::prev(it)->second.end >= range.begin) --it;
  while (it != ranges_.end() && it->first <= range.end) {
    const Range old{it->first, it->second.end};
    const std::optional<std::uint32_t> known = it->second.checksum;
    if (!known.has_value() || (old.end != range.begin && old.begin != range.end)) {
      checksum.reset();
    } else if (checksum.has_value()) {
      checksum = old.end == range.begin ? Crc32cCombine(*known, *checksum, range.end - range.begin)
                                        : Crc32cCombine(*checksum, *known, old.end - old.begin);
    }
    range.begin = std::min(range.begin, old.begin);
    range.end = std::max(range.end, old.end);
    it = ranges_.erase(it);
  }
  ranges_.emplace(range.begin, Tail{range.end, checksum});
}

void RangeSet::Remove(Range range) {
  if (range.begin >= range.end) return;
  auto it = ranges_.upper_bound(range.begin);
  if (it != ranges_.begin()) --it;
  while (it != ranges_.end() && it->first < range.end) {
    const Range old{it->first, it->second.end};
    if (old.end <= range.begin) {
      ++it;
      continue;
    }
    it = ranges_.erase(it);
    if (old.begin < range.begin) ranges_.emplace(old.begin, Tail{range.begin, {}});
    if (range.end < old.end) ranges_.emplace(range.end, Tail{old.end, {}});
  }
}

std::vector<Range> RangeSet::Missing(std::uint64_t size, std::size_t limit) const {
  std::vector<Range> missing;
  std::uint64_t end = 0;  // end of the bytes known to be present
  for (auto it = ranges_.begin(); it != ranges_.end() && missing.size() < limit; ++it) {
    if (it->first > end) missing.push_back({end, it->first});
    end = it->second.end;
  }
  if (end < size && missing.size() < limit) missing.push_back({end, size});
  return missing;
}

std::uint64_t RangeSet::Prefix() const {
  return ranges_.empty() || ranges_.begin()->first != 0 ? 0 : ranges_.begin()->second.end;
}

std::optional<std::uint32_t> RangeSet::Checksum(std::uint64_t size) const {
  if (size == 0) return Crc32c(nullptr, 0);
  return Prefix() == size ? ranges_.begin()->second.checksum : std::nullopt;
}

bool RangeSet::Separate(Range range) const {
  auto it = ranges_.upper_bound(range.begin);
  if (it != ranges_.end() && it->first <= range.end) return false;
  return it == ranges_.begin() || std::prev(it)->second.end < range.begin;
}

std::string ToString(const std::vector<Range>& ranges) {
  std::string text;
  for (std::size_t i = 0; i < ranges.size() && i < kRangesInErrors; ++i) {
    absl::StrAppend(&text, i > 0 ? ", " : "", ranges[i].begin, "-", ranges[i].end);
  }
  if (ranges.size() > kRangesInErrors) text += ", ...";
  return text;
}

BufferStore::BufferStore(const std::vector<DeviceLimit>& devices, const Limits& limits)
    : BufferStore(
          [&] {
            auto shared = std::make_shared<Shared>(limits.buffers);
            for (const DeviceLimit& device : devices) {
              auto budget = std::make_unique<Budget>(device.limit);
              shared->prepared.emplace(device.device,
                                       std::make_unique<PreparedOperands>(*device.device, *budget));
              shared->bytes.emplace(device.device, std::move(budget));
            }
            return shared;
          }(),
          limits) {}

BufferStore::BufferStore(std::shared_ptr<Shared> shared, const Limits& limits)
    : limits_(limits),
      shared_(std::move(shared)),
      last_version_(static_cast<std::uint64_t>(absl::ToUnixMicros(absl::Now()))) {
  for (const auto& [device, budget] : shared_->bytes) own_bytes_.try_emplace(device);
}

std::unique_ptr<BufferStore> BufferStore::MakeAnother() const {
  return std::unique_ptr<BufferStore>(new BufferStore(shared_, limits_));
}

absl::Status BufferStore::NotFound(std::string_view name) const {
  const std::string shown(Beginning(name, kLongestName));  // no buffer has a longer name
  if (limits_.foreign != nullptr) RETURN_IF_ERROR(limits_.foreign(shown));
  return MakeError(absl::StatusCode::kNotFound, "BUFFER_NOT_FOUND",
                   absl::StrCat("there is no buffer '", shown, "'"), {{"name", shown}});
}

absl::Status BufferStore::CheckName(std::string_view name) const {
  const bool valid =
      !name.empty() && name.size() <= kLongestName &&
      std::all_of(name.begin(), name.end(), [](unsigned char c) {
        return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '/' || c == '-';
      });
  if (valid) return limits_.foreign != nullptr ? limits_.foreign(name) : absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_NAME",
                   "a buffer's name must have 1 to 128 characters of [a-zA-Z0-9._/-]",
                   {{"field", "name"}, {"value", std::string(Beginning(name, kLongestName))}});
}

void BufferStore::SetQuotas(std::uint64_t bytes, std::uint64_t buffers) {
  for (auto& [device, quota] : own_bytes_) quota.SetLimit(bytes);
  own_count_.SetLimit(buffers);
}

absl::Status BufferStore::Check(const BufferSpec& spec) {
  RETURN_IF_ERROR(CheckName(spec.name));
  if (auto ttl = CheckTtl(spec.ttl); !ttl.ok()) return ttl.status();
  const std::lock_guard lock(mutex_);
  return CheckFree(spec, SteadyNow());
}

absl::StatusOr<std::shared_ptr<Draft>> BufferStore::Create(const BufferSpec& spec) {
  RETURN_IF_ERROR(CheckName(spec.name));
  ASSIGN_OR_RETURN(absl::Duration ttl, CheckTtl(spec.ttl));

  std::uint64_t version = 0;
  {
    const std::lock_guard lock(mutex_);
    RETURN_IF_ERROR(CheckFree(spec, SteadyNow()));
    version = ++last_version_;
  }

  // If Reserve fails, the buffer's destructor returns what Reserve has taken.
  const auto make = [&]() -> absl::StatusOr<std::shared_ptr<Buffer>> {
    std::shared_ptr<Buffer> made(new Buffer(spec.name, spec.type, ShardsOf(spec), version));
    RETURN_IF_ERROR(Reserve(*made));
    return made;
  };
  const std::vector<Shard> shards = ShardsOf(spec);
  const std::vector<std::uint64_t> frees = FreesOf(shards);
  absl::StatusOr<std::shared_ptr<Buffer>> buffer = make();
  if (absl::IsResourceExhausted(buffer.status()))
    buffer = MakeAgain(shards, buffer.status(), frees, make);
  if (!buffer.ok()) return buffer.status();

  auto draft = std::make_shared<Draft>();
  draft->buffer_ = *std::move(buffer);
  draft->kind_ = spec.kind;
  draft->replace_ = spec.replace;
  draft->ttl_ = ttl;

  // Another call may have taken the name while memory was being allocated.
  const std::lock_guard lock(mutex_);
  const absl::Time now = SteadyNow();
  RETURN_IF_ERROR(CheckFree(spec, now));
  drafts_[spec.name].emplace(version, draft);
  CountWriting(draft->buffer(), 1);
  if (draft->kind_ == Draft::Kind::kRanges) {
    draft->last_use_ = now;
    draft->idle_place_ = idle_.insert(idle_.end(), draft.get());
  }
  return draft;
}

absl::StatusOr<Charge> BufferStore::TakeOwnCount() {
  return own_count_.Take(1, "TENANT_QUOTA_EXCEEDED", "buffers",
                         "the tenant's buffers have reached its quota of buffers");
}

absl::StatusOr<Charge> BufferStore::TakeCount() {
  return Charge::TakeOne(shared_->count, "TOO_MANY_BUFFERS",
                         "the server already holds the maximum number of buffers");
}

absl::Status BufferStore::Reserve(Buffer& buffer) {
  const auto for_shards = [&](std::vector<Charge>& charges, const auto& take) -> absl::Status {
    for (const Shard& shard : buffer.shards_) {
      ASSIGN_OR_RETURN(Charge charge,
                       take(shard.device, AllocationBytes(shard, buffer.shards_.size())));
      charges.push_back(std::move(charge));
    }
    return absl::OkStatus();
  };
  // A store's own limits are checked first, so that a tenant that has reached them learns nothing
  // about other tenants.
  ASSIGN_OR_RETURN(buffer.own_count_, TakeOwnCount());
  RETURN_IF_ERROR(for_shards(buffer.own_bytes_, [&](const Device* device, std::uint64_t bytes) {
    return own_bytes_.at(device).Take(
        bytes, "TENANT_QUOTA_EXCEEDED", "bytes",
        "the tenant's buffers would take more than its quota of bytes allows");
  }));
  ASSIGN_OR_RETURN(buffer.count_, TakeCount());
  RETURN_IF_ERROR(for_shards(buffer.bytes_, [&](const Device* device, std::uint64_t bytes) {
    absl::StatusOr<Charge> taken =
        Charge::Take(*shared_->bytes.at(device), bytes, "QUOTA_EXCEEDED",
                     "the buffers on this device would take more memory than the server allows");
    if (taken.ok()) return taken;
    absl::Status full = taken.status();
    SetErrorMetadata(full, "device", device->info().name);
    return absl::StatusOr<Charge>(full);
  }));
  ASSIGN_OR_RETURN(buffer.memory_, Allocate(buffer.shards_));
  return absl::OkStatus();
}

std::vector<std::uint64_t> BufferStore::FreesOf(absl::Span<const Shard> shards) const {
  std::vector<std::uint64_t> frees;
  frees.reserve(shards.size());
  for (const Shard& shard : shards) frees.push_back(prepared(*shard.device).frees());
  return frees;
}

absl::StatusOr<std::shared_ptr<Buffer>> BufferStore::MakeAgain(
    absl::Span<const Shard> shards, absl::Status refused, std::vector<std::uint64_t> frees,
    absl::FunctionRef<absl::StatusOr<std::shared_ptr<Buffer>>()> make) {
  const bool swept = !Sweep(SteadyNow()).empty();
  std::deque<PreparedOperands::Claim> claims;
  for (const Shard& shard : shards) claims.emplace_back(prepared(*shard.device));
  // The server's own sweep may have freed memory since, so an allocation refused by a limit is
  // always tried again. A device that is out of memory has none until something is freed.
  bool again = swept || !absl::EndsWith(ErrorReason(refused), "MEMORY_EXHAUSTED");
  for (;;) {
    const std::string reason = ErrorReason(refused);
    for (std::size_t i = 0; i < shards.size(); ++i) {
      if (reason == "QUOTA_EXCEEDED") {
        claims[i].MakeRoom(AllocationBytes(shards[i], shards.size()));
      } else if (absl::EndsWith(reason, "MEMORY_EXHAUSTED")) {
        claims[i].MakeAllRoom(frees[i]);
      }
    }
    if (std::vector<std::uint64_t> now = FreesOf(shards); now != frees) {
      frees = std::move(now);
      again = true;
    }
    if (!std::exchange(again, false)) return refused;
    absl::StatusOr<std::shared_ptr<Buffer>> buffer = make();
    if (!absl::IsResourceExhausted(buffer.status())) return buffer;
    refused = buffer.status();
  }
}

absl::StatusOr<std::shared_ptr<Draft>> BufferStore::FindDraft(std::string_view name,
                                                              std::uint64_t version) {
  const std::lock_guard lock(mutex_);
  return FindDraftLocked(name, version);
}

absl::Status BufferStore::CheckWriteLocked(const Draft& draft, std::uint64_t offset,
                                           std::uint64_t size) {
  const Buffer& buffer = *draft.buffer_;
  const std::uint64_t limit = buffer.type().bytes();
  if (size > limit || offset > limit - size) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RANGE",
                     absl::StrCat("data reaches beyond the end of buffer '", buffer.name(), "'"),
                     {{"offset", absl::StrCat(offset)},
                      {"size", absl::StrCat(size)},
                      {"limit", absl::StrCat(limit)}});
  }
  return CheckOpenLocked(draft);
}

absl::Status BufferStore::CheckWrite(const Draft& draft, std::uint64_t offset, std::uint64_t size) {
  const std::lock_guard lock(mutex_);
  return CheckWriteLocked(draft, offset, size);
}

absl::StatusOr<void*> BufferStore::BeginWrite(Draft& draft, std::uint64_t offset,
                                              std::uint64_t size) {
  const Buffer& buffer = *draft.buffer_;
  const std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(CheckWriteLocked(draft, offset, size));
  const std::size_t ranges =
      draft.written_.count() + static_cast<std::size_t>(draft.writes_in_flight_);
  if (ranges >= limits_.ranges && draft.written_.Separate({offset, offset + size})) {
    return MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_RANGES",
                     absl::StrCat("buffer '", buffer.name(), "' has been written in ", ranges,
                                  " separate ranges; write a range adjacent to one of them"),
                     {{"name", buffer.name()}, {"limit", absl::StrCat(limits_.ranges)}});
  }
  ++draft.writes_in_flight_;
  Touch(draft, SteadyNow());
  return static_cast<void*>(static_cast<char*>(buffer.data()) + offset);
}

absl::StatusOr<void*> BufferStore::ExtendWrite(Draft& draft, std::uint64_t offset,
                                               std::uint64_t size) {
  const std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(CheckWriteLocked(draft, offset, size));
  Touch(draft, SteadyNow());
  return static_cast<void*>(static_cast<char*>(draft.buffer_->data()) + offset);
}

void BufferStore::EndWrite(Draft& draft, std::uint64_t offset, std::uint64_t size, bool done,
                           std::optional<std::uint32_t> checksum) {
  const std::lock_guard lock(mutex_);
  --draft.writes_in_flight_;
  Touch(draft, SteadyNow());
  const Range range{offset, offset + size};
  if (done) {
    draft.written_.Add(range, checksum);
  } else {
    draft.written_.Remove(range);  // the bytes of an earlier write are lost
  }
}

void BufferStore::AbandonWrite(Draft& draft) {
  const std::lock_guard lock(mutex_);
  --draft.writes_in_flight_;
}

absl::Status BufferStore::CheckOpen(const Draft& draft) {
  const std::lock_guard lock(mutex_);
  return CheckOpenLocked(draft);
}

absl::StatusOr<BufferInfo> BufferStore::Seal(Draft& draft, std::optional<std::uint32_t> checksum,
                                             std::string_view sender) {
  Doomed doomed;
  const absl::Time now = SteadyNow();
  const std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(CheckSealLocked(draft, checksum, now, sender));
  return SealLocked(draft, now, doomed);
}

absl::StatusOr<std::vector<BufferInfo>> BufferStore::SealAll(absl::Span<Draft* const> drafts) {
  Doomed doomed;
  const absl::Time now = SteadyNow();
  const std::lock_guard lock(mutex_);
  for (auto it = drafts.begin(); it != drafts.end(); ++it) {
    const Draft& draft = **it;
    const std::string& name = draft.buffer_->name();
    RETURN_IF_ERROR(CheckSealLocked(draft, {}, now));
    const auto same = [&](const Draft* other) { return other->buffer_->name() == name; };
    if (!draft.replace_ && std::any_of(drafts.begin(), it, same)) return Exists(name, "exists");
  }
  std::vector<BufferInfo> infos;
  infos.reserve(drafts.size());
  for (Draft* draft : drafts) infos.push_back(SealLocked(*draft, now, doomed));
  return infos;
}

absl::StatusOr<BufferInfo> BufferStore::Seal(std::string_view name, std::uint64_t version,
                                             std::optional<std::uint32_t> checksum) {
  Doomed doomed;
  std::shared_ptr<Draft> draft;
  const absl::Time now = SteadyNow();
  const std::lock_guard lock(mutex_);
  const Ready* ready = FindReady(name, now);
  if (version != 0 && ready != nullptr &&
      (version == ready->draft_version || version == ready->buffer->version())) {
    const Buffer& buffer = *ready->buffer;
    absl::Status status = CheckChecksum(buffer.name(), checksum, buffer.checksum(), "the client");
    return status.ok() ? absl::StatusOr<BufferInfo>(Info(*ready)) : status;
  }
  absl::StatusOr<std::shared_ptr<Draft>> found = FindDraftLocked(name, version);
  if (!found.ok()) {
    // The bytes of the READY buffer may differ from those that the caller has written.
    return ErrorReason(found.status()) == "BUFFER_SEALED" ? NotFound(name) : found.status();
  }
  draft = *std::move(found);
  RETURN_IF_ERROR(CheckSealLocked(*draft, checksum, now));
  return SealLocked(*draft, now, doomed);
}

std::optional<std::uint32_t> BufferStore::ChecksumOf(const Draft& draft) {
  return draft.kind_ == Draft::Kind::kResult
             ? std::nullopt
             : draft.written_.Checksum(draft.buffer_->type().bytes());
}

absl::Status BufferStore::CheckSealLocked(const Draft& draft, std::optional<std::uint32_t> checksum,
                                          absl::Time now, std::string_view sender) {
  const Buffer& buffer = *draft.buffer_;
  RETURN_IF_ERROR(CheckOpenLocked(draft));
  const std::uint64_t size = buffer.type().bytes();
  const std::vector<Range> missing = draft.written_.Missing(size, kMostMissing);
  if (!missing.empty() || draft.writes_in_flight_ > 0) return NotReady(buffer.name(), missing);
  RETURN_IF_ERROR(CheckChecksum(buffer.name(), checksum, ChecksumOf(draft), sender));
  if (!draft.replace_ && FindReady(buffer.name(), now) != nullptr)
    return Exists(buffer.name(), "exists");
  return absl::OkStatus();
}

BufferInfo BufferStore::SealLocked(Draft& draft, absl::Time now, Doomed& doomed) {
  Buffer& buffer = *draft.buffer_;
  const Ready* before = FindReady(buffer.name(), now);
  const std::uint64_t draft_version = buffer.version_;
  const std::uint64_t version = before != nullptr && before->buffer->version() > draft_version
                                    ? ++last_version_
                                    : draft_version;
  if (const auto it = ready_.find(buffer.name()); it != ready_.end()) Unlink(it, doomed);
  Ready& ready = ready_[buffer.name()];
  Unlink(draft, Draft::State::kSealed, doomed);
  buffer.version_ = version;
  buffer.checksum_ = ChecksumOf(draft);
  ready.buffer = draft.buffer_;
  CountReady(buffer, 1);
  ready.draft_version = draft_version;
  SetExpiry(buffer.name(), ready, Expiry(now, draft.ttl_));
  return Info(ready);
}

void BufferStore::Discard(Draft& draft) {
  Doomed doomed;
  const std::lock_guard lock(mutex_);
  if (draft.state_ == Draft::State::kOpen) Unlink(draft, Draft::State::kGone, doomed);
}

absl::StatusOr<BufferInfo> BufferStore::Link(std::string_view source, std::uint64_t version,
                                             const BufferSpec& link) {
  RETURN_IF_ERROR(CheckName(link.name));
  ASSIGN_OR_RETURN(absl::Duration ttl, CheckTtl(link.ttl));
  absl::StatusOr<BufferInfo> made = LinkOnce(source, version, link, ttl);
  // Expired buffers count toward the limits until they are swept.
  if (absl::IsResourceExhausted(made.status())) {
    Sweep(SteadyNow());
    made = LinkOnce(source, version, link, ttl);
  }
  return made;
}

absl::StatusOr<BufferInfo> BufferStore::LinkOnce(std::string_view source, std::uint64_t version,
                                                 const BufferSpec& link, absl::Duration ttl) {
  Doomed doomed;
  const absl::Time now = SteadyNow();
  const std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(CheckFree(link, now));
  absl::StatusOr<BufferInfo> found = FindLocked(source, version, now);
  if (!found.ok()) return found.status();
  const Buffer& origin = *found->buffer;
  std::shared_ptr<Buffer> buffer(
      new Buffer(link.name, origin.type(), origin.shards_, ++last_version_));
  ASSIGN_OR_RETURN(buffer->own_count_, TakeOwnCount());
  ASSIGN_OR_RETURN(buffer->count_, TakeCount());
  buffer->checksum_ = origin.checksum();
  buffer->origin_ = origin.origin_ != nullptr ? origin.origin_ : found->buffer;

  if (const auto it = ready_.find(link.name); it != ready_.end()) Unlink(it, doomed);
  Ready& ready = ready_[link.name];
  CountReady(*buffer, 1);
  ready.draft_version = buffer->version();
  ready.buffer = std::move(buffer);
  SetExpiry(link.name, ready, Expiry(now, ttl));
  return Info(ready);
}

std::shared_ptr<const Buffer> BufferStore::Restore(const Restored& restored) {
  const BufferSpec& spec = restored.spec;
  std::shared_ptr<Buffer> buffer(new Buffer(
      spec.name, spec.type, restored.origin != nullptr ? restored.origin->shards_ : ShardsOf(spec),
      restored.version, restored.create_time));
  buffer->checksum_ = restored.checksum;
  if (restored.origin != nullptr) {
    buffer->origin_ = restored.origin;
    if (absl::StatusOr<Charge> own = TakeOwnCount(); own.ok()) buffer->own_count_ = *std::move(own);
    if (absl::StatusOr<Charge> count = TakeCount(); count.ok()) buffer->count_ = *std::move(count);
  } else {
    buffer->arrival_ = restored.arrival;
    if (absl::Status reserved = Reserve(*buffer); !reserved.ok()) {
      buffer->bytes_.clear();
      buffer->own_bytes_.clear();
      restored.arrival->End(std::move(reserved));
    }
  }
  const std::lock_guard lock(mutex_);
  last_version_ = std::max(last_version_, restored.version);
  Ready& ready = ready_[spec.name];
  ready.buffer = buffer;
  ready.draft_version = restored.version;
  ready.expire_time = absl::InfiniteFuture();
  SetExpiry(spec.name, ready, restored.expire_time);
  CountReady(*buffer, 1);
  return buffer;
}

std::uint64_t BufferStore::last_version() {
  const std::lock_guard lock(mutex_);
  return last_version_;
}

void BufferStore::SkipVersions(std::uint64_t last) {
  const std::lock_guard lock(mutex_);
  last_version_ = std::max(last_version_, last);
}

namespace {

// Returns OK if the buffer's bytes have arrived or `awaited` waits for them.
absl::Status AwaitBytes(const Buffer& buffer, Awaited* awaited) {
  const std::shared_ptr<Arrival>& arrival = buffer.arrival();
  if (arrival == nullptr) return absl::OkStatus();
  if (arrival->ended()) return arrival->status();
  if (awaited == nullptr) return NotReady(buffer.name(), {{0, buffer.type().bytes()}});
  awaited->Add(arrival);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BufferInfo> BufferStore::Find(std::string_view name, std::uint64_t version,
                                             Awaited* awaited) {
  const std::lock_guard lock(mutex_);
  absl::StatusOr<BufferInfo> info = FindLocked(name, version, SteadyNow());
  if (info.ok()) RETURN_IF_ERROR(AwaitBytes(*info->buffer, awaited));
  return info;
}

void BufferStore::FindAll(absl::Span<Wanted> wanted, Awaited& awaited) {
  const absl::Time now = SteadyNow();
  const std::lock_guard lock(mutex_);
  for (Wanted& one : wanted) {
    if (one.name.empty()) continue;
    absl::StatusOr<BufferInfo> info = FindLocked(one.name, one.version, now);
    one.status = info.ok() ? AwaitBytes(*info->buffer, &awaited) : info.status();
    if (one.status.ok()) one.buffer = std::move(info->buffer);
  }
}

absl::StatusOr<BufferInfo> BufferStore::Get(std::string_view name, std::uint64_t version) {
  const absl::Time now = SteadyNow();
  const std::lock_guard lock(mutex_);
  if (const Ready* ready = FindReady(name, now, version)) return Info(*ready);
  const std::shared_ptr<Draft> draft = FindVisible(name, version);
  if (draft == nullptr) return Absent(name, version, now);
  return Info(*draft);
}

std::vector<BufferInfo> BufferStore::Drafts(std::string_view name) {
  std::vector<BufferInfo> infos;
  const std::lock_guard lock(mutex_);
  const auto drafts = drafts_.find(name);
  if (drafts == drafts_.end()) return infos;
  for (auto it = drafts->second.rbegin(); it != drafts->second.rend() && infos.size() < kMostDrafts;
       ++it) {
    if (it->second->kind_ != Draft::Kind::kResult) infos.push_back(Info(*it->second));
  }
  std::reverse(infos.begin(), infos.end());
  return infos;
}

BufferInfo BufferStore::Describe(const Draft& draft) {
  const std::lock_guard lock(mutex_);
  return Info(draft);
}

std::vector<BufferInfo> BufferStore::List(std::string_view prefix, std::string_view after,
                                          std::size_t limit) {
  std::vector<BufferInfo> infos;
  const absl::Time now = SteadyNow();
  const std::lock_guard lock(mutex_);
  const bool from_after = after >= prefix;
  auto ready = from_after ? ready_.upper_bound(after) : ready_.lower_bound(prefix);
  auto drafts = from_after ? drafts_.upper_bound(after) : drafts_.lower_bound(prefix);
  const auto more = [&](const auto& it, const auto& map) {
    return it != map.end() && it->first.compare(0, prefix.size(), prefix) == 0;
  };
  while (infos.size() < limit) {
    const bool has_ready = more(ready, ready_);
    const bool has_drafts = more(drafts, drafts_);
    if (has_ready && ready->second.expire_time <= now) {
      ++ready;
    } else if (has_ready && (!has_drafts || ready->first <= drafts->first)) {
      if (has_drafts && ready->first == drafts->first) ++drafts;
      infos.push_back(Info(ready->second));
      ++ready;
    } else if (has_drafts) {
      const std::shared_ptr<Draft> draft = FindVisible(drafts->first, 0);
      if (draft != nullptr) infos.push_back(Info(*draft));
      ++drafts;
    } else {
      break;
    }
  }
  return infos;
}

absl::StatusOr<BufferInfo> BufferStore::SetTtl(std::string_view name, std::uint64_t version,
                                               std::optional<absl::Duration> asked) {
  ASSIGN_OR_RETURN(absl::Duration ttl, CheckTtl(asked.value_or(absl::InfiniteDuration())));
  const absl::Time now = SteadyNow();
  const std::lock_guard lock(mutex_);
  if (Ready* ready = FindReady(name, now, version)) {
    SetExpiry(ready->buffer->name(), *ready, Expiry(now, ttl));
    return Info(*ready);
  }
  const std::shared_ptr<Draft> draft = FindVisible(name, version);
  if (draft == nullptr) return Absent(name, version, now);
  draft->ttl_ = ttl;
  return Info(*draft);
}

absl::Status BufferStore::Delete(std::string_view name, std::uint64_t version) {
  Doomed doomed;
  const absl::Time now = SteadyNow();
  const std::lock_guard lock(mutex_);
  bool found = FindReady(name, now, version) != nullptr;
  if (found) Unlink(ready_.find(name), doomed);
  while (const std::shared_ptr<Draft> draft = FindVisible(name, version)) {
    found = true;
    Unlink(*draft, Draft::State::kGone, doomed);
  }
  return found ? absl::OkStatus() : Absent(name, version, now);
}

std::vector<std::shared_ptr<const void>> BufferStore::Sweep(absl::Time now) {
  Doomed doomed;
  for (const auto& [device, prepared] : shared_->prepared) {
    for (std::shared_ptr<const void>& gone : prepared->Sweep()) doomed.push_back(std::move(gone));
  }
  const std::lock_guard lock(mutex_);
  while (!expiries_.empty() && expiries_.begin()->first <= now) {
    const auto it = ready_.find(expiries_.begin()->second);
    Buffer& buffer = *it->second.buffer;
    // Nothing else refers to the buffer, so its charges end now, even if freeing its memory takes a
    // long time.
    if (it->second.buffer.use_count() == 1) {
      buffer.own_count_ = Charge();
      buffer.own_bytes_.clear();
      buffer.count_ = Charge();
    }
    Unlink(it, doomed);
  }
  while (!idle_.empty() && now - idle_.front()->last_use_ > limits_.idle_draft) {
    Draft& draft = *idle_.front();
    if (draft.writes_in_flight_ > 0) {
      Touch(draft, now);
    } else {
      Unlink(draft, Draft::State::kGone, doomed);
    }
  }
  return doomed;
}

std::vector<std::shared_ptr<const void>> BufferStore::Evict(const Device& device) {
  Doomed doomed = prepared(device).ForgetAll();
  const std::lock_guard lock(mutex_);
  if (const Tally& tally = tallies_[&device];
      tally.ready + tally.writing + tally.ready_bytes + tally.writing_bytes == 0)
    return doomed;
  for (auto it = ready_.begin(); it != ready_.end();) {
    const auto next = std::next(it);
    if (it->second.buffer->IsOn(device)) Unlink(it, doomed);
    it = next;
  }
  std::vector<std::shared_ptr<Draft>> drafts;
  for (const auto& [name, versions] : drafts_) {
    for (const auto& [version, draft] : versions)
      if (draft->buffer().IsOn(device)) drafts.push_back(draft);
  }
  for (const std::shared_ptr<Draft>& draft : drafts) Unlink(*draft, Draft::State::kGone, doomed);
  return doomed;
}

BufferStore::Ready* BufferStore::FindReady(std::string_view name, absl::Time now,
                                           std::uint64_t version) {
  const auto it = ready_.find(name);
  if (it == ready_.end() || it->second.expire_time <= now) return nullptr;
  return version == 0 || version == it->second.buffer->version() ? &it->second : nullptr;
}

std::shared_ptr<Draft> BufferStore::FindVisible(std::string_view name, std::uint64_t version) {
  const auto drafts = drafts_.find(name);
  if (drafts == drafts_.end()) return nullptr;
  for (auto it = drafts->second.rbegin(); it != drafts->second.rend(); ++it) {
    if (it->second->kind_ == Draft::Kind::kResult) continue;
    if (version == 0 || version == it->first) return it->second;
  }
  return nullptr;
}

absl::StatusOr<std::shared_ptr<Draft>> BufferStore::FindDraftLocked(std::string_view name,
                                                                    std::uint64_t version) {
  std::shared_ptr<Draft> found, owned;
  std::vector<std::uint64_t> versions;
  if (const auto drafts = drafts_.find(name); drafts != drafts_.end()) {
    for (const auto& [number, draft] : drafts->second) {
      if (draft->kind_ == Draft::Kind::kResult || (version != 0 && version != number)) continue;
      if (draft->kind_ == Draft::Kind::kStream) {
        owned = draft;
        continue;
      }
      found = draft;
      versions.push_back(number);
      if (versions.size() == kVersionsInErrors) break;
    }
  }
  if (versions.size() > 1) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "VERSION_REQUIRED",
        absl::StrCat("buffer '", Absl(name), "' has several drafts; give the version of one"),
        {{"name", std::string(name)}, {"versions", absl::StrJoin(versions, ", ")}});
  }
  if (found != nullptr) return found;
  if (owned != nullptr) return NotReady(*owned, owned->written_);
  const absl::Time now = SteadyNow();
  const Ready* ready = FindReady(name, now);
  if (ready != nullptr &&
      (version == 0 || version == ready->draft_version || version == ready->buffer->version())) {
    return Sealed(name);
  }
  return Absent(name, version, now);
}

absl::StatusOr<BufferInfo> BufferStore::FindLocked(std::string_view name, std::uint64_t version,
                                                   absl::Time now) {
  if (const Ready* ready = FindReady(name, now, version)) return Info(*ready);
  if (version != 0 || FindReady(name, now) == nullptr) {
    const std::shared_ptr<Draft> draft = FindVisible(name, version);
    if (draft != nullptr) return NotReady(*draft, draft->written_);
  }
  return Absent(name, version, now);
}

absl::Status BufferStore::Absent(std::string_view name, std::uint64_t version, absl::Time now) {
  if (version == 0) return NotFound(name);
  if (const Ready* ready = FindReady(name, now)) {
    return VersionMismatch(name, version, ready->buffer->version());
  }
  const std::shared_ptr<Draft> draft = FindVisible(name, 0);
  return draft != nullptr ? VersionMismatch(name, version, draft->buffer_->version_)
                          : NotFound(name);
}

absl::Status BufferStore::CheckFree(const BufferSpec& spec, absl::Time now) {
  if (spec.replace) return absl::OkStatus();
  if (FindReady(spec.name, now) != nullptr) {
    return Exists(spec.name, "exists, and this call does not ask to replace it");
  }
  if (const auto drafts = drafts_.find(spec.name); drafts != drafts_.end()) {
    for (const auto& [version, draft] : drafts->second) {
      if (!draft->replace_) return Exists(spec.name, "is being written");
    }
  }
  return absl::OkStatus();
}

absl::Status BufferStore::CheckOpenLocked(const Draft& draft) {
  if (draft.state_ == Draft::State::kGone) return NotFound(draft.buffer_->name());
  if (draft.state_ == Draft::State::kSealed) return Sealed(draft.buffer_->name());
  return absl::OkStatus();
}

void BufferStore::SetExpiry(const std::string& name, Ready& ready, absl::Time expire_time) {
  const auto it = ready_.find(name);
  expiries_.erase({ready.expire_time, it->first});
  // An expiry time at the end of a Timestamp's range means never, and is not put in the list.
  ready.expire_time = expire_time >= kLatest ? absl::InfiniteFuture() : expire_time;
  if (ready.expire_time != absl::InfiniteFuture()) expiries_.emplace(expire_time, it->first);
}

void BufferStore::Unlink(ReadyMap::iterator it, Doomed& doomed) {
  expiries_.erase({it->second.expire_time, it->first});
  CountReady(*it->second.buffer, -1);
  doomed.push_back(std::move(it->second.buffer));
  ready_.erase(it);
}

void BufferStore::Unlink(Draft& draft, Draft::State state, Doomed& doomed) {
  draft.state_ = state;
  CountWriting(draft.buffer(), -1);
  if (draft.kind_ == Draft::Kind::kRanges) idle_.erase(draft.idle_place_);
  const auto drafts = drafts_.find(draft.buffer_->name());
  const auto it = drafts->second.find(draft.buffer_->version_);
  doomed.push_back(std::move(it->second));
  drafts->second.erase(it);
  if (drafts->second.empty()) drafts_.erase(drafts);
}

void BufferStore::Touch(Draft& draft, absl::Time now) {
  if (draft.kind_ != Draft::Kind::kRanges || draft.state_ != Draft::State::kOpen) return;
  draft.last_use_ = now;
  idle_.splice(idle_.end(), idle_, draft.idle_place_);
}

void BufferStore::CountReady(const Buffer& buffer, int change) {
  tallies_[&buffer.device()].ready += change;
  for (const Shard& shard : buffer.shards())
    tallies_[shard.device].ready_bytes += change * (shard.end - shard.begin);
}

void BufferStore::CountWriting(const Buffer& buffer, int change) {
  tallies_[&buffer.device()].writing += change;
  for (const Shard& shard : buffer.shards())
    tallies_[shard.device].writing_bytes += change * (shard.end - shard.begin);
}

BufferStore::Tally BufferStore::tally(const Device& device) {
  const std::lock_guard lock(mutex_);
  return tallies_[&device];
}

BufferInfo BufferStore::Info(const Ready& ready) {
  const Buffer& buffer = *ready.buffer;
  return {ready.buffer,      buffer.version(),  true, buffer.type().bytes(),
          ready.expire_time, buffer.checksum(), {}};
}

BufferInfo BufferStore::Info(const Draft& draft) {
  const std::uint64_t size = draft.buffer_->type().bytes();
  return {draft.buffer_,
          draft.buffer_->version_,
          draft.state_ == Draft::State::kSealed,
          draft.written_.Prefix(),
          absl::InfiniteFuture(),
          {},
          draft.written_.Missing(size, kMostMissing)};
}

absl::StatusOr<absl::Duration> BufferStore::CheckTtl(std::optional<absl::Duration> ttl) const {
  if (!ttl.has_value()) return std::min(limits_.default_ttl, limits_.max_ttl);
  const absl::Duration limit = *ttl == absl::InfiniteDuration()
                                   ? limits_.max_ttl
                                   : std::min(limits_.max_ttl, kLatest - SteadyNow());
  if (*ttl > limit) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_TTL", "the ttl is longer than this server allows",
        {{"field", "ttl"},
         {"value", *ttl == absl::InfiniteDuration() ? "none" : absl::FormatDuration(*ttl)},
         {"limit", absl::FormatDuration(limit)}});
  }
  return *ttl;
}

absl::StatusOr<void*> ResultDraft::Open() {
  ASSIGN_OR_RETURN(draft_, store_.Create(spec_));
  return store_.BeginWrite(*draft_, 0, spec_.type.bytes());
}

absl::StatusOr<BufferInfo> ResultDraft::Seal() {
  store_.EndWrite(*draft_, 0, spec_.type.bytes(), true);
  return store_.Seal(*draft_);
}

absl::StatusOr<std::vector<BufferInfo>> ResultDraft::SealAll(
    absl::Span<ResultDraft* const> results) {
  if (results.empty()) return std::vector<BufferInfo>();
  std::vector<Draft*> drafts;
  for (ResultDraft* result : results) {
    result->store_.EndWrite(*result->draft_, 0, result->spec_.type.bytes(), true);
    drafts.push_back(result->draft_.get());
  }
  return results.front()->store_.SealAll(drafts);
}

}  // namespace tessera
