// .npy files: reads the header, and then the elements that it promises. The first byte says how
// much is read at a time.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "client/npy.h"
#include "kernels/base/dtype.h"
#include "tests/fuzz/fuzz.h"

namespace tessera {
namespace {

constexpr std::uint64_t kLargest = 1 << 20;

void Check(std::string_view bytes, std::size_t at_once) {
  const absl::StatusOr<NpyHeader> header = ParseNpyHeader(bytes);
  const int fd = memfd_create("npy", MFD_CLOEXEC);
  Require(fd >= 0 && write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
          "no file to write to");
  const absl::StatusOr<NpyFile> file = NpyFile::Open("/proc/self/fd/" + std::to_string(fd));
  close(fd);
  Require(header.ok() || !file.ok(), "a file is read whose header is none");
  if (!file.ok()) return;
  Require(header->data_offset + header->data_bytes <= bytes.size(), "a file is cut off, and read");
  if (header->data_bytes > kLargest) return;
  const std::size_t element = SizeOf(header->dtype);
  std::vector<char> part(at_once * element);
  std::string data;
  while (data.size() < header->data_bytes) {
    const std::size_t size = std::min<std::size_t>(part.size(), header->data_bytes - data.size());
    const absl::Status read = file->Read(data.size(), absl::MakeSpan(part.data(), size));
    Require(read.ok(), "a whole file cannot be read: " + read.ToString());
    data.append(part.data(), size);
  }
  // The header that is written for this dtype and shape must be read back as the same.
  const std::string again = MakeNpyHeader(header->dtype, header->shape) + data;
  const absl::StatusOr<NpyHeader> parsed = ParseNpyHeader(again);
  Require(parsed.ok() && parsed->shape == header->shape && parsed->dtype == header->dtype &&
              parsed->data_bytes == header->data_bytes,
          "a header that is not read as it was written");
}

}  // namespace
}  // namespace tessera

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  tessera::Check(tessera::Text(data + 1, size - 1), 1 + data[0]);
  return 0;
}
