#include "server/buffers/arrival.h"

namespace tessera {

struct ArrivalWait {
  std::vector<std::shared_ptr<Arrival>> arrivals;  // empty once Then has been called
  std::mutex mutex;
  std::size_t left = 0;
  absl::Status status;
  Awaited::Next next;

  // Called when one of the arrivals has ended.
  void EndOne(const absl::Status& one) {
    Awaited::Next ready;
    {
      const std::lock_guard lock(mutex);
      status.Update(one);
      if (--left > 0) return;
      ready = std::exchange(next, nullptr);
    }
    if (ready != nullptr) ready(status);
  }
};

void Arrival::End(absl::Status status) {
  std::vector<std::shared_ptr<ArrivalWait>> waits;
  {
    const std::lock_guard lock(mutex_);
    status_ = std::move(status);
    ended_.store(true, std::memory_order_release);
    waits.swap(waits_);
  }
  for (const std::shared_ptr<ArrivalWait>& wait : waits) wait->EndOne(status_);
}

void Arrival::Add(std::shared_ptr<ArrivalWait> wait) {
  {
    const std::lock_guard lock(mutex_);
    if (!ended()) {
      waits_.push_back(std::move(wait));
      return;
    }
  }
  wait->EndOne(status_);
}

void Awaited::Add(std::shared_ptr<Arrival> arrival) {
  arrival->ask_();
  if (wait_ == nullptr) wait_ = std::make_shared<ArrivalWait>();
  wait_->arrivals.push_back(std::move(arrival));
}

void Awaited::Then(Next next) {
  const std::shared_ptr<ArrivalWait> wait = wait_;
  const std::vector<std::shared_ptr<Arrival>> arrivals = std::move(wait->arrivals);
  wait->left = arrivals.size() + 1;  // one more, for this function
  for (const std::shared_ptr<Arrival>& arrival : arrivals) arrival->Add(wait);
  {
    const std::lock_guard lock(wait->mutex);
    wait->next = std::move(next);
  }
  // From here on, Cancel can succeed, so the call may end and destroy this object.
  waits_.store(true, std::memory_order_release);
  wait->EndOne(absl::OkStatus());
}

bool Awaited::Cancel() {
  if (!waits_.load(std::memory_order_acquire)) return false;
  const std::shared_ptr<ArrivalWait> wait = wait_;
  Next dropped;  // destroyed after the lock is released
  const std::lock_guard lock(wait->mutex);
  dropped = std::exchange(wait->next, nullptr);
  return dropped != nullptr;
}

}  // namespace tessera
