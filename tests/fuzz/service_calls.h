// Inputs of service_fuzz: calls of any method, one after the other. Each call consists of one byte
// for its method, two bytes for the length of its request (little endian), and the request.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "kernels/client_and_server/operations.h"

namespace tessera {

// The byte of a method is its index. New methods are appended, so that inputs keep their meaning.
// New operations are added automatically.
inline const std::vector<std::string> kFuzzMethods = [] {
  std::vector<std::string> methods = {
      "tessera.v1.BufferService.CreateBuffer",
      "tessera.v1.BufferService.Upload",  // Adjacent calls are messages of one stream.
      "tessera.v1.BufferService.Download",
      "tessera.v1.BufferService.GetBuffer",
      "tessera.v1.BufferService.ListBuffers",
      "tessera.v1.BufferService.SealBuffer",
      "tessera.v1.BufferService.UpdateBuffer",
      "tessera.v1.BufferService.CopyBuffer",
      "tessera.v1.BufferService.DeleteBuffer",
      "tessera.v1.ComputeService.Dot",
      "tessera.v1.ComputeService.Reduce",
      "tessera.v1.ComputeService.Matmul",
      "tessera.v1.ComputeService.Add",
      "tessera.v1.ComputeService.WindowSum",
      "tessera.v1.ComputeService.Map",
      "tessera.v1.ComputeService.TopK",
      "tessera.v1.ComputeService.Execute",
      "tessera.v1.ComputeService.ListStrategies",
      "tessera.v1.ComputeService.GetServerInfo",
      "tessera.v1.SharedMemoryService.GetSharedMemory",
      "tessera.v1.SharedMemoryService.UploadShared",
      "tessera.v1.SharedMemoryService.DownloadShared",
      "tessera.v1.BufferService.ImportBuffer",
      "grpc.health.v1.Health.Check",
      "grpc.health.v1.Health.Watch",
      "grpc.reflection.v1.ServerReflection.ServerReflectionInfo",
      "grpc.reflection.v1alpha.ServerReflection.ServerReflectionInfo",
      "tessera.v1.BufferService.Snapshot",
  };
#define TESSERA_APPEND(Method, name)                                      \
  if (const std::string method = "tessera.v1.ComputeService." #Method;    \
      std::find(methods.begin(), methods.end(), method) == methods.end()) \
    methods.push_back(method);
  TESSERA_OPERATION_METHODS(TESSERA_APPEND)
#undef TESSERA_APPEND
  return methods;
}();
inline constexpr std::size_t kUploadMethod = 1;

struct FuzzCall {
  std::size_t method = 0;
  std::string request;
};

inline std::vector<FuzzCall> ParseCalls(std::string_view bytes) {
  std::vector<FuzzCall> calls;
  while (bytes.size() >= 3) {
    const auto byte = [&](std::size_t i) {
      return std::size_t{static_cast<unsigned char>(bytes[i])};
    };
    const std::size_t size = std::min(byte(1) | byte(2) << 8, bytes.size() - 3);
    calls.push_back({byte(0) % std::size(kFuzzMethods), std::string(bytes.substr(3, size))});
    bytes.remove_prefix(3 + size);
  }
  return calls;
}

inline std::string JoinCalls(const std::vector<FuzzCall>& calls) {
  std::string bytes;
  for (const FuzzCall& call : calls) {
    const std::size_t size = std::min<std::size_t>(call.request.size(), 0xffff);
    bytes += static_cast<char>(call.method);
    bytes += static_cast<char>(size & 0xff);
    bytes += static_cast<char>(size >> 8);
    bytes.append(call.request, 0, size);
  }
  return bytes;
}

inline const google::protobuf::MethodDescriptor* MethodOf(std::size_t method) {
  return google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(kFuzzMethods[method]);
}

inline const google::protobuf::Message& PrototypeOf(const google::protobuf::Descriptor* type) {
  return *google::protobuf::MessageFactory::generated_factory()->GetPrototype(type);
}

}  // namespace tessera
