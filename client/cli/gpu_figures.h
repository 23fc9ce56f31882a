// Shows the metrics that a server's GPU driver reports, for `tessera top`. They are read from the
// server's metrics page.
#pragma once

#include <ostream>

#include "client/cli/output.h"
#include "client/cli/server_metrics.h"

namespace tessera {

// Writes an empty line and a table of the GPUs, or nothing if there are none.
void WriteGpus(const MetricsSample& sample, std::ostream& out);

// Returns a list of objects that contain only the metrics that the driver reports.
Json GpusJson(const MetricsSample& sample);

}  // namespace tessera
