#include "server/buffer_store.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/error.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestName = 128;
constexpr std::size_t kRangesInErrors = 16;

absl::string_view Absl(std::string_view s) { return {s.data(), s.size()}; }

absl::Status NotFound(std::string_view name) {
  return MakeError(absl::StatusCode::kNotFound, "BUFFER_NOT_FOUND",
                   absl::StrCat("there is no buffer '", Absl(name), "'"),
                   {{"name", std::string(name)}});
}

absl::Status Sealed(std::string_view name) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "BUFFER_SEALED",
                   absl::StrCat("buffer '", Absl(name), "' is READY and cannot change"),
                   {{"name", std::string(name)}});
}

absl::Status CheckName(std::string_view name) {
  const bool valid =
      !name.empty() && name.size() <= kLongestName &&
      std::all_of(name.begin(), name.end(), [](unsigned char c) {
        return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '/' || c == '-';
      });
  if (valid) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_NAME",
                   "a buffer's name is 1 to 128 characters of [a-zA-Z0-9._/-]",
                   {{"field", "name"}, {"value", std::string(name)}});
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

// RESOURCE_EXHAUSTED / QUOTA_EXCEEDED {requested, free, total}.
absl::Status Take(Budget& budget, std::uint64_t bytes) {
  if (budget.TryTake(bytes)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "QUOTA_EXCEEDED",
                   "the buffers of this device would take more than the server allows",
                   {{"requested", absl::StrCat(bytes)},
                    {"free", absl::StrCat(budget.free())},
                    {"total", absl::StrCat(budget.limit())}});
}

}  // namespace

void Buffer::Release() {
  memory_ = Memory();
  budget_.Return(type_.bytes());
}

void RangeSet::Add(Range range) {
  if (range.begin >= range.end) return;
  auto it = ranges_.upper_bound(range.begin);
  if (it != ranges_.begin() && std::prev(it)->second >= range.begin) --it;
  while (it != ranges_.end() && it->first <= range.end) {
    range.begin = std::min(range.begin, it->first);
    range.end = std::max(range.end, it->second);
    it = ranges_.erase(it);
  }
  ranges_.emplace(range.begin, range.end);
}

void RangeSet::Remove(Range range) {
  if (range.begin >= range.end) return;
  auto it = ranges_.upper_bound(range.begin);
  if (it != ranges_.begin()) --it;
  while (it != ranges_.end() && it->first < range.end) {
    const Range old{it->first, it->second};
    if (old.end <= range.begin) {
      ++it;
      continue;
    }
    it = ranges_.erase(it);
    if (old.begin < range.begin) ranges_.emplace(old.begin, range.begin);
    if (range.end < old.end) ranges_.emplace(range.end, old.end);
  }
}

std::vector<Range> RangeSet::Missing(std::uint64_t size, std::size_t limit) const {
  std::vector<Range> missing;
  std::uint64_t end = 0;  // of what is known to be there
  for (auto it = ranges_.begin(); it != ranges_.end() && missing.size() < limit; ++it) {
    if (it->first > end) missing.push_back({end, it->first});
    end = it->second;
  }
  if (end < size && missing.size() < limit) missing.push_back({end, size});
  return missing;
}

std::uint64_t RangeSet::Prefix() const {
  return ranges_.empty() || ranges_.begin()->first != 0 ? 0 : ranges_.begin()->second;
}

std::string ToString(const std::vector<Range>& ranges) {
  std::string text;
  for (std::size_t i = 0; i < ranges.size() && i < kRangesInErrors; ++i) {
    absl::StrAppend(&text, i > 0 ? ", " : "", ranges[i].begin, "-", ranges[i].end);
  }
  if (ranges.size() > kRangesInErrors) text += ", ...";
  return text;
}

BufferStore::BufferStore(const std::vector<Place>& places, const Limits& limits) : limits_(limits) {
  for (const Place& place : places) {
    budgets_.emplace(place.device, std::make_unique<Budget>(place.limit));
  }
}

absl::StatusOr<std::shared_ptr<Draft>> BufferStore::Create(const BufferSpec& spec) {
  if (absl::Status status = CheckName(spec.name); !status.ok()) return status;
  const absl::Time now = absl::Now();
  absl::StatusOr<absl::Time> expire_time = ExpireTime(spec.ttl, now);
  if (!expire_time.ok()) return expire_time.status();

  std::uint64_t version = 0;
  {
    const std::lock_guard lock(mutex_);
    if (absl::Status status = CheckFree(spec, now); !status.ok()) return status;
    version = ++last_version_;
  }

  Budget& budget = *budgets_.at(spec.device);
  const std::uint64_t bytes = spec.type.bytes();
  if (absl::Status status = Take(budget, bytes); !status.ok()) return status;
  absl::StatusOr<Memory> memory = Allocate(*spec.device, static_cast<std::size_t>(bytes));
  if (!memory.ok()) {
    budget.Return(bytes);
    return memory.status();
  }
  auto draft = std::make_shared<Draft>();
  draft->buffer_.reset(
      new Buffer(spec.name, spec.type, *spec.device, version, budget, *std::move(memory)));
  draft->replace_ = spec.replace;
  draft->exclusive_ = spec.exclusive;
  draft->expire_time_ = *expire_time;
  draft->last_use_ = now;

  // Someone else may have taken the name while memory was being found.
  const std::lock_guard lock(mutex_);
  if (absl::Status status = CheckFree(spec, now); !status.ok()) return status;
  drafts_.emplace(spec.name, draft);
  return draft;
}

absl::StatusOr<std::shared_ptr<Draft>> BufferStore::FindDraft(std::string_view name) {
  const std::lock_guard lock(mutex_);
  const auto it = drafts_.find(name);
  if (it == drafts_.end()) {
    return FindReady(name, absl::Now()) != nullptr ? Sealed(name) : NotFound(name);
  }
  if (it->second->exclusive_) {
    return NotReady(name, it->second->written_.Missing(it->second->buffer_->type().bytes(),
                                                       kRangesInErrors + 1));
  }
  return it->second;
}

absl::StatusOr<void*> BufferStore::BeginWrite(Draft& draft, std::uint64_t offset,
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
  const std::lock_guard lock(mutex_);
  if (draft.state_ == Draft::State::kGone) return NotFound(buffer.name());
  if (draft.state_ == Draft::State::kSealed) return Sealed(buffer.name());
  ++draft.writes_in_flight_;
  draft.last_use_ = absl::Now();
  return static_cast<void*>(static_cast<char*>(buffer.data()) + offset);
}

void BufferStore::EndWrite(Draft& draft, std::uint64_t offset, std::uint64_t size, bool done) {
  const std::lock_guard lock(mutex_);
  --draft.writes_in_flight_;
  draft.last_use_ = absl::Now();
  const Range range{offset, offset + size};
  if (done) {
    draft.written_.Add(range);
  } else {
    draft.written_.Remove(range);  // what an earlier write left there is gone
  }
}

absl::StatusOr<BufferInfo> BufferStore::Seal(const std::shared_ptr<Draft>& draft) {
  Ready replaced;  // freed after the lock
  const std::lock_guard lock(mutex_);
  return SealLocked(*draft, replaced);
}

absl::StatusOr<BufferInfo> BufferStore::Seal(std::string_view name) {
  Ready replaced;
  std::shared_ptr<Draft> draft;
  const std::lock_guard lock(mutex_);
  if (const auto it = drafts_.find(name); it != drafts_.end()) {
    draft = it->second;
    if (draft->exclusive_) {
      return NotReady(name, draft->written_.Missing(draft->buffer_->type().bytes(), kMostMissing));
    }
    return SealLocked(*draft, replaced);
  }
  const Ready* ready = FindReady(name, absl::Now());
  if (ready == nullptr) return NotFound(name);
  return Info(*ready);
}

absl::StatusOr<BufferInfo> BufferStore::CreateFrom(
    const BufferSpec& spec, absl::FunctionRef<absl::Status(void* memory)> fill) {
  absl::StatusOr<std::shared_ptr<Draft>> draft = Create(spec);
  if (!draft.ok()) return draft.status();
  const auto discard = absl::MakeCleanup([&] { Discard(**draft); });
  const std::uint64_t size = spec.type.bytes();
  absl::StatusOr<void*> memory = BeginWrite(**draft, 0, size);
  if (!memory.ok()) return memory.status();
  absl::Status filled = fill(*memory);
  EndWrite(**draft, 0, size, filled.ok());
  if (!filled.ok()) return filled;
  return Seal(*draft);
}

absl::StatusOr<BufferInfo> BufferStore::SealLocked(Draft& draft, Ready& replaced) {
  const Buffer& buffer = *draft.buffer_;
  if (draft.state_ == Draft::State::kGone) return NotFound(buffer.name());
  if (draft.state_ == Draft::State::kSealed) return Sealed(buffer.name());
  const std::vector<Range> missing = draft.written_.Missing(buffer.type().bytes(), kMostMissing);
  if (!missing.empty() || draft.writes_in_flight_ > 0) return NotReady(buffer.name(), missing);
  if (!draft.replace_ && FindReady(buffer.name(), absl::Now()) != nullptr) {
    return Exists(buffer.name(), "exists");
  }
  Ready& ready = ready_[buffer.name()];
  replaced = std::exchange(ready, Ready{draft.buffer_, draft.expire_time_});
  next_expiry_ = std::min(next_expiry_, draft.expire_time_);
  draft.state_ = Draft::State::kSealed;
  drafts_.erase(buffer.name());
  return Info(ready);
}

void BufferStore::Discard(Draft& draft) {
  std::shared_ptr<Draft> doomed;  // freed after the lock
  const std::lock_guard lock(mutex_);
  if (draft.state_ != Draft::State::kOpen) return;
  draft.state_ = Draft::State::kGone;
  const auto it = drafts_.find(draft.buffer_->name());
  doomed = std::move(it->second);
  drafts_.erase(it);
}

absl::StatusOr<std::shared_ptr<const Buffer>> BufferStore::Find(std::string_view name) {
  const std::lock_guard lock(mutex_);
  if (const Ready* ready = FindReady(name, absl::Now())) return ready->buffer;
  const auto it = drafts_.find(name);
  if (it == drafts_.end()) return NotFound(name);
  const Draft& draft = *it->second;
  return NotReady(name, draft.written_.Missing(draft.buffer_->type().bytes(), kRangesInErrors + 1));
}

absl::StatusOr<BufferInfo> BufferStore::Get(std::string_view name) {
  const std::lock_guard lock(mutex_);
  if (const Ready* ready = FindReady(name, absl::Now())) return Info(*ready);
  const auto it = drafts_.find(name);
  if (it == drafts_.end()) return NotFound(name);
  return Info(*it->second);
}

BufferInfo BufferStore::Describe(const Draft& draft) {
  const std::lock_guard lock(mutex_);
  return Info(draft);
}

std::vector<BufferInfo> BufferStore::List(std::string_view prefix, std::string_view after,
                                          std::size_t limit) {
  std::vector<BufferInfo> infos;
  const absl::Time now = absl::Now();
  const std::lock_guard lock(mutex_);
  const bool from_after = after >= prefix;
  auto ready = from_after ? ready_.upper_bound(after) : ready_.lower_bound(prefix);
  auto draft = from_after ? drafts_.upper_bound(after) : drafts_.lower_bound(prefix);
  const auto more = [&](const auto& it, const auto& map) {
    return it != map.end() && it->first.compare(0, prefix.size(), prefix) == 0;
  };
  while (infos.size() < limit) {
    const bool has_ready = more(ready, ready_);
    const bool has_draft = more(draft, drafts_);
    if (has_ready && ready->second.expire_time <= now) {
      ++ready;
    } else if (has_ready && (!has_draft || ready->first <= draft->first)) {
      if (has_draft && ready->first == draft->first) ++draft;
      infos.push_back(Info(ready->second));
      ++ready;
    } else if (has_draft) {
      infos.push_back(Info(*draft->second));
      ++draft;
    } else {
      break;
    }
  }
  return infos;
}

absl::StatusOr<BufferInfo> BufferStore::SetTtl(std::string_view name,
                                               std::optional<absl::Duration> ttl) {
  const absl::Time now = absl::Now();
  if (!ttl.has_value()) ttl = absl::InfiniteDuration();
  absl::StatusOr<absl::Time> expire_time = ExpireTime(ttl, now);
  if (!expire_time.ok()) return expire_time.status();
  const std::lock_guard lock(mutex_);
  if (Ready* ready = FindReady(name, now)) {
    ready->expire_time = *expire_time;
    next_expiry_ = std::min(next_expiry_, *expire_time);
    return Info(*ready);
  }
  const auto it = drafts_.find(name);
  if (it == drafts_.end()) return NotFound(name);
  it->second->expire_time_ = *expire_time;
  return Info(*it->second);
}

absl::Status BufferStore::Delete(std::string_view name) {
  Ready ready;  // both are freed after the lock
  std::shared_ptr<Draft> draft;
  const std::lock_guard lock(mutex_);
  const bool found = FindReady(name, absl::Now()) != nullptr;
  if (const auto it = ready_.find(name); it != ready_.end()) {
    ready = std::move(it->second);
    ready_.erase(it);
  }
  if (const auto it = drafts_.find(name); it != drafts_.end()) {
    draft = std::move(it->second);
    draft->state_ = Draft::State::kGone;
    drafts_.erase(it);
  }
  return found || draft != nullptr ? absl::OkStatus() : NotFound(name);
}

void BufferStore::Sweep(absl::Time now) {
  std::vector<std::shared_ptr<const void>> doomed;  // freed after the lock
  const std::lock_guard lock(mutex_);
  if (next_expiry_ <= now) {
    next_expiry_ = absl::InfiniteFuture();
    for (auto it = ready_.begin(); it != ready_.end();) {
      if (it->second.expire_time <= now) {
        doomed.push_back(std::move(it->second.buffer));
        it = ready_.erase(it);
      } else {
        next_expiry_ = std::min(next_expiry_, it->second.expire_time);
        ++it;
      }
    }
  }
  for (auto it = drafts_.begin(); it != drafts_.end();) {
    Draft& draft = *it->second;
    if (!draft.exclusive_ && draft.writes_in_flight_ == 0 &&
        now - draft.last_use_ > limits_.idle_draft) {
      draft.state_ = Draft::State::kGone;
      doomed.push_back(std::move(it->second));
      it = drafts_.erase(it);
    } else {
      ++it;
    }
  }
}

BufferStore::Ready* BufferStore::FindReady(std::string_view name, absl::Time now) {
  const auto it = ready_.find(name);
  return it == ready_.end() || it->second.expire_time <= now ? nullptr : &it->second;
}

absl::Status BufferStore::CheckFree(const BufferSpec& spec, absl::Time now) {
  if (drafts_.count(spec.name) != 0) return Exists(spec.name, "is being written");
  if (!spec.replace && FindReady(spec.name, now) != nullptr) {
    return Exists(spec.name, "exists, and this call does not ask to replace it");
  }
  return absl::OkStatus();
}

BufferInfo BufferStore::Info(const Ready& ready) {
  return {ready.buffer, true, ready.buffer->type().bytes(), ready.expire_time, {}};
}

BufferInfo BufferStore::Info(const Draft& draft) {
  const std::uint64_t size = draft.buffer_->type().bytes();
  return {draft.buffer_, draft.state_ == Draft::State::kSealed, draft.written_.Prefix(),
          draft.expire_time_, draft.written_.Missing(size, kMostMissing)};
}

absl::StatusOr<absl::Time> BufferStore::ExpireTime(std::optional<absl::Duration> ttl,
                                                   absl::Time from) const {
  if (!ttl.has_value()) return from + std::min(limits_.default_ttl, limits_.max_ttl);
  if (*ttl > limits_.max_ttl) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_TTL", "the ttl is longer than this server allows",
        {{"field", "ttl"},
         {"value", *ttl == absl::InfiniteDuration() ? "none" : absl::FormatDuration(*ttl)},
         {"limit", absl::FormatDuration(limits_.max_ttl)}});
  }
  return from + *ttl;
}

}  // namespace tessera
