// Memory that a process shares with a server on its own host, for transfers without messages
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

// Movable. The server knows the memory until it ends, or the server does; afterwards transfers fail
// with REGION_NOT_FOUND, and its bytes stay. Constant functions are thread safe.
class SharedMemory {
 public:
  // Shares memory of zeros, of at least so many bytes, with the server that listens on a socket.
  // UNAVAILABLE / SHARED_MEMORY_UNAVAILABLE: this system does not offer what it takes, or nobody
  // answers in time; and the errors of RegisterRegionResponse.
  static absl::StatusOr<SharedMemory> Make(const std::string& socket_path, std::size_t bytes,
                                           absl::Duration timeout);

  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  // Aligned to a page; whole pages.
  absl::Span<char> bytes() const { return {memory_, size_}; }
  // What requests call it.
  const std::string& region() const { return region_; }
  // Whether the server has not ended its part.
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
