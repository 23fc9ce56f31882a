// What the operations of an expression compute, each as a function of its own, for kernels that are
// put together while the server runs (kernel_text.h). This file becomes PTX, the driver's assembly
// language, which the server carries as text; so a compiled expression runs the code of map_math.h, as
// all others do, and has their bits.
//
// Values are as in registers: those of 32 bits, and bool as 0 or 1, take 32 bits.
#include <bit>
#include <cstring>

#include "kernels/map_math.h"

namespace tessera {
namespace {

template <class V>
using Carried = std::conditional_t<std::is_same_v<V, bool>, std::uint32_t, V>;

// The identity where there is no such operation on values of the type.
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
    // As the upper one of two it is where an f32 has it: one instruction.
    std::uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, 0f00000000;" : "=r"(bits) : "f"(value));
    return std::bit_cast<float>(bits);
  }
  return static_cast<Carried<ValueOf<Element>>>(RoundTo<Element>(static_cast<V>(value)));
}

// An element's bits as a value, and back, of types that are not in memory what they are in registers.
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

// All but WHERE and CAST, which need no function.
#define TESSERA_EACH_OPERATION(X)                                                               \
  X(1)                                                                                          \
  X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16) X(17) X(18) \
      X(19) X(20) X(21) X(22) X(23) X(24) X(25) X(26) X(27) X(28) X(29) X(30) X(31) X(32)
TESSERA_EACH_OPERATION(TESSERA_OPERATION)
static_assert(tessera::MapOp{33} == tessera::MapOp::kWhere && tessera::kMapOpInfos.size() == 34);

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
#define TESSERA_EACH_ELEMENT(X)                                                        \
  X(f32, float)                                                                        \
  X(f64, double) X(f16, tessera::Half) X(bf16, tessera::BFloat16) X(i32, std::int32_t) \
      X(i64, std::int64_t) X(bool, bool) X(u8, std::uint8_t) X(i8, std::int8_t)
TESSERA_EACH_ELEMENT(TESSERA_ELEMENT)

#define TESSERA_MEMORY(name, Element)                                                            \
  TESSERA_DEVICE auto load_##name(std::uint32_t bits) { return tessera::Loaded<Element>(bits); } \
  TESSERA_DEVICE auto store_##name(tessera::Carried<tessera::ValueOf<Element>> value) {          \
    return tessera::Stored<Element>(value);                                                      \
  }
TESSERA_MEMORY(f16, tessera::Half)
TESSERA_MEMORY(bf16, tessera::BFloat16)
TESSERA_MEMORY(bool, bool)
TESSERA_MEMORY(u8, std::uint8_t)
TESSERA_MEMORY(i8, std::int8_t)
