#include "server/cluster/home.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

constexpr std::string_view kEverywhere = "unnamed/";

absl::Status Bad(const std::string& file, absl::string_view why) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RING",
                   absl::StrCat("cannot use ", file, " as --ring: ", why), {{"file", file}});
}

}  // namespace

absl::StatusOr<std::unique_ptr<Home>> Home::Open(const std::string& file,
                                                 const std::string& server) {
  std::unique_ptr<Home> home(new Home(file, server));
  RETURN_IF_ERROR(home->Load());
  return home;
}

absl::Status Home::Load() {
  stamp_ = StampOf(file_);
  const absl::StatusOr<std::string> text = ReadWatched(file_);
  if (!text.ok()) return Bad(file_, text.status().message());
  absl::StatusOr<Ring> ring = Ring::Parse(*text);
  if (!ring.ok()) return Bad(file_, ring.status().message());
  if (ring->Find(server_) == nullptr)
    return Bad(file_, absl::StrCat("it has no server '", server_, "', which --ring-name names"));
  const std::lock_guard lock(mutex_);
  ring_ = std::make_shared<const Ring>(*std::move(ring));
  return absl::OkStatus();
}

absl::Status Home::Check(std::string_view name) const {
  if (absl::StartsWith(Absl(name), Absl(kEverywhere))) return absl::OkStatus();
  std::shared_ptr<const Ring> ring;
  {
    const std::lock_guard lock(mutex_);
    ring = ring_;
  }
  const Ring::Server& home = ring->HomeOf(name);
  if (home.name == server_) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "WRONG_HOST",
      absl::StrCat("'", Absl(name), "' belongs to server ", home.name, " at ", home.address),
      {{"name", std::string(name)}, {"owner", home.name}, {"address", home.address}});
}

void Home::Reload(bool asked) {
  if (!asked && StampOf(file_) == stamp_) return;
  const absl::Status status = Load();
  stale_.store(!status.ok(), std::memory_order_relaxed);
  if (status.ok()) {
    spdlog::info("--ring: the file {} and is in effect",
                 asked ? "has been read again" : "has changed");
  } else {
    const absl::string_view message = status.message();
    spdlog::error("{}; the current ring stays in effect",
                  std::string_view(message.data(), message.size()));
  }
}

}  // namespace tessera
