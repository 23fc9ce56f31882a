// The files of --data-dir: what a server finds after a crash, a disk error or damage.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/client_and_server/crc32c.h"
#include "server/durable/data_folder.h"

namespace {

std::atomic<int> flushes = 0;               // how often fsync has been called
std::atomic<int> good_flushes = 1'000'000;  // how many more calls succeed

}  // namespace

// Replaces the function of the C library.
extern "C" int fsync(int file) {
  ++flushes;
  if (good_flushes-- > 0) return static_cast<int>(syscall(SYS_fsync, file));
  errno = EIO;
  return -1;
}

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class DurableTest : public testing::Test {
 protected:
  DurableTest() {
    std::string path = fs::temp_directory_path() / "tessera-test-XXXXXX";
    path_ = mkdtemp(path.data());
  }
  ~DurableTest() override {
    folder_.reset();
    fs::remove_all(path_);
  }

  DataFolder& Open() {
    folder_.reset();  // releases its lock
    folder_ = *DataFolder::Open(path_ / "data");
    return *folder_;
  }
  fs::path File(const std::string& name) const { return path_ / "data" / name; }
  static std::string Content(const fs::path& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  static void SetContent(const fs::path& file, const std::string& content) {
    std::ofstream(file, std::ios::binary | std::ios::trunc) << content;
  }
  std::vector<std::string> Files() const {
    std::vector<std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(path_ / "data"))
      if (entry.is_regular_file() && entry.path().filename() != "lock")
        files.push_back(entry.path().filename());
    std::sort(files.begin(), files.end());
    return files;
  }

  static std::string Bytes(std::size_t size, char seed) {
    std::string bytes(size, seed);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(seed + 31 * i + i / 251);
    return bytes;
  }
  // Writes an array of bytes in pieces, and adds it to the manifest under its name.
  static absl::Status Add(DataFolder& folder, const std::string& name, const std::string& bytes,
                          Manifest& manifest) {
    ArrayFile file{.number = manifest.next_file++,
                   .array = name,
                   .type = *MakeArrayType(DType::kU8, {static_cast<std::int64_t>(bytes.size())})};
    absl::StatusOr<DataFolder::Writer> writer = folder.Create(file);
    if (!writer.ok()) return writer.status();
    for (std::size_t i = 0; i < bytes.size(); i += 1000) {
      const std::size_t piece = std::min<std::size_t>(1000, bytes.size() - i);
      if (absl::Status status = writer->Write(bytes.data() + i, piece); !status.ok()) return status;
    }
    if (absl::Status status = writer->Finish(file); !status.ok()) return status;
    manifest.tenants[""].buffers.push_back(
        {.name = name, .version = 100 + file.number, .file = file.number});
    manifest.files.emplace(file.number, file);
    return absl::OkStatus();
  }
  // Writes a snapshot of two arrays.
  Manifest WriteTwo(DataFolder& folder) {
    Manifest manifest;
    bool replaced = false;
    EXPECT_TRUE(Add(folder, "a", Bytes(2500, 'a'), manifest).ok());
    EXPECT_TRUE(Add(folder, "b/c", Bytes(0, 'b'), manifest).ok());
    EXPECT_TRUE(folder.WriteManifest(manifest, &replaced).ok());
    EXPECT_TRUE(replaced);
    return manifest;
  }
  static absl::StatusOr<std::string> ReadBack(const DataFolder& folder, const ArrayFile& file) {
    absl::StatusOr<DataFolder::Reader> reader = folder.Read(file);
    if (!reader.ok()) return reader.status();
    std::string bytes(file.type.bytes(), '\0');
    if (absl::Status status = reader->Read(bytes.data(), bytes.size()); !status.ok()) return status;
    if (absl::Status status = reader->Finish(); !status.ok()) return status;
    return bytes;
  }

  fs::path path_;
  std::unique_ptr<DataFolder> folder_;
};

TEST_F(DurableTest, AnEmptyFolderHasAnEmptyManifest) {
  const absl::StatusOr<Manifest> manifest = Open().ReadManifest();
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_THAT(manifest->tenants, IsEmpty());
  EXPECT_EQ(fs::status(path_ / "data").permissions(), fs::perms::owner_all);
}

TEST_F(DurableTest, WhatWasWrittenIsReadBack) {
  DataFolder& folder = Open();
  Manifest written;
  written.time = absl::FromUnixMicros(1'700'000'000'000'001);
  ASSERT_TRUE(Add(folder, "a", Bytes(123'456, 'x'), written).ok());
  Manifest::OfTenant& tenant = written.tenants["some-tenant"];
  std::swap(tenant, written.tenants[""]);
  tenant.last_version = ~std::uint64_t{0};
  tenant.buffers.push_back({.name = "link",
                            .version = (std::uint64_t{1} << 63) + 1,
                            .file = 1,
                            .create_time = absl::FromUnixMicros(5),
                            .expire_time = absl::FromUnixMicros(7),
                            .devices = {"cpu:0", "cpu:1"}});
  bool replaced = false;
  ASSERT_TRUE(folder.WriteManifest(written, &replaced).ok());

  const absl::StatusOr<Manifest> read = Open().ReadManifest();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->time, written.time);
  EXPECT_EQ(read->next_file, 2u);
  ASSERT_EQ(read->files.size(), 1u);
  const ArrayFile& file = read->files.at(1);
  EXPECT_EQ(file.array, "a");
  EXPECT_EQ(file.type.dtype, DType::kU8);
  EXPECT_EQ(*ReadBack(*folder_, file), Bytes(123'456, 'x'));
  const Manifest::OfTenant& same = read->tenants.at("some-tenant");
  EXPECT_EQ(same.last_version, tenant.last_version);
  EXPECT_EQ(same.buffers[0].expire_time, absl::InfiniteFuture());
  EXPECT_EQ(same.buffers[1].name, "link");
  EXPECT_EQ(same.buffers[1].version, tenant.buffers[1].version);
  EXPECT_EQ(same.buffers[1].file, 1u);
  EXPECT_EQ(same.buffers[1].create_time, absl::FromUnixMicros(5));
  EXPECT_EQ(same.buffers[1].expire_time, absl::FromUnixMicros(7));
  EXPECT_THAT(same.buffers[1].devices, ElementsAre("cpu:0", "cpu:1"));
  EXPECT_THAT(read->tenants.at("").buffers, IsEmpty());
}

TEST_F(DurableTest, FilesAreSafetensors) {
  const Manifest manifest = WriteTwo(Open());
  const std::string content = Content(File("arrays/1.safetensors"));
  std::uint64_t size = 0;
  for (int i = 7; i >= 0; --i)
    size = size << 8 | static_cast<unsigned char>(content[static_cast<std::size_t>(i)]);
  EXPECT_EQ((8 + size) % 64, 0u);
  EXPECT_EQ(content.substr(8 + size), Bytes(2500, 'a'));
  const std::string header = content.substr(8, size);
  EXPECT_THAT(header,
              HasSubstr(R"("array":{"dtype":"U8","shape":[2500],"data_offsets":[0,2500]})"));
  char crc[16];
  std::snprintf(crc, sizeof crc, "%08x", manifest.files.at(1).checksum);
  EXPECT_THAT(header, HasSubstr(std::string(R"({"__metadata__":{"crc32c":")") + crc + '"'));
}

TEST_F(DurableTest, OneServerOwnsTheFolder) {
  Open();
  const absl::StatusOr<std::unique_ptr<DataFolder>> second = DataFolder::Open(path_ / "data");
  EXPECT_EQ(ErrorReason(second.status()), "DATA_DIR_IN_USE");
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("another running server"));
  folder_.reset();
  EXPECT_TRUE(DataFolder::Open(path_ / "data").ok());
  // NFS shows the locks of other hosts only on files.
  const OpenFile elsewhere(open(File("lock").c_str(), O_RDWR));
  ASSERT_EQ(flock(elsewhere.get(), LOCK_EX | LOCK_NB), 0);
  EXPECT_EQ(ErrorReason(DataFolder::Open(path_ / "data").status()), "DATA_DIR_IN_USE");
}

TEST_F(DurableTest, AFolderThatCannotBeUsed) {
  SetContent(path_ / "file", "not a folder");
  for (const fs::path& path : {path_ / "file", path_ / "none" / "data"})
    EXPECT_EQ(ErrorReason(DataFolder::Open(path).status()), "BAD_DATA_DIR") << path;
}

// The server names the files of arrays, but the folder may be on a disk that others write to.
TEST_F(DurableTest, LinksAreNotFollowed) {
  DataFolder& folder = Open();
  const Manifest manifest = WriteTwo(folder);
  const fs::path elsewhere = path_ / "elsewhere";
  fs::rename(File("arrays"), elsewhere);
  SetContent(elsewhere / "7.safetensors", "another program's");
  fs::create_directory_symlink(elsewhere, File("arrays"));
  EXPECT_TRUE(absl::IsDataLoss(ReadBack(folder, manifest.files.at(1)).status()));
  Manifest next = manifest;
  EXPECT_EQ(ErrorReason(Add(folder, "c", "c", next)), "SNAPSHOT_FAILED");
  bool replaced = true;
  EXPECT_EQ(ErrorReason(folder.WriteManifest(manifest, &replaced)), "SNAPSHOT_FAILED");
  EXPECT_FALSE(replaced);
  folder.RemoveOthers(Manifest(), {});
  EXPECT_TRUE(fs::exists(elsewhere / "1.safetensors"));
  EXPECT_TRUE(fs::exists(elsewhere / "7.safetensors"));
}

// Opening a pipe would wait for its other end.
TEST_F(DurableTest, OnlyRegularFilesAreUsed) {
  DataFolder& folder = Open();
  const Manifest manifest = WriteTwo(folder);
  const auto make_pipe = [&](const std::string& name) {
    fs::remove(File(name));
    EXPECT_EQ(mkfifo(File(name).c_str(), 0600), 0);
  };
  make_pipe("arrays/1.safetensors");
  const absl::Status lost = ReadBack(folder, manifest.files.at(1)).status();
  EXPECT_TRUE(absl::IsDataLoss(lost)) << lost;
  EXPECT_THAT(std::string(lost.message()), HasSubstr("1.safetensors is not a regular file"));
  EXPECT_TRUE(ReadBack(folder, manifest.files.at(2)).ok());
  make_pipe("arrays/3.safetensors");
  Manifest next = manifest;
  EXPECT_EQ(ErrorReason(Add(folder, "c", "c", next)), "SNAPSHOT_FAILED");
  make_pipe("manifest.json.new");
  bool replaced = true;
  EXPECT_EQ(ErrorReason(folder.WriteManifest(manifest, &replaced)), "SNAPSHOT_FAILED");
  EXPECT_FALSE(replaced);
  make_pipe("manifest.json");
  const absl::Status bad = folder.ReadManifest().status();
  EXPECT_EQ(ErrorReason(bad), "BAD_DATA_DIR");
  EXPECT_THAT(std::string(bad.message()), HasSubstr("manifest.json: it is not a regular file"));
}

// Every way in which a file of an array may be damaged is found, and the other array is unharmed.
TEST_F(DurableTest, ADamagedArrayIsFound) {
  DataFolder& folder = Open();
  const Manifest manifest = WriteTwo(folder);
  const fs::path file = File("arrays/1.safetensors");
  const std::string good = Content(file);
  const auto message = [&] {
    const absl::StatusOr<std::string> read = ReadBack(folder, manifest.files.at(1));
    EXPECT_TRUE(absl::IsDataLoss(read.status())) << read.status();
    EXPECT_TRUE(ReadBack(folder, manifest.files.at(2)).ok());
    return std::string(read.status().message());
  };
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{7}, good.size() / 2, good.size() - 1}) {
    SetContent(file, good.substr(0, size));
    EXPECT_THAT(message(), HasSubstr("does not have the size"));
  }
  SetContent(file, good + "x");
  EXPECT_THAT(message(), HasSubstr("does not have the size"));
  const std::size_t begin = good.size() - 2500;
  for (const std::size_t at : {std::size_t{0}, std::size_t{8}, std::size_t{30}, begin - 1, begin,
                               begin + 1234, good.size() - 1}) {
    std::string flipped = good;
    flipped[at] = static_cast<char>(flipped[at] ^ 4);
    SetContent(file, flipped);
    EXPECT_THAT(message(), HasSubstr(at < begin ? "header" : "do not match their checksum")) << at;
  }
  fs::remove(file);
  EXPECT_THAT(message(), HasSubstr("No such file"));
  fs::create_symlink("2.safetensors", file);
  message();
  fs::remove(file);
  SetContent(file, good);
  EXPECT_EQ(*ReadBack(folder, manifest.files.at(1)), Bytes(2500, 'a'));
}

// A damaged manifest must not pass as an empty one: the next snapshot would delete every file.
TEST_F(DurableTest, ADamagedManifestIsRefused) {
  WriteTwo(Open());
  const fs::path file = File("manifest.json");
  const std::string good = Content(file);
  std::vector<std::string> bad = {"", "{", "[]", "{}", R"({"manifest":{"format":1},"crc32c":1})"};
  constexpr std::size_t kDeep = 1 << 20;
  bad.push_back(R"({"crc32c":1,"manifest":)" + std::string(kDeep, '[') + std::string(kDeep, ']') +
                "}");
  for (std::size_t size = 0; size + 3 < good.size(); size += 13)
    bad.push_back(good.substr(0, size));
  for (std::size_t at = 0; at + 3 < good.size(); at += 7) {
    bad.push_back(good);
    bad.back()[at] = static_cast<char>(bad.back()[at] ^ 1);
  }
  for (const std::string& content : bad) {
    SetContent(file, content);
    EXPECT_EQ(ErrorReason(Open().ReadManifest().status()), "BAD_DATA_DIR") << content;
  }
  const std::string later = R"({"format":2})";
  SetContent(file, R"({"crc32c":)" + std::to_string(Crc32c(later.data(), later.size())) +
                       R"(,"manifest":)" + later + "}");
  EXPECT_THAT(std::string(Open().ReadManifest().status().message()),
              HasSubstr("another version of the program"));
  SetContent(file, good);
  EXPECT_TRUE(Open().ReadManifest().ok());
  fs::remove(file);
  const absl::Status missing = Open().ReadManifest().status();
  EXPECT_EQ(ErrorReason(missing), "BAD_DATA_DIR");
  EXPECT_THAT(std::string(missing.message()),
              HasSubstr("it is missing, but the folder has arrays"));
}

TEST_F(DurableTest, AManifestOfAnAbsurdSizeIsRefused) {
  WriteTwo(Open());
  fs::resize_file(File("manifest.json"), std::uintmax_t{1} << 43);
  const absl::Status status = Open().ReadManifest().status();
  EXPECT_EQ(ErrorReason(status), "BAD_DATA_DIR");
  EXPECT_THAT(std::string(status.message()), HasSubstr("manifest.json: it is larger than 1 GiB"));
}

// These manifests have the right checksum, but no server writes them.
TEST_F(DurableTest, AManifestThatContradictsItselfIsRefused) {
  DataFolder& folder = Open();
  const Manifest good = WriteTwo(folder);
  const auto message = [&](const Manifest& manifest) {
    bool replaced = false;
    EXPECT_TRUE(folder.WriteManifest(manifest, &replaced).ok());
    return std::string(folder.ReadManifest().status().message());
  };
  Manifest bad = good;
  bad.tenants[""].buffers[1].name = "a";
  EXPECT_THAT(message(bad), HasSubstr("two buffers with the name a"));
  bad = good;
  bad.tenants[""].buffers[1].file = 3;
  EXPECT_THAT(message(bad), HasSubstr("a file without a type"));
  bad = good;
  bad.tenants[""].buffers[1].version = bad.tenants[""].buffers[0].version;
  EXPECT_THAT(message(bad), HasSubstr("two buffers with the version 101"));
  bad = good;
  bad.tenants["another"] = bad.tenants[""];
  EXPECT_THAT(message(bad), HasSubstr("two tenants share a file"));
  bad = good;
  bad.next_file = 2;
  EXPECT_THAT(message(bad), HasSubstr("a file number that has not been used"));
  for (const std::int64_t dim : {std::int64_t{-1}, std::int64_t{1} << 62}) {
    bad = good;
    bad.files.at(1).type.shape = {.rank = 2, .dims = {dim, 8}};
    EXPECT_NE(message(bad), "") << dim;
  }
  EXPECT_EQ(message(good), "");
}

TEST_F(DurableTest, OnlyArraysThatTheManifestNamesStay) {
  DataFolder& folder = Open();
  const Manifest manifest = WriteTwo(folder);
  for (const char* name : {"arrays/3.safetensors", "manifest.json.new"})
    SetContent(File(name), "torn");
  // The server has not written these files.
  for (const char* name : {"arrays/01.safetensors", "arrays/1.safetensors.x", "arrays/x"})
    SetContent(File(name), "other");
  folder.RemoveOthers(manifest, {});
  EXPECT_THAT(Files(), ElementsAre("01.safetensors", "1.safetensors", "1.safetensors.x",
                                   "2.safetensors", "manifest.json", "x"));
  Manifest none = manifest;
  none.files.clear();
  folder.RemoveOthers(none, {1});
  EXPECT_THAT(Files(), ElementsAre("01.safetensors", "1.safetensors", "1.safetensors.x",
                                   "manifest.json", "x"));
}

// Lowers the limit on the size of files, which makes writes fail as on a full disk: the last write
// that succeeds may be short.
class SmallFiles {
 public:
  explicit SmallFiles(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~SmallFiles() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

TEST_F(DurableTest, AFullDiskKeepsTheSnapshotBefore) {
  DataFolder& folder = Open();
  const Manifest before = WriteTwo(folder);
  const std::string content = Content(File("manifest.json"));
  for (const rlim_t limit : {rlim_t{0}, rlim_t{10}, rlim_t{1000}, rlim_t{60'000}}) {
    const SmallFiles full(limit);
    Manifest next = before;
    const absl::Status status = Add(folder, "large", Bytes(100'000, 'l'), next);
    EXPECT_EQ(ErrorReason(status), "SNAPSHOT_FAILED") << limit;
    EXPECT_EQ(ErrorMetadata(status)["path"], "arrays/3.safetensors");
    EXPECT_THAT(std::string(status.message()), HasSubstr("File too large"));
    folder.RemoveOthers(before, {});
    EXPECT_THAT(Files(), ElementsAre("1.safetensors", "2.safetensors", "manifest.json"));
  }
  for (const rlim_t limit : {rlim_t{0}, rlim_t{1}, rlim_t{content.size() - 1}}) {
    const SmallFiles full(limit);
    bool replaced = true;
    EXPECT_EQ(ErrorReason(folder.WriteManifest(before, &replaced)), "SNAPSHOT_FAILED") << limit;
    EXPECT_FALSE(replaced);
    EXPECT_EQ(Content(File("manifest.json")), content);
    EXPECT_THAT(Files(), ElementsAre("1.safetensors", "2.safetensors", "manifest.json"));
  }
  bool replaced = false;
  EXPECT_TRUE(folder.WriteManifest(before, &replaced).ok());
}

// Whichever flush fails, the folder has all files of each manifest that the next server may find.
TEST_F(DurableTest, AFailedFlushKeepsWhatLaterServersMayFind) {
  DataFolder& folder = Open();
  Manifest before = WriteTwo(folder);
  before.files.erase(2);
  before.tenants[""].buffers.pop_back();
  bool replaced = false;
  ASSERT_TRUE(folder.WriteManifest(before, &replaced).ok());
  folder.RemoveOthers(before, {});
  ASSERT_THAT(Files(), ElementsAre("1.safetensors", "manifest.json"));

  // Returns the error of a snapshot in which the array of `last` is replaced.
  const auto replace = [&](const Manifest& last, Manifest& next, int good) {
    good_flushes = good;
    next = {.next_file = last.next_file};
    replaced = false;
    absl::Status status = Add(folder, "new", Bytes(10, 'n'), next);
    if (status.ok()) status = folder.WriteManifest(next, &replaced);
    good_flushes = 1'000'000;
    folder.RemoveOthers(replaced ? next : last, {});
    return ErrorReason(status);
  };
  Manifest next;
  int good = 0;
  for (; replace(before, next, good) == "SNAPSHOT_FAILED" && !replaced; ++good)
    EXPECT_THAT(Files(), ElementsAre("1.safetensors", "manifest.json")) << good;
  // The new manifest exists, but it may be lost if the host fails.
  EXPECT_EQ(good, 4);
  EXPECT_TRUE(replaced);
  EXPECT_THAT(Files(), ElementsAre("1.safetensors", "3.safetensors", "manifest.json"));
  EXPECT_EQ(folder.ReadManifest()->files.size(), 1u);
  Manifest third;
  EXPECT_EQ(replace(next, third, 0), "SNAPSHOT_FAILED");
  EXPECT_TRUE(fs::exists(File("arrays/1.safetensors")));
  EXPECT_TRUE(fs::exists(File("arrays/3.safetensors")));
  EXPECT_EQ(replace(next, third, good + 1), "");
  EXPECT_THAT(Files(), ElementsAre("4.safetensors", "manifest.json"));
}

// A server that ends at a flush, or before the next one, leaves its files like this.
TEST_F(DurableTest, ACrashAtAnyFlushLeavesACompleteSnapshot) {
  WriteTwo(Open());
  bool ended = false;
  for (int good = 0; !ended; ++good) {
    const Manifest before = *Open().ReadManifest();
    Manifest next = before;
    next.files.erase(next.files.begin());
    std::erase_if(next.tenants[""].buffers,
                  [&](const Manifest::Entry& entry) { return !next.files.contains(entry.file); });
    good_flushes = good;
    bool replaced = false;
    ended = Add(*folder_, "new" + std::to_string(good), Bytes(5000, 'n'), next).ok() &&
            folder_->WriteManifest(next, &replaced).ok();
    good_flushes = 1'000'000;
    const absl::StatusOr<Manifest> found = Open().ReadManifest();
    ASSERT_TRUE(found.ok()) << found.status();
    folder_->RemoveOthers(*found, {});
    EXPECT_EQ(found->next_file, replaced ? next.next_file : before.next_file) << good;
    EXPECT_EQ(Files().size(), 3u) << good;
    for (const auto& [number, file] : found->files)
      EXPECT_TRUE(ReadBack(*folder_, file).ok()) << good << " " << number;
  }
}

// A single flush at the end of a large array could take minutes without a sign of progress.
TEST_F(DurableTest, ALargeArrayIsFlushedInParts) {
  DataFolder& folder = Open();
  ArrayFile file{.number = 1, .array = "large", .type = *MakeArrayType(DType::kU8, {200 << 20})};
  absl::StatusOr<DataFolder::Writer> writer = folder.Create(file);
  ASSERT_TRUE(writer.ok()) << writer.status();
  const std::string piece(std::size_t{1} << 20, 'x');
  const int before = flushes;
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(writer->Write(piece.data(), piece.size()).ok());
  EXPECT_EQ(flushes - before, 3);
}

// A crash left a file with the number of a new one.
TEST_F(DurableTest, WhatACrashLeftIsReplaced) {
  DataFolder& folder = Open();
  fs::create_directory(path_ / "data" / "arrays");
  SetContent(File("arrays/1.safetensors"), std::string(10'000, 'x'));
  const Manifest manifest = WriteTwo(folder);
  EXPECT_EQ(*ReadBack(folder, manifest.files.at(1)), Bytes(2500, 'a'));
}

}  // namespace
}  // namespace tessera
