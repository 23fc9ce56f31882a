// What users of the library have given it to call. Not for users of the library.
#pragma once

#include <exception>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {

// Calls it. What it throws is INTERNAL / CALLER_EXCEPTION.
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
    what = "no standard exception";
  }
  return MakeError(absl::StatusCode::kInternal, "CALLER_EXCEPTION",
                   absl::StrCat("a function of the caller has thrown: ", what));
}

}  // namespace tessera
