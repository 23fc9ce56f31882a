// run: executes programs from JSON files.
//
// A file is an ExecuteRequest in protobuf's JSON, {"steps": [{"dot": {"a": {...}, "b": {...}}}]}.
// Some values may also be written as on the command line:
//
//   operands    "x[0]", "file:PATH.npy", "step:0" or "step:0.indices" instead of a message such as
//               {"buffer": "x"}; for map, a list of such strings or messages
//   result      "scratch" or the name of a buffer instead of
//               {"buffer": {"name": "y", "replace": true}};
//               the same for values and indices, the results of topk
//   expression  "(a - b) * 2" instead of {"nodes": [...]}
//   op          "argmin" instead of "REDUCE_OP_ARGMIN"
//   out_dtype   "f32" instead of "DTYPE_F32"
//
// Operations may also have the names of commands, such as "topk" for "top_k".
#include <algorithm>
#include <initializer_list>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command.h"
#include "client/cli/json_fault.h"
#include "client/cli/operands.h"
#include "client/cli/results.h"
#include "client/expression_text.h"
#include "client/rpc/requests.h"
#include "client/rpc/text_file.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/util/json_util.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestReason = 300;
constexpr std::size_t kLargestProgram = 64;  // MiB
constexpr std::size_t kDeepest = 100;        // protobuf's limit

// A JSON value that finds the keys of a large object quickly.
using ProgramJson = nlohmann::json;

[[noreturn]] void ThrowBadProgram(const std::string& path, const std::string& what) {
  ThrowInvalid("BAD_PROGRAM", absl::StrCat(path, " is not a program: ", what));
}

ProgramJson MessageJson(const google::protobuf::Message& message) {
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text).ok())
    throw CommandError(absl::InternalError("a message cannot be written as JSON"));
  return ProgramJson::parse(text);
}

// In the request of one step, replaces values that are written as on the command line.
void Expand(Session& session, const std::string& operation, ProgramJson& request) {
  // Calls f(text, value) for each of these fields that is a text.
  const auto texts = [&](std::initializer_list<const char*> names, const auto& f) {
    for (const char* name : names) {
      const auto value = request.find(name);
      if (value != request.end() && value->is_string()) f(value->get<std::string>(), *value);
    }
  };
  const auto operand = [&](const std::string& text, ProgramJson& value) {
    value = MessageJson(ToMessage(ResolveOperand(session, text)));
  };
  const auto upper = [](std::string_view prefix) {
    return [prefix](const std::string& text, ProgramJson& value) {
      const std::string name = absl::AsciiStrToUpper(text);
      value = absl::StartsWith(name, Absl(prefix)) ? name : absl::StrCat(Absl(prefix), name);
    };
  };
  texts({"a", "b", "x", "mask", "edges", "keys", "labels"}, operand);
  if (operation == "take") texts({"indices"}, operand);
  for (const char* name : {"operands", "with"}) {
    if (!request.contains(name) || !request[name].is_array()) continue;
    for (ProgramJson& value : request[name])
      if (value.is_string()) operand(value.get<std::string>(), value);
  }
  texts({"expression"}, [](const std::string& text, ProgramJson& value) {
    value = MessageJson(OrThrow(ParseExpression(text)).ToMessage());
  });
  texts({"op"}, upper("REDUCE_OP_"));
  texts({"out_dtype"}, upper("DTYPE_"));
  texts({"mode"}, upper("TAKE_MODE_"));
  texts({"function"}, upper("LINALG_FUNCTION_"));
  texts({"result", "values", "indices"}, [](const std::string& where, ProgramJson& value) {
    value = where == "scratch" ? ProgramJson{{"scratch", true}}
                               : ProgramJson{{"buffer", {{"name", where}}}};
  });
}

// protobuf accepts two spellings of a field, such as transpose_b and transposeB.
std::string FoldedKey(std::string_view key) {
  std::string folded = absl::AsciiStrToLower(Absl(key));
  std::erase(folded, '_');
  return folded;
}

// Returns the name of a field of type bool whose value is a string, or "" if there is none.
// protobuf would take strings such as "yes" and "f" for true and false.
std::string TextForBool(const ProgramJson& json, const google::protobuf::Descriptor& message) {
  if (json.is_array()) {
    for (const ProgramJson& one : json)
      if (std::string found = TextForBool(one, message); !found.empty()) return found;
  }
  if (!json.is_object()) return "";
  for (const auto& [key, value] : json.items()) {
    const google::protobuf::FieldDescriptor* field = message.FindFieldByName(key);
    if (field == nullptr) field = message.FindFieldByCamelcaseName(key);
    if (field == nullptr) continue;  // protobuf will refuse it
    if (field->type() == field->TYPE_BOOL && value.is_string()) return key;
    if (field->type() != field->TYPE_MESSAGE) continue;
    std::string found = TextForBool(value, *field->message_type());
    if (!found.empty()) return found;
  }
  return "";
}

Program ReadProgram(Session& session, const std::string& path) {
  const absl::StatusOr<std::string> text = ReadTextFile(path, kLargestProgram);
  if (!text.ok()) ThrowBadProgram(path, absl::StrCat("it ", text.status().message()));
  if (const std::string fault = JsonFault(*text, kDeepest, FoldedKey); !fault.empty())
    ThrowBadProgram(path, absl::StrCat("it ", fault));
  ProgramJson json;
  try {
    json = ProgramJson::parse(*text, nullptr, /*allow_exceptions=*/true, /*ignore_comments=*/true);
  } catch (const ProgramJson::exception& error) {
    // The message comes after the library's name for the error, which is in brackets.
    const std::string_view what = error.what();
    const std::size_t name = what.find("] ");
    ThrowBadProgram(path, std::string(Beginning(what.substr(name == what.npos ? 0 : name + 2),
                                                kLongestReason)));
  }
  if (!json.is_object() || !json.contains("steps") || !json["steps"].is_array())
    ThrowBadProgram(path, "it has no list called \"steps\"");
  for (ProgramJson& step : json["steps"]) {
    if (!step.is_object() || step.size() != 1 || !step.begin()->is_object())
      ThrowBadProgram(path,
                      "a step must be an object such as {\"dot\": {\"a\": \"x\", \"b\": \"y\"}}");
    Expand(session, step.begin().key(), *step.begin());
    step = ProgramJson{{OperationName(step.begin().key()), std::move(*step.begin())}};
  }
  Program program;
  if (const std::string key = TextForBool(json, *program.request().descriptor()); !key.empty())
    ThrowBadProgram(path, absl::StrCat("\"", key, "\" must be true or false"));
  const auto parsed = google::protobuf::util::JsonStringToMessage(json.dump(), &program.request());
  if (!parsed.ok()) ThrowBadProgram(path, std::string(parsed.message()));
  return program;
}

void RunProgram(Session& session, const std::string& path) {
  Program program = ReadProgram(session, path);
  if (session.json) program.WantStats();
  const auto start = Clock::now();
  const v1::ExecuteResponse response = OrThrow(session.client.Execute(program));
  const absl::Duration wall = Since(start);
  absl::Status first_error;
  for (int i = 0; i < response.results_size(); ++i) {
    Session step{session.client, session.json};
    if (!session.json) std::cout << i << ": " << std::flush;
    try {
      ReportResult(step, response.results(i));
    } catch (const CommandError& error) {
      step.document["error"] = ToJson(error.status);
      if (!session.json) std::cout << ErrorReason(error.status) << '\n';
      first_error.Update(error.status);
    }
    if (session.json) session.document["steps"].push_back(std::move(step.document));
  }
  session.document["device"] = response.device();
  session.document["queue_us"] = response.queue_us();
  session.document["total_us"] = response.total_us();
  session.document["wall_us"] = absl::ToDoubleMicroseconds(wall);
  OrThrow(first_error);
}

}  // namespace

void AddRun(CLI::App& app, Command& chosen) {
  const auto [command, path] =
      AddCommand(app, chosen, "run", "Run a program of operations from a JSON file", RunProgram);
  command->add_option("file", *path, "The program")->type_name("FILE")->required();
}

}  // namespace tessera
