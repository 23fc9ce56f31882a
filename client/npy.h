// Reads and writes NumPy's .npy files, versions 1, 2 and 3, with the element types of the service.
// Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
//
// NumPy has no bf16 type. Arrays of bf16 are stored as two-byte raw data ('|V2'), as in files that
// the ml_dtypes package writes. Big-endian files are refused.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/dtype.h"

namespace tessera {

struct NpyHeader {
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;  // outermost first; empty for a scalar
  bool fortran_order = false;       // the first index varies fastest in the file
  std::uint64_t data_offset = 0;    // where the elements begin in the file, in bytes
  std::uint64_t data_bytes = 0;     // the size of all elements
};

// Parses the beginning of a file, which may continue after the header. Any content is safe to
// parse, because lengths and sizes are checked and the header may be at most 1 MiB. Returns
// INVALID_ARGUMENT / BAD_NPY if the file is not a .npy file, is truncated or is malformed, and
// INVALID_ARGUMENT / BAD_DTYPE for an element type that the service does not have.
absl::StatusOr<NpyHeader> ParseNpyHeader(std::string_view file);

// Returns the header of a row-major file with these elements, padded to a multiple of 64 bytes. The
// elements follow the header.
std::string MakeNpyHeader(DType dtype, absl::Span<const std::int64_t> shape);

// Returns size(dtype) * product(shape), or INVALID_ARGUMENT / BAD_SHAPE for a shape that every
// server refuses: more than 8 extents, a negative extent, or more than 2^63 - 1 bytes if extents of
// 0 are left out.
absl::StatusOr<std::uint64_t> ArrayBytes(DType dtype, absl::Span<const std::int64_t> shape);

// An open .npy file. Reading is thread safe. Files in Fortran order are mapped into memory. The
// first read from such a mapping installs a SIGBUS handler, which passes on signals that have
// another cause.
class NpyFile {
 public:
  // Returns the errors of ParseNpyHeader, BAD_NPY if the file is shorter than its header says,
  // NOT_FOUND / FILE_NOT_FOUND, or FAILED_PRECONDITION / FILE_ERROR.
  static absl::StatusOr<NpyFile> Open(const std::string& path);
  // Opens an array that is within a file of another format. The header says where its elements are.
  static absl::StatusOr<NpyFile> Open(const std::string& path, const NpyHeader& header);
  NpyFile(NpyFile&& other) noexcept;
  NpyFile& operator=(NpyFile&& other) noexcept;
  ~NpyFile();

  const NpyHeader& header() const { return header_; }
  // Fills `out` with the bytes [offset, offset + out.size()) of the array in row-major order,
  // regardless of the file's order. offset and out.size() must be multiples of the element size.
  // Returns BAD_NPY if the file has been truncated, OUT_OF_RANGE / BAD_RANGE if the range is not
  // within the array, or FILE_ERROR.
  absl::Status Read(std::uint64_t offset, absl::Span<char> out) const;

 private:
  NpyFile() = default;
  static absl::StatusOr<NpyFile> Open(const std::string& path, const NpyHeader* known);
  NpyHeader header_;
  std::string path_;
  int fd_ = -1;
  const char* map_ = nullptr;  // the whole file, for Fortran order only
  std::uint64_t map_bytes_ = 0;
};

// Writes a .npy file in its destination's folder, under an unpredictable name. Once the file is
// complete and on disk, moves it to the destination, so that a reader never sees a partial file. A
// new file takes the mode of the file that it replaces. If the destination is a symbolic link, the
// file that it points to is replaced. Standard output ("-") and anything but a regular file (a
// pipe, a terminal, a descriptor in /dev/fd) are written directly.
class NpyWriter {
 public:
  // Whether the path refers to the process's standard output.
  static bool IsStandardOutput(std::string_view path);
  // Whether the path names a regular file, or one that will be created; false for standard output,
  // pipes and devices.
  static bool MakesFile(const std::string& path);
  // Returns FAILED_PRECONDITION / FILE_ERROR if the file cannot be created or written.
  static absl::StatusOr<NpyWriter> Create(const std::string& path, DType dtype,
                                          absl::Span<const std::int64_t> shape);
  // Begins a file of another format with these bytes, which the elements follow.
  static absl::StatusOr<NpyWriter> Create(const std::string& path, std::string_view header);
  NpyWriter(NpyWriter&& other) noexcept;
  NpyWriter& operator=(NpyWriter&&) = delete;
  // Removes the unfinished file unless Finish has succeeded.
  ~NpyWriter();

  // Writes the next bytes of the array in row-major order.
  absl::Status Append(std::string_view bytes);
  // Extends the file to this many bytes of elements and maps it into memory, so that threads that
  // call WriteAt do not wait for each other, as they do in pwrite. Returns FILE_ERROR if the file
  // cannot become so large. REQUIRES: MakesFile(path), and WriteAt later writes all of these bytes.
  absl::Status Reserve(std::uint64_t bytes);
  // Writes the bytes at this offset of the array. Thread safe. REQUIRES: MakesFile(path), and
  // Append is never called.
  absl::Status WriteAt(std::uint64_t offset, std::string_view bytes) const;
  // REQUIRES: every byte has been appended.
  absl::Status Finish();

 private:
  NpyWriter() = default;
  absl::Status Open();
  std::string path_;
  std::string partial_;  // the path of the unfinished file; empty if there is none
  int fd_ = -1;
  std::uint64_t data_offset_ = 0;  // where the elements begin
  char* map_ = nullptr;            // the reserved bytes of the file
  std::uint64_t map_bytes_ = 0;
};

}  // namespace tessera
