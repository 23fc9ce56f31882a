// Writes a kernel for a single expression as text in PTX, the driver's assembly language. The
// driver compiles the text to machine code. A thread computes a group of adjacent elements and
// loads and stores them with accesses as wide as the group. The values of the expression are in
// registers that the text names, so nothing is decoded or looked up at run time.
//
// The kernels are correct for any n and block size: threads do not communicate, groups beyond the
// end are skipped, and the elements of an incomplete last group are computed one by one.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "kernels/base/dtype.h"
#include "kernels/base/shape.h"
#include "kernels/problem/map.h"

namespace tessera::compiled {

// How a thread loads an operand's elements for the group of results that it computes.
enum class Lies : std::uint8_t {
  kUnused,
  kOne,        // one element is used for the whole result
  kWhole,      // element i is used for element i of the result; groups are aligned
  kUnaligned,  // like kWhole, but groups are not aligned
  kGroups,     // strides give the first element of a group; groups are contiguous and aligned
  kRepeated,   // strides give one element, which is used for a whole group
  kEach,       // strides give every element
};

// Everything that the text of a kernel depends on. The values of constants, the addresses of arrays
// and the sizes and strides of axes are arguments instead.
struct KernelPlan {
  const MapProgram* program = nullptr;
  std::array<Lies, kMostOperands> lies{};
  bool aligned = false;  // whether groups of the result are aligned
  int width = 1;         // elements per group, a power of 2; a group has at most 16 bytes per array
  int rank = 0;          // the result's rank, after axes have been merged
  bool wide = false;     // whether n is 2^31 or more
  // For each operand, the axes along which its stride is not 0: bit k stands for axis k.
  std::array<std::uint8_t, kMostOperands> moves{};
};

// An axis of the result. If n is below 2^31, x / extent is computed as x * multiplier >> shift.
struct Axis {
  std::uint64_t extent = 1;
  std::uint32_t multiplier = std::uint32_t{1} << 31;
  std::uint32_t shift = 31;
};

// The kernel's only parameter. It ends after the last constant that the kernel uses.
struct Arguments {
  std::int64_t n = 0;
  void* out = nullptr;
  Axis axes[kMaxRank]{};
  struct Operand {
    const void* data = nullptr;
    std::int64_t strides[kMaxRank]{};  // in bytes
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
