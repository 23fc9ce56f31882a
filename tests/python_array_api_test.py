#!/usr/bin/env python3
"""Tests the functions of the Python array API standard 2024.12: which of them work and which are
refused, as the table in docs/python.md says. tests/python_signatures_test.py compares the working
functions with NumPy."""

import functools
import re

import numpy as np
import outsider as o
import python_outsider
import tessera as ts
from tessera.arrays import _functions, _ufuncs

# All functions of the standard.
STANDARD = {
    "elementwise": (
        "abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_invert"
        " bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor ceil clip conj copysign cos"
        " cosh divide equal exp expm1 floor floor_divide greater greater_equal hypot imag isfinite"
        " isinf isnan less less_equal log log10 log1p log2 logaddexp logical_and logical_not"
        " logical_or logical_xor maximum minimum multiply negative nextafter not_equal positive pow"
        " real reciprocal remainder round sign signbit sin sinh sqrt square subtract tan tanh trunc"
    ),
    "linear algebra": "matmul matrix_transpose tensordot vecdot",
    "linalg": (
        "cholesky cross det diagonal eigh eigvalsh inv matmul matrix_norm matrix_power matrix_rank"
        " matrix_transpose outer pinv qr slogdet solve svd svdvals tensordot trace vecdot"
        " vector_norm"),
    "fft": (
        "fft fftfreq fftn fftshift hfft ifft ifftn ifftshift ihfft irfft irfftn rfft rfftfreq rfftn"
    ),
    "statistics": "cumulative_prod cumulative_sum max mean min prod std sum var",
    "searching": "argmax argmin count_nonzero nonzero searchsorted where",
    "utilities": "all any diff",
    "manipulation": (
        "broadcast_arrays broadcast_to concat expand_dims flip moveaxis permute_dims repeat reshape"
        " roll squeeze stack tile unstack"),
    "creation": (
        "arange asarray empty empty_like eye from_dlpack full full_like linspace meshgrid ones"
        " ones_like tril triu zeros zeros_like"),
    "data types": "astype can_cast finfo iinfo isdtype result_type",
    "sets": "unique_all unique_counts unique_inverse unique_values",
    "sorting": "argsort sort",
    "indexing": "take take_along_axis"}


def read_table():
    """Returns the functions that work, and those that are refused, by part of the standard, as the
    table in docs/python.md has them."""
    page = (o.ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    section = page[page.index("## The array API standard") :].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| (.*?) \| (.*?) \|$", section, re.M)
    found = {part: [re.findall(r"`(\w+)`", cell) for cell in cells]
             for part, *cells in rows if part != "part"}
    return [{part: cells[i] for part, cells in found.items()} for i in (0, 1)]


WORKS, REFUSED = read_table()
# tests/python_signatures_test.py covers most functions that work, under NumPy's names. These are
# the names that differ from the standard's. CASES covers the other functions.
OTHERWISE = {
    "acos": "arccos", "asin": "arcsin", "atan": "arctan", "atan2": "arctan2", "acosh": "arccosh",
    "asinh": "arcsinh", "atanh": "arctanh", "bitwise_left_shift": "left_shift",
    "bitwise_right_shift": "right_shift", "bitwise_invert": "invert", "conj": "conjugate",
    "pow": "power", "permute_dims": "transpose",
    "matrix_transpose": "transpose", "matrix_power": "linalg.matrix_power",
    "matrix_norm": "linalg.norm", "vector_norm": "linalg.norm", "svdvals": "linalg.svd",
    **{name: f"linalg.{name}" for name in (
        "cholesky det eigh eigvalsh inv matrix_rank pinv qr slogdet solve svd".split())},
    "cumulative_prod": "cumprod", "cumulative_sum": "cumsum", "concat": "concatenate",
    "fftshift": "fft.fftshift", "ifftshift": "fft.ifftshift",
    **dict.fromkeys(STANDARD["sets"].split(), "unique")}
# Functions that return NumPy arrays, without any array of the client.
FROM_NOTHING = "arange asarray empty eye full linspace ones zeros fftfreq rfftfreq".split()
CASES = {"unstack": (lambda x: list(x)[-1], lambda a: a[-1]),
         "vecdot": (lambda x: ts.vecdot(x, x), lambda a: (a * a).sum(-1)),
         "astype": (lambda x: x.astype("f4"), lambda a: a.astype("f4")),
         "from_dlpack": (lambda x: x._session.put(np.from_dlpack(x)), lambda a: a),
         "can_cast": (lambda x: x + int(np.can_cast(x, "f8")), lambda a: a + 1),
         "finfo": (lambda x: x + np.finfo(x.dtype).bits, lambda a: a + 64),
         "iinfo": (lambda x: x + np.iinfo(x.astype("i4").dtype).bits, lambda a: a + 32),
         "isdtype": (lambda x: x + int(x.dtype.kind == "f"), lambda a: a + 1),
         "result_type": (lambda x: x.astype(np.result_type(x, "f4")), lambda a: a),
         "broadcast_arrays": (lambda x: np.broadcast_arrays(x, x[0])[1], lambda a: a[[0, 0, 0]])}


class ArrayApiTest(python_outsider.Case):
    def test_what_works(self):
        tables = {*_functions.FUNCTIONS, *_ufuncs.UFUNCS, *_ufuncs.PAIRS}
        a = np.arange(12.0).reshape(3, 4) - 5
        x = self.t.put(a)
        for name in {name for names in WORKS.values() for name in names}:
            with self.subTest(name):
                if name in CASES:
                    of_arrays, want = CASES[name]
                    np.testing.assert_array_equal(of_arrays(x).numpy(), want(a))
                elif name not in FROM_NOTHING:
                    path = OTHERWISE.get(name, name).split(".")
                    self.assertIn(functools.reduce(getattr, path, np), tables)

    def test_what_does_not_is_refused_with_a_way_out(self):
        x = self.t.put(np.ones((3, 3)))
        names = [name for names in REFUSED.values() for name in names]
        for name in names:
            found = [getattr(part, name) for part in (np.fft, np.linalg, np) if hasattr(part, name)]
            for call in found[:1]:  # NumPy 1 has other names for some functions.
                arguments = (x,) * getattr(call, "nin", 1)
                with self.subTest(name), self.assertRaisesRegex(ts.Unsupported, r"server|\.numpy"):
                    call(*arguments)
        for call in (lambda: np.spacing(x), lambda: np.linalg.eig(x), lambda: np.trim_zeros(x[0]),
                     lambda: np.put(x, 1, 2)):
            self.assertRaisesRegex(ts.Unsupported, r"server|\.numpy", call)

    def test_folds_from_the_first_number(self):
        a = np.arange(12).reshape(3, 4).astype("i4")
        for name, first in (("cumsum", 0), ("cumprod", 1)):
            call = _functions._cumulative(name)
            for axis, dtype in ((0, None), (-1, "f4")):
                before = np.full_like(a.take([0], axis), first)
                want = getattr(np.concatenate([before, a], axis), name)(axis, dtype)
                found = call(self.t.put(a), axis, dtype, True)
                self.assertEqual(found.dtype, want.dtype)
                np.testing.assert_array_equal(found.numpy(), want)

    def test_vecdot(self):
        for dtype in ("u1", "i1", "i4", "i8", "f4", "?"):
            a = (np.arange(24).reshape(2, 3, 4) % 5 * 60).astype(dtype)
            for x, axis in ((a[0, 0], -1), (a, -2)):
                found = ts.vecdot(self.t.put(x), self.t.put(x), axis)
                want = np.add.reduce(x * x, axis, x.dtype)
                self.assertEqual(found.dtype, want.dtype)
                np.testing.assert_array_equal(found.numpy(), want)
        a, b = np.arange(24.0).reshape(2, 4, 3), np.arange(12.0).reshape(3, 4)
        found = ts.vecdot(self.t.put(a), self.t.put(b), 1)  # Each array has its own axis 1.
        np.testing.assert_array_equal(found.numpy(), (a.swapaxes(1, 2) * b).sum(-1))
        for shape in ((2, 4, 1), (3, 4)):
            with self.assertRaises(ts.BadShape):
                ts.vecdot(self.t.put(a), self.t.put(np.ones(shape)))

    def test_arrays_from_nothing_are_put(self):
        x = self.t.put(np.ones(3))
        for name in ("arange", "asarray", "empty", "full", "ones", "zeros"):
            arguments = ([2], 0) if name == "full" else (3,)
            with self.subTest(name), self.assertRaisesRegex(ts.Unsupported, r"put\(\)"):
                getattr(np, name)(*arguments, like=x)

    def test_the_table_of_the_documents_has_the_whole_standard(self):
        self.assertEqual({*WORKS}, {*STANDARD})
        for part, names in STANDARD.items():
            with self.subTest(part):
                order = names.split().index
                self.assertEqual(sorted(WORKS[part] + REFUSED[part], key=order), names.split())
                for some in (WORKS[part], REFUSED[part]):
                    self.assertEqual(some, sorted(some, key=order))


if __name__ == "__main__":
    python_outsider.main("__main__")
