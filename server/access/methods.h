// THE list of the server's methods. Access control, metrics, the compute service and programs read
// it.
#pragma once

#include <string_view>

namespace tessera {

// The operations: X(method of ComputeService, field of Step and StepResult, which is also the
// kernels' name of the operation).
#define TESSERA_OPERATION_METHODS(X) \
  X(Dot, dot)                        \
  X(Reduce, reduce)                  \
  X(Matmul, matmul)                  \
  X(Add, add)                        \
  X(WindowSum, window_sum)           \
  X(Map, map)                        \
  X(TopK, top_k)

// Each may do what those before it may.
enum class Role { kNone, kRead, kWrite, kAdmin };

// A method and the least role that it needs. Those of the health service and of reflection need
// none, and are not in the list.
struct MethodInfo {
  std::string_view name;
  Role role;
};

inline constexpr MethodInfo kMethods[] = {
// A result that is stored needs kWrite, which the operations' handlers check.
#define TESSERA_METHOD_OF(Method, field) {#Method, Role::kRead},
    TESSERA_OPERATION_METHODS(TESSERA_METHOD_OF)
#undef TESSERA_METHOD_OF
    {"Execute", Role::kRead},
    {"ListStrategies", Role::kRead},
    // It tells only an admin about other tenants.
    {"GetServerInfo", Role::kRead},
    // BufferService: who makes, writes, changes or deletes a buffer needs kWrite.
    {"CreateBuffer", Role::kWrite},
    {"Upload", Role::kWrite},
    {"Download", Role::kRead},
    {"GetBuffer", Role::kRead},
    {"ListBuffers", Role::kRead},
    {"SealBuffer", Role::kWrite},
    {"UpdateBuffer", Role::kWrite},
    {"CopyBuffer", Role::kWrite},
    {"DeleteBuffer", Role::kWrite},
    {"ImportBuffer", Role::kWrite},
    // SharedMemoryService.
    {"GetSharedMemory", Role::kRead},
    {"UploadShared", Role::kWrite},
    {"DownloadShared", Role::kRead},
};

}  // namespace tessera
