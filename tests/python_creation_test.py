#!/usr/bin/env python3
"""Compares arrays that the Python client creates from nothing with NumPy, and its random numbers
with a model of the generator."""

import warnings

import numpy as np

import python_outsider
import tessera as ts
from random_requests import random_bits

RNG = np.random.default_rng(20261130)


class CreationTest(python_outsider.Case):
    def same(self, made, want):
        got = made.numpy()
        self.assertEqual((made.dtype, made.shape), (want.dtype, want.shape))
        np.testing.assert_array_equal(got, want)
        if want.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(got), np.signbit(want))

    def test_arange(self):
        cases = [
            (5,), (2, 9), (2, 9, 3), (9, 2, -2), (0.1, 1.0, 0.1), (-1e-3, 3, 0.7), (0.1, 5, 0.7),
            (1, 1), (5, 2), (1,), (np.float32(3),), (0, np.float32(3), np.float32(0.1)), (3.5,),
            (0, 2**40, 2**37), (1e16, 1e16 + 20, 3), (2**62, 2**62 + 3), (0, 120, 7),
            (0.0, -3.0, -1.0), (np.float32(0), np.float32(1), np.float32(0.1)),
            (np.int8(1), np.int8(5), np.int8(1)),
        ]
        for start, step in RNG.normal(0, 9, (20, 2)):
            cases.append((start, start + 40 * step, step))
        for case in cases:
            with self.subTest(case):
                self.same(self.t.arange(*case), np.arange(*case))
        for dtype in ("f4", "f2", "f8", "i4", "u1", "i1"):
            for case in [case for case in cases if max(map(abs, case)) <= 120]:
                with self.subTest((case, dtype)), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    want = np.arange(*case, dtype=dtype)
                    whole = want.dtype.kind == "f" or all(type(x) is int for x in case)
                    if whole and (dtype != "u1" or min(case) >= 0):
                        self.same(self.t.arange(*case, dtype=dtype), want)

    def test_arange_at_the_ends_of_types(self):
        for case, dtype in (((1e-5, 255, 1e6), "f2"), ((0, 70000, 66000), "f2"),
                            ((0, 1e39, 9e38), "f4"), ((0, 5, np.inf), "f8"),
                            ((0, 5, -np.inf), "f8"), ((1e-300, 2e-300, 1e300), "f8"),
                            ((-1, 0, -(2**63)), "i8"), ((0, -1, -(2**63)), "i8"),
                            ((-2, -3, -(2**63)), "i8"), ((-0.0, 5, 9.0), "f8"),
                            ((-0.0, 1, 0.5), "f8"), ((-1e-300, 1 / 3, 0.1), "f4"),
                            ((0.1, 3, 5), "?"), ((2,), "?")):
            with self.subTest((case, dtype)), np.errstate(all="ignore"):
                self.same(self.t.arange(*case, dtype=dtype), np.arange(*case, dtype=dtype))
        self.assertRaises(TypeError, self.t.arange, 7, dtype="?")

    def test_linspace(self):
        cases = [(0, 1), (0, 1, 5), (2, 2, 4), (0, 1, 1), (0, 1, 0), (5, -5, 7), (0, 5e-324, 4),
                 (np.float32(0), np.float32(1), 11)]
        cases += [(*pair, 37) for pair in RNG.normal(0, 9, (20, 2))]
        for case in cases:
            for more in ({}, {"endpoint": False}, {"dtype": int}, {"dtype": "f4"}):
                with self.subTest((case, more)):
                    self.same(self.t.linspace(*case, **more), np.linspace(*case, **more))
        made, step = self.t.linspace(1, 2, 3, retstep=True)
        self.assertEqual((made.numpy().tolist(), step), ([1, 1.5, 2], 0.5))
        self.assertTrue(np.isnan(self.t.linspace(0, 1, 0, retstep=True)[1]))
        self.assertRaises(ValueError, self.t.linspace, 0, 1, -1)
        self.assertRaises(ts.Unsupported, self.t.linspace, [0, 1], 2)

    def test_matrices(self):
        for case in [(3,), (3, 5, 1), (5, 3, -2), (1, 4), (4, 1), (1, 1), (0, 3), (3, 0, 1),
                     (4, 4, 9), (300, 200, -7)]:
            for dtype in (float, "i4", bool, "f2", "u1"):
                with self.subTest((case, dtype)):
                    self.same(self.t.eye(*case, dtype=dtype), np.eye(*case, dtype=dtype))
                    self.same(self.t.tri(*case, dtype=dtype), np.tri(*case, dtype=dtype))
        self.same(self.t.identity(4), np.identity(4))
        for shape in ((2, 3), (4,), (1, 3), (3, 1, 2), ()):
            with self.subTest(shape):
                self.same(self.t.indices(shape, "i8"), np.indices(shape, "i8"))
                for got, want in zip(self.t.indices(shape, sparse=True),
                                     np.indices(shape, sparse=True)):
                    self.same(got, want)

    def test_constants(self):
        self.same(self.t.full((2, 3), 7), np.full((2, 3), 7))
        self.same(self.t.full(3, [1, 2.5, 3]), np.full(3, [1, 2.5, 3]))
        self.same(self.t.ones(3, "f4"), np.ones(3, "f4"))
        self.same(self.t.zeros((2, 0), bool), np.zeros((2, 0), bool))
        self.same(self.t.zeros(2, None), np.zeros(2, None))
        self.same(self.t.ones(2, dtype=None), np.ones(2, dtype=None))
        for value in (1.9, -1.9, True, [300, 1, 2], np.int64(300)):
            for dtype in ("i1", bool, "f4"):
                self.same(self.t.full(3, value, dtype), np.full(3, value, dtype))

    def test_integers_that_do_not_fit(self):
        """NumPy 2 raises these errors, and NumPy 1 wraps."""
        t, x = self.t, self.t.put(np.arange(3, dtype="u1"))
        for call in (lambda: t.full(3, 300, "u1"), lambda: t.full((), -1, "u1"),
                     lambda: t.full(2, 1 << 31, "i4"), lambda: t.full(2, 1 << 63, "i8"),
                     lambda: np.full_like(x, 300), lambda: np.full_like(x, -1, shape=9),
                     lambda: np.pad(x, 1, constant_values=-1), lambda: np.insert(x, 1, 256),
                     lambda: np.pad(x, 1, constant_values=np.array([1, 300])),
                     lambda: t.arange(300, 310, dtype="u1"), lambda: t.arange(-1, 3, dtype="u1"),
                     lambda: t.arange(120, 200, 8, dtype="i1")):
            self.assertRaises(OverflowError, call)
        for case, dtype in (((255, 256), "u1"), ((300, 300), "u1"), ((250, 260), "u1")):
            self.same(t.arange(*case, dtype=dtype), np.arange(*case).astype(dtype))
        self.same(np.insert(x, 1, np.int32(256)), np.array([0, 0, 1, 2], "u1"))

    def test_in_larger_expressions(self):
        a = RNG.normal(size=(6, 5))
        x, t = self.t.put(a), self.t
        for made, want in [
            (t.arange(1) + t.arange(5), np.arange(5)),  # An extent of 1 is broadcast.
            (t.arange(6)[:, None] * t.arange(5), np.arange(6)[:, None] * np.arange(5)),
            (t.arange(9)[2:7] * x, np.arange(9)[2:7] * a),
            (x + t.arange(30).reshape(6, 5), a + np.arange(30).reshape(6, 5)),
            (np.tril(x.T, 1), np.tril(a.T, 1)),
            (np.meshgrid(t.arange(3), t.arange(4))[1], np.meshgrid(np.arange(3), np.arange(4))[1]),
            ((x * t.eye(6, 5) > 0).sum(0), (a * np.eye(6, 5) > 0).sum(0)),
            ((x * t.arange(5)).argmax(1), (a * np.arange(5)).argmax(1)),
            (ts.sort(t.arange(5) - x.round(), 0), np.sort(np.arange(5) - a.round(), 0)),
        ]:
            self.same(made, want)
        np.testing.assert_allclose((x @ x.T * t.tri(6)).numpy(), np.tril(a @ a.T))
        # The expression needs only the operand that has the result's shape.
        self.assertNotIn("inline", (x > t.arange(5)).explain())
        self.assertNotIn("inline", np.tril(x).explain())
        # Coordinates take the places of operands, so such an expression has several steps.
        places = sum(t.indices((2, 1, 3, 2, 2, 2, 2, 2), sparse=True))
        self.same(places, sum(np.indices((2, 1, 3, 2, 2, 2, 2, 2), sparse=True)))

    def test_random_numbers_are_those_of_the_generator(self):
        for size in (None, 1, 5, (1, 4), (3, 1), (70, 33), (2, 2, 1, 2, 2), (2,) * 8):
            shape = () if size is None else np.empty(size).shape
            index = np.arange(int(np.prod(shape))).reshape(shape)
            with self.subTest(size):
                rng = self.t.default_rng(2**64 - 1, stream=5)
                bits = random_bits(2**64 - 1, index, 5)
                self.same(rng.random(size), np.asarray((bits >> 11) * 2.0**-53 + 0.5))
                bits = random_bits(2**64 - 1, index, 6)
                self.same(rng.integers(-5, 20, size), np.asarray(bits % 25 - 5))
                bits = random_bits(2**64 - 1, index, 7)
                self.same(rng.integers(-(2**63), 2**63, size), np.asarray(bits))
                want = ((random_bits(2**64 - 1, index, 8) >> 40) * 2.0**-24 + 0.5).astype("f4")
                self.same(rng.random(size, "f4"), np.asarray(want))

    def test_distributions(self):
        rng = self.t.default_rng(3)
        z = rng.standard_normal(40000).numpy()
        self.assertLess(abs(z.mean()), 0.03)
        self.assertLess(abs(z.std() - 1), 0.03)
        self.assertLess(abs((abs(z) < 1).mean() - 0.6827), 0.02)
        self.assertEqual(rng.standard_normal(3, "f4").dtype, np.dtype("f4"))
        z = rng.normal(5, 2, (100, 50)).numpy()
        self.assertLess(abs(z.mean() - 5) + abs(z.std() - 2), 0.2)
        z = rng.normal([0, 100, 200], self.t.put(np.ones((50, 1)))).numpy() - [0, 100, 200]
        self.assertEqual((z.shape, len(np.unique(z))), ((50, 3), 150))
        self.assertEqual(rng.uniform([1, 2], [2, 3]).numpy().astype(int).tolist(), [1, 2])
        u = rng.uniform(-2, 3, 1000).numpy()
        self.assertTrue(-2 <= u.min() < -1.9 and 2.9 < u.max() < 3)
        i = rng.integers(6, size=1000, dtype="u1", endpoint=True).numpy()
        self.assertEqual((i.dtype, sorted({*i.tolist()})), (np.dtype("u1"), list(range(7))))
        self.assertFalse((rng.random(9).numpy() == rng.random(9).numpy()).any())
        self.assertEqual({*rng.integers(0, 2, 99, bool).numpy().tolist()}, {False, True})
        seeds = [self.t.default_rng().random().numpy() for _ in range(2)]
        self.assertNotEqual(*seeds)

    def test_permutations(self):
        order = self.t.default_rng(3).permutation(100).numpy()
        self.assertEqual(sorted(order.tolist()), list(range(100)))
        self.assertNotEqual(order.tolist(), list(range(100)))
        a = RNG.normal(size=(4, 100))
        self.same(self.t.default_rng(3).permutation(self.t.put(a), 1), a[:, order])

    def test_what_is_refused(self):
        rng = self.t.default_rng(1)
        self.assertRaises(ValueError, rng.integers, 5, 5)
        self.assertRaises(ValueError, rng.integers, 300, dtype="u1")
        self.assertRaises(ts.Unsupported, rng.integers, -(2**63), 1)
        self.assertRaises(TypeError, rng.random, 3, "f2")
        self.assertRaises(ValueError, self.t.default_rng, 2**64)
        self.assertRaises(ValueError, self.t.default_rng, -1)
        self.assertRaises(ValueError, rng.normal, 0, -1)
        self.assertRaises(OverflowError, rng.uniform, 0, np.inf)
        self.assertRaises(ValueError, rng.integers, 3, dtype=bool)
        self.assertRaises(OverflowError, self.t.arange, 1e300, 1e300, dtype="i4")


if __name__ == "__main__":
    python_outsider.main("__main__")
