#include "server/admission.h"

#include "kernels/base/error.h"

namespace tessera {

absl::StatusOr<Admission::Ticket> Admission::Enter() {
  const std::lock_guard lock(mutex_);
  if (closed_) {
    return MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                     "the server is stopping and takes no new work");
  }
  ++calls_;
  return Ticket(this);
}

int Admission::in_progress() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

void Admission::Exit() {
  const std::lock_guard lock(mutex_);
  if (--calls_ == 0 && closed_) idle_.notify_all();
}

void Admission::Close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

bool Admission::WaitIdle(absl::Duration timeout) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, absl::ToChronoNanoseconds(timeout), [this] { return calls_ == 0; });
}

}  // namespace tessera
