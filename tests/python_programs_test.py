#!/usr/bin/env python3
"""Random NumPy programs on resident arrays, as people chain them: views, arithmetic, comparisons,
masks, reductions, products, NumPy functions. The same lines run on NumPy arrays, which give the
expected results."""

import math
import random

import numpy as np
import python_outsider
import tessera as ts

PROGRAMS = 150
STEPS = 14
DTYPES = ("f4", "f8", "f2", "i4", "i8")


class Value:
    """A resident array or expression together with the NumPy array, and the allowed difference
    relative to the largest element."""

    def __init__(self, lazy, array, text, slack=0.0):
        self.lazy, self.array, self.text, self.slack = lazy, np.asarray(array), text, slack

    def __repr__(self):
        return f"{self.text} {self.array.dtype}{list(self.array.shape)}"


def typed(*values):
    """Returns arrays of one type, promoted as in NumPy 2. NumPy 1 also considers the values of 0-d
    arrays."""
    dtype = np.result_type(*(v.array.dtype for v in values))
    return [v.array.astype(dtype) for v in values]


def size(value):
    return float(np.max(np.abs(value.array.astype("f8")), initial=0))


class Program:
    def __init__(self, client, seed):
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.t = client
        self.values = []

    def pick(self, good=lambda value: True):
        found = [value for value in self.values if good(value)]
        return self.random.choice(found) if found else None

    def add(self, text, lazy, array, *of, more=0.0):
        array = np.asarray(array)
        assert isinstance(lazy, ts.Expr), (text, type(lazy))
        assert (lazy.shape, lazy.dtype) == (array.shape, array.dtype), (
            f"{text} of {of}: {lazy.shape} {lazy.dtype}, and {array.shape} {array.dtype} by NumPy")
        if array.dtype.kind == "f":
            finest = float(np.finfo(array.dtype).eps)
            limit = float(np.finfo(array.dtype).max) / 1e3
            if not np.isfinite(array).all() or size(Value(0, array, "")) > limit:
                return
            slack = sum(v.slack for v in of) * 4 + (more or 1) * finest
        elif array.dtype.kind == "i" and size(Value(0, array, "")) > 2**28:
            return
        else:
            slack = 0.0
            # Rounded values must not decide comparisons or casts to integers.
            if any(v.slack > 0 for v in of) and text not in ("astype", "shape"):
                if array.dtype.kind in "bi":
                    return
        if slack < 0.02:
            self.values.append(Value(lazy, array, text, slack))

    def start(self):
        for _ in range(3):
            shape = [self.random.randint(1, 6) for _ in range(self.random.randint(0, 3))]
            dtype = np.dtype(self.random.choice(DTYPES))
            array = self.numbers.integers(-6, 7, shape).astype(dtype)
            self.values.append(Value(self.t.put(array), array, "put"))
        mask = self.numbers.random(self.values[0].array.shape) < 0.5
        self.values.append(Value(self.t.put(mask), mask, "put"))
        a = self.numbers.integers(-4, 5, (4, 5)).astype(self.random.choice(("f4", "f8")))
        b = self.numbers.integers(-4, 5, (5, 3)).astype(a.dtype)
        for array in (a, b):
            self.values.append(Value(self.t.put(array), array, "put"))

    # --- operations of a line

    def view(self):
        v = self.pick(lambda v: v.array.ndim)
        if v is None:
            return
        key = []
        for extent in v.array.shape:
            kind = self.random.randrange(5)
            if kind == 0:
                key.append(self.random.randrange(-extent, extent) if extent else slice(None))
            elif kind == 1:
                key.append(slice(None, None, self.random.choice((-1, 2, -2))))
            elif kind == 2:
                key.append(slice(self.random.randint(0, extent), None))
            elif kind == 3:
                key += [None, slice(None)]
            else:
                key.append(slice(None))
        key = tuple(key[: self.random.randint(1, len(key))])
        if v.array[key].ndim <= 5:
            self.add("shape", v.lazy[key], v.array[key], v)

    def reshape(self):
        v = self.pick()
        ways = [lambda a: a.T, lambda a: a.reshape(-1), np.squeeze, np.flip]
        if v.array.ndim >= 2:
            ways.append(lambda a: np.swapaxes(a, 0, -1))
        if v.array.ndim < 4:
            ways.append(lambda a: np.expand_dims(a, 0))
            ways.append(lambda a: np.broadcast_to(a, (2, *a.shape)))
        way = self.random.choice(ways)
        self.add("shape", way(v.lazy), way(v.array), v)

    def pair(self, of_bool=False):
        a = self.pick(lambda v: (v.array.dtype.kind == "b") == of_bool)
        if a is None:
            return None

        def together(v):
            try:
                shape = np.broadcast_shapes(a.array.shape, v.array.shape)
            except ValueError:
                return False
            return (v.array.dtype.kind == "b") == of_bool and np.prod(shape, dtype=int) <= 2000

        b = self.pick(together)
        return None if b is None else (a, b)

    def arithmetic(self):
        found = self.pair()
        if found is None:
            return
        a, b = found
        x, y = typed(a, b)
        how = self.random.randrange(8)
        spread = 8.0
        if how == 0:
            total = x + y
            more = spread * (size(a) + size(b)) / max(float(np.max(np.abs(total), initial=0)), 1e-3)
            self.add("+", a.lazy + b.lazy, total, a, b, more=more)
        elif how == 1:
            self.add("*", a.lazy * b.lazy, x * y, a, b, more=spread)
        elif how == 2 and not (a.slack or b.slack):
            self.add("-", np.subtract(a.lazy, b.lazy), x - y, a, b, more=spread)
        elif how == 3:
            self.add("max", np.maximum(a.lazy, b.lazy), np.maximum(x, y), a, b)
        elif how == 4 and not (a.slack or b.slack) and (y != 0).all():
            self.add("/", a.lazy / b.lazy, x / y, a, b, more=spread)
        elif how == 5 and not (a.slack or b.slack) and (y != 0).all():
            self.add("%", a.lazy % b.lazy, x % y, a, b)
            self.add("//", a.lazy // b.lazy, x // y, a, b)
        elif how == 6:
            number = self.random.choice((2, 3, -1, 0.5)) if a.array.dtype.kind == "f" else 3
            want = (number * a.array + 1).astype(a.array.dtype)
            self.add("number", number * a.lazy + 1, want, a, more=spread)
        elif how == 7:
            self.add("neg", -a.lazy, -a.array, a)
            self.add("abs", abs(a.lazy), abs(a.array), a)

    def comparison(self):
        found = self.pair()
        if found is None or found[0].slack or found[1].slack:
            return
        a, b = found
        x, y = typed(a, b)
        name = self.random.choice(("less", "equal", "greater_equal", "not_equal"))
        self.add(name, getattr(np, name)(a.lazy, b.lazy), getattr(np, name)(x, y))
        self.add("number", a.lazy > 1, a.array > 1)

    def logic(self):
        found = self.pair(of_bool=True)
        if found is None:
            return
        a, b = found
        self.add("&", a.lazy & b.lazy, a.array & b.array)
        self.add("^", a.lazy ^ ~b.lazy, a.array ^ ~b.array)
        self.add("|", np.logical_or(a.lazy, b.lazy), a.array | b.array)

    def select(self):
        found = self.pair()
        mask = self.pick(lambda v: v.array.dtype.kind == "b")
        if found is None or mask is None:
            return
        a, b = found
        x, y = typed(a, b)
        try:
            want = np.where(mask.array, x, y)
        except ValueError:
            return
        if want.size <= 2000:
            self.add("where", np.where(mask.lazy, a.lazy, b.lazy), want, a, b)

    def cast(self):
        v = self.pick(lambda v: not v.slack)
        dtype = np.dtype(self.random.choice((*DTYPES, "bool")))
        if v is None or v.array.dtype.kind == "f" and dtype.kind == "i" and size(v) > 2**20:
            return
        with np.errstate(all="ignore"):
            self.add("astype", v.lazy.astype(dtype), v.array.astype(dtype), v)

    def reduction(self):
        v = self.pick(lambda v: v.array.size)
        if v is None:
            return
        axes = [axis for axis in range(v.array.ndim) if self.random.random() < 0.5]
        axis = self.random.choice((None, tuple(axes))) if axes else None
        keep = self.random.random() < 0.4
        name = self.random.choice(("sum", "mean", "max", "min", "any", "all", "var", "prod"))
        if v.slack and name in ("any", "all", "var", "prod"):
            return
        if v.array.dtype.kind == "b" and name == "var":
            return
        how = {"axis": axis, "keepdims": keep}
        wide = v.array.astype("f8") if v.array.dtype.kind == "f" else v.array
        want = getattr(np, name)(wide, **how)
        if v.array.dtype.kind == "f" and name not in ("any", "all"):
            want = want.astype(v.array.dtype)
        more = 8.0
        if name in ("sum", "mean"):
            most = size(v) * (v.array.size if name == "sum" else 1)
            more = 8 * most / max(float(np.max(np.abs(want.astype("f8")), initial=0)), 1e-3)
        self.add(name, getattr(v.lazy, name)(**how), want, v, more=more)
        self.add(name, getattr(np, name)(v.lazy, **how), want, v, more=more)

    def scan(self):
        v = self.pick(lambda v: v.array.ndim and not v.slack)
        if v is None:
            return
        ufunc = self.random.choice((np.add, np.minimum, np.maximum, np.logical_and, np.logical_or))
        axis = self.random.randrange(v.array.ndim)
        real = v.array.dtype.kind == "f"
        want = ufunc.accumulate(v.array.astype("f8") if real else v.array, axis)
        if want.dtype.kind == "f":
            want = want.astype(v.array.dtype)
        most = size(v) * v.array.shape[axis]
        more = 8 * most / max(float(np.max(np.abs(want.astype("f8")), initial=0)), 1e-3)
        self.add("accumulate", ufunc.accumulate(v.lazy, axis), want, v, more=more)

    def position(self):
        v = self.pick(lambda v: v.array.size and not v.slack and v.array.dtype.kind != "b")
        if v is None:
            return
        axis = self.random.choice((None, *range(v.array.ndim)))
        self.add("argmax", v.lazy.argmax(axis), v.array.argmax(axis))

    def product(self):
        floats = lambda v: (  # noqa: E731
            v.array.dtype.kind == "f" and v.array.ndim == 2 and not v.slack)
        a = self.pick(floats)
        b = a and self.pick(lambda v: floats(v) and v.array.shape[0] == a.array.shape[1])
        if b is None:
            return
        x, y = typed(a, b)
        want = (x.astype("f8") @ y.astype("f8")).astype(x.dtype)
        most = size(a) * size(b) * x.shape[1]
        more = 8 * most / max(float(np.max(np.abs(want.astype("f8")), initial=0)), 1e-3)
        self.add("@", a.lazy @ b.lazy, want, a, b, more=more)

    def take(self):
        v = self.pick(lambda v: v.array.ndim and v.array.size)
        if v is None:
            return
        axis = self.random.randrange(v.array.ndim)
        extent = v.array.shape[axis]
        at = np.array([self.random.randrange(-extent, extent) for _ in range(3)])
        places = self.t.put(at) if self.random.random() < 0.5 else at
        want = np.take(v.array, at, axis)
        self.values.append(Value(v.lazy.take(places, axis), want, f"take {v.text}", v.slack))

    def masked(self):
        v = self.pick(lambda v: v.array.ndim and v.array.size)
        if v is None:
            return
        of = v.array.shape[: self.random.randint(1, v.array.ndim)]
        mask = np.array([self.random.random() < 0.5 for _ in range(math.prod(of))]).reshape(of)
        where = self.t.put(mask) if self.random.random() < 0.5 else mask
        self.values.append(Value(v.lazy[where], v.array[mask], f"masked {v.text}", v.slack))

    def keep(self):
        v = self.pick()
        self.values.append(Value(v.lazy.save(), v.array, f"saved {v.text}", v.slack))

    LINES = (view, reshape, arithmetic, arithmetic, comparison, logic, select, cast, reduction,
             reduction, scan, position, product, take, masked, keep)

    def run(self):
        self.start()
        with np.errstate(all="ignore"):
            for _ in range(STEPS):
                self.random.choice(self.LINES)(self)
            some = self.random.sample(self.values, min(6, len(self.values)))
            alone = self.random.choice(self.values)
        for value, got in zip([*some, alone], [*self.t.compute(*(v.lazy for v in some)),
                                               alone.lazy.numpy()]):
            self.check(value, got)

    def check(self, value, got):
        assert (got.shape, got.dtype) == (value.array.shape, value.array.dtype), value
        if got.dtype.kind == "f":
            bound = value.slack * max(size(value), 1e-6) * 2
            np.testing.assert_allclose(got.astype("f8"), value.array.astype("f8"), rtol=0,
                                       atol=bound,
                                       err_msg=f"{value}\n{value.lazy.explain()}")
        else:
            np.testing.assert_array_equal(got, value.array, f"{value}\n{value.lazy.explain()}")


class ProgramsTest(python_outsider.Case):
    def test_random_programs(self):
        for seed in range(PROGRAMS):
            with self.subTest(seed=seed):
                Program(self.t, seed).run()

    def test_products_of_bytes_need_no_conversion(self):
        for dtype in ("i1", "u1"):
            numbers = np.random.default_rng(5).integers(0, 256, (3, 40, 70)).astype(dtype)
            x = self.t.put(numbers)
            product = x @ x.transpose(0, 2, 1)
            self.assertTrue(product.explain().startswith("one Matmul of 1 step"), product.explain())
            wide = numbers.astype("i4")
            want = wide @ wide.transpose(0, 2, 1)
            self.assertEqual(product.numpy().dtype, np.int32)
            np.testing.assert_array_equal(product.numpy(), want)
            np.testing.assert_array_equal((x[0] @ x[1, 0]).numpy(), wide[0] @ wide[1, 0])
            np.testing.assert_array_equal(
                ts.matmul(x, x.transpose(0, 2, 1), dtype="i8").numpy(), want)
            other = numbers[0].astype("u1" if dtype == "i1" else "i1")
            np.testing.assert_array_equal(
                (x @ self.t.put(other).T).numpy(), wide @ other.T.astype("i4"))

    def test_products_that_are_read_transposed(self):
        a = np.arange(9.0).reshape(3, 3)
        x = self.t.put(a)
        np.testing.assert_array_equal(((x @ x).T + 1).numpy(), (a @ a).T + 1)


if __name__ == "__main__":
    python_outsider.main(__name__)
