#include <cstring>

#include "client/bench/naive_device.h"

namespace tessera::bench {
namespace {

class Host final : public NaiveDevice {
 public:
  const char* name() const override { return "plain loop"; }
  std::shared_ptr<float> Allocate(std::size_t elements) override {
    return {new float[elements], std::default_delete<float[]>()};
  }
  std::shared_ptr<char> AllocatePinned(std::size_t bytes) override {
    return {new char[bytes](), std::default_delete<char[]>()};
  }
  void Copy(void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  float Dot(const float* a, const float* b, std::int64_t elements) override {
    float sum = 0;
    for (std::int64_t i = 0; i < elements; ++i) sum += a[i] * b[i];
    return sum;
  }
};

}  // namespace

std::unique_ptr<NaiveDevice> NaiveHost() { return std::make_unique<Host>(); }

#ifndef TESSERA_WITH_CUDA
std::unique_ptr<NaiveDevice> NaiveCuda() { return nullptr; }
#endif

}  // namespace tessera::bench
