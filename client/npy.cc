#include "client/npy.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/error.h"
#include "kernels/base/shape.h"

namespace tessera {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMaxHeader = 1 << 20;
constexpr std::size_t kAlignment = 64;

absl::Status BadNpy(std::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_NPY", what);
}

absl::Status FileError(std::string_view path, std::string_view action) {
  const int error = errno;
  const bool missing = error == ENOENT && action == "open";
  return MakeError(
      missing ? absl::StatusCode::kNotFound : absl::StatusCode::kFailedPrecondition,
      missing ? "FILE_NOT_FOUND" : "FILE_ERROR",
      absl::StrCat("cannot ", Absl(action), " ", Absl(path), ": ", std::strerror(error)),
      {{"path", std::string(path)}});
}

absl::StatusOr<DType> ParseDescr(std::string_view descr) {
  for (DType dtype : kArrayDTypes) {
    const std::string_view known = InfoOf(dtype).numpy;
    if (descr.size() != known.size() || descr.substr(1) != known.substr(1)) continue;
    if (descr[0] == '<' || descr[0] == known[0]) return dtype;
    if (descr[0] == '>') {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_DTYPE",
                       absl::StrCat("the file is big-endian ('", Absl(descr),
                                    "'); save it with array.astype('", Absl(known), "')"),
                       {{"descr", std::string(descr)}});
    }
  }
  descr = descr.substr(0, 32);  // a descr may be a megabyte long
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_DTYPE",
                   absl::StrCat("element type '", absl::CHexEscape(Absl(descr)),
                                "' is not supported; convert it to float32, float64, float16, "
                                "int32, int64, int8, uint8 or bool"),
                   {{"descr", absl::CHexEscape(Absl(descr))}});
}

// Parses a header, which is a Python dict literal with three known keys in any order. Spacing,
// quotes and trailing commas may vary as Python allows.
class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : rest_(text) {}

  absl::StatusOr<NpyHeader> Parse() {
    NpyHeader header;
    bool descr = false, order = false, shape = false;
    if (!Take('{')) return Malformed("the '{' is missing");
    while (!Take('}')) {
      std::string_view key;
      if (!TakeString(key) || !Take(':')) return Malformed("a key is missing");
      if (key == "descr" && !std::exchange(descr, true)) {
        std::string_view value;
        if (Peek('[')) {
          return MakeError(absl::StatusCode::kInvalidArgument, "BAD_DTYPE",
                           "structured element types are not supported; save a single field");
        }
        if (!TakeString(value)) return Malformed("descr is not a string");
        absl::StatusOr<DType> dtype = ParseDescr(value);
        if (!dtype.ok()) return dtype.status();
        header.dtype = *dtype;
      } else if (key == "fortran_order" && !std::exchange(order, true)) {
        if (TakeWord("True")) {
          header.fortran_order = true;
        } else if (!TakeWord("False")) {
          return Malformed("fortran_order is neither True nor False");
        }
      } else if (key == "shape" && !std::exchange(shape, true)) {
        if (absl::Status status = ParseShape(header.shape); !status.ok()) return status;
      } else {
        return Malformed("a key is unknown or repeated");
      }
      if (!Take(',') && !Peek('}')) return Malformed("a ',' is missing after a value");
    }
    SkipSpace();
    if (!rest_.empty()) return Malformed("there is text after the '}'");
    if (!descr || !order || !shape) return Malformed("descr, fortran_order or shape is missing");
    return header;
  }

 private:
  static absl::Status Malformed(std::string_view what) {
    return BadNpy(absl::StrCat("the .npy header is malformed: ", Absl(what)));
  }

  void SkipSpace() {
    const std::size_t n = rest_.find_first_not_of(" \t\r\n\f\v");
    rest_.remove_prefix(std::min(n, rest_.size()));
  }
  bool Peek(char c) {
    SkipSpace();
    return !rest_.empty() && rest_.front() == c;
  }
  bool Take(char c) {
    if (!Peek(c)) return false;
    rest_.remove_prefix(1);
    return true;
  }
  bool TakeWord(std::string_view word) {
    SkipSpace();
    if (rest_.substr(0, word.size()) != word) return false;
    rest_.remove_prefix(word.size());
    return true;
  }
  bool TakeString(std::string_view& value) {
    SkipSpace();
    if (rest_.empty() || (rest_.front() != '\'' && rest_.front() != '"')) return false;
    const std::size_t end = rest_.find(rest_.front(), 1);
    if (end == std::string_view::npos) return false;
    value = rest_.substr(1, end - 1);
    rest_.remove_prefix(end + 1);
    return true;
  }

  absl::Status ParseShape(std::vector<std::int64_t>& shape) {
    if (!Take('(')) return Malformed("shape is not a tuple");
    while (!Take(')')) {
      if (shape.size() == kMaxRank) {
        return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SHAPE",
                         absl::StrCat("the array has more than ", kMaxRank, " dimensions"));
      }
      SkipSpace();
      std::int64_t extent = 0;
      const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), extent);
      if (error != std::errc() || extent < 0) return Malformed("an extent is not a whole number");
      rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
      Take('L');  // the suffix of long integers in Python 2
      shape.push_back(extent);
      if (!Take(',') && !Peek(')')) return Malformed("a ',' is missing in shape");
    }
    return absl::OkStatus();
  }

  std::string_view rest_;
};

absl::Status BecameShorter(std::string_view path) {
  return BadNpy(absl::StrCat(Absl(path), " was truncated while it was being read"));
}

// Reads exactly out.size() bytes at offset.
absl::Status ReadAt(int fd, std::string_view path, std::uint64_t offset, absl::Span<char> out) {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd, out.data(), out.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError(path, "read");
    if (n == 0) return BecameShorter(path);
    out.remove_prefix(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return absl::OkStatus();
}

// Writes all bytes by calls of write(data, size).
template <class Write>
absl::Status WriteAll(std::string_view path, std::string_view bytes, const Write& write) {
  while (!bytes.empty()) {
    const ssize_t n = write(bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError(path, "write");
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return absl::OkStatus();
}

// Copies the elements [first, first + count) in row-major order from a column-major array. Copies
// one run along the last axis at a time; the elements of a run are strides[last] apart in the file.
template <class T>
void GatherColumnMajor(const char* data, absl::Span<const std::int64_t> shape, std::uint64_t first,
                       std::uint64_t count, char* out) {
  const std::size_t last = shape.size() - 1;
  std::array<std::uint64_t, kMaxRank> strides{};
  std::uint64_t stride = 1;
  for (std::size_t i = 0; i <= last; ++i) {
    strides[i] = stride;
    stride *= static_cast<std::uint64_t>(shape[i]);
  }
  std::array<std::uint64_t, kMaxRank> index{};
  for (std::size_t i = last + 1; i-- > 0;) {
    index[i] = first % static_cast<std::uint64_t>(shape[i]);
    first /= static_cast<std::uint64_t>(shape[i]);
  }
  while (count > 0) {
    std::uint64_t source = 0;
    for (std::size_t i = 0; i <= last; ++i) source += index[i] * strides[i];
    const std::uint64_t run =
        std::min(count, static_cast<std::uint64_t>(shape[last]) - index[last]);
    const char* from = data + source * sizeof(T);
    for (std::uint64_t j = 0; j < run; ++j) {
      // Neither pointer need be aligned.
      std::memcpy(out + j * sizeof(T), from + j * strides[last] * sizeof(T), sizeof(T));
    }
    out += run * sizeof(T);
    count -= run;
    index[last] = 0;
    for (std::size_t i = last; i-- > 0;) {
      if (++index[i] < static_cast<std::uint64_t>(shape[i])) break;
      index[i] = 0;
    }
  }
}

// The point at which a thread resumes after SIGBUS, which the kernel sends when a thread accesses a
// mapping beyond the end of the file, or when the disk has no room for a page that a thread writes.
// It is nullptr while the thread does not use a mapping.
thread_local sigjmp_buf* volatile map_user = nullptr;
struct sigaction other_bus_action {};  // the process's previous action for SIGBUS

void OnBusError(int, siginfo_t*, void*) {
  if (map_user != nullptr) ::siglongjmp(*map_user, 1);
  // The signal does not come from a mapping. The access is repeated on return, and the previous
  // action then handles the signal.
  ::sigaction(SIGBUS, &other_bus_action, nullptr);
}

// Runs copy(), which must do nothing but copy from or to a mapping. Returns false if the file has
// been truncated or the disk is full.
template <class F>
bool UseMap(const F& copy) {
  static std::once_flag installed;
  std::call_once(installed, [] {
    struct sigaction action {};
    action.sa_sigaction = OnBusError;
    action.sa_flags = static_cast<int>(SA_SIGINFO | SA_NODEFER);
    ::sigaction(SIGBUS, &action, &other_bus_action);
  });
  sigjmp_buf user;
  if (sigsetjmp(user, 0) != 0) {
    map_user = nullptr;
    return false;
  }
  map_user = &user;
  std::atomic_signal_fence(std::memory_order_seq_cst);  // keeps the accesses between the two fences
  copy();
  std::atomic_signal_fence(std::memory_order_seq_cst);
  map_user = nullptr;
  return true;
}

}  // namespace

absl::StatusOr<std::uint64_t> ArrayBytes(DType dtype, absl::Span<const std::int64_t> shape) {
  if (shape.size() > static_cast<std::size_t>(kMaxRank)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SHAPE",
                     absl::StrCat("the array has more than ", kMaxRank, " dimensions"));
  }
  // As on the server, the product of the other extents must fit even if one extent is zero.
  std::int64_t bytes = static_cast<std::int64_t>(SizeOf(dtype));
  bool overflow = false, empty = false;
  for (std::int64_t extent : shape) {
    if (extent < 0) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SHAPE",
                       absl::StrCat("extent ", extent, " is negative"));
    }
    empty |= extent == 0;
    overflow |= __builtin_mul_overflow(bytes, std::max<std::int64_t>(1, extent), &bytes);
  }
  if (overflow) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_SHAPE",
        absl::StrCat("an array of shape [", absl::StrJoin(shape, ", "), "] exceeds 2^63 bytes"));
  }
  return empty ? 0 : static_cast<std::uint64_t>(bytes);
}

absl::StatusOr<NpyHeader> ParseNpyHeader(std::string_view file) {
  if (file.substr(0, kMagic.size()) != kMagic) {
    return BadNpy("this is not a .npy file: it does not begin with \\x93NUMPY");
  }
  const auto byte = [&](std::size_t i) -> std::size_t {
    return static_cast<unsigned char>(file[i]);
  };
  constexpr std::size_t kVersion = kMagic.size();
  constexpr std::size_t kLength = kVersion + 2;
  if (file.size() < kLength + 4) return BadNpy("the file ends within its .npy header");
  const std::size_t major = byte(kVersion);
  if (major < 1 || major > 3)
    return BadNpy(absl::StrCat("the file has the unknown .npy version ", major));
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  std::size_t length = 0;
  for (std::size_t i = length_bytes; i-- > 0;) length = length << 8 | byte(kLength + i);
  if (length > kMaxHeader)
    return BadNpy(absl::StrCat("the .npy header is too long: ", length, " bytes"));
  const std::size_t begin = kLength + length_bytes;
  if (file.size() - begin < length) return BadNpy("the file ends within its .npy header");

  absl::StatusOr<NpyHeader> header = HeaderParser(file.substr(begin, length)).Parse();
  if (!header.ok()) return header;
  absl::StatusOr<std::uint64_t> bytes = ArrayBytes(header->dtype, header->shape);
  if (!bytes.ok()) return bytes.status();
  header->data_offset = begin + length;
  header->data_bytes = *bytes;
  return header;
}

std::string MakeNpyHeader(DType dtype, absl::Span<const std::int64_t> shape) {
  // In Python, a tuple with one element needs a trailing comma.
  const std::string dict = absl::StrCat(
      "{'descr': '", Absl(InfoOf(dtype).numpy), "', 'fortran_order': False, 'shape': (",
      absl::StrJoin(shape, ", "), shape.size() == 1 ? ",), }" : "), }");
  // There are at most 8 extents of 19 digits, so the two-byte length field of version 1 is enough.
  const std::size_t prefix = kMagic.size() + 4;
  const std::size_t total = (prefix + dict.size() + 1 + kAlignment - 1) / kAlignment * kAlignment;
  const std::size_t length = total - prefix;
  std::string header(kMagic);
  header += '\x01';
  header += '\0';
  header += static_cast<char>(length & 0xff);
  header += static_cast<char>(length >> 8);
  header += dict;
  header.append(total - header.size() - 1, ' ');
  header += '\n';
  return header;
}

// --- NpyFile -------------------------------------------------------------------------------------

absl::StatusOr<NpyFile> NpyFile::Open(const std::string& path) { return Open(path, nullptr); }

absl::StatusOr<NpyFile> NpyFile::Open(const std::string& path, const NpyHeader& header) {
  return Open(path, &header);
}

absl::StatusOr<NpyFile> NpyFile::Open(const std::string& path, const NpyHeader* known) {
  NpyFile file;
  file.path_ = path;
  // With O_NONBLOCK, opening a pipe does not wait. Pipes are refused below.
  file.fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.fd_ < 0) return FileError(path, "open");
  struct stat info {};
  if (::fstat(file.fd_, &info) != 0) return FileError(path, "stat");
  if (!S_ISREG(info.st_mode)) return BadNpy(absl::StrCat(path, " is not a regular file"));
  const std::uint64_t size = static_cast<std::uint64_t>(info.st_size);

  std::string begin(known == nullptr ? std::min<std::uint64_t>(size, kMaxHeader + 16) : 0, '\0');
  if (absl::Status status = ReadAt(file.fd_, path, 0, absl::MakeSpan(begin)); !status.ok()) {
    return status;
  }
  absl::StatusOr<NpyHeader> header = known == nullptr ? ParseNpyHeader(begin) : *known;
  if (!header.ok()) {
    absl::Status status = header.status();
    SetErrorMetadata(status, "path", path);
    return status;
  }
  const std::uint64_t present = size - std::min(size, header->data_offset);
  if (present < header->data_bytes) {
    return BadNpy(absl::StrCat(path, " is truncated: its header promises ", header->data_bytes,
                               " bytes of elements, but only ", present, " are present"));
  }
  file.header_ = *std::move(header);
  // A column-major array with fewer than two dimensions is also row-major.
  if (file.header_.fortran_order && file.header_.shape.size() > 1 && file.header_.data_bytes > 0) {
    void* map = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.fd_, 0);
    if (map == MAP_FAILED) return FileError(path, "map");
    file.map_ = static_cast<const char*>(map);
    file.map_bytes_ = size;
  }
  return file;
}

NpyFile::NpyFile(NpyFile&& other) noexcept { *this = std::move(other); }

NpyFile& NpyFile::operator=(NpyFile&& other) noexcept {
  std::swap(header_, other.header_);
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(map_, other.map_);
  std::swap(map_bytes_, other.map_bytes_);
  return *this;
}

NpyFile::~NpyFile() {
  if (map_ != nullptr) ::munmap(const_cast<char*>(map_), map_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

absl::Status NpyFile::Read(std::uint64_t offset, absl::Span<char> out) const {
  if (offset > header_.data_bytes || out.size() > header_.data_bytes - offset) {
    return MakeError(absl::StatusCode::kOutOfRange, "BAD_RANGE",
                     absl::StrCat("bytes ", offset, " to ", offset + out.size(),
                                  " are not within the ", header_.data_bytes, " bytes of ", path_));
  }
  if (map_ == nullptr) return ReadAt(fd_, path_, header_.data_offset + offset, out);

  const char* data = map_ + header_.data_offset;
  const std::size_t element = SizeOf(header_.dtype);
  const std::uint64_t first = offset / element;
  const std::uint64_t count = out.size() / element;
  const bool read = UseMap([&] {
    const auto gather = [&]<class T>(T) {
      GatherColumnMajor<T>(data, header_.shape, first, count, out.data());
    };
    element == 1   ? gather(std::uint8_t{})
    : element == 2 ? gather(std::uint16_t{})
    : element == 4 ? gather(std::uint32_t{})
                   : gather(std::uint64_t{});
  });
  // Beyond the end of a file, the rest of its last page reads as zeros without an error, so the
  // size is checked as well.
  struct stat info {};
  if (!read || ::fstat(fd_, &info) != 0 || static_cast<std::uint64_t>(info.st_size) < map_bytes_) {
    return BecameShorter(path_);
  }
  return absl::OkStatus();
}

// --- NpyWriter -----------------------------------------------------------------------------------

bool NpyWriter::IsStandardOutput(std::string_view path) {
  return path == "-" || path == "/dev/stdout";
}

bool NpyWriter::MakesFile(const std::string& path) {
  struct stat info {};
  return !IsStandardOutput(path) && !path.starts_with("/dev/fd/") && !path.starts_with("/proc/") &&
         (::stat(path.c_str(), &info) != 0 || S_ISREG(info.st_mode));
}

absl::Status NpyWriter::Open() {
  if (IsStandardOutput(path_)) {
    fd_ = ::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0);
  } else if (!MakesFile(path_)) {
    // A pipe, a terminal or a descriptor of this process cannot be replaced by renaming a file.
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
  } else {
    struct stat old {};
    const bool replaces = ::stat(path_.c_str(), &old) == 0;
    std::error_code none;
    if (replaces && std::filesystem::is_symlink(path_, none))
      path_ = std::filesystem::canonical(path_, none).string();
    const mode_t mode = replaces ? old.st_mode & 0777 : 0666;
    // Other users may be able to write to the folder, so the name is unpredictable and existing
    // files are never opened. The temporary file is in the destination's folder, because a file
    // cannot be renamed across file systems. Its name does not contain the destination's name,
    // which may already have the maximum length.
    const std::string folder = path_.substr(0, path_.rfind('/') + 1);
    do {
      std::uint64_t random = 0;
      if (::getrandom(&random, sizeof(random), 0) != sizeof(random)) break;
      partial_ = absl::StrCat(folder, ".tessera-", absl::Hex(random, absl::kZeroPad16), ".part");
      fd_ = ::open(partial_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    } while (fd_ < 0 && errno == EEXIST);
    if (fd_ < 0) partial_.clear();
    if (fd_ >= 0 && replaces && ::fchmod(fd_, mode) != 0) return FileError(path_, "create");
  }
  return fd_ < 0 ? FileError(path_, "create") : absl::OkStatus();
}

absl::StatusOr<NpyWriter> NpyWriter::Create(const std::string& path, DType dtype,
                                            absl::Span<const std::int64_t> shape) {
  return Create(path, MakeNpyHeader(dtype, shape));
}

absl::StatusOr<NpyWriter> NpyWriter::Create(const std::string& path, std::string_view header) {
  NpyWriter writer;
  writer.path_ = path;
  if (absl::Status status = writer.Open(); !status.ok()) return status;
  if (absl::Status status = writer.Append(header); !status.ok()) return status;
  writer.data_offset_ = header.size();
  return writer;
}

NpyWriter::NpyWriter(NpyWriter&& other) noexcept
    : path_(std::move(other.path_)),
      partial_(std::exchange(other.partial_, {})),
      fd_(std::exchange(other.fd_, -1)),
      data_offset_(other.data_offset_),
      map_(std::exchange(other.map_, nullptr)),
      map_bytes_(other.map_bytes_) {}

NpyWriter::~NpyWriter() {
  if (map_ != nullptr) ::munmap(map_, map_bytes_);
  if (fd_ >= 0) ::close(fd_);
  if (!partial_.empty()) ::unlink(partial_.c_str());
}

absl::Status NpyWriter::Append(std::string_view bytes) {
  return WriteAll(path_, bytes,
                  [this](const char* data, std::size_t size) { return ::write(fd_, data, size); });
}

absl::Status NpyWriter::Reserve(std::uint64_t bytes) {
  map_bytes_ = data_offset_ + bytes;
  if (::ftruncate(fd_, static_cast<off_t>(map_bytes_)) != 0) return FileError(path_, "write");
  void* map = ::mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (map != MAP_FAILED) map_ = static_cast<char*>(map);
  return absl::OkStatus();
}

absl::Status NpyWriter::WriteAt(std::uint64_t offset, std::string_view bytes) const {
  const std::uint64_t reserved = map_bytes_ - data_offset_;
  if (map_ != nullptr && offset <= reserved && bytes.size() <= reserved - offset) {
    char* const to = map_ + data_offset_ + offset;
    if (UseMap([&] { std::memcpy(to, bytes.data(), bytes.size()); })) return absl::OkStatus();
    errno = ENOSPC;
    return FileError(path_, "write");
  }
  return WriteAll(path_, bytes, [&](const char* data, std::size_t size) {
    const std::uint64_t at =
        data_offset_ + offset + static_cast<std::uint64_t>(data - bytes.data());
    return ::pwrite(fd_, data, size, static_cast<off_t>(at));
  });
}

absl::Status NpyWriter::Finish() {
  if (map_ != nullptr) ::munmap(std::exchange(map_, nullptr), map_bytes_);
  // The bytes must reach the disk before the file is renamed, or a crash could leave an incomplete
  // file under the final name.
  if (!partial_.empty() && ::fsync(fd_) != 0) return FileError(path_, "write");
  // Some file systems report a full disk only here.
  if (::close(std::exchange(fd_, -1)) != 0) return FileError(path_, "write");
  if (partial_.empty()) return absl::OkStatus();
  if (::rename(partial_.c_str(), path_.c_str()) != 0) return FileError(path_, "create");
  partial_.clear();
  return absl::OkStatus();
}

}  // namespace tessera
