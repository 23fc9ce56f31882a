// Products over several GPUs beside one: which way b takes, and what the vendor's library makes of it.
//
//   product_bench [--json=FILE] [--rounds=N] [--library] [--brief] bf16:8192 f32:8192 ...
//
// a and the result are divided among all GPUs, b among them or on the first one. Times are medians of
// device time, from the first piece of work to the last on any GPU; of cuBLASXt of the host's clock.
// Every result of several GPUs is compared with that of one by the same strategy, bit by bit.
// --library: cuBLASXt beside one GPU, and nothing else. --brief: b divided, not transposed, and copied
// while it is multiplied, beside one GPU. CUDA_VISIBLE_DEVICES takes fewer GPUs.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/bench/product_peers.h"
#include "kernels/compute.h"

namespace tessera::bench {
namespace {

[[noreturn]] void Die(const absl::Status& status) {
  std::fprintf(stderr, "product_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}
void Check(const absl::Status& status) {
  if (!status.ok()) Die(status);
}
template <class T>
T OrDie(absl::StatusOr<T> value) {
  if (!value.ok()) Die(value.status());
  return *std::move(value);
}

struct Gpus {
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<std::unique_ptr<Stream>> streams;

  Gpus() {
    for (const std::string& name : VisibleDevices()) {
      if (name == "cpu") continue;
      devices.push_back(OrDie(OpenDevice(name)));
      streams.push_back(OrDie(MakeStream(*devices.back())));
    }
  }
  Stream& own() const { return *streams.front(); }
};

// Memory divided among the first `count` GPUs, which as a team work on what lies in it.
class Array final : public Team {
 public:
  Array(const Gpus& gpus, std::size_t count, std::uint64_t bytes) : gpus_(gpus) {
    std::vector<Device*> some;
    for (std::size_t i = 0; i < count; ++i) some.push_back(gpus.devices[i].get());
    shards_ = MakeShards(some, bytes);
    memory_ = OrDie(Allocate(shards_));
  }
  const void* data() const override { return memory_.data(); }
  void* memory() const { return memory_.data(); }
  std::size_t bytes() const { return memory_.size(); }
  absl::Span<const Shard> shards() const override { return shards_; }
  absl::StatusOr<std::vector<Stream*>> Assemble(Stream& own) override {
    std::vector<Stream*> team;
    for (const Shard& shard : shards_) {
      for (const auto& stream : gpus_.streams) {
        if (&stream->device() != shard.device) continue;
        if (stream.get() != &own) Check(BeginRequest(*stream));
        team.push_back(stream.get());
      }
    }
    return team;
  }

 private:
  const Gpus& gpus_;
  std::vector<Shard> shards_;
  Memory memory_;
};

// Elements of either sign near 1, of which a block repeats.
void Fill(const Gpus& gpus, const Array& array, DType dtype, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<char> block(std::min<std::size_t>(array.bytes(), (std::size_t{8} << 20) + 6144));
  const std::size_t size = SizeOf(dtype);
  for (std::size_t i = 0; i + size <= block.size(); i += size) {
    const float x = static_cast<float>(random() % 20001) / 10000.f - 1.f;
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    if (dtype == DType::kF64) {
      // With all the bits that the type has.
      const double wide = std::uniform_real_distribution<double>(-1, 1)(random);
      std::memcpy(&block[i], &wide, size);
    } else if (dtype == DType::kF32) {
      std::memcpy(&block[i], &x, size);
    } else {  // bf16
      const auto half = static_cast<std::uint16_t>(bits >> 16);
      std::memcpy(&block[i], &half, size);
    }
  }
  for (std::size_t at = 0; at < array.bytes(); at += block.size()) {
    Check(CopyToDevice(gpus.own(), static_cast<char*>(array.memory()) + at, block.data(),
                       std::min(block.size(), array.bytes() - at)));
  }
  Check(Synchronize(gpus.own()));
}

struct Product {
  DType dtype;
  std::int64_t m, n, k;
  bool transpose_b;
};

struct Measured {
  double us = 0;
  std::string strategy;
  int devices = 1;
};

Measured Median(const Gpus& gpus, const Product& p, Array& a, const Array& b, const Array& c,
                bool alone, int rounds) {
  const View left = WholeView(OrDie(MakeArrayType(p.dtype, {p.m, p.k})), a.data());
  const auto [rows, columns] = p.transpose_b ? std::pair(p.n, p.k) : std::pair(p.k, p.n);
  const View right = WholeView(OrDie(MakeArrayType(p.dtype, {rows, columns})), b.data());
  Measured measured;
  std::vector<double> times;
  for (int i = -2; i < rounds; ++i) {
    Check(BeginRequest(gpus.own()));
    RunOptions options{.timing = true};
    if (!alone) options.team = &a;
    const Stats stats = OrDie(
        RunMatmul(gpus.own(), left, right, false, p.transpose_b, p.dtype, c.memory(), options));
    for (const auto& stream : gpus.streams) Check(EndRequest(*stream));
    measured.strategy = stats.strategy;
    measured.devices = stats.devices;
    if (i >= 0) times.push_back(stats.kernel_us);
  }
  std::sort(times.begin(), times.end());
  measured.us = times[times.size() / 2];
  return measured;
}

std::vector<char> BytesOf(const Gpus& gpus, const Array& array) {
  std::vector<char> bytes(array.bytes());
  Check(CopyToHost(gpus.own(), bytes.data(), array.data(), bytes.size()));
  return bytes;
}

class Report {
 public:
  void Row(const Product& p, std::string_view what, std::string_view b, const Measured& measured,
           double one_us, std::string_view bits) {
    const double flops =
        2 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
    std::printf("%-5s %6d %s %-12s b %-8s %-14s %d GPUs %10.1f us %7.1f TFLOP/s %5.2f x %s\n",
                std::string(Name(p.dtype)).c_str(), static_cast<int>(p.n),
                p.transpose_b ? "nt" : "nn", std::string(what).c_str(), std::string(b).c_str(),
                measured.strategy.c_str(), measured.devices, measured.us,
                flops / measured.us * 1e-6, one_us / measured.us, std::string(bits).c_str());
    std::fflush(stdout);
    rows_.push_back(absl::StrCat(
        "{\"dtype\": \"", std::string(Name(p.dtype)), "\", \"m\": ", p.m, ", \"n\": ", p.n,
        ", \"k\": ", p.k, ", \"transpose_b\": ", p.transpose_b ? "true" : "false", ", \"way\": \"",
        std::string(what), "\", \"b\": \"", std::string(b), "\", \"strategy\": \"",
        measured.strategy, "\", \"devices\": ", measured.devices, ", \"us\": ", measured.us,
        ", \"one_us\": ", one_us, ", \"bits\": \"", std::string(bits), "\"}"));
  }
  void Write(const std::string& path) const {
    std::FILE* file = std::fopen(path.c_str(), "w");
    if (file == nullptr) Die(absl::NotFoundError(path));
    std::fprintf(file, "[\n  %s\n]\n", absl::StrJoin(rows_, ",\n  ").c_str());
    std::fclose(file);
  }
  bool wrong = false;

 private:
  std::vector<std::string> rows_;
};

void Run(const Gpus& gpus, const Product& p, bool library, bool brief, int rounds, Report& report) {
  const std::size_t count = gpus.devices.size();
  const std::uint64_t size = SizeOf(p.dtype);
  const auto bytes = [&](std::int64_t rows, std::int64_t columns) {
    return static_cast<std::uint64_t>(rows * columns) * size;
  };
  Measured one;
  std::vector<char> expected;
  {
    // All on the first GPU: as any product, and as the only share of one.
    Array a(gpus, 1, bytes(p.m, p.k)), b(gpus, 1, bytes(p.k, p.n)), c(gpus, 1, bytes(p.m, p.n));
    Fill(gpus, a, p.dtype, 1);
    Fill(gpus, b, p.dtype, 2);
    one = Median(gpus, p, a, b, c, /*alone=*/true, rounds);
    report.Row(p, "one", "there", one, one.us, "");
    if (library) {
      const double us = XtMicroseconds(p.dtype, p.n, a.data(), b.data(), static_cast<int>(count),
                                       std::min(rounds, 3));
      if (us > 0)
        report.Row(p, "cuBLASXt", "on one", {us, "cublasXt", static_cast<int>(count)}, one.us, "");
      return;
    }
    const Measured share = Median(gpus, p, a, b, c, /*alone=*/false, rounds);
    report.Row(p, "one share", "there", share, one.us, "");
    expected = BytesOf(gpus, c);
  }
  Array a(gpus, count, bytes(p.m, p.k)), c(gpus, count, bytes(p.m, p.n));
  Fill(gpus, a, p.dtype, 1);
  for (const bool divided : {true, false}) {
    if (brief && !divided) continue;
    Array b(gpus, divided ? count : 1, bytes(p.k, p.n));
    Fill(gpus, b, p.dtype, 2);
    const std::string_view where = divided ? "divided" : "on one";
    for (const auto& [way, name] :
         {std::pair(Way::kChosen, "overlapped"), std::pair(Way::kBeforehand, "beforehand"),
          std::pair(Way::kRemote, "remote")}) {
      if (brief && way != Way::kChosen) continue;
      SetWay(way);
      Check(Zero(gpus.own(), c.memory(), c.bytes()));
      Check(Synchronize(gpus.own()));
      const Measured measured = Median(gpus, p, a, b, c, /*alone=*/false,
                                       way == Way::kRemote ? std::min(rounds, 3) : rounds);
      const bool same = BytesOf(gpus, c) == expected;
      report.wrong |= !same && measured.devices > 1;
      report.Row(p, name, where, measured, one.us, same ? "same bits" : "OTHER BITS");
    }
    SetWay(Way::kChosen);
    if (divided && !brief) {
      // Without sharing: the first GPU reads the others' memory.
      const Measured alone = Median(gpus, p, a, b, c, /*alone=*/true, std::min(rounds, 3));
      report.Row(p, "not shared", where, alone, one.us, "");
    }
  }
}

int Main(int argc, char** argv) {
  std::string json;
  int rounds = 9;
  bool library = false, brief = false;
  std::vector<std::pair<DType, std::int64_t>> sides;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--json=")) {
      json = argument.substr(7);
    } else if (argument.starts_with("--rounds=")) {
      rounds = std::atoi(argv[i] + 9);
    } else if (argument == "--library") {
      library = true;
    } else if (argument == "--brief") {
      brief = true;
    } else if (const std::size_t colon = argument.find(':'); colon != std::string_view::npos) {
      const std::string_view name = argument.substr(0, colon);
      for (DType dtype : {DType::kF32, DType::kF64, DType::kBF16})
        if (Name(dtype) == name) sides.emplace_back(dtype, std::atoi(argv[i] + colon + 1));
    }
  }
  if (rounds < 1 || sides.empty()) {
    std::fprintf(stderr,
                 "usage: product_bench [--json=FILE] [--rounds=N] [--library] [--brief] bf16:8192 "
                 "f32:8192 ...\n");
    return 2;
  }
  const Gpus gpus;
  if (gpus.devices.empty()) {
    std::fprintf(stderr, "product_bench: there is no GPU\n");
    return 1;
  }
  Report report;
  for (const auto& [dtype, side] : sides) {
    for (bool transpose_b : {false, true}) {
      if (!transpose_b || (!library && !brief))
        Run(gpus, {dtype, side, side, side, transpose_b}, library, brief, rounds, report);
    }
  }
  if (!json.empty()) report.Write(json);
  return report.wrong ? 1 : 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) { return tessera::bench::Main(argc, argv); }
