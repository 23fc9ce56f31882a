// The metrics as text, in Prometheus's exposition format 0.0.4. docs/metrics.md lists them.
#pragma once

#include <string>

#include "server/core.h"

namespace tessera {

// ready: whether the health service says so of the services.
std::string MetricsText(Core& core, bool ready);

}  // namespace tessera
