// A chain is an expression in which every step takes the value of the previous step, operands and
// constants, for example a * b + c, (a - b)^2, where(a < b, c, d) or exp(2 a). At most one earlier
// value at a time may wait for a later step, as a / 2 does in a GELU. Most requested expressions
// are chains. Chains need no registers that are numbered at run time: a thread holds its elements
// of the last value, of the waiting value (if any) and of the values that a step reads, and
// branches choose the operation. The operands' elements that the thread uses are copied to shared
// memory directly (cp.async), not through registers. Unlike registers, shared memory can be indexed
// at run time. Only its size limits the number of copies in flight. A thread reads only elements
// that it has loaded itself, so threads need not wait for each other.
//
// Elements are loaded in groups of 16 bytes of the chain's type. A group of an operand consists of
// adjacent elements and is aligned, or it is a single element that is repeated:
//
//   kWhole      element i of the result takes element i
//   kVectors    element i of the result takes element i mod period: broadcast along outer axes
//   kRepeated   it takes (i / inner) mod period: broadcast along inner axes, and perhaps outer ones
//
// An operand that is a single element for all results is stored with the constants. In chains of
// f32, operands and the result may have a 16-bit type. Any chain may have bool operands, and a
// chain that ends with a comparison has a bool result. No chain has coordinates.
//
// Reduce folds the values of chains as it computes them (kernels/cuda/tree/mapped.cuh).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/expression/map_math.h"
#include "kernels/problem/strategy.h"

namespace tessera::chained {

inline constexpr int kMostSteps = 16;
inline constexpr int kMostSingles = 16;
inline constexpr int kMostInputs = 4;

// Where an argument of a step comes from: operand i of the chain, the result of the previous step,
// the waiting value, or single i. While a chain is being built, an argument may also come from the
// result of step i.
inline constexpr std::uint8_t kPrevious = kMostInputs;
inline constexpr std::uint8_t kSaved = kMostInputs + 1;
inline constexpr std::uint8_t kSingle = kMostInputs + 2;
inline constexpr std::uint8_t kStep = kSingle + kMostSingles;
inline constexpr std::uint8_t kNothing = 255;

struct Step {
  MapOp op{};
  bool rounds = false;  // its result is rounded to the chain's type
  bool saves = false;   // its result becomes the waiting value
  bool quick = false;   // see IsQuick
  std::uint8_t arguments[kMostArguments] = {kNothing, kNothing, kNothing};
};

// Divides numbers below 2^31 by a fixed number below 2^31, with a multiplication and a shift.
struct Divisor {
  std::uint32_t by = 1;
  std::uint32_t multiplier = std::uint32_t{1} << 31;
  int shift = 31;

  Divisor() = default;
  explicit Divisor(std::uint32_t number) : by(number), shift(31 + std::bit_width(number - 1)) {
    multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + by - 1) / by);
  }
  __device__ std::uint32_t Quotient(std::uint32_t x) const {
    return static_cast<std::uint32_t>(std::uint64_t{x} * multiplier >> shift);
  }
};

enum class Lies : std::uint8_t { kWhole, kVectors, kRepeated };

struct Input {
  const void* data = nullptr;
  DType dtype{};
  Lies lies = Lies::kWhole;
  bool plain = false;  // loaded groups have the chain's type
  Divisor inner, period;
};

// One value for all elements: a constant, or the element at data.
struct Single {
  MapConstant constant;
  const void* data = nullptr;
  DType dtype{};
};

struct Chain {
  DType dtype{};  // the type that steps compute in and round to
  DType out{};    // the result's type: dtype, BOOL or, if dtype is F32, a 16-bit type
  int inputs = 0;
  int singles = 0;
  int steps = 0;
  bool saves = false;
  bool simple = true;  // all inputs are whole and plain
  Input input[kMostInputs];
  Single single[kMostSingles];
  Step step[kMostSteps];
};

// --- Which expressions are chains ---

inline bool IsAligned(const void* data, std::int64_t bytes = 16) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0;
}

// Finds inner and period such that element i of the result uses element (i / inner) mod period of a
// contiguous array. They are 1 and the number of elements if the array is not broadcast. Returns
// false if there are no such numbers.
inline bool FindPeriod(const View& view, std::int64_t* inner, std::int64_t* period) {
  *inner = *period = 1;
  bool outer = false;
  for (int axis = view.shape.rank - 1; axis >= 0; --axis) {
    const std::int64_t extent = view.shape[axis];
    const std::int64_t stride = view.strides[static_cast<std::size_t>(axis)];
    if (extent == 1) continue;
    if (stride == 0) {
      if (*period == 1) {
        *inner *= extent;
      } else {
        outer = true;
      }
    } else if (outer || stride != *period) {
      return false;
    } else {
      *period *= extent;
    }
  }
  return true;
}

// Whether an operand of type dtype may be an operand of a chain of type `chain`.
inline bool GoesInto(DType dtype, DType chain) {
  return dtype == chain || dtype == DType::kBool ||
         (chain == DType::kF32 && ValueTypeOf(dtype) == ValueType::kF32);
}

// Returns whether the operand can be loaded group by group. If so, fills in *input. REQUIRES: the
// operand is not a single element for all results.
inline bool FindInput(const View& view, std::int64_t n, DType chain, Input* input) {
  std::int64_t inner, period;
  if (!FindPeriod(view, &inner, &period)) return false;
  const std::int64_t width = 16 / static_cast<std::int64_t>(SizeOf(chain));
  const bool whole = inner == 1 && period == n;
  if (!whole && n > INT32_MAX) return false;
  if (inner > 1 ? inner % width != 0
                : !IsAligned(view.data, width * static_cast<std::int64_t>(SizeOf(view.dtype))) ||
                      (!whole && period % width != 0))
    return false;
  *input = {.data = view.data, .dtype = view.dtype};
  if (whole) {
    input->plain = view.dtype == chain;
    return true;
  }
  input->lies = inner > 1 ? Lies::kRepeated : Lies::kVectors;
  input->plain = inner == 1 && view.dtype == chain;
  input->inner = Divisor(static_cast<std::uint32_t>(inner));
  input->period = Divisor(static_cast<std::uint32_t>(period));
  return true;
}

// The number of different operations of quick steps. They are the first operations of MapOp.
inline constexpr std::size_t kQuickOps = 3;
static_assert(kMapOpInfos[kQuickOps - 1].op == MapOp::kMultiply);

// Whether the step is quick: it adds an argument to the last value (or to an operand that replaces
// the last value), subtracts an argument from it, or multiplies it by an argument. Quick steps
// change the value in place. They are the most frequent steps.
inline bool IsQuick(const Step& step) {
  return step.op <= kMapOpInfos[kQuickOps - 1].op && step.arguments[0] <= kPrevious &&
         (step.arguments[0] == kPrevious || step.arguments[1] != kPrevious);
}

// Replaces each reference to a step's result with kPrevious or kSaved, whichever holds the result
// when it is read. Returns false if two values would have to wait at the same time.
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
    // Sums and products do not depend on the operands' order, except for a NaN's payload.
    if (!IsQuick(step) && (step.op == MapOp::kAdd || step.op == MapOp::kMultiply))
      std::swap(step.arguments[0], step.arguments[1]);
    step.quick = IsQuick(step);
    if (last_use[i] <= i + 1) continue;
    if (saved >= 0 && last_use[saved] > i) return false;
    saved = i;
    step.saves = chain->saves = true;
  }
  return true;
}

// Whether a step may be this operation. Random numbers and most functions would need too many
// registers.
constexpr bool IsStep(MapOp op) { return op <= MapOp::kCast; }

// Builds the chain of an expression, instruction by instruction.
class Matcher {
 public:
  Matcher(const MapProblem& problem, DType dtype)
      : p_(problem), program_(*problem.program), type_(ValueTypeOf(dtype)) {
    chain_.dtype = chain_.out = dtype;
    operand_in_.fill(kNothing);
    in_register_.fill(kNothing);
  }

  bool Match(Chain* chain) {
    for (int i = 0; i < program_.instructions; ++i)
      if (!Take(program_.code[static_cast<std::size_t>(i)], i == program_.instructions - 1))
        return false;
    const std::uint8_t result = in_register_[program_.code[program_.instructions - 1].out];
    if (chain_.steps == 0 || result != Last() || p_.dtype != chain_.out || !Place(&chain_))
      return false;
    for (int i = 0; i < chain_.inputs; ++i)
      chain_.simple &= chain_.input[i].plain && chain_.input[i].lies == Lies::kWhole;
    *chain = chain_;
    return true;
  }

 private:
  // Refers to the result of the last step.
  std::uint8_t Last() const { return static_cast<std::uint8_t>(kStep + chain_.steps - 1); }

  bool AddSingle(const Single& single, std::uint8_t* place) {
    if (chain_.singles == kMostSingles) return false;
    *place = static_cast<std::uint8_t>(kSingle + chain_.singles);
    chain_.single[chain_.singles++] = single;
    return true;
  }

  bool AddOperand(std::size_t i, std::uint8_t* place) {
    const View& view = p_.operands[i];
    const DType dtype = program_.operand_dtypes[i];
    if (!GoesInto(dtype, chain_.dtype)) return false;
    std::int64_t inner, period;
    if (FindPeriod(view, &inner, &period) && period == 1)
      return AddSingle({.data = view.data, .dtype = dtype}, place);
    if (chain_.inputs == kMostInputs ||
        !FindInput(view, p_.n, chain_.dtype, &chain_.input[chain_.inputs]))
      return false;
    *place = static_cast<std::uint8_t>(chain_.inputs++);
    return true;
  }

  bool Take(const Instruction& in, bool last) {
    switch (in.kind) {
      case Instruction::Kind::kLoad: {
        std::uint8_t& place = operand_in_[in.a];
        if (place == kNothing && !AddOperand(in.a, &place)) return false;
        in_register_[in.out] = place;
        return true;
      }
      case Instruction::Kind::kCoordinate:
        return false;
      case Instruction::Kind::kConstant:
        return in.type == type_ &&
               AddSingle({.constant = program_.constants[in.a]}, &in_register_[in.out]);
      case Instruction::Kind::kConvert:
        return Convert(in, last);
      case Instruction::Kind::kApply:
        return Apply(in, last);
    }
    return false;
  }

  bool Convert(const Instruction& in, bool last) {
    const std::uint8_t from = in_register_[in.a];
    if (in.type != type_ && in.type != ValueType::kBool) return false;
    // Steps represent a bool as 0 or 1 in the chain's type.
    const bool same = ValueTypeOf(in.dtype) == type_ &&
                      (in.type == ValueType::kBool || IsStoredAsValue(in.dtype));
    const bool counts = in.type == ValueType::kBool && in.dtype == DType::kI32;
    if (same) {
      if (last && in.dtype != chain_.dtype && chain_.dtype != DType::kF32) return false;
      if (last) chain_.out = in.dtype;
    } else if (from != Last() || chain_.steps == 0) {
      return false;
    } else if (in.dtype == chain_.dtype) {
      chain_.step[chain_.steps - 1].rounds = true;
      in_register_[in.a] = kNothing;
    } else if (last &&
               (counts || (chain_.dtype == DType::kF32 && ValueTypeOf(in.dtype) == type_))) {
      chain_.out = in.dtype;
    } else {
      return false;
    }
    in_register_[in.out] = from;
    return from != kNothing;
  }

  bool Apply(const Instruction& in, bool last) {
    if (chain_.steps == kMostSteps || in.type != type_ || !IsStep(in.op)) return false;
    Step& step = chain_.step[chain_.steps++];
    step.op = in.op;
    const std::uint8_t arguments[] = {in.a, in.b, in.c};
    for (int j = 0; j < InfoOf(in.op)->arguments; ++j) {
      step.arguments[j] = in_register_[arguments[j]];
      if (step.arguments[j] == kNothing) return false;
    }
    if (last && InfoOf(in.op)->rule == MapRule::kComparison) chain_.out = DType::kBool;
    in_register_[in.out] = Last();
    return true;
  }

  const MapProblem& p_;
  const MapProgram& program_;
  const ValueType type_;
  Chain chain_;
  std::array<std::uint8_t, kMostOperands> operand_in_;
  std::array<std::uint8_t, kMostRegisters> in_register_;
};

// Returns whether the problem's expression is a chain, and if so, stores the chain in *chain. The
// chain has the type of the first operand that is not bool. If that is a 16-bit type and the
// expression is not a chain of that type, the chain has type f32.
inline bool Match(const MapProblem& p, Chain* chain) {
  const MapProgram& program = *p.program;
  for (int i = 0; i < program.operands; ++i) {
    const DType dtype = program.operand_dtypes[static_cast<std::size_t>(i)];
    if (dtype == DType::kBool) continue;
    if (!IsComputed(dtype)) return false;
    if (Matcher(p, dtype).Match(chain)) return true;
    return ValueTypeOf(dtype) == ValueType::kF32 && dtype != DType::kF32 &&
           Matcher(p, DType::kF32).Match(chain);
  }
  return false;
}

// --- Groups ---

// The number of elements of T in 16 bytes.
template <class T>
constexpr int kWidth = 16 / static_cast<int>(sizeof(T));

template <class S, int kCount>
struct alignas(sizeof(S) * kCount) Side {
  S elements[kCount];
};
template <class T>
using Group = Side<T, kWidth<T>>;

// Calls f(S{}), where S is the type in memory of an operand of a chain of T. A bool is a byte.
template <class T, class F>
__device__ __forceinline__ void DispatchOperand(DType dtype, F f) {
  if (dtype == DType::kBool) return f(std::uint8_t{});
  if constexpr (std::is_same_v<T, float>) {
    if (dtype == DType::kBF16) return f(BFloat16{});
    if (dtype == DType::kF16) return f(Half{});
  }
  f(T{});
}

// Converts an element of an operand to the chain's type.
template <class T, class S>
__device__ __forceinline__ T Taken(S element) {
  if constexpr (std::is_same_v<S, T>) {
    return element;
  } else if constexpr (std::is_same_v<S, std::uint8_t>) {
    return static_cast<T>(static_cast<ValueOf<T>>(element != 0));
  } else {
    return static_cast<T>(static_cast<ValueOf<S>>(element));
  }
}

// Returns the index in the operand at which the group for element i of the result begins.
__device__ __forceinline__ std::int64_t PlaceOf(const Input& input, std::int64_t i) {
  if (input.lies == Lies::kWhole) return i;
  const std::uint32_t row = input.inner.Quotient(static_cast<std::uint32_t>(i));
  return row - input.period.Quotient(row) * input.period.by;
}

// The largest number of threads in a block that runs chains.
inline constexpr int kMostThreads = 256;

// This thread's groups in shared memory: kGroups for each operand.
template <class T, int kGroups>
struct Groups {
  Group<T>* own;  // the first group

  __device__ __forceinline__ Group<T>& operator()(int input, int g) const {
    return own[(input * kGroups + g) * kMostThreads];
  }
  // Returns the number of bytes of shared memory that a block needs for these groups.
  static std::uint32_t Bytes(const Chain& chain) {
    return static_cast<std::uint32_t>(chain.inputs) * kGroups * kMostThreads * sizeof(Group<T>);
  }
};

// Starts a copy of kBytes bytes from global to shared memory. The bytes have arrived when
// WaitForLoads returns.
template <int kBytes>
__device__ __forceinline__ void StartCopy(void* to, const void* from) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(kBytes)
                 : "memory");
  }
}
// Groups the loads that this thread has started since the previous call into a set.
__device__ __forceinline__ void EndLoads() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all sets of loads except the last kBut have arrived.
template <int kBut>
__device__ __forceinline__ void WaitForLoads() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kBut) : "memory");
}

// Starts to load the group that begins with element i. `left` is the number of elements from
// element i on.
template <class T>
__device__ __forceinline__ void StartLoad(const Input& input, std::int64_t i, std::int64_t left,
                                          Group<T>& to) {
  constexpr int kW = kWidth<T>;
  const std::int64_t at = PlaceOf(input, i);
  DispatchOperand<T>(input.dtype, [&](auto s) {
    using S = decltype(s);
    const S* from = static_cast<const S*>(input.data) + at;
    const bool repeated = input.lies == Lies::kRepeated;
    if (left >= kW && !repeated) {
      if constexpr (sizeof(S) * kW >= 4) {
        StartCopy<sizeof(S) * kW>(&to, from);
      } else {
        *reinterpret_cast<Side<S, kW>*>(&to) = *reinterpret_cast<const Side<S, kW>*>(from);
      }
    } else if (repeated && sizeof(S) >= 4) {
      if constexpr (sizeof(S) >= 4) StartCopy<sizeof(S)>(&to, from);
    } else {
      const int count = repeated ? 1 : static_cast<int>(left);
#pragma unroll 1
      for (int j = 0; j < count; ++j) reinterpret_cast<S*>(&to)[j] = from[j];
    }
  });
}

// Converts the loaded groups to the chain's type.
template <class T, int kGroups>
__device__ __forceinline__ void Settle(const Chain& chain, const Groups<T, kGroups>& groups) {
  constexpr int kW = kWidth<T>;
  if (chain.simple) return;
#pragma unroll 1
  for (int i = 0; i < chain.inputs; ++i) {
    const Input& input = chain.input[i];
    if (input.plain) continue;
    const bool repeated = input.lies == Lies::kRepeated;
    DispatchOperand<T>(input.dtype, [&](auto s) {
      using S = decltype(s);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        Group<T>& group = groups(i, g);
        const auto side = *reinterpret_cast<const Side<S, kW>*>(&group);
        Group<T> taken;
#pragma unroll
        for (int j = 0; j < kW; ++j) taken.elements[j] = Taken<T>(side.elements[repeated ? 0 : j]);
        group = taken;
      }
    });
  }
}

// --- Evaluation ---

// Loads the values that are the same for all elements into shared memory. All threads must call
// this before a barrier. REQUIRES: the block has at least kMostSingles threads.
template <class T>
__device__ __forceinline__ void LoadSingles(const Chain& chain, ValueOf<T>* singles) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= chain.singles) return;
  const Single& single = chain.single[i];
  ValueOf<T> value;
  if (single.data == nullptr) {
    std::memcpy(&value, &single.constant.bits, sizeof value);
  } else {
    DispatchOperand<T>(single.dtype, [&](auto s) {
      value = static_cast<ValueOf<T>>(Taken<T>(*static_cast<const decltype(s)*>(single.data)));
    });
  }
  singles[i] = value;
}

// Whether the operation needs many instructions. The code of such an operation exists once, in a
// loop over elements in local memory.
template <MapOp kOp, class V>
constexpr bool kIsLong = sizeof(V) == 8 ? InfoOf(kOp)->flops > 8
                                        : kOp == MapOp::kPower || kOp == MapOp::kFloorDivide
                                              || kOp == MapOp::kRemainder;

template <MapOp kOp, class V, int kN>
__device__ __forceinline__ void ApplyToAll(const V (&a)[kN], const V (&b)[kN], const V (&c)[kN],
                                           V (&out)[kN]) {
  if constexpr (kIsLong<kOp, V>) {
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

// Calls f(j, element) for a thread's elements of an operand, with j starting at 0.
template <class T, int kGroups, class F>
__device__ __forceinline__ void ForElements(const Groups<T, kGroups>& groups, int input, F f) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const Group<T> group = groups(input, g);
#pragma unroll
    for (int j = 0; j < kWidth<T>; ++j)
      f(g * kWidth<T> + j, static_cast<ValueOf<T>>(group.elements[j]));
  }
}

// Reads an argument of a step. The function uses branches that copy registers, because the compiler
// would turn select instructions into accesses to local memory.
template <class T, int kGroups, class V, int kN>
__device__ __forceinline__ void Read(const Groups<T, kGroups>& groups, const V (&value)[kN],
                                     const V (&saved)[kN], std::uint8_t from, const V* singles,
                                     V (&to)[kN]) {
  if (from == kPrevious) return Copy(value, to);
  if (from < kMostInputs) {
    ForElements(groups, from, [&](int j, V x) { to[j] = x; });
  } else if (from == kSaved) {
    Copy(saved, to);
  } else if (from != kNothing) {
    const V single = singles[from - kSingle];
#pragma unroll
    for (int j = 0; j < kN; ++j) to[j] = single;
  }
}

// Runs a quick step without copying registers.
template <class T, int kGroups, class V, int kN>
__device__ __forceinline__ void RunQuick(const Step& step, const Groups<T, kGroups>& groups,
                                         const V (&saved)[kN], const V* singles, V (&value)[kN]) {
  const std::uint8_t with = step.arguments[1];
  if (step.arguments[0] != kPrevious)
    ForElements(groups, step.arguments[0], [&](int j, V x) { value[j] = x; });
  DispatchMapOp<0, kQuickOps>(step.op, [&](auto o) {
    constexpr MapOp kOp = decltype(o)::value;
    if constexpr (kHasMapOp<kOp, V>) {
      const auto apply = [&](int j, V x) {
        value[j] = static_cast<V>(Apply<kOp>(value[j], x, V{}));
      };
      if (with >= kSingle) {
        const V single = singles[with - kSingle];
#pragma unroll
        for (int j = 0; j < kN; ++j) apply(j, single);
      } else if (with < kMostInputs) {
        ForElements(groups, with, apply);
      } else if (with == kSaved) {
#pragma unroll
        for (int j = 0; j < kN; ++j) apply(j, saved[j]);
      } else {
#pragma unroll
        for (int j = 0; j < kN; ++j) apply(j, value[j]);
      }
    }
  });
}

// Runs any step.
template <class T, int kGroups, class V, int kN>
__device__ __forceinline__ void RunStep(const Step& step, const Groups<T, kGroups>& groups,
                                        const V (&saved)[kN], const V* singles, V (&value)[kN]) {
  const auto read = [&](int argument, V(&to)[kN]) {
    Read(groups, value, saved, step.arguments[argument], singles, to);
  };
  V a[kN] = {}, b[kN] = {};
  read(0, a);
  read(1, b);
  if (step.arguments[2] == kNothing) {
    DispatchMapOp(step.op, [&](auto o) {
      constexpr MapOp kOp = decltype(o)::value;
      if constexpr (kHasMapOp<kOp, V> && IsStep(kOp) && InfoOf(kOp)->arguments < 3)
        ApplyToAll<kOp>(a, b, a, value);
    });
    return;
  }
  V c[kN] = {};
  read(2, c);
  if (step.op == MapOp::kFma) {
    ApplyToAll<MapOp::kFma>(a, b, c, value);
  } else if (step.op == MapOp::kClip) {
    ApplyToAll<MapOp::kClip>(a, b, c, value);
  } else {
#pragma unroll
    for (int j = 0; j < kN; ++j) value[j] = a[j] != V{} ? b[j] : c[j];
  }
}

// Computes the chain's result in the type of its values. kSaves: whether the chain may save a
// value. REQUIRES: Settle has run on the groups.
template <bool kSaves, class T, int kGroups>
__device__ __forceinline__ void Evaluate(const Chain& chain, const Groups<T, kGroups>& groups,
                                         const ValueOf<T>* singles,
                                         ValueOf<T> (&value)[kGroups * kWidth<T>]) {
  using V = ValueOf<T>;
  constexpr int kN = kGroups * kWidth<T>;
  V saved[kN] = {};
#pragma unroll
  for (int j = 0; j < kN; ++j) value[j] = V{};
#pragma unroll 1
  for (int i = 0; i < chain.steps; ++i) {
    const Step step = chain.step[i];
    if (step.quick) {
      RunQuick(step, groups, kSaves ? saved : value, singles, value);
    } else {
      RunStep(step, groups, kSaves ? saved : value, singles, value);
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
}

}  // namespace tessera::chained
