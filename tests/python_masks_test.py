#!/usr/bin/env python3
"""Tests arrays of bool, masks, and expressions as inputs of reductions and as epilogues of
products, all against NumPy."""

import functools
import itertools
import warnings

import numpy as np

import python_outsider
import tessera as ts

RNG = np.random.default_rng(20261125)
NUMBERS = ("f2", "f4", "f8", "i4", "i8")


def truth(*shape):
    return RNG.random(shape) < 0.5


class Case(python_outsider.Case):
    def check(self, expression, want, tolerance=0.0, text=""):
        """Checks that shape and type are known beforehand, and that the result equals NumPy's."""
        self.compare(expression, expression.numpy(), want, tolerance, text)

    def check_all(self, cases, tolerance=0.0):
        """Checks several cases (expression, want, text) in one call."""
        computed = self.t.compute(*(expression for expression, _, _ in cases))
        for (expression, want, text), got in zip(cases, computed):
            self.compare(expression, got, want, tolerance, text)

    def compare(self, expression, got, want, tolerance, text):
        want = np.asarray(want)
        self.assertEqual((expression.shape, expression.dtype), (want.shape, want.dtype), text)
        self.assertEqual((got.shape, got.dtype), (want.shape, want.dtype), text)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=text)


def ways(*axes):
    """Returns options for reductions along each of these axes."""
    return [{"axis": axis, "keepdims": keep} for axis in axes for keep in (False, True)]


class TruthTest(Case):
    def test_they_come_back(self):
        large = truth(3_000_001)
        for array in (truth(5, 7)[::-1, ::2], truth(5, 7).T, truth(0, 3), np.bool_(False),
                      [True, False], np.broadcast_to(True, (4, 5)), large):
            x = self.t.put(array)
            self.assertEqual((x.dtype, x.itemsize, x.nbytes), (bool, 1, np.size(array)))
            self.check(x, array)
        self.assertIn("dtype=bool", repr(x))
        self.assertIn("bool", x._repr_html_())
        for key in np.s_[::-1, 5:2_000_000:3, -1]:
            self.check(x[key], large[key])
        out = np.empty(large.shape, bool)
        self.assertIs(x.numpy(out=out), out)
        np.testing.assert_array_equal(out, large)

    def test_other_bytes_are_true(self):
        bytes_ = np.arange(3_000_000).astype(np.uint8)
        for size in (3, 3_000_000):
            truth = bytes_[:size].view(bool)
            for array in (truth, truth[::-1]):
                self.check(self.t.put(array), array.view("u1") != 0)
        self.check(self.t.put(np.ones(3)) + bytes_[254:257].view(bool), [2.0, 2, 1])

    def test_comparisons_and_logic_stay_on_the_server(self):
        a, b = RNG.integers(-3, 4, (2, 40, 30))
        x, y = self.t.put(a), self.t.put(b)
        m, n = self.t.keep(x > y, ~(x == 0) & (y < 2))
        p, q = a > b, ~(a == 0) & (b < 2)
        for mine, want in ((m, p), (n, q), (m | n.T.T, p | q), (m[::-1] >= n, p[::-1] >= q),
                           (np.logical_and(m, y), p & (b != 0)),
                           (m + 1, p + 1), (m * 2.5, p * 2.5), (m * y, p * b), (m / 2, p / 2),
                           (m & True, p), (np.where(m, x, y), np.where(p, a, b)),
                           (np.where(m, n, False), p & q), (np.where(x, m, n), np.where(a, p, q)),
                           (np.isnan(m.astype("f4")), np.zeros_like(p)), (m & q, p & q),
                           (abs(m), p), (m.T, p.T),
                           (m.reshape(-1), p.reshape(-1)), (m.T.reshape(-1), p.T.reshape(-1)),
                           (np.flip(m), np.flip(p)),
                           (np.repeat(m, 2, axis=0), np.repeat(p, 2, axis=0)),
                           (np.zeros_like(m), np.zeros_like(p)),
                           (np.full_like(m, True), np.ones_like(p)),
                           ):
            self.check(mine, want)
            self.check(mine.save(), want)
        for refused in (lambda: m - n, lambda: -m, lambda: np.positive(m)):
            self.assertRaises(TypeError, refused)

    def test_reductions(self):
        p = truth(300, 200)
        m = self.t.put(p)
        for name in "all any sum mean min max prod var std".split():
            call = getattr(np, name)
            self.check_all([(call(mine, **how), call(want, **how), f"{name} {how}")
                            for mine, want in ((m, p), (m[::-1], p[::-1]), (~m, ~p), (m.T, p.T))
                            for how in ways(None, 0, (0, 1))], 1e-12)
        kept = self.t.keep(m.all(axis=0), m.any(), m.sum(axis=1))
        for array, want in zip(kept, (p.all(axis=0), p.any(), p.sum(axis=1))):
            self.check(array, want)
        wide = truth(2, 1_200_000)  # Results that are too large for a response.
        self.check(self.t.put(wide).all(axis=0), wide.all(axis=0))

    def test_products(self):
        p, q = truth(5, 6), truth(6, 4)
        m, n = self.t.put(p), self.t.put(q)
        for call in (lambda m, n: m @ n, lambda m, n: m[0] @ n, lambda m, n: m[0] @ n[:, 0],
                     lambda m, n: m @ n.astype("f4")):
            self.check(call(m, n), call(p, q))


class MasksTest(Case):
    def test_masked_reductions(self):
        shape = (17, 23)
        for dtype in (*NUMBERS, "?"):
            a = (RNG.integers(-4, 5, shape) / (2 if dtype[0] == "f" else 1)).astype(dtype)
            p = truth(*shape)
            p[0] = p[:, 0] = True
            x, m = self.t.put(a), self.t.put(p)
            tolerance = {"f2": 4e-3, "f4": 2e-6}.get(dtype, 1e-12)
            for mask, want in ((m, p), (x > 0, a > 0), (p, p), (m[0], p[0]), (m[:, :1], p[:, :1]),
                               (True, True), (m[0].numpy().tolist(), p[0].tolist())):
                names = ("sum", "mean", "any", "all", "var", "std")
                self.check_all([
                    (getattr(x, name)(where=mask, **how),
                     self.quiet(getattr(np, name), a, where=want, **how), f"{name} {dtype} {how}")
                    for how in ways(None, 0, 1, (0, 1))
                    for name in (names if dtype != "?" or mask is m else names[:4])], tolerance)
                self.check(np.mean(x, 0, where=mask), self.quiet(np.mean, a, 0, where=want),
                           tolerance)
            for name in ("min", "max"):
                call = getattr(np, name)
                self.check(call(x, axis=0, initial=1, where=m), call(a, axis=0, initial=1, where=p))
                self.assertRaises(ValueError, call, x, where=m)
            if dtype != "?":
                self.check(np.sum(x, axis=1, initial=3, where=m),
                           np.sum(a, axis=1, initial=3, where=p), tolerance)
                self.check(np.var(x, axis=0, ddof=1, where=m),
                           self.quiet(np.var, a, axis=0, ddof=1, where=p), tolerance)
                self.check(np.add.reduce(x, axis=1, where=m, initial=1),
                           np.add.reduce(a.astype(np.sum(a).dtype), axis=1, where=p, initial=1),
                           tolerance)

    @staticmethod
    def quiet(call, *arguments, **options):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return call(*arguments, **options)

    def same(self, a, cases):
        """Checks cases (function, text) on the NumPy array and on the resident array. Both give the
        same result, or the same kind of error."""
        x, good = self.t.put(a), []
        for call, text in cases:
            try:
                want = np.asarray(self.quiet(call, a))
                # The client sums uint8 as i64.
                good.append((call(x), want.astype("i8") if want.dtype == "u8" else want, text))
            except (TypeError, ValueError, OverflowError) as error:
                kinds = OverflowError, ValueError, TypeError
                kind = next(kind for kind in kinds if isinstance(error, kind))
                with self.assertRaises(kind, msg=text):
                    call(x).numpy()
        self.check_all(good, 1e-3)

    @staticmethod
    def calls_of(names, hows, text):
        """Returns calls of the NumPy functions with these names, with each of these options."""
        return [(functools.partial(lambda call, how, x: call(x, **how), getattr(np, name), how),
                 f"{name} of {text} {how}") for name in names for how in hows]

    def test_reductions_of_no_elements(self):
        names = "sum prod min max argmin argmax mean var std all any ptp".split()
        for dtype, shape in itertools.product((*NUMBERS, "?", "u1"), ((0, 3), (3, 0), (0,))):
            mine = names if dtype != "?" else names[:-1]
            hows = ways(None, *range(len(shape)))
            self.same(np.zeros(shape, dtype), self.calls_of(mine, hows, f"{dtype} {shape}"))
        empty = self.t.put(np.zeros((0, 3), "f4"))
        self.check((empty.mean(axis=0) + 1).save(), np.full(3, np.nan, "f4"))
        self.assertTrue(np.isnan((empty * 2).std().item()))

    def test_reductions_that_begin_with_a_number(self):
        for dtype, shape in itertools.product(("f2", "f4", "i4", "?", "u1"), ((4, 3), (0, 3))):
            a = (np.arange(shape[0] * shape[1]) % 3 + 1).reshape(shape).astype(dtype)
            hows = [{"axis": axis, "initial": first} for axis in (None, 0, 1)
                    for first in (2.7, True, np.nan, np.inf, np.int64(3))]
            cases = self.calls_of(("sum", "prod", "min", "max"), hows, f"{dtype} {shape}")
            cases += [(functools.partial(lambda name, how, x: getattr(x, name)(**how), name, how),
                       f"x.{name} of {dtype} {shape} {how}")
                      for name in ("sum", "prod", "min", "max") for how in hows]
            cases += [(functools.partial(call.reduce, axis=0, initial=first),
                       f"{call} of {dtype} {shape} {first}")
                      for call in (np.logical_and, np.logical_or) for first in (True, False)]
            self.same(a, cases)
        x = self.t.put(np.ones(3))
        for wrong in ("1", [1], x, 1j):
            self.assertRaises((TypeError, ValueError), x.max, initial=wrong)

    def test_deviations_of_fewer_than_they_take(self):
        """The result for such deviations is infinite, or NaN if nothing deviates."""
        for dtype, n in itertools.product(NUMBERS, (0, 1, 2, 4)):
            a = np.arange(3 * n).reshape(n, 3).astype(dtype)
            a[:, 0] = 5
            mask = np.ones(a.shape, bool)
            mask[:1, 1:] = False
            hows = [{"axis": axis, "ddof": ddof + (0 if axis == 0 else max(a.size - n, 0)), **where}
                    for axis in (0, None) for where in ({}, {"where": mask})
                    for ddof in (0, 1, 2, 3, 4, 1.5)]
            self.same(a, self.calls_of(("var", "std"), hows, f"{dtype} {a.shape}"))
        a = np.array([[5, 5], [1, 7]])
        x = self.t.put(a)
        for name, correction in itertools.product(("var", "std"), (1, 1.5, 2, 3)):
            want = self.quiet(getattr(np, name), a, 1, ddof=correction, keepdims=True)
            self.check(getattr(x, name)(1, keepdims=True, correction=correction), want, 1e-12)
            self.check(getattr(x, name)(1, None, None, 0, True, correction=correction), want, 1e-12)
            for other in (0, correction):
                with self.assertRaisesRegex(ValueError, "simultaneously"):
                    getattr(x, name)(1, ddof=1, correction=other)

    def test_deviations_whose_squares_do_not_fit(self):
        for dtype, a in (("f2", [0, 600]), ("f4", [3e19, -3e19]), ("f8", [1e200, -1e200]),
                         ("f4", [1e-30, -1e-30]), ("f8", [1e-200, -1e-200])):
            a = np.array(a, dtype)
            x, half = self.t.put(a), np.abs(a[:1] / 2 - a[1:] / 2)[0]
            both = np.array([True, True])
            for how in ({}, {"where": both}, {"axis": 0}, {"axis": 0, "where": both}):
                with self.subTest(dtype=dtype, a=a[0], how=how):
                    self.check(x.std(**how), half, 1e-15)
                    self.check(np.nanstd(x, axis=how.get("axis")), half, 1e-15)
                    most = half.astype("f8") * 2**0.5
                    self.check(x.std(ddof=1, **how), most.astype(dtype),
                               3e-16 if dtype == "f8" else 0)
            self.check((x - x.mean()) / x.std(), np.sign(a - a.mean()).astype(dtype), 1e-6)

    def test_means_of_large_integers(self):
        """The sums of these integers exceed the range of the type, as sums of times in ns do."""
        a = 1795869453_000_000_000 + np.arange(12).reshape(3, 4) * 1_000_000
        self.same(a, self.calls_of(("mean",), [{"where": a > 0}, {"where": a > 0, "axis": 1},
                                               {"where": a % 7 > 2, "axis": 0}], "times"))
        a = np.full(4, 2**62)
        self.same(a, self.calls_of(("mean", "var", "std"), [{"where": [True, False, True, True]}],
                                   ""))
        self.check(self.t.put(np.arange(6.0).reshape(2, 3)).var(ddof=1), 3.5)

    def test_what_is_not_picked_does_not_count(self):
        a = np.array([[1, np.nan, 3], [np.inf, np.nan, -0.0]], "f4")
        x = self.t.put(a)
        self.check(np.mean(x, axis=1, where=np.isfinite(x)), np.array([2, 0], "f4"))
        self.check(x.sum(where=np.isfinite(x)), np.float32(4))
        self.check(np.mean(x, axis=0, where=np.isnan(x)),
                   self.quiet(np.mean, a, axis=0, where=np.isnan(a)))
        self.check(x.mean(where=x == 7), np.float32(np.nan))
        half = self.t.put(np.full(100_000, 1000, "f2"))
        self.check(half.mean(where=half > 0), np.float16(1000))  # Its sum is out of range.
        self.check(half.var(where=half > 0), np.float16(0))

    def test_masks_that_are_none(self):
        x = self.t.put(np.ones((3, 4)))
        for mask in (None, x, "yes", np.ones((3, 4))):
            self.assertRaisesRegex(TypeError, r"where.*astype\(bool\)", x.sum, where=mask)
        for mask in (0, 1, [1, 0, 1, 0]):
            self.check(x.sum(where=mask), np.ones((3, 4)).sum(where=mask))
            self.check(x.all(where=mask), np.bool_(True))
        for shape in ((4, 3), (2, 3, 4), (5,)):
            self.assertRaises(ts.BadShape, x.sum, where=np.ones(shape, bool))
        self.assertRaises(ts.Unsupported, np.add, x, 1, where=x > 0)

    def test_a_masked_mean_is_one_call(self):
        x = self.t.put(np.arange(12.0).reshape(3, 4))
        e = np.mean(x, axis=0, where=x > 3)
        with self.calls() as calls:
            self.assertEqual(e.numpy().tolist(), [6, 7, 8, 9])
        self.assertEqual(calls, ["Execute"])
        self.assertEqual([s.operation for s in e.stats], ["reduce", "reduce", "map"])


class FoldedTest(Case):
    """Reductions of expressions are one Reduce, with the bits of a Map and a Reduce."""

    def operations(self, e):
        with self.calls() as calls:
            got = e.numpy()
        return calls, [s.operation for s in e.stats], got

    def test_one_reduce(self):
        a, b, c = RNG.standard_normal((3, 60, 50)).astype("f4")
        x, y, w = self.t.put(a), self.t.put(b), self.t.put(c)
        for e, want in (
                (((x - y) ** 2).sum(), ((a - b).astype("f8") ** 2).sum()),
                ((x * w).sum(axis=1), (a * c).astype("f8").sum(axis=1)),
                (np.linalg.norm(x - y), np.linalg.norm((a - b).astype("f8"))),
                (abs(x).max(axis=0, keepdims=True), abs(a).max(axis=0, keepdims=True)),
                ((x > y).sum(axis=0), (a > b).sum(axis=0)),
                ((x > y).mean(), (a > b).mean()),
                ((x - y).argmin(axis=1), (a - b).argmin(axis=1)),
                ((x - y).argmin(), (a - b).argmin()),
                ((x > 9).any(), False),
                ((x - x[:, :1] * y[0]).var(axis=1), (a - a[:, :1] * b[0]).astype("f8").var(axis=1)),
                ((x.T[::-1] + y.T).sum(axis=0), (a.T[::-1] + b.T).astype("f8").sum(axis=0))):
            calls, operations, got = self.operations(e)
            self.assertEqual((calls, operations), (["Reduce"], ["reduce"]), e.explain())
            np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=e.explain())
        self.assertEqual(((x - y) ** 2).sum().explain().split("\n")[1],
                         f"0: reduce((a - b) * (a - b), a: {x.name}, b: {y.name}, op=sum)"
                         " -> f32 number")

    def test_the_bits_of_map_and_reduce(self):
        shapes = (100_003,), (257, 391), (1, 70_001), (5, 4, 3, 2), (40_001, 2)
        names = "sum prod min max mean var argmax all any".split()
        for dtype, shape in itertools.product(NUMBERS, shapes):
            a = RNG.integers(-50, 50, shape).astype(dtype) / (7 if dtype[0] == "f" else 1)
            x, y = self.t.put(a.astype(dtype)), self.t.put(a.astype(dtype)[..., :1])
            made = (x * 3 - y) * x
            folded = [[getattr(source, name)(axis) for name in names for axis in (None, 0, -1)]
                      for source in (made, made.save())]
            for e, one, two in zip(folded[1], *(self.t.compute(*es) for es in folded)):
                self.assertEqual((one.dtype, one.shape), (two.dtype, two.shape))
                self.assertEqual(one.tobytes(), two.tobytes(), f"{dtype} {shape} {e.explain()}")

    def test_what_else_is_wanted_is_there(self):
        a = RNG.standard_normal((30, 20))
        x = self.t.put(a)
        y = x * 2 + 1
        got = self.t.compute(y, y.sum(axis=0), (y - y.mean()).std(), y.T.sum(axis=0), y[::2].max())
        b = a * 2 + 1
        for mine, want in zip(got, (b, b.sum(axis=0), b.std(), b.T.sum(axis=0), b[::2].max())):
            np.testing.assert_allclose(mine, want, rtol=1e-12)

    def test_strategies_and_timing(self):
        x = self.t.put(np.ones(100_000, "f4"))
        e = (x * x).sum().with_(strategy="fixed_tree", timing=True)
        self.assertEqual(float(e), 100_000)
        self.assertEqual((e.stats[0].strategy, len(e.stats)), ("fixed_tree", 1))
        self.assertGreater(e.stats[0].kernel_us, 0)
        with self.assertRaises(ts.UnknownStrategy):
            (x * x).sum().with_(strategy="fused").numpy()

    def test_long_expressions_are_cut(self):
        a = RNG.standard_normal((12, 500))
        total, want = self.t.put(a[0]), a[0]
        for i, row in enumerate(a[1:], 1):
            total, want = total * 0.5 + self.t.put(row) * i, want * 0.5 + row * i
        self.check(total.sum(), want.sum(), 1e-9)
        self.check(total.max(), want.max(), 1e-12)


class ProductsTest(Case):
    """Matrix products and operations on their elements are one Matmul."""

    def test_one_matmul(self):
        a, w = RNG.standard_normal((2, 40, 40)).astype("f4")
        bias, rows, residual = RNG.standard_normal(40).astype("f4"), a[:, :1].copy(), w + 1
        x, y, b, r, z = map(self.t.put, (a, w, bias, rows, residual))
        exact = a.astype("f8") @ w
        for e, want in (
                (x @ y + b, exact + bias), (np.tanh(x @ y + r), np.tanh(exact + rows)),
                (z - 2 * (x @ y), residual - 2 * exact),
                (np.maximum(x @ y + b, 0) + z, np.maximum(exact + bias, 0) + residual),
                ((x @ y) * (x @ y), exact * exact), (x.T @ y / 8, (a.T.astype("f8") @ w) / 8),
                (x @ y.T + b[::-1], a.astype("f8") @ w.T + bias[::-1])):
            with self.calls() as calls:
                got = e.numpy()
            self.assertEqual(calls, ["Matmul"], e.explain())
            self.assertEqual([s.operation for s in e.stats], ["matmul"])
            self.assertEqual(got.dtype, np.float32)
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3, err_msg=e.explain())
            self.assertEqual(got.tobytes(), e.save().numpy().tobytes())
        positive = x @ y > 0
        np.testing.assert_array_equal(positive.save().numpy(), (a @ w) > 0)
        half = (x @ y + b).astype("f2")
        self.check(half, ((x @ y).save().numpy() + bias).astype("f2"))

    def test_stacks(self):
        shapes = (((3, 1, 5, 4), (2, 4, 6)), ((4,), (3, 4, 5)), ((3, 5, 4), (4,)), ((5, 4), (4,)),
                  ((2, 5, 4), (4, 6)), ((5, 4), (2, 4, 6)), ((2, 5, 0), (2, 0, 3)))
        whole = lambda *shape: RNG.integers(-9, 9, shape)  # noqa: E731
        for dtype in ("f2", "f4", "f8", "i4"):
            for shapes_of in shapes:
                a, b = (whole(*shape).astype(dtype) for shape in shapes_of)
                x, y = self.t.put(a), self.t.put(b)
                for call in (lambda p, q: p @ q + 1,
                             lambda p, q: (q.T if q.ndim == 1 else q.swapaxes(-1, -2))
                             @ (p if p.ndim == 1 else p.swapaxes(-1, -2)),
                             lambda p, q: p[..., ::-1] @ (q if q.ndim == 1 else q[..., ::2])):
                    try:
                        want = call(a, b)
                    except ValueError:  # The vector is on the wrong side.
                        self.assertRaises(ts.BadShape, call, x, y)
                        continue
                    with self.calls() as calls:
                        got = call(x, y).numpy()
                    self.assertEqual(calls, ["Matmul"])
                    self.assertEqual(got.dtype, want.dtype)
                    np.testing.assert_array_equal(got, want)
        a, b = whole(3, 5, 4).astype("f4"), whole(3, 6, 4).astype("f4")
        x, y = self.t.put(a), self.t.put(b)
        for text in ("bij,bkj->bik", "bij,bkj->kib", "bij,bkj->bk", "bij,ckj->bcik"):
            e = np.einsum(text, x, y)
            with self.subTest(text):
                self.assertEqual(e.explain().count(": matmul("), 1, e.explain())
                self.check(e, np.einsum(text, a, b))
        self.assertRaises(ts.BadShape, lambda: x @ y[:2].swapaxes(1, 2))

    def test_the_bits_of_a_product_and_a_map(self):
        for dtype in ("f2", "f4", "f8", "i4"):
            a = RNG.integers(-9, 9, (33, 65)).astype(dtype)
            x = self.t.put(a)
            product = x @ x.T
            kept = product.save()
            for call in (lambda p: p * 3 - x[:, :33], lambda p: p > 5,
                         lambda p: p.astype("f8") / 7):
                self.assertEqual(call(product).numpy().tobytes(), call(kept).numpy().tobytes())

    def test_wider_results(self):
        a = RNG.standard_normal((16, 300)).astype("f2")
        x = self.t.put(a)
        e = (ts.matmul(x, x.T, dtype="f32") * 0.125).astype("f2")
        with self.calls() as calls:
            got = e.numpy()
        self.assertEqual(calls, ["Matmul"])
        np.testing.assert_allclose(got, (a.astype("f8") @ a.astype("f8").T) / 8, rtol=2e-3,
                                   atol=2e-3)

    def test_products_that_are_needed_are_kept(self):
        a = RNG.standard_normal((20, 20))
        x = self.t.put(a)
        p = x @ x
        for terms, want, steps in (
            ((p + 1, p), (a @ a + 1, a @ a), 2), ((p + 1, p.sum()), (a @ a + 1, (a @ a).sum()), 3),
            (((p + 1) @ x,), ((a @ a + 1) @ a,), 2), ((p + p.T,), (a @ a + (a @ a).T,), 2),
            ((p + x @ x.T,), (a @ a + a @ a.T,), 2), ((p.T + 1,), ((a @ a).T + 1,), 2),
            ((p[::-1] + x,), ((a @ a)[::-1] + a,), 2), ((p[:1] + x,), ((a @ a)[:1] + a,), 2),
            ((p[:10] + 1,), ((a @ a)[:10] + 1,), 2),
            ((p[:, ::-1] + x,), ((a @ a)[:, ::-1] + a,), 2),
            ((p.reshape(10, 40) + 1,), ((a @ a).reshape(10, 40) + 1,), 2),
            ((p + np.ones((3, 20, 20)),), (a @ a + np.ones((3, 20, 20)),), 2),
            (((p + 1).sum(axis=1),), ((a @ a + 1).sum(axis=1),), 2),
            ((p @ x[0] + 1,), (a @ a @ a[0] + 1,), 2),
            ((p - p.mean(axis=0),), (a @ a - (a @ a).mean(axis=0),), 3),
        ):
            got = self.t.compute(*terms)
            for mine, expected in zip(got, want):
                np.testing.assert_allclose(mine, expected, rtol=1e-9, atol=1e-9)
            self.assertEqual(len(terms[0].stats), steps, terms[0].explain())

    def test_strategies(self):
        a = np.ones((8, 8), "f4")
        x = self.t.put(a)
        name = next(row.name for row in self.t.call("ListStrategies").strategies
                    if row.operation == "matmul" and row.available)
        for e, operations, timed in (
                ((x @ x).with_(strategy=name) + 1, ["matmul"], False),
                ((x @ x + 1).with_(timing=True), ["matmul"], True),
                # A product with timing is a separate step.
                ((x @ x).with_(timing=True) + 1, ["matmul", "map"], True),
                ((x @ x + 1).with_(strategy="fused"), ["matmul", "map"], False)):
            self.check(e, a @ a + 1)
            self.assertEqual([s.operation for s in e.stats], operations)
            self.assertEqual(e.stats[0].kernel_us > 0, timed)
            if operations == ["matmul"] and not timed:
                self.assertEqual(e.stats[0].strategy, name)


if __name__ == "__main__":
    python_outsider.main("__main__")
