// The status page, made from status_page.html. It reads /metrics by itself.
#pragma once

namespace tessera {

extern const char* const kStatusPage;

}  // namespace tessera
