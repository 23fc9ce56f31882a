// Regret: compares the strategies that requests get by default with the vendor's calls and with the
// best of all strategies, on random problems rather than selected ones.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/bench/rig.h"

namespace tessera::bench {

struct RegretOptions {
  int problems = 0;
  std::uint64_t seed = 1;
  std::string operation;  // only problems of this operation; empty: of all operations
  std::string json;       // the file for the measurements; empty: none
};

// Times options.problems random problems and prints how the defaults perform. Returns the exit
// code.
int RunRegret(Rig& rig, const RegretOptions& options);

}  // namespace tessera::bench
