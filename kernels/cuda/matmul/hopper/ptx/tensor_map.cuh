// The requirements of Hopper's TMA, and tensor maps, which describe matrices to TMA.
#pragma once

#include <cuda.h>  // for its types; nothing links against the driver

#include <cstdint>
#include <string>
#include <type_traits>

#include "kernels/base/element.h"
#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"

namespace tessera {

// The alignment in bytes that TMA requires of base addresses and pitches.
constexpr std::int64_t kBoxAlignment = 16;

// Returns a pitch that TMA accepts, for copies and single rows. Rows of at least 1 KiB are padded
// to whole lines of the L2, by at most an eighth. Without the padding, the 128-byte rows of a box
// would span two lines.
template <class T>
std::int64_t PaddedPitch(std::int64_t columns) {
  constexpr std::int64_t kLine = 128, kSize = sizeof(T);
  const std::int64_t pack = (columns * kSize < 8 * kLine ? kBoxAlignment : kLine) / kSize;
  return CeilDiv(columns, pack) * pack;
}

inline bool IsBoxAligned(const void* data, std::int64_t rows, std::int64_t pitch_bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % kBoxAlignment == 0 &&
         (rows == 1 || pitch_bytes % kBoxAlignment == 0);
}

// Returns whether TMA can write contiguous rows. TMA writes whole vectors of 16 bytes even if a
// matrix ends within one, so the length of a single row matters as well.
inline bool IsBoxWritable(const void* data, std::int64_t row_bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % kBoxAlignment == 0 &&
         row_bytes % kBoxAlignment == 0;
}

template <class T>
constexpr CUtensorMapDataType kMapType = std::is_same_v<T, BFloat16>
                                             ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                         : std::is_same_v<T, Half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                         : std::is_same_v<T, double>
                                             ? CU_TENSOR_MAP_DATA_TYPE_FLOAT64
                                         : std::is_same_v<T, std::int32_t>
                                             ? CU_TENSOR_MAP_DATA_TYPE_INT32
                                         : sizeof(T) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;

// Returns the driver function that creates tensor maps. The function is looked up once through the
// runtime, so that nothing links against the driver.
inline decltype(&cuTensorMapEncodeTiled) TensorMapEncoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess)
      throw DeviceError(DeviceError::Kind::kFailed, "cuTensorMapEncodeTiled",
                        "the driver lacks this function");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

// Returns a map of `matrices` consecutive matrices. The rows of their boxes take row_bytes bytes in
// shared memory. If `permuted`, the vectors of rows of 32, 64 or 128 bytes are swizzled. Longer
// rows, of up to 256 elements, are never swizzled.
template <class T>
CUtensorMap MakeTensorMap(const void* data, std::int64_t matrices, std::int64_t rows,
                          std::int64_t columns, std::int64_t pitch, int box_rows, int row_bytes,
                          bool permuted = true) {
  // The pitch of a single row does not matter, but it has to be valid.
  if (rows == 1) pitch = PaddedPitch<T>(columns);
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                                static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(pitch) * sizeof(T),
                                static_cast<cuuint64_t>(pitch * rows) * sizeof(T)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(row_bytes / sizeof(T)),
                            static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      TensorMapEncoder()(&map, kMapType<T>, 3, const_cast<void*>(data), extents, strides, box,
                         steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                         permuted && row_bytes == 32    ? CU_TENSOR_MAP_SWIZZLE_32B
                         : permuted && row_bytes == 64  ? CU_TENSOR_MAP_SWIZZLE_64B
                         : permuted && row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                                        : CU_TENSOR_MAP_SWIZZLE_NONE,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw DeviceError(DeviceError::Kind::kFailed, "cuTensorMapEncodeTiled", std::to_string(result));
  return map;
}

}  // namespace tessera
