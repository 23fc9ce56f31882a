// The requests of the operations, from arguments in C++ terms.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "google/protobuf/duration.pb.h"

namespace tessera {

inline v1::Dtype ToMessage(DType dtype) { return static_cast<v1::Dtype>(dtype); }
google::protobuf::Duration ToMessage(absl::Duration duration);
v1::Operand ToMessage(const Operand& operand);

v1::DotRequest DotRequest(const Operand& a, const Operand& b, const OperationOptions& options);
v1::ReduceRequest ReduceRequest(ReduceOp op, const Operand& x, absl::Span<const int> axes,
                                bool keep_dims, const OperationOptions& options);
v1::MatmulRequest MatmulRequest(const Operand& a, const Operand& b, bool transpose_a,
                                bool transpose_b, std::optional<DType> out_dtype,
                                const OperationOptions& options);
v1::AddRequest AddRequest(const Operand& a, const Operand& b, const OperationOptions& options);
v1::WindowSumRequest WindowSumRequest(const Operand& x, std::int64_t radius,
                                      const OperationOptions& options);

}  // namespace tessera
