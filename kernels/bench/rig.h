// The basis of strategy_bench: a device, operands that are in different memory at every call, and
// the device's clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/element.h"
#include "kernels/compute.h"

namespace tessera::bench {

[[noreturn]] inline void Die(const absl::Status& status) {
  std::fprintf(stderr, "strategy_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}
inline void Check(const absl::Status& status) {
  if (!status.ok()) Die(status);
}
template <class T>
T OrDie(absl::StatusOr<T> value) {
  Check(value.status());
  return *std::move(value);
}

// Device memory filled with normally distributed values of one type. Operands are taken from it one
// after the other. It is larger than the operands of a call by more than three times the largest L2
// cache, so every operand is read from memory.
class Arena {
 public:
  // `bytes` is the total size of the operands of one call.
  Arena(Stream& stream, DType dtype, std::size_t bytes);

  // Makes Next start again from the front.
  void Rewind() { at_ = 0; }

  // Returns memory for an operand of `bytes`, aligned to 256 bytes and different from the memory of
  // the previous operands.
  void* Next(std::size_t bytes);

  // Returns the value of element i of an operand.
  template <class T>
  double Value(const void* operand, std::int64_t i) const {
    const auto at = static_cast<std::size_t>(static_cast<const char*>(operand) -
                                             static_cast<const char*>(memory_.data())) +
                    static_cast<std::size_t>(i) * sizeof(T);
    T value;
    std::memcpy(&value, &block_[at % block_.size()], sizeof value);
    return static_cast<double>(static_cast<ValueOf<T>>(value));
  }

 private:
  Memory memory_;
  std::size_t at_ = 0;
  // The memory consists of copies of this block.
  std::vector<char> block_ = std::vector<char>(std::size_t{16} << 20);
};

class Rig {
 public:
  explicit Rig(std::string_view name)
      : device_(OrDie(OpenDevice(name))), stream_(OrDie(MakeStream(*device_))) {}

  Device& device() { return *device_; }
  Stream& stream() { return *stream_; }
  bool gpu() const { return device_->info().backend == Backend::kCuda; }

  // Announces a call whose operands take `bytes` in total. The arena is created on its first use,
  // large enough for every announced call.
  void Need(DType dtype, std::size_t bytes) { needs_[dtype] = std::max(needs_[dtype], bytes); }
  Arena& Operands(DType dtype);
  // Results are written to separate memory, because results that became operands of later calls
  // would soon overflow.
  void NeedOutput(std::size_t bytes) { output_bytes_ = std::max(output_bytes_, bytes); }
  void* Output(std::size_t bytes);

  // Runs launch(), which enqueues one operation, so that everything it needs is loaded. Then runs
  // it again, and returns how many microseconds the host needs to enqueue the operation. Throws
  // DeviceError.
  double WarmUp(const std::function<void()>& launch);

  // Returns the microseconds of device time from the first to the last step of one operation. A
  // kernel holds the device until the host has enqueued the operation, for which the host needs
  // enqueueing_us. If enqueueing_us is kIdle, the operation begins on an idle device, as for a
  // caller that waits for each response, and the measurement includes the time that the host needs
  // to launch a second kernel. Throws DeviceError.
  double Time(const std::function<void()>& launch, double enqueueing_us);
  static constexpr double kIdle = -1;

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::map<DType, std::size_t> needs_;
  std::map<DType, std::unique_ptr<Arena>> arenas_;
  std::size_t output_bytes_ = 0;
  std::unique_ptr<Arena> outputs_;
};

}  // namespace tessera::bench
