#include "server/chores.h"

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

// What hangs holds a thread each.
constexpr std::size_t kMostThreads = 64;

}  // namespace

Chores::Chores(int threads, std::size_t queue_length) : queue_length_(queue_length) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back(&Chores::Work, this);
}

Chores::~Chores() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

absl::Status Chores::Submit(absl::AnyInvocable<void()> work, std::size_t share) {
  {
    const std::lock_guard lock(mutex_);
    if (lengths_.size() <= share) lengths_.resize(share + 1);
    if (lengths_[share] >= queue_length_) {
      return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                       "as many calls wait for memory as the server accepts",
                       {{"limit", absl::StrCat(queue_length_)}});
    }
    ++lengths_[share];
    queue_.push_back({std::move(work), share});
  }
  wake_.notify_one();
  return absl::OkStatus();
}

void Chores::Release(std::shared_ptr<const void> doomed) {
  if (doomed == nullptr || doomed.use_count() > 1) return;
  Add([held = std::move(doomed)]() mutable { held.reset(); });
}

void Chores::Release(std::vector<std::shared_ptr<const void>> doomed) {
  if (doomed.empty()) return;
  Add([held = std::move(doomed)]() mutable { held.clear(); });
}

void Chores::Relieve() {
  const std::lock_guard lock(mutex_);
  const bool begun = std::exchange(begun_, false);
  if (begun || queue_.empty() || threads_.size() >= kMostThreads) return;
  try {
    threads_.emplace_back(&Chores::Work, this);
  } catch (const std::system_error&) {
    // There may be one next time.
  }
}

void Chores::Add(absl::AnyInvocable<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(work), std::nullopt});
  }
  wake_.notify_one();
}

void Chores::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Chore chore = std::move(queue_.front());
    queue_.pop_front();
    if (chore.share.has_value()) --lengths_[*chore.share];
    begun_ = true;
    lock.unlock();
    chore.work();
    chore.work = nullptr;  // what it holds must not live until the next one comes
    lock.lock();
  }
}

}  // namespace tessera
