// Data that is prepared from an operand before a kernel reads it, such as a copy without gaps. A
// later request may read the same operand, unchanged, so a server may keep the prepared data.
// Uses only the standard library.
#pragma once

#include <cstddef>
#include <string_view>

#include "kernels/problem/strategy.h"

namespace tessera {

// Identifies prepared data: how it is prepared, and from which elements. Equal preparations produce
// the same bytes as long as the elements do not change.
struct Preparation {
  std::string_view how;  // a literal; the prepared bytes depend only on it and on the view
  View operand;

  friend bool operator==(const Preparation& a, const Preparation& b) {
    if (a.how != b.how || a.operand.data != b.operand.data || a.operand.dtype != b.operand.dtype ||
        a.operand.shape != b.operand.shape)
      return false;
    for (int i = 0; i < a.operand.shape.rank; ++i) {
      const auto axis = static_cast<std::size_t>(i);
      if (a.operand.strides[axis] != b.operand.strides[axis]) return false;
    }
    return true;
  }
};

struct PreparedMemory {
  void* data = nullptr;
  // Whether an earlier request has written the prepared data. If not, the caller must write it to
  // the memory, in stream order.
  bool ready = false;
};

// Keeps the data that one request prepares, on the device of the request's stream. Only one thread
// may use it.
class Keeper {
 public:
  virtual ~Keeper() = default;
  // Returns `bytes` of device memory, aligned to 256 bytes and valid until the request has ended.
  // Its `data` is null if this preparation is not kept.
  virtual PreparedMemory Keep(const Preparation& what, std::size_t bytes) = 0;
};

}  // namespace tessera
