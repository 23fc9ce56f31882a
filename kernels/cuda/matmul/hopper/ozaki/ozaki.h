// The arithmetic of `ozaki_f64` on one element, the same on host and device: rows as integers,
// their residues, and the Chinese remainder theorem. Standard library only.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

#include "kernels/base/element.h"

namespace tessera::ozaki {

__extension__ using Integer128 = unsigned __int128;

// So many moduli, each the largest up to 256 that is coprime to those before it, so that residues
// fit a signed byte. Their product is 2^110.2.
inline constexpr int kModuli = 14;

// Integers travel in pieces of so many bits: elements to residues, and the product's weights.
inline constexpr int kLimbBits = 20, kWeightBits = 37;

struct Modulus {
  std::int32_t value;
  std::int32_t reciprocal;    // 2^38 / value, rounded
  std::int32_t middle, high;  // residues of 2^20 and 2^40
};

// What kernels are given as a parameter. An integer split into weights is
// w[0] 2^74 + w[1] 2^37 + w[2].
struct Table {
  Modulus moduli[kModuli];
  double weights[kModuli][3];  // 1 modulo this one, 0 modulo the others
  double product[3];           // of all moduli
  double inverse;              // 2^74 / product
};

constexpr Integer128 ProductOfModuli(const Table& table) {
  Integer128 product = 1;
  for (const Modulus& p : table.moduli) product *= static_cast<unsigned>(p.value);
  return product;
}

// The residue of x that is nearest to 0, for |x| <= 2^30 + 2^7: the quotient is off by less than
// 2^-8 before it is rounded, so that the residue of an odd modulus, at most 255, is within 127. Of
// 256 it may be 128, which as a byte is -128.
TESSERA_HD constexpr std::int32_t Residue(std::int32_t x, const Modulus& p) {
  const std::int64_t quotient = (std::int64_t{x} * p.reciprocal + (std::int64_t{1} << 37)) >> 38;
  return x - static_cast<std::int32_t>(quotient) * p.value;
}

// An integer of at most 55 bits and a sign, in limbs of 20 bits, of which the highest has the sign.
struct Limbs {
  std::int32_t low, middle, high;
};
TESSERA_HD constexpr Limbs LimbsOf(std::int64_t x) {
  constexpr std::int64_t kMask = (std::int64_t{1} << kLimbBits) - 1;
  return {static_cast<std::int32_t>(x & kMask), static_cast<std::int32_t>(x >> kLimbBits & kMask),
          static_cast<std::int32_t>(x >> 2 * kLimbBits)};
}
// The sum before it is reduced is within 2^20 + 2^27 + 2^22.
TESSERA_HD constexpr std::int32_t Residue(const Limbs& x, const Modulus& p) {
  return Residue(x.low + x.middle * p.middle + x.high * p.high, p);
}

constexpr Table MakeTable() {
  Table table{};
  int count = 0;
  for (int value = 256; count < kModuli; --value) {
    bool coprime = true;
    for (int i = 0; i < count; ++i) coprime &= std::gcd(value, table.moduli[i].value) == 1;
    if (!coprime) continue;
    Modulus p{value, static_cast<std::int32_t>(((std::int64_t{1} << 39) / value + 1) / 2), 0, 0};
    p.middle = Residue(1 << kLimbBits, p);
    p.high = Residue(p.middle * p.middle, p);
    table.moduli[count++] = p;
  }
  const Integer128 product = ProductOfModuli(table);
  const auto split = [](Integer128 x, double(&parts)[3]) {
    constexpr Integer128 kMask = (Integer128{1} << kWeightBits) - 1;
    for (int i = 2; i >= 0; --i, x >>= kWeightBits) parts[i] = static_cast<double>(x & kMask);
  };
  for (int i = 0; i < kModuli; ++i) {
    const auto value = static_cast<unsigned>(table.moduli[i].value);
    const Integer128 others = product / value;
    Integer128 weight = others;
    while (weight % value != 1) weight += others;
    split(weight, table.weights[i]);
  }
  split(product, table.product);
  table.inverse = 0x1p74 / static_cast<double>(product);
  return table;
}
inline constexpr Table kTable = MakeTable();
static_assert(ProductOfModuli(kTable) >> 110 == 1 &&
              ProductOfModuli(kTable) >> 3 * kWeightBits == 0);
static_assert(kTable.moduli[0].value == 256 && kTable.moduli[kModuli - 1].value > 128);

// --- Rows as integers ---

// What a row of k elements, of a or, as a column, of b, has to meet.
struct Bound {
  double room;   // the largest norm of a row that is scaled
  double ratio;  // the least square of the sum of magnitudes, over the sum of squares
};

// ozaki_f64.cu tells where it comes from. Up to k = 2 nothing meets it.
inline Bound BoundOf(std::int64_t k) {
  if (k <= 2) return {0, std::numeric_limits<double>::infinity()};
  const auto steps = static_cast<double>(k);
  // Less than the root of half the product by 2^35 and more: for what rounding adds to a norm, at
  // most sqrt(k) / 2, and for what the reconstruction may be off.
  const double room = std::sqrt(static_cast<double>(ProductOfModuli(kTable)) / 2) * (1 - 0x1p-19);
  const double cosine =
      (1 + 0x1p-10) * (2 * std::sqrt(steps) * room + steps) / ((steps - 2) * 0x1p-53 * room * room);
  return {room, (1 + cosine) / 2 * steps * (1 + 0x1p-19)};
}
// Whether any row meets the bound.
inline bool MayMeet(const Bound& bound, std::int64_t k) {
  return bound.ratio < static_cast<double>(k);
}

// Sums over a row, in any order.
struct RowSums {
  double squares, magnitudes;
};

// Whether the row meets the bound; then *exponent is that of the power of two that scales it. False
// of rows with an infinity or NaN, and with a norm below 2^-450 or above 2^450, so that no scaling
// and no result leaves the range of normal numbers.
TESSERA_HD inline bool ScaleRow(const RowSums& sums, const Bound& bound, std::int32_t* exponent) {
  *exponent = 0;
  if (sums.magnitudes == 0) return true;
  if (!(sums.squares >= 0x1p-900 && sums.squares <= 0x1p900)) return false;
  if (!(sums.magnitudes * sums.magnitudes >= bound.ratio * sums.squares)) return false;
  const double scale = bound.room / (std::sqrt(sums.squares) * (1 + 0x1p-20));
  *exponent = static_cast<std::int32_t>(std::bit_cast<std::uint64_t>(scale) >> 52) - 1023;
  return true;
}

// For exponents of normal numbers.
TESSERA_HD inline double PowerOfTwo(std::int32_t exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

// The nearest integer.
TESSERA_HD inline std::int64_t Nearest(double x) {
#ifdef __CUDA_ARCH__
  return __double2ll_rn(x);
#else
  return std::llrint(x);
#endif
}

// --- The Chinese remainder theorem ---

// The sum of residues times weights; each part is an integer below 2^49, exact.
struct WeightedSum {
  double high = 0, middle = 0, low = 0;

  TESSERA_HD void Add(std::int32_t residue, const double (&weight)[3]) {
    const auto r = static_cast<double>(residue);
    high += r * weight[0];
    middle += r * weight[1];
    low += r * weight[2];
  }

  // The integer of these residues that is nearest to 0, which has to be nearer than half of the
  // product by 2^-30 of it; rounded twice at most, and exact below 2^53. What is left of the low
  // parts once they have carried is at most 2^36 each, so nothing cancels but in exact steps.
  TESSERA_HD double Value(const Table& table) const {
    const double quotient = std::rint((high + middle * 0x1p-37) * table.inverse);
    double h = high - quotient * table.product[0];
    double m = middle - quotient * table.product[1];
    double l = low - quotient * table.product[2];
    double carry = std::rint(l * 0x1p-37);
    l -= carry * 0x1p37;
    m += carry;
    carry = std::rint(m * 0x1p-37);
    m -= carry * 0x1p37;
    h += carry;
    return h * 0x1p74 + (m * 0x1p37 + l);
  }
};

}  // namespace tessera::ozaki
