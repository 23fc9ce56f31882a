#include "client/bench/plan.h"

#include <string>

namespace tessera::bench {
namespace {

std::vector<Load> LoadsOf(const Options& options) {
  std::vector<Load> loads;
  const bool only_others = !options.rate.empty() || !options.rest.empty();
  if (!options.load.empty() || !only_others) loads.push_back({});
  for (const double rate : options.rate) loads.push_back({Load::Kind::kRate, rate});
  for (const double share : options.load) loads.push_back({Load::Kind::kShare, share});
  return loads;
}

}  // namespace

const std::vector<std::int64_t>& SizesOf(const Operation& operation, const Options& options) {
  static const std::vector<std::int64_t> none = {0};
  switch (operation.size_unit) {
    case SizeUnit::kNone:
      return none;
    case SizeUnit::kElements:
      return options.elements;
    case SizeUnit::kSide:
      return options.side;
    case SizeUnit::kSteps:
      return options.steps;
    case SizeUnit::kMib:
      return options.transfer_mib;
  }
  return none;
}

std::vector<Group> GroupsOf(const Options& options) {
  const std::vector<Load> loads = LoadsOf(options);
  std::vector<Load> rests;
  for (const double seconds : options.rest) rests.push_back({Load::Kind::kRest, seconds});
  std::vector<Group> groups;
  for (const std::string& name : options.operations) {
    const Operation& operation = FindOperation(name);
    for (const std::int64_t size : SizesOf(operation, options)) {
      if (!loads.empty())
        for (const int callers : options.callers)
          groups.push_back({&operation, size, callers, loads});
      if (!rests.empty()) groups.push_back({&operation, size, 1, rests});
    }
  }
  return groups;
}

}  // namespace tessera::bench
