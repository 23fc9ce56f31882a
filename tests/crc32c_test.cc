#include "kernels/client_and_server/crc32c.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <string_view>

namespace tessera {
namespace {

std::uint32_t Of(std::string_view bytes) { return Crc32c(bytes.data(), bytes.size()); }

// Computes one bit at a time, from the definition.
std::uint32_t Plain(std::string_view bytes) {
  std::uint32_t crc = 0xffffffff;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78 : 0);
  }
  return ~crc;
}

std::string RandomBytes(std::size_t size) {
  std::mt19937 random(static_cast<unsigned>(size));
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

// The first value is the check value in the CRC catalogues. The others are from RFC 3720.
TEST(Crc32c, HasTheStandardValues) {
  EXPECT_EQ(Of("123456789"), 0xe3069283u);
  EXPECT_EQ(Of(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Of(std::string(32, '\xff')), 0x62a8ab43u);
  std::string rising;
  for (char c = 0; c < 32; ++c) rising += c;
  EXPECT_EQ(Of(rising), 0x46dd794eu);
  EXPECT_EQ(Of(std::string(rising.rbegin(), rising.rend())), 0x113fdb5cu);
  EXPECT_EQ(Of({}), 0u);
  EXPECT_EQ(Crc32c(nullptr, 0), 0u);
}

TEST(Crc32c, AgreesWithTheDefinitionAtEverySizeAndAlignment) {
  const std::string bytes = RandomBytes(600);
  for (std::size_t begin = 0; begin < 17; ++begin) {
    for (std::size_t size = 0; begin + size <= bytes.size(); size += size < 70 ? 1 : 53) {
      const std::string_view part = std::string_view(bytes).substr(begin, size);
      ASSERT_EQ(Of(part), Plain(part)) << begin << " + " << size;
    }
  }
  const std::string large = RandomBytes((std::size_t{1} << 20) + 7);
  EXPECT_EQ(Of(large), Plain(large));
}

TEST(Crc32c, ExtendsAndCombinesToTheChecksumOfTheWhole) {
  const std::string bytes = RandomBytes(5000);
  const std::string_view all = bytes;
  for (const std::size_t at : {0, 1, 2, 3, 63, 64, 1023, 1024, 2500, 4096, 4999, 5000}) {
    const std::string_view head = all.substr(0, at);
    const std::string_view tail = all.substr(at);
    EXPECT_EQ(Crc32cExtend(Of(head), tail.data(), tail.size()), Of(all)) << at;
    EXPECT_EQ(Crc32cCombine(Of(head), Of(tail), tail.size()), Of(all)) << at;
  }
}

// Such data does not fit in memory. Moving by a + b bytes equals moving by a and then by b.
TEST(Crc32c, CombinesOverSizesBeyond32Bits) {
  const std::uint32_t crc = Of("123456789");
  const std::uint64_t huge = (std::uint64_t{1} << 40) + 12345;
  std::uint32_t moved = crc;
  for (int i = 0; i < 4; ++i) moved = Crc32cCombine(moved, 0, huge / 4);
  EXPECT_EQ(Crc32cCombine(moved, 0, huge % 4), Crc32cCombine(crc, 0, huge));
  // The 32-bit shift register has a period of 2^31 - 1, so appending that many zero bytes changes
  // nothing.
  EXPECT_EQ(Crc32cCombine(crc, 0, (std::uint64_t{1} << 31) - 1), crc);
}

}  // namespace
}  // namespace tessera
