// Map in one pass, with values in registers. `fused` keeps values in local memory, because their
// registers are numbered at run time. Here they are in real registers.
//
// Chains of operations have kernels with fewer registers (chained.cuh). This file is for all other
// expressions.
//
// Registers cannot be numbered at run time, because an instruction encodes its registers in its own
// bits. However, a branch can choose between instructions. It costs a warp a few cycles for any
// number of elements per thread, and here a thread computes eight. A value is therefore read by a
// switch with kRegisters cases, each of which copies one register's eight elements. Three more
// things keep memory busy:
//   - Operands are in separate registers from the start, and all their loads are under way before
//     the first instruction waits for one. Constants take no register.
//   - Adjacent and aligned elements are loaded and stored four at a time (two if some value takes
//     64 bits). Adjacent threads still access adjacent memory: a thread's eight elements are two
//     groups that are a block's width apart.
//   - If an operand repeats along the last axis, or if its rows are whole groups, a group needs one
//     division per axis instead of four.
//
// Cost of a * b + c at n = 2^20, f32: 12 MiB read, 4 MiB written, 512 blocks of 256; 2 instructions
// per thread, of about 60 cycles each for eight elements.
//
// The kernel is correct for any n and block size, because threads do not communicate. Elements are
// loaded one by one in a block that reaches beyond the end, and for operands with other strides or
// another alignment. Programs with more than kMostCode instructions, or with more values at a time
// than there are registers, are left to `fused`.
#include <algorithm>
#include <array>

#include "kernels/cuda/map/chained.cuh"
#include "kernels/cuda/map/interpreter.cuh"
#include "kernels/expression/map_cost.h"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;
constexpr int kGroups = 2;
constexpr int kRegisters = 6;
constexpr int kMostCode = 48;  // limit on operations, and on constants

// The number of elements in a group, which is 16 bytes of values of this size.
template <class Cell>
constexpr int kWidth = 16 / static_cast<int>(sizeof(Cell));
template <class Cell>
constexpr int kEach = kGroups* kWidth<Cell>;

// The numbers by which an instruction refers to what it reads and writes: a register is below
// kRegisters, and constant i is kConstant + i.
constexpr int kConstant = kRegisters;
constexpr int kNothing = 255;
static_assert(kConstant + kMostCode < kNothing);

// How a group of an operand's elements is loaded.
enum class Walk : std::uint8_t {
  kUnused,
  kGroup,     // adjacent elements, aligned as a group
  kRepeated,  // one element for the whole group
  kEach,      // one by one
};

// The program as a kernel argument. It contains no loads, because operand i is in register i.
struct RegisterProgram {
  MapLayout layout;
  Walk walks[kMostOperands]{};
  DType operand_dtypes[kMostOperands]{};
  std::uint8_t sizes[kMostOperands]{};  // of an element, in bytes
  DType dtype{};                        // of the result
  std::uint8_t size = 0;
  bool aligned = false;  // whether groups of the result are aligned
  std::uint8_t result = 0;
  int instructions = 0;
  Instruction code[kMostCode]{};
  MapConstant constants[kMostCode]{};
};

// Stores the program's instructions and constants in *out, with registers assigned by a linear
// scan: a value frees its register at its last use. Returns false if the program exceeds a limit.
bool Assign(const MapProgram& p, RegisterProgram* out) {
  if (p.operands > kRegisters) return false;
  // Values are numbered: the operands first, then the result of each instruction.
  constexpr int kMostValues = kMostOperands + kMostInstructions;
  std::array<int, kMostValues> last_use;
  std::array<int, kMostValues> place{};  // a register or constant of `out`
  std::array<int, kMostRegisters> value_in{};
  last_use.fill(-1);
  const auto made_by = [&](int i) {
    const Instruction& in = p.code[static_cast<std::size_t>(i)];
    return in.kind == Instruction::Kind::kLoad ? in.a : kMostOperands + i;
  };
  const auto arguments = [](const Instruction& in) {
    if (in.kind == Instruction::Kind::kConvert) return 1;
    return in.kind == Instruction::Kind::kApply ? InfoOf(in.op)->arguments : 0;
  };
  const auto argument = [](auto& in, int i) -> auto& {
    return i == 0 ? in.a : i == 1 ? in.b : in.c;
  };

  for (int i = 0; i < p.instructions; ++i) {
    const Instruction& in = p.code[static_cast<std::size_t>(i)];
    for (int j = 0; j < arguments(in); ++j) last_use[value_in[argument(in, j)]] = i;
    value_in[in.out] = made_by(i);
  }
  const int result = made_by(p.instructions - 1);
  last_use[result] = p.instructions;

  std::array<bool, kRegisters> taken{};
  for (int i = 0; i < p.operands; ++i) {
    place[i] = i;
    taken[i] = last_use[i] >= 0;
    if (!taken[i]) out->walks[i] = Walk::kUnused;
  }
  int constants = 0;
  for (int i = 0; i < p.instructions; ++i) {
    const Instruction& in = p.code[static_cast<std::size_t>(i)];
    const int value = made_by(i);
    if (in.kind == Instruction::Kind::kConstant) {
      if (constants == kMostCode) return false;
      out->constants[constants] = p.constants[in.a];
      place[value] = kConstant + constants++;
    } else if (in.kind != Instruction::Kind::kLoad) {
      if (out->instructions == kMostCode) return false;
      Instruction& made = out->code[out->instructions++] = in;
      made.b = made.c = kNothing;
      for (int j = 0; j < arguments(in); ++j) {
        const int read = value_in[argument(in, j)];
        argument(made, j) = static_cast<std::uint8_t>(place[read]);
      }
      for (int j = 0; j < arguments(in); ++j) {
        const int read = value_in[argument(in, j)];
        if (last_use[read] == i && place[read] < kRegisters) taken[place[read]] = false;
      }
      const auto free = std::find(taken.begin(), taken.end(), false);
      if (free == taken.end()) return false;
      *free = true;
      place[value] = static_cast<int>(free - taken.begin());
      made.out = static_cast<std::uint8_t>(place[value]);
    }
    value_in[in.out] = value;
  }
  out->result = static_cast<std::uint8_t>(place[result]);
  return true;
}

bool IsAligned(const void* data, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
}

Walk WalkOf(const MapLayout& layout, const MapLayout::Operand& operand, DType dtype, int width) {
  const int last = layout.rank - 1;
  const bool aligned = IsAligned(operand.data, width * SizeOf(dtype));
  if (operand.whole) return aligned ? Walk::kGroup : Walk::kEach;
  const auto outer_are = [&](auto holds) {
    return std::all_of(operand.strides, operand.strides + last, holds);
  };
  if (operand.strides[last] == 0) {
    if (layout.extents[last] % width == 0) return Walk::kRepeated;
    return outer_are([](std::int64_t s) { return s == 0; }) ? Walk::kRepeated : Walk::kEach;
  }
  const bool rows = operand.strides[last] == 1 && layout.extents[last] % width == 0 &&
                    outer_are([&](std::int64_t s) { return s % width == 0; });
  return rows && aligned ? Walk::kGroup : Walk::kEach;
}

// --- Cells: the part of a register for one element ---

template <class Cell, class T>
__device__ Cell ToCell(T value) {
  if constexpr (std::is_same_v<T, bool>) return value ? 1 : 0;
  Cell cell = 0;
  std::memcpy(&cell, &value, sizeof value);
  return cell;
}
template <class T, class Cell>
__device__ T FromCell(Cell cell) {
  if constexpr (std::is_same_v<T, bool>) return cell != 0;
  T value;
  std::memcpy(&value, &cell, sizeof value);
  return value;
}

template <class Cell>
using Cells = Cell[kEach<Cell>];

// The elements of a group, as bits.
template <class Bits, class Cell>
struct alignas(sizeof(Bits) * kWidth<Cell>) Group {
  Bits elements[kWidth<Cell>];
};

// Calls f(Bits{}) for elements of `size` bytes.
template <class Cell, class F>
__device__ __forceinline__ void DispatchSize(int size, F f) {
  switch (size) {
    case 1:
      return f(std::uint8_t{});
    case 2:
      return f(std::uint16_t{});
    case 4:
      return f(std::uint32_t{});
    default:
      if constexpr (sizeof(Cell) == 8) return f(std::uint64_t{});
  }
}

// Convert elements from their form in memory to the values that registers hold, and back: 16-bit
// elements to F32, and one-byte integers to I32. A byte of BOOL that is not 0 becomes 1. Other
// types need no conversion. To store an I32 as one byte, its low byte is stored unchanged.
template <class Cell>
__device__ void Widen(DType dtype, Cells<Cell>& cells) {
  DispatchElement(dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (std::is_same_v<T, bool>) {
#pragma unroll
      for (int j = 0; j < kEach<Cell>; ++j) cells[j] = cells[j] != 0;
    } else if constexpr (sizeof(T) <= 2) {
#pragma unroll
      for (int j = 0; j < kEach<Cell>; ++j)
        cells[j] = ToCell<Cell>(static_cast<ValueOf<T>>(FromCell<T>(cells[j])));
    }
  });
}
template <class Cell>
__device__ void Narrow(DType dtype, Cells<Cell>& cells) {
  DispatchElement(dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int j = 0; j < kEach<Cell>; ++j)
        cells[j] = ToCell<Cell>(static_cast<T>(FromCell<float>(cells[j])));
    }
  });
}

// --- Registers, chosen at run time ---

template <int kRegister, class Cell>
__device__ __forceinline__ void CopyOut(const Cells<Cell> (&registers)[kRegisters],
                                        Cells<Cell>& to) {
#pragma unroll
  for (int j = 0; j < kEach<Cell>; ++j) to[j] = registers[kRegister][j];
}
template <int kRegister, class Cell>
__device__ __forceinline__ void CopyIn(const Cells<Cell>& from,
                                       Cells<Cell> (&registers)[kRegisters]) {
#pragma unroll
  for (int j = 0; j < kEach<Cell>; ++j) registers[kRegister][j] = from[j];
}

// One case for each of the kRegisters registers.
#define TESSERA_EACH_REGISTER(X) X(0) X(1) X(2) X(3) X(4) X(5)

template <class Cell>
__device__ __forceinline__ void Read(const Cells<Cell> (&registers)[kRegisters], int place,
                                     const MapConstant* constants, Cells<Cell>& to) {
  switch (place) {
#define TESSERA_CASE(k)              \
  case k:                            \
    CopyOut<k, Cell>(registers, to); \
    break;
    TESSERA_EACH_REGISTER(TESSERA_CASE)
#undef TESSERA_CASE
    case kNothing:
      break;
    default: {
      const auto cell = static_cast<Cell>(constants[place - kConstant].bits);
#pragma unroll
      for (int j = 0; j < kEach<Cell>; ++j) to[j] = cell;
    }
  }
}

template <class Cell>
__device__ __forceinline__ void Write(const Cells<Cell>& from, int place,
                                      Cells<Cell> (&registers)[kRegisters]) {
  switch (place) {
#define TESSERA_CASE(k)               \
  case k:                             \
    CopyIn<k, Cell>(from, registers); \
    break;
    TESSERA_EACH_REGISTER(TESSERA_CASE)
#undef TESSERA_CASE
  }
}

// --- One instruction ---

// Operations of many instructions are instantiated once, in a loop. Short ones are instantiated for
// each element.
constexpr int kLongFlops = 8;

template <MapOp kOp, class T, class Cell>
__device__ __forceinline__ void ApplyToAll(const Cells<Cell>& a, const Cells<Cell>& b,
                                           const Cells<Cell>& c, Cells<Cell>& out) {
  const auto apply = [](Cell x, Cell y, Cell z) {
    return ToCell<Cell>(Apply<kOp>(FromCell<T>(x), FromCell<T>(y), FromCell<T>(z)));
  };
  if constexpr (InfoOf(kOp)->flops > kLongFlops) {
    // Elements that are indexed at run time are in local memory. The loop works on copies, so that
    // the originals stay in registers.
    Cells<Cell> x, y;
#pragma unroll
    for (int j = 0; j < kEach<Cell>; ++j) {
      x[j] = a[j];
      y[j] = b[j];
    }
#pragma unroll 1
    for (int j = 0; j < kEach<Cell>; ++j) x[j] = apply(x[j], y[j], 0);
#pragma unroll
    for (int j = 0; j < kEach<Cell>; ++j) out[j] = x[j];
  } else {
#pragma unroll
    for (int j = 0; j < kEach<Cell>; ++j) out[j] = apply(a[j], b[j], c[j]);
  }
}

template <class Cell>
__device__ __forceinline__ void Compute(const Instruction& in, const Cells<Cell>& a,
                                        const Cells<Cell>& b, const Cells<Cell>& c,
                                        Cells<Cell>& out) {
  constexpr int kBytes = sizeof(Cell);
  if (in.kind == Instruction::Kind::kApply && in.op == MapOp::kWhere) {
#pragma unroll
    for (int j = 0; j < kEach<Cell>; ++j) out[j] = FromCell<bool>(a[j]) ? b[j] : c[j];
    return;
  }
  DispatchFitting<kBytes>(in.type, [&](auto t) {
    using T = decltype(t);
    if (in.kind == Instruction::Kind::kConvert) {
      DispatchFittingElement<kBytes>(in.dtype, [&](auto to) {
        using To = decltype(to);
#pragma unroll
        for (int j = 0; j < kEach<Cell>; ++j) out[j] = ToCell<Cell>(RoundTo<To>(FromCell<T>(a[j])));
      });
      return;
    }
    DispatchMapOp(in.op, [&](auto o) {
      constexpr MapOp kOp = decltype(o)::value;
      if constexpr (kHasMapOp<kOp, T>) ApplyToAll<kOp, T, Cell>(a, b, c, out);
    });
  });
}

// --- The kernel ---

template <class Cell>
__global__ void __launch_bounds__(kBlock, 2)
    MapVectorized(const __grid_constant__ RegisterProgram p, std::int64_t n, void* out) {
  constexpr int kW = kWidth<Cell>;
  const std::int64_t block = std::int64_t{blockIdx.x} * (std::int64_t{blockDim.x} * kEach<Cell>);
  // Returns the first element of this thread's group g.
  const auto first = [&](int g) {
    return block + (std::int64_t{g} * blockDim.x + threadIdx.x) * kW;
  };
  const bool whole = block + std::int64_t{blockDim.x} * kEach<Cell> <= n;
  Cells<Cell> registers[kRegisters] = {};
  const auto by_group = [&](int i) { return whole && p.walks[i] == Walk::kGroup; };
  // Only bits are loaded here, without conversion, so that nothing waits for one operand before the
  // loads of the next are under way.
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    if (!by_group(i)) continue;
    const MapLayout::Operand& operand = p.layout.operands[i];
    std::int64_t at[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) at[g] = OffsetOf(p.layout, operand, first(g));
    DispatchSize<Cell>(p.sizes[i], [&](auto bits) {
      using Bits = decltype(bits);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const auto group = *reinterpret_cast<const Group<Bits, Cell>*>(
            static_cast<const Bits*>(operand.data) + at[g]);
        std::memcpy(&registers[i][g * kW], &group, sizeof group);
      }
    });
  }
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    if (p.walks[i] == Walk::kUnused || by_group(i)) continue;
    const MapLayout::Operand& operand = p.layout.operands[i];
    Cells<Cell> cells = {};
    const int step = p.walks[i] == Walk::kRepeated ? kW : 1;
#pragma unroll 1
    for (int j = 0; j < kEach<Cell>; j += step) {
      const std::int64_t element = first(j / kW) + j % kW;
      if (element >= n) continue;
      const std::int64_t at = OffsetOf(p.layout, operand, element);
      DispatchSize<Cell>(p.sizes[i], [&](auto bits) {
        const Cell cell = static_cast<const decltype(bits)*>(operand.data)[at];
        for (int k = 0; k < step; ++k) cells[j + k] = cell;
      });
    }
#pragma unroll
    for (int j = 0; j < kEach<Cell>; ++j) registers[i][j] = cells[j];
  }
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    if (by_group(i)) {
      DispatchSize<Cell>(p.sizes[i], [&](auto bits) {
        using Bits = decltype(bits);
        if constexpr (sizeof(Bits) < sizeof(Cell)) {
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            Group<Bits, Cell> group;
            std::memcpy(&group, &registers[i][g * kW], sizeof group);
#pragma unroll
            for (int j = 0; j < kW; ++j) registers[i][g * kW + j] = group.elements[j];
          }
        }
      });
    }
    if (p.sizes[i] <= 2) Widen<Cell>(p.operand_dtypes[i], registers[i]);
  }

  Cells<Cell> a = {}, b = {}, c = {}, value;
  for (int i = 0; i < p.instructions; ++i) {
    const Instruction in = p.code[i];
    Read<Cell>(registers, in.a, p.constants, a);
    Read<Cell>(registers, in.b, p.constants, b);
    Read<Cell>(registers, in.c, p.constants, c);
    Compute<Cell>(in, a, b, c, value);
    Write<Cell>(value, in.out, registers);
  }

  Read<Cell>(registers, p.result, p.constants, value);
  if (p.size == 2) Narrow<Cell>(p.dtype, value);
  DispatchSize<Cell>(p.size, [&](auto bits) {
    using Bits = decltype(bits);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      Group<Bits, Cell> group;
#pragma unroll
      for (int j = 0; j < kW; ++j) group.elements[j] = static_cast<Bits>(value[g * kW + j]);
      Bits* const to = static_cast<Bits*>(out) + first(g);
      if (whole && p.aligned) {
        *reinterpret_cast<Group<Bits, Cell>*>(to) = group;
      } else {
#pragma unroll
        for (int j = 0; j < kW; ++j)
          if (first(g) + j < n) to[j] = group.elements[j];
      }
    }
  });
}

#undef TESSERA_EACH_REGISTER

template <class Cell>
void Launch(const MapProblem& p, CudaStream& stream) {
  RegisterProgram program;
  program.layout = LayoutOf(p);
  program.dtype = p.dtype;
  program.size = static_cast<std::uint8_t>(SizeOf(p.dtype));
  program.aligned = IsAligned(p.out, kWidth<Cell> * SizeOf(p.dtype));
  for (int i = 0; i < p.program->operands; ++i) {
    const DType dtype = p.program->operand_dtypes[static_cast<std::size_t>(i)];
    program.operand_dtypes[i] = dtype;
    program.sizes[i] = static_cast<std::uint8_t>(SizeOf(dtype));
    program.walks[i] = WalkOf(program.layout, program.layout.operands[i], dtype, kWidth<Cell>);
  }
  Assign(*p.program, &program);
  const Grid grid = MakeGrid(p.n, p.launch, kBlock, kEach<Cell>);
  MapVectorized<Cell><<<grid.blocks, grid.block_size, 0, stream.handle()>>>(program, p.n, p.out);
  CUDA_CHECK_LAUNCH(MapVectorized);
}

void Enqueue(const MapProblem& p, Stream& stream) {
  if (p.n == 0 || chained::LaunchChain(p, Cuda(stream))) return;
  if (p.program->wide) {
    Launch<std::uint64_t>(p, Cuda(stream));
  } else {
    Launch<std::uint32_t>(p, Cuda(stream));
  }
}

std::string Refuses(const MapProblem& p) {
  RegisterProgram program;
  if (Assign(*p.program, &program)) return "";
  return "at most 48 operations and 48 constants, and 6 values at a time";
}

}  // namespace

extern constexpr Strategy<MapProblem> kMapVectorized = {
    .name = "vectorized",
    .summary = "one pass with values in registers, four elements per load",
    .source = "loop fusion, with an interpreter in place of a compiler",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .limits = {.block_size = {kWarpSize, kBlock}},
    .roundoff = MapRoundoff,
    .cost = OnePassCost,
    .launch = Enqueue,
    .refuses = Refuses,
};

}  // namespace tessera
