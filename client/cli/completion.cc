// completion: prints a completion script for a shell. complete: prints the candidates for the word
// at the cursor, for these scripts.
#include <algorithm>
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
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "client/cli/command.h"
#include "client/cli/completion_scripts.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

struct Candidate {
  std::string text;
  std::string description;
};

// The last word of a command line and its position.
struct Place {
  CLI::App* command = nullptr;         // the innermost subcommand before the word
  const CLI::Option* value = nullptr;  // the option or argument that the word is a value of
  bool may_be_option = true;           // whether no "--" precedes the word
  std::string before;                  // the part before the value: "--dtype=" in "--dtype=f"
  std::string word;                    // the rest: "f" in "--dtype=f"
};

// Finds an option such as "-o" or "--output" of the command or its parents. Returns nullptr if
// there is none.
CLI::Option* FindOption(CLI::App* command, const std::string& name) {
  for (; command != nullptr; command = command->get_parent()) {
    if (CLI::Option* option = command->get_option_no_throw(name)) return option;
  }
  return nullptr;
}

// Returns nullptr if there is none.
CLI::App* FindSubcommand(CLI::App& command, const std::string& name) {
  const auto found = command.get_subcommands([&](CLI::App* a) { return a->get_name() == name; });
  return found.empty() ? nullptr : found.front();
}

bool TakesValue(const CLI::Option& option) { return option.get_items_expected_max() > 0; }

// Applies a global option, such as --server, to the calls that the completion makes.
void Apply(const CLI::App& app, CLI::Option* option, const std::string& value) {
  const auto options = app.get_options();
  if (std::find(options.begin(), options.end(), option) == options.end()) return;
  try {
    SetOption(*option, value);
  } catch (const CLI::ParseError&) {  // an invalid value is reported when the line is run
  }
}

// Returns the positional argument with this number. The last one takes all further words if it
// accepts several.
const CLI::Option* Positional(const CLI::App& command, std::size_t number) {
  const auto all = command.get_options([](const CLI::Option* o) { return o->get_positional(); });
  if (number < all.size()) return all[number];
  return !all.empty() && all.back()->get_items_expected_max() > 1 ? all.back() : nullptr;
}

// REQUIRES: there is at least one word.
Place FindPlace(CLI::App& app, const std::vector<std::string>& words) {
  Place place{.command = &app, .before = "", .word = words.back()};
  std::size_t positionals = 0;
  CLI::Option* waiting = nullptr;  // the option that waits for its value
  for (std::size_t i = 0; i + 1 < words.size(); ++i) {
    const std::string& word = words[i];
    if (waiting != nullptr) {
      Apply(app, waiting, word);
      waiting = nullptr;
    } else if (word == "--" && place.may_be_option) {
      place.may_be_option = false;
    } else if (place.may_be_option && word.size() > 1 && word[0] == '-') {
      const std::size_t equals = word.find('=');
      CLI::Option* option = FindOption(place.command, word.substr(0, equals));
      if (option == nullptr || !TakesValue(*option)) continue;
      if (equals == word.npos) {
        waiting = option;
      } else {
        Apply(app, option, word.substr(equals + 1));
      }
    } else if (CLI::App* command = FindSubcommand(*place.command, word);
               command != nullptr && positionals == 0) {
      place.command = command;
    } else {
      ++positionals;
    }
  }
  const std::size_t equals = place.word.find('=');
  if (waiting != nullptr) {
    place.value = waiting;
    place.may_be_option = false;
  } else if (place.may_be_option && place.word[0] == '-' && equals != place.word.npos) {
    place.value = FindOption(place.command, place.word.substr(0, equals));
    place.before = place.word.substr(0, equals + 1);
    place.word = place.word.substr(equals + 1);
    place.may_be_option = false;
  } else {
    place.value = Positional(*place.command, positionals);
  }
  return place;
}

// Offers a word from the server, unless it has characters that names cannot have: bash inserts
// the word into the command line without quotes. Control characters in the description are
// made printable.
void Offer(const std::string& word, const std::string& description,
           std::vector<Candidate>& candidates) {
  const bool plain = std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || absl::StrContains("._/:-", static_cast<char>(c));
  });
  if (plain && !word.empty() && word.front() != '-')
    candidates.push_back({word, Printable(description)});
}

// Returns the values that an option or a positional argument accepts, as far as they can be listed.
// A server that does not respond contributes nothing.
std::vector<Candidate> Values(Session& session, const Place& place, std::string_view type) {
  std::vector<Candidate> found;
  if (const std::size_t begin = type.find('{'); begin != type.npos) {
    const std::string list(type.substr(begin + 1, type.rfind('}') - begin - 1));
    for (const absl::string_view value : absl::StrSplit(list, ','))
      found.push_back({std::string(value), ""});
  } else if (type == "BUFFER" || type == "OPERAND") {
    for (const v1::Buffer& buffer :
         session.client.ListBuffers(place.word).value_or(std::vector<v1::Buffer>())) {
      Offer(buffer.name(), absl::StrCat(DtypeText(buffer.dtype()), " ", ShapeText(buffer.shape())),
            found);
    }
  } else if (type == "STRATEGY" || type == "OPERATION") {
    const bool operations = type == "OPERATION";
    std::set<std::string> seen;
    for (const v1::Strategy& strategy :
         session.client.ListStrategies(operations ? "" : OperationName(place.command->get_name()))
             .value_or(std::vector<v1::Strategy>())) {
      if (operations) {
        if (seen.insert(strategy.operation()).second) Offer(strategy.operation(), "", found);
      } else if (strategy.available()) {
        Offer(strategy.name(), strategy.summary(), found);
      }
    }
  } else if (type == "DEVICE") {
    const auto info = session.client.GetServerInfo().value_or(v1::GetServerInfoResponse());
    for (const v1::Device& device : info.devices()) Offer(device.name(), device.model(), found);
  }
  return found;
}

// Prints "files" if the shell should offer files, and "words" otherwise. Then prints a line
// "TEXT\tDESCRIPTION" for each candidate that begins with the word at the cursor.
void Complete(Session& session, const Place& place) {
  std::string type = place.value == nullptr ? "" : place.value->get_type_name();
  std::vector<Candidate> candidates;
  if (place.may_be_option && absl::StartsWith(place.word, "-")) {
    type.clear();
    for (const CLI::App* app = place.command; app != nullptr; app = app->get_parent()) {
      for (const CLI::Option* option : app->get_options())
        for (const std::string& name : option->get_lnames())
          candidates.push_back({"--" + name, option->get_description()});
    }
  } else {
    candidates = Values(session, place, type);
    for (const CLI::App* sub :
         place.command->get_subcommands([&](CLI::App*) { return place.may_be_option; }))
      if (!sub->get_group().empty())
        candidates.push_back({sub->get_name(), sub->get_description()});
  }
  std::cout << (type == "FILE" ? "files" : "words") << '\n';
  for (const Candidate& candidate : candidates) {
    if (!absl::StartsWith(candidate.text, place.word)) continue;
    std::cout << place.before << candidate.text << '\t'
              << absl::StrReplaceAll(candidate.description, {{"\n", " "}}) << '\n';
  }
}

void PrintScript(Session&, const std::string& shell) { std::cout << CompletionScript(shell); }

}  // namespace

void AddCompletion(CLI::App& app, Command& chosen) {
  const auto [completion, shell] = AddCommand(
      app, chosen, "completion", "Print a script that completes commands in a shell", PrintScript);
  completion->add_option("shell", *shell, "The shell")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  completion->footer(std::string(kCompletionHelp));

  auto words = std::make_shared<std::vector<std::string>>();
  CLI::App* complete =
      app.add_subcommand("complete", "Print the candidates for the last word")->group("");
  complete->add_option("words", *words, "The words of a command line after 'tessera'")->required();
  complete->callback([words, &app, &chosen] {
    // A user should not have to wait longer than this for a suggestion.
    SetOption(*app.get_option("--timeout"), "1s");
    chosen = [place = FindPlace(app, *words)](Session& s) { Complete(s, place); };
  });
}

}  // namespace tessera
