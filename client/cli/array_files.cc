#include "client/cli/array_files.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/json_fault.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

using std::string_view_literals::operator""sv;

// The maximum size of a header or a zip directory. A tensor takes about 100 bytes of it.
constexpr std::uint64_t kMaxHeader = 16 << 20;
// The server refuses longer names.
constexpr std::size_t kLongestName = 128;
// The key in a safetensors header that does not name a tensor.
constexpr const char* kMetadata = "__metadata__";
// The value of a 32-bit size in a zip file if a 64-bit size follows.
constexpr std::uint64_t kIn64Bits = 0xffffffff;

std::string EndingOf(const std::filesystem::path& path) {
  return absl::AsciiStrToLower(path.extension().string());
}

// Replaces every character that names cannot have.
std::string AsName(std::string text) {
  for (char& c : text)
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && !absl::StrContains("._/-", c))
      c = '_';
  return text;
}

// Returns a little-endian number. REQUIRES: the number is within `bytes`.
std::uint64_t Number(std::string_view bytes, std::size_t at, std::size_t size) {
  std::uint64_t number = 0;
  while (size-- > 0) number = number << 8 | static_cast<unsigned char>(bytes[at + size]);
  return number;
}

void Append(std::string& out, std::uint64_t number, std::size_t size) {
  for (; size-- > 0; number >>= 8) out += static_cast<char>(number & 0xff);
}

// A file of any content.
class File {
 public:
  explicit File(const std::string& path) : path_(path) {
    std::error_code error;
    const std::uintmax_t found = std::filesystem::file_size(path, error);
    size_ = error ? 0 : found;
    bytes_.push_back(OrThrow(NpyFile::Open(
        path, {.dtype = DType::kU8, .shape = {}, .fortran_order = false, .data_bytes = size_})));
  }
  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  [[noreturn]] void Refuse(std::string_view why) const {
    ThrowInvalid("BAD_FILE", absl::StrCat(path_, " cannot be read: ", Absl(why)));
  }
  std::string Read(std::uint64_t begin, std::uint64_t size) const {
    if (begin > size_ || size > size_ - begin) Refuse("it is truncated");
    std::string out(size, '\0');
    OrThrow(bytes_.front().Read(begin, absl::MakeSpan(out)));
    return out;
  }

 private:
  std::string path_;
  std::uint64_t size_ = 0;
  std::vector<NpyFile> bytes_;  // one element: the file as a vector of bytes
};

// https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
std::vector<ArrayInFile> FindMembers(const File& file) {
  constexpr std::uint64_t kEnd = 22, kEnd64 = 56, kLocator = 20, kEntry = 46, kLocal = 30;
  const std::uint64_t tail_bytes = std::min(file.size(), kEnd + 0xffff);  // it may have a comment
  const std::string tail = file.Read(file.size() - tail_bytes, tail_bytes);
  const std::size_t end = tail.rfind("PK\5\6"sv);
  if (end == tail.npos || tail.size() - end < kEnd)
    file.Refuse("it is truncated or not a .npz file");
  std::uint64_t entries = Number(tail, end + 10, 2);
  std::uint64_t directory_bytes = Number(tail, end + 12, 4);
  std::uint64_t directory_begin = Number(tail, end + 16, 4);
  if (end >= kLocator && tail.compare(end - kLocator, 4, "PK\6\7"sv) == 0) {
    const std::string end64 = file.Read(Number(tail, end - kLocator + 8, 8), kEnd64);
    entries = Number(end64, 32, 8);
    directory_bytes = Number(end64, 40, 8);
    directory_begin = Number(end64, 48, 8);
  }
  if (directory_bytes > kMaxHeader) file.Refuse("its directory is larger than 16 MiB");
  const std::string directory = file.Read(directory_begin, directory_bytes);

  std::vector<ArrayInFile> found;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  for (std::size_t at = 0; entries > 0; --entries) {
    if (directory.size() - at < kEntry || directory.compare(at, 4, "PK\1\2"sv) != 0)
      file.Refuse("its directory is damaged");
    const auto field = [&](std::size_t offset, std::size_t size) {
      return Number(directory, at + offset, size);
    };
    std::uint64_t packed = field(20, 4), bytes = field(24, 4), local = field(42, 4);
    const std::size_t name_end = at + kEntry + field(28, 2), extra_end = name_end + field(30, 2);
    const std::size_t next = extra_end + field(32, 2);
    if (next > directory.size()) file.Refuse("its directory is damaged");
    std::string name = directory.substr(at + kEntry, name_end - at - kEntry);
    for (std::size_t extra = name_end; extra_end - extra >= 4;) {
      const std::size_t size = Number(directory, extra + 2, 2);
      const bool large = Number(directory, extra, 2) == 1;
      extra += 4;
      if (size > extra_end - extra) file.Refuse("its directory is damaged");
      std::size_t value = extra;
      for (std::uint64_t* one : {&bytes, &packed, &local}) {
        if (!large || *one != kIn64Bits || extra + size - value < 8) continue;
        *one = Number(directory, value, 8);
        value += 8;
      }
      extra += size;
    }
    const std::string shown = absl::StrCat("its member ", name.substr(0, 128));
    if ((field(8, 2) & 1) != 0 || field(10, 2) != 0 || !absl::EndsWith(name, ".npy") ||
        name.size() == 4) {
      file.Refuse(absl::StrCat(shown,
                               " is encrypted, compressed or not a .npy file; write it with "
                               "numpy.savez, or load it in Python"));
    }
    name.resize(name.size() - 4);
    const std::string head = file.Read(local, kLocal);
    const std::uint64_t begin = local + kLocal + Number(head, 26, 2) + Number(head, 28, 2);
    if (head.compare(0, 4, "PK\3\4"sv) != 0 || bytes != packed || begin > directory_begin ||
        packed > directory_begin - begin)
      file.Refuse(absl::StrCat(shown, " is damaged"));
    constexpr std::uint64_t kMost = (1 << 20) + 16;  // bytes of a .npy header
    absl::StatusOr<NpyHeader> header = ParseNpyHeader(file.Read(begin, std::min(packed, kMost)));
    if (!header.ok()) {
      absl::Status status = header.status();
      SetErrorMetadata(status, "path", absl::StrCat(file.path(), ", ", shown));
      throw CommandError(status);
    }
    if (header->data_bytes > packed - header->data_offset)
      file.Refuse(absl::StrCat(shown, " is truncated"));
    header->data_offset += begin;
    found.push_back({file.path(), std::move(name), *std::move(header)});
    ranges.emplace_back(local, begin + packed);
    at = next;
  }
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].first < ranges[i - 1].second) file.Refuse("its members overlap");
  return found;
}

// Parses a header of limited depth, without repeated keys.
nlohmann::json ParseTensorHeader(const File& file, const std::string& text) {
  const auto same = [](std::string_view key) { return std::string(key); };
  if (const std::string fault = JsonFault(text, /*deepest=*/3, same); !fault.empty())
    file.Refuse("its header " + fault);
  nlohmann::json header = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) file.Refuse("its header is not a JSON object");
  header.erase(kMetadata);
  return header;
}

// https://huggingface.co/docs/safetensors/index#format
std::vector<ArrayInFile> FindTensors(const File& file) {
  constexpr std::uint64_t kLength = 8;
  const std::uint64_t length = Number(file.Read(0, kLength), 0, kLength);
  if (length > kMaxHeader) file.Refuse("its header would be larger than 16 MiB");
  const nlohmann::json header = ParseTensorHeader(file, file.Read(kLength, length));
  const std::uint64_t begin = kLength + length;
  std::vector<ArrayInFile> found;
  for (const auto& [name, tensor] : header.items()) {
    const std::string shown = absl::StrCat("tensor '", name.substr(0, 128), "' ");
    const auto refuse = [&](std::string_view what) { file.Refuse(shown + std::string(what)); };
    const auto dtype = tensor.find("dtype"), shape = tensor.find("shape"),
               offsets = tensor.find("data_offsets");
    const auto are_sizes = [](const nlohmann::json& list) {
      return list.is_array() && std::all_of(list.begin(), list.end(), [](const auto& one) {
               return one.is_number_unsigned();
             });
    };
    if (name.empty() || dtype == tensor.end() || shape == tensor.end() || offsets == tensor.end() ||
        !dtype->is_string() || !are_sizes(*shape) || !are_sizes(*offsets) || offsets->size() != 2)
      refuse("lacks a name, type, shape or offsets");
    const std::string type = dtype->get<std::string>();
    const auto known = std::find_if(kArrayDTypes.begin(), kArrayDTypes.end(), [&](DType one) {
      return absl::AsciiStrToUpper(Absl(Name(one))) == type;
    });
    if (known == kArrayDTypes.end()) {
      ThrowInvalid("BAD_DTYPE", absl::StrCat(file.path(), ": ", shown, "has the type ",
                                             type.substr(0, 32), ", which the service lacks"));
    }
    if (std::any_of(shape->begin(), shape->end(), [](const auto& extent) {
          return extent.template get<std::uint64_t>() > INT64_MAX;
        }))
      refuse("has an extent of 2^63 or more");
    NpyHeader array{.dtype = *known, .shape = shape->get<std::vector<std::int64_t>>()};
    array.data_bytes = OrThrow(ArrayBytes(array.dtype, array.shape));
    const auto first = offsets->at(0).get<std::uint64_t>(),
               last = offsets->at(1).get<std::uint64_t>();
    if (first > last || last > file.size() - begin) refuse("has bytes that are not in the file");
    if (last - first != array.data_bytes) refuse("has a shape that does not match its bytes");
    array.data_offset = begin + first;
    found.push_back({file.path(), name, std::move(array)});
  }
  std::sort(found.begin(), found.end(), [](const ArrayInFile& a, const ArrayInFile& b) {
    return std::pair(a.header.data_offset, a.header.data_bytes) <
           std::pair(b.header.data_offset, b.header.data_bytes);
  });
  std::uint64_t end = begin;
  for (const ArrayInFile& one : found) {
    if (one.header.data_offset != end) file.Refuse("its tensors overlap, or leave a gap");
    end += one.header.data_bytes;
  }
  if (end != file.size()) file.Refuse("it has bytes after the last tensor");
  return found;
}

// Returns the header of a .safetensors file, padded to a multiple of 8 bytes. Names of buffers need
// no escapes.
std::string TensorHeader(const std::vector<std::pair<std::string, v1::Buffer>>& arrays) {
  std::vector<std::string> tensors;
  std::uint64_t at = 0;
  for (const auto& [key, buffer] : arrays) {
    const std::string type = absl::AsciiStrToUpper(Absl(Name(static_cast<DType>(buffer.dtype()))));
    tensors.push_back(absl::StrCat("\"", key, "\":{\"dtype\":\"", type, "\",\"shape\":[",
                                   absl::StrJoin(buffer.shape(), ","), "],\"data_offsets\":[", at,
                                   ",", at + buffer.size_bytes(), "]}"));
    at += buffer.size_bytes();
  }
  std::string text = absl::StrCat("{", absl::StrJoin(tensors, ","), "}");
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string header;
  Append(header, text.size(), 8);
  return header + text;
}

// Returns the header of a member of a zip file, or its entry in the directory. All sizes have 64
// bits, because a member may be larger than 4 GiB.
std::string ZipHeader(bool entry, const std::string& name, std::uint64_t bytes, std::uint32_t crc,
                      std::uint64_t local) {
  std::string out(entry ? "PK\1\2\x2d\0"sv : "PK\3\4"sv);
  Append(out, 45, 2);          // the version that 64-bit sizes need
  Append(out, 0, 4 + 2);       // flags, no compression, time
  Append(out, 1 << 5 | 1, 2);  // 1980-01-01, the first day that a zip file can name
  Append(out, crc, 4);
  Append(out, kIn64Bits << 32 | kIn64Bits, 8);
  Append(out, name.size(), 2);
  Append(out, entry ? 28 : 20, 2);  // the size of what follows the name
  if (entry) {
    Append(out, 0, 2 + 2 + 2 + 4);  // no comment, first disk, attributes
    Append(out, kIn64Bits, 4);
  }
  out += name;
  Append(out, 1, 2);
  Append(out, entry ? 24 : 16, 2);
  Append(out, bytes, 8);
  Append(out, bytes, 8);
  if (entry) Append(out, local, 8);
  return out;
}

std::string ZipEnd(std::uint64_t entries, std::uint64_t begin, std::uint64_t bytes) {
  std::string out = "PK\6\6";
  Append(out, 44, 8);  // the size of the rest of this record
  Append(out, 45 << 16 | 45, 4);
  Append(out, 0, 4 + 4);  // disks
  Append(out, entries, 8);
  Append(out, entries, 8);
  Append(out, bytes, 8);
  Append(out, begin, 8);
  out += "PK\6\7"sv;
  Append(out, 0, 4);
  Append(out, begin + bytes, 8);
  Append(out, 1, 4);
  out += "PK\5\6"sv;
  Append(out, 0, 4);
  Append(out, kIn64Bits << 32 | kIn64Bits, 8);
  Append(out, kIn64Bits, 4);
  Append(out, 0, 2);  // no comment
  return out;
}

}  // namespace

bool HoldsNamedArrays(const std::string& path) {
  const std::string ending = EndingOf(path);
  return ending == ".npz" || ending == ".safetensors";
}

std::vector<ArrayInFile> FindArrays(const std::string& path, const std::string& name,
                                    const std::string& prefix) {
  std::vector<std::string> files = {path};
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    if (!name.empty()) ThrowBadOption("a folder takes a --prefix, not a --name");
    files.clear();
    for (auto one = std::filesystem::directory_iterator(path, error); !error && one != end(one);
         one.increment(error)) {
      const std::string file = one->path().string();
      if (HoldsNamedArrays(file) || EndingOf(file) == ".npy") files.push_back(file);
    }
    if (files.empty()) ThrowInvalid("BAD_FILE", path + " has no files of arrays");
    std::sort(files.begin(), files.end());
  }
  std::vector<ArrayInFile> all;
  std::set<std::string> names;
  for (const std::string& file : files) {
    std::vector<ArrayInFile> found;
    if (HoldsNamedArrays(file)) {
      const File open(file);
      found = EndingOf(file) == ".npz" ? FindMembers(open) : FindTensors(open);
    } else {
      found.push_back({file, "", OrThrow(NpyFile::Open(file)).header()});
    }
    const std::string stem =
        name.empty() ? AsName(std::filesystem::path(file).stem().string()) : name;
    for (ArrayInFile& one : found) {
      one.name = absl::StrCat(prefix, stem, one.name.empty() ? "" : "/", AsName(one.name));
      if (one.name.size() > kLongestName) {
        ThrowInvalid("BAD_NAME", absl::StrCat("an array of ", file, " would have a name of ",
                                              one.name.size(), " characters"));
      }
      if (!names.insert(one.name).second)
        ThrowInvalid("BAD_FILE", absl::StrCat("two arrays of ", path, " would be ", one.name));
      all.push_back(std::move(one));
    }
  }
  return all;
}

std::uint64_t SaveBuffers(Session& session, std::vector<std::string> names,
                          const std::string& prefix, const std::string& path,
                          DownloadOptions download) {
  if (!NpyWriter::MakesFile(path)) ThrowBadOption(path + " must be a regular file");
  if (names.empty()) {
    for (const v1::Buffer& buffer : OrThrow(session.client.ListBuffers(prefix))) {
      if (buffer.state() == v1::Buffer::STATE_READY) {
        names.push_back(buffer.name());
      } else {
        std::cerr << Printable(buffer.name()) << " is left out, because its upload has not ended\n";
      }
    }
  }
  if (names.empty())
    ThrowBadOption("there are no complete buffers with the prefix '" + prefix + "'");
  std::vector<std::pair<std::string, v1::Buffer>> arrays;
  std::set<std::string> keys;
  for (const std::string& name : names) {
    const std::string key = absl::StartsWith(name, prefix) ? name.substr(prefix.size()) : name;
    if (key.empty() || !keys.insert(key).second)
      ThrowBadOption(key.empty() ? "one of the arrays would have no name"
                                 : "two arrays would have the name '" + key + "'");
    if (key == kMetadata) ThrowBadOption("a file cannot hold an array named " + key);
    arrays.emplace_back(key, OrThrow(session.client.GetBuffer(name)).buffer());
  }

  const InterruptScope interrupts;
  download.cancel = InterruptScope::token();
  const bool zip = EndingOf(path) == ".npz";
  download.streams = zip ? 1 : 8;  // the CRC-32 of a member needs the bytes in order
  NpyWriter writer = OrThrow(NpyWriter::Create(path, zip ? "" : TensorHeader(arrays)));
  std::uint64_t at = 0, total = 0;
  std::string directory;
  if (!zip) {
    std::uint64_t bytes = 0;
    for (const auto& [key, buffer] : arrays) bytes += buffer.size_bytes();
    OrThrow(writer.Reserve(bytes));
  }
  for (const auto& [key, buffer] : arrays) {
    const std::string member = key + ".npy";
    const std::string npy =
        zip ? MakeNpyHeader(static_cast<DType>(buffer.dtype()), buffer.shape()) : "";
    const std::uint64_t begin = at, bytes = npy.size() + buffer.size_bytes();
    if (zip) at += ZipHeader(false, member, bytes, 0, 0).size() + npy.size();
    const auto crc_of = [](std::uint32_t crc, std::string_view data) {
      return ::crc32_gzip_refl(crc, reinterpret_cast<const unsigned char*>(data.data()),
                               data.size());
    };
    std::uint32_t crc = crc_of(0, npy);
    ProgressBar progress(buffer.name(), buffer.size_bytes());
    download.version = buffer.version();
    OrThrow(session.client
                .DownloadRanges(
                    buffer.name(),
                    [&](const v1::Buffer&, std::uint64_t offset, std::string_view data) {
                      if (zip) {
                        crc = crc_of(crc, data);
                        progress.Update(offset + data.size());
                      }
                      return writer.WriteAt(at + offset, data);
                    },
                    download)
                .status());
    if (zip) {
      OrThrow(writer.WriteAt(begin, ZipHeader(false, member, bytes, crc, 0) + npy));
      directory += ZipHeader(true, member, bytes, crc, begin);
    }
    at += buffer.size_bytes();
    total += buffer.size_bytes();
  }
  if (zip) OrThrow(writer.WriteAt(at, directory + ZipEnd(arrays.size(), at, directory.size())));
  OrThrow(writer.Finish());
  return total;
}

}  // namespace tessera
