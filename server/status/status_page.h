// The status page, generated from status_page.html. The page itself reads /metrics.
#pragma once

namespace tessera {

extern const char* const kStatusPage;

}  // namespace tessera
