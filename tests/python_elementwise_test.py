#!/usr/bin/env python3
"""Tests elementwise operations of the Python client against NumPy: every function in every type,
broadcast, promoted, fused.
"""

import itertools
import operator

import numpy as np
import python_outsider
import tessera as ts
from tessera.graph import _elementwise, _graph, _plan
from tessera.wire import _protocol as p

FLOATS, INTEGERS = ("f2", "f4", "f8"), ("i4", "i8")
NUMBERS = FLOATS + INTEGERS
# Functions of two arrays of any types, and of one array. Those in ROUNDED may round differently.
BINARY = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod, "==": operator.eq, "!=": operator.ne,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "minimum": np.minimum,
    "maximum": np.maximum, "fmin": np.fmin, "fmax": np.fmax, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "logical_xor": np.logical_xor,
    "fmod": np.fmod, "heaviside": np.heaviside,
    "where": lambda a, b: np.where(a > b, a, b), "divmod": lambda a, b: divmod(a, b)[1],
}
UNARY = {
    "neg": operator.neg, "abs": abs, "sign": np.sign, "square": np.square, "isnan": np.isnan,
    "isinf": np.isinf, "isfinite": np.isfinite, "logical_not": np.logical_not,
    "clip": lambda a: np.clip(a, -3, 7), "clip below": lambda a: np.clip(a, -3, None),
    "positive": operator.pos, "squared": lambda a: a**2, "invert": lambda a: ~(a > 1),
    "logic": lambda a: (a > 1) & (a < 5) | (a == -2) ^ (a != a), "sqrt": lambda a: np.sqrt(abs(a)),
    "rint": np.rint, "radians": np.radians, "deg2rad": np.deg2rad, "degrees": np.degrees,
    "rad2deg": np.rad2deg, "isposinf": np.isposinf, "isneginf": np.isneginf,
}
OF_FLOATS = {
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.round, "fix": np.fix,
    "reciprocal": np.reciprocal, "inverse": lambda a: a**-1, "root": lambda a: abs(a) ** 0.5,
    "nan_to_num": np.nan_to_num, "masked": lambda a: np.where(np.isfinite(a), a, 0),
    "of numbers": lambda a: np.where(np.trunc(np.where(a == a, a, 1)), a, 0),
    "numbers": lambda a: np.where(a > 0, 1, 2), "reals": lambda a: np.where(a > 0, 1.0, 2),
}
ROUNDED = {
    "exp": np.exp, "log": lambda a: np.log(abs(a)), "tanh": np.tanh, "exp2": np.exp2,
    "power": lambda a: np.power(abs(a), 1.5),
    "isclose": lambda a: np.isclose(a, a * 1.000001 + 1e-9), "cbrt": np.cbrt,
    "hypot": lambda a: np.hypot(a, a[::-1]),
}
SCALARS = (2, -3, 1.5, 0.1, True, float("inf"), np.float32(0.3), np.float64(0.3), np.int32(5))


def array_of(dtype, shape, seed):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "i":
        return rng.integers(-9, 10, shape).astype(dtype)
    array = np.asarray(rng.normal(0, 4, shape)).astype(dtype)
    special = np.asarray(rng.random(shape))
    for i, value in enumerate((np.nan, np.inf, -np.inf, 0.0, -0.0, 3.0)):
        array[(special > i / 20) & (special < (i + 1) / 20)] = value
    return array


def every_byte(dtype, seed):
    """Returns all values of a one-byte type, twice, in a random order."""
    values = np.arange(256).astype("u1").view(dtype)
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.permutation(values), rng.permutation(values)])


def broadcast_pair(rng):
    """Returns two shapes of up to 3 axes that can be broadcast, with extents of 0 and 1, and with
    axes missing in either shape."""
    full = rng.integers(0, 6, rng.integers(1, 4))
    ones = rng.integers(0, 4, len(full))
    both = ([1 if one == which else int(n) for n, one in zip(full, ones)] for which in (0, 1))
    return [tuple(shape[rng.integers(0, 2) :]) for shape in both]


class ElementwiseTest(python_outsider.Case):
    def compare(self, cases, arrays, **tolerance):
        """Checks all cases in one call. Values, types and shapes must equal NumPy's."""
        resident = [self.t.put(array) for array in arrays]
        with np.errstate(all="ignore"):
            expected = {name: np.asarray(case(*arrays)) for name, case in cases.items()}
        lazy = {name: case(*resident) for name, case in cases.items()}
        for (name, want), got in zip(expected.items(), self.t.compute(*lazy.values())):
            case = f"{name} of {[array.dtype.name for array in arrays]}"
            self.assertEqual((lazy[name].dtype, lazy[name].shape), (want.dtype, want.shape), case)
            self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape), case)
            if tolerance and want.dtype.kind == "f":
                np.testing.assert_allclose(got, want, err_msg=case, **tolerance)
            else:
                np.testing.assert_array_equal(got, want, case)

    def test_two_arrays_of_every_pair_of_types(self):
        rng = np.random.default_rng(1)
        for first, second in itertools.product(NUMBERS, repeat=2):
            for shapes in (((40,), (40,)), broadcast_pair(rng)):
                dtypes = zip((first, second), shapes)
                self.compare(BINARY, [array_of(*one, i) for i, one in enumerate(dtypes)])

    def test_types_of_three_arguments_in_any_order(self):
        types = ("?", "u1", "i1", *NUMBERS)
        for three in itertools.combinations(types, 3):
            if set(three) == {"?", "u1", "i1"}:
                continue  # The server lacks i2.
            terms = [_elementwise.constant(np.ones((), one)[()]) for one in three]
            want = np.result_type(*map(np.dtype, three))
            for order in itertools.permutations(terms):
                self.assertEqual(_elementwise.common_dtype(list(order)), want, three)

    def test_one_array(self):
        for dtype, shape in itertools.product(NUMBERS, ((40,), (2, 3, 4), (0, 2))):
            self.compare(UNARY, [array_of(dtype, shape, 3)])

    def test_functions_of_floats(self):
        for dtype in FLOATS:
            array = array_of(dtype, (200,), 3)
            self.compare(OF_FLOATS, [array])
            self.compare(ROUNDED, [array], rtol=4 * float(np.finfo(dtype).eps), atol=1e-44)

    def test_functions_of_integers(self):
        for dtype in INTEGERS:
            array = array_of(dtype, (60,), 4)
            self.compare({"power": lambda a: a**3}, [array])
            rounded = {name: case for name, case in ROUNDED.items() if name != "isclose"}
            self.compare(rounded, [array], rtol=1e-15)

    def test_numbers_beside_arrays(self):
        """By NumPy 2's rules, Python numbers take the array's type, and NumPy numbers keep their
        own."""
        for dtype in NUMBERS:
            array = array_of(dtype, (30,), 5)
            for scalar in SCALARS:
                beside = self.beside(scalar, array.dtype)
                for name, swap in itertools.product(("+", "*", "/", "//", "%", "<", "=="), (0, 1)):
                    with self.subTest(name, dtype=dtype, scalar=repr(scalar), swap=swap):
                        self.check_beside(BINARY[name], array, scalar, beside, swap)

    @staticmethod
    def beside(scalar, dtype):
        """Returns the scalar as an array of the type that it counts as."""
        if isinstance(scalar, np.generic):
            return np.full(1, scalar)
        if isinstance(scalar, float) and dtype.kind in "iu":
            return np.full(1, scalar, "f8")
        return np.full(1, scalar, bool if isinstance(scalar, bool) else dtype)

    def check_beside(self, op, array, scalar, beside, swap):
        x = self.t.put(array)
        with np.errstate(all="ignore"):
            want = op(beside, array) if swap else op(array, beside)
        lazy = op(scalar, x) if swap else op(x, scalar)
        self.assertEqual(lazy.dtype, want.dtype)
        np.testing.assert_array_equal(lazy.numpy(), want)

    def test_signs_of_zeros(self):
        values = np.array([0.0, -0.0, 1, -1, 2, -2, np.inf, -np.inf, np.nan])
        for dtype in FLOATS:
            a = values.astype(dtype)
            pair = np.repeat(a, len(a)), np.tile(a, len(a))
            resident = [self.t.put(one) for one in pair]
            for call in (np.fmod, np.heaviside, np.hypot, np.nextafter, lambda a, b: np.cbrt(a),
                         lambda a, b: np.degrees(a)):
                with np.errstate(all="ignore"):
                    got, want = call(*resident).numpy(), call(*pair)
                np.testing.assert_array_max_ulp(got, want, 1)  # NumPy's cbrt is not always exact.
                zero = want == 0
                np.testing.assert_array_equal(np.signbit(got)[zero], np.signbit(want)[zero])

    def test_the_sign_of_a_zero_next_to_the_smallest_numbers(self):
        for dtype in FLOATS:
            least = np.nextafter(np.zeros(2, dtype), np.array([1, -1], dtype))
            far = -np.sign(least)
            got = np.nextafter(self.t.put(least), far).numpy()
            np.testing.assert_array_equal(got, [0, 0])
            self.assertEqual(np.signbit(got).tolist(), np.signbit(least).tolist())
            np.testing.assert_array_equal(np.nextafter(self.t.put(got), -far).numpy(), least)

    def test_numbers_are_rounded_to_the_type_of_the_array(self):
        """NumPy 2 does so before it computes in another type."""
        a = np.append(np.linspace(0, 0.5, 200), np.nan).astype("f2")
        x = self.t.put(a)
        for call, number in ((np.hypot, 10**10), (np.hypot, 0.1), (np.logaddexp, -0.1234)):
            with np.errstate(all="ignore"):
                want = call(a, np.float16(number))
            np.testing.assert_array_equal(call(x, number).numpy(), want)
            np.testing.assert_array_equal(call(number, x).numpy(), want)
        infinite = np.hypot(self.t.put(a[-2:], dtype="bf16"), 1e39)
        self.assertTrue(np.isinf(infinite.astype("f4").numpy()).all())

    def test_roots_in_the_whole_range(self):
        """np.cbrt, np.hypot and np.arctan2 are within 4 units in the last place."""
        rng = np.random.default_rng(8)
        for dtype, most in (("f2", 15), ("f4", 127), ("f8", 1023)):
            a, b = (np.ldexp(rng.uniform(-1, 1, 4000), rng.integers(-most - 20, most, 4000))
                    .astype(dtype) for _ in range(2))
            near = np.where(rng.random(4000) < 0.5, b, a * b.dtype.type(0.75))
            for function, operands in ((np.cbrt, (a,)), (np.hypot, (a, near)),
                                       (np.arctan2, (a, near))):
                got = function(*(self.t.put(one) for one in operands)).numpy()
                want = function(*(one.astype("g") for one in operands)).astype(dtype)
                apart = abs(got.astype("g") - want.astype("g")) / np.spacing(abs(want))
                self.assertLessEqual(apart.max(), 4 if dtype == "f8" else 1)

    def test_functions_computed_in_f64(self):
        """Functions are within 1 unit in the last place, and f64 results within 4, or 6."""
        rng = np.random.default_rng(9)
        special = [0.0, -0.0, 1, -1, 0.5, 2, 8, 1000, np.inf, -np.inf, np.nan, 1e-7, -1e-7]
        for dtype, most, least in (("f2", 15, 1), ("f4", 127, 1), ("f8", 1000, 6)):
            a, b = (np.append(special[::step], np.ldexp(rng.uniform(-1, 1, 3000),
                                                        rng.integers(-most - 20, most, 3000)))
                    .astype(dtype) for step in (1, -1))
            x, y = self.t.put(a), self.t.put(b)
            functions = (np.log2, np.log10, np.log1p, np.expm1, np.sinh, np.cosh, np.arcsinh,
                         np.arccosh, np.arctanh, np.sin, np.cos, np.tan, np.arcsin, np.arccos,
                         np.arctan, np.logaddexp, np.logaddexp2)
            for function in functions:
                count = function.nin
                with self.subTest(function.__name__, dtype=dtype), np.errstate(all="ignore"):
                    want = function(*(one.astype("g") for one in (a, b)[:count])).astype(dtype)
                    got = function(*(x, y)[:count]).numpy()
                    self.assertEqual(got.dtype, want.dtype)
                    apart = abs(got.astype("g") - want.astype("g"))
                    finite = np.isfinite(want)
                    np.testing.assert_array_equal(got[~finite], want[~finite])
                    # A sum of exponentials loses digits where its logarithm is near 0.
                    large = np.where(np.isfinite(a + b), np.maximum(abs(a), abs(b)), 0)
                    scale = np.maximum(abs(want), large * ((count, least) == (2, 6)))
                    units = (apart / np.spacing(scale))[finite]
                    self.assertLessEqual(units.max(), least)
                    zero = want == 0
                    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))
        self.assertEqual(np.log2(self.t.put(a, dtype="bf16")).dtype, ts.bfloat16)

    def test_bits_of_integers(self):
        rng = np.random.default_rng(10)
        for dtypes in itertools.product(("u1", "i1", "i4", "i8"), repeat=2):
            if dtypes in (("u1", "i1"), ("i1", "u1")):
                continue  # The common type, int16, is missing.
            a, b = (rng.integers(np.iinfo(one).min, np.iinfo(one).max, 500, one, True)
                    for one in dtypes)
            few = (b % 70).astype(dtypes[1])
            x, y, z = (self.t.put(one) for one in (a, b, few))
            for got, want in ((x & y, a & b), (x | y, a | b), (x ^ y, a ^ b), (~x, ~a),
                              (x << z, a << few), (x >> z, a >> few), (x >> y, a >> b)):
                self.assertEqual(got.dtype, want.dtype)
                np.testing.assert_array_equal(got.numpy(), want)
        for call in (np.bitwise_and, np.left_shift):
            self.assertRaises(TypeError, call, self.t.put(np.ones(2)), 1)

    def test_round_by_more_than_floats_have(self):
        for decimals in (400, -400):
            got = np.round(self.t.put(np.array([1.5, 0, -2])), decimals).numpy()
            np.testing.assert_array_equal(got, [np.nan] * 3)

    def test_integers_that_do_not_fit(self):
        x = self.t.put(np.arange(4, dtype="i4"))
        with self.assertRaises(OverflowError):
            x + (1 << 40)
        self.assertEqual((x < (1 << 40)).numpy().tolist(), [True] * 4)
        with self.assertRaisesRegex(ValueError, "negative integer powers"):
            x**-1
        byte = x.astype("u1")
        for call in (lambda: byte << -1, lambda: 256 << byte, lambda: np.right_shift(byte, 300),
                     lambda: byte & -1, lambda: x >> (1 << 40)):
            self.assertRaises(OverflowError, call)
        self.assertEqual((byte << np.int32(9)).numpy().tolist(), [0, 512, 1024, 1536])

    def test_bfloat16(self):
        a = array_of("f4", (50,), 6)
        x = self.t.put(a, dtype="bf16")
        rounded = np.asarray(x.numpy(), "f4")
        for other, dtype in (("f2", "f4"), ("f4", "f4"), ("f8", "f8"), ("i4", "f8")):
            b = array_of(other, (50,), 7)
            got = x + self.t.put(b)
            self.assertEqual(got.dtype, np.dtype(dtype))
            np.testing.assert_array_equal(got.numpy(), rounded.astype(dtype) + b.astype(dtype))
        self.assertEqual((x * 2).dtype, ts.bfloat16)
        np.testing.assert_array_equal(np.asarray((x * 2).numpy(), "f4"), rounded * 2)
        for function in (np.isinf, np.isfinite, np.isnan):
            np.testing.assert_array_equal(function(x).numpy(), function(rounded))
        self.assertEqual(np.concatenate([x, a], dtype="f8").dtype, np.dtype("f8"))
        for to, casting in (("f4", "safe"), ("f2", "same_kind")):
            self.assertEqual(x.astype(to, casting=casting).dtype, np.dtype(to))
        for to, casting in (("f2", "safe"), ("i4", "same_kind"), ("f4", "no")):
            self.assertRaises(TypeError, x.astype, to, casting=casting)
        for got in (abs(x) ** 0.5, x**-1, np.power(x, 2), np.exp(x), 1 / x, np.where(x > 1, x, 0),
                    np.degrees(x), np.hypot(x, 1), np.cbrt(x), np.fmod(x, 2), np.pad(x, 1),
                    np.concatenate([x, x]), np.einsum("i->", x), np.convolve(x, x), np.diag(x)):
            self.assertEqual(got.dtype, ts.bfloat16)
            got.numpy()

    def test_squares_and_conjugates_of_bool(self):
        cases = {"square": lambda a: a**2, "cube": lambda a: a**3, "conj": lambda a: a.conj(),
                 "power": lambda a: np.power(a, 2), "conjugate": lambda a: np.conjugate(a)}
        self.compare(cases, [np.array([True, False])])

    def test_casts(self):
        a = np.array([0.0, 1.7, -2.5, 300.0, np.inf, np.nan, 1e30], "f4")
        x = self.t.put(a)
        for dtype in (*FLOATS, bool):
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(x.astype(dtype).numpy(), a.astype(dtype))
        high = np.iinfo("i4").max
        self.assertEqual(x.astype("i4").numpy().tolist(), [0, 1, -2, 300, high, 0, high])
        self.assertIs(type(x.astype("f4")), ts.Array)

    def test_integers_of_a_byte(self):
        """As in NumPy, results keep the type and wrap, for every pair of types that the server
        has."""
        for first in ("u1", "i1"):
            a = every_byte(first, 3)
            for second in (first, "f2", "f4", "f8", "i4", "i8", "?"):
                b = every_byte(first, 4).astype(second)
                of_truth = {k: BINARY[k] for k in ("+", "*", "<", "where")}
                cases = of_truth if second == "?" else BINARY
                self.compare(cases, [a, b])
                self.compare(cases, [b, a])
            unary = UNARY if first == "i1" else {k: v for k, v in UNARY.items() if "clip" not in k}
            self.compare(unary, [a])
            self.compare({"power": lambda a: a**3, "clip": lambda a: np.clip(a, 3, 99)}, [a])
            self.compare({"exp": lambda a: np.exp(a / 99), "tanh": np.tanh}, [a], rtol=4e-3)
            for scalar in (2, -3, 1.5, True, np.float32(0.3), np.int32(5)):
                if scalar == -3 and first == "u1":
                    self.assertRaises(OverflowError, lambda: self.t.put(a) + scalar)
                    continue
                beside = self.beside(scalar, a.dtype)
                for name in ("+", "*", "/", "//", "<", "=="):
                    self.check_beside(BINARY[name], a, scalar, beside, swap=name == "//")
            with self.assertRaises(OverflowError):
                self.t.put(a) + 256
            self.assertTrue((self.t.put(a) < 256).all())
        with self.assertRaisesRegex(ts.Unsupported, "int16"):
            self.t.put(a) + self.t.put(a, dtype="u1")
        self.assertEqual((self.t.put(a) + self.t.put(a, dtype="bf16")).dtype, ts.bfloat16)

    def test_casts_of_bytes(self):
        for dtype in ("u1", "i1"):
            a = every_byte(dtype, 6)
            for name in ("f4", "f2", "i4", "i8", "?", dtype):
                for got in (self.t.put(a, dtype=name), self.t.put(a).astype(name),
                            self.t.put(a).copy(dtype=name)):
                    self.assertEqual(got.dtype, np.dtype(name))
                    np.testing.assert_array_equal(got.numpy(), a.astype(name))
        numbers = np.array([-1e9, -129, -128.9, -0.9, np.nan, 127.9, 128, 255.9, 256, np.inf])
        x = self.t.put(numbers)
        self.assertEqual(x.astype("u1").numpy().tolist(), [0, 0, 0, 0, 0, 127, 128, 255, 255, 255])
        self.assertEqual(x.astype(np.int8).numpy().tolist(),
                         [-128, -128, -128, 0, 0, 127, 127, 127, 127, 127])
        self.assertEqual(x.astype("i8").dtype, np.dtype(np.int64))

    def test_arrays_of_numpy_beside_resident_ones(self):
        a, b = array_of("f4", (4, 5), 9), array_of("f8", (5,), 10)
        x = self.t.put(a)
        cases = {"+": lambda x: x + b, "-": lambda x: b - x, "<": lambda x: b < x,
                 "where": lambda x: np.where(b > 0, x, b), "list": lambda x: x * [1, 2, 3, 4, 5]}
        self.compare(cases, [a])
        with self.assertRaisesRegex(ts.Unsupported, "put"):
            x[0, 0] + np.zeros(1 << 18)
        with self.assertRaises(ts.BadShape):
            x + np.zeros(3)


class FusionTest(python_outsider.Case):
    """Tests how expressions become steps."""

    def setUp(self):
        self.a = array_of("f8", (3, 4), 12)
        self.x = self.t.put(self.a)

    def steps(self, *expressions):
        return _plan.Plan([e._term()[0] for e in expressions]).steps

    def one_call(self, expression):
        with self.calls() as calls:
            return expression.numpy(), calls

    def test_what_is_elementwise_is_one_step(self):
        x = self.x
        e = np.where(x > 0, np.sqrt(abs(x)) * 2, -x / (x * x + 1)) + [1, 2, 3, 4]
        (step,) = self.steps(e)
        self.assertEqual(len(step.operands), 2)
        got, calls = self.one_call(e)
        self.assertEqual(calls, ["Map"])
        a = self.a
        with np.errstate(all="ignore"):
            want = np.where(a > 0, np.sqrt(abs(a)) * 2, -a / (a * a + 1)) + [1, 2, 3, 4]
        np.testing.assert_array_equal(got, want)
        self.assertIn("where(a > 0.0, sqrt(abs(a)) * 2.0, -a / (a * a + 1.0)) + ", e.explain())

    def test_what_has_a_strategy_or_timing_is_a_separate_step(self):
        a = self.array()
        for strategy, timing, steps in (("", False, 1), ("one", False, 2), ("", True, 2)):
            self.assertEqual(len(self.steps((a * a).with_(strategy, timing).sum())), steps)
            results = [e.with_(strategy, timing)._term()[0] for e in a.topk(2)]
            self.assertEqual([(e.strategy, e.timing, e.output) for e in results],
                             [(strategy, timing, 0), (strategy, timing, 1)])

    def test_equal_parts_are_computed_once(self):
        x = self.x
        (step,) = self.steps((x + 1) * (x + 1) + (self.x + 1))
        self.assertEqual([i.fn for i in step.code],
                         ["operand", "constant", "add", "multiply", "add"])

    def array(self, name="a", version=1, dtype=2, shape=(4, 4)):
        """Returns a handle of a buffer that need not exist."""
        leaf = _graph.Leaf(p.Buffer(name=name, version=version, dtype=dtype, shape=shape))
        return self.t._wrap(leaf, leaf.whole)

    def parts(self, *expressions):
        """Returns the number of steps, and the numbers of operands and instructions of all
        steps."""
        return sum(1 + len(step.operands) + len(step.code) for step in self.steps(*expressions))

    def test_parts_that_differ_in_anything_are_two(self):
        a, half, whole = self.array(), self.array("h", dtype=3), self.array("i", dtype=5)
        zeros = np.zeros(4, "f4")
        by_name = {"name": self.array("b"), "version": self.array(version=2), "view": a.T}
        for what, make, one, other in (
            *((what, lambda x: x * 2, a, b) for what, b in by_name.items()),
            ("offset", lambda x: x + 1, a[0], a[1]),
            ("strides", lambda x: x + 1, a[0], a[:, 0]),
            ("reversed", lambda x: x + 1, a[0], a[0, ::-1]),
            ("type of a small array", lambda z: a + z, zeros, zeros.astype("i4")),
            ("shape of a small array", lambda z: a + z, zeros.reshape(1, 4), zeros.reshape(4, 1)),
            ("bytes of a small array", lambda z: a + z, zeros, -zeros),
            ("view of an expression", lambda i: (a @ a)[i] * 2, 0, 1),
            ("sign of a constant", lambda c: a * c, 0.0, -0.0),
            ("function", lambda f: f(a), np.exp, np.tanh),
            ("type of a cast", lambda d: a.astype(d).astype("f8"), "f4", "i4"),
            ("operation", lambda op: getattr(a, op)(axis=0), "sum", "max"),
            ("axes", lambda axis: a.sum(axis=axis), 0, 1),
            ("largest", lambda largest: a.topk(2, largest=largest)[0], True, False),
            ("k", lambda k: a.topk(k)[0][:, :1], 2, 3),
            ("result of a topk", lambda i: self.array("k", dtype=6).topk(2)[i] * 2, 0, 1),
            ("radius", lambda n: ts.window_sum(a[0], n), 1, 2),
            ("type of a product", lambda d: ts.matmul(half, half, dtype=d) * 1.0, "f16", "f32"),
            ("order of a product", lambda m: m * 1, a.T @ a, a @ a.T),
            ("strategy", lambda name: a.sum(axis=0).with_(name), "one", "two"),
            ("timing", lambda timing: a.sum(axis=0).with_("", timing), False, True),
            ("type of the buffer", lambda x: x * 2, half[0].astype("f8"), whole[0].astype("f8")),
        ):
            with self.subTest(what):
                same = self.parts(make(one) + make(one))
                self.assertEqual(self.parts(make(other) + make(other)), same)
                for first, second in ((one, other), (other, one)):
                    self.assertGreater(self.parts(make(first) + make(second)), same)
                    self.assertGreater(
                        self.parts(make(first), make(second)), self.parts(make(first), make(first)))

        (step,) = self.steps((half + 1).astype("f8") * (a + 1))  # A constant of each type.
        self.assertEqual([i.fn for i in step.code].count("constant"), 2)

    def test_more_than_eight_operands_take_several_steps(self):
        arrays = [array_of("f4", (5,), seed) for seed in range(20)]
        resident = [self.t.put(array) for array in arrays]
        total, want = resident[0], arrays[0]
        for x, a in zip(resident[1:], arrays[1:]):
            with np.errstate(all="ignore"):
                total, want = total * 0.5 + x, want * np.float32(0.5) + a
        self.assertEqual(len(self.steps(total)), 3)
        eight = sum(resident[1:8], resident[0])  # The largest part becomes a separate step.
        self.assertEqual(len(self.steps(eight + np.exp(resident[8]))), 2)
        got, calls = self.one_call(total)
        self.assertEqual(calls, ["Execute"])
        np.testing.assert_array_equal(got, want)

    def test_more_nodes_than_a_step_has(self):
        e, want = self.x, self.a
        with np.errstate(all="ignore"):
            for i in range(200):
                e, want = e * 1.01 - i, want * 1.01 - i
        steps = self.steps(e)
        self.assertLess(len(steps), 15)  # 600 nodes.
        for step in steps:
            self.assertLessEqual(len(step.code), 64)
        got, calls = self.one_call(e)
        self.assertEqual(calls, ["Execute"])
        np.testing.assert_array_equal(got, want)

    def test_the_first_error_of_a_program_is_raised(self):
        """Later errors may be consequences of the first one."""
        plan = _plan.Plan([self.array(name).sum()._term()[0] for name in "abcd"])
        self.assertEqual(len(plan.steps), 4)
        good = {"reduce": {"value": {"real": 1}}}
        gone = {"error": {"code": 5, "reason": "BUFFER_NOT_FOUND", "message": "first"}}
        failed = {"error": {"code": 9, "reason": "STEP_FAILED", "metadata": {"step": "7"}}}
        empty = {"error": {"code": 3, "reason": "EMPTY_INPUT"}}
        codes = {ts.BufferNotFound: "NOT_FOUND", ts.StepFailed: "FAILED_PRECONDITION",
                 ts.EmptyInput: "INVALID_ARGUMENT"}

        def answers(*results):
            return plan.answers("Execute", p.METHODS["Execute"].response(results=results))

        self.assertEqual(len(answers(good, good, good, good)), 4)
        for results, kind, step in (
            ((gone, failed, good, good), ts.BufferNotFound, "0"),
            ((good, gone, empty, failed), ts.BufferNotFound, "1"),
            ((good, empty, failed, gone), ts.EmptyInput, "1"),
            ((failed, gone, empty, good), ts.StepFailed, "7"),  # The reason comes from the server.
            ((good, good, good, empty), ts.EmptyInput, "3"),
        ):
            with self.assertRaises(kind) as caught:
                answers(*results)
            self.assertEqual(caught.exception.details["step"], step)
            self.assertEqual(caught.exception.code, codes[kind])
        for results in ((), (gone,), (good, good, good), (good, gone, {}, good)):
            with self.assertRaisesRegex(ts.Error, "lacks results") as caught:
                answers(*results)
            self.assertEqual(caught.exception.code, "DATA_LOSS")

    def test_every_function_of_the_server_is_known(self):
        self.assertEqual(
            {*_elementwise.FUNCTIONS, "cast", "unspecified"}, set(ts.wire._protocol.MAP_OPS)
        )


if __name__ == "__main__":
    python_outsider.main("__main__")
