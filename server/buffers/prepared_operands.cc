#include "server/buffers/prepared_operands.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera {

PreparedOperands::PreparedOperands(Device& device, Budget& budget)
    : device_(device), budget_(budget) {
  device_.SetSpare(this);
}

PreparedOperands::~PreparedOperands() { device_.SetSpare(nullptr); }

void PreparedOperands::Entry::Free() {
  const std::uint64_t held = bytes();
  if (held == 0) return;
  memory = Memory();
  {
    const std::lock_guard lock(owner.mutex_);
    charge = Charge();
    owner.bytes_.fetch_sub(held, std::memory_order_relaxed);
    owner.frees_.fetch_add(1, std::memory_order_release);
  }
  owner.freed_.notify_all();
}

void PreparedOperands::NoteForgotten() {
  patience_ends_ = std::chrono::steady_clock::now() + kPatience;
}

std::uint64_t PreparedOperands::Unlink(std::uint64_t bytes, bool used_too, Entries& doomed) {
  std::uint64_t unlinked = 0;
  for (auto it = entries_.end(); it != entries_.begin() && unlinked < bytes;) {
    const auto entry = std::prev(it);
    // Calls take references to entries only while they hold the mutex, so use_count() cannot grow
    // here.
    if ((*entry)->bytes() == 0 || (!used_too && entry->use_count() > 1)) {
      it = entry;
      continue;
    }
    unlinked += (*entry)->bytes();
    doomed.splice(doomed.end(), entries_, entry);
  }
  if (unlinked > 0) NoteForgotten();
  return unlinked;
}

bool PreparedOperands::AwaitFree(std::unique_lock<std::mutex>& lock, std::uint64_t frees) {
  return freed_.wait_until(lock, patience_ends_,
                           [&] { return this->frees() != frees || bytes() == 0; });
}

PreparedOperands::Claim::Claim(PreparedOperands& of) : of_(of) {
  const std::lock_guard lock(of_.mutex_);
  ++of_.claims_;
}

PreparedOperands::Claim::~Claim() {
  const std::lock_guard lock(of_.mutex_);
  --of_.claims_;
}

void PreparedOperands::Claim::MakeRoom(std::uint64_t bytes) {
  std::unique_lock lock(of_.mutex_);
  for (;;) {
    const std::uint64_t free = of_.budget_.free();
    if (free >= bytes || free + of_.bytes() < bytes) return;
    const std::uint64_t missing = bytes - free;
    // The bytes of entries that are forgotten but still in use.
    std::uint64_t leaving = of_.bytes();
    for (const std::shared_ptr<Entry>& entry : of_.entries_) leaving -= entry->bytes();
    Entries doomed;
    const std::uint64_t unused = of_.Unlink(missing, /*used_too=*/false, doomed);
    if (unused + leaving < missing)
      of_.Unlink(missing - unused - leaving, /*used_too=*/true, doomed);
    if (!doomed.empty()) {
      lock.unlock();
      doomed.clear();
      lock.lock();
    } else if (!of_.AwaitFree(lock, of_.frees())) {
      return;
    }
  }
}

void PreparedOperands::Claim::MakeAllRoom(std::uint64_t frees) {
  of_.Clear();
  std::unique_lock lock(of_.mutex_);
  of_.AwaitFree(lock, frees);
}

void PreparedOperands::Clear() noexcept {
  Entries doomed;  // freed after the lock is released
  const std::lock_guard lock(mutex_);
  if (bytes() > 0) NoteForgotten();
  doomed.swap(entries_);
}

std::vector<std::shared_ptr<const void>> PreparedOperands::ForgetAll() {
  const std::lock_guard lock(mutex_);
  if (bytes() > 0) NoteForgotten();
  Doomed doomed(std::make_move_iterator(entries_.begin()), std::make_move_iterator(entries_.end()));
  entries_.clear();
  return doomed;
}

std::vector<std::shared_ptr<const void>> PreparedOperands::Sweep() {
  Doomed doomed;
  const std::lock_guard lock(mutex_);
  entries_.remove_if([&](std::shared_ptr<Entry>& entry) {
    if (!entry->buffer.expired()) return false;
    if (entry->bytes() > 0) NoteForgotten();
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
    if (entries_.back()->bytes() > 0) NoteForgotten();
    doomed.push_back(std::move(entries_.back()));
    entries_.pop_back();
  }
  return nullptr;
}

bool PreparedOperands::Allocate(Entry& entry, std::size_t bytes) {
  const std::uint64_t charged = device_.AllocationBytes(bytes);
  // Takes a charge and returns true, or returns false if there is a claim or too little memory. If
  // the budget is exhausted, unlinks unused entries, provided that they have enough memory.
  const auto take = [&](Entries& doomed) {
    const std::lock_guard lock(mutex_);
    if (claims_ > 0) return false;
    absl::StatusOr<Charge> charge =
        Charge::Take(budget_, charged, "QUOTA_EXCEEDED", "the buffers leave too little memory");
    if (charge.ok()) {
      entry.charge = *std::move(charge);
      bytes_.fetch_add(charged, std::memory_order_relaxed);
      return true;
    }
    std::uint64_t free = budget_.free();
    const std::uint64_t missing = charged - std::min(charged, free);
    for (const std::shared_ptr<Entry>& other : entries_)
      if (other.use_count() == 1) free += other->bytes();
    if (free >= charged) Unlink(missing, /*used_too=*/false, doomed);
    return false;
  };
  Entries doomed;
  bool taken = take(doomed);
  if (!doomed.empty()) {
    doomed.clear();
    Entries none;
    taken = take(none);
  }
  if (!taken) return false;
  absl::StatusOr<Memory> memory = tessera::Allocate(device_, bytes);
  if (!memory.ok()) {
    entry.Free();
    return false;
  }
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
  if (!entries.empty()) of_.NoteForgotten();
  for (const std::shared_ptr<Entry>& entry : entries) of_.entries_.remove(entry);
}

PreparedMemory PreparedOperands::Call::Keep(const Preparation& what, std::size_t bytes) {
  if (bytes < kLeastBytes) return {};
  const std::shared_ptr<const Buffer> buffer = find_(what.operand.data);
  if (buffer == nullptr) return {};
  std::shared_ptr<Entry> entry;
  {
    Doomed doomed;  // freed after the lock is released
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
    // Work of this operation may still be using the memory of these entries.
    found_.insert(found_.end(), making_.begin(), making_.end());
  }
  making_.clear();
  return std::exchange(found_bytes_, 0);
}

void PreparedOperands::Call::Finish() {
  if (made_.empty()) return;
  // Forgotten entries are freed after the lock is released.
  const std::vector<std::shared_ptr<Entry>> made = std::exchange(made_, {});
  const std::lock_guard lock(of_.mutex_);
  for (const std::shared_ptr<Entry>& entry : made) entry->state = State::kReady;
}

}  // namespace tessera
