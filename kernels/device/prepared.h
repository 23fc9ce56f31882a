// What is made of an operand before a kernel reads it, as a copy without gaps. The operand of a
// later request may be the same memory, unchanged; so whoever serves requests may keep it. Standard
// library only.
#pragma once

#include <cstddef>
#include <string_view>

#include "kernels/problem/strategy.h"

namespace tessera {

// What is made of which elements. Two that are equal make the same bytes, as long as the elements
// stay as they are.
struct Preparation {
  std::string_view how;  // a literal: what is made depends on it and on the view alone
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
  // An earlier request has made it; otherwise it is to be made there, in the order of the stream.
  bool ready = false;
};

// Keeps what one request prepares, on the device of its stream. One thread.
class Keeper {
 public:
  virtual ~Keeper() = default;
  // bytes of device memory, aligned to 256, until the request has ended. No data: this is not kept.
  virtual PreparedMemory Keep(const Preparation& what, std::size_t bytes) = 0;
};

}  // namespace tessera
