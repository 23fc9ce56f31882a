// What a driver tells of a server's GPUs, by the server's page of metrics, for `tessera top`.
#pragma once

#include <ostream>

#include "client/cli/output.h"
#include "client/cli/server_metrics.h"

namespace tessera {

// A table of them, behind an empty line; nothing where there are none.
void WriteGpus(const MetricsSample& sample, std::ostream& out);

// A list of objects, which have only what the driver tells.
Json GpusJson(const MetricsSample& sample);

}  // namespace tessera
