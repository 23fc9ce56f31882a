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
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command.h"
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
constexpr int kDeepest = 100;                // protobuf's limit

[[noreturn]] void ThrowBadProgram(const std::string& path, const std::string& what) {
  ThrowInvalid("BAD_PROGRAM", absl::StrCat(path, " is not a program: ", what));
}

Json MessageJson(const google::protobuf::Message& message) {
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text).ok())
    throw CommandError(absl::InternalError("a message cannot be written as JSON"));
  return Json::parse(text);
}

// In the request of one step, replaces values that are written as on the command line.
void Expand(Session& session, const std::string& operation, Json& request) {
  // Calls f(text, value) for each of these fields that is a text.
  const auto texts = [&](std::initializer_list<const char*> names, const auto& f) {
    for (const char* name : names) {
      const auto value = request.find(name);
      if (value != request.end() && value->is_string()) f(value->get<std::string>(), *value);
    }
  };
  const auto operand = [&](const std::string& text, Json& value) {
    value = MessageJson(ToMessage(ResolveOperand(session, text)));
  };
  const auto upper = [](std::string_view prefix) {
    return [prefix](const std::string& text, Json& value) {
      const std::string name = absl::AsciiStrToUpper(text);
      value = absl::StartsWith(name, Absl(prefix)) ? name : absl::StrCat(Absl(prefix), name);
    };
  };
  texts({"a", "b", "x", "mask", "edges", "keys", "labels"}, operand);
  if (operation == "take") texts({"indices"}, operand);
  for (const char* name : {"operands", "with"}) {
    if (!request.contains(name) || !request[name].is_array()) continue;
    for (Json& value : request[name])
      if (value.is_string()) operand(value.get<std::string>(), value);
  }
  texts({"expression"}, [](const std::string& text, Json& value) {
    value = MessageJson(OrThrow(ParseExpression(text)).ToMessage());
  });
  texts({"op"}, upper("REDUCE_OP_"));
  texts({"out_dtype"}, upper("DTYPE_"));
  texts({"mode"}, upper("TAKE_MODE_"));
  texts({"result", "values", "indices"}, [](const std::string& where, Json& value) {
    value = where == "scratch" ? Json{{"scratch", true}} : Json{{"buffer", {{"name", where}}}};
  });
}

// Parses JSON. If it is valid but not accepted (too deep, or a key is set twice), sets `wrong` to
// the reason. Throws Json::exception if it is not JSON.
Json ParseJson(const std::string& text, std::string& wrong) {
  std::vector<std::set<std::string>> objects;  // the keys of each object that has not ended
  const auto check = [&](int depth, Json::parse_event_t event, const Json& value) {
    using Event = Json::parse_event_t;
    if (depth > kDeepest) wrong = "it is nested too deeply";
    if (!wrong.empty()) return false;
    if (event == Event::object_start) objects.emplace_back();
    if (event == Event::object_end) objects.pop_back();
    if (event != Event::key) return true;
    const std::string key = value.get<std::string>();
    // protobuf accepts two spellings of a field, such as transpose_b and transposeB.
    std::string folded = absl::AsciiStrToLower(key);
    std::erase(folded, '_');
    if (!objects.back().insert(std::move(folded)).second)
      wrong = absl::StrCat("an object sets \"", Absl(Beginning(key, kLongestReason)), "\" twice");
    return wrong.empty();
  };
  return Json::parse(text, check, /*allow_exceptions=*/true, /*ignore_comments=*/true);
}

// Returns the name of a field of type bool whose value is a string, or "" if there is none.
// protobuf would take strings such as "yes" and "f" for true and false.
std::string TextForBool(const Json& json, const google::protobuf::Descriptor& message) {
  if (json.is_array()) {
    for (const Json& one : json)
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
  Json json;
  std::string wrong;
  try {
    json = ParseJson(*text, wrong);
  } catch (const Json::exception& error) {
    // The message comes after the library's name for the error, which is in brackets.
    const std::string_view what = error.what();
    const std::size_t name = what.find("] ");
    ThrowBadProgram(path, std::string(Beginning(what.substr(name == what.npos ? 0 : name + 2),
                                                kLongestReason)));
  }
  if (!wrong.empty()) ThrowBadProgram(path, wrong);
  if (!json.is_object() || !json.contains("steps") || !json["steps"].is_array())
    ThrowBadProgram(path, "it has no list called \"steps\"");
  for (Json& step : json["steps"]) {
    if (!step.is_object() || step.size() != 1 || !step.begin()->is_object())
      ThrowBadProgram(path,
                      "a step must be an object such as {\"dot\": {\"a\": \"x\", \"b\": \"y\"}}");
    Expand(session, step.begin().key(), *step.begin());
    step = Json{{OperationName(step.begin().key()), std::move(*step.begin())}};
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
