"""The names that ts and ts.aio share: functions, types and errors."""

from .arrays._functions import (
    argsort,
    fma,
    matmul,
    norm,
    scan,
    sort,
    sum_by_label,
    sum_squares,
    topk,
    vecdot,
    window_sum,
)
from .graph._dtypes import bfloat16
from .graph._plan import Stats
from .wire import _errors
from .wire._errors import *  # noqa: F403  (every class of _errors, by its name)

__all__ = [
    "Stats",
    "argsort",
    "bfloat16",
    "fma",
    "matmul",
    "norm",
    "scan",
    "sort",
    "sum_by_label",
    "sum_squares",
    "topk",
    "vecdot",
    "window_sum",
    *_errors.__all__,
]
