#include "client/resident_buffer.h"

#include <cstddef>
#include <utility>

#include "client/rpc/connection.h"
#include "client/rpc/event_loop.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

constexpr absl::Duration kDeleteTimeout = absl::Seconds(5);

}  // namespace

ResidentBuffer::ResidentBuffer(std::shared_ptr<Connection> connection, v1::Buffer buffer,
                               const HoldOptions& options)
    : connection_(std::move(connection)),
      buffer_(std::move(buffer)),
      delete_(options.delete_with_handle) {}

ResidentBuffer::ResidentBuffer(ResidentBuffer&& other) noexcept
    : connection_(std::move(other.connection_)),
      buffer_(std::move(other.buffer_)),
      delete_(other.delete_) {}

ResidentBuffer& ResidentBuffer::operator=(ResidentBuffer&& other) noexcept {
  if (this != &other) {
    End();
    connection_ = std::move(other.connection_);
    buffer_ = std::move(other.buffer_);
    delete_ = other.delete_;
  }
  return *this;
}

ResidentBuffer::~ResidentBuffer() { End(); }

// A request without a version would delete all buffers with this name, so nothing is sent.
void ResidentBuffer::End() {
  const std::shared_ptr<Connection> connection = std::move(connection_);
  if (connection == nullptr || !delete_ || version() == 0) return;
  // A server that does not have this version refuses the request.
  for (std::size_t server = 0; server < connection->channels().servers(); ++server) {
    StartCall(*connection, BufferRequest<v1::DeleteBufferRequest>(name(), version()),
              {.timeout = kDeleteTimeout, .only = server, .must_end = true},
              [](const absl::StatusOr<v1::DeleteBufferResponse>&) {});
  }
}

ResidentBuffer::operator Operand() const {
  Operand operand(name());
  operand.version = version();
  return operand;
}

absl::Status ResidentBuffer::Delete(const CallOptions& call) {
  if (connection_ == nullptr || version() == 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "EMPTY_HANDLE",
                     "the handle holds no buffer");
  }
  absl::Status status;
  for (std::size_t server = 0; server < connection_->channels().servers(); ++server) {
    status =
        connection_->Call(BufferRequest<v1::DeleteBufferRequest>(name(), version()), call, server)
            .status();
    if (status.ok()) {
      connection_ = nullptr;
      return status;
    }
  }
  return status;
}

v1::Buffer ResidentBuffer::Release() {
  connection_ = nullptr;
  return std::move(buffer_);
}

}  // namespace tessera
