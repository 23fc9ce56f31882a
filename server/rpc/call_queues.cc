#include "server/rpc/call_queues.h"

#include <algorithm>
#include <functional>

namespace tessera {
namespace {

// There are two threads for every eight cores. Clients on this host and the work of the calls need
// the other cores, and with more threads, each thread finds fewer events when it wakes up. More
// queues did not help: with 64 callers, Dots of 4096 f32 on 2, 4 and 8 queues had 1.10, 1.03 and
// 1.07 times the rate of empty calls on a callback server (16 cores of the H200 host).
unsigned QueueCount() { return std::clamp(std::thread::hardware_concurrency() / 8, 1u, 16u); }

// The queue of this thread; null if the thread belongs to none.
thread_local CallQueue* own_queue = nullptr;

}  // namespace

CallQueue::Leave::Leave()
    : granted_(own_queue != nullptr &&
               !own_queue->on_leave_.exchange(true, std::memory_order_acquire)) {}

CallQueue::Leave::~Leave() {
  if (granted_) own_queue->on_leave_.store(false, std::memory_order_release);
}

CallQueues::CallQueues(grpc::ServerBuilder& builder) {
  for (unsigned i = 0; i < QueueCount(); ++i) {
    queues_.push_back(std::make_unique<CallQueue>(builder.AddCompletionQueue(), answers_));
    for (int thread = 0; thread < 2; ++thread)
      threads_.emplace_back(&CallQueues::Work, std::ref(*queues_.back()));
  }
}

CallQueues::~CallQueues() {
  // A request to gRPC on a queue that has been shut down would abort the process.
  for (const std::unique_ptr<CallQueue>& queue : queues_) queue->WaitUnused();
  for (const std::unique_ptr<CallQueue>& queue : queues_) queue->events().Shutdown();
  for (std::thread& thread : threads_) thread.join();
}

void CallQueues::Work(CallQueue& queue) {
  own_queue = &queue;
  void* tag = nullptr;
  bool ok = false;
  while (queue.events().Next(&tag, &ok)) static_cast<QueueEvent*>(tag)->Happen(ok);
}

}  // namespace tessera
