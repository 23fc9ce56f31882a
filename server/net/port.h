// Checks the ports in addresses, for the options and for the listeners.
#pragma once

#include <algorithm>
#include <string_view>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "kernels/base/error.h"

namespace tessera {

// Whether text is a number from 0 to 65535, with digits only.
inline bool IsPort(std::string_view text) {
  int port = 0;
  return !text.empty() && std::all_of(text.begin(), text.end(), absl::ascii_isdigit) &&
         absl::SimpleAtoi(Absl(text), &port) && port <= 65535;
}

}  // namespace tessera
