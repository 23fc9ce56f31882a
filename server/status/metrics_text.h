// The metrics as text, in Prometheus's exposition format 0.0.4. docs/metrics.md lists them.
#pragma once

#include <string>
#include <vector>

#include "server/core.h"
#include "server/devices/gpu_monitor.h"
#include "server/net/tls.h"

namespace tessera {

// `ready` says whether the health service reports the services as ready. `tls` is null without TLS.
// `gpus` has the driver's metrics for the core's devices.
std::string MetricsText(Core& core, bool ready, const ServerTls* tls,
                        const std::vector<GpuFigures>& gpus);

}  // namespace tessera
