// The arithmetic of ozaki_f64 on the host, compared with sums in long double.
#include "kernels/cuda/matmul/hopper/ozaki/ozaki.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <optional>

#include "kernels/problem/matmul.h"
#include "tests/kernel_fixture.h"

namespace tessera::ozaki {
namespace {

using test::Random;

__extension__ using Signed128 = __int128;

const auto kProduct = static_cast<Signed128>(ProductOfModuli(kTable));

TEST(OzakiTest, ResiduesFitABytesOfEachModulus) {
  Random random(1);
  constexpr std::int64_t kMost = (std::int64_t{1} << 30) + (1 << 7);
  for (const Modulus& p : kTable.moduli) {
    std::vector<std::int64_t> numbers = {0, 1, -1, kMost, -kMost, kMost - 1, 1 - kMost};
    // Numbers around the midpoints between multiples, where the quotient changes.
    for (int i = 0; i < 100000; ++i) {
      const auto quotient =
          static_cast<std::int64_t>(random.Bits() % (2 * kMost / p.value)) - kMost / p.value;
      const std::int64_t middle = quotient * p.value + p.value / 2;
      for (std::int64_t x : {middle - 1, middle, middle + 1})
        if (std::abs(x) <= kMost) numbers.push_back(x);
    }
    for (std::int64_t x : numbers) {
      const std::int32_t residue = Residue(static_cast<std::int32_t>(x), p);
      ASSERT_EQ((x - residue) % p.value, 0) << x << " modulo " << p.value;
      // As a byte, 128 becomes -128, which is congruent to 128 only modulo 256.
      ASSERT_LE(residue, p.value == 256 ? 128 : 127) << x << " modulo " << p.value;
      ASSERT_GE(residue, p.value == 256 ? -128 : -127) << x << " modulo " << p.value;
    }
  }
}

TEST(OzakiTest, ResiduesOfIntegers) {
  Random random(2);
  constexpr std::int64_t kMost = (std::int64_t{1} << 55) - 1;
  std::vector<std::int64_t> numbers = {0, 1, -1, kMost, -kMost};
  for (int bit = 0; bit < 55; ++bit)
    for (std::int64_t off : {-1, 0, 1})
      for (std::int64_t sign : {-1, 1}) numbers.push_back(sign * ((std::int64_t{1} << bit) + off));
  for (int i = 0; i < 20000; ++i)
    numbers.push_back(static_cast<std::int64_t>(random.Bits()) >> (9 + random.Bits() % 50));
  for (std::int64_t x : numbers) {
    for (const Modulus& p : kTable.moduli) {
      const std::int32_t residue = Residue(LimbsOf(x), p);
      ASSERT_EQ((x - residue) % p.value, 0) << x << " modulo " << p.value;
      ASSERT_LE(std::abs(residue), 128) << x << " modulo " << p.value;
    }
  }
}

double Reconstructed(Signed128 x) {
  WeightedSum sum;
  for (int i = 0; i < kModuli; ++i) {
    const auto residue = static_cast<std::int32_t>(x % kTable.moduli[i].value);
    sum.Add(static_cast<std::int8_t>(Residue(residue, kTable.moduli[i])), kTable.weights[i]);
  }
  return sum.Value(kTable);
}

// Integers of any sign up to half of the product of the moduli. Values that fit into f64 are exact.
TEST(OzakiTest, IntegersAreFoundFromTheirResidues) {
  Random random(3);
  const Signed128 most = kProduct / 2 - (kProduct >> 21);
  std::vector<Signed128> numbers = {0, 1, most};
  for (int bit = 1; bit < 109; ++bit)
    for (int off : {-1, 0, 1}) numbers.push_back((Signed128{1} << bit) + off);
  for (int i = 0; i < 100000; ++i) {
    const auto any =
        static_cast<Signed128>((static_cast<Integer128>(random.Bits()) << 64 | random.Bits()) >> 1);
    numbers.push_back(any % (most + 1) >> (random.Bits() % 109));
  }
  for (Signed128 magnitude : numbers) {
    for (Signed128 x : {magnitude, -magnitude}) {
      const double value = Reconstructed(x);
      const Signed128 off = static_cast<Signed128>(value) - x, error = off < 0 ? -off : off;
      SCOPED_TRACE(static_cast<double>(x));
      if (magnitude <= Signed128{1} << 53) {
        ASSERT_EQ(error, 0);
      } else {
        ASSERT_LE(static_cast<long double>(error),
                  2.1L * 0x1p-53L * static_cast<long double>(magnitude));
      }
    }
  }
}

struct Scaled {
  std::vector<std::int64_t> integers;
  std::int32_t exponent = 0;
};

// Returns the integers of a row, or nothing if the row does not meet the bound.
std::optional<Scaled> IntegersOf(const std::vector<double>& row) {
  RowSums sums{};
  for (double x : row) {
    sums.squares += x * x;
    sums.magnitudes += std::abs(x);
  }
  Scaled scaled;
  if (!ScaleRow(sums, BoundOf(std::ssize(row)), &scaled.exponent)) return {};
  for (double x : row) scaled.integers.push_back(Nearest(x * PowerOfTwo(scaled.exponent)));
  return scaled;
}

// Returns the dot product of x and y as the kernels compute it, or nothing if one of the rows does
// not meet the bound.
std::optional<double> Product(const std::vector<double>& x, const std::vector<double>& y) {
  const auto a = IntegersOf(x), b = IntegersOf(y);
  if (!a.has_value() || !b.has_value()) return {};
  WeightedSum sum;
  for (int i = 0; i < kModuli; ++i) {
    const Modulus& p = kTable.moduli[i];
    std::int32_t d = 0;
    for (std::size_t l = 0; l < x.size(); ++l) {
      d += static_cast<std::int8_t>(Residue(LimbsOf(a->integers[l]), p)) *
           static_cast<std::int8_t>(Residue(LimbsOf(b->integers[l]), p));
      if (l % (1 << 16) == (1 << 16) - 1) d = Residue(d, p);
    }
    sum.Add(static_cast<std::int8_t>(Residue(d, p)), kTable.weights[i]);
  }
  return sum.Value(kTable) * PowerOfTwo(-a->exponent - b->exponent);
}

// Checks the error bound that the strategy states. Returns whether the strategy accepts the rows.
bool CheckProduct(const std::vector<double>& x, const std::vector<double>& y) {
  const std::optional<double> value = Product(x, y);
  if (!value.has_value()) return false;
  long double sum = 0, magnitude = 0;
  for (std::size_t l = 0; l < x.size(); ++l) {
    const long double term = static_cast<long double>(x[l]) * static_cast<long double>(y[l]);
    sum += term;
    magnitude += std::abs(term);
  }
  const long double off = static_cast<long double>(*value) - sum;
  const double roundoff = MatmulChainRoundoff({.dtype = DType::kF64, .k = std::ssize(x)});
  const long double bound = roundoff * magnitude + 0x1p-53L * std::abs(sum);
  EXPECT_LE(std::abs(off), bound) << "k " << x.size() << " got " << *value << " want "
                                  << static_cast<double>(sum);
  return true;
}

std::vector<double> Normal(Random& random, std::int64_t k) {
  std::vector<double> row;
  for (std::int64_t l = 0; l < k; ++l) row.push_back(random.Normal());
  return row;
}

TEST(OzakiTest, RowsOfAnySizeMeetTheBound) {
  Random random(4);
  EXPECT_EQ(Product(std::vector<double>(2048), Normal(random, 2048)), 0.0);
  for (std::int64_t k : {64, 100, 256, 1000, 1024, 4096, 16384, (1 << 16) + 77}) {
    for (int time = 0; time < 8; ++time) {
      std::vector<double> x, y;
      for (std::int64_t l = 0; l < k; ++l) {
        x.push_back(random.Uniform());
        y.push_back(2 * random.Uniform() - 1);
      }
      EXPECT_TRUE(CheckProduct(x, y)) << k;
      EXPECT_TRUE(CheckProduct(x, x)) << k;
      if (k < 1000) continue;
      // The sizes of rows differ by powers of two, and by the range that scaling leaves.
      x = Normal(random, k), y = Normal(random, k);
      for (auto* row : {&x, &y}) {
        const double size = time == 0 ? 1 : std::exp2(840 * random.Uniform() - 420);
        for (double& value : *row) value *= size;
      }
      x[3] = std::numeric_limits<double>::denorm_min();
      y[5] = -std::numeric_limits<double>::denorm_min();
      x[7] = y[7] = 0;
      ASSERT_TRUE(CheckProduct(x, y)) << k;
    }
  }
}

// The squares of a scaled row never sum to more than the moduli hold, and its norm is more than
// half of the allowed norm.
TEST(OzakiTest, ScaledRowsFitTheModuli) {
  Random random(6);
  const auto most = static_cast<Integer128>(kProduct / 2 - (kProduct >> 21));
  for (std::int64_t k : {3, 5, 16, 64, 1000, 16384}) {
    const Bound bound = BoundOf(k);
    for (int time = 0; time < 200; ++time) {
      // The elements have equal magnitudes and are all rounded up together, which gives the largest
      // norm.
      const double size = std::exp2(20 * random.Uniform());
      std::vector<double> row(static_cast<std::size_t>(k), time % 2 == 0 ? size : -size);
      if (time % 4 > 1)
        for (double& x : row) x *= 0.999 + 0.002 * random.Uniform();
      const auto scaled = IntegersOf(row);
      if (!MayMeet(bound, k)) {
        ASSERT_FALSE(scaled.has_value());
        continue;
      }
      ASSERT_TRUE(scaled.has_value()) << k;
      Integer128 squares = 0;
      for (std::int64_t x : scaled->integers)
        squares += static_cast<Integer128>(static_cast<Signed128>(x) * x);
      ASSERT_LE(squares, most) << k;
      ASSERT_GE(std::sqrt(static_cast<double>(squares)), 0.499999 * bound.room) << k;
    }
  }
  // These rows have exactly the allowed norm.
  constexpr std::int64_t kLong = 1024;
  const double edge = BoundOf(kLong).room / std::sqrt(kLong) / (1 + 0x1p-20);
  int whole = 0;
  for (int step = -20; step <= 20; ++step) {
    const auto scaled = IntegersOf(std::vector<double>(kLong, edge * (1 + step * 0x1p-40)));
    ASSERT_TRUE(scaled.has_value());
    whole += scaled->exponent == 0;
    const auto x = static_cast<Signed128>(scaled->integers[0]);
    EXPECT_LE(static_cast<Integer128>(x * x) * kLong, most);
  }
  EXPECT_GT(whole, 15);
  EXPECT_LT(whole, 25);
}

// Rows of equal elements and zeros that overlap at few positions. The terms are as small as
// possible, and as many elements as possible are rounded by 3/8 in the same direction.
TEST(OzakiTest, TheBoundHoldsWhereTermsAreFew) {
  int met = 0, unmet = 0;
  for (std::int64_t k : {256, 1024, 4096, 16384}) {
    for (std::int64_t overlap = 2; overlap < k / 2; overlap += 2 + overlap / 8) {
      const std::int64_t many = (k + overlap) / 2;
      // Just above half of the allowed norm, integers are shortest and rows are not scaled.
      const double element =
          std::floor(0.50001 * BoundOf(k).room / std::sqrt(static_cast<double>(many))) + 0.375;
      std::vector<double> x(static_cast<std::size_t>(k)), y(static_cast<std::size_t>(k));
      for (std::int64_t l = 0; l < many; ++l) test::At(x, l) = test::At(y, k - 1 - l) = element;
      if (const auto scaled = IntegersOf(x)) {
        ASSERT_EQ(scaled->exponent, 0);
      }
      ++(CheckProduct(x, y) ? met : unmet);
    }
  }
  EXPECT_GT(met, 50);
  EXPECT_GT(unmet, 20);
}

// One element is large and the others are small. Integers would lose the small ones, so the row
// does not meet the bound.
TEST(OzakiTest, RowsThatIntegersCannotHold) {
  Random random(8);
  constexpr std::int64_t kLong = 4096;
  const auto meets = [](const std::vector<double>& row) { return IntegersOf(row).has_value(); };
  const std::vector<double> normal = Normal(random, kLong);
  EXPECT_TRUE(meets(normal));
  std::vector<double> row = normal;
  row[100] = 1e30;
  EXPECT_FALSE(meets(row));
  row = normal;
  for (std::size_t l = 0; l < row.size(); l += 2) row[l] = 0;
  EXPECT_FALSE(meets(row));
  for (double& x : row) x = std::exp(3 * random.Normal());
  EXPECT_FALSE(meets(row));
  for (double special : {test::kInfinity, -test::kInfinity, std::nan("")}) {
    row = normal;
    row[kLong - 1] = special;
    EXPECT_FALSE(meets(row)) << special;
  }
  for (double size : {1e-200, 1e-320, 1e150, 1e300}) {
    row = std::vector<double>(kLong, size);
    EXPECT_FALSE(meets(row)) << size;
  }
  for (std::int64_t k : {1, 2, 3})
    EXPECT_FALSE(meets(std::vector<double>(static_cast<std::size_t>(k), 1.0))) << k;
}

}  // namespace
}  // namespace tessera::ozaki
