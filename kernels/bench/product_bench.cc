// Times products on several GPUs and on one, for each way in which b gets to a GPU, and with the
// vendor's library.
//
//   product_bench [--json=FILE] [--rounds=N] [--library] [--brief] bf16:8192 f32:8192 ...
//
// a and the result are divided among all GPUs; b is divided among them or is on the first one.
// Times are medians of device time, from the first piece of work on any GPU to the last one. For
// cuBLASXt they are measured with the host's clock. Variants are interleaved, because a GPU that
// has been busy for some seconds is slower than one that has not. Every result of several GPUs is
// compared bit for bit with the result of one GPU and the same strategy. --library times only
// cuBLASXt and one GPU. --brief times only one GPU and the variant in which b is divided, not
// transposed, and copied while it is multiplied. CUDA_VISIBLE_DEVICES selects fewer GPUs.
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

// Memory that is divided among the first `count` GPUs, which work as a team on the arrays in it.
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

// Fills the array with copies of a block of elements between -1 and 1.
void Fill(const Gpus& gpus, const Array& array, DType dtype, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<char> block(std::min<std::size_t>(array.bytes(), (std::size_t{8} << 20) + 6144));
  const std::size_t size = SizeOf(dtype);
  for (std::size_t i = 0; i + size <= block.size(); i += size) {
    const float x = static_cast<float>(random() % 20001) / 10000.f - 1.f;
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    if (dtype == DType::kF64) {
      // The numbers use all the bits of the type.
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

// One variant of how a product is computed, by all GPUs or by one.
struct Variant {
  std::string_view name;
  std::string_view where_b;
  Array& a;
  const Array& b;
  const Array& c;
  bool alone = false;
  Way way = Way::kChosen;
  bool slow = false;  // three rounds are enough
};

double Microseconds(const Gpus& gpus, const Product& p, const Variant& v, Measured& measured) {
  const View left = WholeView(OrDie(MakeArrayType(p.dtype, {p.m, p.k})), v.a.data());
  const auto [rows, columns] = p.transpose_b ? std::pair(p.n, p.k) : std::pair(p.k, p.n);
  const View right = WholeView(OrDie(MakeArrayType(p.dtype, {rows, columns})), v.b.data());
  SetWay(v.way);
  Check(BeginRequest(gpus.own()));
  RunOptions options{.timing = true};
  if (!v.alone) options.team = &v.a;
  const Stats stats = OrDie(
      RunMatmul(gpus.own(), left, right, false, p.transpose_b, p.dtype, v.c.memory(), options));
  for (const auto& stream : gpus.streams) Check(EndRequest(*stream));
  SetWay(Way::kChosen);
  measured.strategy = stats.strategy;
  measured.devices = stats.devices;
  return stats.kernel_us;
}

// Returns the medians of interleaved rounds.
std::vector<Measured> Medians(const Gpus& gpus, const Product& p,
                              const std::vector<Variant>& variants, int rounds) {
  std::vector<Measured> measured(variants.size());
  std::vector<std::vector<double>> times(variants.size());
  for (int i = -2; i < rounds; ++i) {
    for (std::size_t v = 0; v < variants.size(); ++v) {
      if (variants[v].slow && i >= 3) continue;
      const double us = Microseconds(gpus, p, variants[v], measured[v]);
      if (i >= 0) times[v].push_back(us);
    }
  }
  for (std::size_t v = 0; v < variants.size(); ++v) {
    std::sort(times[v].begin(), times[v].end());
    measured[v].us = times[v][times[v].size() / 2];
  }
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
  // These arrays are all on the first GPU; the ones below are all divided.
  Array a(gpus, 1, bytes(p.m, p.k)), b(gpus, 1, bytes(p.k, p.n)), c(gpus, 1, bytes(p.m, p.n));
  Fill(gpus, a, p.dtype, 1);
  Fill(gpus, b, p.dtype, 2);
  // One GPU computes the product like any other product, and as the only share of a shared product.
  const Variant one = {"one", "there", a, b, c, /*alone=*/true};
  const Variant share = {"one share", "there", a, b, c};
  if (library) {
    const Measured alone = Medians(gpus, p, {one}, rounds).front();
    report.Row(p, one.name, one.where_b, alone, alone.us, "");
    const double us = XtMicroseconds(p.dtype, p.n, a.data(), b.data(), static_cast<int>(count),
                                     std::min(rounds, 3));
    if (us > 0)
      report.Row(p, "cuBLASXt", "on one", {us, "cublasXt", static_cast<int>(count)}, alone.us, "");
    return;
  }
  Array a_parts(gpus, count, bytes(p.m, p.k)), b_parts(gpus, count, bytes(p.k, p.n)),
      c_parts(gpus, count, bytes(p.m, p.n));
  Fill(gpus, a_parts, p.dtype, 1);
  Fill(gpus, b_parts, p.dtype, 2);
  std::vector<Variant> variants = {one, share};
  for (const bool divided : {true, false}) {
    if (brief && !divided) continue;
    const std::string_view where = divided ? "divided" : "on one";
    for (const auto& [way, name] :
         {std::pair(Way::kChosen, "overlapped"), std::pair(Way::kBeforehand, "beforehand"),
          std::pair(Way::kRemote, "remote")}) {
      if (brief && way != Way::kChosen) continue;
      variants.push_back({name, where, a_parts, divided ? b_parts : b, c_parts, /*alone=*/false,
                          way, /*slow=*/way == Way::kRemote});
    }
    // Without sharing, the first GPU reads the memory of the other GPUs.
    if (divided && !brief)
      variants.push_back({"not shared", where, a_parts, b_parts, c_parts, /*alone=*/true,
                          Way::kChosen, /*slow=*/true});
  }
  const std::vector<Measured> measured = Medians(gpus, p, variants, rounds);
  std::vector<char> expected;
  for (std::size_t v = 0; v < variants.size(); ++v) {
    const Variant& variant = variants[v];
    std::string_view bits;
    if (!variant.alone) {
      Check(Zero(gpus.own(), variant.c.memory(), variant.c.bytes()));
      Check(Synchronize(gpus.own()));
      Measured ignored;
      Microseconds(gpus, p, variant, ignored);
      std::vector<char> got = BytesOf(gpus, variant.c);
      if (expected.empty()) {
        expected = std::move(got);
      } else {
        const bool same = got == expected;
        report.wrong |= !same && measured[v].devices > 1;
        bits = same ? "same bits" : "OTHER BITS";
      }
    }
    report.Row(p, variant.name, variant.where_b, measured[v], measured.front().us, bits);
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
