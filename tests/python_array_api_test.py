#!/usr/bin/env python3
"""The functions of the Python array API standard 2024.12: those that work, against NumPy on arrays
that hypothesis draws, and those that do not, each refused. docs/python.md has the same table.

usage: python_array_api_test.py --server build/bin/tessera-server [unittest arguments]
"""

import re

import numpy as np
import outsider as o
import python_outsider
import tessera as ts
from drawn import bounded, drawn, one_of, seeds, shapes

DTYPES = ("f4", "f8", "i4", "i8")
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
        " vector_norm"
    ),
    "fft": (
        "fft fftfreq fftn fftshift hfft ifft ifftn ifftshift ihfft irfft irfftn rfft rfftfreq rfftn"
    ),
    "statistics": "cumulative_prod cumulative_sum max mean min prod std sum var",
    "searching": "argmax argmin count_nonzero nonzero searchsorted where",
    "utilities": "all any diff",
    "manipulation": (
        "broadcast_arrays broadcast_to concat expand_dims flip moveaxis permute_dims repeat reshape"
        " roll squeeze stack tile unstack"
    ),
    "creation": (
        "arange asarray empty empty_like eye from_dlpack full full_like linspace meshgrid ones"
        " ones_like tril triu zeros zeros_like"
    ),
    "data types": "astype can_cast finfo iinfo isdtype result_type",
    "sets": "unique_all unique_counts unique_inverse unique_values",
    "sorting": "argsort sort",
    "indexing": "take take_along_axis",
}

def newer(name, other):
    """NumPy's function, and on older versions than 2 another way to write it."""
    return getattr(np, name, other)


def on_server(x, array):
    """An array of NumPy's where x is."""
    return x._session.put(array) if hasattr(x, "_session") else array


def from_nothing(make):
    return lambda x, y: on_server(x, make())


def has_kind(dtype):
    """np.isdtype of NumPy 2."""
    return getattr(np, "isdtype", lambda dtype, _: dtype.kind == "i")(dtype, "integral")


def matrices(call):
    """A case of matrices: of the last two axes of the first array, as [n, m]."""
    return lambda x, y: call(x.reshape(-1, x.shape[-1]))


# Elementwise functions of one array, of two, and what is no function of NumPy by that name.
RENAMED = {
    "abs": np.abs, "bitwise_invert": lambda x: ~(x > 0), "conj": np.conjugate,
    "pow": lambda x, y: np.power(abs(x % 4) + 1, abs(y % 4)), "divide": np.true_divide,
    "clip": lambda x, y: np.clip(x, -2, 3), "round": np.round, "real": np.real,
    "reciprocal": lambda x: np.reciprocal(x * 1.0), "sqrt": lambda x: np.sqrt(abs(x)),
    "log": lambda x: np.log(abs(x) + 1), "floor": lambda x: np.floor(x * 0.5),
    "ceil": lambda x: np.ceil(x * 0.5), "trunc": lambda x: np.trunc(x * 0.5),
    "bitwise_and": lambda x, y: (x > 0) & (y > 0),
    "bitwise_or": lambda x, y: np.bitwise_or(x > 0, y > 0),
    "bitwise_xor": lambda x, y: (x > 0) ^ (y > 0),
}
ONE = (
    "abs bitwise_invert ceil conj exp floor isfinite isinf isnan log logical_not negative positive"
    " real reciprocal round sign sqrt square tanh trunc"
).split()
TWO = (
    "add bitwise_and bitwise_or bitwise_xor clip divide equal floor_divide greater greater_equal"
    " less less_equal logical_and logical_or logical_xor maximum minimum multiply not_equal pow"
    " remainder subtract"
).split()


def elementwise(name):
    call = RENAMED.get(name, getattr(np, name, None))
    return call if name in TWO else lambda x, y: call(x)


WORKS = {
    "elementwise": {name: elementwise(name) for name in sorted(ONE + TWO)},
    "linear algebra": {
        "matmul": lambda x, y: np.matmul(x.reshape(-1, x.shape[-1]), x.reshape(x.shape[-1], -1)),
        "matrix_transpose": matrices(newer("matrix_transpose", lambda m: getattr(m, "mT", m.T))),
        "tensordot": lambda x, y: np.tensordot(x, x, ([0], [0])),
        "vecdot": lambda x, y: ts.vecdot(x, x) if hasattr(x, "_session") else (x * x).sum(-1),
    },
    "linalg": {
        "diagonal": matrices(np.diagonal),
        "matrix_norm": matrices(np.linalg.norm),
        "matrix_power": lambda x, y: np.linalg.matrix_power(np.outer(x, x)[:2, :2], 3),
        "outer": lambda x, y: np.outer(x, y),
        "matmul": matrices(lambda m: getattr(np.linalg, "matmul", np.matmul)(m, m.T)),
        "matrix_transpose": matrices(getattr(np.linalg, "matrix_transpose", np.transpose)),
        "tensordot": lambda x, y: getattr(np.linalg, "tensordot", np.tensordot)(x, x, axes=1)
        if x.ndim == 2 and x.shape[0] == x.shape[1]
        else np.tensordot(x, x, axes=x.ndim),
        "vecdot": lambda x, y: getattr(np.linalg, "vecdot", ts.vecdot)(x, x)
        if hasattr(x, "_session")
        else (x * x).sum(-1),
        "trace": matrices(np.trace),
        "vector_norm": lambda x, y: np.linalg.norm(x, axis=-1),
    },
    "statistics": {
        name: (lambda call: lambda x, y: call(x, axis=-1, keepdims=True))(getattr(np, name))
        for name in "max mean min prod std sum var".split()
    },
    "searching": {
        "argmax": lambda x, y: np.argmax(x, axis=0), "argmin": lambda x, y: np.argmin(x),
        "count_nonzero": lambda x, y: np.count_nonzero(x > 0, axis=-1),
        "where": lambda x, y: np.where(x > y, x, y),
    },
    "utilities": {
        "all": lambda x, y: np.all(x > -2, axis=-1),
        "any": lambda x, y: np.any(x, axis=0, keepdims=True),
        "diff": lambda x, y: np.diff(x, axis=0),
    },
    "manipulation": {
        "broadcast_arrays": lambda x, y: np.broadcast_arrays(x, y)[1],
        "broadcast_to": lambda x, y: np.broadcast_to(x, (2, *x.shape)),
        "expand_dims": lambda x, y: np.expand_dims(x, (0, -1)),
        "flip": lambda x, y: np.flip(x, axis=-1),
        "moveaxis": lambda x, y: np.moveaxis(x, 0, -1),
        "permute_dims": lambda x, y: newer("permute_dims", np.transpose)(x, range(x.ndim)[::-1]),
        "repeat": lambda x, y: np.repeat(x, 3, axis=-1),
        "reshape": lambda x, y: np.reshape(x.T, (-1, 1)),
        "squeeze": lambda x, y: np.squeeze(x[:1], 0),
        "tile": lambda x, y: np.tile(x, (2, 1, 3)),
        "unstack": lambda x, y: list(x)[-1],
    },
    "creation": {
        "arange": from_nothing(lambda: np.arange(5)),
        "asarray": from_nothing(lambda: np.asarray([1.0, 2.0])),
        "empty": from_nothing(lambda: np.empty((2, 0))), "eye": from_nothing(lambda: np.eye(3)),
        "from_dlpack": lambda x, y: on_server(x, np.from_dlpack(x)),
        "full": from_nothing(lambda: np.full((2, 3), 7)),
        "linspace": from_nothing(lambda: np.linspace(0, 1, 5)),
        "ones": from_nothing(lambda: np.ones(3)), "zeros": from_nothing(lambda: np.zeros(3)),
        "full_like": lambda x, y: np.full_like(x, 7), "ones_like": lambda x, y: np.ones_like(x) + x,
        "zeros_like": lambda x, y: np.zeros_like(x),
    },
    "fft": {
        "fftfreq": from_nothing(lambda: np.fft.fftfreq(5)),
        "rfftfreq": from_nothing(lambda: np.fft.rfftfreq(5)),
    },
    "data types": {
        "astype": lambda x, y: x.astype("f4"),
        "can_cast": lambda x, y: x + int(np.can_cast(x, "f8")),
        "finfo": lambda x, y: x + np.finfo(np.result_type(x, "f4")).bits,
        "iinfo": lambda x, y: x + np.iinfo(x.astype("i4").dtype).bits,
        "isdtype": lambda x, y: x + int(has_kind(x.dtype)),
        "result_type": lambda x, y: x.astype(np.result_type(x, y)),
    },
}
REFUSED = {
    "elementwise": (
        "acos acosh asin asinh atan atan2 atanh bitwise_left_shift bitwise_right_shift copysign cos"
        " cosh expm1 hypot imag log10 log1p log2 logaddexp nextafter signbit sin sinh tan"
    ),
    "linalg": (
        "cholesky cross det eigh eigvalsh inv matrix_rank pinv qr slogdet solve svd svdvals"
    ),
    "statistics": "cumulative_prod cumulative_sum",
    "searching": "nonzero searchsorted",
    "sets": "unique_all unique_counts unique_inverse unique_values",
    "sorting": "argsort sort",
    "manipulation": "concat roll stack",
    "indexing": "take take_along_axis",
    "creation": "empty_like meshgrid tril triu",
    "fft": "fft fftn fftshift hfft ifft ifftn ifftshift ihfft irfft irfftn rfft rfftn",
}
# Where NumPy 1 has another name, or the case needs other arguments.
OF_NUMPY = {
    "atan2": lambda x: np.arctan2(x, x),
    **{name: getattr(np, "arc" + name[1:]) for name in "acos acosh asin asinh atan atanh".split()},
    "bitwise_left_shift": lambda x: x << 1,
    "bitwise_right_shift": lambda x: np.right_shift(x, 1),
    "concat": lambda x: np.concatenate([x, x]),
    "cumulative_prod": lambda x: np.cumprod(x),
    "cumulative_sum": lambda x: np.cumsum(x),
    "cross": lambda x: np.cross(x, x),
    **{name: getattr(np.fft, name) for name in STANDARD["fft"].split() if "freq" not in name},
    "meshgrid": lambda x: np.meshgrid(x, x),
    "roll": lambda x: np.roll(x, 1),
    "searchsorted": lambda x: np.searchsorted(x, x),
    "solve": lambda x: np.linalg.solve(x, x),
    "stack": lambda x: np.stack([x, x]),
    "svdvals": lambda x: np.linalg.svd(x),
    "take": lambda x: np.take(x, [0]),
    "take_along_axis": lambda x: np.take_along_axis(x, x, 0),
    **{
        name: lambda x: np.unique(x)
        for name in "unique_all unique_counts unique_inverse unique_values".split()
    },
}
OF_TWO = ("copysign", "hypot", "logaddexp", "nextafter")


def refused(name, x):
    if name in OF_NUMPY:
        return OF_NUMPY[name](x)
    call = getattr(np.linalg, name, None) or getattr(np, name)
    return call(x, x) if name in OF_TWO else call(x)


class ArrayApiTest(python_outsider.Case):
    def check(self, dtype, shape, seed):
        rng = np.random.default_rng(seed)
        a, b = (rng.integers(-4, 5, shape).astype(dtype) for _ in range(2))
        if a.dtype.kind == "f":
            a, b = a / 2, b / 2 + 0.25
        x, y = self.t.put(a), self.t.put(b)
        cases = {(part, name): call for part in WORKS for name, call in WORKS[part].items()}
        with np.errstate(all="ignore"):
            expected = {name: np.asarray(call(a, b)) for name, call in cases.items()}
        lazy = {name: call(x, y) for name, call in cases.items()}
        for (name, want), got in zip(expected.items(), self.t.compute(*lazy.values())):
            case = f"{name} of {dtype}{list(shape)}"
            self.assertEqual(got.shape, want.shape, case)
            self.assertEqual(got.dtype, want.dtype, case)
            eps = 1e-5 if "f4" in (dtype, want.dtype.str[1:]) else 1e-12
            np.testing.assert_allclose(got, want, rtol=eps, atol=eps, err_msg=case)

    @bounded(8)
    @drawn(one_of(DTYPES), shapes(2, 3), seeds)
    def test_what_works(self, dtype, shape, seed):
        self.check(dtype, shape, seed)

    def test_every_type(self):
        for dtype in DTYPES:
            self.check(dtype, (3, 4), 1)

    def test_what_does_not_is_refused_with_a_way_out(self):
        x = self.t.put(np.ones((3, 3)))
        for names in REFUSED.values():
            for name in names.split():
                with self.subTest(name), self.assertRaisesRegex(ts.Unsupported, r"server|\.numpy"):
                    refused(name, x)

    def test_arrays_from_nothing_are_put(self):
        x = self.t.put(np.ones(3))
        for name in ("arange", "asarray", "empty", "full", "ones", "zeros"):
            arguments = ([2], 0) if name == "full" else (3,)
            with self.subTest(name), self.assertRaisesRegex(ts.Unsupported, r"put\(\)"):
                getattr(np, name)(*arguments, like=x)

    def test_every_function_of_the_standard_is_here(self):
        found = {
            part: sorted([*WORKS.get(part, ()), *REFUSED.get(part, "").split()])
            for part in {*WORKS, *REFUSED}
        }
        self.assertEqual(found, {part: names.split() for part, names in STANDARD.items()})

    def test_the_table_of_the_documents(self):
        page = (o.ROOT / "docs" / "python.md").read_text(encoding="utf-8")
        section = page[page.index("## The array API standard") :]
        rows = re.findall(r"^\| ([a-z ]+) \| (.*?) \| (.*?) \|$", section.split("\n## ")[0], re.M)
        found = {part: [re.findall(r"`(\w+)`", cell) for cell in cells] for part, *cells in rows}
        for part in {*WORKS, *REFUSED}:
            with self.subTest(part):
                works, refuses = sorted(WORKS.get(part, ())), REFUSED.get(part, "").split()
                self.assertEqual(found.get(part), [works, refuses])
        self.assertEqual({*found} - {"part"}, {*STANDARD})


if __name__ == "__main__":
    python_outsider.main("__main__")
