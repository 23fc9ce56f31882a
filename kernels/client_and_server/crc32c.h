// CRC-32C, the checksum of a transfer's bytes. It uses Castagnoli's polynomial as iSCSI does (RFC
// 3720, appendix B.4); the checksum of "123456789" is 0xE3069283.
//
// Thread safe. It detects transmission errors, not deliberate changes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

// Returns the checksum of `size` bytes. For 0 bytes it is 0, and `data` may be null.
std::uint32_t Crc32c(const void* data, std::size_t size);

// Returns the checksum of a sequence of bytes that begins with bytes whose checksum is `crc` and
// ends with these `size` bytes.
std::uint32_t Crc32cExtend(std::uint32_t crc, const void* data, std::size_t size);

// Returns the checksum of a sequence of bytes that begins with bytes whose checksum is `crc1` and
// ends with `size2` bytes whose checksum is `crc2`. The time grows with the logarithm of size2.
std::uint32_t Crc32cCombine(std::uint32_t crc1, std::uint32_t crc2, std::uint64_t size2);

}  // namespace tessera
