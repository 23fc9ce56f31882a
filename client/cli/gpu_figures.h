// The metrics of a server's GPUs from their driver, read from the server's metrics page, for
// `tessera top`.
#pragma once

#include <ostream>

#include "client/cli/output.h"
#include "client/cli/server_metrics.h"

namespace tessera {

// Writes an empty line and a table of the GPUs, or nothing if there are none.
void WriteGpus(const MetricsSample& sample, std::ostream& out);

// Returns a list of objects, which contain only what the driver reports.
Json GpusJson(const MetricsSample& sample);

}  // namespace tessera
