// A handle to one version of a resident buffer, from Client::Hold:
//
//   absl::StatusOr<tessera::v1::MatmulResponse> product =
//       client.Matmul("a", "b", false, false, {}, {.target = tessera::ResultBuffer{"scores"}});
//   tessera::ResidentBuffer scores = client.Hold(product->buffer(), {.delete_with_handle = true});
//   client.Reduce(tessera::ReduceOp::kMax, scores);  // this version, or VERSION_MISMATCH
//
// A handle may outlive its client, because it shares the client's connections.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "client/client.h"

namespace tessera {

class Connection;

// Move-only; not thread safe. Empty after a move, Delete or Release.
class ResidentBuffer {
 public:
  ResidentBuffer() = default;
  ResidentBuffer(std::shared_ptr<Connection> connection, v1::Buffer buffer,
                 const HoldOptions& options);
  ResidentBuffer(ResidentBuffer&& other) noexcept;
  ResidentBuffer& operator=(ResidentBuffer&& other) noexcept;
  // If HoldOptions::delete_with_handle is set, starts to delete this version of the buffer, and no
  // other version with its name. Does not wait, but closing the connections waits up to five
  // seconds for the deletion. If the server does not respond, the buffer lives until its ttl ends.
  ~ResidentBuffer();

  explicit operator bool() const { return connection_ != nullptr; }
  // The buffer as the server described it when the handle was made.
  const v1::Buffer& info() const { return buffer_; }
  const std::string& name() const { return buffer_.name(); }
  std::uint64_t version() const { return buffer_.version(); }

  // Returns an operand that reads all of this version. Calls with it fail with VERSION_MISMATCH
  // once this version has been replaced.
  operator Operand() const;  // NOLINT(google-explicit-constructor)

  // Deletes this version and waits for the response. On success, the handle becomes empty. Returns
  // NOT_FOUND / BUFFER_NOT_FOUND if the version is already gone, FAILED_PRECONDITION /
  // VERSION_MISMATCH if another version has replaced it, and FAILED_PRECONDITION / EMPTY_HANDLE if
  // the handle is empty.
  absl::Status Delete(const CallOptions& call = {});
  // Empties the handle without deleting the buffer.
  v1::Buffer Release();

 private:
  void End();

  std::shared_ptr<Connection> connection_;  // null if the handle is empty
  v1::Buffer buffer_;
  bool delete_ = false;
};

}  // namespace tessera
