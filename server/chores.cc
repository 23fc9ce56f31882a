#include "server/chores.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {

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

absl::Status Chores::Submit(absl::AnyInvocable<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    if (queue_.size() >= queue_length_) {
      return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                       "as many calls wait for memory as the server accepts",
                       {{"limit", absl::StrCat(queue_length_)}});
    }
    queue_.push_back(std::move(work));
  }
  wake_.notify_one();
  return absl::OkStatus();
}

void Chores::Release(std::shared_ptr<const void> doomed) {
  if (doomed == nullptr || doomed.use_count() > 1) return;
  {
    const std::lock_guard lock(mutex_);
    queue_.emplace_back([held = std::move(doomed)]() mutable { held.reset(); });
  }
  wake_.notify_one();
}

void Chores::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    absl::AnyInvocable<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // what it holds must not live until the next one comes
    lock.lock();
  }
}

}  // namespace tessera
