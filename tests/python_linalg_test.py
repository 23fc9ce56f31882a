#!/usr/bin/env python3
"""Compares np.linalg on resident arrays with NumPy. Parts of decompositions whose signs are
arbitrary are checked by the equations that define them."""

import numpy as np

import python_outsider
import tessera as ts
from tessera.arrays import _linalg

RNG = np.random.default_rng(20261201)
TYPES = ("f4", "f8", "i4", "u1")
LinAlgError = np.linalg.LinAlgError


def matrices(*shape, dtype="f8"):
    """Returns matrices with elements from 0 to 9, which have few equal singular values. To square
    matrices, 10 is added on the diagonal, so that they can be inverted."""
    found = RNG.uniform(0, 9, shape)
    if shape[-1] == shape[-2]:
        found = found + 10 * np.eye(shape[-1])
    return found.astype(dtype)


def symmetric(*shape, dtype="f8"):
    """Returns symmetric matrices, which are positive definite."""
    found = matrices(*shape) - 4
    return (found @ found.swapaxes(-1, -2) + np.eye(shape[-1])).round().astype(dtype)


def transposed(a):
    return np.swapaxes(a, -1, -2)


class Case(python_outsider.Case):
    def check(self, found, want, scale=1.0, dtype=None):
        """Checks an array of the client or of NumPy. The tolerance is relative to the largest
        element, times the scale."""
        want = np.asarray(want)
        dtype = want.dtype if dtype is None else np.dtype(dtype)
        self.assertEqual((found.shape, found.dtype), (want.shape, dtype))
        got = found.numpy() if hasattr(found, "_session") else found
        self.assertEqual((got.shape, got.dtype), (want.shape, dtype))
        eps = 1e-12 if dtype.kind != "f" else np.finfo(dtype).eps
        size = 10 * max((4, *want.shape[-2:]))
        tolerance = size * eps * scale * max(np.abs(want).max(initial=0), 1e-30)
        np.testing.assert_allclose(got, want, 0, tolerance)

    def orthonormal(self, found):
        """Checks that the columns of a NumPy array are orthonormal."""
        self.check(transposed(found) @ found,
                   np.broadcast_to(np.eye(found.shape[-1], dtype=found.dtype),
                                   (*found.shape[:-2], found.shape[-1], found.shape[-1])))


class DecompositionsTest(Case):
    SHAPES = ((3, 3), (5, 2), (2, 5), (1, 1), (4, 6, 6), (2, 3, 4, 2), (1, 7), (3, 40, 17))
    EMPTY = ((0, 0), (3, 0), (0, 3), (0, 2, 2), (2, 0, 0), (0, 2, 3))

    def test_qr(self):
        for shape in (*self.SHAPES, *self.EMPTY):
            for dtype in TYPES:
                a = matrices(*shape, dtype=dtype)
                with self.subTest(shape=shape, dtype=dtype):
                    own = np.linalg.qr(a)
                    found = np.linalg.qr(self.t.put(a))
                    q, r = self.t.compute(found.Q, found.R)
                    for got, want in zip((q, r), own):
                        self.assertEqual((got.shape, got.dtype), (want.shape, want.dtype))
                    self.check(q @ r, a.astype(q.dtype))
                    self.orthonormal(q)
                    np.testing.assert_array_equal(r, np.triu(r))
                    self.check(np.linalg.qr(self.t.put(a), mode="r"), r)
        x = self.t.put(matrices(2, 5))
        self.check(np.linalg.qr(x, "complete")[1], np.linalg.qr(x)[1].numpy())
        for mode in ("complete", "raw"):
            self.assertRaisesRegex(ts.Unsupported, "reduced", np.linalg.qr, x.T, mode)
        self.assertRaisesRegex(ValueError, "Unrecognized", np.linalg.qr, x, "best")

    def test_svd(self):
        for shape in (*self.SHAPES, *self.EMPTY):
            for dtype in TYPES:
                a = matrices(*shape, dtype=dtype)
                with self.subTest(shape=shape, dtype=dtype):
                    x = self.t.put(a)
                    found = np.linalg.svd(x, full_matrices=False)
                    u, s, vh = self.t.compute(*found)
                    self.assertEqual(found._fields, ("U", "S", "Vh"))
                    for got, want in zip((u, s, vh), np.linalg.svd(a, full_matrices=False)):
                        self.assertEqual((got.shape, got.dtype), (want.shape, want.dtype))
                    self.check(u * s[..., None, :] @ vh, a.astype(u.dtype))
                    self.orthonormal(u)
                    self.orthonormal(transposed(vh))
                    self.check(np.linalg.svd(x, compute_uv=False), np.linalg.svd(a, False, False))
        x = self.t.put(matrices(3, 3))
        self.check(np.linalg.svd(x).U, np.linalg.svd(x, False).U.numpy())
        self.assertRaisesRegex(ts.Unsupported, "full_matrices=False", np.linalg.svd, x[:2])
        if hasattr(np.linalg, "svdvals"):
            self.check(np.linalg.svdvals(x), np.linalg.svd(x.numpy())[1])

    def test_svd_of_symmetric_matrices(self):
        a = matrices(2, 4, 4) - 5  # The part above the diagonal is not read.
        lower = np.tril(a) + transposed(np.tril(a, -1))
        u, s, vh = self.t.compute(*np.linalg.svd(self.t.put(a), hermitian=True))
        self.check(u * s[..., None, :] @ vh, lower)
        self.check(s, np.linalg.svd(a, hermitian=True)[1])
        self.check(np.linalg.pinv(self.t.put(a), hermitian=True), np.linalg.inv(lower), 1e3)
        self.check(np.linalg.matrix_rank(self.t.put(a), hermitian=True), [4, 4])

    def test_eigh(self):
        for shape in ((3, 3), (1, 1), (4, 6, 6), (2, 2, 3, 3), (30, 30), (0, 0), (0, 2, 2),
                      (2, 0, 0)):
            for dtype in TYPES:
                a = (matrices(*shape) + 4).astype(dtype)
                for half in "Lu":
                    with self.subTest(shape=shape, dtype=dtype, UPLO=half):
                        mine = np.tril(a) if half in "Ll" else transposed(np.triu(a))
                        whole = mine + transposed(np.tril(mine, -1))
                        x = self.t.put(a)
                        found = np.linalg.eigh(x, half)
                        w, v = self.t.compute(*found)
                        own, _ = np.linalg.eigh(a, half)
                        self.check(found.eigenvalues, own)
                        self.check(np.linalg.eigvalsh(x, UPLO=half), own)
                        self.check(v * w[..., None, :] @ transposed(v), whole.astype(w.dtype))
                        self.orthonormal(v)
        self.assertRaisesRegex(ValueError, "UPLO", np.linalg.eigh, x, "X")

    def test_cholesky(self):
        for shape in ((3, 3), (1, 1), (4, 6, 6), (40, 40), (0, 0), (0, 2, 2)):
            for dtype in ("f4", "f8", "i4"):
                a = symmetric(*shape, dtype=dtype)
                with self.subTest(shape=shape, dtype=dtype):
                    self.check(np.linalg.cholesky(self.t.put(a)), np.linalg.cholesky(a), 100)
        above = a + np.triu(np.ones_like(a), 1)
        self.check(np.linalg.cholesky(self.t.put(above)), np.linalg.cholesky(a))
        for bad in (-np.eye(2), [[0.0]], [[1.0, 2], [2, 1]]):
            self.assertRaises(ts.BadMatrix, np.linalg.cholesky(self.t.put(np.array(bad))).numpy)


class EquationsTest(Case):
    SHAPES = (((3, 3), (3,)), ((3, 3), (3, 2)), ((1, 1), (1, 1)), ((4, 3, 3), (1, 3, 2)),
              ((3, 3), (4, 3, 2)), ((5, 1, 3, 3), (1, 4, 3, 2)), ((2, 3, 3), (2, 3, 1)),
              ((0, 0), (0, 2)), ((2, 2), (2, 0)), ((0, 3, 3), (1, 3, 2)), ((60, 60), (60, 5)))

    def test_solve(self):
        for left, right in self.SHAPES:
            for dtype in TYPES:
                for other in {dtype, "f4"}:
                    a = matrices(*left, dtype=dtype)
                    b = RNG.uniform(1, 9, right).astype(other)
                    with self.subTest(left=left, right=right, dtype=dtype, other=other):
                        want = np.linalg.solve(a, b)
                        for x, y in ((self.t.put(a), self.t.put(b)), (self.t.put(a), b),
                                     (a, self.t.put(b))):
                            self.check(np.linalg.solve(x, y), want, 100)

    def test_vectors_as_right_sides(self):
        """NumPy 1 takes b as a stack of vectors if it has one axis less than a."""
        a, b = matrices(3, 3, 3), matrices(3, 3)
        found = np.linalg.solve(self.t.put(a), self.t.put(b))
        self.check(found, np.linalg.solve(a, b), 100)

    def test_inverses_and_determinants(self):
        for shape in ((3, 3), (1, 1), (4, 6, 6), (2, 2, 3, 3), (20, 20), (0, 0), (0, 2, 2),
                      (2, 0, 0)):
            for dtype in TYPES:
                a = matrices(*shape, dtype=dtype)[..., ::-1, :]  # Some determinants are negative.
                x = self.t.put(a)
                with self.subTest(shape=shape, dtype=dtype):
                    self.check(np.linalg.inv(x), np.linalg.inv(a), 1e3)
                    found = np.linalg.slogdet(x)
                    for got, want in zip(found, np.linalg.slogdet(a)):
                        self.check(got, want, 100)
                    self.check(np.linalg.det(x), np.linalg.det(a), 1000)
        self.assertEqual(found._fields, ("sign", "logabsdet"))

    def test_determinants_of_singular_matrices(self):
        x = self.t.put(np.array([[[0.0, 0], [0, 3]], [[2, 0], [0, -3]]]))
        sign, logarithm = self.t.compute(*np.linalg.slogdet(x))
        self.assertEqual((sign.tolist(), logarithm[0]), ([0, -1], -np.inf))
        np.testing.assert_allclose(np.linalg.det(x).numpy(), [0, -6])

    def test_powers(self):
        a = matrices(2, 3, 3)
        for n in (-1, -2, -3):
            self.check(np.linalg.matrix_power(self.t.put(a), n), np.linalg.matrix_power(a, n), 100)
        whole = np.array([[2, 1], [1, 1]])
        self.check(np.linalg.matrix_power(self.t.put(whole), -2),
                   np.linalg.matrix_power(whole, -2), 100)

    def test_tensors(self):
        a, b = RNG.random((4, 6, 8, 3)), RNG.random((4, 6))
        x, y = self.t.put(a), self.t.put(b)
        self.check(np.linalg.tensorinv(x), np.linalg.tensorinv(a), 1e4)
        self.check(np.linalg.tensorinv(x.reshape(24, 8, 3), ind=1),
                   np.linalg.tensorinv(a.reshape(24, 8, 3), ind=1), 1e4)
        self.check(np.linalg.tensorsolve(x, y), np.linalg.tensorsolve(a, b), 1e4)
        moved = np.moveaxis(a, 2, 0)
        self.check(np.linalg.tensorsolve(self.t.put(moved), y, axes=(0, 3)),
                   np.linalg.tensorsolve(moved, b, axes=(0, 3)), 1e4)
        self.assertRaises(ValueError, np.linalg.tensorinv, x, 0)
        self.assertRaises(ValueError, np.linalg.tensorsolve, x, y[:2])
        self.assertRaises(LinAlgError, np.linalg.tensorsolve, x[1:], y)

    def test_views(self):
        a = matrices(6, 6, 6)
        x = self.t.put(a)
        for name, see in {
            "transposed": lambda a: a[0].T, "stack": lambda a: np.transpose(a, (0, 2, 1)),
            "axes": lambda a: np.moveaxis(a, 0, -1), "reversed": lambda a: a[::2, ::-1, ::-1],
            "strided": lambda a: a[1, ::2, 1::2] + 9 * np.eye(3),
            "repeated": lambda a: np.broadcast_to(a[2], (3, 6, 6)),
            "expression": lambda a: a[3] * 2 - a[4].T / 4 + 50 * np.eye(6),
            "f4": lambda a: a[0].astype("f4"),
        }.items():
            with self.subTest(name):
                view, want = see(x), see(a)
                self.check(np.linalg.inv(view), np.linalg.inv(want), 1e3)
                y, b = (one[:1, : want.shape[-1], :2].astype(want.dtype) for one in (x, a))
                self.check(np.linalg.solve(view, y), np.linalg.solve(want, b), 1e3)
                q, r = self.t.compute(*np.linalg.qr(view))
                self.check(q @ r, want)


class SingularValuesTest(Case):
    def deficient(self, m, n, rank, dtype="f8", stack=()):
        return (RNG.integers(-3, 4, (*stack, m, rank)) @ RNG.integers(-3, 4, (*stack, rank, n))
                ).astype(dtype)

    def test_ranks(self):
        for shape in ((5, 3, 2), (3, 5, 1), (6, 6, 4)):
            for dtype in ("f4", "f8", "i4"):
                a = self.deficient(*shape, dtype, (3,))
                x = self.t.put(a)
                for how in ({}, {"tol": 1e-3}, {"tol": np.array([1e-3, 5, 50])}):
                    with self.subTest(shape=shape, dtype=dtype, how=how):
                        want = np.linalg.matrix_rank(a, **how)
                        self.check(np.linalg.matrix_rank(x, **how), want)
        limits = self.t.put(np.array([1e-3, 5, 50]))
        self.check(np.linalg.matrix_rank(x, limits), np.linalg.matrix_rank(a, limits.numpy()))
        for vector in (np.zeros(3), np.ones(3), np.float64(0)):
            self.assertEqual(int(np.linalg.matrix_rank(self.t.put(vector))),
                             np.linalg.matrix_rank(vector))

    def test_pseudoinverses(self):
        for dtype in ("f4", "f8", "i4"):
            for a in (matrices(5, 3, dtype=dtype), matrices(2, 3, 5, dtype=dtype),
                      self.deficient(6, 4, 2, dtype), np.zeros((2, 3), dtype),
                      np.zeros((0, 2, 3), dtype), np.zeros((2, 3, 0), dtype)):
                for rcond in (1e-15, 1e-10, 0.3):
                    if rcond == 1e-15 and a.size == 24:
                        continue  # Rounding decides whether the matrix has its full rank.
                    with self.subTest(dtype=dtype, shape=a.shape, rcond=rcond):
                        found = np.linalg.pinv(self.t.put(a), rcond)
                        self.check(found, np.linalg.pinv(a, rcond), 100)
        a = matrices(2, 5, 3)
        # pinv() of NumPy 1 has no rtol.
        self.assertRaises(ValueError, _linalg._pinv, self.t.put(a), 0.1, False, None)
        limits = np.array([0.9, 1e-9])
        self.check(np.linalg.pinv(self.t.put(a), limits), np.linalg.pinv(a, limits), 100)

    def test_least_squares(self):
        for dtype in ("f4", "f8", "i4"):
            for a in (matrices(9, 4, dtype=dtype), matrices(4, 9, dtype=dtype),
                      matrices(4, 4, dtype=dtype), self.deficient(8, 5, 3, dtype),
                      np.zeros((3, 0), dtype), np.zeros((0, 3), dtype)):
                for right in ((), (2,), (0,)):
                    b = RNG.integers(-9, 9, (len(a), *right)).astype(dtype)
                    for rcond in (None, 1e-8, 0.2):
                        with self.subTest(dtype=dtype, shape=a.shape, right=right, rcond=rcond):
                            want = np.linalg.lstsq(a, b, rcond=rcond)
                            found = np.linalg.lstsq(self.t.put(a), self.t.put(b), rcond=rcond)
                            solution, residuals, rank, values = found
                            self.check(solution, want[0], 1e3)
                            self.assertEqual(int(rank), want[2])
                            self.check(values, want[3], 10)
                            if want[1].size or len(a) <= a.shape[1]:
                                self.check(residuals, want[1], 1e3)
                            elif right != (0,):
                                product = a @ np.asarray(want[0], "f8").reshape(a.shape[1], -1)
                                left = ((b.reshape(len(a), -1) - product) ** 2).sum(0)
                                np.testing.assert_allclose(residuals.numpy(), left, 1e-4)
        x = self.t.put(matrices(9, 4))
        for b in (np.ones(8), np.ones((9, 2, 2)), np.float64(1)):
            self.assertRaises(LinAlgError, np.linalg.lstsq, x, b, rcond=None)
        self.assertRaises(LinAlgError, np.linalg.lstsq, x[0], np.ones(4), rcond=None)

    def test_conditions(self):
        for dtype in ("f4", "f8", "i4"):
            for shape in ((3, 3), (2, 4, 4), (1, 1)):
                a = matrices(*shape, dtype=dtype)
                for p in (None, 2, -2, 1, -1, np.inf, -np.inf, "fro", "nuc"):
                    with self.subTest(dtype=dtype, shape=shape, p=p):
                        self.check(np.linalg.cond(self.t.put(a), p), np.linalg.cond(a, p), 100)
        a = matrices(5, 3)
        self.check(np.linalg.cond(self.t.put(a)), np.linalg.cond(a), 100)
        self.assertEqual(float(np.linalg.cond(self.t.put(np.zeros((2, 2))))), np.inf)
        self.assertRaises(LinAlgError, np.linalg.cond, self.t.put(a), 1)
        self.assertRaises(LinAlgError, np.linalg.cond, self.t.put(a[:0]))

    def test_norms(self):
        for a in (matrices(5, 3), matrices(3, 5, dtype="f4"), matrices(2, 3, 4, dtype="i4")):
            for ord in (2, -2, "nuc"):
                for axes in ((0, 1), (-1, -2), (0, -1)):
                    for keep in (False, True):
                        with self.subTest(shape=a.shape, ord=ord, axes=axes, keepdims=keep):
                            self.check(np.linalg.norm(self.t.put(a), ord, axes, keep),
                                       np.linalg.norm(a, ord, axes, keep), 10)


class ErrorsTest(Case):
    def test_singular_matrices(self):
        a = np.stack([np.eye(2), np.ones((2, 2))])
        x = self.t.put(a)
        for call in (lambda: np.linalg.solve(x, x), lambda: np.linalg.inv(x),
                     lambda: np.linalg.matrix_power(x, -1), lambda: np.linalg.cond(x, 1)):
            found = call()  # It sends nothing, so it raises nothing.
            with self.assertRaises(ts.BadMatrix) as raised:
                found.numpy()
            self.assertIsInstance(raised.exception, LinAlgError)
            self.assertIsInstance(raised.exception, ValueError)
            self.assertEqual(raised.exception.code, "INVALID_ARGUMENT")
            self.assertEqual(raised.exception.reason, "BAD_MATRIX")
            self.assertEqual(raised.exception.details["position"], "1")
        with self.assertRaises(LinAlgError):
            np.linalg.inv(x).save("inverse")
        self.assertNotIn("inverse", self.t)

    def test_what_is_not_a_number(self):
        x = self.t.put(np.full((3, 3), np.nan))
        for call in (np.linalg.eigvalsh, lambda x: np.linalg.svd(x)[1], np.linalg.pinv,
                     np.linalg.matrix_rank, np.linalg.cond,
                     lambda x: np.linalg.lstsq(x, x, rcond=None)[0]):
            self.assertRaises(LinAlgError, call(x).numpy)

    def test_shapes(self):
        vector, wide = self.t.put(np.ones(3)), self.t.put(np.ones((2, 3)))
        square = self.t.put(np.eye(3))
        for name in ("inv cholesky det slogdet eigh eigvalsh qr svd pinv cond".split()):
            with self.subTest(name):
                call = getattr(np.linalg, name)
                self.assertRaises(LinAlgError, call, vector)
                self.assertRaises(LinAlgError, call, vector[0])
                if name not in ("qr", "svd", "pinv", "cond"):
                    self.assertRaises(LinAlgError, call, wide)
        self.assertRaises(LinAlgError, np.linalg.solve, wide, vector)
        self.assertRaises(LinAlgError, np.linalg.solve, vector, vector)
        self.assertRaises(LinAlgError, np.linalg.matrix_power, wide, -1)
        for b in (np.ones(2), np.ones((2, 3)), 1.0):
            self.assertRaises(ValueError, np.linalg.solve, square, b)
        self.assertRaises(ValueError, np.linalg.solve, self.t.put(np.ones((2, 3, 3))),
                          np.ones((3, 3, 1)))

    def test_types(self):
        for dtype, name in (("f2", "float16"), ("bf16", "bfloat16")):
            x = self.t.put(np.eye(3), dtype=dtype)
            for call in (np.linalg.inv, np.linalg.pinv, lambda x: np.linalg.norm(x, 2),
                         lambda x: np.linalg.solve(np.eye(3), x),
                         lambda x: np.linalg.lstsq(x, x, rcond=None)):
                with self.assertRaisesRegex(TypeError, f"array type {name} is unsupported in lin"):
                    call(x)
        self.check(np.linalg.inv(self.t.put(np.eye(2) > 0)), np.eye(2))

    def test_eigenvalues_of_other_matrices(self):
        x = self.t.put(np.eye(3))
        for call in (np.linalg.eig, np.linalg.eigvals):
            self.assertRaisesRegex(ts.Unsupported, "eigh|eigvalsh", call, x)


class ProgramsTest(Case):
    def test_one_expression(self):
        a, b = matrices(20, 3), RNG.uniform(0, 1, 20)
        x, y = self.t.put(a, name="x"), self.t.put(b, name="y")
        solution = np.linalg.solve(x.T @ x, x.T @ y)
        self.assertEqual(
            solution.explain(),
            "one Execute of 3 steps\n"
            "0: matmul(x as 3x20, y) -> f64 3\n"
            "1: matmul(x as 3x20, x) -> f64 3x3\n"
            "2: linalg(step 1, step 0 as 3x1, function=solve) -> f64 3x1")
        with self.calls() as calls:
            found = solution.numpy()
        self.assertEqual(calls, ["Execute"])
        np.testing.assert_allclose(found, np.linalg.lstsq(a, b, rcond=None)[0])

    def test_parts_are_results_of_one_step(self):
        x = self.t.put(symmetric(4, 4), name="s")
        w, v = np.linalg.eigh(x)
        rebuilt = v * w @ v.T
        self.assertEqual(rebuilt.explain().count("linalg("), 1)
        self.check(rebuilt, x.numpy(), 10)
        self.assertEqual(np.linalg.inv(x).explain(),
                         "one Linalg of 1 step\n0: linalg(s, function=inverse) -> f64 4x4")
        with self.calls() as calls:
            found = np.linalg.inv(x)
            found.numpy()
        self.assertEqual((calls, found.stats[0].operation), (["Linalg"], "linalg"))

    def test_results_are_kept(self):
        a = matrices(5, 3)
        u, s, vh = self.t.keep(*np.linalg.svd(self.t.put(a), False))
        self.check(u * s @ vh, a)
        saved = np.linalg.inv(self.t.put(a[:3])).save("inverted")
        self.check(self.t["inverted"] @ a[:3], np.eye(3), 100)
        saved.delete()


if __name__ == "__main__":
    python_outsider.main("__main__")
