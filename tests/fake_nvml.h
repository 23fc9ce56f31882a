// A libnvidia-ml.so.1 that reports what a test tells it to.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>

namespace tessera {

// What the library reports. It exports FakeNvmlState(), which returns this object.
struct FakeNvml {
  std::mutex mutex;
  int init_result = 0;
  std::map<std::string, int> results;  // Results of functions that fail.
  unsigned long long slowdowns = 0x4;
  // Calls of nvmlInit_v2 and of the functions that return a number.
  std::atomic<int> calls{0};
  std::atomic<bool> blocked{false};  // Whether these calls block.
};

}  // namespace tessera
