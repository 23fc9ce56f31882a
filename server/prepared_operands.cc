#include "server/prepared_operands.h"

#include <algorithm>
#include <utility>

namespace tessera {

bool PreparedOperands::MakeRoom(std::uint64_t bytes) {
  // What a call uses is not free before the call is done.
  const auto forgettable = [](const std::shared_ptr<Entry>& entry) {
    return entry->state == State::kReady && entry.use_count() == 1;
  };
  Doomed doomed;  // freed after the lock
  const std::lock_guard lock(mutex_);
  std::uint64_t free = budget_.free(), all = free;
  for (const std::shared_ptr<Entry>& entry : entries_)
    if (forgettable(entry)) all += entry->charge.amount();
  if (all < bytes) return false;
  for (auto it = entries_.end(); it != entries_.begin() && free < bytes;) {
    --it;
    if (!forgettable(*it)) continue;
    free += (*it)->charge.amount();
    doomed.push_back(std::move(*it));
    it = entries_.erase(it);
  }
  return !doomed.empty();
}

bool PreparedOperands::Clear() {
  Entries doomed;  // freed after the lock
  const std::lock_guard lock(mutex_);
  doomed.swap(entries_);
  return std::any_of(doomed.begin(), doomed.end(),
                     [](const auto& entry) { return entry->state == State::kReady; });
}

std::vector<std::shared_ptr<const void>> PreparedOperands::Sweep() {
  Doomed doomed;
  const std::lock_guard lock(mutex_);
  entries_.remove_if([&](std::shared_ptr<Entry>& entry) {
    if (!entry->buffer.expired()) return false;
    doomed.push_back(std::move(entry));
    return true;
  });
  return doomed;
}

std::shared_ptr<PreparedOperands::Entry> PreparedOperands::Find(
    const std::shared_ptr<const Buffer>& buffer, const Preparation& what, Doomed& doomed) {
  const auto same = [&](const std::shared_ptr<Entry>& entry) {
    return entry->what == what && !entry->buffer.owner_before(buffer) &&
           !buffer.owner_before(entry->buffer);
  };
  const auto it = std::find_if(entries_.begin(), entries_.end(), same);
  if (it != entries_.end()) {
    entries_.splice(entries_.begin(), entries_, it);
    return *it;
  }
  auto seen = std::make_shared<Entry>(*this);
  seen->buffer = buffer;
  seen->what = what;
  entries_.push_front(std::move(seen));
  if (entries_.size() > kMost) {
    doomed.push_back(std::move(entries_.back()));
    entries_.pop_back();
  }
  return nullptr;
}

bool PreparedOperands::Allocate(Entry& entry, std::size_t bytes) {
  const std::uint64_t charged = device_.AllocationBytes(bytes);
  const auto take = [&] {
    return Charge::Take(budget_, charged, "QUOTA_EXCEEDED", "no room beside the buffers");
  };
  absl::StatusOr<Charge> charge = take();
  if (!charge.ok() && MakeRoom(charged)) charge = take();
  if (!charge.ok()) return false;
  absl::StatusOr<Memory> memory = tessera::Allocate(device_, bytes);
  if (!memory.ok()) return false;
  bytes_.fetch_add(charged, std::memory_order_relaxed);
  entry.charge = *std::move(charge);
  entry.memory = *std::move(memory);
  return true;
}

PreparedOperands::Call::Call(PreparedOperands& of, Stream& stream, FindBuffer find)
    : of_(of), stream_(stream), find_(find) {
  stream_.KeepWith(this);
}

PreparedOperands::Call::~Call() {
  stream_.KeepWith(nullptr);
  if (making_.empty() && made_.empty()) return;
  const std::lock_guard lock(of_.mutex_);
  Forget(making_);
  Forget(made_);
}

void PreparedOperands::Call::Forget(std::vector<std::shared_ptr<Entry>>& entries) {
  for (const std::shared_ptr<Entry>& entry : entries) of_.entries_.remove(entry);
}

PreparedMemory PreparedOperands::Call::Keep(const Preparation& what, std::size_t bytes) {
  if (bytes < kLeastBytes) return {};
  const std::shared_ptr<const Buffer> buffer = find_(what.operand.data);
  if (buffer == nullptr) return {};
  std::shared_ptr<Entry> entry;
  {
    Doomed doomed;  // freed after the lock
    const std::lock_guard lock(of_.mutex_);
    entry = of_.Find(buffer, what, doomed);
    if (entry == nullptr) return {};
    const bool ready = entry->state == State::kReady ||
                       std::find(made_.begin(), made_.end(), entry) != made_.end();
    if (ready) {
      found_bytes_ += bytes;
      found_.push_back(entry);
      return {entry->memory.data(), /*ready=*/true};
    }
    if (entry->state == State::kMaking) return {};
    entry->state = State::kMaking;
  }
  if (of_.Allocate(*entry, bytes)) {
    making_.push_back(entry);
    return {entry->memory.data(), /*ready=*/false};
  }
  const std::lock_guard lock(of_.mutex_);
  entry->state = State::kSeen;
  return {};
}

std::uint64_t PreparedOperands::Call::EndOperation(bool done) {
  if (!making_.empty() && done) {
    made_.insert(made_.end(), making_.begin(), making_.end());
  } else if (!making_.empty()) {
    const std::lock_guard lock(of_.mutex_);
    Forget(making_);
    // Work of this operation may be under way in it.
    found_.insert(found_.end(), making_.begin(), making_.end());
  }
  making_.clear();
  return std::exchange(found_bytes_, 0);
}

void PreparedOperands::Call::Finish() {
  if (made_.empty()) return;
  const std::lock_guard lock(of_.mutex_);
  for (const std::shared_ptr<Entry>& entry : made_) entry->state = State::kReady;
  made_.clear();
}

}  // namespace tessera
