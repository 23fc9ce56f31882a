#include "client/rpc/event_loop.h"

#include <vector>

namespace tessera {
namespace {

constexpr absl::Duration kGlance = absl::Milliseconds(50);

}  // namespace

void AsyncCallBase::SetAlarm(absl::Duration delay) {
  alarm_.emplace();
  alarm_->Set(loop_.queue(), After(delay), this);
}

void AsyncTask::Start() {
  const auto run = [this] {
    end_ = work_(cancel_.get_token());
    SetAlarm(absl::ZeroDuration());
  };
  try {
    thread_ = std::thread(run);
  } catch (...) {
    loop_.Remove(this);
    throw;
  }
}

void AsyncTask::Proceed() {
  thread_.join();
  CallGuarded(end_).IgnoreError();
  end_ = nullptr;  // frees what the callback holds
  loop_.Remove(this);
}

void AsyncAttempts::Start() {
  const std::lock_guard lock(mutex_);
  std::optional<absl::Status> end = Connect();
  if (!end) return;
  // The callback must run on the loop's thread, where all callbacks run.
  end_ = *std::move(end);
  state_ = State::kEnding;
  SetAlarm(absl::ZeroDuration());
}

void AsyncAttempts::Cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  if (state_ == State::kCalling && context_) context_->TryCancel();
  if (state_ == State::kPausing) alarm_->Cancel();
}

std::optional<absl::Status> AsyncAttempts::Connect() {
  if (cancelled_) return Cancelled();
  absl::StatusOr<std::optional<Lease>> channel = attempts_.Pick();
  if (!channel.ok()) return channel.status();
  channel_ = *std::move(channel);
  if (channel_) {
    state_ = State::kCalling;
    attempts_.Begin(**channel_, context_.emplace());
    Send(&*context_, **channel_);
    return std::nullopt;
  }
  state_ = State::kConnecting;
  const std::shared_ptr<grpc::Channel> awaited = attempts_.Awaited();
  // The limit bounds how long a cancelled call takes to end.
  const gpr_timespec limit = gpr_time_min(attempts_.WaitLimit(), After(kGlance));
  awaited->NotifyOnStateChange(awaited->GetState(true), limit, loop_.queue(), this);
  return std::nullopt;
}

std::optional<absl::Status> AsyncAttempts::Answered() {
  EndAttempt();
  channel_.reset();
  absl::Status status = FromGrpc(answer_);
  if (status.ok()) return status;
  if (cancelled_) return Cancelled();
  status = OfUncancelled(std::move(status));
  const std::optional<absl::Duration> pause = attempts_.Pause(status);
  if (!pause) return status;
  state_ = State::kPausing;
  SetAlarm(*pause);
  return std::nullopt;
}

void AsyncAttempts::Proceed() {
  std::optional<absl::Status> end;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kCalling) {
      end = Answered();
    } else if (state_ == State::kEnding) {
      end = std::move(end_);
    } else {
      end = Connect();
    }
  }
  if (!end) return;
  Done(*std::move(end));
  loop_.Remove(this);
}

EventLoop::~EventLoop() {
  CancelAll();
  queue_.Shutdown();
  if (thread_.joinable()) {
    thread_.join();
  } else {
    Run();
  }
}

void EventLoop::Run() {
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) static_cast<AsyncCallBase*>(tag)->Proceed();
}

void EventLoop::Add(const std::shared_ptr<AsyncCallBase>& call) {
  const std::lock_guard lock(mutex_);
  calls_.insert(call);
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
}

void EventLoop::Remove(AsyncCallBase* call) {
  // This may be the last reference, which must outlive the lock.
  const std::shared_ptr<AsyncCallBase> kept = call->shared_from_this();
  const std::lock_guard lock(mutex_);
  calls_.erase(kept);
  if (calls_.empty()) empty_.notify_all();
}

void EventLoop::CancelAll() {
  std::unique_lock lock(mutex_);
  while (!calls_.empty()) {
    const std::vector<std::shared_ptr<AsyncCallBase>> calls(calls_.begin(), calls_.end());
    lock.unlock();
    for (const auto& call : calls) {
      if (!call->must_end()) call->Cancel();
    }
    lock.lock();
    // Callbacks may have started other calls in the meantime.
    empty_.wait_for(lock, std::chrono::milliseconds(20), [this] { return calls_.empty(); });
  }
}

}  // namespace tessera
