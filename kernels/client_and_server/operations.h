// Defines the operations of the protocol once, for the client and the server.
#pragma once

namespace tessera {

// The list of all operations, in the order of the documents. METHOD(Dot, dot) stands for the method
// Dot of ComputeService, the field `dot` of Step and StepResult, and the kernels' DotProblem, which
// they call "dot". PART is a problem that the kernels solve for another operation's method.
#define TESSERA_OPERATION_LIST(METHOD, PART) \
  METHOD(Dot, dot)                           \
  METHOD(Reduce, reduce)                     \
  PART(ReduceAxes, reduce_axes)              \
  METHOD(Matmul, matmul)                     \
  METHOD(Add, add)                           \
  METHOD(WindowSum, window_sum)              \
  METHOD(Map, map)                           \
  METHOD(TopK, top_k)                        \
  METHOD(Scan, scan)                         \
  METHOD(Sort, sort)                         \
  METHOD(Take, take)                         \
  METHOD(Select, select)                     \
  METHOD(Histogram, histogram)               \
  METHOD(SearchSorted, search_sorted)        \
  METHOD(SumByLabel, sum_by_label)           \
  METHOD(Linalg, linalg)
#define TESSERA_NOT_LISTED(Operation, name)
#define TESSERA_OPERATION_METHODS(X) TESSERA_OPERATION_LIST(X, TESSERA_NOT_LISTED)
#define TESSERA_OPERATIONS(X) TESSERA_OPERATION_LIST(X, X)

// Returns f(request) for the operation of a Step, f(response) for the operation of a StepResult, or
// otherwise() if the message has no operation that this program knows.
template <class Message, class F, class Otherwise>
auto VisitOperation(const Message& message, const F& f, const Otherwise& otherwise) {
  const auto operation = [&] {
    if constexpr (requires { message.operation_case(); }) {
      return message.operation_case();
    } else {
      return message.result_case();
    }
  };
  switch (operation()) {
#define TESSERA_CASE(Method, field) \
  case Message::k##Method:          \
    return f(message.field());
    TESSERA_OPERATION_METHODS(TESSERA_CASE)
#undef TESSERA_CASE
    default:
      return otherwise();
  }
}

}  // namespace tessera
