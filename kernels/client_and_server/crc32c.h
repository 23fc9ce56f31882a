// CRC-32C, the checksum of a transfer's bytes: the polynomial of Castagnoli as iSCSI uses it (RFC
// 3720, appendix B.4); that of "123456789" is 0xE3069283.
//
// Thread safe. Finds errors of transmission, not changes made on purpose.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

// Of `size` bytes; 0 for none, whatever `data` is.
std::uint32_t Crc32c(const void* data, std::size_t size);

// Of bytes with the checksum `crc` followed by these.
std::uint32_t Crc32cExtend(std::uint32_t crc, const void* data, std::size_t size);

// Of bytes with the checksum `crc1` followed by `size2` bytes with the checksum `crc2`, in a time
// that grows with the logarithm of size2.
std::uint32_t Crc32cCombine(std::uint32_t crc1, std::uint32_t crc2, std::uint64_t size2);

}  // namespace tessera
