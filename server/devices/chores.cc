#include "server/devices/chores.h"

#include <algorithm>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

using std::chrono::steady_clock;

// The maximum number of threads. A chore that hangs occupies one of these threads.
constexpr std::size_t kMostThreads = 64;

constexpr std::size_t kReleases = 0;  // the queue of releases; share i has queue i + 1

}  // namespace

Chores::Chores(int threads, std::size_t queue_length, steady_clock::duration patience)
    : queue_length_(queue_length),
      most_running_(static_cast<std::size_t>(std::max(1, threads - 1))),
      patience_(patience),
      last_begin_(steady_clock::now()) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back(&Chores::Run, this, /*stays=*/true);
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
    const std::size_t queue = share + 1;
    if (queue < queues_.size() && queues_[queue].waiting.size() >= queue_length_) {
      return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                       "the maximum number of calls are already waiting for memory",
                       {{"limit", absl::StrCat(queue_length_)}});
    }
    Add(queue, std::move(work));
  }
  wake_.notify_one();
  return absl::OkStatus();
}

void Chores::Release(std::shared_ptr<const void> doomed) {
  if (doomed == nullptr || doomed.use_count() > 1) return;
  {
    const std::lock_guard lock(mutex_);
    Add(kReleases, [held = std::move(doomed)]() mutable { held.reset(); });
  }
  wake_.notify_one();
}

void Chores::Release(std::vector<std::shared_ptr<const void>> doomed) {
  if (doomed.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    Add(kReleases, [held = std::move(doomed)]() mutable { held.clear(); });
  }
  wake_.notify_one();
}

void Chores::Relieve() {
  std::vector<std::thread> left;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(threads_, [&](std::thread& thread) {
      if (std::find(left_.begin(), left_.end(), thread.get_id()) == left_.end()) return false;
      left.push_back(std::move(thread));
      return true;
    });
    left_.clear();
    const bool stuck = running_.size() >= threads_.size() || !Next(/*stays=*/true).has_value();
    const bool late = waiting_ > 0 && stuck && steady_clock::now() - last_begin_ > patience_;
    if (late && threads_.size() < kMostThreads) {
      try {
        threads_.emplace_back(&Chores::Run, this, /*stays=*/false);
      } catch (const std::system_error&) {
        // A later call of Relieve may succeed.
      }
    }
  }
  for (std::thread& thread : left) thread.join();
}

steady_clock::duration Chores::LongestRun() const {
  const std::lock_guard lock(mutex_);
  return running_.empty() ? steady_clock::duration::zero() : steady_clock::now() - running_.front();
}

void Chores::Add(std::size_t queue, Work work) {
  if (queues_.size() <= queue) queues_.resize(queue + 1);
  queues_[queue].waiting.push_back(std::move(work));
  ++waiting_;
}

std::optional<std::size_t> Chores::Next(bool stays) const {
  if (waiting_ == 0) return std::nullopt;
  for (std::size_t i = 1; i <= queues_.size(); ++i) {
    const std::size_t queue = (turn_ + i) % queues_.size();
    const auto& [waiting, running] = queues_[queue];
    if (!waiting.empty() && (!stays || running < most_running_)) return queue;
  }
  return std::nullopt;
}

void Chores::Run(bool stays) {
  std::unique_lock lock(mutex_);
  while (true) {
    std::optional<std::size_t> queue;
    wake_.wait(lock, [&] { return (queue = Next(stays)).has_value() || stopping_ || !stays; });
    if (!queue.has_value()) break;
    turn_ = *queue;
    Work work = std::move(queues_[turn_].waiting.front());
    queues_[turn_].waiting.pop_front();
    --waiting_;
    ++queues_[turn_].running;
    last_begin_ = steady_clock::now();
    running_.push_back(last_begin_);
    const auto mine = std::prev(running_.end());
    lock.unlock();
    work();
    work = nullptr;  // after the lock is released, because a destructor may submit more work
    lock.lock();
    running_.erase(mine);
    --queues_[*queue].running;
  }
  if (!stopping_) left_.push_back(std::this_thread::get_id());
}

}  // namespace tessera
