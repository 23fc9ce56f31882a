// Kernels for single expressions as text in PTX, the driver's assembly language, which the driver
// compiles to machine code. A thread computes a group of adjacent elements and loads and stores
// them with accesses as wide as the group. The values of the expression are in registers that the
// text names, so nothing is decoded or looked up at run time.
//
// The kernels are correct for any n and block size: threads do not communicate, groups beyond the
// end are skipped, and the elements of an incomplete last group are computed one by one.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "kernels/base/dtype.h"
#include "kernels/problem/map.h"

namespace tessera::compiled {

// Which element of an operand belongs to element i of the result.
enum class Lies : std::uint8_t {
  kUnused,
  kOne,        // one element for all
  kWhole,      // i; groups are aligned
  kUnaligned,  // i
  kVectors,    // i mod period; groups are contiguous and aligned
  kRepeated,   // (i / inner) mod period; one element for each group
  kStretched,  // (i / inner) mod period
};

// Everything that the text of a kernel depends on. The values of constants and the addresses of
// arrays are arguments instead.
struct KernelPlan {
  const MapProgram* program = nullptr;
  std::array<Lies, kMostOperands> lies{};
  bool aligned = false;  // whether groups of the result are aligned
  int width = 1;         // elements per group, a power of 2; a group has at most 16 bytes per array
};

// The constants for x / by, which is computed as x * multiplier >> shift, for x below 2^31.
struct Quotient {
  std::uint32_t by = 1;
  std::uint32_t multiplier = std::uint32_t{1} << 31;
  std::uint32_t shift = 31;
};

// The kernel's only parameter. It ends after the last constant that the kernel uses.
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

// Returns the text of the plan's kernel, with the code of the operations that the expression needs.
// Thread safe.
std::string KernelText(const KernelPlan& plan);

// Returns bytes that identify a kernel's text: plans with the same key have the same text.
std::string KeyOf(const KernelPlan& plan);

}  // namespace tessera::compiled
