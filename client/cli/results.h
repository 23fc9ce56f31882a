// Prints the results of a call, adds them to the session's document, or saves them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "client/cli/command.h"

namespace tessera {

// Options that say where array results go.
struct ResultFlags {
  bool two = false;  // whether the results are values and indices
  std::string out;
  std::string file;
  std::string indices_out;
  std::string indices_file;
  bool replace = false;
  std::string ttl;
  std::vector<std::string> placement;

  void AddForOne(CLI::App& command);
  void AddForTwo(CLI::App& command);

  bool given() const { return !out.empty() || !file.empty(); }
  // Throws BAD_OPTION if the options contradict each other or --json. only: "values", "indices", or
  // empty if both are computed.
  void Check(const Session& session, const std::string& only) const;
  void SetTargets(OperationOptions& options) const;
};

// Reports the result of an operation. If --json is given, also reports its ExecutionStats. Returns
// the stats. If the result is the error of a program's step, throws that error. If `only` names one
// of two results, the other one is not reported.
v1::ExecutionStats ReportResult(Session& session, const v1::StepResult& result,
                                const ResultFlags& flags = {}, const std::string& only = "");

void ReportBuffer(Session& session, const v1::Buffer& buffer);

// Delivers an array: saves it if the path of a file is given, and reports it otherwise. `buffer` is
// the buffer that holds the array, or a message without a name if the array is `tensor`. If there
// is neither, the array is in scratch memory.
void ReportArray(Session& session, const std::string& file, const v1::Tensor& tensor,
                 const v1::Buffer& buffer);

struct NamedArray {
  const char* name;
  const std::string& file;
  const v1::Tensor& tensor;
  const v1::Buffer& buffer;
};
// Calls ReportArray for each of several results, and throws the first error at the end. If --json
// is given, puts each result into the document under its name.
void ReportArrays(Session& session, std::initializer_list<NamedArray> arrays);

// Throws BAD_OPTION if standard output would receive both the document and an array, or if two
// results would go to the same place. Results that are printed also go to standard output.
// `b` is the file of the second result. `a_resident` and `b_resident` say whether the result stays
// on the device.
void CheckOutputs(const Session& session, const std::string& a, const std::string& b = "",
                  bool a_resident = false, bool b_resident = true);

// `bytes` is the size of the elements.
void ReportFile(Session& session, const std::string& path, std::uint64_t bytes);

// Downloads a buffer into a .npy file.
v1::Buffer SaveBuffer(Session& session, const std::string& name, const std::string& path,
                      const DownloadOptions& options = {});

}  // namespace tessera
