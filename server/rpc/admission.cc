#include "server/rpc/admission.h"

#include "kernels/base/error.h"

namespace tessera {

absl::StatusOr<Admission::Ticket> Admission::Enter() {
  ++calls_;
  Ticket ticket(this);
  if (closed_) {
    return MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                     "the server is stopping and accepts no new work");
  }
  return ticket;
}

void Admission::Exit() {
  if (--calls_ > 0 || !closed_) return;
  // A thread in WaitIdle either has not read calls_ yet, or is asleep and is notified here.
  { const std::lock_guard lock(mutex_); }
  idle_.notify_all();
}

void Admission::Close() { closed_ = true; }

bool Admission::WaitIdle(absl::Duration timeout) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, absl::ToChronoNanoseconds(timeout), [this] { return calls_ == 0; });
}

}  // namespace tessera
