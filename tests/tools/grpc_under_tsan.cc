// Tells ThreadSanitizer which order gRPC guarantees.
//
// The distribution's gRPC and abseil are not instrumented, so ThreadSanitizer sees neither their
// locks nor their queues. It would report a race for every message that one thread hands to another
// through them. This file wraps the few functions with which the libraries order their callers'
// actions. It is linked into the program, whose symbols take precedence. Each wrapper calls the
// library's function, and states what the function's contract states:
//
//   a request to gRPC under a tag        happens before   the tag comes out of its completion queue
//   writing a message's bytes            happens before   reading them, in the same process
//   what a thread does under a mutex     happens before   what the next thread does under it
//
// Events inside the libraries stay invisible (ignore_noninstrumented_modules). The checked code is
// ours, including the headers that it includes.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/base/config.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "grpc/byte_buffer_reader.h"
#include "grpc/grpc.h"
#include "grpc/slice_buffer.h"

// Declared inside gRPC. Begins an operation. When it ends, its tag is put into the queue.
bool grpc_cq_begin_op(grpc_completion_queue* queue, void* tag);  // NOLINT

#define UNSEEN __attribute__((no_sanitize("thread")))

namespace {

// Returns the next definition of a symbol after this program's definition. Ends the process if
// there is none, because then the wrapped library has changed.
UNSEEN void* Behind(const std::string& symbol) {
  void* const function = dlsym(RTLD_NEXT, symbol.c_str());
  if (function == nullptr) {
    std::fprintf(stderr, "grpc_under_tsan: nothing behind %s\n", symbol.c_str());
    std::abort();
  }
  return function;
}

template <class Function>
UNSEEN Function* Behind(const std::string& symbol) {
  return reinterpret_cast<Function*>(Behind(symbol));
}

// Returns the mangled name of a member of an abseil class, given from the class on, such as
// "5Mutex4LockEv". A constant member has a K before it.
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
UNSEEN std::string OfAbsl(const std::string& member) {
  const std::string version = TEXT(ABSL_OPTION_INLINE_NAMESPACE_NAME);
  const bool constant = member.starts_with('K');
  return (constant ? "_ZNK4absl" : "_ZN4absl") + std::to_string(version.size()) + version +
         member.substr(constant ? 1 : 0);
}

}  // namespace

// --- Completion queues --------------------------------------------------------------------------

UNSEEN bool grpc_cq_begin_op(grpc_completion_queue* queue, void* tag) {
  static auto* const behind =
      Behind<bool(grpc_completion_queue*, void*)>("_Z16grpc_cq_begin_opP21grpc_completion_queuePv");
  __tsan_release(tag);
  return behind(queue, tag);
}

extern "C" UNSEEN grpc_event grpc_completion_queue_next(grpc_completion_queue* queue,
                                                        gpr_timespec deadline, void* reserved) {
  static auto* const behind =
      Behind<grpc_event(grpc_completion_queue*, gpr_timespec, void*)>("grpc_completion_queue_next");
  const grpc_event event = behind(queue, deadline, reserved);
  if (event.type == GRPC_OP_COMPLETE) __tsan_acquire(event.tag);
  return event;
}

extern "C" UNSEEN grpc_event grpc_completion_queue_pluck(grpc_completion_queue* queue, void* tag,
                                                         gpr_timespec deadline, void* reserved) {
  static auto* const behind =
      Behind<grpc_event(grpc_completion_queue*, void*, gpr_timespec, void*)>(
          "grpc_completion_queue_pluck");
  const grpc_event event = behind(queue, tag, deadline, reserved);
  if (event.type == GRPC_OP_COMPLETE) __tsan_acquire(event.tag);
  return event;
}

// --- Messages, whose bytes a channel within one process does not copy ----------------------------

extern "C" UNSEEN grpc_call_error grpc_call_start_batch(grpc_call* call, const grpc_op* ops,
                                                        std::size_t count, void* tag,
                                                        void* reserved) {
  static auto* const behind =
      Behind<grpc_call_error(grpc_call*, const grpc_op*, std::size_t, void*, void*)>(
          "grpc_call_start_batch");
  for (std::size_t i = 0; i < count; ++i) {
    if (ops[i].op != GRPC_OP_SEND_MESSAGE || ops[i].data.send_message.send_message == nullptr)
      continue;
    grpc_slice_buffer& slices = ops[i].data.send_message.send_message->data.raw.slice_buffer;
    for (std::size_t slice = 0; slice < slices.count; ++slice)
      __tsan_release(GRPC_SLICE_START_PTR(slices.slices[slice]));
  }
  return behind(call, ops, count, tag, reserved);
}

extern "C" UNSEEN int grpc_byte_buffer_reader_next(grpc_byte_buffer_reader* reader,
                                                   grpc_slice* slice) {
  static auto* const behind =
      Behind<int(grpc_byte_buffer_reader*, grpc_slice*)>("grpc_byte_buffer_reader_next");
  const int found = behind(reader, slice);
  if (found != 0) __tsan_acquire(GRPC_SLICE_START_PTR(*slice));
  return found;
}

extern "C" UNSEEN int grpc_byte_buffer_reader_peek(grpc_byte_buffer_reader* reader,
                                                   grpc_slice** slice) {
  static auto* const behind =
      Behind<int(grpc_byte_buffer_reader*, grpc_slice**)>("grpc_byte_buffer_reader_peek");
  const int found = behind(reader, slice);
  if (found != 0) __tsan_acquire(GRPC_SLICE_START_PTR(**slice));
  return found;
}

// --- Mutexes, condition variables and notifications ---------------------------------------------

namespace absl {
ABSL_NAMESPACE_BEGIN

UNSEEN void Mutex::Lock() {
  static auto* const behind = Behind<void(Mutex*)>(OfAbsl("5Mutex4LockEv"));
  behind(this);
  __tsan_acquire(this);
}

UNSEEN bool Mutex::TryLock() {
  static auto* const behind = Behind<bool(Mutex*)>(OfAbsl("5Mutex7TryLockEv"));
  const bool locked = behind(this);
  if (locked) __tsan_acquire(this);
  return locked;
}

UNSEEN void Mutex::Unlock() {
  static auto* const behind = Behind<void(Mutex*)>(OfAbsl("5Mutex6UnlockEv"));
  __tsan_release(this);
  behind(this);
}

UNSEEN void CondVar::Wait(Mutex* mutex) {
  static auto* const behind = Behind<void(CondVar*, Mutex*)>(OfAbsl("7CondVar4WaitEPNS0_5MutexE"));
  __tsan_release(mutex);
  behind(this, mutex);
  __tsan_acquire(mutex);
}

UNSEEN bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  static auto* const behind = Behind<bool(CondVar*, Mutex*, Time)>(
      OfAbsl("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE"));
  __tsan_release(mutex);
  const bool expired = behind(this, mutex, deadline);
  __tsan_acquire(mutex);
  return expired;
}

UNSEEN bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  static auto* const behind = Behind<bool(CondVar*, Mutex*, Duration)>(
      OfAbsl("7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE"));
  __tsan_release(mutex);
  const bool expired = behind(this, mutex, timeout);
  __tsan_acquire(mutex);
  return expired;
}

UNSEEN void Notification::Notify() {
  static auto* const behind = Behind<void(Notification*)>(OfAbsl("12Notification6NotifyEv"));
  __tsan_release(this);
  behind(this);
}

UNSEEN void Notification::WaitForNotification() const {
  static auto* const behind =
      Behind<void(const Notification*)>(OfAbsl("K12Notification19WaitForNotificationEv"));
  behind(this);
  __tsan_acquire(const_cast<Notification*>(this));
}

UNSEEN bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  static auto* const behind = Behind<bool(const Notification*, Duration)>(
      OfAbsl("K12Notification30WaitForNotificationWithTimeoutENS0_8DurationE"));
  const bool notified = behind(this, timeout);
  if (notified) __tsan_acquire(const_cast<Notification*>(this));
  return notified;
}

ABSL_NAMESPACE_END
}  // namespace absl
