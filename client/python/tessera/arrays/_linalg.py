"""NumPy's decompositions of matrices, and what is computed from them. A decomposition is one step.
Its result has all parts as rows of one array, and the parts are views of this result. Parameters
have NumPy's names, because arguments are passed by name.
"""

import inspect
from typing import Any, Callable, Dict, NamedTuple, Tuple

import numpy as np

from ..graph import _ops
from ..graph._views import index_of, size_of
from ..wire._errors import BadMatrix, Unsupported
from ._manipulation import add, flat


class EighResult(NamedTuple):
    """The result of np.linalg.eigh."""

    eigenvalues: Any
    eigenvectors: Any


class QRResult(NamedTuple):
    """The result of np.linalg.qr."""

    Q: Any
    R: Any


class SlogdetResult(NamedTuple):
    """The result of np.linalg.slogdet."""

    sign: Any
    logabsdet: Any


class SVDResult(NamedTuple):
    """The result of np.linalg.svd."""

    U: Any
    S: Any
    Vh: Any


def _step(function: str, a: Any, *others: Any) -> Any:
    """Returns the result of a LinalgFunction for arrays."""
    return a._make(_ops.linalg(function, a._term(), *(other._term() for other in others)))


def _symmetric(a: Any) -> Any:
    """Returns symmetric matrices that have the elements of `a` on and below their diagonals."""
    _ops.check_matrices(a._term())
    below: Any = np.tril(a, -1)
    return np.tril(a) + below.mT


# --- equations, inverses and determinants


_VECTORS_HAVE_ONE_AXIS = int(np.__version__.split(".")[0]) > 1  # Since NumPy 2.


def _solve(a: Any, b: Any) -> Any:
    b = a._lifted(b, "np.linalg.solve")
    of_vectors = b.ndim == (1 if _VECTORS_HAVE_ONE_AXIS else a.ndim - 1)
    return _step("solve", a, b[..., None])[..., 0] if of_vectors else _step("solve", a, b)


def inv(a: Any) -> Any:
    return _step("inverse", a)


def _slogdet(a: Any) -> SlogdetResult:
    found = _step("determinant", a)
    return SlogdetResult(found[..., 0], found[..., 1])


def _det(a: Any) -> Any:
    sign, logarithm = _slogdet(a)
    return sign * np.exp(logarithm)


def _tensorinv(a: Any, ind: int = 2) -> Any:
    if index_of(ind, "ind") <= 0:
        raise ValueError("Invalid ind argument.")
    left, right = a.shape[:ind], a.shape[ind:]
    return inv(a.reshape(size_of(right), -1)).reshape(right + left)


def _tensorsolve(a: Any, b: Any, axes: Any = None) -> Any:
    b = a._lifted(b, "np.linalg.tensorsolve")
    order = list(range(a.ndim))
    for axis in axes or ():
        order.remove(axis)
        order.append(axis)
    a = a.transpose(order)
    shape = a.shape[-(a.ndim - b.ndim) :]
    size = size_of(shape)
    if a.size != size**2:
        raise BadMatrix(f"an array of shape {a.shape} is no square matrix with columns {b.shape}")
    return _solve(a.reshape(size, size), flat(b)).reshape(shape)


# --- decompositions


def _cholesky(a: Any, upper: bool = False) -> Any:
    return _step("cholesky", a.mT).mT if upper else _step("cholesky", a)


def _eigh(a: Any, UPLO: str = "L") -> EighResult:
    if UPLO.upper() not in ("L", "U"):
        raise ValueError("UPLO argument must be 'L' or 'U'")
    # The server reads the lower triangles.
    found = _step("eigh", a.mT if UPLO.upper() == "U" and a.ndim > 1 else a)
    return EighResult(found[..., 0, :], found[..., 1:, :])


def _qr(a: Any, mode: str = "reduced") -> Any:
    found = _step("qr", a)
    m, n = a.shape[-2:]
    r = found[..., m:, :].mT
    if mode == "r":
        return r
    if mode != "reduced" and (mode != "complete" or m > n):
        if mode not in ("complete", "raw", "full", "f", "economic", "e"):
            raise ValueError(f"Unrecognized mode '{mode}'")
        raise Unsupported(f"the server does not compute mode={mode!r}: use mode='reduced'")
    return QRResult(found[..., :m, :], r)


def _svd(
    a: Any, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False
) -> Any:
    found = _step("svd", _symmetric(a) if hermitian else a)
    m, n = a.shape[-2:]
    s = found[..., m, :]
    if not compute_uv:
        return s
    if full_matrices and m != n:
        raise Unsupported(
            f"the server does not compute full_matrices=True of shape {a.shape}: use"
            " full_matrices=False, which gives all singular values"
        )
    return SVDResult(found[..., :m, :], s, found[..., m + 1 :, :].mT)


def singular_values(x: Any, hermitian: bool = False) -> Any:
    return _svd(x, False, False, hermitian)


# --- functions of singular values


def _thresholds(value: Any) -> Any:
    """Returns a number, or one number for each matrix, with an axis for the singular values."""
    return (value if hasattr(value, "_session") else np.asarray(value))[..., None]


def _inverses(s: Any, limit: Any) -> Any:
    """Returns the inverses of the singular values above a limit, and 0 for the others."""
    return np.where(s > limit, 1 / s, 0.0)


def _matrix_rank(A: Any, tol: Any = None, hermitian: bool = False, rtol: Any = None) -> Any:
    if A.ndim < 2:
        return (A != 0).any().astype("i8")
    if tol is not None and rtol is not None:
        raise ValueError("`tol` and `rtol` can't be both set.")
    s = singular_values(A, hermitian)
    if tol is not None:
        limit = _thresholds(tol)
    else:
        limit = float(max(A.shape[-2:]) * np.finfo(s.dtype).eps)
        limit = s.max(-1, keepdims=True) * (limit if rtol is None else _thresholds(rtol))
    return (s > limit).sum(-1)


_NO_VALUE = np._NoValue  # type: ignore[attr-defined]
# NumPy decomposes in f64 for pinv and lstsq, whose default limits are too small for f32.


def _pinv(a: Any, rcond: Any = None, hermitian: bool = False, rtol: Any = _NO_VALUE) -> Any:
    if rcond is not None and rtol is not _NO_VALUE:
        raise ValueError("`rtol` and `rcond` can't be both set.")
    _ops.check_matrices(a._term(), False)
    if 0 in a.shape[-2:]:
        return a.mT
    own = _ops.matrix_dtype(a._term())
    if rcond is None:
        rcond = 1e-15 if rtol is _NO_VALUE else rtol
    if rcond is None:
        rcond = max(a.shape[-2:]) * np.finfo(own).eps
    u, s, vh = _svd(_symmetric(a).astype("f8") if hermitian else a.astype("f8"), False)
    inverses = _inverses(s, _thresholds(rcond) * s[..., :1])
    return (vh.mT @ (inverses[..., None] * u.mT)).astype(own)


_RCOND = inspect.signature(np.linalg.lstsq).parameters["rcond"].default  # "warn" in NumPy 1: -1.


def _lstsq(a: Any, b: Any, rcond: Any = _RCOND) -> Tuple[Any, Any, Any, Any]:
    """Returns (solution, residuals, rank, singular values). The residuals do not depend on the
    rank, which only the server knows."""
    b = a._lifted(b, "np.linalg.lstsq")
    right = b[:, None] if b.ndim == 1 else b
    if a.ndim != 2 or right.ndim != 2 or right.shape[0] != a.shape[0]:
        raise BadMatrix(f"least squares take matrices that fit, not shapes {a.shape}, {b.shape}")
    own = _ops.matrix_dtype(a._term(), b._term())
    a, right = a.astype("f8"), right.astype("f8")
    eps = float(np.finfo("f8").eps)
    if rcond is None:
        rcond = eps * max(a.shape)
    # For other numbers, LAPACK takes its own epsilon.
    limit = float(rcond) if rcond != "warn" and 0 < rcond < 1 else eps / 2
    u, s, vh = _svd(a, False)
    limit = s[:1] * limit
    x = vh.T @ (_inverses(s, limit)[:, None] * (u.T @ right))
    left = ((right - a @ x) ** 2).sum(0) if a.shape[0] > a.shape[1] else a._like(np.empty(0))
    x = x[:, 0] if b.ndim == 1 else x
    return x.astype(own), left.astype(own), (s > limit).sum(), s.astype(own)


def _cond(x: Any, p: Any = None) -> Any:
    if 0 in x.shape[-2:]:
        raise BadMatrix("cond is not defined on empty arrays")
    if p not in (None, 2, -2):
        inverse = inv(x)
        return np.linalg.norm(x, p, (-2, -1)) * np.linalg.norm(inverse, p, (-2, -1))
    s = singular_values(x)
    found = s[..., -1] / s[..., 0] if p == -2 else s[..., 0] / s[..., -1]
    return np.where(found == found, found, np.inf)  # Both are 0 if the matrix is.


LINALG: Dict[Any, Callable[..., Any]] = {}
add(
    LINALG,
    np.linalg,
    {
        "solve": _solve,
        "inv": inv,
        "slogdet": _slogdet,
        "det": _det,
        "tensorinv": _tensorinv,
        "tensorsolve": _tensorsolve,
        "cholesky": _cholesky,
        "eigh": _eigh,
        "eigvalsh": lambda a, UPLO="L": _eigh(a, UPLO).eigenvalues,
        "qr": _qr,
        "svd": _svd,
        "svdvals": lambda x: singular_values(x),
        "matrix_rank": _matrix_rank,
        "pinv": _pinv,
        "lstsq": _lstsq,
        "cond": _cond,
    },
)
