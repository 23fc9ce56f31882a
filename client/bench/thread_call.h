// A call that a blocking function makes.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "client/bench/operations.h"

namespace tessera::bench {

// Runs the function on a separate thread.
class ThreadCall final : public Call {
 public:
  explicit ThreadCall(std::function<grpc::Status()> call)
      : call_(std::move(call)), thread_([this] { Serve(); }) {}
  ~ThreadCall() override {
    Tell(ended_);
    thread_.join();
  }
  void Start() override { Tell(wanted_); }
  grpc::Status Run() override { return call_(); }

 private:
  void Tell(bool& flag) {
    const std::lock_guard lock(mutex_);
    flag = true;
    changed_.notify_one();
  }
  void Serve() {
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return wanted_ || ended_; });
        if (ended_) return;
        wanted_ = false;
      }
      done(call_());
    }
  }

  const std::function<grpc::Status()> call_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool wanted_ = false;  // guarded by mutex_
  bool ended_ = false;   // guarded by mutex_
  std::thread thread_;
};

}  // namespace tessera::bench
