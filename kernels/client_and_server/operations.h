// The operations of the protocol, once for the client and the server.
#pragma once

namespace tessera {

// The only list of the operations, as X(method, field). `method` is a method of ComputeService.
// `field` is a field of Step and StepResult, and the kernels' name for the operation.
#define TESSERA_OPERATION_METHODS(X) \
  X(Dot, dot)                        \
  X(Reduce, reduce)                  \
  X(Matmul, matmul)                  \
  X(Add, add)                        \
  X(WindowSum, window_sum)           \
  X(Map, map)                        \
  X(TopK, top_k)

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
