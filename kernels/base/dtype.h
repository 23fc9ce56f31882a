// The element types. Uses only the standard library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

// The values equal those of tessera.v1.Dtype on the wire.
enum class DType : std::uint8_t { kF32 = 1, kF64, kF16, kBF16, kI32, kI64, kBool, kU8, kI8 };

struct DTypeInfo {
  DType dtype;
  std::string_view name;   // as requests, the CLI and the documents spell it
  std::string_view numpy;  // NumPy's type string, little endian; bf16 has no such string
  std::size_t size;        // bytes per element
  double unit_roundoff;    // largest relative error of rounding to the type; 0 for integers
};

// All element types, in the order of their values. A new element type also needs a C++ type
// (DispatchDType in element.h), instances in kernels/cuda/tree and kernels/cuda/reduce_axes, and a
// value in the protocol's enum. A bool element is a byte that is 0 or 1.
inline constexpr std::array<DTypeInfo, 9> kDTypeInfos = {{
    {DType::kF32, "f32", "<f4", 4, 0x1p-24},
    {DType::kF64, "f64", "<f8", 8, 0x1p-53},
    {DType::kF16, "f16", "<f2", 2, 0x1p-11},
    {DType::kBF16, "bf16", "|V2", 2, 0x1p-8},
    {DType::kI32, "i32", "<i4", 4, 0},
    {DType::kI64, "i64", "<i8", 8, 0},
    {DType::kBool, "bool", "|b1", 1, 0},
    {DType::kU8, "u8", "|u1", 1, 0},
    {DType::kI8, "i8", "|i1", 1, 0},
}};

// The types that arrays may have.
inline constexpr auto kArrayDTypes = [] {
  std::array<DType, kDTypeInfos.size()> all{};
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = kDTypeInfos[i].dtype;
  return all;
}();

// The types that every operation accepts: those listed before bool. Only expressions, reductions,
// copies and casts accept the one-byte types.
inline constexpr auto kAllDTypes = [] {
  std::array<DType, static_cast<std::size_t>(DType::kBool) - 1> all{};
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = kDTypeInfos[i].dtype;
  return all;
}();

inline constexpr DTypeInfo kNoDType = {DType{}, "?", "", 0, 0};

// Returns kNoDType for a value that is not in the list.
constexpr const DTypeInfo& InfoOf(DType dtype) {
  const auto i = static_cast<std::size_t>(dtype) - 1;
  return i < kDTypeInfos.size() ? kDTypeInfos[i] : kNoDType;
}
constexpr std::string_view Name(DType dtype) { return InfoOf(dtype).name; }
constexpr std::size_t SizeOf(DType dtype) { return InfoOf(dtype).size; }
constexpr double UnitRoundoff(DType dtype) { return InfoOf(dtype).unit_roundoff; }
// Whether the type is an 8-bit integer. Expressions convert such elements to I32, or to the type of
// the other arguments.
constexpr bool IsByteInteger(DType dtype) { return dtype == DType::kU8 || dtype == DType::kI8; }
constexpr bool IsInteger(DType dtype) {
  return dtype == DType::kI32 || dtype == DType::kI64 || IsByteInteger(dtype);
}
// Whether the type is in kAllDTypes.
constexpr bool IsComputed(DType dtype) { return dtype < DType::kBool; }

// A set of element types, with one bit per type.
struct DTypes {
  std::uint32_t bits = 0;
  constexpr bool Contains(DType dtype) const {
    return (bits >> static_cast<unsigned>(dtype) & 1u) != 0;
  }
};

template <class... D>
constexpr DTypes DTypesOf(D... dtype) {
  return {((1u << static_cast<unsigned>(dtype)) | ... | 0u)};
}

constexpr DTypes AllDTypes() {
  DTypes all;
  for (DType dtype : kAllDTypes) all.bits |= 1u << static_cast<unsigned>(dtype);
  return all;
}
constexpr DTypes ArrayDTypes() {
  DTypes all;
  for (DType dtype : kArrayDTypes) all.bits |= 1u << static_cast<unsigned>(dtype);
  return all;
}

}  // namespace tessera
