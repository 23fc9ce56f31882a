// Chains: expressions whose every step takes what the step before it made, and operands and constants,
// as a * b + c, (a - b)^2, where(a < b, c, d), or exp(2 a), and those where one value at a time has to
// wait for a later step, as the half of a GELU. They are most of what is asked for, and need no
// registers that are numbered at run time: a thread has its elements of up to kInputs operands, of the
// last value, and perhaps of the one that waits, and branches choose what a step reads and does.
//
// Elements of one type throughout, that lie as those of the result do, or are one element for all, and
// arrays that begin at multiples of 16 bytes. Right for any n and block size: threads do not meet, and
// a group of elements that reaches beyond the end is loaded and stored one by one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "kernels/cuda/map/interpreter.cuh"

namespace tessera::chained {

inline constexpr std::uint32_t kBlock = 256;
inline constexpr int kMostSteps = 16;
inline constexpr int kMostConstants = 8;
inline constexpr int kMostInputs = 4;

// What a step reads: operand i of the chain, what the step before made, the value that waits, or
// constant i; while a chain is made, also what step i made.
inline constexpr std::uint8_t kPrevious = kMostInputs;
inline constexpr std::uint8_t kSaved = kMostInputs + 1;
inline constexpr std::uint8_t kConstant = kMostInputs + 2;
inline constexpr std::uint8_t kStep = kConstant + kMostConstants;
inline constexpr std::uint8_t kNothing = 255;

struct Step {
  MapOp op{};
  bool rounds = false;  // to the elements' type
  bool saves = false;   // from then on what it made is the value that waits
  std::uint8_t arguments[kMostArguments] = {kNothing, kNothing, kNothing};
};

struct Input {
  const void* data = nullptr;
  bool one = false;  // one element for all
};

struct Chain {
  int inputs = 0;
  int steps = 0;
  bool saves = false;
  Input input[kMostInputs];
  Step step[kMostSteps];
  MapConstant constant[kMostConstants];
};

inline bool IsOne(const View& view) {
  for (int axis = 0; axis < view.shape.rank; ++axis) {
    if (view.shape[axis] != 1 && view.strides[static_cast<std::size_t>(axis)] != 0) return false;
  }
  return true;
}

inline bool IsAligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

// Names what steps made by where it is when it is read. False: two values would have to wait.
inline bool Place(Chain* chain) {
  std::array<int, kMostSteps> last_use;
  last_use.fill(-1);
  for (int i = 0; i < chain->steps; ++i) {
    for (std::uint8_t from : chain->step[i].arguments)
      if (from != kNothing && from >= kStep) last_use[from - kStep] = i;
  }
  int saved = -1;
  for (int i = 0; i < chain->steps; ++i) {
    Step& step = chain->step[i];
    for (std::uint8_t& from : step.arguments) {
      if (from == kNothing || from < kStep) continue;
      const int made = from - kStep;
      if (made != i - 1 && made != saved) return false;
      from = made == i - 1 ? kPrevious : kSaved;
    }
    if (last_use[i] <= i + 1) continue;
    if (saved >= 0 && last_use[saved] > i) return false;
    saved = i;
    step.saves = chain->saves = true;
  }
  return true;
}

// Whether the problem is a chain, which is then in *chain.
inline bool Match(const MapProblem& p, Chain* chain) {
  const MapProgram& program = *p.program;
  const ValueType type = ValueTypeOf(p.dtype);
  if (!IsComputed(p.dtype) || !IsAligned(p.out)) return false;
  std::array<std::uint8_t, kMostOperands> input_of;
  std::array<std::uint8_t, kMostRegisters> in_register;
  input_of.fill(kNothing);
  in_register.fill(kNothing);
  int constants = 0;
  const auto use = [&](int operand) {
    const auto i = static_cast<std::size_t>(operand);
    const View& view = p.operands[i];
    const bool one = IsOne(view) && p.n > 1;
    if (input_of[i] != kNothing) return true;
    if (chain->inputs == kMostInputs || program.operand_dtypes[i] != p.dtype) return false;
    if (!one && !(view.contiguous() && IsAligned(view.data))) return false;
    chain->input[chain->inputs] = {view.data, one};
    input_of[i] = static_cast<std::uint8_t>(chain->inputs++);
    return true;
  };
  const auto last = [&] { return static_cast<std::uint8_t>(kStep + chain->steps - 1); };
  for (int i = 0; i < program.instructions; ++i) {
    const Instruction& in = program.code[static_cast<std::size_t>(i)];
    switch (in.kind) {
      case Instruction::Kind::kLoad:
        if (!use(in.a)) return false;
        in_register[in.out] = input_of[in.a];
        break;
      case Instruction::Kind::kConstant:
        if (constants == kMostConstants || in.type != type) return false;
        chain->constant[constants] = program.constants[in.a];
        in_register[in.out] = static_cast<std::uint8_t>(kConstant + constants++);
        break;
      case Instruction::Kind::kConvert:
        if (chain->steps == 0 || in_register[in.a] != last() || in.type != type ||
            in.dtype != p.dtype)
          return false;
        chain->step[chain->steps - 1].rounds = true;
        in_register[in.a] = kNothing;
        in_register[in.out] = last();
        break;
      case Instruction::Kind::kApply: {
        if (chain->steps == kMostSteps || in.type != type) return false;
        Step& step = chain->step[chain->steps++];
        step.op = in.op;
        const std::uint8_t arguments[] = {in.a, in.b, in.c};
        for (int j = 0; j < InfoOf(in.op)->arguments; ++j) {
          step.arguments[j] = in_register[arguments[j]];
          if (step.arguments[j] == kNothing) return false;
        }
        in_register[in.out] = last();
        break;
      }
    }
  }
  return chain->steps > 0 && in_register[program.code[program.instructions - 1].out] == last() &&
         Place(chain);
}

// 16 bytes of elements.
template <class T>
struct alignas(16) Group {
  static constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
  T elements[kWidth];
};

template <class T>
constexpr int kGroups = sizeof(T) == 2 ? 1 : 2;
template <class T>
constexpr int kEach = kGroups<T>* Group<T>::kWidth;

template <class T>
__device__ __forceinline__ Group<T> Load(const T* from, std::int64_t left) {
  if (left >= Group<T>::kWidth) return *reinterpret_cast<const Group<T>*>(from);
  Group<T> group = {};
#pragma unroll
  for (int j = 0; j < Group<T>::kWidth; ++j)
    if (j < left) group.elements[j] = from[j];
  return group;
}

template <class T>
__device__ __forceinline__ void Store(const Group<T>& group, T* to, std::int64_t left) {
  if (left >= Group<T>::kWidth) {
    *reinterpret_cast<Group<T>*>(to) = group;
    return;
  }
#pragma unroll
  for (int j = 0; j < Group<T>::kWidth; ++j)
    if (j < left) to[j] = group.elements[j];
}

template <MapOp kOp, class V, int kN>
__device__ __forceinline__ void ApplyToAll(const V (&a)[kN], const V (&b)[kN], const V (&c)[kN],
                                           V (&out)[kN]) {
  // Long functions of 64 bits are there once, in a loop over elements in local memory.
  if constexpr (InfoOf(kOp)->flops > 8 && sizeof(V) == 8) {
    V x[kN], y[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) x[j] = a[j], y[j] = b[j];
#pragma unroll 1
    for (int j = 0; j < kN; ++j) x[j] = static_cast<V>(Apply<kOp>(x[j], y[j], V{}));
#pragma unroll
    for (int j = 0; j < kN; ++j) out[j] = x[j];
  } else {
#pragma unroll
    for (int j = 0; j < kN; ++j) out[j] = static_cast<V>(Apply<kOp>(a[j], b[j], c[j]));
  }
}

template <class V, int kN>
__device__ __forceinline__ void Copy(const V (&from)[kN], V (&to)[kN]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) to[j] = from[j];
}

// What a step reads. Branches choose between copies of registers: selects would become addresses in
// local memory.
template <class V, int kInputs, int kN>
__device__ __forceinline__ void Read(const V (&x)[kInputs][kN], const V (&value)[kN],
                                     const V (&saved)[kN], std::uint8_t from,
                                     const MapConstant* constants, V (&to)[kN]) {
  switch (from) {
    case 0:
      return Copy(x[0], to);
    case 1:
      return Copy(x[1], to);
    case 2:
      if constexpr (kInputs > 2) Copy(x[2], to);
      return;
    case 3:
      if constexpr (kInputs > 3) Copy(x[3], to);
      return;
    case kPrevious:
      return Copy(value, to);
    case kSaved:
      return Copy(saved, to);
    case kNothing:
      return;
    default: {
      V constant;
      std::memcpy(&constant, &constants[from - kConstant].bits, sizeof constant);
#pragma unroll
      for (int j = 0; j < kN; ++j) to[j] = constant;
    }
  }
}

template <class T, int kInputs, bool kSaves>
__global__ void __launch_bounds__(kBlock)
    MapChained(const __grid_constant__ Chain p, std::int64_t n, T* out) {
  using V = ValueOf<T>;
  constexpr int kW = Group<T>::kWidth;
  constexpr int kN = kEach<T>;
  const std::int64_t block = std::int64_t{blockIdx.x} * (std::int64_t{blockDim.x} * kN);
  // The first element of a group of this thread.
  const auto first = [&](int g) {
    return block + (std::int64_t{g} * blockDim.x + threadIdx.x) * kW;
  };
  // All loads are under way before anything waits for one of them.
  Group<T> raw[kInputs][kGroups<T>] = {};
#pragma unroll
  for (int i = 0; i < kInputs; ++i) {
    if (i >= p.inputs) continue;
    const T* data = static_cast<const T*>(p.input[i].data);
    if (p.input[i].one) {
      const T element = *data;
#pragma unroll
      for (int j = 0; j < kN; ++j) raw[i][j / kW].elements[j % kW] = element;
    } else {
#pragma unroll
      for (int g = 0; g < kGroups<T>; ++g)
        if (first(g) < n) raw[i][g] = Load(data + first(g), n - first(g));
    }
  }
  V x[kInputs][kN];
#pragma unroll
  for (int i = 0; i < kInputs; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) x[i][j] = static_cast<V>(raw[i][j / kW].elements[j % kW]);
  }

  V value[kN] = {}, saved[kN] = {};
#pragma unroll 1
  for (int i = 0; i < p.steps; ++i) {
    const Step& step = p.step[i];
    V a[kN] = {}, b[kN] = {}, c[kN] = {};
    Read(x, value, kSaves ? saved : value, step.arguments[0], p.constant, a);
    Read(x, value, kSaves ? saved : value, step.arguments[1], p.constant, b);
    Read(x, value, kSaves ? saved : value, step.arguments[2], p.constant, c);
    if (step.op == MapOp::kWhere) {
#pragma unroll
      for (int j = 0; j < kN; ++j) value[j] = a[j] != V{} ? b[j] : c[j];
    } else {
      DispatchMapOp(step.op, [&](auto o) {
        constexpr MapOp kOp = decltype(o)::value;
        if constexpr (kHasMapOp<kOp, V>) ApplyToAll<kOp>(a, b, c, value);
      });
    }
    if constexpr (sizeof(T) == 2) {
      if (step.rounds) {
#pragma unroll
        for (int j = 0; j < kN; ++j) value[j] = RoundTo<T>(value[j]);
      }
    }
    if constexpr (kSaves) {
      if (step.saves) Copy(value, saved);
    }
  }

#pragma unroll
  for (int g = 0; g < kGroups<T>; ++g) {
    Group<T> group;
#pragma unroll
    for (int j = 0; j < kW; ++j) group.elements[j] = static_cast<T>(value[g * kW + j]);
    if (first(g) < n) Store(group, out + first(g), n - first(g));
  }
}

template <class T, int kInputs, bool kSaves>
void Launch(const MapProblem& p, const Chain& chain, CudaStream& stream) {
  const Grid grid = MakeGrid(p.n, p.launch, kBlock, kEach<T>);
  MapChained<T, kInputs, kSaves>
      <<<grid.blocks, grid.block_size, 0, stream.handle()>>>(chain, p.n, static_cast<T*>(p.out));
  CUDA_CHECK_LAUNCH(MapChained);
}

// Whether the problem is a chain, whose kernel is launched then: one with no more registers than it
// needs.
inline bool LaunchChain(const MapProblem& p, CudaStream& stream) {
  Chain chain;
  if (!Match(p, &chain)) return false;
  DispatchDType(p.dtype, [&](auto t) {
    using T = decltype(t);
    if (chain.saves) {
      chain.inputs <= 2 ? Launch<T, 2, true>(p, chain, stream)
                        : Launch<T, kMostInputs, true>(p, chain, stream);
    } else if (chain.inputs <= 2) {
      Launch<T, 2, false>(p, chain, stream);
    } else if (chain.inputs == 3) {
      Launch<T, 3, false>(p, chain, stream);
    } else {
      Launch<T, kMostInputs, false>(p, chain, stream);
    }
  });
  return true;
}

}  // namespace tessera::chained
