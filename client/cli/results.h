// What a call answered: printed, added to the session's document, or saved.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/command.h"
#include "client/cli/operands.h"
#include "kernels/base/error.h"

namespace tessera {

// Says what a call cost: on stderr, for stdout carries the result.
void ReportStats(Session& session, const v1::ExecutionStats& stats, absl::Duration wall,
                 bool timing);

void ReportScalar(Session& session, const v1::Scalar& value);

void ReportBuffer(Session& session, const v1::Buffer& buffer);

absl::Status ReportTensor(Session& session, const v1::Tensor& tensor);

// Standard output takes the document or the array.
absl::Status CheckOutput(const Session& session, const std::string& path);

// bytes: of elements.
void ReportFile(Session& session, const std::string& path, std::uint64_t bytes);

// Downloads a buffer into a .npy file.
absl::StatusOr<v1::Buffer> SaveBuffer(Session& session, const std::string& name,
                                      const std::string& path, const DownloadOptions& options = {});

absl::Status SaveTensor(const v1::Tensor& tensor, const std::string& path);

// Runs an operation with an array result and delivers it where the flags say. run: OperationOptions
// -> its response.
template <class Run>
absl::Status DeliverArray(Session& session, const OperationFlags& operation,
                          const ResultFlags& result, const Run& run) {
  if (absl::Status status = CheckOutput(session, result.file); !status.ok()) return status;
  OperationOptions options = operation.Options();
  if (!result.out.empty()) {
    options.target = ResultBuffer{result.out, ParseDuration(result.ttl), result.replace};
  }
  auto start = Clock::now();
  auto response = run(options);
  bool temporary = false;
  if (!result.file.empty() && ErrorReason(response.status()) == "RESULT_TOO_LARGE") {
    // Too much for one message: let it become a buffer for as long as the download takes.
    const auto limits = session.Limits();
    if (!limits.ok()) return limits.status();
    options.target =
        ResultBuffer{absl::StrCat("tessera-cli/", ::getpid(), "-", absl::GetCurrentTimeNanos()),
                     TemporaryTtl(*limits)};
    temporary = true;
    start = Clock::now();
    response = run(options);
  }
  if (!response.ok()) return response.status();
  const absl::Duration wall = Since(start);

  absl::Status status;
  if (temporary) {
    status = SaveBuffer(session, options.target->name, result.file).status();
    session.client.DeleteBuffer(options.target->name).IgnoreError();
    if (status.ok()) ReportFile(session, result.file, response->buffer().size_bytes());
  } else if (!result.file.empty()) {
    status = SaveTensor(response->tensor(), result.file);
    if (status.ok()) ReportFile(session, result.file, response->tensor().data().size());
  } else if (!result.out.empty()) {
    ReportBuffer(session, response->buffer());
  } else {
    status = ReportTensor(session, response->tensor());
  }
  if (status.ok()) ReportStats(session, response->stats(), wall, operation.timing);
  return status;
}

}  // namespace tessera
