// What a Map costs, by the model that its strategies share.
#pragma once

#include <cstdint>

#include "kernels/problem/strategy.h"

namespace tessera {

// Bytes of the operands, each element once however often it is repeated.
std::uint64_t OperandBytes(const MapProblem& p);

// One pass over memory: operands once, the result once.
Cost OnePassCost(const MapProblem& p);

// A pass for each instruction: its arguments, and its result.
Cost PassEachCost(const MapProblem& p);

// Bound of the rounding of each node, to its own type included: |computed - exact| <= roundoff *
// |exact| for the arguments that the node is given, as long as the result is a normal number. What
// the nodes before it have lost is not in it: an expression may magnify that as much as it likes.
double MapRoundoff(const MapProblem& p);

// a * b + c over n elements of F32, for estimates and lists.
MapProblem ReferenceMap(std::int64_t n);

// The same with an operand of so many elements of the type at x, thrice, and a result there; for
// warming up.
MapProblem WarmUpMap(std::int64_t n, DType dtype, const void* x, void* out);

}  // namespace tessera
