// A profiler that only listens to NVTX: the library for NVTX_INJECTION64_PATH. For each range that
// begins or ends, it appends a line to the file NVTX_RECORD: "push NAME THREAD" or "pop THREAD".
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "nvtx3/nvToolsExt.h"

namespace {

std::FILE* file = nullptr;  // It is line-buffered, so that threads write whole lines.
int domain;                 // Its address is the handle of every domain.

nvtxDomainHandle_t CreateDomain(const char* name) {
  std::fprintf(file, "domain %s\n", name);
  return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}

int Push(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  std::fprintf(file, "push %s %d\n", event->message.ascii, gettid());
  return 0;
}

int Pop(nvtxDomainHandle_t) {
  std::fprintf(file, "pop %d\n", gettid());
  return 0;
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  const char* path = std::getenv("NVTX_RECORD");
  if (path == nullptr || (file = std::fopen(path, "ae")) == nullptr) return 0;
  std::setvbuf(file, nullptr, _IOLBF, 4096);
  const auto* tables = static_cast<const NvtxExportTableCallbacks*>(get(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (tables->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) return 0;
  const auto set = [table](NvtxCallbackIdCore2 id, auto* function) {
    *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  set(NVTX_CBID_CORE2_DomainCreateA, CreateDomain);
  set(NVTX_CBID_CORE2_DomainRangePushEx, Push);
  set(NVTX_CBID_CORE2_DomainRangePop, Pop);
  return 1;
}
