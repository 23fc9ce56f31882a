// What a Map costs, according to the model that its strategies share.
#pragma once

#include <cstdint>

#include "kernels/problem/strategy.h"

namespace tessera {

// Bytes of the operands; each element counts once, however often it is repeated.
std::uint64_t OperandBytes(const MapProblem& p);

// One pass over memory: it reads the operands once and writes the result once.
Cost OnePassCost(const MapProblem& p);

// One pass per instruction: it reads the arguments and writes the result.
Cost PassEachCost(const MapProblem& p);

// Bound of the rounding of each node, including that to its own type: |computed - exact| is at most
// roundoff * |exact| for the arguments that the node is given, as long as the result is a normal
// number. It does not include the errors of earlier nodes, which an expression may magnify without
// limit.
double MapRoundoff(const MapProblem& p);

// a * b + c for n elements of F32, for estimates and lists.
MapProblem ReferenceMap(std::int64_t n);

// Likewise for warming up: all three operands are n elements of dtype at x, and the result goes to
// out.
MapProblem WarmUpMap(std::int64_t n, DType dtype, const void* x, void* out);

}  // namespace tessera
