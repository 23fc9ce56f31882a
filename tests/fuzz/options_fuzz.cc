// The server's command line and its configuration file. Up to the first empty line, each line is an
// argument. The rest is the file that --config names.
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "server/options.h"
#include "tests/fuzz/fuzz.h"
#include "tests/temporary_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const tessera::TemporaryFile config;
  const std::string text(tessera::Text(data, size));
  const std::size_t end = std::min(text.find("\n\n"), text.size());
  std::vector<std::string> words = {"tessera-server"};
  std::istringstream lines(text.substr(0, end));
  for (std::string line; std::getline(lines, line);) {
    // The fuzzer must not name files itself, because it might name a device that never ends.
    if (line.rfind("--config", 0) == 0) continue;
    words.push_back(line.substr(0, line.find('\0')));
  }
  if (end < text.size()) {
    std::ofstream(config.path(), std::ios::binary) << text.substr(end + 2);
    words.push_back("--config=" + config.path());
  }
  std::vector<const char*> arguments;
  for (const std::string& word : words) arguments.push_back(word.c_str());
  std::ostringstream out, err;
  int exit_code = -1;
  const auto options = tessera::ParseOptions(static_cast<int>(arguments.size()), arguments.data(),
                                             out, err, &exit_code);
  if (options.has_value()) {
    tessera::Require(options->workers >= 1 && options->workers <= 64 && options->queue >= 1 &&
                         options->host_memory >= 16 << 20 && options->max_connections >= 1,
                     "a flag beyond its range");
  } else {
    tessera::Require(exit_code == 0 || exit_code == 1, "no exit code");
    tessera::Require(exit_code == 0 || !err.str().empty(), "an error without a word");
  }
  return 0;
}
