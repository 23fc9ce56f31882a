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
// Operations may also have the names of commands: "window-sum" and "topk" for "window_sum" and
// "top_k".
#include <algorithm>
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
constexpr int kDeepest = 100;                // as protobuf limits it

absl::Status BadProgram(const std::string& path, const std::string& what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_PROGRAM",
                   absl::StrCat(path, " is not a program: ", what));
}

// Sets `json` to the message in JSON.
absl::Status SetMessage(const google::protobuf::Message& message, Json& json) {
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text).ok())
    return absl::InternalError("a message cannot be written as JSON");
  json = Json::parse(text);
  return absl::OkStatus();
}

absl::Status ExpandOperand(Session& session, Json& json) {
  if (!json.is_string()) return absl::OkStatus();
  auto operand = ResolveOperand(session, json.get<std::string>());
  return operand.ok() ? SetMessage(ToMessage(*operand), json) : operand.status();
}

absl::Status ExpandMap(Session& session, Json& request) {
  for (const char* name : {"operands", "with"}) {
    if (!request.contains(name) || !request[name].is_array()) continue;
    for (Json& operand : request[name])
      if (absl::Status status = ExpandOperand(session, operand); !status.ok()) return status;
  }
  if (!request.contains("expression") || !request["expression"].is_string())
    return absl::OkStatus();
  const auto expression = ParseExpression(request["expression"].get<std::string>());
  return expression.ok() ? SetMessage(expression->ToMessage(), request["expression"])
                         : expression.status();
}

// In the request of one step, replaces values that are written as on the command line.
absl::Status Expand(Session& session, Json& request) {
  for (const char* name : {"a", "b", "x"}) {
    if (!request.contains(name)) continue;
    if (absl::Status status = ExpandOperand(session, request[name]); !status.ok()) return status;
  }
  if (absl::Status status = ExpandMap(session, request); !status.ok()) return status;
  const auto upper = [&](const char* name, const char* prefix) {
    if (!request.contains(name) || !request[name].is_string()) return;
    const std::string text = absl::AsciiStrToUpper(request[name].get<std::string>());
    request[name] = absl::StartsWith(text, prefix) ? text : absl::StrCat(prefix, text);
  };
  upper("op", "REDUCE_OP_");
  upper("out_dtype", "DTYPE_");
  for (const char* name : {"result", "values", "indices"}) {
    if (!request.contains(name) || !request[name].is_string()) continue;
    const std::string where = request[name].get<std::string>();
    request[name] =
        where == "scratch" ? Json{{"scratch", true}} : Json{{"buffer", {{"name", where}}}};
  }
  return absl::OkStatus();
}

// Parses JSON. Sets `wrong` to what is wrong with the text, if it is JSON that must not be used.
// Throws Json::exception if it is not JSON.
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

absl::StatusOr<Program> ReadProgram(Session& session, const std::string& path) {
  const absl::StatusOr<std::string> text = ReadTextFile(path, kLargestProgram);
  if (!text.ok()) return BadProgram(path, absl::StrCat("it ", text.status().message()));
  Json json;
  std::string wrong;
  try {
    json = ParseJson(*text, wrong);
  } catch (const Json::exception& error) {
    // The message comes after the library's name for the error, which is in brackets.
    const std::string_view what = error.what();
    const std::size_t name = what.find("] ");
    return BadProgram(path, std::string(Beginning(what.substr(name == what.npos ? 0 : name + 2),
                                                  kLongestReason)));
  }
  if (!wrong.empty()) return BadProgram(path, wrong);
  if (!json.is_object() || !json.contains("steps") || !json["steps"].is_array())
    return BadProgram(path, "it has no list called \"steps\"");
  for (Json& step : json["steps"]) {
    if (!step.is_object() || step.size() != 1 || !step.begin()->is_object())
      return BadProgram(path,
                        "a step must be an object such as {\"dot\": {\"a\": \"x\", \"b\": \"y\"}}");
    if (absl::Status status = Expand(session, *step.begin()); !status.ok()) return status;
    step = Json{{OperationName(step.begin().key()), std::move(*step.begin())}};
  }
  Program program;
  if (const std::string key = TextForBool(json, *program.request().descriptor()); !key.empty())
    return BadProgram(path, absl::StrCat("\"", key, "\" must be true or false"));
  const auto parsed = google::protobuf::util::JsonStringToMessage(json.dump(), &program.request());
  if (!parsed.ok()) return BadProgram(path, std::string(parsed.message()));
  return program;
}

// Reports an array result, which is in the response, in a buffer, or in scratch memory.
absl::Status ReportArray(Session& session, const v1::Tensor* tensor, const v1::Buffer* buffer) {
  if (tensor != nullptr) return ReportTensor(session, *tensor);
  if (buffer != nullptr) {
    ReportBuffer(session, *buffer);
  } else if (session.json) {
    session.document["scratch"] = true;
  } else {
    std::cout << "in scratch memory\n";
  }
  return absl::OkStatus();
}

absl::Status ReportTopK(Session& session, const v1::TopKResponse& found) {
  absl::Status status = ReportPart(session, "values", [&](Session& part) {
    return ReportArray(part, found.has_values() ? &found.values() : nullptr,
                       found.has_values_buffer() ? &found.values_buffer() : nullptr);
  });
  status.Update(ReportPart(session, "indices", [&](Session& part) {
    return ReportArray(part, found.has_indices() ? &found.indices() : nullptr,
                       found.has_indices_buffer() ? &found.indices_buffer() : nullptr);
  }));
  return status;
}

absl::Status ReportResult(Session& session, const v1::StepResult& result) {
  const auto report = [&](const auto& response) -> absl::Status {
    if (session.json && response.has_stats()) session.document["stats"] = ToJson(response.stats());
    if constexpr (requires { response.value(); }) {
      if (response.has_value()) {
        if constexpr (requires { response.index(); })
          if (session.json && response.has_index()) session.document["index"] = response.index();
        ReportScalar(session, response.value());
        return absl::OkStatus();
      }
    }
    if constexpr (requires { response.tensor(); }) {
      return ReportArray(session, response.has_tensor() ? &response.tensor() : nullptr,
                         response.has_buffer() ? &response.buffer() : nullptr);
    } else if constexpr (requires { response.indices(); }) {
      return ReportTopK(session, response);
    } else {
      return absl::OkStatus();
    }
  };
  return VisitOperation(result, report, [&] { return Client::StatusOf(result); });
}

absl::Status Run(Session& session, const std::string& path) {
  absl::StatusOr<Program> program = ReadProgram(session, path);
  if (!program.ok()) return program.status();
  if (session.json) program->WantStats();
  const auto start = Clock::now();
  const auto response = session.client.Execute(*program);
  if (!response.ok()) return response.status();
  const absl::Duration wall = Since(start);
  absl::Status first_error;
  for (int i = 0; i < response->results_size(); ++i) {
    Session step{session.client, session.json};
    if (!session.json) std::cout << i << ": " << std::flush;
    const absl::Status status = ReportResult(step, response->results(i));
    if (!status.ok()) {
      step.document["error"] = ToJson(status);
      if (!session.json) std::cout << ErrorReason(status) << '\n';
    }
    first_error.Update(status);
    if (session.json) session.document["steps"].push_back(std::move(step.document));
  }
  if (session.json) {
    session.document["device"] = response->device();
    session.document["queue_us"] = response->queue_us();
    session.document["total_us"] = response->total_us();
    session.document["wall_us"] = absl::ToDoubleMicroseconds(wall);
  }
  return first_error;
}

}  // namespace

void AddRun(CLI::App& app, Command& chosen) {
  auto path = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("run", "Run a program of operations from a JSON file");
  command->add_option("file", *path, "The program")->type_name("FILE")->required();
  command->callback([path, &chosen] { chosen = [path](Session& s) { return Run(s, *path); }; });
}

}  // namespace tessera
