// The completion queues from which a server takes its calls, with two threads each.
//
// They are faster than gRPC's callback interface: the rate of empty calls was 1.1 times as high for
// 1 and 16 callers, 1.25 times as high for 64 and 1.38 times as high for 256 (4 queues of 2 threads
// on 16 cores, the H200 host, gRPC 1.51, 2026-11-24). All methods are served from these queues. If
// one method used callbacks, gRPC would add threads that poll the same sockets. Whenever such a
// thread found an event of a queue, it would have to wake a thread of that queue.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "server/rpc/answers.h"

namespace tessera {

// The tag of a request to gRPC. The queue returns it when the request has ended.
class QueueEvent {
 public:
  // Called on a thread of the queue. `ok` says whether the request has succeeded.
  virtual void Happen(bool ok) = 0;

 protected:
  ~QueueEvent() = default;
};

// Calls a function of its owner. The function may destroy the owner, and therefore this event.
template <class Owner>
class QueueEventOf final : public QueueEvent {
 public:
  QueueEventOf(Owner* owner, void (Owner::*happened)(bool)) : owner_(owner), happened_(happened) {}
  void Happen(bool ok) override { (owner_->*happened_)(ok); }

 private:
  Owner* const owner_;
  void (Owner::*const happened_)(bool);
};

// One completion queue.
class CallQueue {
 public:
  // answers: must outlive the queue.
  CallQueue(std::unique_ptr<grpc::ServerCompletionQueue> queue, Answers& answers)
      : queue_(std::move(queue)), answers_(answers) {}

  grpc::ServerCompletionQueue& events() { return *queue_; }
  // The responses to the queue's calls that clients have not read yet.
  Answers& answers() { return answers_; }

  // Held by every object that may still make requests to gRPC with events of this queue. A queue
  // that has users is not shut down.
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

  // Held by a thread of a queue while it may wait for a device. Only one thread of a queue holds a
  // Leave at a time, so that the other thread is free for other calls, even if the device hangs.
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
  Answers& answers_;
  std::atomic<int> users_{0};
  std::atomic<bool> on_leave_{false};
};

// All completion queues of a server.
class CallQueues {
 public:
  // How many calls of a method a queue can accept before it has handled the first one.
  static constexpr int kAhead = 16;

  // To be constructed before the server is built.
  explicit CallQueues(grpc::ServerBuilder& builder);
  // REQUIRES: the server has been shut down. Waits for the calls to end.
  ~CallQueues();
  CallQueues(const CallQueues&) = delete;
  CallQueues& operator=(const CallQueues&) = delete;

  // Calls accept(queue) kAhead times for each queue. To be called after the server has been built.
  template <class AcceptOne>
  void Accept(AcceptOne accept) {
    for (const std::unique_ptr<CallQueue>& queue : queues_)
      for (int i = 0; i < kAhead; ++i) accept(*queue);
  }
  // The responses that clients have not read yet.
  Answers& answers() { return answers_; }

 private:
  static void Work(CallQueue& queue);

  Answers answers_;
  std::vector<std::unique_ptr<CallQueue>> queues_;
  std::vector<std::thread> threads_;
};

}  // namespace tessera
