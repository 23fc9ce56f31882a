#include "client/cli/json_fault.h"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestKey = 300;  // of those in a fault

// nlohmann's parser with a callback takes quadratic time, because it visits all earlier elements of
// a list at the end of each object.
class KeyCheck : public nlohmann::json_sax<nlohmann::json> {
 public:
  KeyCheck(std::size_t deepest, const std::function<std::string(std::string_view)>& fold)
      : deepest_(deepest), fold_(fold) {}

  const std::string& fault() const { return fault_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(std::int64_t) override { return true; }
  bool number_unsigned(std::uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(nlohmann::json::binary_t&) override { return true; }
  bool start_object(std::size_t) override { return Begin(); }
  bool end_object() override { return End(); }
  bool start_array(std::size_t) override { return Begin(); }
  bool end_array() override { return End(); }
  bool key(std::string& key) override {
    if (open_.back().insert(fold_(key)).second) return true;
    fault_ = absl::StrCat("sets \"", Absl(Beginning(key, kLongestKey)), "\" twice");
    return false;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

 private:
  bool Begin() {
    open_.emplace_back();
    if (open_.size() > deepest_) fault_ = "is nested too deeply";
    return fault_.empty();
  }
  bool End() {
    open_.pop_back();
    return true;
  }

  const std::size_t deepest_;
  const std::function<std::string(std::string_view)>& fold_;
  std::vector<std::set<std::string>> open_;  // the keys of each list or object that has not ended
  std::string fault_;
};

}  // namespace

std::string JsonFault(const std::string& text, std::size_t deepest,
                      const std::function<std::string(std::string_view)>& fold) {
  KeyCheck check(deepest, fold);
  nlohmann::json::sax_parse(text, &check, nlohmann::json::input_format_t::json, /*strict=*/true,
                            /*ignore_comments=*/true);
  return check.fault();
}

}  // namespace tessera
