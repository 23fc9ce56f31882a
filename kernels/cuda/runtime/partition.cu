#include "kernels/cuda/runtime/partition.h"

#include "kernels/cuda/runtime/driver.h"

namespace tessera {
namespace {

struct PartitionApi {
  decltype(&cuDeviceGetDevResource) get_resource =
      DriverFunction<decltype(&cuDeviceGetDevResource)>("cuDeviceGetDevResource", 12040);
  decltype(&cuDevSmResourceSplitByCount) split =
      DriverFunction<decltype(&cuDevSmResourceSplitByCount)>("cuDevSmResourceSplitByCount", 12040);
  decltype(&cuDevResourceGenerateDesc) describe =
      DriverFunction<decltype(&cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc", 12040);
  decltype(&cuGreenCtxCreate) create =
      DriverFunction<decltype(&cuGreenCtxCreate)>("cuGreenCtxCreate", 12040);
  decltype(&cuGreenCtxDestroy) destroy =
      DriverFunction<decltype(&cuGreenCtxDestroy)>("cuGreenCtxDestroy", 12040);
  decltype(&cuGreenCtxStreamCreate) make_stream =
      DriverFunction<decltype(&cuGreenCtxStreamCreate)>("cuGreenCtxStreamCreate", 12050);
};

const PartitionApi& Api() {
  static const PartitionApi api;
  return api;
}

void Check(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS)
    throw DeviceError(DeviceError::Kind::kUnsupported, call, std::to_string(result));
}

}  // namespace

Partition::Partition(int ordinal) {
  CUdevResource all{}, room{}, rest{};
  Check(Api().get_resource(ordinal, &all, CU_DEV_RESOURCE_TYPE_SM), "cuDeviceGetDevResource");
  unsigned groups = 1;
  Check(Api().split(&room, &groups, &all, &rest, 0, kRoomMultiprocessors),
        "cuDevSmResourceSplitByCount");
  CUdevResourceDesc description = nullptr;
  Check(Api().describe(&description, &rest, 1), "cuDevResourceGenerateDesc");
  Check(Api().create(&context_, description, ordinal, CU_GREEN_CTX_DEFAULT_STREAM),
        "cuGreenCtxCreate");
  multiprocessors_ = static_cast<int>(rest.sm.smCount);
}

Partition::~Partition() { Api().destroy(context_); }

StreamHandle Partition::MakeStream() const {
  CUstream stream = nullptr;
  Check(Api().make_stream(&stream, context_, CU_STREAM_NON_BLOCKING, /*priority=*/0),
        "cuGreenCtxStreamCreate");
  return StreamHandle(stream);
}

}  // namespace tessera
