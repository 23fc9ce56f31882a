#!/usr/bin/env python3
"""A typed program that uses fifty functions of the Python package. `./dev lint` checks it with
mypy --strict, and python_package_test runs it.

usage: typed_example.py ADDRESS"""

import sys
from typing import List, Tuple

import numpy as np
import numpy.typing as npt
import tessera as ts

Floats = npt.NDArray[np.float64]


def standardised(x: ts.Array) -> ts.Expr:
    """Returns x with columns of mean 0 and deviation 1."""
    return (x - x.mean(axis=0)) / x.std(axis=0)


def shapes(x: ts.Array) -> List[ts.Expr]:
    """Returns other forms of the 24 elements of x."""
    grid = x.reshape(2, 3, 4)
    return [grid.transpose(2, 0, 1), grid.swapaxes(0, 2), grid.mT, x.ravel(), x.T.flatten(),
            x[0:1].squeeze(axis=0), x[0].broadcast_to((5, 4)), x.diagonal(), x.repeat(2, axis=1),
            x.take([3, 0], axis=0), x.compress([True, False, True], axis=0)]


def reductions(x: ts.Array) -> List[ts.Expr]:
    return [x.sum(axis=0), x.prod(axis=1), x.min(), x.max(axis=1, keepdims=True), x.argmin(),
            x.argmax(axis=0), x.mean(dtype="f64"), x.var(ddof=1), x.std(), x.ptp(axis=0),
            (x > 1).all(axis=1), (x > 1).any(), x.trace(), ts.norm(x, axis=1), ts.sum_squares(x)]


def others(x: ts.Array, labels: npt.NDArray[np.int64]) -> List[ts.Expr]:
    values, places = x.topk(2)
    return [values, places, x.cumsum(axis=0), x.cumprod(axis=1), x.argsort(axis=0), ts.sort(x),
            ts.argsort(x, axis=0), ts.scan(x, "max", axis=1), ts.window_sum(x.ravel(), 3),
            ts.sum_by_label(x, labels, 3), x[0].searchsorted([0.5, 1.5]), x.clip(0, 1), x.round(1),
            x.astype("f32").astype("i32"), ts.fma(x, x, 1.0), abs(-x), x**2 // 0.5 % 3,
            (x >= 0) & ~(x == 1)]


def products(x: ts.Array) -> Tuple[ts.Expr, ts.Expr, ts.Expr, ts.Expr]:
    return x @ x.T, ts.matmul(x.T, x), x[0].dot(x[1]), ts.vecdot(x, x)


def main(address: str) -> None:
    rows: Floats = np.random.default_rng(1).random((6, 4)) * 3
    with ts.connect(address, timeout=60) as t, t.scope("1m") as scope:
        x: ts.Array = scope.put(rows, name="rows", replace=True)
        assert (x.shape, x.ndim, x.size, x.nbytes) == ((6, 4), 2, 24, 192)
        small: Floats = t.compute(standardised(x))[0]
        assert np.allclose(small, (rows - rows.mean(0)) / rows.std(0))
        square: ts.Expr = products(x)[0]
        assert np.allclose(square.numpy(), rows @ rows.T)
        labels = np.array([0, 1, 2, 0, 1, 2])
        results = t.compute(*shapes(x), *reductions(x), *others(x, labels), *products(x))
        assert np.allclose(results[0], rows.reshape(2, 3, 4).transpose(2, 0, 1))
        kept: List[ts.Array] = t.keep(x.sum(axis=1), x.max(axis=1))
        saved: ts.Array = (x * 2).save("twice", replace=True)
        copy: ts.Array = saved.copy("copy", replace=True)
        total: float = float(kept[0].sum())
        assert np.isclose(total, rows.sum()) and np.isclose(saved.sum().item(), 2 * total)
        names = [array.name for array in t.list()]
        assert {"rows", "twice", "copy"} <= set(names), names
        copy.delete()
        t.delete("twice")
        print(f"{len(results)} results, device {x.device}, {square.explain()}")


if __name__ == "__main__":
    main(sys.argv[1])
