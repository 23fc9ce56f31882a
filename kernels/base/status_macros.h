// Macros that pass errors on to the caller. Headers of the client library do not include them.
#pragma once

#include <utility>

#include "absl/status/status.h"

// Returns the status of an expression from the function, unless the status is OK.
#define RETURN_IF_ERROR(...) TESSERA_RETURN_IF_ERROR(TESSERA_UNIQUE(__COUNTER__), (__VA_ARGS__))
#define TESSERA_RETURN_IF_ERROR(status, expression)                    \
  do {                                                                 \
    if (absl::Status status = expression; !status.ok()) return status; \
  } while (false)

// Assigns the value of an absl::StatusOr to a target, which may be a declaration, or returns the
// error from the function. It expands to several statements, so a branch needs braces around it.
#define ASSIGN_OR_RETURN(target, ...) \
  TESSERA_ASSIGN_OR_RETURN(TESSERA_UNIQUE(__COUNTER__), target, (__VA_ARGS__))
#define TESSERA_ASSIGN_OR_RETURN(result, target, expression) \
  auto result = expression;                                  \
  if (!result.ok()) return result.status();                  \
  target = *std::move(result)

#define TESSERA_UNIQUE(number) TESSERA_JOIN(tessera_result_, number)
#define TESSERA_JOIN(a, b) a##b
