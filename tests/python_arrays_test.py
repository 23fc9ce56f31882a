#!/usr/bin/env python3
"""Compares arrays and expressions of the Python client with NumPy."""

import asyncio
import copy
import functools
import gc
import importlib.util
import itertools
import operator
import os
import pickle
import re
import subprocess
import sys
import warnings
from unittest import mock

import numpy as np

import outsider as o
import python_outsider
import tessera as ts

RNG = np.random.default_rng(20261124)
KEYS = (
    np.s_[:], np.s_[3], np.s_[-1, ::2], np.s_[::-1, ::-3], np.s_[..., 2], np.s_[1:1],
    np.s_[None, 2:5, None, ::-1], np.s_[5:100, -3:], np.s_[7:2:-2], np.s_[2, 3], np.s_[:: 2**70],
)


def stable(a):
    """Returns a stable order. Other kinds of sort leave the order of equal elements open."""
    return np.argsort(a, kind="stable")


# Functions that are composed of other operations, as calls with a 12 x 9 array, its first row and
# another array with three axes. ComposedTest makes random calls, and
# tests/python_signatures_test.py covers every argument.
MOVING = {
    "concatenate None": lambda x, v, b: np.concatenate((v, b), None),
    "concatenate dtype": lambda x, v, b: np.concatenate((v, v), dtype="f8"),
    "concatenate list": lambda x, v, b: np.concatenate((v, [True, False])),
    "concatenate empty": lambda x, v, b: np.concatenate((b[:0], b[:0])),
    "stack": lambda x, v, b: np.stack([v, v[::-1], v], -1),
    "append": lambda x, v, b: np.append(x, v),
    "append axis": lambda x, v, b: np.append(x, x[:1], axis=0),
    "hstack": lambda x, v, b: np.hstack((v, v[:2])), "hstack 2": lambda x, v, b: np.hstack((x, x)),
    "vstack": lambda x, v, b: np.vstack((v, x)),
    "dstack": lambda x, v, b: np.dstack((x, x)),
    "diff append": lambda x, v, b: np.diff(x, append=x[:, :2]),
    "diff prepend": lambda x, v, b: np.diff(b, 2, 1, prepend=b[0, 0, 0], append=b[0, 0, 1]),
    "round": lambda x, v, b: np.round(x * x, -1),
    "column_stack": lambda x, v, b: np.column_stack((v, x.T, v)),
    "roll twice": lambda x, v, b: np.roll(b, 1, (0, 0)),
    "pad wrap": lambda x, v, b: np.pad(x, ((0, 0), (4, 3)), "wrap"),
    "array_split": lambda x, v, b: np.array_split(x, 5), "hsplit": lambda x, v, b: np.hsplit(x, 3),
    "array_split axis": lambda x, v, b: np.array_split(x, [2, 4], axis=1),
    "array_split many": lambda x, v, b: np.array_split(v, 20),
    "hsplit vector": lambda x, v, b: np.hsplit(v, [4]), "vsplit": lambda x, v, b: np.vsplit(b, 2),
    "dsplit": lambda x, v, b: np.dsplit(b, (1, 2)),
    "tril vector": lambda x, v, b: np.tril(v),
    "diag of matrix": lambda x, v, b: np.diag(x, 1),
    "diagflat": lambda x, v, b: np.diagflat(x[:2, :3], 1),
    "meshgrid": lambda x, v, b: np.meshgrid(v, x[:, 0], v[:2]),
    "meshgrid ij": lambda x, v, b: np.meshgrid(v, [1.5, 2], indexing="ij"),
    "meshgrid sparse": lambda x, v, b: np.meshgrid(v, v, sparse=True, copy=False),
    "windows": lambda x, v, b: np.lib.stride_tricks.sliding_window_view(v, 4),
    "select": lambda x, v, b: np.select([x > 1, v < 0], [x, v], default=v[0]),
    "empty_like": lambda x, v, b: np.empty_like(x, shape=(2, 3)) * x[0, 0] * 0 == 9,
    "kron": lambda x, v, b: np.kron(x[:2], b),
    "kron number": lambda x, v, b: np.kron(v[0], x),
    "searchsorted left": lambda x, v, b:
        np.searchsorted([-2, 1, 1, 3, np.nan, np.nan], x, side="left"),
    "searchsorted here": lambda x, v, b: np.searchsorted(np.cumsum(b), x, side="right"),
    "searchsorted number": lambda x, v, b: np.searchsorted(np.cumsum(b), 3.1),
    "digitize none": lambda x, v, b: np.digitize(x, []),
    "digitize falling": lambda x, v, b: np.digitize(x, bins=np.array([3, 1, 0, -1])),
    "histogram": lambda x, v, b: np.histogram(x, [-2, 0, 1, 1, 3]),
    "histogram range": lambda x, v, b: np.histogram(x, bins=7, range=(-3, 3)),
    "isin": lambda x, v, b: np.isin(x, v[2:5]), "in1d": lambda x, v, b: np.in1d(x, [], invert=True),
    "isin a list": lambda x, v, b: np.isin(stable(x), [1, 2, 40], invert=True),
    "union1d": lambda x, v, b: np.union1d([1.5, 0], x + 0),
    "intersect1d": lambda x, v, b: np.intersect1d(x[::3] + 0, x[1:4] + 0, return_indices=True),
    "setdiff1d": lambda x, v, b: np.setdiff1d(x + 0, v),
    "setxor1d": lambda x, v, b: np.setxor1d(b, x + 0),
    "lexsort": lambda x, v, b: np.lexsort((v, stable(v) // 3)),
    "lexsort axis": lambda x, v, b: np.lexsort((x, x > 0), axis=0),
    "delete": lambda x, v, b: np.delete(x, 3), "delete row": lambda x, v, b: np.delete(x, -1, 0),
    "delete some": lambda x, v, b: np.delete(b, [0, -1, 0], 1),
    "delete slice": lambda x, v, b: np.delete(x, slice(None, None, 2), axis=1),
    "delete mask": lambda x, v, b: np.delete(v, [True, False, True] * 3),
    "insert": lambda x, v, b: np.insert(x, 3, 7), "insert end": lambda x, v, b: np.insert(v, 9, v),
    "insert row": lambda x, v, b: np.insert(x, -1, v, axis=0),
    "insert some": lambda x, v, b: np.insert(x, [4, 0, 4], [[1, 2, 3]], 1),
    "insert slice": lambda x, v, b: np.insert(v, slice(0, 9, 4), [1, 2, 3]),
    "insert none": lambda x, v, b: np.insert(x, [], 1),
    "insert several": lambda x, v, b: np.insert(v, [1], [1, 0, 1]),
    "insert several, slice": lambda x, v, b: np.insert(v, slice(1, 2), [1, 2, 3]),
    "insert columns": lambda x, v, b: np.insert(x, [-1], x[:, :2], axis=1),
    "insert into none": lambda x, v, b: np.insert(v[:0], 0, v[:2]),
    "resize": lambda x, v, b: np.resize(v, (5, 4)),
    "block": lambda x, v, b: np.block([[x, x[:, :2]], [v, 1, 2]]),
    "block vector": lambda x, v, b: np.block([v, 3, v[:2]]),
    "block one": lambda x, v, b: np.block(x),
    "unravel_index": lambda x, v, b: np.unravel_index(stable(v), (2, 2, 3)),
    "partition": lambda x, v, b: np.partition(x + 0, range(9)),
    "msort": lambda x, v, b: np.msort(x + 0),
    "partition axis": lambda x, v, b: np.partition(x + 0, (0, 1), axis=0)[:2],
    "ediff1d": lambda x, v, b: np.ediff1d(v, to_end=[1, 2], to_begin=0),
    "pad edge": lambda x, v, b: np.pad(x, ((2, 0), (30, 1)), "edge"),
    "pad reflect": lambda x, v, b: np.pad(x, ((11, 1), (0, 8)), "reflect"),
    "pad even": lambda x, v, b: np.pad(v, 3, "reflect", reflect_type="even"),
    "pad symmetric": lambda x, v, b: np.pad(b, 7, "symmetric"),
    "signbit": lambda x, v, b: np.signbit(np.nan_to_num(0 * x)),
    "copysign": lambda x, v, b: np.copysign(3, v * 0),
    "modf": lambda x, v, b: np.modf(x * 3), "nextafter": lambda x, v, b: np.nextafter(x + 0, v + 0),
    **{f"bits {sign}": lambda x, v, b, sign=sign: eval(f"stable(x) {sign}")
       for sign in ("& 5", "| -7", "^ 6", "<< 61", ">> 1", ">> stable(v)", "<< stable(v)")},
    "invert": lambda x, v, b: ~stable(x),
}
# The results of these functions may differ because of rounding.
SUMMING = {
    "interp": lambda x, v, b: np.interp(x, [-1, 0, 0.5, 2], v[:4]),
    "interp limits": lambda x, v, b: np.interp([-9, 0, 9, 1], np.sort(v), v, left=-7, right=7),
    "interp period": lambda x, v, b: np.interp(x, v, x[0], period=1.25),
    "gradient": lambda x, v, b: np.gradient(x), "gradient axes": lambda x, v, b:
        np.gradient(b, 2, 0.5, axis=(1, -1), edge_order=2),
    "gradient places": lambda x, v, b: np.gradient(x, np.arange(9) ** 2, axis=1),
    "gradient places here": lambda x, v, b: np.gradient(v, np.sort(v), edge_order=2),
    "gradient integers": lambda x, v, b: np.gradient(np.argsort(v), edge_order=2),
    "polyval": lambda x, v, b: np.polyval([1, -2, 0.5], x * np.ones(9)),
    "polyval here": lambda x, v, b: np.polyval(v[:3], x),
    "nanmedian": lambda x, v, b: np.nanmedian(np.where(x > 1, np.nan, x), axis=0),
    "nanmedian none": lambda x, v, b: np.nanmedian(b * np.nan),
    "nanquantile": lambda x, v, b:
        np.nanquantile(np.where(x > v, np.nan, x).astype("f8"), [0.1, 0.7], axis=1),
    "nanpercentile": lambda x, v, b: np.nanpercentile(np.where(x > 1, np.nan, x).astype("f8"), 33),
    **{f"quantile {how}": lambda x, v, b, how=how:
       np.quantile(x.astype("f8"), [0.2, 0.5, 0.9], 0, method=how)
       for how in ("hazen", "weibull", "median_unbiased", "normal_unbiased", "lower", "higher",
                   "nearest", "midpoint", "interpolated_inverted_cdf")},
    "bincount weights": lambda x, v, b: np.bincount(np.argsort(v) // 2, v, 8),
    "histogram weights": lambda x, v, b: np.histogram(x, [-2, 0, 1, 3], weights=x / 2)[0],
    "histogram even": lambda x, v, b: np.histogram(v, 4, density=True, weights=v * v)[0],
    "matmul of stacks": lambda x, v, b: b / 2 @ b.swapaxes(1, 2),
    "matmul of truth": lambda x, v, b: (b > 0) @ (b > 1).swapaxes(1, 2),
    "matmul of integers": lambda x, v, b: np.argsort(b)[:1] @ np.argsort(b).swapaxes(1, 2),
    "convolve number": lambda x, v, b: np.convolve(v, v[0]),
    "cov": lambda x, v, b: np.cov(x),
    "cov vector": lambda x, v, b: np.cov(v),
    "cov 0": lambda x, v, b: np.cov(x[:0]),
    "cov one": lambda x, v, b: np.cov(x[:, :1]) * np.nan,
    "corrcoef": lambda x, v, b: np.corrcoef(x), "corrcoef 1": lambda x, v, b: np.corrcoef(v),
    "multi_dot": lambda x, v, b: np.linalg.multi_dot([x, x.T, x, v]),
    "multi_dot 2": lambda x, v, b: np.linalg.multi_dot((v, x.T)),
    "multi_dot vectors": lambda x, v, b: np.linalg.multi_dot((v, x.T, x, v)),
    "cross": lambda x, v, b: np.cross(x[:, :3], v[3:6]),
    "cross axes": lambda x, v, b: np.cross(x[:3], x[3:6], 0, 0, 0),
    "cross 3 and 2": lambda x, v, b: np.cross(x[:, :3], x[:, 4:6]),
    "cross 2 and 3": lambda x, v, b: np.cross(v[:2], b[:, :3, :3], axisb=1, axisc=0),
    "cross 2": lambda x, v, b: np.cross(x[:2], x[2:4], axis=0),
    "histogram density": lambda x, v, b: np.histogram(x, [-2, 0, 1, 3], density=True)[0],
    "einsum ... none": lambda x, v, b: np.einsum("i...,i->i...", v, v),
    "einsum broadcast": lambda x, v, b: np.einsum("ij,ij->j", x, x[:1]),
    "einsum ones": lambda x, v, b: np.einsum("ij,jk->ik", x[:, :1], x),
    "einsum numbers": lambda x, v, b: np.einsum(",i", v[1], v),
    "einsum 0": lambda x, v, b: np.einsum("ij->i", x[:, :0]),
    "einsum lists": lambda x, v, b: np.einsum(x, [0, 1], x, [2, 1], [2, 0]),
    "einsum large numbers": lambda x, v, b: np.einsum(x, [30, 2], x, [30, 40]),
    "einsum lists ...": lambda x, v, b: np.einsum(b, [..., 0], v[:3], [0]),
    "einsum optimize": lambda x, v, b: np.einsum("ij,jk,kl->il", x, x.T, x, optimize=True),
    "einsum dtype": lambda x, v, b: np.einsum("ij->", x, dtype="f8"),
}


class ArraysTest(python_outsider.Case):
    def setUp(self):
        self.a = RNG.standard_normal((12, 9)).astype(np.float32)
        self.x = self.t.put(self.a)

    def check(self, expression, expected, tolerance=1e-5):
        """Checks that shape and dtype are known beforehand, and that the result equals NumPy's."""
        expected = np.asarray(expected)
        self.assertEqual(expression.shape, expected.shape)
        got = expression.numpy()
        self.assertEqual(got.dtype, expression.dtype)
        self.assertEqual(got.shape, expected.shape)
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)

    # --- put and numpy

    def test_every_dtype_and_shape_comes_back(self):
        for dtype in ("f4", "f8", "f2", "i4", "i8"):
            for shape in ((), (0,), (1,), (3, 5, 7), (0, 4), (700_000,)):
                with self.subTest(dtype=dtype, shape=shape):
                    count = int(np.prod(shape))
                    array = np.frombuffer(RNG.bytes(count * np.dtype(dtype).itemsize), dtype)
                    array = array.reshape(shape)
                    got = self.t.put(array).numpy()
                    self.assertEqual((got.dtype, got.shape), (array.dtype, shape))
                    self.assertEqual(got.tobytes(), array.tobytes())
                    got[...] = 0  # The array belongs to the caller.

    def test_bf16_rounds_to_nearest_even(self):
        values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -3.3e38, np.inf, np.nan, 1e-45, 0], "f4")
        expected = np.array([1, 1, 1 + 2**-6, -3.3e38, np.inf, np.nan, 0, 0], "f4")
        for array in (values, values.astype("f8")):
            got = np.asarray(self.t.put(array, dtype=ts.bfloat16).numpy(), np.float32)
            np.testing.assert_allclose(got, expected, rtol=2**-8)
        # This value is just above a tie. Converted through float32, it would become the tie and be
        # rounded down.
        near = np.array([1 + 2**-8 + 2**-40])
        self.assertEqual(float(self.t.put(near, dtype="bf16").numpy()[0]), 1 + 2**-7)
        wide = RNG.standard_normal(4096).astype("f4")
        theirs = self.t.put(wide).astype("bf16").numpy()
        mine = self.t.put(wide, dtype="bf16").numpy()
        np.testing.assert_array_equal(theirs, mine)

    # --- views

    def test_indexing_is_numpys(self):
        for key in KEYS:
            with self.subTest(key=key):
                self.check(self.x[key], self.a[key], 0)
                self.check(self.x.T[key], self.a.T[key], 0)
                self.check((self.x + self.x)[key], (self.a + self.a)[key], 0)
        for array in (np.zeros((3, 0), "u1"), np.zeros((0, 4), "f4")):
            for key in np.s_[::-1, 1:]:
                self.check(self.t.put(array)[key] + 1, array[key] + 1, 0)

    def test_views_send_nothing(self):
        with self.calls() as calls:
            view = self.x[::-1].T.reshape(3, 3, 12)[:, 1].swapaxes(0, 1).squeeze()
        self.assertEqual(calls, [])
        reference = self.a[::-1].T.reshape(3, 3, 12)[:, 1].swapaxes(0, 1).squeeze()
        self.assertIsInstance(view, ts.Array)
        self.check(view, reference, 0)

    def test_a_reshape_that_strides_cannot_express_copies(self):
        self.check(self.x.T.reshape(-1), self.a.T.reshape(-1), 0)
        zeros = self.t.put(np.array([[0.0, -0.0], [-0.0, 0.0]], "f4")).T.reshape(4).numpy()
        self.assertEqual(np.signbit(zeros).tolist(), [False, True, True, False])

    def test_bad_indices_are_index_errors(self):
        for key in (99, (0, -10), (0, 0, 0), (Ellipsis, Ellipsis), 1.5, "a", (0, 1j), [1.0], ["a"],
                    {}, self.a, self.x, np.empty(0), (slice(None), [0.5])):
            with self.assertRaises(IndexError):
                self.x[key]
        for key in (([12], [1]), ([0], [9]), ([-13, 0], [0, 0]), ([0.5], [1]), ([0, 1, 1], [0, 1])):
            with self.assertRaises(ts.BadIndex):
                self.x[key]
        with self.assertRaises(ts.BadIndex):
            self.x[self.t.put(np.array([0, 0])), self.t.put(np.array([8, -10]))].numpy()
        for key in ((self.a[:, 0] > 0, [1, 2]), (0, np.False_), (self.x[0, 0] > 0, 0)):
            with self.assertRaises(ts.Unsupported):
                self.x[key]
        with self.assertRaises(ts.Unsupported):
            self.x[0] = 1
        for call in (lambda: self.x.reshape(7, -1), lambda: self.x[0, 0].broadcast_to((2, -3)),
                     lambda: np.full_like(self.x, 1, shape=(-1,)), lambda: self.x @ self.x,
                     lambda: self.x + self.x.T):
            self.assertRaises(ts.BadShape, call)

    # --- operations

    def test_products_and_means_of_integers(self):
        a = RNG.integers(-9, 9, (5, 6)).astype("i4")
        x = self.t.put(a)
        self.check(x.mean(), a.mean(), 1e-12)
        self.check(ts.matmul(x, x.T, dtype="i64"), (a @ a.T).astype("i8"), 0)

    def test_functions(self):
        """Tests forms that tests/python_signatures_test.py does not cover."""
        weights, ones = np.arange(12, dtype="f4"), np.ones(5)
        box = lambda x: x.reshape(4, 3, 9)  # noqa: E731
        trapezoid = getattr(np, "trapezoid", None) or np.trapz  # NumPy 2 and 1.
        for i, call in enumerate((
            lambda x: np.average(x[:3].astype("f8"), axis=0, weights=[1, 2, 3]),
            lambda x: np.average(x, axis=0, weights=weights), lambda x: np.diff(x > 0, 2),
            lambda x: np.moveaxis(x[None], 0, 2), lambda x: np.rot90(x), lambda x: np.rot90(x, -1),
            lambda x: np.linalg.norm(x, np.inf, axis=0), lambda x: np.split(x, 3)[1],
            lambda x: np.tensordot(box(x), box(x), ([1, 2], [1, 2])), lambda x: np.inner(x, x),
            lambda x: np.tensordot(box(x), x.T, 1), lambda x: np.inner(box(x), x),
            lambda x: np.dot(x, x.T), lambda x: np.vdot(x, x), lambda x: np.matmul(x.T, self.a),
            lambda x: (x * 10).round(), lambda x: trapezoid(self.a, x),
            lambda x: trapezoid(x, x[0]),
        )):
            with self.subTest(number=i):
                self.check(call(self.x), call(self.a), 1e-4)
        a = np.arange(24.0).reshape(2, 3, 4)
        x, w = self.t.put(a), a[0] + 1
        for axis, weights, wide in (((1, 2), w, w), ((2, -2), w.T, w), ((2,), w[0], w[0]),
                                    ((0, 2), a, a), ((2, 0), a[:, 0].T, a[:, :1])):
            wide = np.broadcast_to(wide, a.shape)
            self.check(np.average(x, axis, weights), np.average(a, axis, wide), 1e-12)
        for axis, error in ((None, TypeError), ((2, 1), ValueError), ((0, 1), ValueError)):
            self.assertRaises(error, np.average, x, axis, w)
        a, x = self.a, self.x
        self.check(ts.fma(x, x, 1), a * a + 1)
        self.check(ts.window_sum(x[0], 2), np.convolve(a[0], ones, "same"))
        self.check(ts.sum_squares(x, axis=1), (a * a).sum(axis=1))
        self.check(ts.norm(x, 1, axis=0), np.linalg.norm(a, 1, axis=0))
        self.assertRaises(ValueError, np.diff, x, -1)
        self.assertRaisesRegex(ValueError, "min", np.clip, x, 0, 1, min=2)  # As in NumPy 2.
        parts = np.split(x[:, :0], 3, axis=1)
        self.assertEqual([part.shape for part in parts], 3 * [(a.shape[0], 0)])
        self.assertEqual(np.result_type(x, 1.0, np.float64), np.float64)
        for one in (copy.copy(x), copy.deepcopy([x])[0], copy.deepcopy(x + 0)):
            self.check(one, a, 0)
        self.assertTrue(np.allclose(x, a * (1 + 1e-7)) and np.array_equal(x, a))
        self.assertFalse(np.allclose(x, a + 1) or np.array_equal(x, a + 1))
        self.assertFalse(np.array_equal(x, a.T))
        for a in (np.arange(-128, 128).astype("i1"), self.a):
            x = self.t.put(a)
            for call in (
                lambda x: np.dot(x, 2), lambda x: np.dot(2, x), lambda x: x.dot(2),
                lambda x: np.inner(x, 2), lambda x: np.tensordot(x, 2, 0),
                lambda x: np.dot(x, np.float32(2)),
            ):
                self.check(call(x), call(a), 0)
                self.assertEqual(call(x).dtype, call(a).dtype)
        for radius, error in ((-1, ts.BadRadius), (1.5, TypeError), ("1", TypeError)):
            self.assertRaises(error, ts.window_sum, x.ravel(), radius)

    def test_what_the_server_cannot_do_is_refused_with_a_way_out(self):
        x = self.x
        for attempt in (
            lambda: np.add(x, x, out=self.a), lambda: np.add(x, x, where=self.a > 0),
            lambda: np.add.outer(x, x), lambda: np.delete(x, x.argmax()),
            lambda: np.subtract.accumulate(x), lambda: np.add.accumulate(x, out=self.a),
            lambda: np.cumsum(x, out=self.a), lambda: np.spacing(x),
            lambda: x + np.zeros((12, 9), "c8"),
        ):
            with self.assertRaisesRegex(ts.Unsupported, r"numpy\(\)|the server|take them"):
                attempt()
        for call, way in (
            (lambda: np.add.outer(x, x), r"\[:, None\]"), (lambda: np.ix_(x), r"x\[rows\]"),
            (lambda: np.put(x, 1, 2), "np.where"), (lambda: np.copyto(x, 2), "np.where"),
            (lambda: np.quantile(x, 0.5, method="inverted_cdf"), "hazen"),
            (lambda: np.round(x > 0, 1), "astype"),
            (lambda: np.piecewise(x, [x > 0], [1]), "np.select"),
            (lambda: np.histogram(x, "auto", (0, 1)), "pass it"),
            (lambda: np.unique(x, axis=0), r"x\.numpy"),
            (lambda: np.pad(x, 1, "mean"), "np.concatenate"),
            (lambda: np.pad(x, 1, "mean", stat_length=2), "np.concatenate"),
            (lambda: np.pad(x, 1, "reflect", reflect_type="odd"), "np.concatenate"),
            (lambda: np.pad(x, 1, lambda vector, *_: None), "np.concatenate"),
            (lambda: np.linalg.eig(x), r"np\.linalg\.eigh"),
            (lambda: x + ts.connect(self.server.address).put(self.a), "import_from"),
        ):
            with self.assertRaisesRegex(ts.Unsupported, way):
                call()

    def test_no_elements_have_no_extremes(self):
        """As in NumPy, this is so even if the result has no elements."""
        for shape in ((1, 0, 0), (0, 0), (3, 0), (2, 0, 3)):
            a, x = np.ones(shape), self.t.put(np.ones(shape))
            for call, axis, keep in itertools.product(
                (np.max, np.min, np.argmax, np.argmin, np.ptp, np.nanmax, np.nanargmin,
                 functools.partial(np.quantile, q=0.5)), (None, *range(a.ndim)), (False, True)
            ):
                try:
                    want = call(a, axis=axis, keepdims=keep)
                except (ValueError, IndexError) as error:
                    with self.assertRaises(type(error)):
                        call(x, axis=axis, keepdims=keep)
                else:
                    self.check(call(x, axis=axis, keepdims=keep), want, 0)
            for axis in range(a.ndim):
                self.check(x.max(axis, initial=2), a.max(axis, initial=2), 0)

    def test_types_do_not_show_their_byte_order(self):
        swapped = np.dtype("f4").newbyteorder("<")
        for array in (self.x.astype("f8"), self.x.sum(dtype="<f8"), self.x.astype(swapped),
                      self.t.zeros(3, dtype=">i4"), np.append(self.x[0], np.ones(2, swapped)),
                      self.t.put(np.ones(2, ">f8")), self.x + np.ones(9, swapped)):
            self.assertEqual(repr(array.dtype), f"dtype('{array.dtype.name}')")

    def test_bf16_and_the_rules_of_numpy(self):
        short = self.t.put(np.ones(4), dtype="bf16")
        for to in ("f4", "f8", "c8", "bf16"):
            self.assertTrue(np.can_cast(short, to), to)
        for to in ("f2", "i8", "?"):
            self.assertFalse(np.can_cast(short, to), to)
        self.assertTrue(np.can_cast(short, "f2", "same_kind"))
        self.assertTrue(np.can_cast(self.t.put(np.ones(1, "i1")), "bf16"))
        self.assertFalse(np.can_cast(self.x, "bf16"))
        self.assertTrue(np.can_cast(self.x, "bf16", "same_kind"))
        self.assertFalse(np.can_cast(short, "f4", "equiv"))
        self.assertEqual(np.result_type(short, "bf16"), ts.bfloat16)
        for call in (lambda: np.invert(short, dtype="i4"), lambda: np.isnan(short, dtype="f2"),
                     lambda: np.add(short, short, dtype="i4"),
                     lambda: np.matmul(short, short, dtype="i8")):
            self.assertRaises(TypeError, call)
        self.check(np.add(short, short, dtype="f4"), np.full(4, 2, "f4"), 0)
        self.assertEqual(np.add(short, short, dtype=ts.bfloat16).dtype, ts.bfloat16)

    def test_odd_arguments(self):
        a, f = np.array([3, -1, 2], "i4"), np.array([1.5, np.nan, 2])
        x, y = self.t.put(a), self.t.put(f)
        for name in ("nanmin", "nanmax"):
            for initial in (np.nan, 0.5, 9):
                call = getattr(np, name)
                self.check(call(y, initial=initial), call(f, initial=initial), 0)
        for name in ("product", "cumproduct", "alltrue", "sometrue"):
            if hasattr(np, name):  # NumPy 2 has none of them.
                self.check(getattr(np, name)(x, 0), getattr(np, name)(a, 0), 0)
        for value in ("a", None, 1j, b"x", 3, 4):
            self.assertEqual(value in x, value in a.tolist(), value)
        for value, error in ((np.nan, ValueError), (np.inf, OverflowError), (1e20, OverflowError)):
            self.assertRaises(error, lambda: np.pad(x, 1, constant_values=value))
        self.check(np.pad(x, 1, constant_values=2.7), np.pad(a, 1, constant_values=2.7), 0)

    def test_numbers_that_no_type_holds(self):
        x = self.x[0]
        for number, call in itertools.product((2**63, 2**64 - 1), (
            lambda n: np.dot(x, n), lambda n: np.append(x, n), lambda n: np.outer(x, n),
            lambda n: np.inner(x, n), lambda n: np.kron(x, n), lambda n: np.union1d(x, n),
            lambda n: np.tensordot(x, n, 0), lambda n: np.einsum("i,->i", x, n),
            lambda n: np.insert(x, 0, n), lambda n: np.diff(x, append=n),
            lambda n: np.ediff1d(x, to_end=n),
        )):
            self.assertRaisesRegex(OverflowError, str(number), call, number)

    def test_orders_of_elements(self):
        x, a = self.x, self.a
        for call in (lambda x: x.ravel("K"), lambda x: x[::-1, 2:].flatten("A"),
                     lambda x: x.reshape(9, 12, order="A"), lambda x: np.ravel(x[:, :1].T, "K"),
                     lambda x: np.reshape(x, (9, 12), order=None)):
            self.check(call(x), call(a), 0)
        self.check((x.T + 0)[0].ravel("K"), a.T[0], 0)
        for call in (
            lambda: x.T.ravel("K"), lambda: x.T.ravel("A"), lambda: x.T.flatten("K"),
            lambda: x.T.reshape(9, 12, order="A"), lambda: (x.T + 0).ravel("K"),
            lambda: np.ravel(x.T, "K"), lambda: np.reshape(x.T, (9, 12), order="A"),
            lambda: x[0].broadcast_to((2, 9)).ravel("K"), lambda: x.ravel("F"),
            lambda: np.unravel_index(x.argmax(), (12, 9), order="K"),
        ):
            self.assertRaisesRegex(ts.Unsupported, "use order=", call)
        for copied in (x.copy(order="F"), np.copy(x.T, "K").T, np.copy(x, order="F")):
            self.check(copied, a, 0)
        self.assertRaisesRegex(ts.NoAttribute, "save", lambda: (x + 0).copy())

    def test_arguments_that_do_not_fit(self):
        """The errors have NumPy's classes."""
        x, square = self.x, np.zeros((2, 2), int)
        for error, text, call in (
            (ValueError, "same shape", lambda: np.lexsort((x[0], x[0, :5]))),
            (ValueError, "larger than 0", lambda: np.array_split(x, 0)),
            (ValueError, "larger than 0", lambda: np.array_split(x, -1)),
            (TypeError, "NoneType", lambda: np.sum(x, where=None)),
            (TypeError, "NoneType", lambda: np.std(x, ddof=None)),
            (np.linalg.LinAlgError, "multi_dot", lambda: np.linalg.multi_dot([x[0], x[0], x[0]])),
            (IndexError, "axes", lambda: np.tensordot(x[0], x[0], 2)),
            (IndexError, "broadcast", lambda: np.take_along_axis(x, square, 1)),
            (TypeError, r"\.numpy\(\)", lambda: np.quantile(x, x[0])),
            (TypeError, r"\.numpy\(\)", lambda: np.pad(x, x[0, :2])),
            (ts.BadDtype, "float32", lambda: x.numpy(out=np.empty((12, 9)))),
            (ValueError, "contiguous", lambda: x.numpy(out=np.empty((9, 12), "f4").T)),
            (ts.Unsupported, '"uint8"', lambda: x.astype("u8")),
        ):
            self.assertRaisesRegex(error, text, call)

    def test_numbers_on_the_server(self):
        a = np.arange(5.0)
        x, two, half = self.t.put(a), self.t.put(np.array(2)), self.t.put(np.array(0.5))
        for call in (
            lambda x, two, half: np.pad(x, two, constant_values=half),
            lambda x, two, half: np.histogram(x, bins=two)[0],
            lambda x, two, half: np.roll(x, two), lambda x, two, half: np.quantile(x, half),
            lambda x, two, half: np.sum(x, initial=two), lambda x, two, half: np.std(x, ddof=two),
            lambda x, two, half: x.max(initial=half),
        ):
            self.check(call(x, two, half), call(a, 2, 0.5), 1e-15)

    def test_cross_products_of_vectors_of_two(self):
        a, b = np.array([[4, 2], [3e200, 1]]), np.array([[np.inf, -2, 3], [0, 1e200, -0.0]])
        x, y = self.t.put(a), self.t.put(b)
        with np.errstate(all="ignore"):
            self.check(np.cross(x, y), np.cross(a, b), 0)
            self.check(np.cross(y, x), np.cross(b, a), 0)

    def test_corners_of_shapes(self):
        a = np.arange(6.0).reshape(1, 1, 1, 2, 1, 3)
        x = self.t.put(a)
        for call in (
            lambda a: np.tile(a, 1), lambda a: np.tile(a, (2, 1, 1, 2, 1, 2)),
            lambda a: np.tile(a[0, 0, 0, :, 0], (2, 3, 2)),
            lambda a: np.repeat(a[None, None], 2, 5),
            lambda a: np.trace(a[0, 0, 0, :, :, :0], 1),
            lambda a: np.diagonal(a[0, 0, :, :, 0], 2, 1, 2),
            lambda a: np.repeat(a[0, 0, 0, 0, 0, 1], 2, axis=0), lambda a: np.diff(a, n=0),
            lambda a: np.squeeze(a[0, 0, 0, 0, 0, 1], 0), lambda a: a.sum(axis=()),
            lambda a: a.var(axis=()), lambda a: (a > 2).sum(axis=()), lambda a: a.max(axis=()),
            lambda a: np.linalg.matrix_power(a[0, 0, 0, :, 0, :2], 0),
            *(lambda a, n=n: np.linalg.matrix_power(np.stack([a[0, 0, 0, :, 0, :2]] * 3), n)
              for n in (0, 1, 5)),
            lambda a: np.atleast_1d(2, a[0, 0, 0, 0, 0, 1])[1], lambda a: np.atleast_2d([1], a)[1],
            *(lambda a, name=name, axis=axis: getattr(a[0, 0, 0, 0, 0, 1], name)(axis)
              for name in "sum prod min max argmin argmax all any ptp argsort".split()
              for axis in (0, -1)),
            lambda a: a[0, 0, 0, 0, 0, 1].max(0, initial=7),
            lambda a: np.nanstd(a[0, 0, 0, 0, 0, 1], axis=0),
            lambda a: np.full_like(a[0, 0, 0, 0, 0], [[1, 2, 3]]),
            lambda a: a[0, 0, 0, 0, 0][np.zeros(0, bool)],
            lambda a: a[0, 0, 0, :, 0][np.zeros(0, bool)],
            lambda a: np.take(a[0, 0, 0, 0, 0, 1], [0, 0], 0),
            *(lambda a, i=i: np.atleast_3d(3, a[0, 0, 0, :, 0][i])[1] for i in ((0, 0), 0, ...)),
        ):
            with np.errstate(all="ignore"):
                self.check(call(x), call(a), 0)
        np.testing.assert_equal(np.atleast_2d([1, 2], x)[0], [[1, 2]])
        axis_error = getattr(np, "exceptions", np).AxisError  # NumPy 2 and 1.
        for call in (
            lambda: x.sum(6), lambda: np.expand_dims(x, 9), lambda: x.sum((0, 0)),
            lambda: x.swapaxes(0, 6), lambda: x.transpose(7, 0, 1, 2, 3, 4), lambda: x.squeeze(-7),
            lambda: x.cumsum(6), lambda: np.roll(x, 1, 6), lambda: np.stack([x[0], x[0]], 9),
            *(lambda name=name: getattr(x.sum(), name)(1) for name in ("argmax", "sum", "argsort")),
            lambda: x.sum().mean(0),
        ):
            for error in (axis_error, ts.BadAxes, IndexError, ValueError):
                self.assertRaises(error, call)

    def test_numbers(self):
        self.assertTrue(self.x.any())
        self.assertFalse(bool((self.x - self.x).any()))
        with self.assertRaises(ValueError):
            bool(self.x)
        self.assertEqual(len(self.x), 12)
        self.check(list(self.x)[3], self.a[3], 0)

    # --- scans

    SCANS = {
        "sum": (np.add, 0), "product": (np.multiply, 1), "min": (np.minimum, np.inf),
        "max": (np.maximum, -np.inf), "all": (np.logical_and, True), "any": (np.logical_or, False),
    }

    def scanned(self, op, a, axis, exclusive=False, reverse=False):
        """Returns what NumPy computes, in the types of the package."""
        ufunc, identity = self.SCANS[op]
        if np.isinf(identity) and a.dtype.kind in "iu":
            ends = np.iinfo(a.dtype)
            identity = ends.max if identity > 0 else ends.min
        if a.dtype == bool:
            identity = identity > 0
        if a.dtype == "u1" and op in ("sum", "product"):
            a = a.astype("i8")  # NumPy's sums are unsigned.
        a = np.flip(a, axis) if reverse else a
        found = ufunc.accumulate(a, axis)
        if exclusive:
            found = np.roll(found, 1, axis)
            np.moveaxis(found, axis, 0)[:1] = identity
        return np.flip(found, axis) if reverse else found

    def views(self):
        """Yields views of arrays of every type, with the same views of NumPy's arrays. Sums are
        exact in f16."""
        for dtype in ("f2", "f4", "f8", "i4", "i8", "u1", "i1", "?"):
            a = RNG.integers(0, 3, (5, 70, 3)).astype(dtype)
            x = self.t.put(a)
            for number, view in enumerate((
                    lambda a: a, lambda a: a[::-1, 1::2, 1:].T, lambda a: a[:, :0],
                    lambda a: np.broadcast_to(a[:1], a.shape), lambda a: a[0, :, 0])):
                with self.subTest(dtype=dtype, view=number):
                    yield view(x), view(a)

    def check_all(self, lazy, wanted):
        for one, got, want in zip(lazy, self.t.compute(*lazy), wanted):
            self.assertEqual((one.shape, one.dtype), (want.shape, want.dtype))
            self.assertEqual(got.dtype, want.dtype)
            np.testing.assert_array_equal(got, want)

    def test_scans(self):
        for mine, view in self.views():
            cases = [*itertools.product(
                self.SCANS, range(-1, view.ndim - 1), (False, True), (False, True))]
            self.check_all([ts.scan(mine, *case) for case in cases],
                           [self.scanned(op, view, *how) for op, *how in cases])

    def test_scans_of_special_numbers(self):
        """tests/python_signatures_test.py covers NumPy's functions."""
        special = np.array([[1, np.nan, -0.0, 3], [np.inf, 2, -np.inf, 1]])
        x = self.t.put(special)
        for ufunc in (np.minimum, np.maximum, np.logical_and, np.logical_or, np.add):
            with np.errstate(all="ignore"):
                self.check(ufunc.accumulate(x, 1), ufunc.accumulate(special, 1))
        numbers = RNG.integers(-9, 9, (3, 4))
        short = np.asarray(self.t.put(numbers, dtype="bf16").cumsum(0).numpy(), "f4")
        np.testing.assert_array_equal(short, numbers.cumsum(0))

    def test_scans_are_steps(self):
        a, x = self.a, self.x
        running = ((x - x.mean(axis=0)) ** 2).cumsum(axis=1)
        self.assertEqual(running.explain().splitlines()[0], "one Execute of 2 steps")
        self.assertIn(f"scan((a - b) * (a - b), a: {x.name}, b: step 0, op=sum", running.explain())
        self.check(running, ((a - a.mean(axis=0)) ** 2).cumsum(axis=1), 1e-4)
        last = ts.scan(x, "max", 0, reverse=True)
        self.assertEqual(
            last.explain(),
            f"one Scan of 1 step\n0: scan({x.name}, op=max, axis=-2, reverse=True) -> f32 12x9",
        )
        with self.calls() as calls:
            first, second = self.t.compute(last[0] - last[1], (last + 1).sum())
            kept, truth = self.t.keep(last, np.logical_or.accumulate(x > 1, 1))
            timed = last.with_(strategy="fixed_order", timing=True)
            timed.numpy()
        self.assertEqual(calls, ["Execute", "Execute", "Scan"])
        self.assertEqual(timed.stats[0].strategy, "fixed_order")
        want = np.flip(np.maximum.accumulate(np.flip(a, 0)), 0)
        np.testing.assert_allclose(first, want[0] - want[1], rtol=1e-6)
        np.testing.assert_allclose(second, (want + 1).sum(), rtol=1e-5)
        self.check(kept, want, 0)
        self.check(truth, np.logical_or.accumulate(a > 1, 1), 0)
        # The result of a logical scan is stored as integers.
        marks = np.logical_and.accumulate(x > -1, 1)
        self.check(marks.cumsum(1) + marks.sum(), (a > -1).cumprod(1).cumsum(1)
                   + (a > -1).cumprod(1).sum(), 0)
        self.check(np.logical_or.accumulate(marks, 0), np.logical_or.accumulate(
            np.logical_and.accumulate(a > -1, 1)), 0)

    def test_a_scan_of_a_long_expression(self):
        for count in range(40, 60):
            with self.subTest(count):
                x, a = self.x, self.a
                for i in range(count):
                    x, a = x + np.float32(i), a + np.float32(i)
                self.check(np.logical_and.accumulate(x, 1), np.logical_and.accumulate(a, 1), 0)
                self.check(x.cumsum(1), a.cumsum(1))

    def test_errors_of_scans(self):
        x = self.x
        for error, attempt in (
            (ts.BadAxes, lambda: x.cumsum(2)), (ts.BadAxes, lambda: x[0, 0].cumsum(1)),
            (ts.BadAxes, lambda: ts.scan(x[0, 0], "sum")),
            (ts.BadAxes, lambda: ts.scan(x, "sum", -3)),
            (TypeError, lambda: x.cumsum((0, 1))), (TypeError, lambda: ts.scan(x, "sum", None)),
            (TypeError, lambda: ts.scan(self.a, "sum")),
            (TypeError, lambda: ts.scan(x, "sum", 0, "f4")),
            (ts.BadOperation, lambda: ts.scan(x, "mean")),
            (ValueError, lambda: np.add.accumulate(x, None)),
            (ValueError, lambda: np.add.accumulate(x[0, 0])),
            (TypeError, lambda: np.logical_or.accumulate(x, dtype="f4")),
        ):
            self.assertRaises(error, attempt)

    # --- sorting

    def test_sorts(self):
        for mine, view in self.views():
            for axis in (None, *range(-1, view.ndim - 1)):
                self.check_all(*([np.sort(a, axis), np.argsort(a, axis, kind="stable")]
                                 for a in (mine, view)))

    def test_the_order_of_special_numbers(self):
        special = np.array([1, np.nan, -np.inf, np.inf, np.nan, 0.0, -0.0], "f4")
        x = self.t.put(special)
        self.check(ts.argsort(x), np.argsort(special, kind="stable"), 0)
        self.check(ts.argsort(x, descending=True), [1, 4, 3, 0, 5, 6, 2], 0)
        self.check(ts.sort(x, descending=True), np.sort(special)[::-1], 0)
        short = self.t.put(np.array([3, -1, 2.5]), dtype="bf16")
        self.assertEqual(ts.sort(short).numpy().astype("f4").tolist(), [-1, 2.5, 3])
        for error, attempt in (
            (ts.BadAxes, lambda: np.sort(x, 1)), (ts.BadAxes, lambda: ts.sort(x[0])),
            (TypeError, lambda: ts.sort(special)), (ValueError, lambda: np.sort(x, order="a")),
        ):
            self.assertRaises(error, attempt)

    def test_sorts_are_steps(self):
        a, x = self.a, self.x
        values, indices = ts.sort(abs(x), 0), ts.argsort(abs(x), 0)
        line = f"0: sort(abs(a), a: {x.name}, axis=-2) -> i64 12x9"
        self.assertEqual(indices.explain(), f"one Sort of 1 step\n{line}")
        found = self.t.compute(values, indices)
        np.testing.assert_array_equal(found[0], np.sort(abs(a), 0))
        np.testing.assert_array_equal(found[1], np.argsort(abs(a), 0, kind="stable"))
        self.check(values[0] + indices[1], np.sort(abs(a), 0)[0]
                   + np.argsort(abs(a), 0, kind="stable")[1])
        kept = ts.argsort(x).save()
        self.check(kept, np.argsort(a, kind="stable"), 0)

    def test_sorted_truths_are_truths(self):
        got, want = np.sort((self.x > 0).any(0)), np.sort((self.a > 0).any(0))
        self.check(~got, ~want, 0)
        self.check(np.where(got, 1, 2), np.where(want, 1, 2), 0)

    def test_medians_and_quantiles(self):
        numbers = RNG.normal(size=(7, 10))
        with_nan = numbers.copy()
        with_nan[2, 3] = np.nan
        for dtype in ("f4", "f8", "i4"):
            for a in (numbers * 9, with_nan * 9 if dtype != "i4" else numbers):
                a = a.astype(dtype)
                for axis, keepdims in ((None, False), (0, True), (1, False), (-1, True)):
                    x, options = self.t.put(a), {"axis": axis, "keepdims": keepdims}
                    with self.subTest(dtype=dtype, **options):
                        self.check(np.median(x, **options), np.median(a, **options), 1e-6)
                        for q in (0, 0.3, 0.5, 1, [0.1, 0.9]):
                            self.check(np.quantile(x, q, **options),
                                       np.quantile(a, q, **options), 1e-5)
                        self.check(np.percentile(x, 35, **options),
                                   np.percentile(a, 35, **options), 1e-5)
        for ends in ([-np.inf, -np.inf, 1], [1, 2, np.inf], [-np.inf, np.inf], [1, np.inf, np.inf]):
            x = self.t.put(np.array(ends, "f4"))
            self.check(np.quantile(x, [0, 1]), np.array([min(ends), max(ends)]), 0)
        largest = np.array([60000, 60000], "f2")
        self.check(np.median(self.t.put(largest)), np.median(largest), 0)
        for q in ([], [[0.1, 0.3, 1]], [[0.5], [0.2]], np.zeros((0, 2))):
            self.check(np.quantile(self.x, q, 1), np.quantile(self.a, q, 1), 1e-5)
            self.check(np.nanquantile(self.x, q), np.quantile(self.a, q), 1e-5)
        self.assertRaises(ValueError, lambda: np.quantile(self.x, 1.5))
        truths = self.x > 0
        for method in ("lower", "higher", "nearest"):
            self.check(np.quantile(truths, [0.2, 0.8], 0, method=method),
                       np.quantile(self.a > 0, [0.2, 0.8], 0, method=method), 0)
        self.assertRaisesRegex(TypeError, "no differences", lambda: np.quantile(truths, 0.5))
        for shape, axis in (((0, 3), 0), ((0, 3), 1), ((0, 3), None), ((0,), 0)):
            a = np.zeros(shape, "f4")
            for call in (np.quantile, np.nanquantile):
                def mine(x, call=call):
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        return call(x, 0.5, axis)
                try:
                    want = mine(a)
                except IndexError:
                    self.assertRaises(IndexError, mine, self.t.put(a))
                else:
                    self.check(mine(self.t.put(a)), np.asarray(want), 0)

    # --- indices in arrays

    def test_an_array_of_indices(self):
        a, x = self.a, self.x
        places = np.array([[2, -1], [0, 7]])
        resident = self.t.put(places)
        keys = (
            lambda i: i, lambda i: np.s_[:, i], lambda i: np.s_[..., i], lambda i: np.s_[::2, i],
            lambda i: np.s_[i, ::-2], lambda i: np.s_[i, 3], lambda i: np.s_[3, i],
            lambda i: np.s_[None, i, 1:], lambda i: np.s_[i, None], lambda i: np.s_[3, None, i],
            lambda i: np.s_[i, ..., 3], lambda i: np.s_[:0, i],
        )
        for make in keys:
            half = places % 9
            for mine, host in (
                (half, half), (self.t.put(half), half), (half.tolist(), half),
                ([], np.array([], int)), (self.t.put(half.astype("i4")), half),
                (self.t.put(half % 5).astype("u1"), half % 5), (half[0].astype("i2"), half[0]),
                (self.t.put(half)[::-1, 1], half[::-1, 1]),
            ):
                self.check(x[make(mine)], a[make(host)], 0)
        b = RNG.standard_normal((4, 5, 6))
        y = self.t.put(b)
        for key in (range(2), np.s_[0, :, [1, 2]], np.s_[[1, 2], :, 0], np.s_[1, [2, 0], :],
                    np.s_[..., [5]], np.s_[[1, -1], 0, 3], np.s_[:, [[4]], ::2],
                    np.s_[0, [1, 2], None]):
            self.check(y[key], b[key], 0)
        self.check(x[x.argmax(0)], a[a.argmax(0)], 0)
        self.check(x[x[:, 0].argmin()], a[a[:, 0].argmin()], 0)
        self.check((x * 2)[resident].sum(0), (a * 2)[places].sum(0))
        self.check((x > 0)[resident], (a > 0)[places], 0)
        self.check((x > 0).any(0)[[1, 0]], (a > 0).any(0)[[1, 0]], 0)
        for some in (np.array([1, 3], "u8"), np.array([[0]], "u8")):
            self.check(x[some], a[some], 0)
            self.check(x[:, some], a[:, some], 0)
        self.check(np.take_along_axis(x, some, 0), np.take_along_axis(a, some, 0), 0)
        for dtype in ("f2", "f8", "i4", "i8", "u1", "i1", "?"):
            typed = (a * 40).astype("i4").astype(dtype)
            self.check(self.t.put(typed)[resident], typed[places], 0)

    def test_indices_of_several_axes(self):
        a = np.arange(360.0).reshape(3, 4, 5, 6)
        x = self.t.put(a)
        i, j, k = np.array([2, -3, 0]), np.array([[1], [-3]], "i1"), np.int64(-1)
        for key in ((i, j), (i, 1, j), (Ellipsis, j, i), (slice(None), i, i[::-1]), (i, k, j, 2),
                    (i, slice(1, None, 2), j), (i, None, j), (None, j, [0, 1, 2], Ellipsis, i),
                    (j, j, j, j), (0, [], []), (slice(0), i, slice(0), j)):
            with self.subTest(key=key):
                self.check(x[key], a[key], 0)
                self.check((x + x).T[key], (a + a).T[key], 0)
                resident = tuple(
                    self.t.put(one) if isinstance(one, np.ndarray) else one for one in key)
                self.check(x[resident], a[key], 0)
        last = self.t.put(np.array(2))
        self.check(x[last, last - 1, last, 3], a[2, 1, 2, 3], 0)

    def test_take(self):
        a, x = self.a, self.x
        places = np.array([3, -4, 0, 8])
        resident = self.t.put(places)
        far = self.t.put(np.array([[2**62, -5], [100, -(2**63)]]))
        for axis in (None, 0, 1, -1, -2):
            for mode in ("raise", "wrap", "clip"):
                for call in (lambda a, i: np.take(a, i, axis, mode=mode),
                             lambda a, i: a.take(i, axis, None, mode)):
                    self.check(call(x, resident), call(a, places), 0)
                    self.check(call(x, 2), call(a, 2), 0)
                if mode != "raise":
                    # NumPy reaches the range of a wrapped index by repeated subtraction.
                    extent = a.size if axis is None else a.shape[axis]
                    near = far.numpy() % extent if mode == "wrap" else far.numpy()
                    self.check(x.take(far, axis, mode=mode), a.take(near, axis, mode=mode), 0)
        sorts = np.argsort(a, 1)
        for axis, order in ((1, sorts), (-2, np.argsort(a, 0)), (1, sorts[:, :2]), (1, sorts[:1])):
            want = np.take_along_axis(a, order, axis)
            self.check(np.take_along_axis(x, self.t.put(order), axis), want, 0)
            self.check(np.take_along_axis(x, order, axis), want, 0)
        want = np.take_along_axis(a[:1], sorts, 1)
        self.check(np.take_along_axis(x[:1], sorts, 1), want, 0)
        self.check(np.take_along_axis(x, places, None), np.take_along_axis(a, places, None), 0)
        values, order = x.topk(3, axis=0)
        self.check(np.take_along_axis(x, order, 0), values.numpy(), 0)

    def test_repeats(self):
        a, x = self.a[:3, :4], self.t.put(self.a[:3, :4])
        for counts, axis in (([2, 0, 3], 0), ([1, 0, 2, 5], -1), ([0] * 12, None), ([3], 1),
                             (np.arange(12, dtype="u1"), None)):
            want = np.repeat(a, counts, axis)
            self.check(np.repeat(x, counts, axis), want, 0)
            self.check(x.repeat(self.t.put(np.array(counts)), axis), want, 0)
        none = self.t.put(np.zeros(0, "i8"))
        self.check(np.repeat(x[:0], none, 0), a[:0], 0)
        for counts in ([1, 2], [1, 1, -1], [0.5, 1, 1]):
            for some in (np.array(counts), self.t.put(np.array(counts))):
                with self.assertRaises((ValueError, TypeError)):
                    np.repeat(x, some, 0)

    def test_takes_are_steps(self):
        x, rows = self.x, self.t.put(np.array([2, 0]))
        self.assertEqual(x[rows].explain(), "one Take of 1 step\n"
                         f"0: take({x.name}, {rows.name}, axis=-2) -> f32 2x9")
        lines = (x * 2).take(rows, 1, mode="wrap").sum().explain().splitlines()
        self.assertEqual(lines[0], "one Execute of 3 steps")
        self.assertEqual(lines[2], f"1: take(step 0, {rows.name}, axis=-1, mode=wrap) -> f32 12x2")
        with self.calls() as calls:
            named = x[rows].with_(strategy="cpu_serial")
            kept = self.t.keep(named, x[rows] + 1)
        self.assertEqual(calls, ["Execute"])
        self.check(kept[0], self.a[[2, 0]], 0)
        self.check(kept[1], self.a[[2, 0]] + 1, 0)

    def test_errors_of_takes(self):
        x, far = self.x, self.t.put(np.array([0, -3, 12, 99]))
        for error in (IndexError, ts.BadIndex):
            for attempt in (lambda: x[[12]], lambda: x[:, [0, -10]], lambda: x.take([108]),
                            lambda: x[:0].take([0], 0, mode="clip"), x[far].numpy,
                            x[far].sum().item, lambda: x[far].save("never")):
                self.assertRaises(error, attempt)
        known = np.full_like(x, [3, 999], "i8", shape=(2,))
        self.check(x.take(known[:1]), self.a.take([3]), 0)
        self.assertRaises(ts.BadIndex, lambda: x.take(known[1:]))
        with self.assertRaises(ts.BadIndex) as caught:
            (x[far] + 1).numpy()
        details = {key: caught.exception.details[key] for key in ("position", "value", "length")}
        self.assertEqual(details, {"position": "2", "value": "12", "length": "12"})
        self.assertNotIn("never", self.t)
        for error, attempt in (
            (ts.BadAxes, lambda: x.take([0], 2)), (ValueError, lambda: x.take([0], mode="far")),
            (TypeError, lambda: x.take([1.5])),
            (TypeError, lambda: x.take(np.uint64([1]))), (TypeError, lambda: np.take(self.a, far)),
            (ts.Unsupported, lambda: x.take([0], out=self.a)),
            (ValueError, lambda: np.take_along_axis(x, [0], 0)),
            (ts.BadIndex, lambda: np.take_along_axis(x, np.zeros((5, 2), int), 1)),
            (ts.BadShape, lambda: x[np.zeros((1,) * 8, int)]),
        ):
            self.assertRaises(error, attempt)

    # --- pandas

    def test_columns_of_pandas(self):
        if importlib.util.find_spec("pandas") is None:
            self.skipTest("pandas is not installed")
        import pandas as pd

        a, x = self.a[0], self.x[0]
        series = pd.Series(np.arange(1.0, 10))
        for column in (series, series.astype("Int64"), pd.Index(np.arange(1.0, 10))):
            host = np.asarray(column, "f8")
            for call in (operator.add, operator.sub, operator.truediv, operator.floordiv,
                         operator.mod, operator.eq, operator.lt, np.add, np.maximum):
                self.check(call(column, x), call(host, a))
                self.check(call(x, column), call(a, host))
            for mine, want in zip(divmod(column, x), divmod(host, a)):
                self.check(mine, want)
        truth = series > 4
        self.check(truth & (x > 0), truth.values & (a > 0), 0)
        self.check(x @ series, a @ series.values)
        self.check(x[truth], a[truth], 0)
        self.check(self.x[:, truth], self.a[:, truth], 0)
        self.check(x[series.astype(int) - 1], a[series.astype(int) - 1], 0)
        self.assertRaises(ts.BadIndex, lambda: x[series])
        refused = [lambda: series @ self.x.T, lambda: pd.isna(x)]
        if tuple(map(int, pd.__version__.split(".")[:2])) < (2, 1):
            refused.append(lambda: series.to_frame() + x[:, None])
        for call in refused:
            self.assertRaisesRegex(TypeError, "left operand, or use .values", call)

    # --- masks

    def test_masks(self):
        a, x = self.a, self.x
        with self.calls() as calls:
            some = x[(x * 2 > 1) & (x < 1)]
        self.assertEqual(calls, ["Execute"])
        self.assertIsInstance(some, ts.Array)
        self.check(some, a[(a * 2 > 1) & (a < 1)], 0)
        self.check((some + 1).sum(), (a[(a * 2 > 1) & (a < 1)] + 1).sum())
        mask = self.t.put(a > 0)
        with self.calls() as calls:
            self.check(x[mask], a[a > 0], 0)
        self.assertEqual(calls[:1], ["Select"])
        row, column = a[0] > 0, a[:, 0] > 0
        for mine, host in (((a > 0).tolist(), a > 0), (column.tolist(), column),
                           (x[:, 0] > 99, a[:, 0] > 99), (np.s_[:, x[0] > 0], np.s_[:, row]),
                           (np.s_[::2, row], np.s_[::2, row]),
                           (np.s_[x[:, 0] > 0, ::3], np.s_[column, ::3]),
                           (np.s_[3, x[0] > 0], np.s_[3, row])):
            self.check(x[mine], a[host], 0)
        b = RNG.standard_normal((4, 5, 6))
        for index in (True, np.False_, np.array(True), (np.True_, ...), (False, np.s_[:])):
            self.check(x[index], a[index], 0)
            self.check(x[0, 0][np.ravel(index)[0]], a[0, 0][np.ravel(index)[0]], 0)
        for number in (-9, 9):
            self.check(x[x[0, 0] > number], a[a[0, 0] > number], 0)
            self.check(x[0, 0][x[0, 0] > number], a[0, 0][a[0, 0] > number], 0)
        y = self.t.put(b)
        self.check(y.T[y.T > 0], b.T[b.T > 0], 0)
        for mine, host in ((y > 0, b > 0), (y[..., 0] > 0, b[..., 0] > 0),
                           (b[:, 0, 0] > 0, b[:, 0, 0] > 0)):
            for rest in ((...,), (np.s_[:],) * (3 - mine.ndim)):
                self.check(y[(mine, *rest)], b[(host, *rest)], 0)
        two, one = y[:, 0] > 0, x[:, 0] > 0
        for key in (x.T > 0, a.T > 0, [True], np.s_[:, one]):
            self.assertRaises(IndexError, lambda: x[key])
        for key in (np.s_[two, :, :], np.s_[two, 1], np.s_[:, two], np.s_[..., y > 0, :],
                    np.s_[y > 0, :], np.s_[None, [[True]]]):
            self.assertRaises(IndexError, lambda: y[key])
        last = y[0] > 0
        for key in (np.s_[y[..., 0] > 0, 1], np.s_[:, last], np.s_[..., last], np.s_[..., y > 0],
                    np.s_[b[..., 0] > 0, 1], np.s_[:, b[0] > 0], np.s_[y[..., 0] > 0, None],
                    np.s_[0, last]):
            self.assertRaises(ts.Unsupported, lambda: y[key])

    def test_masks_of_this_process_that_select_too_much(self):
        a = np.arange(200_000, dtype="f4")
        x = self.t.put(a)
        for attempt in (lambda: x[a >= 0], lambda: x.compress(a >= 0)):
            with self.assertRaisesRegex(ts.Unsupported, "200000 elements.*put.. the mask first"):
                attempt()
        self.check(x[self.t.put(a >= 0)], a, 0)

    def test_masks_of_other_connections(self):
        x = self.x
        with ts.connect(self.server.address) as other:
            mask = other.put(self.a > 0)
            other.keep = None  # Nothing is to be computed.
            for attempt in (lambda: x[mask], lambda: x[mask[:, 0]], lambda: x[:, mask[0]],
                            lambda: np.compress(mask[:, 0], x, 0), lambda: np.extract(mask, x)):
                with self.assertRaisesRegex(ts.Unsupported, "two connections"):
                    attempt()

    def test_positions_of_nonzero_elements(self):
        b = RNG.integers(-1, 2, (4, 5, 6)).astype("f4")
        for a in (b, b[0, 0], b > 0, b[:0], b * 0):
            x = self.t.put(a)
            for mine, want in zip(np.nonzero(x), np.nonzero(a)):
                self.check(mine, want, 0)
            self.assertEqual(len(x.nonzero()), a.ndim)
            for mine, want in zip(np.where(x), np.where(a)):
                self.check(mine, want, 0)
            self.check(np.flatnonzero(x), np.flatnonzero(a), 0)
            self.check(np.argwhere(x), np.argwhere(a), 0)
            self.check(np.extract(x, x), np.extract(a, a), 0)
            self.check(np.extract(a, x), np.extract(a, a), 0)
        a, x = self.a, self.x
        for condition in (a[0] > 0, [True, False, True], a[0]):
            for mine in (condition, self.t.put(np.asarray(condition))):
                self.check(np.compress(mine, x, 1), np.compress(condition, a, 1), 0)
                self.check(x.compress(mine), a.compress(condition), 0)
                self.check(np.extract(mine, x), np.extract(condition, a), 0)
        self.assertRaises(ValueError, lambda: x.compress(x > 0))
        for number in (0, 7):
            self.check(np.argwhere(x[0, 0] * 0 + number), np.argwhere(number), 0)
        for call in (np.nonzero, np.where):
            self.assertRaisesRegex(ValueError, "flatnonzero", call, x[0, 0])
        self.assertRaises(IndexError, lambda: np.compress([False] * 9 + [True], x, 1))

    # --- bins, and positions in sorted arrays

    def typed(self, n, dtype):
        """Returns random elements with ties and, if the type has them, NaN and infinities."""
        dtype = np.dtype(dtype)
        if dtype.kind == "b":
            return RNG.random(n) < 0.5
        low = 0 if dtype.kind == "u" else -9
        a = RNG.integers(low, 10, n).astype(dtype)
        if dtype.kind == "f":
            a = (a + RNG.random(n).round(1)).astype(dtype)
            a[RNG.random(n) < 0.05] = np.nan
            a[RNG.random(n) < 0.05] = np.inf
            a[RNG.random(n) < 0.05] = -np.inf
        return a

    TYPES = ("f4", "f8", "f2", "i4", "i8", "u1", "i1", "?")

    def test_histograms(self):
        for dtype, n in itertools.product(self.TYPES, (0, 1, 50, 3000)):
            a = self.typed(n, dtype)
            x = self.t.put(a)
            numbers = a.astype("u1") if dtype == "?" else a
            finite = numbers[np.isfinite(numbers)]
            for bins, options in (
                (7, {"range": (-3, 3)}), (10, {"range": (0.1, 0.7)}), (100, {"range": (-9, 9)}),
                ([-2, 0, 0, 1, 3], {}), ([0.5, 1, 2.5], {}), (np.arange(-9, 10), {}),
                (np.linspace(-5, 5, 30), {}), ([3], {}), ([-np.inf, 0, np.inf], {}),
                (4, {"range": (2, 2)}), (5, {"range": (0, 1), "density": n > 0}),
            ):
                if dtype == "f2" and np.ndim(bins) == 0 and bins == 100:
                    continue  # NumPy's estimate of the bin has too few bits.
                with self.subTest(dtype=dtype, n=n, bins=bins, **options):
                    with np.errstate(all="ignore"):
                        want, edges = np.histogram(numbers, bins, **options)
                    counts, mine = np.histogram(x, bins, **options)
                    np.testing.assert_array_equal(mine, edges)
                    self.assertEqual(mine.dtype, edges.dtype)
                    self.check(counts, want, 0 if want.dtype.kind == "i" else 1e-5)
            with self.subTest(dtype=dtype, n=n):
                counts, mine = np.histogram(self.t.put(finite), 6)
                want, edges = np.histogram(finite, 6)
                np.testing.assert_array_equal(mine, edges)
                self.check(counts, want, 0)
        wide = self.t.put(np.array([-1.7e308, 1.7e308]))
        with np.errstate(all="ignore"):
            self.assertRaises(ValueError, np.histogram, wide, 10)
            self.assertRaises(ValueError, np.histogram, wide, 10, (-1.7e308, 1.7e308))
        self.assertRaises(ValueError, np.histogram, wide, [0, 1, np.nan])
        a = RNG.standard_normal((60, 70)).astype("f4")
        x = self.t.put(a)
        for bins in (1, 3, 1000, 4096):
            counts, edges = np.histogram(x.T[::-1], bins)
            self.check(counts, np.histogram(a, bins)[0], 0)
            np.testing.assert_array_equal(edges, np.histogram_bin_edges(a, bins))
        self.assertIn("even=(4, -1.0, 1.0)", np.histogram(x, 4, (-1, 1))[0].explain())
        edges = np.sort(a[0])
        counts, same = np.histogram(x, self.t.put(edges))
        self.check(counts, np.histogram(a, edges)[0], 0)
        self.check(same, edges, 0)
        self.assertRaises(ValueError, np.histogram, self.t.put([1.0, np.nan]))

    def test_counts_of_integers(self):
        for dtype in ("i4", "i8", "u1", "i1", "?"):
            for n in (0, 1, 1000):
                a = abs(self.typed(n, dtype)) if dtype != "?" else self.typed(n, dtype)
                for least in (0, 3, 50):
                    with self.subTest(dtype=dtype, n=n, least=least):
                        self.check(np.bincount(self.t.put(a), minlength=least),
                                   np.bincount(a, minlength=least), 0)
        x = self.t.put(np.array([1, -1]))
        self.assertRaises(ValueError, np.bincount, x)
        self.assertRaises(ValueError, np.bincount, x[None])
        self.assertRaises(ValueError, np.bincount, x, minlength=-1)
        self.assertRaises(TypeError, np.bincount, x * 0.5)
        self.assertRaises(ValueError, np.bincount, x * x, [1])
        self.check(np.bincount(x * x, [1, 2]), np.array([0.0, 3]), 0)

    def test_sums_by_label(self):
        for dtype, n in itertools.product(self.TYPES, (0, 1, 9, 3000)):
            rows = self.typed(2 * n, dtype).reshape(n, 2)
            x, labels = self.t.put(rows), RNG.integers(-7, 7, n)
            here = self.t.put(labels.astype("i1"))
            for mode, at, length in (("raise", labels, 7), ("wrap", labels % 5, 5),
                                     ("clip", np.clip(labels, 0, 3), 4)):
                with self.subTest(dtype=dtype, n=n, mode=mode):
                    want = np.zeros((length, 2), "f8" if rows.dtype.kind == "f" else "i8")
                    with np.errstate(invalid="ignore"):
                        np.add.at(want, at, rows)
                    want = want.astype(dtype) if rows.dtype.kind == "f" else want
                    tolerance = max(np.finfo(dtype).eps, 1e-13) if want.dtype.kind == "f" else 0
                    for given in (labels, here):
                        self.check(ts.sum_by_label(x, given, length, mode), want, tolerance)
        # The same program computes labels, and rows are views or single numbers.
        a = np.arange(12.0).reshape(3, 4)
        x = self.t.put(a)
        by_column = ts.sum_by_label(x.T[::-1], (x[0] > 1) * 1, 2)
        self.check(by_column, [a.T[2:].sum(0), a.T[:2].sum(0)], 0)
        self.check(ts.sum_by_label(x[1], x[0].astype("i4"), 6), [4, 5, 6, 7, 0, 0], 0)
        weights = RNG.random(5000)
        places = RNG.integers(0, 2000, 5000)
        self.check(np.bincount(self.t.put(places), weights), np.bincount(places, weights), 1e-14)
        for error, call in (
                (ts.BadShape, lambda: ts.sum_by_label(x, [0, 1], 2)),
                (ts.BadShape, lambda: ts.sum_by_label(x, [[0, 1, 0]], 2)),
                (ts.BadShape, lambda: ts.sum_by_label(x, [0, 1, 0], -1)),
                (ts.BadIndex, lambda: ts.sum_by_label(x, [0, 2, 0], 2)),
                (ts.BadIndex, lambda: ts.sum_by_label(x, [0, 0, 0], 0, "clip")),
                (ts.BadIndex, lambda: ts.sum_by_label(x, x[:, 0].astype("i4"), 2).numpy()),
                (ts.BadDtype, lambda: ts.sum_by_label(x, [0.5, 1, 0], 2)),
                (ValueError, lambda: ts.sum_by_label(x, [0, 1, 0], 2, "error")),
                (TypeError, lambda: ts.sum_by_label(a, [0, 1, 0], 2))):
            self.assertRaises(error, call)
        for labels in ([True] * 3, x[:, 0] > 1, [0.5, 1, 0], [0, 7, 0]):
            self.assertRaisesRegex(ts.Error, "^labels? (cannot|must|7)",
                                   ts.sum_by_label, x, labels, 3)

    def test_positions_in_sorted_arrays(self):
        for dtype, n in itertools.product(self.TYPES, (0, 1, 40, 3000)):
            sorted_ = np.sort(self.typed(n, dtype))
            keys = self.typed(77, dtype)
            x, v = self.t.put(sorted_), self.t.put(keys)
            for side in ("left", "right"):
                with self.subTest(dtype=dtype, n=n, side=side):
                    want = np.searchsorted(sorted_, keys, side)
                    self.check(np.searchsorted(x, v, side), want, 0)
                    self.check(np.searchsorted(x, keys, side), want, 0)
                    self.check(np.searchsorted(sorted_, v, side), want, 0)
        a = np.arange(0, 30, 3)
        x = self.t.put(a)
        for v in (4, 4.5, [[1, 2], [100, -100]], np.float32(3), self.t.put([2.5, 3])):
            host = v.numpy() if isinstance(v, ts.Array) else v
            self.check(np.searchsorted(x, v), np.searchsorted(a, host), 0)
        for one in (np.int8(1), np.array(1, "i1"), np.bool_(True), 1, 1.5):
            self.check(np.searchsorted(self.t.put(np.arange(3, dtype="i4")), one),
                       np.searchsorted(np.arange(3, dtype="i4"), one), 0)
        mixed = RNG.permutation(a)
        self.check(np.searchsorted(self.t.put(mixed), [4, 9], sorter=np.argsort(mixed)),
                   np.searchsorted(mixed, [4, 9], sorter=np.argsort(mixed)), 0)
        m = self.t.put(mixed)
        self.check(np.searchsorted(m, 7, "right", np.argsort(m)), 3, 0)
        self.assertRaises(ValueError, np.searchsorted, x, 1, "left", [0])
        self.assertRaises(ts.Unsupported, np.searchsorted, m, 7, "left", mixed > 9)
        for bins in (a, a[::-1], a * 0, a[:1], a[:0], [1, 9, np.nan], [np.nan, 9, 1]):
            bins = np.asarray(bins)
            for right in (False, True):
                want = np.digitize(mixed - 1, bins, right)
                self.check(np.digitize(m - 1, bins, right), want, 0)
                self.check(np.digitize(m - 1, self.t.put(bins), right), want, 0)
        self.assertRaises(ValueError, np.digitize, x, self.t.put([1, 3, 2]))

    def test_unique(self):
        for dtype, shape in itertools.product(self.TYPES, ((0,), (1,), (50,), (40, 70))):
            a = self.typed(int(np.prod(shape)), dtype).reshape(shape)
            x = self.t.put(a)
            with self.subTest(dtype=dtype, shape=shape):
                with self.calls() as calls:
                    found = np.unique(x, True, True, True)
                self.assertEqual(calls, ["Execute"])
                for mine, want in zip(found, np.unique(a, True, True, True)):
                    self.check(mine, want, 0)
                self.check(np.unique(x), np.unique(a), 0)
                for mine, want in zip(np.unique(x, return_counts=True, equal_nan=False),
                                      np.unique(a, return_counts=True, equal_nan=False)):
                    self.check(mine, want, 0)
        a = np.array([2.0, np.nan, 1, np.nan, 2])
        x = self.t.put(a)
        values, inverse = np.unique(x, return_inverse=True, equal_nan=False)
        self.check(values, [1, 2, np.nan, np.nan], 0)
        self.check(inverse, [1, 2, 0, 3, 1], 0)
        self.check(np.unique(x > 1), [False, True], 0)
        self.check(np.unique(x, axis=0), np.unique(a, axis=0), 0)
        if not hasattr(np, "unique_all"):  # NumPy 1.
            return
        for name in ("unique_all", "unique_counts", "unique_inverse"):
            mine, want = getattr(np, name)(x), getattr(np, name)(a)
            self.assertEqual(mine._fields, want._fields)
            for one, other in zip(mine, want):
                self.check(one, other, 0)
        self.check(np.unique_values(x[:1]), [2], 0)

    # --- topk, which NumPy lacks

    def largest(self, a, k, axis=-1, largest=True):
        """Returns (values, indices) of numbers by a stable sort."""
        order = np.argsort(-a.astype("f8") if largest else a, axis, kind="stable")
        indices = np.take(order, np.arange(k), axis)
        return np.take_along_axis(a, indices, axis), indices

    def test_topk(self):
        for dtype in ("f4", "f8", "f2", "i4", "i8", "u1", "i1"):
            a = RNG.integers(0, 9, (7, 5, 11)).astype(dtype)
            x = self.t.put(a)
            for k, axis, largest in ((3, -1, True), (11, 2, False), (2, 0, True), (5, -2, False)):
                with self.subTest(dtype=dtype, k=k, axis=axis, largest=largest):
                    values, indices = self.largest(a, k, axis, largest)
                    for got in (ts.topk(x, k, axis, largest), x.topk(k, axis, largest)):
                        self.check(got[0], values, 0)
                        self.check(got[1], indices, 0)
                        self.assertEqual((got[0].dtype, got[1].dtype), (a.dtype, np.int64))
        special = np.array([1, np.nan, -np.inf, np.inf, np.nan, 0.0, -0.0], "f4")
        x = self.t.put(special)
        self.check(x.topk(7)[1], [1, 4, 3, 0, 5, 6, 2], 0)
        self.check(x.topk(7, largest=False)[1], np.argsort(special, kind="stable"), 0)
        self.check(x.topk(7, largest=False)[0], np.sort(special), 0)
        truth = (x > 0).topk(3)
        self.check(truth[0], [True, True, False], 0)
        self.check(truth[1], [0, 3, 1], 0)

    def test_the_results_of_a_topk_are_one_step(self):
        a, x = self.a, self.x
        values, indices = ts.topk(x, 3)
        expected = self.largest(a, 3)
        with self.calls() as calls:
            for got, want in zip(self.t.compute(values, indices), expected):
                np.testing.assert_array_equal(got, want)
            self.assertEqual(calls, ["TopK"])
            self.assertEqual([s.operation for s in values.stats], ["top_k"])
            calls.clear()
            # Results that are not requested stay on the server.
            np.testing.assert_array_equal(indices.numpy(), expected[1])
            together = (values * 2 + indices).sum(axis=1)
            np.testing.assert_allclose(
                together.numpy(), (expected[0] * 2 + expected[1]).sum(axis=1), rtol=1e-6
            )
            self.assertEqual(calls, ["Execute", "Execute"])
        self.assertEqual([s.operation for s in together.stats], ["top_k", "reduce"])
        self.assertIn("one Execute of 2 steps", together.explain())
        self.assertIn("step 0 indices", together.explain())
        scores = x @ x.T
        wanted = *self.largest(a @ a.T, 4, largest=False), a @ a.T
        found = self.t.compute(*scores.topk(4, largest=False), scores)
        for got, want in zip(found, wanted):
            np.testing.assert_allclose(got, want, rtol=1e-5)
        self.check(values[::2, 1] + indices.T[0, ::2], expected[0][::2, 1] + expected[1][::2, 0])

    def test_topk_keeps_its_results(self):
        values, indices = self.x.topk(2, axis=0)
        expected = self.largest(self.a, 2, 0)
        for terms in ((values, indices), (indices, values), (indices,), (indices, indices.T)):
            with self.calls() as calls:
                kept = self.t.keep(*terms)
            both = any(term is values for term in terms)
            self.assertEqual(calls, ["TopK" if both else "Execute"])
            for term, array in zip(terms, kept):
                self.assertIsInstance(array, ts.Array)
                want = expected[0] if term is values else expected[1]
                self.check(array, want if term.shape == want.shape else want.T, 0)
        self.check(indices.save("largest/indices", replace=True), expected[1], 0)
        self.check(values.save("largest/values", replace=True), expected[0], 0)

    def test_errors_of_topk(self):
        x, long = self.x, self.t.put(np.zeros(5000, "f4"))
        for error, attempt in (
            (ts.BadK, lambda: x.topk(0)), (ts.BadK, lambda: x.topk(10)),
            (ts.BadK, lambda: x.topk(-1)), (ts.BadK, lambda: long.topk(4097)),
            (TypeError, lambda: x.topk(1.5)), (TypeError, lambda: x.topk(1, axis=None)),
            (ValueError, lambda: x.topk(1, axis=2)), (ValueError, lambda: x.sum().topk(1)),
        ):
            self.assertRaises(error, attempt)

    # --- programs

    def test_an_expression_is_one_call_and_its_parts_are_shared(self):
        gram = self.x @ self.x.T
        again = self.x @ self.x.T
        e = (gram + again).sum(axis=1)
        self.assertIn("one Execute of 2 steps", e.explain())
        with self.calls() as calls:
            e.numpy()
            self.assertEqual(calls, ["Execute"])
            self.assertEqual([s.operation for s in e.stats], ["matmul", "reduce"])
            calls.clear()
            first, second = self.t.compute(gram.sum(), (gram + 1).max(axis=0))
            self.assertEqual(calls, ["Execute"])
            calls.clear()
            float(self.x[0].dot(self.x[1]))
            self.assertEqual(calls, ["Dot"])
        np.testing.assert_allclose(first, (self.a @ self.a.T).sum(), rtol=1e-4)
        np.testing.assert_allclose(second, (self.a @ self.a.T + 1).max(axis=0), rtol=1e-4)

    def test_a_chain_of_a_thousand_steps(self):
        e = self.x
        for i in range(500):
            e = (e.T if i % 9 == 0 else e) + 1
        a = self.a if (500 + 8) // 9 % 2 == 0 else self.a.T
        self.check(e, a + 500, 1e-3)
        v, want = self.x[0], self.a[0].astype("f8")
        for _ in range(300):
            v, want = v - v.mean() / 2, want - want.mean() / 2
        self.check(v, want, 1e-3)

    def test_results_too_large_for_an_answer_go_through_buffers(self):
        a = RNG.permutation(1_200_000).reshape(600, 2000).astype("f4")
        x = self.t.put(a)
        unnamed = lambda: {array.name for array in self.t.list("unnamed/")}  # noqa: E731
        before = unnamed()
        self.check(x + x, a + a)
        for got, want in zip(self.t.compute(*x.topk(1900)), self.largest(a, 1900)):
            np.testing.assert_array_equal(got, want)
        self.assertTrue(o.eventually(lambda: unnamed() <= before))

    def test_strategy_and_timing(self):
        name = "cpu_serial" if o.Program.device == "cpu" else "tree_sequential"
        e = self.x[0].dot(self.x[1]).with_(strategy=name, timing=True)
        e.numpy()
        self.assertEqual(e.stats[0].strategy, name)
        self.assertGreater(e.stats[0].kernel_us, 0)
        with self.assertRaises(ts.UnknownStrategy):
            e.with_(strategy="none").numpy()

    def test_save(self):
        a = self.a
        z = (self.x @ self.x.T).save("saved/z", replace=True)
        self.assertEqual(z.name, "saved/z")
        self.check(self.t["saved/z"], a @ a.T, 1e-4)
        with self.assertRaises(ts.BufferExists):
            (self.x + 1).save("saved/z")
        self.check((self.x + 1).T.save("saved/t"), (a + 1).T)
        self.check(self.x[::2].save("saved/view"), a[::2], 0)
        self.check(self.x.sum().save("saved/number"), a.sum(), 1e-4)
        self.check((self.x + 1).save(), a + 1)
        names = [array.name for array in self.t.list("saved/")]
        self.assertEqual(names, ["saved/number", "saved/t", "saved/view", "saved/z"])
        self.t.delete("saved/number")
        self.assertNotIn("saved/number", self.t)

    def test_numbers_come_with_all_that_their_answers_say(self):
        """The package reads only the number until more is needed."""
        a = np.array([3, -7, 5, 0])
        for dtype in ("f4", "f8", "f2", "i4", "i8"):
            x = self.t.put(a.astype(dtype))
            dot, total, first = x.dot(x), x.sum(), x.argmin()
            found = [float(dot), float(total), int(first), bool(x.all()), bool(x.any())]
            self.assertEqual(found, [83, 1, 1, False, True])
            for e, operation in ((dot, "dot"), (total, "reduce"), (first, "reduce")):
                (stats,) = e.stats
                self.assertEqual(stats.operation, operation)
                self.assertTrue(stats.strategy and stats.bytes >= x.nbytes and stats.total_us > 0)
                self.assertEqual(e.numpy().dtype, e.dtype)
            self.assertIsInstance(dot.save(), ts.Array)
            operand = x._source.operand
            answer = self.t.call("Dot", a=operand, b=operand)
            self.assertEqual(answer.value.real or answer.value.integer, 83)
            self.assertEqual(list(answer.stats.operand_versions), [x.version] * 2)
        special = self.t.put(np.array([np.nan, np.inf, -0.0]))
        np.testing.assert_array_equal(special.sum().numpy(), np.nan)
        np.testing.assert_array_equal(special[1:].sum().numpy(), np.inf)
        self.assertTrue(np.signbit(special[2:].max().numpy()))

    def test_keep(self):
        a, x = self.a, self.x
        with self.calls() as calls:
            y = x - x.mean(axis=0)
            kept = self.t.keep(y, y.T, y.std(axis=0), x.sum(), x[0].dot(x[1]), y, (x > 0).sum())
        self.assertEqual(calls, ["Execute"])
        b = a - a.mean(axis=0)
        wanted = (b, b.T, b.std(axis=0), a.sum(), a[0] @ a[1], b, (a > 0).sum())
        for array, want in zip(kept, wanted):
            self.assertIsInstance(array, ts.Array)
            self.check(array, want, 1e-4)
        self.assertEqual(kept[0].name, kept[5].name)

    # --- lifetimes

    def test_unnamed_buffers_go_with_the_last_reference(self):
        x = self.t.put(self.a)
        name, row = x.name, x[0]
        del x
        self.assertIn(name, self.t)
        self.check(row, self.a[0], 0)
        del row
        self.assertTrue(o.eventually(lambda: name not in self.t))

    def test_nothing_keeps_arrays_alive(self):
        """There are no reference cycles, so arrays are freed without the garbage collector."""

        def work():
            x = self.t.put(self.a)
            float((x * 2).sum())
            (x + 1).numpy()
            e = (x.T @ x).sum(axis=0)
            self.t.compute(e, e + 1)
            kept = self.t.keep(e)[0]
            kept.save("kept", replace=True).delete()
            for attempt in (lambda: kept.with_(strategy="none"), lambda: self.t["none"],
                            lambda: (x @ x.T).with_("none").numpy(),
                            lambda: ((x[:0] + 1).max() + x).numpy()):
                try:
                    attempt()
                except ts.Error:
                    pass
            large = self.t.put(np.zeros(1 << 20))
            (large + 1).numpy()
            return [x.name, kept.name, large.name]

        gc.collect()
        gc.disable()
        try:
            names = work()
            for name in names:
                self.assertTrue(o.eventually(lambda name=name: name not in self.t), name)
        finally:
            gc.enable()

    def test_a_scope_takes_its_names_along(self):
        with self.t.scope(ttl="1h") as s:
            x = s.put(self.a, "scope/x")
            s.save(x + x, "scope/y")
            self.assertEqual(len(self.t.list("scope/")), 2)
            self.assertTrue(self.t["scope/x"]._source.buffer.HasField("expire_time"))
            self.t["scope/y"].delete()
        self.assertEqual(self.t.list("scope/"), [])

    # --- representation and refusals

    def test_repr_html_and_pickle(self):
        array = self.t.put(self.a, "look/x", replace=True)
        self.assertIn("look/x", repr(array))
        self.assertIn("12 x 9", array._repr_html_())
        self.assertIn("<svg", (array + 1)._repr_html_())
        for refused in (self.t.put(self.a), self.t, array + 1):
            self.assertRaisesRegex(TypeError, "pickle", pickle.dumps, refused)
        part = array[2:7:2].T
        again, whole = pickle.loads(pickle.dumps([part, array]))
        self.assertEqual((whole.name, whole.version), (array.name, array.version))
        np.testing.assert_array_equal(again.numpy(), self.a[2:7:2].T)
        sent = pickle.dumps(part)
        self.assertNotIn(b"token", sent)
        there = f"import pickle; print(pickle.loads({sent!r}).sum().item())"
        path = {**os.environ, "PYTHONPATH": str(python_outsider.PACKAGE)}
        call = [sys.executable, "-c", there]
        done = subprocess.run(call, env=path, capture_output=True, text=True)
        self.assertAlmostEqual(float(done.stdout), float(part.sum()), 4, done.stderr)
        self.t.put(self.a, "look/x", replace=True)
        self.assertRaises(ts.VersionMismatch, pickle.loads, sent)
        self.t.delete("look/x")
        self.assertRaises(ts.BufferNotFound, pickle.loads, sent)
        array = self.t.put(self.a)
        for pair in (array, [array[0], array[1]]):
            self.assertRaisesRegex(TypeError, r"\.numpy\(\)", np.asarray, pair)

    def test_what_numpys_arrays_have_besides(self):
        x = self.x
        for array in (x, x + 1):
            refused = []
            for name in (*dir(np.ndarray), "nothing"):
                try:
                    getattr(array, name)
                except AttributeError as error:
                    self.assertFalse(hasattr(array, name))
                    if name.startswith("_") or name == "nothing":
                        self.assertNotIsInstance(error, ts.Unsupported)
                        continue
                    self.assertIsInstance(error, ts.NoAttribute)
                    self.assertRegex(str(error), r"\.numpy\(\)|save\(\)")
                    refused.append(name)
            self.assertLessEqual({"sort", "tolist", "byteswap", "fill", "strides"}, {*refused})
        self.assertRaises(TypeError, hash, x)
        for why, call in (("np.sort", lambda: x.sort()), ("immutable", lambda: x.fill(1)),
                          ("save", lambda: (x + 1).name)):
            self.assertRaisesRegex(ts.NoAttribute, why, call)


class ComposedTest(python_outsider.Case):
    def settle(self, cases):
        """Compares in one call (what it is, NumPy's result, the client's result)."""
        for (what, want, _), got in zip(cases, self.t.compute(*(mine for _, _, mine in cases))):
            with self.subTest(what):
                self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape))
                np.testing.assert_allclose(got, want, 1e-12, 1e-12)

    def test_errors(self):
        """Errors are of the kind that NumPy raises."""
        windows = np.lib.stride_tricks.sliding_window_view
        calls = [
            *(lambda x, v, text=text: np.einsum(text, x, v) for text in (
                "ij", "i,j", "ij,j->ii", "ij,j->k", "i.j,j", "...,j->j", "ij...,j.",
                "ij,jk", "i1,j", "......,i", "ij,i")),
            lambda x, v: np.einsum(x, [0, -1]), lambda x, v: np.einsum(v, [0], [52]),
            lambda x, v: np.einsum("ii", x), lambda x, v: np.select([x > 0], [x, x]),
            lambda x, v: np.select([x], [x]), lambda x, v: np.meshgrid(v, v, indexing="yx"),
            lambda x, v: np.vsplit(v, 3), lambda x, v: np.dsplit(x, 1),
            lambda x, v: np.hsplit(x, 2), lambda x, v: np.hsplit(v[0], 1),
            lambda x, v: np.array_split(x, 0),
            lambda x, v: np.rollaxis(x, 2), lambda x, v: np.rollaxis(x, 0, 3),
            lambda x, v: np.diag(x[None]), lambda x, v: np.concatenate([x, v]),
            lambda x, v: np.concatenate([x, x[:2]], 1), lambda x, v: np.concatenate([v[0], v[0]]),
            lambda x, v: np.stack([x, v]), lambda x, v: np.concatenate([x, x], 2),
            lambda x, v: np.append(x, v, 0), lambda x, v: np.concatenate([x, x], dtype="i4"),
            lambda x, v: np.concatenate([x, x > 0], casting="no"),
            lambda x, v: np.concatenate([v > 0, v], None, dtype="f8", casting="equiv"),
            lambda x, v: np.stack([v, v.astype("f4")], casting="no"),
            lambda x, v: np.vstack([v, v], casting="foo"),
            lambda x, v: np.pad(x, -1), lambda x, v: np.pad(x[:0], 1, "wrap"),
            *(lambda x, v, mode=mode, key=key: np.pad(x, 1, mode, **{key: 2})
              for mode in ("constant", "edge", "empty", "linear_ramp", "maximum", "mean", "median",
                           "minimum", "reflect", "symmetric", "wrap", "no mode")
              for key, own in (("constant_values", "constant"), ("end_values", "linear_ramp"),
                               ("reflect_type", "reflect symmetric"),
                               ("stat_length", "maximum mean median minimum"))
              if mode not in own.split()),
            lambda x, v: np.tril(v[0]), lambda x, v: np.convolve(x, v),
            lambda x, v: np.convolve(v, v[:0]), lambda x, v: np.correlate(v, v, "half"),
            lambda x, v: windows(x, 2), lambda x, v: windows(v, 9), lambda x, v: windows(v, -1),
            lambda x, v: windows(x, 2, 5), lambda x, v: np.cross(x, x),
            lambda x, v: np.cov(x[None]), lambda x, v: np.cov(x, ddof=1.5),
            lambda x, v: np.digitize(x, [1, 3, 2]), lambda x, v: np.digitize(x, 3),
            lambda x, v: np.histogram(x, [1, 0]), lambda x, v: np.histogram(x, 0, (0, 1)),
            lambda x, v: np.searchsorted(x, v), lambda x, v: np.kron(x),
            lambda x, v: np.diff(x, append=v), lambda x, v: np.tril(x, 1, 2),
            lambda x, v: np.partition(x, 5), lambda x, v: np.gradient(x, 1, 2, 3),
            lambda x, v: np.gradient(v[:1]), lambda x, v: np.gradient(x, [1, 2], axis=0),
            lambda x, v: np.interp(x, [1], [1, 2]), lambda x, v: np.interp(x, [], []),
            lambda x, v: np.block([x, [x]]), lambda x, v: np.resize(x, -1),
            lambda x, v: np.insert(v, [[1]], 2), lambda x, v: np.insert(v, [[1, 2]], 2),
            lambda x, v: np.histogram(x, weights=v), lambda x, v: v & 1, lambda x, v: v << 1,
            lambda x, v: np.bincount(np.argsort(v), [1]), lambda x, v: np.unravel_index(v, (2, 3)),
            lambda x, v: np.cov(x, fweights=[1, 2]), lambda x, v: np.cov(x, aweights=[-1] * 5),
        ]
        a = np.arange(20.0).reshape(4, 5)
        x = self.t.put(a)
        for number, call in enumerate(calls):
            with self.subTest(number):
                with self.assertRaises((TypeError, ValueError, RuntimeError)) as found:
                    call(a, a[0])
                kind = next(kind for kind in (TypeError, ValueError, RuntimeError)
                            if isinstance(found.exception, kind))
                self.assertRaises(kind, call, x, x[0])

    def test_random_subscripts(self):
        cases = []
        for seed in range(150):
            rng = np.random.default_rng(seed)
            extents = dict(zip("abcdE", rng.integers(0 if seed % 9 == 0 else 1, 4, 5)))
            terms, arrays = [], []
            for _ in range(rng.integers(1, 4)):
                letters = [*rng.choice([*"abcdE"], rng.integers(0, 4))]
                hidden = int(rng.integers(0, 3)) if seed % 3 == 0 else 0
                at = rng.integers(0, len(letters) + 1)
                shape = [extents[one] for one in letters]
                shape[at:at] = (2, 3)[2 - hidden :]
                letters.insert(at, "..." * (seed % 3 == 0))
                terms.append("".join(letters))
                arrays.append(rng.integers(-3, 4, shape).astype("f8" if seed % 2 else "i8"))
            used = sorted({one for term in terms for one in term.replace(".", "")})
            out = rng.permutation(used)[: rng.integers(0, len(used) + 1)]
            text = ",".join(terms)
            if seed % 4:
                text += " -> " + "..." * (seed % 3 == 0) + "".join(out)
            resident = [self.t.put(array) for array in arrays]
            cases.append((f"{text} {[array.shape for array in arrays]}",
                          np.asarray(np.einsum(text, *arrays)), np.einsum(text, *resident)))
        self.settle(cases)

    def test_random_shapes(self):
        cases = []
        for seed in range(30):
            rng = np.random.default_rng(seed)
            shape, axis = rng.integers(0 if seed % 5 == 0 else 1, 5, 3), int(rng.integers(-3, 3))
            arrays = []
            for _ in range(rng.integers(1, 20)):
                shape[axis] = rng.integers(0, 4)
                arrays.append(rng.choice([0.0, -0.0, np.nan, np.inf, 1, 2], shape))
            resident = [self.t.put(array) for array in arrays]
            a, v = (rng.choice([0.0, np.nan, np.inf, -np.inf, *range(9)], rng.integers(1, 9))
                    for _ in range(2))
            x, y = self.t.put(a), self.t.put(v)
            widths = rng.integers(0, 6, (3, 2))
            shifts = rng.integers(-9, 9, 3)
            for what, call in (
                ("concatenate", lambda arrays, a, v: np.concatenate(arrays, axis)),
                ("pad", lambda arrays, a, v: np.pad(arrays[0], widths, constant_values=np.nan)),
                ("roll", lambda arrays, a, v: np.roll(arrays[0], shifts, (0, 1, 2))),
                ("diag", lambda arrays, a, v: np.diag(a, shifts[0])),
                ("tril", lambda arrays, a, v: np.tril(arrays[0], shifts[1])),
                *((mode, lambda arrays, a, v, mode=mode: np.convolve(a, v, mode))
                  for mode in ("full", "same", "valid")),
                *((mode, lambda arrays, a, v, mode=mode: np.correlate(a, v, mode))
                  for mode in ("full", "same", "valid")),
            ):
                with np.errstate(all="ignore"):
                    want = call(arrays, a, v)
                cases.append((f"{what} {seed}", want, call(resident, x, y)))
        self.settle(cases)

    def test_functions(self):
        for dtype in ("f4", "f8", "f2", "i4", "i8", "u1", "i1", "?"):
            a = np.asarray(RNG.integers(0 if dtype in "u1?" else -3, 4, (12, 9)), dtype)
            b = np.asarray(RNG.integers(0, 3, (2, 4, 3)), dtype)
            special = a.copy()
            if dtype[0] == "f":
                special[::5, ::2] = [[np.nan], [np.inf], [-0.0]]
                special[1::5, 1::2] = [[-np.inf], [-0.0], [np.nan]]
            for cases, a in ((MOVING, a), (MOVING, special), (SUMMING, a)):
                arrays = a, a[0], b
                resident = self.t.put(a), self.t.put(a)[0], self.t.put(b)
                lazy, wanted = [], []
                for name, call in cases.items():
                    with self.subTest(name, dtype=dtype), np.errstate(all="ignore"):
                        try:
                            want = call(*arrays)
                        except (TypeError, ValueError):
                            self.assertRaises((TypeError, ValueError), call, *resident)
                            continue
                        got = call(*resident)
                        self.assertEqual(type(got) in (list, tuple), type(want) in (list, tuple))
                        several = type(got) in (list, tuple)
                        self.assertTrue(not several or len(got) == len(want))
                        for mine, theirs in zip(got, want) if several else [(got, want)]:
                            if isinstance(mine, np.ndarray):
                                np.testing.assert_array_equal(mine, theirs)
                                continue
                            lazy.append(mine)
                            wanted.append((name, np.asarray(theirs)))
                for (name, want), one, got in zip(wanted, lazy, self.t.compute(*lazy)):
                    with self.subTest(name, dtype=dtype):
                        self.assertEqual((one.dtype, one.shape), (want.dtype, want.shape))
                        self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape))
                        eps = 0 if cases is MOVING else {"f2": 4e-3, "f4": 1e-5}.get(dtype, 1e-12)
                        np.testing.assert_allclose(got, want, eps, eps)
                        if cases is MOVING and want.dtype.kind == "f":
                            np.testing.assert_array_equal(np.signbit(got)[want == 0],
                                                          np.signbit(want)[want == 0])


class ShardsTest(python_outsider.Case):
    """Arrays on several devices."""

    FLAGS = ("--no-warm-up",)

    @classmethod
    def setUpClass(cls):
        with mock.patch.object(o.Program, "device", "cpu:0,cpu:1,cpu:2"):
            super().setUpClass()

    def test_placement(self):
        a = np.arange(5000, dtype=np.float32)
        x = self.t.put(a, placement="all")
        self.assertEqual(x.devices, ("cpu:0", "cpu:1", "cpu:2"))
        self.assertEqual(x.device, "cpu:0")
        self.assertEqual(x[10:].devices, x.devices)
        card = x._repr_html_()
        self.assertEqual(re.findall("<text.*?>(.*?)</text>", card), [*x.devices])
        self.assertIn("cpu:0, cpu:1, cpu:2", card)
        # The shards have two units of 4 KiB, two units, and less than one unit.
        heights = [int(h) for h in re.findall('<rect.*?height="(.*?)"', card)]
        self.assertEqual(heights[0], heights[1])
        self.assertGreater(heights[1], heights[2])
        self.assertEqual(x[10:]._repr_html_().count("<rect"), 1)
        np.testing.assert_array_equal(x.numpy(), a)
        alone = self.t.put(a)
        self.assertEqual((x @ x).item(), (alone @ alone).item())
        moved = x.copy(placement=["cpu:2", "cpu:1"])
        self.assertEqual(moved.devices, ("cpu:2", "cpu:1"))
        self.assertEqual(x.copy().devices, x.devices)
        self.assertEqual(x.copy(device="cpu:1").devices, ("cpu:1",))
        np.testing.assert_array_equal((x + moved).numpy(), a + a)
        large = np.arange(300_000, dtype=np.float64)  # Uploaded in ranges.
        far = self.t.put(large, placement=["cpu:1", "cpu:0"])
        np.testing.assert_array_equal(far.numpy(), large)

    def test_results(self):
        a = (np.arange(60_000) % 7).astype(np.float32)
        x = self.t.put(a, placement="all")

        async def save():
            async with await ts.aio.connect(self.server.address) as t:
                x = await t.put(a, placement="all")
                await (x * 2).save("saved", placement="all")

        asyncio.run(save())
        named = (x * 2).save("named", placement=["cpu:2", "cpu:0", "cpu:1"])
        for made in ((x * 2).save(placement="all"), named, self.t["saved"]):
            self.assertEqual(sorted(made.devices), ["cpu:0", "cpu:1", "cpu:2"])
        np.testing.assert_array_equal(named.numpy(), a * 2)
        self.assertEqual(x.save(placement=["cpu:1", "cpu:0"]).devices, ("cpu:1", "cpu:0"))
        total = named.sum()
        self.assertEqual(total.item(), 2 * a.sum())
        self.assertEqual(total.stats[0].devices, 3)
        with self.assertRaises(ts.BadPlacement):
            self.t.put(a, device="cpu:0", placement="all")


if __name__ == "__main__":
    python_outsider.main("__main__")
