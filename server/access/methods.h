// The only list of the server's methods. Access control, metrics, the compute service and programs
// use it.
#pragma once

#include <string_view>

#include "kernels/client_and_server/operations.h"

namespace tessera {

// Each role includes the permissions of the roles before it.
enum class Role { kNone, kRead, kWrite, kAdmin };

// A method and the lowest role that it needs. The methods of the health service and of reflection
// need no role and are not listed.
struct MethodInfo {
  std::string_view name;
  Role role;
};

inline constexpr MethodInfo kMethods[] = {
// Storing a result needs kWrite, which the handlers check.
#define TESSERA_METHOD_OF(Method, field) {#Method, Role::kRead},
    TESSERA_OPERATION_METHODS(TESSERA_METHOD_OF)
#undef TESSERA_METHOD_OF
        {"Execute", Role::kRead},
    {"ListStrategies", Role::kRead},
    // GetServerInfo tells only an admin about tenants other than the caller's.
    {"GetServerInfo", Role::kRead},
    // BufferService. Methods that create, write, change or delete a buffer need kWrite.
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
    // Snapshot includes the buffers of other tenants only if the caller is an admin.
    {"Snapshot", Role::kWrite},
    // SharedMemoryService.
    {"GetSharedMemory", Role::kRead},
    {"UploadShared", Role::kWrite},
    {"DownloadShared", Role::kRead},
};

}  // namespace tessera
