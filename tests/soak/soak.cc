// Many callers for a while, every answer checked: soak --target in-process --callers 64 --seconds
// 30
//
// Random Dot, Reduce and Matmul on random views of resident arrays. An answer is wrong when it is
// further from a double-precision reference than the row's own bound allows. Exit code 1 on any
// error or wrong answer.
#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "kernels/compute.h"
#include "server/log.h"
#include "server/server.h"
#include "tessera/v1/buffer.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera {
namespace {

constexpr std::int64_t kElements = 1 << 16;
constexpr std::int64_t kLongest = 4096;  // of a Dot or Reduce
constexpr std::int64_t kLargest = 40;    // side of a Matmul

struct Array {
  std::string name;
  v1::Dtype dtype;
  std::vector<double> values;  // exactly those on the device
};

struct Tally {
  std::atomic<std::int64_t> calls{0};
  std::atomic<std::int64_t> errors{0};
  std::atomic<std::int64_t> wrong{0};
  std::mutex mutex;

  // Prints the first few, counts all.
  void Note(std::atomic<std::int64_t>& counter, const std::string& text) {
    if (counter++ >= 5) return;
    const std::lock_guard lock(mutex);
    std::fprintf(stderr, "soak: %s\n", text.c_str());
  }
};

class Caller {
 public:
  Caller(const std::shared_ptr<grpc::Channel>& channel, const std::vector<Array>& arrays,
         Tally& tally, std::uint64_t seed)
      : stub_(v1::ComputeService::NewStub(channel)),
        arrays_(arrays),
        tally_(tally),
        random_(seed) {}

  void CallOnce() {
    ++tally_.calls;
    switch (Below(3)) {
      case 0:
        Dot();
        break;
      case 1:
        Reduce();
        break;
      default:
        Matmul();
    }
  }

 private:
  std::int64_t Below(std::int64_t n) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n));
  }
  // Two arrays of one type may meet; they come in pairs.
  const Array& Pick() { return arrays_[static_cast<std::size_t>(Below(std::ssize(arrays_)))]; }
  const Array& Partner(const Array& a) {
    return arrays_[static_cast<std::size_t>(&a - arrays_.data()) ^ 1];
  }
  static void SetOperand(const Array& array, std::int64_t offset,
                         std::initializer_list<std::int64_t> shape, v1::Operand* out) {
    out->set_buffer(array.name);
    out->mutable_view()->set_offset(offset);
    for (const std::int64_t extent : shape) out->mutable_view()->add_shape(extent);
  }

  bool Succeeded(const grpc::Status& status) {
    if (status.ok()) return true;
    tally_.Note(tally_.errors,
                "error " + std::to_string(status.error_code()) + ": " + status.error_message());
    return false;
  }
  // terms: the sum of what was added, in absolute value. unit: of the rounding of the result
  // itself.
  void Check(const char* what, const v1::ExecutionStats& stats, double value, double expected,
             double terms, double unit) {
    const double bound = stats.roundoff() * terms + unit * std::fabs(expected);
    if (std::fabs(value - expected) <= bound) return;
    char text[200];
    std::snprintf(text, sizeof(text), "%s by %s: %.17g instead of %.17g, bound %.3g", what,
                  stats.strategy().c_str(), value, expected, bound);
    tally_.Note(tally_.wrong, text);
  }

  void Dot() {
    const Array& a = Pick();
    const Array& b = Partner(a);
    const std::int64_t n = Below(kLongest);
    const std::int64_t at_a = Below(kElements - n);
    const std::int64_t at_b = Below(kElements - n);
    v1::DotRequest request;
    SetOperand(a, at_a, {n}, request.mutable_a());
    SetOperand(b, at_b, {n}, request.mutable_b());
    v1::DotResponse response;
    grpc::ClientContext context;
    if (!Succeeded(stub_->Dot(&context, request, &response))) return;
    long double sum = 0;
    double terms = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const double term = a.values[static_cast<std::size_t>(at_a + i)] *
                          b.values[static_cast<std::size_t>(at_b + i)];
      sum += term;
      terms += std::fabs(term);
    }
    Check("Dot", response.stats(), response.value().real(), static_cast<double>(sum), terms,
          kRoundoffF64);
  }

  void Reduce() {
    const Array& x = Pick();
    const std::int64_t n = 1 + Below(kLongest);
    const std::int64_t at = Below(kElements - n);
    const bool largest = Below(2) != 0;
    v1::ReduceRequest request;
    SetOperand(x, at, {n}, request.mutable_x());
    request.set_op(largest ? v1::REDUCE_OP_ARGMAX : v1::REDUCE_OP_SUM);
    v1::ReduceResponse response;
    grpc::ClientContext context;
    if (!Succeeded(stub_->Reduce(&context, request, &response))) return;
    const double* values = x.values.data() + at;
    if (largest) {
      const std::int64_t index = std::max_element(values, values + n) - values;
      if (response.index() != index || response.value().real() != values[index]) {
        tally_.Note(tally_.wrong, "ARGMAX by " + response.stats().strategy());
      }
      return;
    }
    long double sum = 0;
    double terms = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      sum += values[i];
      terms += std::fabs(values[i]);
    }
    Check("SUM", response.stats(), response.value().real(), static_cast<double>(sum), terms,
          kRoundoffF64);
  }

  void Matmul() {
    const Array& a = Pick();
    const Array& b = Partner(a);
    const std::int64_t m = 1 + Below(kLargest);
    const std::int64_t n = 1 + Below(kLargest);
    const std::int64_t k = Below(kLargest);
    const std::int64_t at_a = Below(kElements - m * k);
    const std::int64_t at_b = Below(kElements - k * n);
    v1::MatmulRequest request;
    SetOperand(a, at_a, {m, k}, request.mutable_a());
    SetOperand(b, at_b, {k, n}, request.mutable_b());
    v1::MatmulResponse response;
    grpc::ClientContext context;
    if (!Succeeded(stub_->Matmul(&context, request, &response))) return;
    const bool f32 = a.dtype == v1::DTYPE_F32;
    const std::string& data = response.tensor().data();
    const std::size_t size = f32 ? sizeof(float) : sizeof(double);
    if (data.size() != static_cast<std::size_t>(m * n) * size) {
      tally_.Note(tally_.wrong, "Matmul answers with another size");
      return;
    }
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        long double sum = 0;
        double terms = 0;
        for (std::int64_t l = 0; l < k; ++l) {
          const double term = a.values[static_cast<std::size_t>(at_a + i * k + l)] *
                              b.values[static_cast<std::size_t>(at_b + l * n + j)];
          sum += term;
          terms += std::fabs(term);
        }
        const char* from = data.data() + static_cast<std::size_t>(i * n + j) * size;
        double value = 0;
        if (f32) {
          float narrow = 0;
          std::memcpy(&narrow, from, sizeof(narrow));
          value = narrow;
        } else {
          std::memcpy(&value, from, sizeof(value));
        }
        Check("Matmul", response.stats(), value, static_cast<double>(sum), terms,
              f32 ? kRoundoffF32 : kRoundoffF64);
      }
    }
  }

  const std::unique_ptr<v1::ComputeService::Stub> stub_;
  const std::vector<Array>& arrays_;
  Tally& tally_;
  std::mt19937_64 random_;
};

grpc::Status Upload(v1::BufferService::Stub& stub, const Array& array) {
  grpc::ClientContext context;
  v1::UploadResponse response;
  auto writer = stub.Upload(&context, &response);
  v1::UploadRequest request;
  request.set_name(array.name);
  request.mutable_spec()->set_dtype(array.dtype);
  request.mutable_spec()->add_shape(kElements);
  request.mutable_spec()->set_replace(true);
  for (const double value : array.values) {
    const float narrow = static_cast<float>(value);
    const bool f32 = array.dtype == v1::DTYPE_F32;
    request.mutable_data()->append(
        f32 ? reinterpret_cast<const char*>(&narrow) : reinterpret_cast<const char*>(&value),
        f32 ? sizeof(narrow) : sizeof(value));
  }
  writer->Write(request);
  writer->WritesDone();
  return writer->Finish();
}

int Main(int argc, char** argv) {
  std::string target = "in-process";
  int callers = 64;
  double seconds = 30;
  CLI::App app("Checks every answer of a server under load.", "soak");
  app.add_option("--target", target, "address of a server, or in-process");
  app.add_option("--callers", callers, "threads that call without a pause")
      ->check(CLI::Range(1, 4096));
  app.add_option("--seconds", seconds, "how long");
  CLI11_PARSE(app, argc, argv);
  SetUpLog("warn", false);

  std::unique_ptr<Server> server;
  std::shared_ptr<grpc::Channel> channel;
  if (target == "in-process") {
    Options options;
    options.listen.clear();
    options.reflection = false;
    absl::StatusOr<std::unique_ptr<Device>> device = OpenDevice("auto");
    if (!device.ok()) return 1;
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(*std::move(device));
    absl::StatusOr<std::unique_ptr<Server>> started = Server::Start(options, std::move(devices));
    if (!started.ok()) return 1;
    server = *std::move(started);
    channel = server->InProcessChannel();
  } else {
    channel = grpc::CreateChannel(target, grpc::InsecureChannelCredentials());
  }

  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> uniform(-1, 1);
  std::vector<Array> arrays;
  auto buffers = v1::BufferService::NewStub(channel);
  for (const v1::Dtype dtype : {v1::DTYPE_F32, v1::DTYPE_F64}) {
    for (const char* part : {"a", "b"}) {
      Array& array = arrays.emplace_back();
      array.name = "soak/" + v1::Dtype_Name(dtype) + "/" + part;
      array.dtype = dtype;
      for (std::int64_t i = 0; i < kElements; ++i) {
        const double value = uniform(random);
        array.values.push_back(dtype == v1::DTYPE_F32 ? static_cast<float>(value) : value);
      }
      const grpc::Status status = Upload(*buffers, array);
      if (!status.ok()) {
        std::fprintf(stderr, "soak: upload: %s\n", status.error_message().c_str());
        return 1;
      }
    }
  }

  Tally tally;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::vector<std::thread> threads;
  for (int i = 0; i < callers; ++i) {
    threads.emplace_back([&, i] {
      Caller caller(channel, arrays, tally, static_cast<std::uint64_t>(i) + 1);
      while (std::chrono::steady_clock::now() < end) caller.CallOnce();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Array& array : arrays) {
    grpc::ClientContext context;
    v1::DeleteBufferRequest request;
    request.set_name(array.name);
    v1::DeleteBufferResponse response;
    (void)buffers->DeleteBuffer(&context, request, &response);
  }
  std::printf("%lld calls in %.1f s, %lld errors, %lld wrong answers\n",
              static_cast<long long>(tally.calls), seconds, static_cast<long long>(tally.errors),
              static_cast<long long>(tally.wrong));
  return tally.calls > 0 && tally.errors == 0 && tally.wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) { return tessera::Main(argc, argv); }
