// Regret: the strategies that requests get by default, beside the vendor's calls and beside the
// best of all strategies, on random problems instead of chosen ones.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/bench/rig.h"

namespace tessera::bench {

struct RegretOptions {
  int problems = 0;
  std::uint64_t seed = 1;
  std::string operation;  // problems of this one alone; empty: of all
  std::string json;       // where the figures go; empty: nowhere
};

// Times options.problems random problems and prints how the defaults do. Returns the exit code.
int RunRegret(Rig& rig, const RegretOptions& options);

}  // namespace tessera::bench
