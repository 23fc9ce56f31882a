// The completion queues from which a server takes its calls, two threads each.
//
// They are faster than gRPC's callback interface: empty answers came 1.1 times as often to 1 and 16
// callers, 1.25 times to 64, 1.38 to 256 (4 queues of 2 threads on 16 cores, one H200's host, gRPC
// 1.51, 2026-11-24). All methods are served from here, as one that used callbacks would bring along
// threads that poll the same sockets, and what those find for a queue has to wake its thread.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "grpcpp/grpcpp.h"

namespace tessera {

// What has been asked of gRPC, as the tag under which a queue gives it back.
class QueueEvent {
 public:
  // On a thread of the queue. ok: as gRPC says of what was asked.
  virtual void Happen(bool ok) = 0;

 protected:
  ~QueueEvent() = default;
};

// Tells its owner, who may be gone behind that.
template <class Owner>
class QueueEventOf final : public QueueEvent {
 public:
  QueueEventOf(Owner* owner, void (Owner::*happened)(bool)) : owner_(owner), happened_(happened) {}
  void Happen(bool ok) override { (owner_->*happened_)(ok); }

 private:
  Owner* const owner_;
  void (Owner::*const happened_)(bool);
};

// One of them.
class CallQueue {
 public:
  explicit CallQueue(std::unique_ptr<grpc::ServerCompletionQueue> queue)
      : queue_(std::move(queue)) {}

  grpc::ServerCompletionQueue& events() { return *queue_; }

  // Held by whoever may still ask gRPC for something that comes to this queue.
  class User {
   public:
    explicit User(CallQueue& queue) : queue_(queue) { ++queue.users_; }
    ~User() {
      if (--queue_.users_ == 0) queue_.users_.notify_all();
    }
    User(const User&) = delete;
    User& operator=(const User&) = delete;

   private:
    CallQueue& queue_;
  };

  // Held by a thread of a queue while it may wait for a device. One at a time of a queue gets it,
  // so that the other is there for what comes, even if the device hangs.
  class Leave {
   public:
    Leave();
    ~Leave();
    Leave(const Leave&) = delete;
    Leave& operator=(const Leave&) = delete;
    bool granted() const { return granted_; }

   private:
    bool granted_ = false;
  };

  // Waits until there are no users.
  void WaitUnused() {
    for (int users = users_; users != 0; users = users_) users_.wait(users);
  }

 private:
  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::atomic<int> users_{0};
  std::atomic<bool> on_leave_{false};
};

// All of them.
class CallQueues {
 public:
  // Calls of a method that a queue can take before it has looked at the first.
  static constexpr int kAhead = 16;

  // Before the server is built.
  explicit CallQueues(grpc::ServerBuilder& builder);
  // REQUIRES: the server has been shut down. Waits for the calls to end.
  ~CallQueues();
  CallQueues(const CallQueues&) = delete;
  CallQueues& operator=(const CallQueues&) = delete;

  // accept(queue) kAhead times for each queue; once the server has been built.
  template <class AcceptOne>
  void Accept(AcceptOne accept) {
    for (const std::unique_ptr<CallQueue>& queue : queues_)
      for (int i = 0; i < kAhead; ++i) accept(*queue);
  }

 private:
  static void Work(CallQueue& queue);

  std::vector<std::unique_ptr<CallQueue>> queues_;
  std::vector<std::thread> threads_;
};

}  // namespace tessera
