// A temporary file for a test.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace tessera {

// A path that no other process uses and that is removed after the test.
class TemporaryFile {
 public:
  // Writes the file, unless it is supposed to be empty.
  explicit TemporaryFile(const std::string& content = {})
      : path_(std::filesystem::temp_directory_path() /
              ("tessera-test-" + std::to_string(::getpid()) + "-" + std::to_string(++count_))) {
    if (!content.empty()) std::ofstream(path_, std::ios::binary) << content;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  std::string path() const { return path_.string(); }
  std::string Content() const {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

 private:
  static inline int count_ = 0;
  std::filesystem::path path_;
};

}  // namespace tessera
