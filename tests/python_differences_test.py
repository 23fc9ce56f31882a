#!/usr/bin/env python3
"""Tests the differences from NumPy, with a case for each line of the table in docs/python.md."""

import re

import numpy as np

import outsider as o
import python_outsider
import tessera as ts
from tessera.graph import _dtypes

F, I = np.array([1.5, -2.25, 3], "f4"), np.array([1, 2, 3], "i4")
BF16 = ts.bfloat16 if _dtypes.HAVE_ML_DTYPES else np.dtype("f4")  # The type that numpy() gives.
MASKED = np.ma.masked_array(F, F > 0)
LARGE, WIDE = np.full(4, 1 << 30, "i4"), np.array([300, -1, 7], "i8")
HUGE, STACK = np.array([1e20, -1e20, np.nan, 2.7]), np.ones((2, 3, 3), "f4")
LINE, TOP = np.linspace(-3, 3, 101), np.array([1, 3, np.nan, 3, 2])
MANY = np.random.default_rng(1).standard_normal(100_000).astype("f4")
MATRIX, OTHER = np.matrix([[1, 2], [3, 4]], "f4"), np.array([[5, 6], [7, 8]], "f4")
FUNCTIONS = (np.exp, np.tanh, lambda a: np.log(a * a + 0.5), lambda a: np.power(a + 4, a))


def store(x):
    x[0] = 1


def in_place(x):
    y = x
    y += 1
    return x


def refused(call, text=""):
    """Returns a case in which the call is Unsupported for this reason."""
    return call, ts.Unsupported, text


def bytes_(put):
    """Returns cases of one-byte integers."""
    for dtype in ("u1", "i1"):
        x = put(np.full(4, 100, dtype))
        yield x.sum(), np.int64(400), "i8"
        yield x.prod(), np.int64(10**8), "i8"
        yield x.cumsum(), [100, 200, 300, 400], "i8"
        yield x.dot(x), np.int64(40000), "i8"
        yield x[None] @ x[:, None], [[40000]], "i4"
        yield np.tensordot(x, x, 1), np.int32(40000), "i4"


# The cases for each line of the table in docs/python.md, given a client's put(). A case is either
# (expression, value, type) or (call, error class, error text).
CASES = {
    "types": lambda put: [refused(lambda: put(I.astype("u2")), "uint16"),
                          refused(lambda: put(F) + I.astype("u4"), "uint32")],
    "`np.histogram` with an edge of NaN, or a range beyond float64": lambda put: [
        (lambda: np.histogram(put(F), [0, 1, np.nan]), ValueError, "NaN"),
        (lambda: np.histogram(put(np.array([-1.7e308, 1.7e308]))), ValueError, "float64")],
    "`std` of deviations whose squares do not fit": lambda put: [
        (put(np.array([0, 600], "f2")).std(), np.float16(300), "f2"),
        (put(np.array([1e200, -1e200])).std(), 1e200, "f8")],
    "bf16 with i32, i64": lambda put: [
        (put(F, dtype="bf16") + put(I.astype(other)), F + I, dtype)
        for other, dtype in (("i4", "f8"), ("i8", "f8"), ("f2", "f4"), ("u1", BF16), ("i1", BF16))],
    "uint8 with int8": lambda put: [
        refused(lambda: put(I, dtype="u1") + put(I, dtype="i1"), "int16")],
    "floats to integers": lambda put: [(put(HUGE).astype("i4"), [2**31 - 1, -(2**31), 0, 2], "i4")],
    "integers to shorter ones": lambda put: [
        (put(WIDE).astype("uint8"), [255, 0, 7], "u1"),
        (put(WIDE, dtype="uint8"), [44, 255, 7], "u1"),
        (np.sum(put(WIDE), dtype="u1"), np.uint8(50), "u1")],
    "Python integers of 2^63 and more in functions, as in `np.append(x, 2**63)`": lambda put: [
        (lambda: np.append(put(F), 2**63), OverflowError, "9223372036854775808"),
        (np.append(put(F[:1]), 2.0**63), [1.5, 2.0**63], "f8")],
    "integers to negative powers": lambda put: [
        (put(I) ** put(np.array([-1, -1, 2], "i4")), [1, 0, 9], "i4"),
        (lambda: put(I) ** -1, ValueError, "negative")],
    "`floor`, `ceil`, `trunc` of integers": lambda put: [
        (call(put(I)), I, "i4") for call in (np.floor, np.ceil, np.trunc)],
    "`exp`, `log`, `tanh`, `power`": lambda put: [
        # Within 4 units in the last place, for both.
        (abs(call(put(LINE)) - call(LINE)) <= 4 * np.spacing(abs(call(LINE))), [True] * 101, bool)
        for call in FUNCTIONS],
    "`log2`, `log10`, `log1p`, `expm1`, `cbrt`, `hypot`, `logaddexp`, `logaddexp2`,"
    " trigonometric and hyperbolic functions": lambda put: [
        (abs(call(put(LINE[1:-1] / 4 + 1)) - call(LINE[1:-1] / 4 + 1))
         <= 8 * np.spacing(abs(call(LINE[1:-1] / 4 + 1))), [True] * 99, bool)
        for call in (np.log2, np.log10, np.log1p, np.expm1, np.sinh, np.cosh, np.arcsinh, np.sin,
                     np.cos, np.tan, np.arctan, np.cbrt, lambda a: np.hypot(a, a[::-1] - 1))],
    "`//` of floats": lambda put: [
        (put(np.array([9007199254740994.0])) // 3, [3002399751580331.0], "f8")],
    "`dot` and sums of i32": lambda put: [
        (put(LARGE).dot(put(LARGE)), np.int64(1 << 62), "i8"), (put(LARGE).sum(), 1 << 32, "i8")],
    "sums and products of uint8; `dot` and `@` of uint8, int8": bytes_,
    "`x.sum()`, `x.cumsum()` of f16, f32": lambda put: [
        (abs(put(MANY).sum() - MANY.astype("f8").sum()) < 1e-2, True, bool),
        (put(np.ones(4096, "f2")).cumsum()[2047:2050], [2048, 2048, 2050], "f2")],
    "`np.quantile`, `np.percentile` of f16, f32": lambda put: [
        (call(put(F.astype(dtype)), part), -0.375, dtype)
        for dtype in ("f2", "f4") for call, part in ((np.quantile, 0.25), (np.percentile, 25))],
    "`x @ y` of i64": lambda put: [
        (put(STACK.astype("i8")) @ put(STACK[0].astype("i8")), STACK @ STACK[0], "i8"),
        (put(WIDE) @ put(WIDE)[:, None], [90050], "i8")],
    "`np.average` by weights whose sum is 0, or with an empty result": lambda put: [
        (np.average(put(F), weights=[1, -1, 0]), np.inf, "f8"),
        (np.average(put(F)[:0], weights=F[:0]), np.nan, "f4"),
        (np.average(put(OTHER)[:, :0], axis=0), np.empty(0), "f4")],
    "`np.round` of integers, to tens that do not fit": lambda put: [
        (np.round(put(np.array([127, -128, 44], "i1")), -1), [127, -128, 40], "i1")],
    "`initial=None` of sums and products with `where=`": lambda put: [
        (put(F).sum(initial=None, where=F > 9), np.float32(0), "f4"),
        (np.nanprod(put(F), initial=None), np.float32(F.prod()), "f4")],
    "`np.nanargmax`, `np.nanargmin` of only NaN": lambda put: [
        (call(put(F * np.nan)), -1, "i8") for call in (np.nanargmax, np.nanargmin)],
    "`np.unravel_index` of positions out of range": lambda put: [
        (np.unravel_index(put(WIDE), (2, 3))[1], [0, 2, 1], "i8")],
    "`np.signbit`, `np.copysign` of NaN": lambda put: [
        (np.signbit(put(np.copysign(F * np.nan, -1))), [False] * 3, bool)],
    "`np.partition`": lambda put: [
        (np.partition(put(TOP), 1), np.sort(TOP), "f8"),
        (np.argpartition(put(TOP), 1), np.argsort(TOP, kind="stable"), "i8")],
    "the largest elements": lambda put: [
        (ts.topk(put(TOP), 3)[0], [np.nan, 3, 3], "f8"),
        (ts.topk(put(TOP), 3)[1], [2, 1, 3], "i8")],
    "`np.linalg.lstsq` of a matrix with more rows than its rank": lambda put: [
        (np.linalg.lstsq(put(np.ones((3, 2))), np.array([1.0, 1, 4]), rcond=None)[1], [6], "f8")],
    "`np.linalg.cond` of a singular matrix, of an order other than 2 and -2": lambda put: [
        (np.linalg.cond(put(STACK[0] * 0), 1).numpy, ts.BadMatrix, "")],
    "`np.linalg.qr` and `svd` with square bases of a matrix that is not square": lambda put: [
        refused(lambda: np.linalg.qr(put(STACK[0, :, :2]), "complete"), "reduced"),
        refused(lambda: np.linalg.svd(put(STACK[0, :, :2])), "full_matrices=False")],
    "`np.linalg.eig`, `eigvals`": lambda put: [
        refused(lambda: np.linalg.eig(put(OTHER)), "eigh"),
        refused(lambda: np.linalg.eigvals(put(OTHER)), "eigvalsh")],
    "a mask of several axes next to other indices, as in `x[mask, 1]`": lambda put: [
        refused(lambda: put(F.reshape(1, 1, 3))[put(F[:1].reshape(1, 1)) > 0, 1], "index twice"),
        (put(F.reshape(1, 1, 3))[put(F[:1].reshape(1, 1)) > 0][:, 1], F[1:2], "f4")],
    "a mask next to other arrays in an index, as in `x[mask, rows]`": lambda put: [
        refused(lambda: put(OTHER)[[True, False], [1]], "flatnonzero"),
        (put(OTHER)[np.flatnonzero([True, False]), [1]], [6], "f4")],
    "a mask on the server, as in `x[x > 0]`": lambda put: [
        (put(F)[put(F) > 0], F[F > 0], "f4"), (put(F)[F > 0] * 2, F[F > 0] * 2, "f4"),
        (np.where(F > 0, put(F), 0), np.where(F > 0, F, 0), "f4"),
        (put(F).sum(where=F > 0), np.float32(4.5), "f4")],
    "`np.take(a, x)` of a NumPy array at indices on the server; `np.lexsort([x, y])`": lambda put: [
        (lambda: np.take(F, put(I)), TypeError, "downloaded"),
        (lambda: np.lexsort([put(I), put(I)]), TypeError, "downloaded"),
        (np.lexsort((put(I), put(-I))), [2, 1, 0], "i8")],
    "an index on the server that is out of range, if the result has no elements": lambda put: [
        (put(OTHER)[:, :0][put(I)], np.empty((3, 0)), "f4"),
        (lambda: np.take(put(OTHER)[:, :0], I, 0), ts.BadIndex, "out of range")],
    "`mean`, `var`, `std` of no elements, or with `where=` that picks none": lambda put: [
        case for call in (np.mean, np.var, np.std) for case in (
            (call(put(F), where=put(F) > 99), np.nan, "f4"), (call(put(F)[:0]), np.nan, "f4"),
            (call(put(I)[:0]), np.nan, "f8"))],
    "`where=None` in reductions": lambda put: [
        (lambda: put(F).sum(where=None), TypeError, "NoneType")],
    "`x.ravel`, `x.flatten` and `x.reshape` in the orders \"K\" and \"A\"": lambda put: [
        refused(lambda: put(OTHER).T.ravel("K"), "order='C'"),
        refused(lambda: (put(OTHER) + 1).flatten("A"), "order='C'"),
        (put(OTHER).ravel("K"), [5, 6, 7, 8], "f4")],
    "`x.copy(\"F\")`": lambda put: [
        (np.str_(put(F).copy("F", replace=True).name), "F", "U1"),
        (put(F).copy(order="F"), F, "f4"), refused(lambda: (put(F) + 0).copy(), "save")],
    "`x[...] = v`": lambda put: [refused(lambda: store(put(F)), "put")],
    "`y += 1`": lambda put: [(in_place(put(F)), F, "f4")],
    "`print(x[0])`": lambda put: [(np.bool_("shape=()" in f"{put(F)[0]}"), True, bool),
                                  (np.str_(f"{put(F)[0]:.2f}"), "1.50", "U4"),
                                  (np.array(put(F).item(0)), 1.5, "f8")],
    "`x.numpy()` of bf16": lambda put: [(put(F, dtype="bf16"), F, BF16)],
    "a number's `.numpy()`": lambda put: [(put(F).sum(), np.float32(2.25), "f4")],
    "`x == y`": lambda put: [(put(F) == put(F), [True] * 3, bool), (put(F)[0] == 1.5, True, bool)],
    "`x == None`": lambda put: [
        case for x in (put(F), put(F) + 1) for case in (
            (np.array(x == None), False, bool), (np.array(x != None), True, bool))  # noqa: E711
    ],
    "`np.matrix(m) * x`": lambda put: [(product, [[5, 12], [21, 32]], "f4")
                                       for product in (MATRIX * put(OTHER), put(OTHER) * MATRIX)],
    "masked arrays": lambda put: [
        refused(lambda: put(MASKED), "filled"), refused(lambda: put(F) + MASKED, "filled")],
    "a NumPy operand of more than 1 MiB": lambda put: [
        refused(lambda: put(np.ones(1 << 18)) + np.ones(1 << 18), "put")]}


class DifferencesTest(python_outsider.Case):
    def check(self, expression, want, dtype):
        if callable(expression):
            return self.assertRaisesRegex(want, dtype, expression)
        if isinstance(expression, ts.Expr):
            computed = expression.numpy()
            self.assertIsInstance(computed, np.ndarray)  # Numbers too.
            self.assertEqual(computed.shape, expression.shape)
            expression = computed
        self.assertEqual(expression.dtype, np.dtype(dtype))
        np.testing.assert_array_equal(expression.astype(np.asarray(want).dtype), want)

    def test_each_line_of_the_table(self):
        page = (o.ROOT / "docs" / "python.md").read_text(encoding="utf-8")
        section = page[page.index("## Differences from NumPy") :].split("\n## ")[0]
        lines = re.findall(r"^\| (.*?) \|", section, re.M)[1:]
        self.assertEqual(lines, list(CASES))
        for line, cases in CASES.items():
            for number, case in enumerate(cases(self.t.put)):
                with self.subTest(line, number=number):
                    self.check(*case)


if __name__ == "__main__":
    python_outsider.main("__main__")
