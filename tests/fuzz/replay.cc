// Runs a fuzz target without libFuzzer, so the target can be built with any compiler and not only
// clang:
//
//   TARGET_replay [--timeout T] [--seconds N [--seed S]] FOLDER|FILE...
//
// It runs the target on the files, and then for N seconds on mutated files, which depend only on
// the seed. It prints the seed. An input that fails, or takes longer than T seconds, is left in a
// file whose path is the last line of the output.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/fuzz/fuzz.h"

// A target that mutates inputs itself defines LLVMFuzzerCustomMutator, which calls
// LLVMFuzzerMutate.
extern "C" __attribute__((weak)) std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data,
                                                                     std::size_t size,
                                                                     std::size_t most,
                                                                     unsigned seed);
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);

namespace tessera {
namespace {

constexpr std::size_t kLongest = 16 << 10;  // The longest input.

// The input that is being run, in memory that outlives the process that runs it.
struct Running {
  std::size_t size;
  char bytes[kLongest];
};

class Mutator {
 public:
  Mutator(std::vector<std::string> inputs, unsigned seed)
      : inputs_(std::move(inputs)), random_(seed) {}

  // Returns one of the inputs, changed at a few places.
  std::string Next() {
    std::string input = inputs_[Below(inputs_.size())];
    do {
      if (LLVMFuzzerCustomMutator != nullptr) {
        const std::size_t size = input.size();
        input.resize(kLongest);
        input.resize(LLVMFuzzerCustomMutator(reinterpret_cast<std::uint8_t*>(input.data()), size,
                                             kLongest, static_cast<unsigned>(random_())));
      } else {
        Change(input);
      }
    } while (Below(3) != 0);
    return input;
  }

  void Change(std::string& input) {
    const std::size_t at = Below(input.size() + 1), left = input.size() - at;
    const std::string& other = inputs_[Below(inputs_.size())];
    const std::size_t from = Below(other.size() + 1);
    switch (Below(9)) {
      case 0:
        if (left > 0) input[at] = static_cast<char>(input[at] ^ (1 << Below(8)));
        break;
      case 1:
        if (left > 0) input[at] = static_cast<char>(random_());
        break;
      case 2:
        input.insert(at, 1 + Below(16), static_cast<char>(random_()));
        break;
      case 3:
        input.erase(at, 1 + Below(Below(2) == 0 ? 4 : left + 1));
        break;
      case 4:  // Repeats a part of the input.
        input.insert(Below(input.size() + 1), input.substr(at, 1 + Below(64)));
        break;
      case 5: {  // A number of 1, 2, 4 or 8 bytes.
        const std::uint64_t number = Number(input.size());
        std::string bytes(reinterpret_cast<const char*>(&number), std::size_t{1} << Below(4));
        if (Below(2) == 0) std::reverse(bytes.begin(), bytes.end());
        input.replace(at, bytes.size(), bytes);
        break;
      }
      case 6: {  // A number in digits, which usually replaces another number.
        constexpr const char* kDigits = "0123456789";
        const std::size_t first = std::min(input.find_first_of(kDigits, at), input.size());
        const std::size_t end = std::min(input.find_first_not_of(kDigits, first), input.size());
        input.replace(first, end - first,
                      std::to_string(static_cast<std::int64_t>(Number(input.size()))));
        break;
      }
      case 7:  // A part of another input.
        input.insert(at, other, from, 1 + Below(64));
        break;
      case 8:  // The beginning of this input and the end of another, or both.
        input = Below(2) == 0 ? input.substr(0, at) + other.substr(from) : input + other;
        break;
    }
    if (input.size() > kLongest) input.resize(kLongest);
  }

 private:
  std::size_t Below(std::size_t n) { return random_() % n; }

  // Returns a number at which code tends to fail, which is near a power of two or the length of the
  // input.
  std::uint64_t Number(std::size_t size) {
    const std::uint64_t middle = Below(4) == 0   ? size
                                 : Below(4) == 0 ? 0
                                                 : std::uint64_t{1} << Below(64);
    return middle + Below(3) - 1;
  }

  const std::vector<std::string> inputs_;
  std::mt19937_64 random_;
};

Mutator* mutator = nullptr;

// Runs an input. The alarm ends the process.
void Run(Running& running, const std::string& input, unsigned timeout) {
  running.size = input.copy(running.bytes, kLongest);
  // The memory has exactly this size, so that AddressSanitizer sees reads beyond it.
  const std::vector<std::uint8_t> bytes(input.begin(), input.end());
  alarm(timeout);
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  alarm(0);
}

void RunFiles(Running& running, const std::map<std::string, std::string>& files, unsigned timeout) {
  for (const auto& [name, input] : files) {
    // The last line of a failed run names the file.
    std::printf("%s\n", name.c_str());
    std::fflush(stdout);
    Run(running, input, timeout);
  }
  std::printf("%zu inputs\n", files.size());
}

void RunChanged(Running& running, std::chrono::seconds time, unsigned timeout) {
  using Clock = std::chrono::steady_clock;
  std::size_t count = 0;
  for (const Clock::time_point end = Clock::now() + time; Clock::now() < end; ++count) {
    Run(running, mutator->Next(), timeout);
  }
  std::printf("%zu changed inputs\n", count);
}

// Reports how the process ended, and keeps the input that it ran.
void Report(const Running& running, int status, const std::string& name) {
  const std::filesystem::path file = std::filesystem::absolute(name);
  std::ofstream(file, std::ios::binary)
      .write(running.bytes, static_cast<std::streamsize>(running.size));
  std::fprintf(stderr, "FAILED: %s. The last input is in %s\n",
               WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "see above", file.c_str());
}

std::string Content(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  Require(in.good(), "cannot read " + file.string());
  std::string content{std::istreambuf_iterator<char>(in), {}};
  Require(content.size() <= kLongest, file.string() + " is too long");
  return content;
}

int Main(int argc, char** argv) {
  unsigned seconds = 0, seed = std::random_device()(), timeout = 60;
  std::map<std::string, std::string> files;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    unsigned* const flag = word == "--seconds"   ? &seconds
                           : word == "--seed"    ? &seed
                           : word == "--timeout" ? &timeout
                                                 : nullptr;
    if (flag != nullptr && i + 1 < argc) {
      *flag = static_cast<unsigned>(std::stoul(argv[++i]));
    } else if (std::filesystem::is_directory(word)) {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(word))
        if (entry.is_regular_file()) files[entry.path()] = Content(entry.path());
    } else {
      files[word] = Content(word);
    }
  }
  Require(!files.empty(), "no inputs");
  void* const shared =
      mmap(nullptr, sizeof(Running), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Require(shared != MAP_FAILED, "no memory");
  Running& running = *static_cast<Running*>(shared);
  if (seconds == 0) {
    RunFiles(running, files, timeout);
    return 0;
  }
  std::printf("seed %u\n", seed);
  std::fflush(stdout);
  // The target runs in a separate process, so that the input remains here however that process
  // ends.
  const pid_t child = fork();
  Require(child >= 0, "no process");
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // The child does not outlive the parent.
    RunFiles(running, files, timeout);
    std::vector<std::string> inputs;
    for (const auto& [name, input] : files) inputs.push_back(input);
    Mutator of_inputs(std::move(inputs), seed);
    mutator = &of_inputs;
    RunChanged(running, std::chrono::seconds(seconds), timeout);
    return 0;
  }
  int status = 0;
  Require(waitpid(child, &status, 0) == child, "no outcome");
  if (status == 0) return 0;
  const std::string program = std::filesystem::path(argv[0]).filename();
  Report(running, status, program + "." + std::to_string(seed) + ".input");
  return 1;
}

}  // namespace
}  // namespace tessera

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most) {
  std::string input(tessera::Text(data, size));
  tessera::mutator->Change(input);
  return input.copy(reinterpret_cast<char*>(data), most);
}

int main(int argc, char** argv) { return tessera::Main(argc, argv); }
