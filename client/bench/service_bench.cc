// What callers get of a server: calls a second, latencies and transfer rates, beside a bare gRPC
// server that does nothing, in turns.
//
//   service_bench --target 127.0.0.1:50051 [--target NAME=ADDRESS ...] [--callers 1,4,16,64]
//                 [--operations dot,upload,download] [--seconds 1] [--rounds 5] [--json FILE]
//   service_bench serve ADDRESS      the bare server alone
//
// Callers are closed loops: each makes its next call when it has its answer. Every round times
// every target once, in random order; the table has medians of the rounds and of the
// ratios to the bare server's rate in the same round. Without --target only the bare server is timed; --bare ADDRESS takes
// one that runs elsewhere, instead of one in a process of its own.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/bench/bare_server.h"
#include "grpcpp/grpcpp.h"
#include "tessera/v1/buffer.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::vector<std::string> targets;
  std::string bare;
  std::vector<int> callers = {1, 4, 16, 64};
  std::vector<std::string> operations = {"dot"};
  std::int64_t elements = 4096;
  std::uint64_t transfer_mib = 64;
  double seconds = 1;
  int rounds = 5;
  std::string json;
};

struct Target {
  std::string name;
  std::string address;
  bool bare = false;
};

[[noreturn]] void Die(const std::string& what, const grpc::Status& status) {
  std::fprintf(stderr, "service_bench: %s: %d %s\n", what.c_str(), status.error_code(),
               status.error_message().c_str());
  std::exit(1);
}

// One measurement: latencies of calls in microseconds, or bytes a second.
struct Sample {
  double rate = 0;  // calls, or bytes, a second
  double p50_us = 0, p99_us = 0;
};

double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

double Quantile(std::vector<double>& values, double q) {
  if (values.empty()) return 0;
  const auto at = static_cast<std::ptrdiff_t>(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<std::size_t>(at)];
}

double Median(std::vector<double> values) { return Quantile(values, 0.5); }

// At most 16 callers a connection: a channel hands its answers out one after the other.
constexpr int kCallersPerChannel = 16;

class Connection {
 public:
  Connection(const Target& target, int callers) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxReceiveMessageSize(8 << 20);
    for (int i = 0; i < callers; i += kCallersPerChannel) {
      auto channel =
          grpc::CreateCustomChannel(target.address, grpc::InsecureChannelCredentials(), arguments);
      compute_.push_back(v1::ComputeService::NewStub(channel));
      buffers_.push_back(v1::BufferService::NewStub(channel));
    }
  }
  v1::ComputeService::Stub& compute(int caller) { return *compute_[Index(caller)]; }
  v1::BufferService::Stub& buffers(int caller) { return *buffers_[Index(caller)]; }

 private:
  static std::size_t Index(int caller) {
    return static_cast<std::size_t>(caller / kCallersPerChannel);
  }
  std::vector<std::unique_ptr<v1::ComputeService::Stub>> compute_;
  std::vector<std::unique_ptr<v1::BufferService::Stub>> buffers_;
};

void Put(v1::BufferService::Stub& stub, const std::string& name, std::int64_t elements) {
  grpc::ClientContext context;
  v1::UploadResponse response;
  auto stream = stub.Upload(&context, &response);
  v1::UploadRequest request;
  request.set_name(name);
  request.mutable_spec()->set_dtype(v1::DTYPE_F32);
  request.mutable_spec()->add_shape(elements);
  request.mutable_spec()->set_replace(true);
  const auto bytes = static_cast<std::size_t>(elements) * sizeof(float);
  for (std::size_t at = 0; at < bytes; at += std::size_t{1} << 20) {
    request.mutable_data()->assign(std::min(bytes - at, std::size_t{1} << 20), '\0');
    if (!stream->Write(request)) break;
  }
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  if (!status.ok()) Die("upload of " + name, status);
}

// --- Calls ---

// Callers that each have one Dot under way until the end.
class Dots {
 public:
  Dots(Connection& connection, int callers, double seconds)
      : end_(Clock::now() +
             std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))),
        running_(callers) {
    for (int i = 0; i < callers; ++i)
      callers_.push_back(std::make_unique<Caller>(*this, connection.compute(i)));
    begin_ = Clock::now();
    for (auto& caller : callers_) caller->Call();
  }

  Sample Wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return running_ == 0; });
    const double seconds = Seconds(Clock::now() - begin_);
    std::vector<double> all;
    for (const auto& caller : callers_)
      all.insert(all.end(), caller->microseconds.begin(), caller->microseconds.end());
    Sample sample;
    sample.rate = static_cast<double>(all.size()) / seconds;
    sample.p50_us = Quantile(all, 0.5);
    sample.p99_us = Quantile(all, 0.99);
    return sample;
  }

 private:
  struct Caller {
    Caller(Dots& d, v1::ComputeService::Stub& s) : dots(d), stub(s) {
      request.mutable_a()->set_buffer("service_bench/a");
      request.mutable_b()->set_buffer("service_bench/b");
    }
    void Call() {
      context.emplace();
      begin = Clock::now();
      stub.async()->Dot(&*context, &request, &response, [this](const grpc::Status& status) {
        if (!status.ok()) Die("Dot", status);
        const Clock::time_point now = Clock::now();
        microseconds.push_back(1e6 * Seconds(now - begin));
        if (now < dots.end_) {
          Call();
        } else {
          dots.Leave();
        }
      });
    }
    Dots& dots;
    v1::ComputeService::Stub& stub;
    std::optional<grpc::ClientContext> context;
    v1::DotRequest request;
    v1::DotResponse response;
    Clock::time_point begin;
    std::vector<double> microseconds;
  };

  void Leave() {
    const std::lock_guard lock(mutex_);
    if (--running_ == 0) done_.notify_one();
  }

  const Clock::time_point end_;
  Clock::time_point begin_;
  std::mutex mutex_;
  std::condition_variable done_;
  int running_;
  std::vector<std::unique_ptr<Caller>> callers_;
};

// --- Transfers ---

// One transfer of so many bytes in messages of 1 MiB, again and again, on each of so many threads.
template <class Transfer>
Sample Repeat(int callers, double seconds, std::uint64_t bytes, const Transfer& transfer) {
  std::atomic<std::uint64_t> moved{0};
  const Clock::time_point begin = Clock::now();
  const auto end =
      begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::vector<std::thread> threads;
  for (int i = 0; i < callers; ++i) {
    threads.emplace_back([&, i] {
      do {
        transfer(i);
        moved += bytes;
      } while (Clock::now() < end);
    });
  }
  for (std::thread& thread : threads) thread.join();
  Sample sample;
  sample.rate = static_cast<double>(moved) / Seconds(Clock::now() - begin);
  return sample;
}

Sample Uploads(Connection& connection, int callers, const Options& options) {
  const std::uint64_t bytes = options.transfer_mib << 20;
  return Repeat(callers, options.seconds, bytes, [&](int i) {
    Put(connection.buffers(i), "service_bench/up" + std::to_string(i),
        static_cast<std::int64_t>(bytes / sizeof(float)));
  });
}

Sample Downloads(Connection& connection, int callers, const Options& options) {
  const std::uint64_t bytes = options.transfer_mib << 20;
  return Repeat(callers, options.seconds, bytes, [&](int i) {
    grpc::ClientContext context;
    v1::DownloadRequest request;
    request.set_name("service_bench/down");
    request.set_limit(bytes);
    auto stream = connection.buffers(i).Download(&context, request);
    v1::DownloadResponse response;
    std::uint64_t received = 0;
    while (stream->Read(&response)) received += response.data().size();
    const grpc::Status status = stream->Finish();
    if (!status.ok() || received != bytes) Die("download", status);
  });
}

Sample Measure(const Target& target, const std::string& operation, int callers,
               const Options& options) {
  Connection connection(target, callers);
  if (!target.bare) {
    for (const char* name : {"service_bench/a", "service_bench/b"})
      Put(connection.buffers(0), name, options.elements);
    if (operation == "download")
      Put(connection.buffers(0), "service_bench/down",
          static_cast<std::int64_t>((options.transfer_mib << 20) / sizeof(float)));
  }
  if (operation == "upload") return Uploads(connection, callers, options);
  if (operation == "download") return Downloads(connection, callers, options);
  Dots(connection, callers, 0.1).Wait();  // connects, and wakes who sleeps
  return Dots(connection, callers, options.seconds).Wait();
}

// --- The bare server's process ---

class BareProcess {
 public:
  BareProcess() {
    int pipe[2];
    if (::pipe(pipe) != 0) std::exit(1);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const BareServer server("127.0.0.1:0");
      const std::string& address = server.address();
      if (write(pipe[1], address.data(), address.size()) < 0) _exit(1);
      close(pipe[1]);
      for (;;) pause();
    }
    close(pipe[1]);
    char text[64];
    ssize_t size = 0;
    while ((size = read(pipe[0], text, sizeof text)) > 0)
      address_.append(text, static_cast<std::size_t>(size));
    close(pipe[0]);
  }
  ~BareProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  const std::string& address() const { return address_; }

 private:
  pid_t pid_ = 0;
  std::string address_;
};

int Run(const Options& options) {
  std::unique_ptr<BareProcess> process;  // before gRPC begins in this one
  if (options.bare.empty()) process = std::make_unique<BareProcess>();
  std::vector<Target> targets = {
      {"bare gRPC", process != nullptr ? process->address() : options.bare, true}};
  for (const std::string& text : options.targets) {
    const std::size_t equals = text.find('=');
    targets.push_back(equals == text.npos
                          ? Target{text, text}
                          : Target{text.substr(0, equals), text.substr(equals + 1)});
  }

  nlohmann::json rows = nlohmann::json::array();
  std::mt19937 random(1);
  std::printf("%-10s %8s  %-16s %12s %8s %10s %10s\n", "operation", "callers", "target",
              "per second", "of bare", "p50 us", "p99 us");
  for (const std::string& operation : options.operations) {
    for (const int callers : options.callers) {
      std::map<std::string, std::vector<Sample>> samples;
      std::vector<Target> order = targets;
      for (int round = 0; round < options.rounds; ++round) {
        std::shuffle(order.begin(), order.end(), random);
        for (const Target& target : order)
          samples[target.name].push_back(Measure(target, operation, callers, options));
      }
      const auto median = [&](const Target& target, double Sample::*figure) {
        std::vector<double> values;
        for (const Sample& sample : samples[target.name]) values.push_back(sample.*figure);
        return Median(values);
      };
      for (const Target& target : targets) {
        const bool calls = operation == "dot";
        std::vector<double> ratios;
        for (std::size_t i = 0; i < samples[target.name].size(); ++i)
          ratios.push_back(samples[target.name][i].rate / samples[targets[0].name][i].rate);
        const double rate = median(target, &Sample::rate), ratio = Median(ratios);
        const double p50 = median(target, &Sample::p50_us), p99 = median(target, &Sample::p99_us);
        std::printf("%-10s %8d  %-16s %9.2f %s %8.3f", operation.c_str(), callers,
                    target.name.c_str(), calls ? rate / 1e3 : rate / 1e9, calls ? " k" : "GB",
                    ratio);
        if (calls) std::printf(" %10.1f %10.1f", p50, p99);
        std::printf("\n");
        std::fflush(stdout);
        rows.push_back({{"operation", operation},
                        {"callers", callers},
                        {"target", target.name},
                        {"per_second", rate},
                        {"of_bare", ratio},
                        {"p50_us", p50},
                        {"p99_us", p99},
                        {"rounds", options.rounds}});
      }
    }
  }
  if (!options.json.empty()) std::ofstream(options.json) << rows.dump(1) << "\n";
  return 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  CLI::App app("What callers get of a server, beside a bare gRPC server");
  tessera::bench::Options options;
  app.add_option("--target", options.targets, "ADDRESS or NAME=ADDRESS; repeatable");
  app.add_option("--bare", options.bare, "a bare server that runs elsewhere");
  app.add_option("--callers", options.callers, "closed loops at once")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096));
  app.add_option("--operations", options.operations, "dot, upload, download")
      ->delimiter(',')
      ->check(CLI::IsMember({"dot", "upload", "download"}));
  app.add_option("--elements", options.elements, "f32 of each operand of Dot")
      ->check(CLI::Range(1, 1 << 28));
  app.add_option("--transfer-mib", options.transfer_mib, "of one upload or download")
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--seconds", options.seconds, "of a measurement")->check(CLI::Range(0.01, 600.0));
  app.add_option("--rounds", options.rounds, "measurements of each target, in turns")
      ->check(CLI::Range(1, 1000));
  app.add_option("--json", options.json, "file for the results");
  std::string address;
  CLI::App* serve = app.add_subcommand("serve", "the bare server alone");
  serve->add_option("address", address)->required();
  CLI11_PARSE(app, argc, argv);
  if (serve->parsed()) {
    const tessera::bench::BareServer server(address);
    std::printf("%s\n", server.address().c_str());
    std::fflush(stdout);
    for (;;) pause();
  }
  return tessera::bench::Run(options);
}
