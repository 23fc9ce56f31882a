// The arithmetic of `ozaki_f64` on one element, identical on host and device: rows as integers,
// their residues, and the Chinese remainder theorem. Uses only the standard library.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

#include "kernels/base/element.h"

namespace tessera::ozaki {

__extension__ using Integer128 = unsigned __int128;

// The number of moduli. Each modulus is the largest number up to 256 that is coprime to all
// previous ones, so residues fit in a signed byte. The product of the moduli is 2^110.2.
inline constexpr int kModuli = 14;

// The bits in each limb of an element that is converted to residues, and in each part of a weight.
inline constexpr int kLimbBits = 20, kWeightBits = 37;

struct Modulus {
  std::int32_t value;
  std::int32_t reciprocal;    // 2^38 / value, rounded
  std::int32_t middle, high;  // residues of 2^20 and 2^40
};

// The constants that kernels take as a parameter. Large integers are split into three parts, as
// w[0] 2^74 + w[1] 2^37 + w[2].
struct Table {
  Modulus moduli[kModuli];
  double weights[kModuli][3];  // 1 modulo this modulus, 0 modulo the others
  double product[3];           // of all moduli
  double inverse;              // 2^74 / product
};

constexpr Integer128 ProductOfModuli(const Table& table) {
  Integer128 product = 1;
  for (const Modulus& p : table.moduli) product *= static_cast<unsigned>(p.value);
  return product;
}

// Returns the residue of x that is nearest to 0, for |x| <= 2^30 + 2^7. The quotient is off by less
// than 2^-8 before it is rounded. An odd modulus is at most 255, so its residue is between -127 and
// 127. For 256 the residue may be 128, which is -128 as a byte.
TESSERA_HD constexpr std::int32_t Residue(std::int32_t x, const Modulus& p) {
  const std::int64_t quotient = (std::int64_t{x} * p.reciprocal + (std::int64_t{1} << 37)) >> 38;
  return x - static_cast<std::int32_t>(quotient) * p.value;
}

// An integer with a sign and at most 55 bits, in limbs of 20 bits. The highest limb has the sign.
struct Limbs {
  std::int32_t low, middle, high;
};
TESSERA_HD constexpr Limbs LimbsOf(std::int64_t x) {
  constexpr std::int64_t kMask = (std::int64_t{1} << kLimbBits) - 1;
  return {static_cast<std::int32_t>(x & kMask), static_cast<std::int32_t>(x >> kLimbBits & kMask),
          static_cast<std::int32_t>(x >> 2 * kLimbBits)};
}
// The magnitude of the sum before its reduction is at most 2^20 + 2^27 + 2^22.
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

// The conditions that each row of a and each column of b has to meet, for a given k.
struct Bound {
  double room;   // the largest allowed norm of a scaled row
  double ratio;  // the least allowed ratio of the squared sum of magnitudes to the sum of squares
};

// Returns the bound that ozaki_f64.cu derives. For k <= 2 no row meets it.
inline Bound BoundOf(std::int64_t k) {
  if (k <= 2) return {0, std::numeric_limits<double>::infinity()};
  const auto steps = static_cast<double>(k);
  // The room is at least 2^35 less than the square root of half the product of the moduli. This
  // margin covers the error of the reconstruction and the amount by which rounding increases a
  // norm, at most sqrt(k) / 2.
  const double room = std::sqrt(static_cast<double>(ProductOfModuli(kTable)) / 2) * (1 - 0x1p-19);
  const double cosine =
      (1 + 0x1p-10) * (2 * std::sqrt(steps) * room + steps) / ((steps - 2) * 0x1p-53 * room * room);
  return {room, (1 + cosine) / 2 * steps * (1 + 0x1p-19)};
}
// Returns whether any row can meet the bound.
inline bool MayMeet(const Bound& bound, std::int64_t k) {
  return bound.ratio < static_cast<double>(k);
}

// Sums over the elements of a row, which may be added in any order.
struct RowSums {
  double squares, magnitudes;
};

// Returns whether the row meets the bound. If it does, the row is to be scaled by 2^*exponent. Rows
// with an infinity or NaN, or with a nonzero norm below 2^-450 or above 2^450, never meet the
// bound, so all scales and results are in the range of normal numbers.
TESSERA_HD inline bool ScaleRow(const RowSums& sums, const Bound& bound, std::int32_t* exponent) {
  *exponent = 0;
  if (sums.magnitudes == 0) return true;
  if (!(sums.squares >= 0x1p-900 && sums.squares <= 0x1p900)) return false;
  if (!(sums.magnitudes * sums.magnitudes >= bound.ratio * sums.squares)) return false;
  const double scale = bound.room / (std::sqrt(sums.squares) * (1 + 0x1p-20));
  *exponent = static_cast<std::int32_t>(std::bit_cast<std::uint64_t>(scale) >> 52) - 1023;
  return true;
}

// Returns 2^exponent, for exponents of normal numbers.
TESSERA_HD inline double PowerOfTwo(std::int32_t exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

// Returns the nearest integer.
TESSERA_HD inline std::int64_t Nearest(double x) {
#ifdef __CUDA_ARCH__
  return __double2ll_rn(x);
#else
  return std::llrint(x);
#endif
}

// --- The Chinese remainder theorem ---

// A sum of residues times weights. Each part is an exact integer below 2^49.
struct WeightedSum {
  double high = 0, middle = 0, low = 0;

  TESSERA_HD void Add(std::int32_t residue, const double (&weight)[3]) {
    const auto r = static_cast<double>(residue);
    high += r * weight[0];
    middle += r * weight[1];
    low += r * weight[2];
  }

  // Returns the integer nearest to 0 that has these residues. REQUIRES: its magnitude is below half
  // of the product of the moduli by at least 2^-30 of that product. The result is rounded at most
  // twice, and is exact below 2^53. After the carries, the two low parts are at most 2^36 each, so
  // cancellation is exact.
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
