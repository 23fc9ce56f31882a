#include "kernels/device/profiler_range.h"

#ifdef TESSERA_WITH_NVTX

#include <string>

#include "nvtx3/nvToolsExt.h"

namespace tessera {
namespace {

// Returns null if no profiler is listening.
nvtxDomainHandle_t Domain() noexcept {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("tessera");
  return domain;
}

}  // namespace

ProfilerRange::ProfilerRange(std::string_view name) noexcept {
  if (Domain() == nullptr) return;
  const std::string terminated(name);
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = terminated.c_str();
  nvtxDomainRangePushEx(Domain(), &event);
}

ProfilerRange::~ProfilerRange() {
  if (Domain() != nullptr) nvtxDomainRangePop(Domain());
}

}  // namespace tessera

#else  // a build without NVTX, which is part of the CUDA toolkit

namespace tessera {

ProfilerRange::ProfilerRange(std::string_view) noexcept {}
ProfilerRange::~ProfilerRange() {}

}  // namespace tessera

#endif
