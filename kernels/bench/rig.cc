#include "kernels/bench/rig.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <type_traits>

#include "kernels/bench/launches.h"

namespace tessera::bench {
namespace {

// More than three times the L2 cache of an H200, which has 60 MB.
constexpr std::size_t kRotation = std::size_t{256} << 20;
constexpr std::size_t kAlignment = 256;

}  // namespace

Arena::Arena(Stream& stream, DType dtype, std::size_t bytes)
    : memory_(OrDie(Allocate(stream.device(), bytes + kRotation))) {
  std::mt19937 random(1);
  DispatchDType(dtype, [&](auto zero) {
    using T = decltype(zero);
    // The numbers use all the bits of the type.
    using Number = std::conditional_t<std::is_same_v<T, double>, double, float>;
    std::normal_distribution<Number> normal;
    // A standard deviation of 100 makes the integers differ from each other.
    constexpr Number kScale = !std::is_integral_v<T> ? 1 : sizeof(T) == 1 ? 20 : 100;
    for (std::size_t at = 0; at < block_.size(); at += sizeof(T)) {
      const auto value = static_cast<T>(static_cast<ValueOf<T>>(kScale * normal(random)));
      std::memcpy(&block_[at], &value, sizeof value);
    }
  });
  for (std::size_t at = 0; at < memory_.size(); at += block_.size()) {
    Check(CopyToDevice(stream, static_cast<char*>(memory_.data()) + at, block_.data(),
                       std::min(block_.size(), memory_.size() - at)));
  }
}

void* Arena::Next(std::size_t bytes) {
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (at_ + bytes > memory_.size()) at_ = 0;
  void* operand = static_cast<char*>(memory_.data()) + at_;
  at_ += bytes;
  return operand;
}

Arena& Rig::Operands(DType dtype) {
  std::unique_ptr<Arena>& arena = arenas_[dtype];
  if (arena == nullptr) arena = std::make_unique<Arena>(*stream_, dtype, needs_[dtype]);
  return *arena;
}

void* Rig::Output(std::size_t bytes) {
  if (outputs_ == nullptr) outputs_ = std::make_unique<Arena>(*stream_, DType::kF32, output_bytes_);
  return outputs_->Next(bytes);
}

double Rig::WarmUp(const std::function<void()>& launch) {
  stream_->Reset();
  launch();
  stream_->Synchronize();
  stream_->Reset();
  const auto begin = std::chrono::steady_clock::now();
  launch();
  const std::chrono::duration<double, std::micro> us = std::chrono::steady_clock::now() - begin;
  stream_->Synchronize();
  return us.count();
}

double Rig::Time(const std::function<void()>& launch, double enqueueing_us) {
  stream_->Reset();
  if constexpr (kWithCuda) {
    // The hold is limited to 200 us, because a longer one does not help operations that themselves
    // wait for the device.
    if (gpu() && enqueueing_us != kIdle)
      LaunchHold(*stream_, std::min(10 + 3 * enqueueing_us, 200.0));
  }
  return stream_->Time(launch);
}

}  // namespace tessera::bench
