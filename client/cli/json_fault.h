// What JSON from outside may not have, although it is valid.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace tessera {

// Returns "is nested too deeply" if lists and objects are nested more than `deepest` deep, and
// "sets \"KEY\" twice" if an object has two keys for which `fold` returns the same text. Otherwise
// returns "", also for a text that is not JSON.
std::string JsonFault(const std::string& text, std::size_t deepest,
                      const std::function<std::string(std::string_view)>& fold);

}  // namespace tessera
