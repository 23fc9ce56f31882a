// The page for people, made from status_page.html: it reads /metrics by itself.
#pragma once

namespace tessera {

extern const char* const kStatusPage;

}  // namespace tessera
