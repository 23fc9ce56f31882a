// A libnvidia-ml.so.1 that says what a test tells it to.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>

namespace tessera {

// What the library says, through FakeNvmlState(), which it exports.
struct FakeNvml {
  std::mutex mutex;
  std::string bus_id = "0000:65:00.0";  // of its one GPU
  int init_result = 0;
  std::map<std::string, int> results;  // of functions that fail
  unsigned busy = 87, celsius = 61, milliwatts = 512'345, limit_milliwatts = 700'000, mhz = 1755;
  unsigned long long memory_used = 70ull << 30;
  unsigned long long slowdowns = 0x4;
  unsigned long long corrected = 3, uncorrected = 0;
  std::atomic<int> calls{0};         // of the first function, and of those that ask for a figure
  std::atomic<bool> blocked{false};  // they do not return
};

}  // namespace tessera
