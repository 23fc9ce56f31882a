// Runs an expression's instructions on a CPU, each for a block of elements. The loops can be
// vectorised, and the registers stay in the L1 cache.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/runtime/gather.h"
#include "kernels/expression/map_math.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Elements per block. Four registers of 8 bytes per element take half of an L1 cache.
inline constexpr std::int64_t kMapBlock = 512;
// The size of an element in a register of any type, in bytes.
inline constexpr std::int64_t kCellBytes = 8;

// A problem's operands in the form in which they are read.
struct MapOperands {
  explicit MapOperands(const MapProblem& p) {
    for (std::size_t i = 0; i < views.size(); ++i) views[i] = Merged(p.operands[i]);
  }
  std::array<View, kMostOperands> views;
};

inline bool IsWhole(const View& merged) {
  return merged.shape.rank == 0 || (merged.shape.rank == 1 && merged.strides[0] == 1);
}

// Returns the address of element `index` of the result, which begins at p.out.
inline void* ResultAt(const MapProblem& p, std::int64_t index) {
  return static_cast<char*>(p.out) + index * static_cast<std::int64_t>(SizeOf(p.dtype));
}

// The registers of one block. memory[r] is where the values of register r may be written. at[r] is
// where they are read: in the operand, if an operand is read in place.
struct MapRegisters {
  std::array<void*, kMostRegisters> memory;
  std::array<const void*, kMostRegisters> at;
};

// Loads elements [first, first + count) of a view; count <= kMapBlock.
template <class Element>
void LoadBlock(const View& view, std::int64_t first, std::int64_t count, void* memory,
               const void** at) {
  using Value = ValueOf<Element>;
  using Stored = StoredOf<Element>;
  const Stored* source = static_cast<const Stored*>(view.data) + first;
  std::array<Stored, kMapBlock> gathered;
  if (!IsWhole(view)) {
    source = gathered.data();
    GatherRange(view, first, count, gathered.data());
  } else if constexpr (std::is_same_v<Stored, Value>) {
    *at = source;
    return;
  }
  auto* values = static_cast<Value*>(memory);
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<Value>(source[i]);  // NOLINT(bugprone-signed-char-misuse): i8 is signed
  }
}

template <class From>
void ConvertBlock(const From* from, DType to, std::int64_t count, void* memory) {
  DispatchElement(to, [&]<class To>(To) {
    auto* values = static_cast<ValueOf<To>*>(memory);
    for (std::int64_t i = 0; i < count; ++i) values[i] = RoundTo<To>(from[i]);
  });
}

template <class T>
void WhereBlock(const bool* condition, const T* a, const T* b, std::int64_t count, T* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = condition[i] ? a[i] : b[i];
}

template <class T>
void ApplyBlock(const Instruction& in, const MapRegisters& r, std::int64_t count, void* memory) {
  const auto at = [&](std::uint8_t reg) { return static_cast<const T*>(r.at[reg]); };
  if (in.op == MapOp::kWhere) {
    WhereBlock(static_cast<const bool*>(r.at[in.a]), at(in.b), at(in.c), count,
               static_cast<T*>(memory));
    return;
  }
  DispatchMapOp(in.op, [&](auto o) {
    constexpr MapOp kOp = o();
    if constexpr (kHasMapOp<kOp, T>) {
      constexpr int kArguments = InfoOf(kOp)->arguments;
      const T* a = at(in.a);
      const T* b = kArguments > 1 ? at(in.b) : a;
      const T* c = kArguments > 2 ? at(in.c) : a;
      auto* out = static_cast<decltype(Apply<kOp>(T{}, T{}, T{}))*>(memory);
      for (std::int64_t i = 0; i < count; ++i) out[i] = Apply<kOp>(a[i], b[i], c[i]);
    }
  });
}

// Runs one instruction for elements [first, first + count), count <= kMapBlock. The result is in
// `memory`, unless it is an operand that is read in place.
inline void RunInstruction(const MapProblem& p, const MapOperands& operands, const Instruction& in,
                           std::int64_t first, std::int64_t count, MapRegisters& r, void* memory) {
  r.at[in.out] = memory;
  switch (in.kind) {
    case Instruction::Kind::kLoad:
      DispatchElement(in.dtype, [&]<class T>(T) {
        LoadBlock<T>(operands.views[in.a], first, count, memory, &r.at[in.out]);
      });
      break;
    case Instruction::Kind::kCoordinate: {
      const View& view = operands.views[in.a];
      const std::int64_t from = CoordinateAt(view.data);
      auto* out = static_cast<std::int64_t*>(memory);
      ForOffsets(view, first, count, [&](std::int64_t offset) { *out++ = from + offset; });
      break;
    }
    case Instruction::Kind::kConstant:
      DispatchValue(in.type, [&]<class T>(T value) {
        std::memcpy(&value, &p.program->constants[in.a].bits, sizeof value);
        std::fill_n(static_cast<T*>(memory), count, value);
      });
      break;
    case Instruction::Kind::kConvert:
      DispatchValue(in.type, [&]<class T>(T) {
        ConvertBlock(static_cast<const T*>(r.at[in.a]), in.dtype, count, memory);
      });
      break;
    case Instruction::Kind::kApply:
      DispatchValue(in.type, [&]<class T>(T) { ApplyBlock<T>(in, r, count, memory); });
      break;
  }
}

// Converts values at `from`, which have the type of a register, to elements at `to`.
inline void StoreBlock(DType dtype, const void* from, std::int64_t count, void* to) {
  if (to == from) return;
  DispatchElement(dtype, [&]<class T>(T) {
    T* const out = static_cast<T*>(to);
    const auto* values = static_cast<const ValueOf<T>*>(from);
    for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(values[i]);
  });
}

}  // namespace tessera
