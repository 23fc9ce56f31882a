// What Take does with an index that is not in [0, length).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tessera {

// The values equal those of tessera.v1.TakeMode on the wire.
enum class TakeMode : std::uint8_t { kError = 1, kWrap, kClip };

inline constexpr std::array<TakeMode, 3> kAllTakeModes = {TakeMode::kError, TakeMode::kWrap,
                                                          TakeMode::kClip};

constexpr std::string_view Name(TakeMode mode) {
  return mode == TakeMode::kWrap ? "wrap" : mode == TakeMode::kClip ? "clip" : "error";
}

}  // namespace tessera
