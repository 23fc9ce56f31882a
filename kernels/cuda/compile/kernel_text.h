// Kernels for one expression each, as text in PTX, the driver's assembly language, which the driver
// makes machine code of. A thread computes a group of elements that lie side by side and loads and
// stores as many bytes at once as they have. The values of the expression are in registers that the
// text names: nothing is decoded or looked up while it runs.
//
// Right for any n and block size: threads do not meet, groups beyond the end are left out, and the
// elements of a last group that is not whole are computed one by one.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "kernels/base/dtype.h"
#include "kernels/problem/map.h"

namespace tessera::compiled {

// Where element i of the result finds its element of an operand.
enum class Lies : std::uint8_t {
  kUnused,
  kOne,        // there is one for all
  kWhole,      // i; groups are aligned
  kUnaligned,  // i
  kVectors,    // i mod period; groups lie side by side, aligned
  kRepeated,   // (i / inner) mod period; one for each group
  kStretched,  // (i / inner) mod period
};

// All that the text of a kernel depends on. The values of constants are arguments, and so is where
// arrays are.
struct KernelPlan {
  const MapProgram* program = nullptr;
  std::array<Lies, kMostOperands> lies{};
  bool aligned = false;  // groups of the result are
  int width = 1;         // of a group, a power of 2; no array here has more than 16 bytes of one
};

// x / by for x below 2^31, as x * multiplier >> shift.
struct Quotient {
  std::uint32_t by = 1;
  std::uint32_t multiplier = std::uint32_t{1} << 31;
  std::uint32_t shift = 31;
};

// The kernel's one parameter, of which it has the constants that it uses, by their numbers.
struct Arguments {
  std::int64_t n = 0;
  void* out = nullptr;
  struct Operand {
    const void* data = nullptr;
    Quotient inner, period;
  } operands[kMostOperands]{};
  std::uint64_t constants[kMostInstructions]{};
};

inline constexpr char kKernelName[] = "tessera_map";

// The text; it begins with the code of what the expression needs of operations.cu. Thread safe.
std::string KernelText(const KernelPlan& plan);

// Bytes to find a kernel by: plans with the same key have the same text.
std::string KeyOf(const KernelPlan& plan);

}  // namespace tessera::compiled
