// What the fuzz targets share. Each is a file with an entry point that libFuzzer calls with bytes
// of its own making (./dev fuzz), and that replay.cc calls with those of files.
#pragma once

#include <poll.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

// Returns 0. What it finds ends the process.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace tessera {

inline std::string_view Text(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Ends the process unless `holds`, whatever the build.
inline void Require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what.c_str());
  std::abort();
}

// Waits until the socket has something to read, or its end. libFuzzer's own alarm interrupts waits.
inline void AwaitInput(int socket) {
  constexpr int kPatienceMs = 60'000;
  pollfd wait{socket, POLLIN, 0};
  int ready = 0;
  do {
    ready = poll(&wait, 1, kPatienceMs);
  } while (ready < 0 && errno == EINTR);
  Require(ready == 1, "neither an answer nor an end");
}

}  // namespace tessera
