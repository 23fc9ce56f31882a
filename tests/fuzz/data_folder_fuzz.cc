// The folder of --data-dir: a manifest, and after a line of "====" the file of its first array. The
// manifest is read as it is, and as the inner object of one with the right checksum.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/crc32c.h"
#include "nlohmann/json.hpp"
#include "server/durable/data_folder.h"
#include "tests/fuzz/fuzz.h"
#include "tests/temporary_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class Target {
 public:
  Target() {
    absl::StatusOr<std::unique_ptr<DataFolder>> folder = DataFolder::Open(path_.path());
    Require(folder.ok(), "no folder");
    folder_ = *std::move(folder);
    fs::create_directory(Path("arrays"));
  }
  ~Target() { fs::remove_all(path_.path()); }

  void Check(std::string_view input) {
    constexpr std::string_view kLine = "\n====\n";
    const std::size_t end = std::min(input.find(kLine), input.size());
    const std::string manifest(input.substr(0, end));
    const std::string_view array = input.substr(std::min(end + kLine.size(), input.size()));
    CheckManifest(manifest, array);
    using Json = nlohmann::json;
    const Json json = Json::parse(
        manifest, [](int depth, Json::parse_event_t, const Json&) { return depth < 100; }, false);
    if (json.is_discarded()) return;
    const std::string bytes = json.dump();
    CheckManifest(absl::StrCat(R"({"crc32c":)", Crc32c(bytes.data(), bytes.size()),
                               R"(,"manifest":)", manifest, "}"),
                  array);
  }

 private:
  std::string Path(const std::string& name) const { return path_.path() + "/" + name; }
  static void Write(const fs::path& file, std::string_view content) {
    std::ofstream(file, std::ios::binary) << content;
  }
  std::string ManifestText() const {
    std::ifstream in(Path("manifest.json"), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  void CheckManifest(std::string_view text, std::string_view array) {
    Write(Path("manifest.json"), text);
    const absl::StatusOr<Manifest> manifest = folder_->ReadManifest();
    if (!manifest.ok()) {
      Require(ErrorReason(manifest.status()) == "BAD_DATA_DIR",
              "an error of another kind: " + manifest.status().ToString());
      return;
    }
    if (!manifest->files.empty()) CheckArray(manifest->files.begin()->second, array);
    // A manifest that is written is read back unchanged.
    bool replaced = false;
    Require(folder_->WriteManifest(*manifest, &replaced).ok(), "a manifest is not written");
    const std::string written = ManifestText();
    const absl::StatusOr<Manifest> again = folder_->ReadManifest();
    Require(again.ok(), "a manifest is not read back: " + again.status().ToString());
    Require(folder_->WriteManifest(*again, &replaced).ok() && ManifestText() == written,
            "a manifest is read back as another");
  }

  void CheckArray(const ArrayFile& file, std::string_view content) {
    const std::string path = Path("arrays/" + std::to_string(file.number) + ".safetensors");
    Write(path, content);
    absl::StatusOr<DataFolder::Reader> reader = folder_->Read(file);
    absl::Status status = reader.status();
    if (status.ok()) {
      Require(file.type.bytes() <= content.size(), "a file is cut off, and read");
      std::string bytes(file.type.bytes(), '\0');
      status = reader->Read(bytes.data(), bytes.size());
      if (status.ok()) status = reader->Finish();
      Require(status.ok() ==
                  (content.ends_with(bytes) && Crc32c(bytes.data(), bytes.size()) == file.checksum),
              "the bytes of an array are not checked");
    }
    Require(status.ok() || absl::IsDataLoss(status),
            "an error of another kind: " + status.ToString());
    fs::remove(path);
  }

  const TemporaryFile path_;
  std::unique_ptr<DataFolder> folder_;
};

}  // namespace
}  // namespace tessera

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static tessera::Target target;
  target.Check(tessera::Text(data, size));
  return 0;
}
