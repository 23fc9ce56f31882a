// Prints the results of a call, adds them to the session's document, or saves them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/command.h"
#include "client/cli/operands.h"
#include "kernels/base/error.h"

namespace tessera {

// Reports what a call cost, on stderr because stdout carries the result.
void ReportStats(Session& session, const v1::ExecutionStats& stats, absl::Duration wall,
                 bool timing);

void ReportScalar(Session& session, const v1::Scalar& value);

void ReportBuffer(Session& session, const v1::Buffer& buffer);

absl::Status ReportTensor(Session& session, const v1::Tensor& tensor);

// Checks that standard output does not receive both the document and the array.
absl::Status CheckOutput(const Session& session, const std::string& path);

// Does the same check for two results. Results that are printed also go to standard output.
// a_resident, b_resident: whether the result stays on the device.
absl::Status CheckOutputs(const Session& session, const std::string& a, const std::string& b,
                          bool a_resident, bool b_resident);

// bytes: the size of the elements.
void ReportFile(Session& session, const std::string& path, std::uint64_t bytes);

// Downloads a buffer into a .npy file.
absl::StatusOr<v1::Buffer> SaveBuffer(Session& session, const std::string& name,
                                      const std::string& path, const DownloadOptions& options = {});

absl::Status SaveTensor(const v1::Tensor& tensor, const std::string& path);

// Reports one of several results of a call. With JSON, the result is put into the document under
// `name`. report: Session& -> absl::Status.
template <class Report>
absl::Status ReportPart(Session& session, const char* name, const Report& report) {
  Session part{session.client, session.json};
  absl::Status status = report(part);
  if (session.json) session.document[name] = std::move(part.document);
  return status;
}

// Delivers an array from a response: saves it if the path of a file is given, and reports it
// otherwise. buffer: the buffer that holds the array, or a message without a name if the array is
// `tensor`. A buffer that is saved is temporary and is deleted afterwards.
absl::Status DeliverResult(Session& session, const std::string& file, const v1::Tensor& tensor,
                           const v1::Buffer& buffer);

// Returns a target for a result that is too large for one message. The buffer is needed only until
// it has been downloaded.
absl::StatusOr<ResultBuffer> TemporaryBuffer(Session& session, std::string_view suffix = "");

// Runs an operation with an array result and delivers the result as the flags say. run:
// OperationOptions -> the response.
template <class Run>
absl::Status DeliverArray(Session& session, const OperationFlags& operation,
                          const ResultFlags& result, const Run& run) {
  if (absl::Status status = CheckOutput(session, result.file); !status.ok()) return status;
  OperationOptions options = operation.Options();
  if (!result.out.empty()) {
    options.target =
        ResultBuffer{result.out, ParseDuration(result.ttl), result.replace, result.placement};
  }
  auto start = Clock::now();
  auto response = run(options);
  if (!result.file.empty() && ErrorReason(response.status()) == "RESULT_TOO_LARGE") {
    auto temporary = TemporaryBuffer(session);
    if (!temporary.ok()) return temporary.status();
    options.target = *std::move(temporary);
    start = Clock::now();
    response = run(options);
  }
  if (!response.ok()) return response.status();
  const absl::Duration wall = Since(start);
  absl::Status status = DeliverResult(session, result.file, response->tensor(), response->buffer());
  if (status.ok()) ReportStats(session, response->stats(), wall, operation.timing);
  return status;
}

}  // namespace tessera
