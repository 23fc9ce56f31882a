// The folder of --data-dir, in which arrays outlive the server. docs/durability.md describes the
// files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/compute.h"

namespace tessera {

// A file with one array. The file's name is its number.
struct ArrayFile {
  std::uint64_t number = 0;
  std::string array;  // the name of the buffer for which the file was written
  ArrayType type;
  std::uint32_t checksum = 0;  // CRC-32C of the array's bytes
};

// What a snapshot holds. All times are by the wall clock.
struct Manifest {
  struct Entry {
    std::string name;
    std::uint64_t version = 0;
    std::uint64_t file = 0;  // a link has the file of its source
    // The version of the buffer that owns the memory in this process. It is not in the file.
    std::uint64_t owner = 0;
    absl::Time create_time;
    absl::Time expire_time = absl::InfiniteFuture();
    std::vector<std::string> devices;  // those of the shards
  };
  struct OfTenant {
    std::uint64_t last_version = 0;  // the greatest version that was given out
    std::vector<Entry> buffers;
  };
  absl::Time time;              // when the snapshot began
  std::uint64_t next_file = 1;  // no file of this or an earlier snapshot has this number
  std::map<std::uint64_t, ArrayFile> files;  // by number
  std::map<std::string, OfTenant> tenants;   // by name
};

// A descriptor of an open file. Movable.
class OpenFile {
 public:
  explicit OpenFile(int descriptor = -1) : descriptor_(descriptor) {}
  OpenFile(OpenFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  OpenFile& operator=(OpenFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~OpenFile();
  int get() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }
  // Leaves the descriptor open.
  void Release() { descriptor_ = -1; }

 private:
  int descriptor_;
};

// Only one thread at a time may write; any number may read. Errors of writing are
// FAILED_PRECONDITION / SNAPSHOT_FAILED {path, cause}. Errors of reading are DATA_LOSS, with the
// cause as their message and without a reason.
class DataFolder {
 public:
  // Creates the folder unless it exists, and locks it for as long as the result exists. Errors:
  // FAILED_PRECONDITION / DATA_DIR_IN_USE {path} if another server uses the folder, or BAD_DATA_DIR
  // {path, cause} if it cannot be used.
  static absl::StatusOr<std::unique_ptr<DataFolder>> Open(const std::string& path);

  // Returns an empty manifest, whose time is absl::Time(), if the folder has neither a manifest nor
  // arrays. Returns BAD_DATA_DIR if the manifest cannot be read, is larger than 1 GiB, is damaged,
  // was written by a later version of the program, or is missing although there are arrays.
  absl::StatusOr<Manifest> ReadManifest() const;
  // Replaces the manifest in one step. After an error, *replaced says whether later servers may
  // find the new one.
  absl::Status WriteManifest(const Manifest& manifest, bool* replaced);

  // Writes an array piece by piece.
  class Writer {
   public:
    absl::Status Write(const void* data, std::size_t size);
    // Called once all bytes are written; sets the checksum and waits until the file is on the disk.
    absl::Status Finish(ArrayFile& file);

   private:
    friend class DataFolder;
    std::string path_;
    OpenFile file_;
    std::uint32_t checksum_ = 0;
    std::size_t unflushed_ = 0;  // bytes
  };
  absl::StatusOr<Writer> Create(const ArrayFile& file);

  // Reads an array piece by piece.
  class Reader {
   public:
    absl::Status Read(void* data, std::size_t size);
    // Called once all bytes are read; returns an error unless they have the checksum.
    absl::Status Finish() const;

   private:
    friend class DataFolder;
    OpenFile file_;
    std::uint32_t checksum_ = 0;
    std::uint32_t expected_ = 0;
  };
  absl::StatusOr<Reader> Read(const ArrayFile& file) const;

  // Removes the arrays that are neither in `manifest`, which is in effect, nor in `needed`. Removes
  // nothing while a failure of the host could bring back an earlier manifest.
  void RemoveOthers(const Manifest& manifest, const std::set<std::uint64_t>& needed);

 private:
  explicit DataFolder(std::string path) : path_(std::move(path)) {}

  // Opens the folder of the arrays, which may not be a link.
  OpenFile OpenArrays() const;

  const std::string path_;
  OpenFile folder_, lock_;
  bool settled_ = false;  // whether the folder's manifest is on the disk
};

}  // namespace tessera
