// Writes results to standard output and as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <vector>

#include "client/bench/channels.h"
#include "client/bench/measure.h"
#include "client/bench/options.h"

namespace tessera::bench {

void PrintHead();
void Print(const Row& row);

// Returns the parts of a document other than its rows. Asks every server except the bare ones about
// its devices.
nlohmann::ordered_json Describe(const Options& options, const std::vector<Target>& targets);

// Writes one document, with one row per line.
void Write(std::ostream& file, const nlohmann::ordered_json& description,
           const std::vector<Row>& rows);

}  // namespace tessera::bench
