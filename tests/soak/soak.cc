// A server under everything at once, every answer checked:
//
//   soak --callers 64 --seconds 600
//   soak --target 127.0.0.1:50051 --pid 4711 --tokens FILE ...
//
// Callers of several tenants, on several connections, make random requests of every operation and
// element type, whose answers have to have the bits that they had alone, and give buffers short lives.
// Exit code 1 on an error or a wrong answer, when something is left afterwards (buffers, host memory,
// descriptors, threads), and, in a run of three minutes or more, when the last minute's latency is not
// the first one's.
#include <malloc.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "server/log.h"
#include "server/server.h"
#include "tests/soak/requests.h"
#include "tests/temporary_file.h"

namespace tessera::soak {
namespace {

using std::chrono::steady_clock;

constexpr int kRequests = 400;
constexpr int kChurn = 8;  // one call in so many is the life of a buffer
constexpr double kSteadySeconds = 180;
constexpr double kSteady = 1.5;  // of the last minute's latency to the first one's

struct Flags {
  std::string target = "in-process";
  std::string tokens;
  int pid = 0;
  int callers = 64;
  int connections = 8;
  double seconds = 30;
};

struct Tally {
  std::atomic<std::int64_t> calls{0}, lives{0}, errors{0}, wrong{0};
  std::mutex mutex;

  // Prints the first few, counts all.
  void Note(std::atomic<std::int64_t>& counter, const std::string& text) {
    if (counter++ >= 5) return;
    const std::lock_guard lock(mutex);
    std::fprintf(stderr, "soak: %s\n", text.c_str());
  }
};

// Latencies of a minute, in buckets that are 5 % wide.
class Latencies {
 public:
  void Add(double microseconds) {
    const double bucket = std::log(std::max(microseconds, 1.0)) / std::log(1.05);
    ++counts_[std::min(static_cast<std::size_t>(bucket), counts_.size() - 1)];
  }
  void Add(const Latencies& other) {
    for (std::size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
  }
  double Quantile(double q) const {
    std::uint64_t all = 0, below = 0;
    for (const std::uint32_t count : counts_) all += count;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      below += counts_[i];
      if (static_cast<double>(below) >= q * static_cast<double>(all))
        return std::pow(1.05, static_cast<double>(i));
    }
    return 0;
  }

 private:
  std::array<std::uint32_t, 400> counts_{};
};

// What the server's process holds.
struct Holdings {
  std::int64_t resident_kib = 0, threads = 0, descriptors = 0;
};

Holdings HoldingsOf(int pid) {
  if (pid == getpid()) malloc_trim(0);
  Holdings now;
  const std::string folder = "/proc/" + std::to_string(pid);
  std::ifstream status(folder + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmRSS:", 0) == 0) now.resident_kib = std::stoll(line.substr(6));
    if (line.rfind("Threads:", 0) == 0) now.threads = std::stoll(line.substr(8));
  }
  std::error_code ignored;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(folder + "/fd", ignored))
    ++now.descriptors;
  return now;
}

// Three tenants, each with a token of its own, and their file.
constexpr const char* kTokens[] = {"soak-one", "soak-two", "soak-three"};
constexpr const char* kTokenFile =
    "0e13a61b6340965a9933b191660b0f366d06723d78f0bee2681f182727c20600 admin one\n"
    "3e1dd7e922cba4c77603c129d9cf0d25f87493d5409715584133438e65adc678 admin two\n"
    "7da0df23c622b03bfafccdab9d6bff5c765bb1ada13360b6fbfc22b0da19caab admin three\n";

std::vector<std::string> ReadTokens(const std::string& file) {
  std::vector<std::string> tokens;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);)
    if (!line.empty()) tokens.push_back(line);
  return tokens;
}

class Soak {
 public:
  explicit Soak(const Flags& flags) : flags_(flags) {}

  int Run() {
    if (!Connect() || !AskAlone()) return 1;
    // Caches fill, pools grow: what counts is what comes on top of a short run.
    Load(std::min(flags_.seconds / 5, 20.0), nullptr);
    const Holdings held = HoldingsOf(flags_.pid);
    std::vector<Latencies> minutes;
    Load(flags_.seconds, &minutes);
    bool good = CheckHoldings(held);
    for (std::size_t i = 0; i < tenants_; ++i) arrays_.Delete(peers_[i]);
    good &= CheckBudgets();
    good &= CheckLatencies(minutes);
    std::printf("%lld calls and %lld lives of buffers in %.1f s, %lld errors, %lld wrong answers\n",
                static_cast<long long>(tally_.calls), static_cast<long long>(tally_.lives),
                flags_.seconds, static_cast<long long>(tally_.errors),
                static_cast<long long>(tally_.wrong));
    return good && tally_.calls > 0 && tally_.errors == 0 && tally_.wrong == 0 ? 0 : 1;
  }

 private:
  bool Connect() {
    std::vector<std::string> tokens = ReadTokens(flags_.tokens);
    if (flags_.target == "in-process") {
      flags_.pid = getpid();
      if (!StartServer()) return false;
      flags_.target = server_->addresses().front();
      tokens.assign(std::begin(kTokens), std::end(kTokens));
    }
    if (tokens.empty()) tokens.emplace_back();
    for (int i = 0; i < std::max<int>(flags_.connections, static_cast<int>(tokens.size())); ++i) {
      grpc::ChannelArguments arguments;
      arguments.SetInt("grpc.use_local_subchannel_pool", 1);
      peers_.push_back(
          {grpc::CreateCustomChannel(flags_.target, grpc::InsecureChannelCredentials(), arguments),
           tokens[static_cast<std::size_t>(i) % tokens.size()]});
    }
    tenants_ = tokens.size();
    return true;
  }

  bool StartServer() {
    Options options;
    options.listen = {"127.0.0.1:0"};
    options.tokens = token_file_.path();
    absl::StatusOr<std::unique_ptr<Device>> device = OpenDevice("auto");
    if (!device.ok()) return Fail(device.status().ToString());
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(*std::move(device));
    absl::StatusOr<std::unique_ptr<Server>> started = Server::Start(options, std::move(devices));
    if (!started.ok()) return Fail(started.status().ToString());
    server_ = *std::move(started);
    return true;
  }

  // The answers that all others are compared with: one at a time, by the first tenant. Every tenant has
  // the same arrays.
  bool AskAlone() {
    for (std::size_t i = 0; i < tenants_; ++i) {
      const grpc::Status status = arrays_.Upload(peers_[i]);
      if (!status.ok()) return Fail("upload: " + status.error_message());
    }
    for (Request& request : requests_) {
      std::unique_ptr<google::protobuf::Message> answer;
      const grpc::Status status = Call(peers_[0], request, answer);
      if (!status.ok()) return Fail(request.method + ": " + status.error_message());
      const std::string wrong = arrays_.Check(request, *answer);
      if (!wrong.empty()) return Fail(wrong);
      request.answer = Bits(*answer);
    }
    return true;
  }

  // minutes: where latencies go, one entry a minute; null: nowhere.
  void Load(double seconds, std::vector<Latencies>* minutes) {
    const auto begin = steady_clock::now();
    const auto end = begin + std::chrono::duration_cast<steady_clock::duration>(
                                 std::chrono::duration<double>(seconds));
    const auto count = static_cast<std::size_t>(seconds / 60) + 1;
    std::vector<std::vector<Latencies>> mine(static_cast<std::size_t>(flags_.callers),
                                             std::vector<Latencies>(count));
    std::vector<std::thread> threads;
    for (int i = 0; i < flags_.callers; ++i) {
      threads.emplace_back([&, i] {
        const Peer& peer = peers_[static_cast<std::size_t>(i) % peers_.size()];
        std::mt19937_64 random(static_cast<std::uint64_t>(i) + 1);
        for (auto now = steady_clock::now(); now < end;) {
          const bool churn = random() % kChurn == 0;
          churn ? Live(peer, i, random) : CallOnce(peer, random);
          const auto done = steady_clock::now();
          const auto minute =
              static_cast<std::size_t>(std::chrono::duration<double>(now - begin).count() / 60);
          if (!churn)
            mine[static_cast<std::size_t>(i)][std::min(minute, count - 1)].Add(
                std::chrono::duration<double, std::micro>(done - now).count());
          now = done;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (minutes == nullptr) return;
    minutes->resize(count);
    for (const auto& latencies : mine)
      for (std::size_t i = 0; i < count; ++i) (*minutes)[i].Add(latencies[i]);
  }

  void CallOnce(const Peer& peer, std::mt19937_64& random) {
    ++tally_.calls;
    const Request& request = requests_[random() % requests_.size()];
    std::unique_ptr<google::protobuf::Message> answer;
    const grpc::Status status = Call(peer, request, answer);
    if (!status.ok()) {
      tally_.Note(tally_.errors, request.method + ": " + std::to_string(status.error_code()) + " " +
                                     status.error_message());
    } else if (Bits(*answer) != request.answer) {
      tally_.Note(tally_.wrong, request.method + " has other bits than alone: " +
                                    request.message->ShortDebugString());
    }
  }

  void Live(const Peer& peer, int caller, std::mt19937_64& random) {
    ++tally_.lives;
    const std::string wrong = Churn(peer, caller, random);
    if (!wrong.empty()) tally_.Note(tally_.errors, wrong);
  }

  v1::GetServerInfoResponse Info() {
    grpc::ClientContext context;
    peers_[0].Identify(context);
    v1::GetServerInfoResponse info;
    const auto stub = v1::ComputeService::NewStub(peers_[0].channel);
    const grpc::Status status = stub->GetServerInfo(&context, {}, &info);
    if (!status.ok()) tally_.Note(tally_.errors, "GetServerInfo: " + status.error_message());
    return info;
  }

  // Buffers that expire are gone within their ttl and a sweep.
  bool CheckBudgets() {
    constexpr const char* kHeld[] = {"buffers", "uploads", "downloads"};
    std::string left;
    for (int i = 0; i < 900; ++i) {
      left.clear();
      const v1::GetServerInfoResponse now = Info();
      for (const v1::Device& device : now.devices())
        if (device.buffer_used_bytes() + device.scratch_used_bytes() != 0)
          left += device.name() + " " + std::to_string(device.buffer_used_bytes()) + " bytes ";
      for (const v1::Budget& budget : now.budgets())
        for (const char* name : kHeld)
          if (budget.name() == name && budget.used() != 0)
            left += budget.name() + " " + std::to_string(budget.used()) + " ";
      if (left.empty()) break;
      absl::SleepFor(absl::Milliseconds(100));
    }
    std::printf("left on devices: %s\n", left.empty() ? "0 bytes" : left.c_str());
    return left.empty();
  }

  // A sanitizer keeps what is freed; gRPC keeps a few threads for the next burst.
  bool CheckHoldings(const Holdings& before) {
    if (flags_.pid == 0) {
      std::printf("memory, threads and descriptors are not watched: no --pid\n");
      return true;
    }
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    constexpr bool kExactMemory = false;
#else
    constexpr bool kExactMemory = true;
#endif
    constexpr int kSpareThreads = 4;
    Holdings after;
    bool good = false;
    for (int i = 0; i < 300 && !good; ++i) {
      after = HoldingsOf(flags_.pid);
      good = after.threads <= before.threads + kSpareThreads &&
             after.descriptors <= before.descriptors &&
             (!kExactMemory ||
              after.resident_kib <= before.resident_kib + before.resident_kib / 10 + (16 << 10));
      if (!good) absl::SleepFor(absl::Milliseconds(100));
    }
    std::printf(
        "resident %lld KiB after %lld, threads %lld after %lld, descriptors %lld after %lld\n",
        static_cast<long long>(after.resident_kib), static_cast<long long>(before.resident_kib),
        static_cast<long long>(after.threads), static_cast<long long>(before.threads),
        static_cast<long long>(after.descriptors), static_cast<long long>(before.descriptors));
    return good;
  }

  // Of whole minutes.
  bool CheckLatencies(const std::vector<Latencies>& minutes) const {
    if (flags_.seconds < kSteadySeconds) {
      std::printf("p99 is not judged: the run is too short\n");
      return true;
    }
    const std::size_t last = static_cast<std::size_t>(flags_.seconds / 60) - 1;
    const double first_p99 = minutes[0].Quantile(0.99), last_p99 = minutes[last].Quantile(0.99);
    std::printf("p99 %.0f us in the first minute, %.0f us in the last\n", first_p99, last_p99);
    return last_p99 <= kSteady * first_p99;
  }

  bool Fail(const std::string& text) const {
    std::fprintf(stderr, "soak: %s\n", text.c_str());
    return false;
  }

  Flags flags_;
  const TemporaryFile token_file_{kTokenFile};
  std::unique_ptr<Server> server_;
  std::vector<Peer> peers_;  // the first of each tenant first
  std::size_t tenants_ = 1;
  Arrays arrays_{1};
  std::vector<Request> requests_ = arrays_.MakeRequests(kRequests);
  Tally tally_;
};

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Checks every answer of a server under load, and what is left of it.", "soak");
  app.add_option("--target", flags.target, "address of a server, or in-process");
  app.add_option("--tokens", flags.tokens, "file of a token a line, each of a tenant of its own");
  app.add_option("--pid", flags.pid, "of the server, to watch its memory, threads and descriptors");
  app.add_option("--callers", flags.callers, "threads that call without a pause")
      ->check(CLI::Range(1, 4096));
  app.add_option("--connections", flags.connections, "that they share")->check(CLI::Range(1, 1024));
  app.add_option("--seconds", flags.seconds, "how long");
  CLI11_PARSE(app, argc, argv);
  SetUpLog("warn", false);
  return Soak(flags).Run();
}

}  // namespace
}  // namespace tessera::soak

int main(int argc, char** argv) { return tessera::soak::Main(argc, argv); }
