#!/usr/bin/env python3
"""What differs from NumPy: a case for each line of the table of docs/python.md.

usage: python_differences_test.py --server build/bin/tessera-server [unittest arguments]
"""

import re

import numpy as np

import outsider as o
import python_outsider
import tessera as ts
from tessera import _dtypes

F, I = np.array([1.5, -2.25, 3], "f4"), np.array([1, 2, 3], "i4")


class DifferencesTest(python_outsider.Case):
    def f(self):
        return self.t.put(F)

    def i(self, dtype="i4"):
        return self.t.put(I.astype(dtype))

    def bf16(self):
        return self.t.put(F, dtype="bf16")

    def is_(self, expression, want, dtype=None):
        got = expression.numpy()
        self.assertEqual(got.dtype, expression.dtype)
        np.testing.assert_array_equal(got, want)
        if dtype is not None:
            self.assertEqual(got.dtype, np.dtype(dtype))

    def refused(self, call, text=""):
        with self.assertRaisesRegex(ts.Unsupported, text):
            call()

    def types(self):
        self.assertEqual(set(_dtypes.SHORT.values()),
                         {"bool", "u8", "i8", "f16", "bf16", "f32", "f64", "i32", "i64"})
        self.refused(lambda: self.t.put(I.astype("u2")), "uint16")
        self.refused(lambda: self.f() + I.astype("u4"), "uint32")

    def bf16_with_others(self):
        for other, want in ((self.i(), "f8"), (self.i("i8"), "f8"), (self.f().astype("f2"), "f4")):
            self.assertEqual((self.bf16() + other).dtype, np.dtype(want))

        for other in ("u1", "i1"):
            self.assertEqual((self.bf16() + self.t.put(I, dtype=other)).dtype, ts.bfloat16)

    def bytes_of_both_kinds(self):
        self.refused(lambda: self.t.put(I, dtype="u1") + self.t.put(I, dtype="i1"), "int16")

    def sums_of_bytes(self):
        for dtype in ("u1", "i1"):
            large = self.t.put(np.full(4, 100, dtype))
            self.is_(large.sum(), np.int64(400), "i8")
            self.is_(large.prod(), np.int64(10**8), "i8")
            self.is_(large.dot(large), np.int64(40000), "i8")
            self.is_(large[None] @ large[:, None], [[40000]], "i4")

    def floats_to_integers(self):
        x = self.t.put(np.array([1e20, -1e20, np.nan, 2.7]))
        self.is_(x.astype("i4"), [2**31 - 1, -(2**31), 0, 2], "i4")

    def integers_to_shorter_ones(self):
        wide = np.array([300, -1, 7], "i8")
        self.is_(self.t.put(wide).astype("uint8"), [255, 0, 7], "u1")
        self.is_(self.t.put(wide, dtype="uint8"), [44, 255, 7], "u1")

    def negative_powers(self):
        self.is_(self.i() ** self.t.put(np.array([-1, -1, 2], "i4")), [1, 0, 9], "i4")
        self.assertRaises(ValueError, lambda: self.i() ** -1)

    def rounding_of_integers(self):
        for call in (np.floor, np.ceil, np.trunc):
            self.is_(call(self.i()), I, "i4")

    def functions(self):
        x = self.t.put(np.linspace(-3, 3, 101))
        for call in (np.exp, np.tanh, lambda a: np.log(a * a + 0.5), lambda a: np.power(a + 4, a)):
            want = call(np.linspace(-3, 3, 101))
            np.testing.assert_array_max_ulp(call(x).numpy(), want, 4)  # Of both.

    def bits(self):
        for call in (lambda: self.i() & 1, lambda: ~self.i(), lambda: self.i() << 1):
            self.refused(call)
        self.is_((self.i() > 1) & (self.i() < 3), [False, True, False])

    def dot_of_integers(self):
        large = self.t.put(np.full(4, 1 << 30, "i4"))
        self.is_(large.dot(large), np.int64(1 << 62), "i8")
        self.is_(large.sum(), 1 << 32, "i8")

    def sums(self):
        x = np.random.default_rng(1).standard_normal(100_000).astype("f4")
        got = self.t.put(x).sum().numpy()
        self.assertEqual(got.dtype, np.float32)
        self.assertLess(abs(got - x.astype("f8").sum()), 1e-2)

    def products(self):
        self.is_(self.f() @ self.f(), F @ F)
        stack = self.t.put(np.ones((2, 3, 3), "f4"))
        self.refused(lambda: stack @ stack)

    def largest(self):
        x = self.t.put(np.array([1, 3, np.nan, 3, 2]))
        values, indices = ts.topk(x, 3)
        self.is_(values, [np.nan, 3, 3])
        self.is_(indices, [2, 1, 3], "i8")
        self.refused(lambda: np.sort(x), "topk")
        self.refused(lambda: np.partition(x, 2), "topk")
        self.refused(lambda: np.argsort(x), "topk")

    def fancy(self):
        for key in ([0, 1], np.array([True, False, True]), np.array([0])):
            self.refused(lambda key=key: self.f()[key], "where")
        self.is_(np.where(F > 0, self.f(), 0), np.where(F > 0, F, 0))
        self.is_(self.f().sum(where=F > 0), np.float32(4.5))

    def masks_that_pick_nothing(self):
        x = self.f()
        for call in (np.mean, np.var, np.std):
            self.is_(call(x, where=x > 99), np.nan, "f4")
            self.is_(call(x[:0]), np.nan, "f4")
            self.is_(call(self.i()[:0]), np.nan, "f8")

    def writes(self):
        x = self.f()

        def write():
            x[0] = 1

        self.refused(write, "put")

    def numpy_of_bf16(self):
        got = self.bf16().numpy()
        self.assertEqual(got.dtype, ts.bfloat16 if _dtypes.HAVE_ML_DTYPES else np.dtype("f4"))
        np.testing.assert_array_equal(got.astype("f4"), F)

    def numbers(self):
        got = self.f().sum().numpy()
        self.assertIsInstance(got, np.ndarray)
        self.assertEqual(got.shape, ())

    def equality(self):
        self.is_(self.f() == self.f(), [True] * 3)
        self.assertTrue(bool(self.f()[0] == 1.5))

    def equality_with_none(self):
        for x in (self.f(), self.f() + 1):
            self.assertIs(x == None, False)  # noqa: E711
            self.assertIs(x != None, True)  # noqa: E711

    def matrix_class(self):
        m = np.matrix([[1, 2], [3, 4]], "f4")
        x = self.t.put(np.array([[5, 6], [7, 8]], "f4"))
        for product in (m * x, x * m):
            self.is_(product, [[5, 12], [21, 32]])

    def large_operands(self):
        self.refused(lambda: self.t.put(np.ones(1 << 18)) + np.ones(1 << 18), "put")

    def masks(self):
        self.refused(lambda: self.t.put(np.ma.masked_array(F, F > 0)), "filled")
        self.refused(lambda: self.f() + np.ma.masked_array(F, F > 0), "filled")

    CASES = {
        "types": types, "bf16 beside i32, i64": bf16_with_others,
        "uint8 beside int8": bytes_of_both_kinds, "floats to integers": floats_to_integers,
        "integers to shorter ones": integers_to_shorter_ones,
        "integers to negative powers": negative_powers,
        "`floor`, `ceil`, `trunc` of integers": rounding_of_integers,
        "`exp`, `log`, `tanh`, `power`": functions, "bits of integers (`&` `~` `<<`)": bits,
        "`dot` and sums of i32": dot_of_integers,
        "sums of uint8; `dot` and `@` of uint8, int8": sums_of_bytes, "`x.sum()` of f16, f32": sums,
        "`x @ y`": products, "the largest elements": largest, "fancy and boolean indices": fancy,
        "`mean`, `var`, `std` of no elements, or with `where=` that picks none": masks_that_pick_nothing,
        "`x[...] = v`": writes, "`x.numpy()` of bf16": numpy_of_bf16,
        "a number's `.numpy()`": numbers, "`x == y`": equality, "`x == None`": equality_with_none,
        "`np.matrix(m) * x`": matrix_class, "masked arrays": masks,
        "a NumPy operand of more than 1 MiB": large_operands,
    }

    def test_each_line_of_the_table(self):
        page = (o.ROOT / "docs" / "python.md").read_text(encoding="utf-8")
        section = page[page.index("## Differences from NumPy") :].split("\n## ")[0]
        lines = re.findall(r"^\| (.*?) \|", section, re.M)[1:]
        self.assertEqual(lines, list(self.CASES))
        for line, case in self.CASES.items():
            with self.subTest(line):
                case(self)


if __name__ == "__main__":
    python_outsider.main("__main__")
