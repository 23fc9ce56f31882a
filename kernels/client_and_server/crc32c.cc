#include "kernels/client_and_server/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <array>

namespace tessera {
namespace {

// In this file, an integer is a polynomial over GF(2) modulo Castagnoli's polynomial, with its bits
// reflected as in a CRC-32C: bit 31 is the coefficient of x^0, and bit 0 that of x^31.
constexpr std::uint32_t kPolynomial = 0x82f63b78;
constexpr std::uint32_t kOne = 0x80000000;

constexpr std::uint32_t Multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);  // times x
  }
  return product;
}

// Entry k is x^(8 * 2^k), which advances a checksum by 2^k bytes.
constexpr std::array<std::uint32_t, 64> kMoves = [] {
  std::array<std::uint32_t, 64> moves{};
  moves[0] = kOne >> 8;
  for (std::size_t k = 1; k < moves.size(); ++k) moves[k] = Multiply(moves[k - 1], moves[k - 1]);
  return moves;
}();

}  // namespace

std::uint32_t Crc32c(const void* data, std::size_t size) { return Crc32cExtend(0, data, size); }

std::uint32_t Crc32cExtend(std::uint32_t crc, const void* data, std::size_t size) {
  constexpr std::size_t kLongest = std::size_t{1} << 30;  // the library takes the size as an int
  // crc32_iscsi does not invert its register at the beginning or the end, and it does not modify
  // the bytes.
  auto* bytes = static_cast<unsigned char*>(const_cast<void*>(data));
  std::uint32_t state = ~crc;
  while (size > 0) {
    const std::size_t part = std::min(size, kLongest);
    state = ::crc32_iscsi(bytes, static_cast<int>(part), state);
    bytes += part;
    size -= part;
  }
  return ~state;
}

// The remainder of a concatenation is the remainder of the first part times x^(bits in the second
// part), plus the remainder of the second part. The inversions at both ends cancel out. This is the
// method of zlib's crc32_combine (Mark Adler), with powers of x.
std::uint32_t Crc32cCombine(std::uint32_t crc1, std::uint32_t crc2, std::uint64_t size2) {
  for (std::size_t k = 0; size2 != 0; ++k, size2 >>= 1) {
    if ((size2 & 1) != 0) crc1 = Multiply(kMoves[k], crc1);
  }
  return crc1 ^ crc2;
}

}  // namespace tessera
