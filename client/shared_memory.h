// Memory that a process shares with a server on the same host, for transfers without messages
// (proto/tessera/v1/shared_memory.proto).
//
//   absl::StatusOr<tessera::SharedMemory> memory = client.MakeSharedMemory(bytes);
//   ... fill memory->bytes() ...
//   client.UploadShared("x", tessera::DType::kF32, {n}, *memory);
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace tessera {

// Movable. The memory is shared until this object is destroyed or the server ends. After the server
// has ended, transfers fail with REGION_NOT_FOUND, but the bytes remain accessible. Const functions
// are thread safe.
class SharedMemory {
 public:
  // Allocates at least this many bytes of zeroed memory and shares them with the server that
  // listens on the socket. Returns UNAVAILABLE / SHARED_MEMORY_UNAVAILABLE if this system lacks a
  // required feature or the server does not respond in time, and the errors of
  // RegisterRegionResponse.
  static absl::StatusOr<SharedMemory> Make(const std::string& socket_path, std::size_t bytes,
                                           absl::Duration timeout);

  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  // The memory is page-aligned and consists of whole pages.
  absl::Span<char> bytes() const { return {memory_, size_}; }
  // The name of the memory in requests.
  const std::string& region() const { return region_; }
  // Whether the server still shares the memory.
  bool connected() const;

 private:
  SharedMemory() = default;
  absl::Status Allocate(std::size_t bytes, int& file);
  absl::Status Register(const std::string& socket_path, int file, absl::Duration timeout);

  char* memory_ = nullptr;
  std::size_t size_ = 0;
  int socket_ = -1;
  std::string region_;
};

}  // namespace tessera
