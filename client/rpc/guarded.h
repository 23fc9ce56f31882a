// Calls functions that users of the library have supplied. Internal to the library.
#pragma once

#include <exception>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
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

}  // namespace tessera
