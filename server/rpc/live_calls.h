// The open streams of one method, for code that ends them from outside.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "absl/time/time.h"

namespace tessera {

// Owns the calls, and must outlive them. Thread safe.
template <class Call>
class LiveCalls {
 public:
  Call& Add(std::shared_ptr<Call> call) {
    const std::lock_guard lock(mutex_);
    return *(calls_[call.get()] = std::move(call));
  }
  // The call may be destroyed before this returns.
  void Remove(Call& call) {
    typename Calls::node_type removed;  // destroyed after the lock is released
    const std::lock_guard lock(mutex_);
    removed = calls_.extract(&call);
  }
  void EndIdle(absl::Time now) {
    std::vector<std::shared_ptr<Call>> calls;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [address, call] : calls_) calls.push_back(call);
    }
    for (const std::shared_ptr<Call>& call : calls) call->EndIfIdle(now);
  }

 private:
  using Calls = std::unordered_map<const Call*, std::shared_ptr<Call>>;
  std::mutex mutex_;
  Calls calls_;
};

}  // namespace tessera
