// Calls functions that users of the library have supplied.
#pragma once

#include <exception>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {

// Returns what the function returns (a Status or a StatusOr; OK for void), or INTERNAL /
// CALLER_EXCEPTION if it throws.
template <class F, class Result = std::invoke_result_t<F>>
std::conditional_t<std::is_void_v<Result>, absl::Status, Result> CallGuarded(F&& function) {
  std::string what;
  try {
    if constexpr (std::is_void_v<Result>) {
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

}  // namespace tessera
