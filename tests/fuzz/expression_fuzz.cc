// The text of expressions on the command line.
#include "client/expression_text.h"
#include "kernels/base/error.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto expression = tessera::ParseExpression(tessera::Text(data, size));
  if (!expression.ok())
    tessera::Require(tessera::ErrorReason(expression.status()) == "BAD_EXPRESSION",
                     "an error of another kind: " + expression.status().ToString());
  return 0;
}
