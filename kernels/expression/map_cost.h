// The cost model that the strategies of Map share.
#pragma once

#include <cstdint>

#include "kernels/problem/strategy.h"

namespace tessera {

// Returns the size of the operands in bytes. Each element counts once, even if it is repeated.
std::uint64_t OperandBytes(const MapProblem& p);

// Returns the cost of one pass that reads the operands once and writes the result once.
Cost OnePassCost(const MapProblem& p);

// Returns the cost of one pass per instruction. Each pass reads the instruction's arguments and
// writes its result.
Cost PassEachCost(const MapProblem& p);

// Returns a bound on the rounding error of each node, including the rounding to the node's own
// type: |computed - exact| is at most roundoff * |exact| for the arguments that the node is given,
// as long as the result is a normal number. It does not include the errors of earlier nodes, which
// an expression may magnify without limit.
double MapRoundoff(const MapProblem& p);

// Returns the problem a * b + c for n elements of F32, for estimates and lists.
MapProblem ReferenceMap(std::int64_t n);

// Returns the same problem for warming up. All three operands are the n elements of dtype at x, and
// the result goes to out.
MapProblem WarmUpMap(std::int64_t n, DType dtype, const void* x, void* out);

}  // namespace tessera
