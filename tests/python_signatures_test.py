#!/usr/bin/env python3
"""Compares with NumPy every NumPy function and ufunc that the Python client has: each argument of
its signature by name and by position, in every type, at the ends of the integer types. A call that
is not supported is refused with an alternative. No argument has a different meaning than in NumPy.
"""

import inspect
import itertools
import re
import warnings

import numpy as np
import python_outsider
import tessera as ts
from tessera.arrays import _functions, _linalg, _numpy, _ufuncs

TYPES = ("f2", "f4", "f8", "i4", "i8", "u1", "i1", "?")
# Values of parameters, by name. Values that are arrays are made from the first array.
VALUES = {
    "axis": (0, -1, None, (0, 1), (), 5, True), "axis1": (1,), "axis2": (0,),
    "axes": (0, 1, (1, 0)),
    "dtype": ("f8", "f4", "i8", "i4", "u1", "i1", "?"), "out": (None,),
    "keepdims": (True, False, "f4"),
    "initial": (3,), "where": (True, lambda a: a % 2 == 1 if a.dtype.kind != "b" else a),
    "ddof": (1,),
    "correction": (1,), "weights": (lambda a: a,), "returned": (True,), "decimals": (0, 1, -1),
    "rtol": (0.5,), "atol": (2,), "equal_nan": (True,), "copy": (True, False), "nan": (7,),
    "posinf": (8,), "neginf": (9,), "offset": (1, -1), "order": ("C", "F"), "subok": (True, False),
    "shape": ((6,), 6), "newshape": ((6,), 6), "n": (0, 1, 2), "prepend": (1, lambda a: a),
    "append": (1, lambda a: a),
    "indices_or_sections": (1, [1]), "reps": (2, (2, 1)), "repeats": (2,), "k": (1, 2, 3),
    "source": (0,), "destination": (1,), "fill_value": (3, 1.5, [1, 2, 3]), "casting": ("safe",),
    "ord": (None, 1, -1, 2, 0, 3, np.inf, -np.inf, "fro", "nuc"), "to": ("f4",),
    "m": (lambda a: a,),
    "a_min": (0,), "a_max": (1, None), "min": (0,), "max": (1,), "x": (lambda a: a,),
    "y": (lambda a: a,), "b": (lambda a: a,), "a2": (lambda a: a,), "device": (None, "cpu"),
    "mean": (1.0,), "dx": (2, 0.5), "to_end": (1,), "to_begin": (1,),
    "include_initial": (True, False), "x1": (lambda a: a,), "x2": (lambda a: a,),
    "start": (0, 1, 2, 3, -1, -2), "condlist": (lambda a: [a > 1],),
    "choicelist": (lambda a: [a], lambda a: a), "default": (7, lambda a: a), "shift": (1, (1, 2)),
    "bins": (2, [0, 1, 3], [4, 2, 1], [1, 0, 2], "auto"), "right": (True,),
    "v": (lambda a: a[0], 2),
    "side": ("left", "right", "middle"), "sorter": (None, lambda a: [0]), "rowvar": (False, True),
    "bias": (True, False), "fweights": ([1, 2, 3], [1, 2], [-1, 2, 3], [1.5, 2, 3]),
    "aweights": ([1, 0.5, 3], [[1, 2, 3]], [-1, 2, 3]), "density": (True, False),
    "range": ((0, 3), (3, 0)), "pad_width": (1, (1, 0), ((0, 2), (1, 1)), -1),
    "arrays": (), "tup": (),
    "mode": ("constant", "wrap", "edge", "valid", "same", "full", "none"),
    "values": (lambda a: a, 5),
    "axisa": (0,), "axisb": (0,), "axisc": (0,), "window_shape": (2, (2, 2), (1, 3), 9, -1),
    "writeable": (False, True), "kind": ("stable", "quicksort"), "stable": (True,),
    "q": (0.25, 1, [0, 0.5]), "overwrite_input": (False, True),
    "method": ("linear", "lower", "higher", "midpoint", "hazen", "inverted_cdf"),
    "interpolation": (None,),
    "a": (lambda a: a,), "arr": (lambda a: a,), "minlength": (0, 5), "return_index": (True,),
    "return_inverse": (True,), "return_counts": (True,),
    "test_elements": ([1, 2], lambda a: a[0], []), "ar2": ([1, 3, 3], lambda a: a[0]),
    "assume_unique": (False,), "invert": (True,), "return_indices": (True,),
    "xp": ([0, 1, 3], lambda a: np.arange(3)), "fp": ([5, 1.5, 2], lambda a: a[1]), "left": (7,),
    "period": (2.5,), "kth": (1, -1), "new_shape": (4, (2, 5), (0,), -1),
    "obj": (1, [0, 0], slice(1), [], 9, 1.5), "element": (lambda a: a,),
    "indices": (lambda a: np.array([[1, 0, 1]]), lambda a: np.array([5, -1])),
}
SQUARE = {np.linalg.matrix_power, np.dot, getattr(np.linalg, "matmul", None)}
ALIKE = {np.inner: lambda a: a, np.vdot: lambda a: a}
REFUSALS = (ts.Unsupported,)
# (NumPy's type, the client's type) where the documents say that they differ.
WIDER = {("uint64", "int64"), ("int32", "int64"), ("uint8", "int64"), ("int8", "int64"),
         ("uint8", "int32"), ("int8", "int32"), ("bool", "int64")}


def array_of(dtype):
    """Returns a 2 x 3 array with the ends of an integer type."""
    if np.dtype(dtype).kind in "iu":
        ends = np.iinfo(dtype)
        return np.array([[ends.min, 2, ends.max], [3, ends.max, 1]], dtype)
    a = np.array([[1, 0, 3.5], [-0.5, 4, 1]])
    return a.astype(dtype)


def special_of(dtype):
    a = array_of(dtype)
    if a.dtype.kind == "f":
        a[0] = np.nan, np.inf, -np.inf
    return a


class SignaturesTest(python_outsider.Case):
    def both(self, call, a, x):
        """Returns (NumPy's, the client's) result or error of a call with arrays of either kind."""
        found = []
        for array in (a.copy(), x):
            try:
                with np.errstate(all="ignore"), warnings.catch_warnings():
                    # NumPy takes "constant" for the mode "clip" of np.take, and will refuse it.
                    warnings.filterwarnings("error", "inexact matches", DeprecationWarning)
                    found.append(call(array))
            except Exception as error:
                found.append(error)
        return found

    def settle(self, cases):
        """Compares the client's results with NumPy's. cases: (text, NumPy's result, the client's
        result)."""
        lazy, wanted, served = [], [], 0
        for text, want, got in cases:
            strict = isinstance(got, TypeError) and "must be an integer, not" in str(got)
            if strict and ("True" in text or "keepdims" in text):
                continue  # The client is stricter than NumPy here.
            if isinstance(got, Exception):
                ok = isinstance(want, Exception) or isinstance(got, REFUSALS)
                self.assertTrue(ok, f"{text}: {want!r}, here {got!r}")
                named = not isinstance(got, ts.Unsupported) or str(got) and ": " in str(got)
                self.assertTrue(named, f"{text}: {got!r} names no alternative")
                continue
            if isinstance(want, ValueError) and text.startswith("unravel_index "):
                continue  # The client does not know the indices.
            self.assertNotIsInstance(want, Exception, f"{text}: {want!r}, here {got!r}")
            served += 1
            several = isinstance(got, (tuple, list)) and isinstance(want, (tuple, list))
            if several:
                self.assertEqual(len(got), len(want), text)
            for one, other in zip(want, got) if several else [(want, got)]:
                if hasattr(other, "_session"):
                    lazy.append(other)
                    wanted.append((text, one))
                elif isinstance(other, np.ndarray):
                    self.assertEqual(other.dtype, one.dtype, text)
                    np.testing.assert_array_equal(other, one, text)
                else:
                    self.assertEqual(one, other, text)
        for (text, want), got in zip(wanted, self.t.compute(*lazy)):
            want = np.asarray(want)
            self.assertEqual(got.shape, want.shape, text)
            size = min(got.itemsize, want.itemsize)
            if got.dtype != want.dtype:
                # NumPy rounds integers to floats. The type of its quantiles depends on that of q,
                # and on whether the result has axes.
                if not re.match("floor |ceil |trunc |fix |(nan)?(quantile|percentile) ", text):
                    self.assertIn((want.dtype.name, got.dtype.name), WIDER, text)
                # NumPy's results have wrapped in their narrower type, so the client's results are
                # cast to that type, which wraps them too.
                got = got.astype(want.dtype)
            if text.startswith(("empty_like ", "partition ", "argpartition ")):
                continue  # NumPy's elements, or their order, are arbitrary.
            if want.dtype.kind in "biu":
                np.testing.assert_array_equal(got, want, err_msg=text)
            else:
                # Half a unit of f16 in each of a few steps. NumPy's own rounding of sums is equally
                # large.
                eps = {2: 4e-3, 4: 1e-5}.get(size, 1e-12)
                large = 2.0**63 if " of i8" in text else 2.0**31 if "cumsum of i4" in text else 1
                least = eps * large
                np.testing.assert_allclose(got, want, eps, least, err_msg=text)
        return served

    def calls_of(self, function):
        """Yields (text, call) for the function, with each value of each parameter by name and by
        position."""
        taken = inspect.signature(_numpy._OF_C.get(function, function)).parameters.values()
        positional = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = [p for p in taken if p.kind is p.KEYWORD_ONLY]
        if any(p.kind is p.VAR_POSITIONAL for p in taken):
            return [("", function)]
        required = [p for p in positional[1:] if p.default is p.empty]
        calls = []

        def add(text, args, options):
            def call(a):
                of = [value(a) if callable(value) else value for value in args]
                named = {k: value(a) if callable(value) else value for k, value in options.items()}
                return function(a, *of, **named)

            calls.append((text, call))

        for base in itertools.product(*(VALUES[p.name] for p in required)):
            add(f"{base}", base, {})
        base = [VALUES[p.name][0] for p in required]
        if _numpy._OF_C.get(function) is None:
            for p in positional[1 + len(required) :] + by_name:
                for value in VALUES[p.name]:
                    add(f"{p.name}={value}", base, {p.name: value})
        optional = positional[1 + len(required) :]
        for i, p in enumerate(optional):
            defaults = [q.default for q in optional[:i]]
            if any(one is _functions.MISSING for one in defaults):
                defaults = [(lambda a: a)] * i
            for value in VALUES[p.name]:
                add(f"{p.name} at {i + len(required) + 1}: {value}", [*base, *defaults, value], {})
        return calls

    def test_arguments(self):
        served = 0
        # tests/python_linalg_test.py compares decompositions, whose signs are arbitrary.
        for function in [one for one in _functions.FUNCTIONS if one not in _linalg.LINALG]:
            name = function.__name__
            for dtype in TYPES:
                cases = []
                for make in (array_of, special_of) if dtype[0] == "f" else (array_of,):
                    a = make(dtype)
                    if "ile" in name and dtype[0] in "iu":
                        a = a.clip(0, 9)  # Differences of NumPy's integers may wrap.
                    if function in SQUARE:
                        a = np.concatenate([a, a[:1]])
                    x = self.t.put(a)
                    for text, call in self.calls_of(function):
                        if make is special_of and re.search("dtype.*[iu?]", text):
                            continue  # NumPy casts NaN arbitrarily.
                        if make is special_of and re.search(r"ord.*\b(2|nuc)$", text):
                            continue  # Matrices with NaN have no singular values.
                        if dtype[0] in "iu" and re.search("decimals.*-1", text):
                            continue  # NumPy casts numbers out of range arbitrarily.
                        if name == "histogram" and dtype[0] == "i" and "weights" in text:
                            continue  # NumPy sums them as floats, out of their range.
                        between = r"\(\)$" + r"|\[0, 0.5\]|hazen" * name.startswith("nan")
                        if make is special_of and "ile" in name and re.search(between, text):
                            continue  # NumPy interpolates between an infinity and itself.
                        with self.subTest(name, dtype=dtype, call=text):
                            case = f"{name} of {dtype} with {text}"
                            cases.append((case, *self.both(call, a, x)))
                with self.subTest(name, dtype=dtype):
                    served += self.settle(cases)
        self.assertGreater(served, 5000)

    def test_parameters_have_numpys_names(self):
        for function, call in _functions.FUNCTIONS.items():
            theirs = set(inspect.signature(_numpy._OF_C.get(function, function)).parameters)
            theirs |= {_numpy._SAME.get(name, name) for name in theirs}
            if not hasattr(call, "names"):
                ours = inspect.signature(call).parameters.values()
                missing = {p.name for p in ours if p.default is p.empty} - theirs
                self.assertFalse(missing, f"{function}: {missing}")

    def test_ufuncs(self):
        for ufunc in (*_ufuncs.UFUNCS, *_ufuncs.PAIRS):
            if ufunc.signature:
                continue
            for dtype in TYPES:
                a = array_of(dtype)
                x = self.t.put(a)
                hows = [{}, {"out": None}, {"where": True}, {"where": a > 0}, {"subok": False}]
                hows += [{"dtype": wanted} for wanted in TYPES]
                hows += [{"dtype": wanted, "casting": how} for wanted in ("f4", "i4", "u1")
                         for how in ("no", "safe", "same_kind", "unsafe")]
                cases = []
                for how in hows:
                    second = [a, 3] if ufunc.nin == 2 else [None]
                    if ufunc is np.power and a.dtype.kind == "i" or ufunc is np.power and how:
                        second = [3]  # The client truncates negative powers of integers.
                    for other in second:
                        def call(one):
                            both = (one,) if other is None else (one, one if other is a else other)
                            return ufunc(*both, **how)
                        case = f"{ufunc.__name__} of {dtype}, {other!r} with {how}"
                        cases.append((case, *self.both(call, a, x)))
                with self.subTest(ufunc.__name__, dtype=dtype):
                    self.settle(cases)

    def test_methods_of_ufuncs(self):
        options = {
            "reduce": {"axis": (0, None, (0, 1), -1), "dtype": TYPES, "keepdims": (True,),
                       "initial": (2,), "out": (None,)},
            "accumulate": {"axis": (0, 1, -1, 2, None, (0, 1), (1,)), "dtype": TYPES,
                           "out": (None,)}}
        by_position = {"reduce": (1, None, None, True), "accumulate": (1, None)}
        served = 0
        for ufunc, dtype, method in itertools.product(_ufuncs.REDUCTIONS, TYPES, options):
            a, call = array_of(dtype), getattr(ufunc, method)
            x, cases = self.t.put(a), []
            calls = [(f"{name}={value}", lambda a, how=how: call(a, **how))
                     for name, values in options[method].items() for value in values
                     for how in ({name: value},)]
            calls += [("by position", lambda a: call(a, *by_position[method])),
                      ("a number", lambda a: call(a[0, 0]))]
            for how, attempt in calls:
                case = f"{ufunc.__name__}.{method} of {dtype} with {how}"
                cases.append((case, *self.both(attempt, a, x)))
            with self.subTest(ufunc.__name__, dtype=dtype, method=method):
                served += self.settle(cases)
        self.assertGreater(served, 800)

    def test_methods(self):
        """Parameters of array methods have NumPy's positions."""
        calls = (
            lambda a: a.sum(0, "f8", None, True), lambda a: a.prod(0, None, None, True, 2),
            lambda a: a.mean(0, "f4"), lambda a: a.std(0, None, None, 1, True),
            lambda a: a.var(0, "f8", None, 1), lambda a: a.max(0, None, True, 3),
            lambda a: a.min(1, None, True), lambda a: a.argmax(0, None, keepdims=True),
            lambda a: a.all(0, keepdims=True), lambda a: a.any(keepdims=True), lambda a: a.clip(0),
            lambda a: a.clip(max=1), lambda a: a.clip(min=1), lambda a: a.clip(0, 2, None),
            lambda a: a.round(0, None), lambda a: a.repeat(2, 1), lambda a: a.diagonal(1, 1, 0),
            lambda a: a.trace(0, 0, 1, "f8"), lambda a: a.ptp(0, None, True),
            lambda a: a.reshape((3, 2), order="C"), lambda a: a.reshape(3, 2),
            lambda a: a.ravel("C"),
            lambda a: a.flatten("C"), lambda a: a.astype("f4", copy=False), lambda a: a.conj(),
            lambda a: a.astype("f4", "K", "unsafe"), lambda a: a.swapaxes(0, 1), lambda a: a.real,
            lambda a: a.dot(np.ones(3), None), lambda a: a.squeeze(0), lambda a: a.item(1),
            lambda a: a.item(1, 2), lambda a: a.item((0, -1)), lambda a: a.sum(0, True),
            lambda a: a.argsort(0, "stable"), lambda a: a.argsort(None), lambda a: a.imag,
            lambda a: a[0].searchsorted(1.5, "right"),
            lambda a: a[1].searchsorted([9, 4], sorter=[0, 1, 2]),
            lambda a: a.cumsum(0, "f8", None), lambda a: a.cumprod(1, None), lambda a: a.cumsum(),
            lambda a: a.transpose(1, 0), lambda a: a.sum(axis=()), lambda a: a.reshape(True, -1),
        )
        for dtype in ("f4", "f8", "i4", "u1"):
            a = np.arange(6).reshape(2, 3).astype(dtype)
            x = self.t.put(a)
            with self.subTest(dtype=dtype):
                self.settle([(f"call {i}", *self.both(call, a, x)) for i, call in enumerate(calls)])


if __name__ == "__main__":
    np._set_promotion_state("weak") if hasattr(np, "_set_promotion_state") else None
    python_outsider.main("__main__")
