// The operations of an expression as separate functions, for kernels that are assembled while the
// server runs (kernel_text.h). This file is compiled to PTX, the driver's assembly language, which
// the server contains as text. A compiled expression therefore runs the code of map_math.h, like
// every other strategy, and gives the same bits.
//
// Arguments and results have the form that values have in registers: a bool is a 32-bit 0 or 1.
#include <bit>
#include <cstring>

#include "kernels/expression/map_math.h"

namespace tessera {
namespace {

template <class V>
using Carried = std::conditional_t<std::is_same_v<V, bool>, std::uint32_t, V>;

// Applies the operation to values of type V. Returns `a` if there is no such operation.
template <MapOp kOp, class V>
__device__ __forceinline__ auto Operation(Carried<V> a, Carried<V> b, Carried<V> c) {
  if constexpr (kHasMapOp<kOp, V>) {
    const auto result = Apply<kOp>(static_cast<V>(a), static_cast<V>(b), static_cast<V>(c));
    return static_cast<Carried<std::remove_const_t<decltype(result)>>>(result);
  } else {
    return a;
  }
}

template <class Element, class V>
__device__ __forceinline__ Carried<ValueOf<Element>> Rounded(Carried<V> value) {
  if constexpr (std::is_same_v<Element, BFloat16> && std::is_same_v<V, float>) {
    // The value is converted to the upper half of a pair of bf16, so the pair has the bits of an
    // f32. This takes one instruction.
    std::uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, 0f00000000;" : "=r"(bits) : "f"(value));
    return std::bit_cast<float>(bits);
  }
  return static_cast<Carried<ValueOf<Element>>>(RoundTo<Element>(static_cast<V>(value)));
}

// Loaded converts an element's bits to a value, and Stored converts a value to an element's bits,
// for types whose form in memory differs from their form in registers.
template <class Element>
__device__ __forceinline__ Carried<ValueOf<Element>> Loaded(std::uint32_t bits) {
  StoredOf<Element> element;
  std::memcpy(&element, &bits, sizeof element);
  return static_cast<Carried<ValueOf<Element>>>(static_cast<ValueOf<Element>>(element));
}
template <class Element>
__device__ __forceinline__ std::uint32_t Stored(Carried<ValueOf<Element>> value) {
  const auto element = static_cast<Element>(static_cast<ValueOf<Element>>(value));
  std::uint32_t bits = 0;
  std::memcpy(&bits, &element, sizeof element);
  return bits;
}

}  // namespace
}  // namespace tessera

#define TESSERA_DEVICE extern "C" __device__
#define TESSERA_OPERATION_OF(number, name, V)                                            \
  TESSERA_DEVICE auto op_##number##_##name(tessera::Carried<V> a, tessera::Carried<V> b, \
                                           tessera::Carried<V> c) {                      \
    return tessera::Operation<static_cast<tessera::MapOp>(number), V>(a, b, c);          \
  }
#define TESSERA_OPERATION(number)                 \
  TESSERA_OPERATION_OF(number, f32, float)        \
  TESSERA_OPERATION_OF(number, f64, double)       \
  TESSERA_OPERATION_OF(number, i32, std::int32_t) \
  TESSERA_OPERATION_OF(number, i64, std::int64_t) \
  TESSERA_OPERATION_OF(number, bool, bool)

// All operations except WHERE and CAST, which need no function.
TESSERA_OPERATION(1);
TESSERA_OPERATION(2);
TESSERA_OPERATION(3);
TESSERA_OPERATION(4);
TESSERA_OPERATION(5);
TESSERA_OPERATION(6);
TESSERA_OPERATION(7);
TESSERA_OPERATION(8);
TESSERA_OPERATION(9);
TESSERA_OPERATION(10);
TESSERA_OPERATION(11);
TESSERA_OPERATION(12);
TESSERA_OPERATION(13);
TESSERA_OPERATION(14);
TESSERA_OPERATION(15);
TESSERA_OPERATION(16);
TESSERA_OPERATION(17);
TESSERA_OPERATION(18);
TESSERA_OPERATION(19);
TESSERA_OPERATION(20);
TESSERA_OPERATION(21);
TESSERA_OPERATION(22);
TESSERA_OPERATION(23);
TESSERA_OPERATION(24);
TESSERA_OPERATION(25);
TESSERA_OPERATION(26);
TESSERA_OPERATION(27);
TESSERA_OPERATION(28);
TESSERA_OPERATION(29);
TESSERA_OPERATION(30);
TESSERA_OPERATION(31);
TESSERA_OPERATION(32);
static_assert(tessera::MapOp{33} == tessera::MapOp::kWhere);
static_assert(tessera::MapOp{34} == tessera::MapOp::kCast);
TESSERA_OPERATION(35);
TESSERA_OPERATION(36);
TESSERA_OPERATION(37);
TESSERA_OPERATION(38);
TESSERA_OPERATION(39);
TESSERA_OPERATION(40);
TESSERA_OPERATION(41);
TESSERA_OPERATION(42);
TESSERA_OPERATION(43);
TESSERA_OPERATION(44);
TESSERA_OPERATION(45);
TESSERA_OPERATION(46);
TESSERA_OPERATION(47);
TESSERA_OPERATION(48);
TESSERA_OPERATION(49);
TESSERA_OPERATION(50);
TESSERA_OPERATION(51);
TESSERA_OPERATION(52);
TESSERA_OPERATION(53);
TESSERA_OPERATION(54);
TESSERA_OPERATION(55);
TESSERA_OPERATION(56);
static_assert(tessera::kMapOpInfos.size() == 56);

#define TESSERA_ROUND(to, Element, name, V)                            \
  TESSERA_DEVICE auto round_##to##_##name(tessera::Carried<V> value) { \
    return tessera::Rounded<Element, V>(value);                        \
  }
#define TESSERA_ELEMENT(name, Element)            \
  TESSERA_ROUND(name, Element, f32, float)        \
  TESSERA_ROUND(name, Element, f64, double)       \
  TESSERA_ROUND(name, Element, i32, std::int32_t) \
  TESSERA_ROUND(name, Element, i64, std::int64_t) \
  TESSERA_ROUND(name, Element, bool, bool)
TESSERA_ELEMENT(f32, float);
TESSERA_ELEMENT(f64, double);
TESSERA_ELEMENT(f16, tessera::Half);
TESSERA_ELEMENT(bf16, tessera::BFloat16);
TESSERA_ELEMENT(i32, std::int32_t);
TESSERA_ELEMENT(i64, std::int64_t);
TESSERA_ELEMENT(bool, bool);
TESSERA_ELEMENT(u8, std::uint8_t);
TESSERA_ELEMENT(i8, std::int8_t);

#define TESSERA_MEMORY(name, Element)                                                            \
  TESSERA_DEVICE auto load_##name(std::uint32_t bits) { return tessera::Loaded<Element>(bits); } \
  TESSERA_DEVICE auto store_##name(tessera::Carried<tessera::ValueOf<Element>> value) {          \
    return tessera::Stored<Element>(value);                                                      \
  }
TESSERA_MEMORY(f16, tessera::Half);
TESSERA_MEMORY(bf16, tessera::BFloat16);
TESSERA_MEMORY(bool, bool);
TESSERA_MEMORY(u8, std::uint8_t);
TESSERA_MEMORY(i8, std::int8_t);
