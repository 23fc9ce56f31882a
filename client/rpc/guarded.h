// Calls functions that users of the library have supplied. Internal to the library.
#pragma once

#include <exception>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {

// Calls the function and returns its status, or INTERNAL / CALLER_EXCEPTION if the function throws.
template <class F>
absl::Status Guarded(F&& function) {
  std::string what;
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
      function();
      return absl::OkStatus();
    } else {
      return function();
    }
  } catch (const std::exception& exception) {
    what = exception.what();
  } catch (...) {
    what = "not a std::exception";
  }
  return MakeError(absl::StatusCode::kInternal, "CALLER_EXCEPTION",
                   absl::StrCat("a function supplied by the caller threw an exception: ", what));
}

// Keeps the first error of a transfer's source or sink. The transfer sees only ABORTED without a
// reason, which it neither repeats nor takes for an error of its own calls. Thread safe.
class CallersError {
 public:
  // Calls the function as Guarded does.
  template <class F>
  absl::Status Call(F&& function) {
    absl::Status status = Guarded(std::forward<F>(function));
    if (status.ok()) return status;
    const std::lock_guard lock(mutex_);
    first_.Update(std::move(status));
    return absl::AbortedError("a function supplied by the caller returned an error");
  }
  // Returns the error unchanged or, if there is none, the result of the transfer, which must have
  // ended.
  template <class T>
  absl::StatusOr<T> Or(absl::StatusOr<T> result) const {
    if (!first_.ok()) return first_;
    return result;
  }

 private:
  std::mutex mutex_;
  absl::Status first_;  // guarded by mutex_
};

}  // namespace tessera
