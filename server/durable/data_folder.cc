#include "server/durable/data_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "kernels/client_and_server/crc32c.h"
#include "nlohmann/json.hpp"

namespace tessera {
namespace {

using Json = nlohmann::json;
using absl::StatusCode;

constexpr const char* kManifest = "manifest.json";
constexpr const char* kNewManifest = "manifest.json.new";
constexpr const char* kArrays = "arrays";
constexpr const char* kLock = "lock";
constexpr int kFormat = 1;
constexpr mode_t kPrivate = 0700;
// With O_NONBLOCK, opening a pipe does not wait for its other end.
constexpr int kRead = O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW;
constexpr int kWrite = O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW;
constexpr std::size_t kLargestManifest = std::size_t{1} << 30;  // bytes
// How many bytes are written between two flushes of a file, so that no flush takes long.
constexpr std::size_t kFlushBytes = std::size_t{64} << 20;

std::string FileName(std::uint64_t number) { return absl::StrCat(number, ".safetensors"); }
// Returns the number in the name of an array's file, or nothing for any other name.
std::optional<std::uint64_t> NumberOf(const std::string& name) {
  std::uint64_t number = 0;
  const bool is_array =
      absl::SimpleAtoi(name.substr(0, name.find('.')), &number) && name == FileName(number);
  return is_array ? std::optional(number) : std::nullopt;
}
std::string PathOf(std::uint64_t number) { return absl::StrCat(kArrays, "/", FileName(number)); }

absl::Status BadFolder(std::string_view path, std::string_view cause) {
  return MakeError(StatusCode::kFailedPrecondition, "BAD_DATA_DIR",
                   absl::StrCat("--data-dir ", Absl(path), " cannot be used: ", Absl(cause)),
                   {{"path", std::string(path)}, {"cause", std::string(cause)}});
}

// Returns the error for a system call that has just failed.
absl::Status NotWritten(std::string_view path) {
  const std::string cause = std::strerror(errno);
  return MakeError(
      StatusCode::kFailedPrecondition, "SNAPSHOT_FAILED",
      absl::StrCat("the snapshot could not be written: ", Absl(path), " of --data-dir: ", cause),
      {{"path", std::string(path)}, {"cause", cause}});
}

absl::Status Lost(std::string_view cause) { return absl::DataLossError(Absl(cause)); }

// Writes all bytes, and returns false if that fails.
bool WriteAll(int file, const void* data, std::size_t size, off_t offset) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = offset < 0 ? write(file, next, size) : pwrite(file, next, size, offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    next += written;
    size -= static_cast<std::size_t>(written);
    if (offset >= 0) offset += written;
  }
  return true;
}

// Reads up to `size` bytes, fewer only at the end of the file. Returns nothing if that fails.
std::optional<std::size_t> ReadAll(int file, void* data, std::size_t size) {
  std::size_t done = 0;
  while (done < size) {
    const ssize_t got = read(file, static_cast<char*>(data) + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::nullopt;
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  return done;
}

// Opens a file for reading. The result may be something other than a regular file.
OpenFile OpenToRead(const OpenFile& folder, const std::string& name) {
  OpenFile file(openat(folder.get(), name.c_str(), kRead));
  // Another process, such as a file server, has a lease on this regular file, and gives it up soon.
  if (!file.is_open() && errno == EWOULDBLOCK)
    file = OpenFile(openat(folder.get(), name.c_str(), kRead & ~O_NONBLOCK));
  return file;
}

// Calls visit(name) for each entry of a folder.
template <class Visit>
void ForEach(OpenFile folder, const Visit& visit) {
  DIR* const list = folder.is_open() ? fdopendir(folder.get()) : nullptr;
  if (list == nullptr) return;
  folder.Release();  // the list now owns the descriptor
  while (const dirent* const one = readdir(list)) visit(std::string(one->d_name));
  closedir(list);
}

// Returns the beginning of an array's file, up to the array's bytes: the size of the header and the
// header itself, which depends only on the ArrayFile. Names need no escapes.
std::string HeaderOf(const ArrayFile& file) {
  std::string text =
      absl::StrCat(R"({"__metadata__":{"crc32c":")", absl::Hex(file.checksum, absl::kZeroPad8),
                   R"(","name":")", file.array, R"("},"array":{"dtype":")",
                   absl::AsciiStrToUpper(Absl(Name(file.type.dtype))), R"(","shape":[)",
                   absl::StrJoin(file.type.shape.dims.begin(),
                                 file.type.shape.dims.begin() + file.type.shape.rank, ","),
                   R"(],"data_offsets":[0,)", file.type.bytes(), "]}}");
  // Padded so that the bytes of the array begin at a multiple of 64.
  constexpr std::size_t kAlignment = 64;
  const std::size_t begin = sizeof(std::uint64_t) + text.size();
  text.append((kAlignment - begin % kAlignment) % kAlignment, ' ');
  const std::uint64_t size = text.size();
  std::string header(sizeof size, '\0');
  for (std::size_t i = 0; i < sizeof size; ++i) header[i] = static_cast<char>(size >> 8 * i);
  return header + text;
}

Json ToJson(const Manifest& manifest) {
  Json json = {{"format", kFormat},
               {"time", absl::ToUnixMicros(manifest.time)},
               {"next_file", manifest.next_file},
               {"files", Json::array()},
               {"tenants", Json::array()}};
  for (const auto& [number, file] : manifest.files) {
    const auto dims = file.type.shape.dims.begin();
    json["files"].push_back(
        {{"file", number},
         {"array", file.array},
         {"dtype", std::string(Name(file.type.dtype))},
         {"shape", std::vector<std::int64_t>(dims, dims + file.type.shape.rank)},
         {"crc32c", file.checksum}});
  }
  for (const auto& [name, tenant] : manifest.tenants) {
    Json buffers = Json::array();
    for (const Manifest::Entry& entry : tenant.buffers) {
      buffers.push_back({{"name", entry.name},
                         {"version", entry.version},
                         {"file", entry.file},
                         {"created", absl::ToUnixMicros(entry.create_time)},
                         {"devices", entry.devices}});
      if (entry.expire_time != absl::InfiniteFuture())
        buffers.back()["expires"] = absl::ToUnixMicros(entry.expire_time);
    }
    json["tenants"].push_back(
        {{"tenant", name}, {"last_version", tenant.last_version}, {"buffers", std::move(buffers)}});
  }
  return json;
}

// These throw Json::exception unless the value is an integer; Number also throws if it is negative.
std::int64_t Integer(const Json& json) { return json.get_ref<const Json::number_integer_t&>(); }
std::uint64_t Number(const Json& json) { return json.get_ref<const Json::number_unsigned_t&>(); }
absl::Time Time(const Json& json) { return absl::FromUnixMicros(Integer(json)); }

// Throws Json::exception if the text does not have the structure that ToJson gives it.
absl::StatusOr<Manifest> FromJson(const Json& json) {
  if (json.at("format") != kFormat) return Lost("it was written by another version of the program");
  Manifest manifest;
  manifest.time = Time(json.at("time"));
  manifest.next_file = Number(json.at("next_file"));
  for (const Json& one : json.at("files")) {
    const std::string name = one.at("dtype");
    const auto info = std::find_if(kDTypeInfos.begin(), kDTypeInfos.end(),
                                   [&](const DTypeInfo& dtype) { return dtype.name == name; });
    if (info == kDTypeInfos.end()) return Lost(absl::StrCat("it has the unknown dtype ", name));
    ArrayFile file{.number = Number(one.at("file")), .array = one.at("array")};
    file.checksum = static_cast<std::uint32_t>(Number(one.at("crc32c")));
    std::vector<std::int64_t> shape;
    for (const Json& dim : one.at("shape")) shape.push_back(Integer(dim));
    ASSIGN_OR_RETURN(file.type, MakeArrayType(info->dtype, shape));
    if (file.number >= manifest.next_file)
      return Lost("it names a file number that has not been used");
    manifest.files.emplace(file.number, std::move(file));
  }
  std::map<std::uint64_t, std::string> owners;  // the tenants of the files
  for (const Json& one : json.at("tenants")) {
    const std::string tenant_name = one.at("tenant");
    if (manifest.tenants.contains(tenant_name)) return Lost("two entries have the same tenant");
    Manifest::OfTenant& tenant = manifest.tenants[tenant_name];
    tenant.last_version = Number(one.at("last_version"));
    std::set<std::string> names;
    std::set<std::uint64_t> versions;
    for (const Json& buffer : one.at("buffers")) {
      Manifest::Entry entry{.name = buffer.at("name"),
                            .version = Number(buffer.at("version")),
                            .file = Number(buffer.at("file")),
                            .create_time = Time(buffer.at("created")),
                            .devices = buffer.at("devices")};
      if (buffer.contains("expires")) entry.expire_time = Time(buffer.at("expires"));
      if (!manifest.files.contains(entry.file)) return Lost("it names a file without a type");
      if (owners.emplace(entry.file, tenant_name).first->second != tenant_name)
        return Lost("two tenants share a file");
      if (!names.insert(entry.name).second)
        return Lost(absl::StrCat("it has two buffers with the name ", entry.name));
      if (!versions.insert(entry.version).second)
        return Lost(absl::StrCat("it has two buffers with the version ", entry.version));
      tenant.buffers.push_back(std::move(entry));
    }
  }
  return manifest;
}

// Returns whether lists and objects are nested at most `levels` deep.
bool IsNestedWithin(int levels, const Json& json) {
  return !json.is_structured() ||
         (levels > 0 && std::all_of(json.begin(), json.end(), [&](const Json& one) {
            return IsNestedWithin(levels - 1, one);
          }));
}

absl::StatusOr<Manifest> Parse(const std::string& text) {
  try {
    const Json json = Json::parse(text);
    const Json& manifest = json.at("manifest");
    // The values of ToJson are nested less deeply. dump() is recursive.
    constexpr int kDeepest = 8;
    if (!IsNestedWithin(kDeepest, manifest)) return Lost("it is nested too deeply");
    const std::string bytes = manifest.dump();
    if (json.at("crc32c") != Crc32c(bytes.data(), bytes.size()))
      return Lost("its checksum does not match its contents");
    return FromJson(manifest);
  } catch (const Json::exception& error) {
    return Lost(error.what());
  }
}

}  // namespace

OpenFile::~OpenFile() {
  if (is_open()) close(descriptor_);
}

absl::StatusOr<std::unique_ptr<DataFolder>> DataFolder::Open(const std::string& path) {
  const bool created = mkdir(path.c_str(), kPrivate) == 0;
  if (!created && errno != EEXIST) return BadFolder(path, std::strerror(errno));
  std::unique_ptr<DataFolder> folder(new DataFolder(path));
  const OpenFile& opened = folder->folder_;
  folder->folder_ = OpenFile(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened.is_open()) return BadFolder(path, std::strerror(errno));
  if (created) {
    const OpenFile parent(openat(opened.get(), "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (parent.is_open() && fsync(parent.get()) != 0) return BadFolder(path, std::strerror(errno));
  }
  // On NFS, locks on files exclude other hosts, but locks on folders do not. For a read-only
  // folder, only the folder is locked, so that a server can still restore buffers from it.
  folder->lock_ =
      OpenFile(openat(opened.get(), kLock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!folder->lock_.is_open() && errno != EROFS && errno != EACCES)
    return BadFolder(path, absl::StrCat(kLock, ": ", std::strerror(errno)));
  for (const int file : {opened.get(), folder->lock_.get()}) {
    if (file < 0 || flock(file, LOCK_EX | LOCK_NB) == 0) continue;
    if (errno != EWOULDBLOCK) return BadFolder(path, std::strerror(errno));
    return MakeError(StatusCode::kFailedPrecondition, "DATA_DIR_IN_USE",
                     absl::StrCat("--data-dir ", path, " belongs to another running server"),
                     {{"path", path}});
  }
  folder->settled_ = fsync(opened.get()) == 0;
  return folder;
}

OpenFile DataFolder::OpenArrays() const {
  return OpenFile(openat(folder_.get(), kArrays, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
}

absl::StatusOr<Manifest> DataFolder::ReadManifest() const {
  const OpenFile file = OpenToRead(folder_, kManifest);
  const auto bad = [this](std::string_view cause) {
    return BadFolder(path_, absl::StrCat(kManifest, ": ", Absl(cause)));
  };
  if (!file.is_open() && errno == ENOENT) {
    bool has_arrays = false;
    ForEach(OpenArrays(),
            [&](const std::string& name) { has_arrays |= NumberOf(name).has_value(); });
    return has_arrays ? absl::StatusOr<Manifest>(bad("it is missing, but the folder has arrays"))
                      : Manifest();
  }
  struct stat status {};
  if (!file.is_open() || fstat(file.get(), &status) != 0) return bad(std::strerror(errno));
  if (!S_ISREG(status.st_mode)) return bad("it is not a regular file");
  if (static_cast<std::size_t>(status.st_size) > kLargestManifest)
    return bad("it is larger than 1 GiB");
  std::string text(static_cast<std::size_t>(status.st_size), '\0');
  const std::optional<std::size_t> size = ReadAll(file.get(), text.data(), text.size());
  if (!size.has_value()) return bad(std::strerror(errno));
  text.resize(*size);
  absl::StatusOr<Manifest> manifest = Parse(text);
  if (!manifest.ok()) return bad(std::string(manifest.status().message()));
  return manifest;
}

absl::Status DataFolder::WriteManifest(const Manifest& manifest, bool* replaced) {
  *replaced = false;
  const Json json = ToJson(manifest);
  const std::string bytes = json.dump();
  const std::string text = absl::StrCat(R"({"crc32c":)", Crc32c(bytes.data(), bytes.size()),
                                        R"(,"manifest":)", bytes, "}\n");
  const auto fail = [this](std::string_view path) {
    absl::Status status = NotWritten(path);
    unlinkat(folder_.get(), kNewManifest, 0);
    return status;
  };
  if (text.size() > kLargestManifest) {
    errno = EFBIG;
    return NotWritten(kManifest);
  }
  // The names of the new arrays must be on the disk before a manifest that names them.
  const OpenFile arrays = OpenArrays();
  if (arrays.is_open() ? fsync(arrays.get()) != 0 : errno != ENOENT) return fail(kArrays);
  {
    const OpenFile file(openat(folder_.get(), kNewManifest, kWrite, 0600));
    if (!file.is_open() || !WriteAll(file.get(), text.data(), text.size(), -1) ||
        fsync(file.get()) != 0)
      return fail(kNewManifest);
  }
  if (fsync(folder_.get()) != 0 ||
      renameat(folder_.get(), kNewManifest, folder_.get(), kManifest) != 0)
    return fail(kManifest);
  *replaced = true;
  settled_ = fsync(folder_.get()) == 0;
  return settled_ ? absl::OkStatus() : NotWritten(kManifest);
}

absl::StatusOr<DataFolder::Writer> DataFolder::Create(const ArrayFile& file) {
  if (mkdirat(folder_.get(), kArrays, kPrivate) != 0 && errno != EEXIST) return NotWritten(kArrays);
  const OpenFile arrays = OpenArrays();
  if (!arrays.is_open()) return NotWritten(kArrays);
  Writer writer;
  writer.path_ = PathOf(file.number);
  // If the file already exists, it may be overwritten, because no manifest names it.
  writer.file_ = OpenFile(openat(arrays.get(), FileName(file.number).c_str(), kWrite, 0600));
  const std::string header = HeaderOf(file);  // without the checksum, which Finish adds
  if (!writer.file_.is_open() || !WriteAll(writer.file_.get(), header.data(), header.size(), -1))
    return NotWritten(writer.path_);
  return writer;
}

absl::Status DataFolder::Writer::Write(const void* data, std::size_t size) {
  checksum_ = Crc32cExtend(checksum_, data, size);
  if (!WriteAll(file_.get(), data, size, -1)) return NotWritten(path_);
  unflushed_ += size;
  if (unflushed_ < kFlushBytes) return absl::OkStatus();
  unflushed_ = 0;
  return fsync(file_.get()) == 0 ? absl::OkStatus() : NotWritten(path_);
}

absl::Status DataFolder::Writer::Finish(ArrayFile& file) {
  file.checksum = checksum_;
  const std::string header = HeaderOf(file);
  const bool written =
      WriteAll(file_.get(), header.data(), header.size(), 0) && fsync(file_.get()) == 0;
  return written ? absl::OkStatus() : NotWritten(path_);
}

absl::StatusOr<DataFolder::Reader> DataFolder::Read(const ArrayFile& file) const {
  Reader reader;
  reader.expected_ = file.checksum;
  const OpenFile arrays = OpenArrays();
  if (arrays.is_open()) reader.file_ = OpenToRead(arrays, FileName(file.number));
  struct stat status {};
  if (!reader.file_.is_open() || fstat(reader.file_.get(), &status) != 0)
    return Lost(absl::StrCat(PathOf(file.number), ": ", std::strerror(errno)));
  if (!S_ISREG(status.st_mode))
    return Lost(absl::StrCat(PathOf(file.number), " is not a regular file"));
  const std::string expected = HeaderOf(file);
  std::string header(expected.size(), '\0');
  if (static_cast<std::uint64_t>(status.st_size) != expected.size() + file.type.bytes())
    return Lost(absl::StrCat(PathOf(file.number), " does not have the size of the array"));
  if (ReadAll(reader.file_.get(), header.data(), header.size()) != header.size() ||
      header != expected)
    return Lost(absl::StrCat(PathOf(file.number), " does not begin with the header of the array"));
  return reader;
}

absl::Status DataFolder::Reader::Read(void* data, std::size_t size) {
  const std::optional<std::size_t> got = ReadAll(file_.get(), data, size);
  if (!got.has_value()) return Lost(std::strerror(errno));
  if (*got != size) return Lost("the file ends before the array does");
  checksum_ = Crc32cExtend(checksum_, data, size);
  return absl::OkStatus();
}

absl::Status DataFolder::Reader::Finish() const {
  return checksum_ == expected_ ? absl::OkStatus()
                                : Lost("the bytes of the file do not match their checksum");
}

void DataFolder::RemoveOthers(const Manifest& manifest, const std::set<std::uint64_t>& needed) {
  unlinkat(folder_.get(), kNewManifest, 0);
  if (!settled_) return;
  const OpenFile arrays = OpenArrays();
  ForEach(OpenArrays(), [&](const std::string& name) {
    const std::optional<std::uint64_t> number = NumberOf(name);
    if (number.has_value() && !manifest.files.contains(*number) && !needed.contains(*number))
      unlinkat(arrays.get(), name.c_str(), 0);
  });
}

}  // namespace tessera
