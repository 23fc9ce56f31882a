"""Random requests for operations, and a NumPy model that predicts how each of them ends.

A case is one request: its fields, and either the reasons for which the server refuses it or the
right result. Most cases are valid, and the others have one fault each. The model shares no code
with the server."""

import argparse
import collections
import math
import os
import random
import sys

import numpy as np

import outsider as o

F32, F64, F16, BF16, I32, I64, BOOL, U8, I8 = 1, 2, 3, 4, 5, 6, 7, 8, 9
DTYPES = (F32, F64, F16, BF16, I32, I64)
INTEGERS = (I32, I64)
BYTES = (BOOL, U8, I8)
SIZES = {F32: 4, F64: 8, F16: 2, BF16: 2, I32: 4, I64: 8, BOOL: 1, U8: 1, I8: 1}
# The Step field that holds the request of each method.
STEPS = {
    "Dot": "dot", "Reduce": "reduce", "Matmul": "matmul", "Add": "add", "WindowSum": "window_sum",
    "Map": "map", "TopK": "top_k", "Scan": "scan", "Sort": "sort", "Take": "take",
    "Select": "select", "Histogram": "histogram", "SearchSorted": "search_sorted",
    "SumByLabel": "sum_by_label", "Linalg": "linalg"}
# The reasons for each status code. All other reasons have INVALID_ARGUMENT.
REASONS = {
    "NOT_FOUND": "BUFFER_NOT_FOUND REGION_NOT_FOUND",
    "ALREADY_EXISTS": "BUFFER_EXISTS",
    "FAILED_PRECONDITION": "BUFFER_NOT_READY BUFFER_SEALED VERSION_MISMATCH VERSION_REQUIRED "
    "CHECKSUM_UNKNOWN STRATEGY_UNSUPPORTED OPERATION_TOO_LONG STEP_FAILED SOURCE_REFUSED",
    "DATA_LOSS": "BAD_CHECKSUM",
    "RESOURCE_EXHAUSTED": "SCRATCH_EXHAUSTED QUOTA_EXCEEDED HOST_MEMORY_EXHAUSTED "
    "GPU_MEMORY_EXHAUSTED TENANT_QUOTA_EXCEEDED",
    "PERMISSION_DENIED": "ROLE_TOO_SMALL SOURCE_NOT_ALLOWED",
    "UNAUTHENTICATED": "BAD_TOKEN"}
CODES = {reason: code for code, reasons in REASONS.items() for reason in reasons.split()}
EXTREMES = (-(2**63), -(2**62), -(2**31), -1, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1)
MULTIPLY_MIXED = ("cpu_naive", "cpu_cache_tiled", "naive", "tensor_i8")
BAD_NAMES = ["", "white space", "x" * 129, "\u00e4", "x\n", "x\0", "*", "\u2028"]


class Wrong(Exception):
    """The server's response differs from the model's."""


def check(condition, *what):
    if not condition:
        raise Wrong(" ".join(map(str, what)))


def check_end(outcome, reasons, ok):
    """Checks that a call ended with one of the reasons, or with OK. Returns whether it is OK."""
    if outcome.ok:
        check(ok, "OK, not", reasons)
        return True
    # Strategies for GPUs have requirements apart from types, which this file does not predict.
    needs_more = (outcome.reason == "STRATEGY_UNSUPPORTED"
                  and o.Program.device != "cpu"
                  and not outcome.metadata.get("needs", "dtype").startswith("dtype"))
    check(needs_more or outcome.reason in reasons, outcome, "is not", ("OK",) * ok + (*reasons,))
    check(outcome.code == CODES.get(outcome.reason, "INVALID_ARGUMENT"), outcome)
    check(outcome.domain == "tessera" and outcome.text, "no domain or no text:", outcome)
    return False


def take_arguments(seed=None):
    """Takes the arguments of a random suite from the command line, and prints the seed."""
    parser = argparse.ArgumentParser(add_help=False)
    seconds = float(os.environ.get("TESSERA_RANDOM_SECONDS", "5"))
    parser.add_argument("--seconds", type=float, default=seconds)
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--callers", type=int, default=12)
    arguments, sys.argv[1:] = parser.parse_known_args()
    print(f"seed {arguments.seed}", flush=True)
    return arguments


def run_tests(namespace, arguments, *flags):
    """Runs tests like outsider.run_tests, and returns the exit code."""
    code = o.run_tests(namespace, *flags)
    if code:
        # A run ends at its first failure, which may come later on a slower machine.
        print(f"to repeat: --seed {arguments.seed} --seconds 600")
    return code


# --- Arithmetic -----------------------------------------------------------------------------------

def bf16_values(bits):
    bits = np.asarray(bits)
    return (bits.ravel().astype(np.uint32) << 16).view(np.float32).reshape(bits.shape)


def bf16_bits(values):
    """Rounds f64 values to nearest, ties to even."""
    shape = np.shape(values)
    values = np.asarray(values, np.float64).ravel()
    # Below the normal range, the numbers are the multiples of the smallest number.
    tiny = np.abs(values) < 2.0**-126
    values = np.where(tiny, np.rint(np.where(tiny, values, 0) * 2.0**133) * 2.0**-133, values)
    bits = values.view(np.uint64)
    drop = np.uint64(45)
    half = (np.uint64(1) << np.uint64(44)) - np.uint64(1)
    rounded = ((bits + half + ((bits >> drop) & np.uint64(1))) >> drop) << drop
    with np.errstate(over="ignore", invalid="ignore"):
        single = rounded.view(np.float64).astype(np.float32)
    single[np.isnan(values)] = np.float32("nan")
    return (single.view(np.uint32) >> 16).astype("<u2").reshape(shape)


def wide(array, dtype):
    """Converts an array to f64, or to i64 if its elements are integers. dtype: its protocol type,
    because bf16 elements are held as their bits."""
    array = np.asarray(array)
    if dtype == BF16:
        return bf16_values(array).astype(np.float64)
    return array.astype(np.int64 if dtype in (*INTEGERS, *BYTES) else np.float64)


def narrow(values, dtype):
    """Converts f64 or i64 to an array of the protocol's type, rounded to nearest. Integers wrap."""
    values = np.asarray(values)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == BF16:
            return bf16_bits(values.astype(np.float64))
        return values.astype(o.NUMPY_TYPES[dtype])


def cast(array, source, target):
    """Casts as CopyBuffer does: rounds to nearest, or for integers truncates and saturates. NaN
    gives 0."""
    if source == target:
        return array
    values = wide(array, source)
    if target == BOOL:
        return values != 0
    if target not in (*INTEGERS, U8, I8):
        return narrow(values, target)
    limits = np.iinfo(o.NUMPY_TYPES[target])
    low, high = int(limits.min), int(limits.max)

    def one(value):
        if isinstance(value, float):
            if math.isnan(value):
                return 0
            if math.isinf(value):
                return high if value > 0 else low
        return min(max(int(value), low), high)

    flat = [one(value) for value in values.ravel().tolist()]
    return np.array(flat, o.NUMPY_TYPES[target]).reshape(array.shape)


def random_bits(seed, counter, stream):
    """Returns the first two words of Philox 4x32-10."""
    arrays = np.broadcast_arrays(seed, counter, stream)
    result, low = [], (1 << 32) - 1
    for key, place, more in zip(*(array.ravel().tolist() for array in arrays)):
        k = [key & low, key >> 32 & low]
        x = [place & low, place >> 32 & low, more & low, more >> 32 & low]
        for _ in range(10):
            p, q = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
            x = [q >> 32 ^ x[1] ^ k[0], q & low, p >> 32 ^ x[3] ^ k[1], p & low]
            k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
        result.append(x[1] << 32 | x[0])
    return np.array(result, np.uint64).astype(np.int64).reshape(arrays[0].shape)


def strided(array, view):
    """Returns the elements of a valid view (offset, shape, strides)."""
    offset, shape, strides = view
    index = np.full(shape, offset, np.int64)
    for axis, (extent, stride) in enumerate(zip(shape, strides)):
        steps = np.arange(extent, dtype=np.int64) * stride
        index += steps.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return array.ravel()[index.ravel()].reshape(shape)


# The functions that the operations of an expression compute. The model does not know the last bits
# of the functions in LIBRARY.
BINARY = {"ADD": np.add, "SUBTRACT": np.subtract, "MULTIPLY": np.multiply, "DIVIDE": np.divide,
          "MINIMUM": np.minimum, "MAXIMUM": np.maximum}
COMPARISONS = {"LESS": np.less, "GREATER": np.greater, "EQUAL": np.equal, "NOT_EQUAL": np.not_equal}
LOGIC = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}
UNARY = {"ABS": np.abs, "NEGATE": np.negative, "SQRT": np.sqrt}
LIBRARY = ("EXP", "TANH", "LOG")
FUNCTIONS = BINARY | COMPARISONS | LOGIC | UNARY | {"WHERE": np.where}


class Expression:
    """An expression whose operands have one type."""

    def __init__(self, dtype, *nodes):
        """nodes: numbers of operands, and tuples of an operation and the positions of its
        arguments."""
        self.nodes = nodes
        self.is_exact = not any(self.op(i) in LIBRARY for i in range(len(nodes)))
        # Operations treat one-byte types as I32.
        self.number = dtype if dtype not in (U8, I8) else I32
        self.dtypes = []
        for i in range(len(nodes)):
            truth = self.op(i) in COMPARISONS or self.op(i) in LOGIC
            self.dtypes.append(BOOL if truth else self.number)
        self.dtype = self.dtypes[-1]

    def op(self, i):
        return self.nodes[i][0] if isinstance(self.nodes[i], tuple) else ""

    def message(self):
        return o.expression(*(o.operand(node) if isinstance(node, int) else o.node(*node)
                              for node in self.nodes))

    def values(self, *operands):
        """Returns the result for operands of f64 or i64, as f64 or i64."""
        places = []
        with np.errstate(all="ignore"):
            for i, node in enumerate(self.nodes):
                if isinstance(node, int):
                    places.append(operands[node])
                    continue
                made = FUNCTIONS[node[0]](*(places[arg] for arg in node[1:]))
                if self.dtypes[i] != BOOL:
                    made = wide(narrow(made, self.dtypes[i]), self.dtypes[i])
                places.append(made)
        shape = np.broadcast_shapes(*(np.shape(operand) for operand in operands))
        value = np.asarray(places[-1])
        return np.broadcast_to(value.astype(np.int64) if self.dtype == BOOL else value, shape)


# --- Expected results -----------------------------------------------------------------------------

def check_equal(actual, expected, dtype):
    got, want = wide(actual, dtype), wide(expected, dtype)
    same = np.array_equal(got, want, equal_nan=dtype not in (*INTEGERS, *BYTES))
    check(same, got, "is not", want)


def check_near(actual, expected, terms, dtype, roundoff, rounded=0, count=1):
    """Checks values against expected, which is f64 or i64 like terms. terms: the sum of the
    absolute terms of each element. rounded: the value that was rounded to the type before the last
    step. count: the number of terms, each of which may be below the smallest number and rounded to
    it."""
    values = wide(actual, dtype)
    if dtype in INTEGERS:
        check_equal(actual, narrow(np.asarray(expected).astype(np.int64), dtype), dtype)
        return
    ulp = {F32: 2.0**-24, F64: 2.0**-53, F16: 2.0**-11, BF16: 2.0**-8}[dtype]
    tiny = {F32: 2.0**-149, F64: 1e-300, F16: 2.0**-24, BF16: 2.0**-133}[dtype]
    top = {F32: 3.4e38, F64: 1e308, F16: 65000.0, BF16: 3.38e38}[dtype]
    top_of_parts = top if dtype == F64 else 3.4e38
    want = np.asarray(expected, np.float64)
    with np.errstate(all="ignore"):
        same = np.isnan(want) & np.isnan(values) | (want == values)
        bound = 4 * (roundoff + 2.0**-50) * terms + max(1, count) * tiny
        bound = bound + 2 * ulp * (np.abs(want) + np.abs(rounded))
        close = np.abs(values - want) <= bound
        # Partial sums are kept in f32 or f64, and may overflow even if the whole sum does not.
        over = (np.abs(want) > top) | (terms > top_of_parts) & ~np.isfinite(values)
    check(np.all(np.where(np.isfinite(want), close | over, same)), values, "is not", want)


def check_scalar(response, integer, expected, terms, what):
    kind = response.value.WhichOneof("value")
    check(kind == ("integer" if integer else "real"), what, "is of kind", kind)
    actual = getattr(response.value, kind)
    if integer or not math.isfinite(expected):
        expected = int(expected) if integer else float(expected)
        same = actual == expected or math.isnan(expected) and math.isnan(actual)
        check(same, what, actual, "is not", expected)
        return
    # The last term covers what products below the f32 range lose.
    bound = 4 * (response.stats.roundoff + 2.0**-50) * terms + 1e-33
    check(abs(actual - expected) <= bound, what, actual, "is not", expected, "within", bound)


OPS = ("SUM", "PRODUCT", "MIN", "MAX", "ARGMIN", "ARGMAX", "MEAN", "NORM_L1", "NORM_L2",
       "SUM_SQUARES", "VARIANCE", "STD", "ALL", "ANY")
OPS_OF_TRUTH = ("SUM", "MEAN", "ALL", "ANY")
SCANS = ("SUM", "PRODUCT", "MIN", "MAX", "ALL", "ANY")
# The results of reductions of no elements. All other such reductions are refused.
EMPTY = {"SUM": 0, "PRODUCT": 1, "NORM_L1": 0, "NORM_L2": 0, "SUM_SQUARES": 0, "ALL": 1, "ANY": 0}
REAL_OF_INTEGERS = ("MEAN", "NORM_L2", "VARIANCE", "STD")


def fold(op, x):
    """Returns (value, sum of |terms|, index) of a flat array of f64 or i64."""
    if not len(x):
        return EMPTY[op], 0.0, None
    with np.errstate(all="ignore"):
        real = x.astype(np.float64)
        # Squares may exceed the range of f64 even if their roots and deviations do not.
        size, long = float(np.abs(real).sum()), real.astype(np.longdouble)
        squares = long * long
        if op in ("MIN", "MAX", "ARGMIN", "ARGMAX"):
            index = int((np.argmin if op.endswith("MIN") else np.argmax)(x))
            return x[index], 0.0, index if op.startswith("ARG") else None
        if op == "PRODUCT":
            product = np.prod(x, dtype=x.dtype)
            return product, abs(float(product)), None
        if op == "NORM_L2":
            norm = float(np.sqrt(squares.sum()))
            return norm, norm if math.isfinite(norm) else 0.0, None
        if op == "MEAN":
            total = sum(x.tolist()) if x.dtype.kind == "i" else real.sum()
            return total / len(x), size / len(x), None
        value, terms = {"SUM": lambda: (x.sum(dtype=x.dtype), size),
                        "NORM_L1": lambda: (np.abs(x).sum(dtype=x.dtype), size),
                        "SUM_SQUARES": lambda: ((x * x).sum(dtype=x.dtype), float(squares.sum())),
                        "VARIANCE": lambda: (float(np.var(long)), 4 * float(squares.mean())),
                        "STD": lambda: (float(np.std(long)), 4 * float(np.sqrt(squares.mean()))),
                        "ALL": lambda: (int(np.all(x != 0)), 0.0),
                        "ANY": lambda: (int(np.any(x != 0)), 0.0)}[op]()
        return value, terms, None


def result_of_fold(op, dtype):
    """Returns the type of the array that a reduction along axes gives."""
    if op in ("ARGMIN", "ARGMAX"):
        return I64
    if op in ("ALL", "ANY"):
        return I32
    if dtype not in (*INTEGERS, BOOL):
        return dtype
    return F64 if op in REAL_OF_INTEGERS else dtype if op in ("MIN", "MAX") else I64


def product_is_safe(op, x):
    """Returns whether every partial product is in the range of f32, in any order."""
    if op != "PRODUCT" or x.dtype == np.int64:
        return True
    finite = x[np.isfinite(x) & (x != 0)]
    return len(finite) == len(x) and np.abs(np.log2(np.abs(finite))).sum() < 100


def scan_along(op, x, axis, exclusive, reverse, dtype):
    """Returns (folds, sums of |terms|) along an axis of an array of f64 or i64. dtype: the type of
    the result."""
    if op in ("ALL", "ANY"):
        x = (x != 0).astype(np.int64)
    rows = np.moveaxis(x, axis, -1)
    if reverse:
        rows = rows[..., ::-1]
    step = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
            "ALL": np.minimum, "ANY": np.maximum}[op]
    integers = dtype in INTEGERS
    limits = np.iinfo(o.NUMPY_TYPES[dtype]) if integers else None
    nothing = {
        "MIN": limits.max if integers else math.inf, "MAX": limits.min if integers else -math.inf,
    }.get(op, EMPTY.get(op))
    with np.errstate(all="ignore"):
        folds, terms = step.accumulate(rows, axis=-1), np.abs(rows).astype(np.float64)
        terms = np.abs(folds).astype(np.float64) if op == "PRODUCT" else terms.cumsum(axis=-1)
    if exclusive:
        for scanned, first in ((folds, nothing), (terms, 0)):
            scanned[..., 1:] = scanned[..., :-1].copy()
            scanned[..., :1] = first
    if reverse:
        folds, terms = folds[..., ::-1], terms[..., ::-1]
    return np.moveaxis(folds, -1, axis), np.moveaxis(terms, -1, axis)


def check_arrays(response, values, indices, dtype, left_out=()):
    """Checks the arrays of values and of indices, except those that the request leaves out."""
    if "indices" not in left_out:
        got = o.to_numpy(response.indices)
        check(np.array_equal(got, indices), "indices", got.tolist(), "not", indices.tolist())
    if "values" not in left_out:
        check(response.values.data == values.tobytes(), "values at", indices.tolist())
        check(tuple(response.values.shape) == values.shape, response.values.shape)
        check(response.values.dtype == dtype, response.values.dtype)


def top_indices(rows, k, smallest):
    """Returns indices along the last axis. Equal elements are in the order of their indices, and
    NaN is the largest."""
    if smallest:
        return np.argsort(rows, axis=-1, kind="stable")[..., :k]
    backwards = np.argsort(rows[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    return (rows.shape[-1] - 1 - backwards)[..., :k]


# --- Cases ----------------------------------------------------------------------------------------

class Case:
    """A request, and the expected outcome."""

    def __init__(self, operation, rpc, fields, dtype, reasons=(), operands=(), result=None,
                 judge=None):
        """operation: its name in ListStrategies. dtype: the type that a strategy must support.
        reasons: the reasons of which the server gives one; without reasons, the request is valid.
        result: the type and shape of an array. judge: a function of the response and the result's
        elements."""
        self.operation, self.rpc, self.fields, self.dtype = operation, rpc, fields, dtype
        self.reasons, self.result, self.judge = tuple(reasons), result, judge
        self.versions = [operand.version for operand in operands]
        self.perhaps = ()  # Further reasons for which it may be refused.
        self.may_succeed = not reasons
        self.target = None  # Name, replace and ttl, if the result goes to a buffer.
        self.is_exact = True  # Whether no library function is used.
        self.is_mixed = False  # Whether the operands of a product have different types.

    def __repr__(self):
        return f"{self.rpc} {str(self.request())[:1000]}"

    def request(self):
        return getattr(o.compute, self.rpc + "Request")(**self.fields)

    def step(self):
        return o.compute.Step(**{STEPS[self.rpc]: self.request()})

    def check(self, response, stored=None):
        """Checks a response. stored: the elements that went to a buffer."""
        stats = response.stats
        strategy = self.fields.get("strategy") or stats.strategy
        check(strategy and stats.strategy == strategy, "strategy", stats.strategy)
        check(stats.device in o.Program.device.split(","), "device", stats.device)
        versions = list(stats.operand_versions)
        check(versions == self.versions, "operand_versions", versions, "is not", self.versions)
        self.check_values(response, stored)

    def check_values(self, response, stored=None):
        if self.result is not None and stored is None:
            check(response.HasField("tensor"), "no tensor")
            said = response.tensor.dtype, tuple(response.tensor.shape)
            check(said == self.result, "type and shape", said, "is not", self.result)
            stored = o.to_numpy(response.tensor)
        if self.is_exact:
            self.judge(response, stored)

    def check_outcome(self, outcome):
        if check_end(outcome, (*self.reasons, *self.perhaps), self.may_succeed):
            self.check(outcome.answer)


# The array has the elements of the view, or is None if the operand is invalid.
Operand = collections.namedtuple("Operand", "message array version reasons")


class Requests:
    """Makes random cases. A suite overrides where operands come from and how large they are."""

    KINDS = (
        "dot", "add", "matmul", "reduce", "window_sum", "map", "top_k", "scan", "sort", "take",
        "select", "histogram", "search_sorted", "sum_by_label", "linalg",
    )
    FAULTS = (None,) * 12 + ("view", "view", "view", "dtype", "shape")
    UNARY_FUNCTIONS = ("ABS", "NEGATE", "SQRT")

    def __init__(self, rng, strategies=()):
        self.rng = rng
        self.only = None  # The element type of all cases, if there is one.
        self.live = {}  # Resident arrays by name, with dtype, version and array().
        self.strategies = {}
        for strategy in strategies:
            self.strategies.setdefault(strategy.operation, []).append(strategy)

    def dtype(self, *more):
        return self.only or self.rng.choice((*DTYPES, *more))

    def extent(self):
        return self.rng.choice((0, 1, 2, 3, 5)) if self.rng.random() < 0.9 else 17

    def shape(self, rank=None):
        return tuple(self.extent() for _ in range(self.rng.randrange(4) if rank is None else rank))

    def wrong_version(self):
        return self.rng.choice((1, 10**9, 2**64 - 1))

    def not_readable(self, name, version=0):
        """Returns the reasons why a name cannot be read."""
        if name not in self.live:
            return ("BUFFER_NOT_FOUND",)
        return () if version in (0, self.live[name].version) else ("VERSION_MISMATCH",)

    def pick_name(self):
        return self.rng.choice([*self.live, "no-such-buffer"])

    def array(self, dtype, shape, special=True):
        """Returns a random array. special: whether it may have infinities, NaN, and the extreme
        values of I32."""
        rng, count, kind = self.rng, math.prod(shape), self.rng.random()
        if dtype == BOOL:
            return np.array([rng.random() < 0.5 for _ in range(count)], bool).reshape(shape)
        if dtype in (U8, I8):
            return np.frombuffer(rng.randbytes(count), o.NUMPY_TYPES[dtype]).reshape(shape)
        if dtype in INTEGERS:
            values = np.array([rng.randint(-9, 9) for _ in range(count)], np.int64)
            ends = (2**31 - 1, -(2**31))
        else:
            draw = (lambda: float(rng.randint(-8, 8))) if kind < 0.6 else lambda: rng.gauss(0, 1)
            values = np.array([draw() for _ in range(count)], np.float64)
            ends = (math.nan, math.inf, -math.inf, -0.0)
        if special and kind > 0.95 and count:
            values[rng.randrange(count)] = rng.choice(ends)
        return narrow(values, dtype).reshape(shape)

    # --- Operands ---

    def view(self, count, rank=None):
        """Returns a valid view of an array of count elements: (offset, shape, strides)."""
        rng = self.rng
        rank = rng.randrange(4) if rank is None else rank
        if count == 0:
            shape = [rng.randrange(4) for _ in range(rank)]
            if not rank:
                return None
            shape[rng.randrange(rank)] = 0
            return 0, shape, [rng.randrange(-3, 4) for _ in range(rank)]
        shape, strides, low, high = [], [], 0, 0
        for _ in range(rank):
            extent = rng.choice((1, 1, 2, 3, 4, 7))
            stride = rng.choice((0, 1, 1, 2, -1, -2, 3, 5))
            reach = stride * (extent - 1)
            if high + max(0, reach) - low - min(0, reach) >= count:
                stride = reach = 0
            low, high = low + min(0, reach), high + max(0, reach)
            shape.append(extent)
            strides.append(stride)
        return rng.randrange(-low, count - high), shape, strides

    def view_of_shape(self, count, shape):
        """Returns a valid view with these extents of an array of count elements, if it has any."""
        strides, left = [], count - 1
        for extent in shape:
            stride = 0
            if extent > 1 and left > 0:
                reach = left // (extent - 1)
                stride = self.rng.randint(0, min(reach, 3))
                left -= stride * (extent - 1)
            strides.append(stride)
        return self.rng.randint(0, max(0, left)), list(shape), strides

    def bad_view(self, count):
        """Returns (message, reasons) for a view that reaches outside the array or is invalid."""
        rng, view, size = self.rng, o.buffers.View, max(count, 1)
        return rng.choice((
            view(offset=count, shape=[1]),
            view(offset=rng.choice(EXTREMES), shape=[1 if count else 2]),
            view(shape=[size + 1]), view(shape=[2], strides=[size]),
            view(shape=[2], strides=[-1]),
            view(shape=[2], strides=[rng.choice(EXTREMES)])
            if count < 3 else view(shape=[count + 1]),
            view(shape=[2, 2], strides=[2**62, 2**62]),
            view(shape=[2**63 - 1], strides=[2**63 - 1]), view(shape=[-1]),
            view(shape=[2, -(2**63)]), view(shape=[1] * 9, strides=[0] * 9),
            view(shape=[1, 1], strides=[1]), view(shape=[1], strides=[1, 1]),
        )), ("BAD_VIEW", "BAD_SHAPE")

    def operand(self, dtype, rank=None, shape=None, special=True):
        """Returns an operand, inline or resident, with or without a view."""
        rng = self.rng
        names = [name for name, held in self.live.items() if held.dtype == dtype]
        array = name = None
        if names and rng.random() < 0.5:
            name = rng.choice(names)
            array = self.live[name].array()
            if shape is not None and array.size == 0 and math.prod(shape):
                name = None
        if name is None:
            array = self.array(dtype, self.shape(rank) if shape is None else shape, special)
        return self.seen(array, name, rank, shape)

    def seen(self, array, name=None, rank=None, shape=None):
        """Returns an array as an operand. name: the name of its buffer."""
        rng, view = self.rng, None
        if shape is not None:
            if tuple(shape) != array.shape:
                view = self.view_of_shape(array.size, shape)
        elif (rank is not None and array.ndim != rank) or rng.random() < 0.5:
            view = self.view(array.size, rank)
        message = view and o.buffers.View(offset=view[0], shape=view[1], strides=view[2])
        version = self.live[name].version if name else 0
        pinned = version if rng.random() < 0.3 else 0
        made = o.resident(name, message, pinned) if name else o.inline(array, message)
        return Operand(made, strided(array, view) if view else array, version, ())

    def bad_operand(self, dtype):
        rng, kind = self.rng, self.rng.random()
        bad = o.compute.Tensor
        if kind < 0.3:
            name = self.pick_name()
            version = self.wrong_version() if name in self.live else 0
            message, reasons = o.resident(name, version=version), self.not_readable(name, version)
            return Operand(message, None, 0, reasons)
        elif kind < 0.5:
            data = rng.choice((b"", b"1234567", b"x" * 100))
            bad = bad(dtype=dtype, shape=rng.choice(([1, 3], [-1], [2**62, 8])), data=data)
            made = rng.choice((o.compute.Operand(), o.compute.Operand(tensor=bad)))
            return Operand(made, None, 0, ("BAD_OPERAND", "BAD_SHAPE", "BAD_MESSAGE", "BAD_BOOL"))
        elif kind < 0.55:
            bad = bad(dtype=rng.choice((0, 10, -3)), shape=[1], data=b"1234")
            return Operand(o.compute.Operand(tensor=bad), None, 0, ("BAD_DTYPE", "BAD_OPERAND"))
        names = [name for name, held in self.live.items() if held.dtype == dtype]
        if names and rng.random() < 0.5:
            name = rng.choice(names)
            view, reasons = self.bad_view(self.live[name].array().size)
            return Operand(o.resident(name, view), None, 0, reasons)
        array = self.array(dtype, self.shape())
        view, reasons = self.bad_view(array.size)
        return Operand(o.inline(array, view), None, 0, reasons)

    def pair(self, dtype, fault):
        """Returns (a, b, reasons): two operands of one type and shape, or with a fault."""
        rng = self.rng
        if fault == "view":
            a, b = self.bad_operand(dtype), Operand(o.inline(self.array(dtype, (2,))), None, 0, ())
            # The types of the two operands may also differ, and so may their shapes.
            reasons = (*a.reasons, "BAD_SHAPE", "BAD_DTYPE")
            return (*((a, b) if rng.random() < 0.5 else (b, a)), reasons)
        a = self.operand(dtype)
        if fault == "dtype":
            other = rng.choice([d for d in DTYPES if d != dtype])
            array = self.array(other, a.array.shape)
            return a, self.seen(array, shape=array.shape), ("BAD_DTYPE",)
        if fault == "shape":
            array = self.array(dtype, (*a.array.shape, 2) if a.array.ndim < 8 else (1,))
            return a, self.seen(array, shape=array.shape), ("BAD_SHAPE",)
        return a, self.operand(dtype, shape=a.array.shape), ()

    def fault(self):
        return self.rng.choice(self.FAULTS)

    def expression(self, dtype):
        """Returns a random expression of two operands of the type."""
        rng, nodes = self.rng, [0, 1]
        arithmetic = ["ADD", "SUBTRACT", "MULTIPLY"]
        floating = dtype in DTYPES and dtype not in INTEGERS
        # Which of two zeros is the smaller one is undefined, and its sign shows in quotients.
        arithmetic += ["DIVIDE"] if floating and rng.random() < 0.3 else ["MINIMUM", "MAXIMUM"]
        functions = self.UNARY_FUNCTIONS if floating else ("ABS", "NEGATE")
        numbers, truths = ([], [0, 1]) if dtype == BOOL else ([0, 1], [])
        for _ in range(rng.randrange(1, 5)):
            kind = rng.random()
            at = len(nodes)
            if len(truths) > 1 and (kind < 0.3 or not numbers):
                nodes.append((rng.choice([*LOGIC]), rng.choice(truths), rng.choice(truths)))
                truths.append(at)
                continue
            a, b = rng.choice(numbers), rng.choice(numbers)
            if kind < 0.2:
                nodes.append((rng.choice([*COMPARISONS]), a, b))
                truths.append(at)
                continue
            if truths and kind < 0.5:
                nodes.append(("WHERE", rng.choice(truths), a, b))
            elif kind < 0.7:
                nodes.append((rng.choice(functions), a))
            else:
                nodes.append((rng.choice(arithmetic), a, b))
            numbers.append(at)
        return Expression(dtype, *nodes)

    def with_expression(self, x, dtype, fields):
        """Adds an expression of x and one of its rows to some requests. Returns the expression, all
        operands, and a function that returns the values that the operation gets."""
        operands, expression = [x], None
        if self.rng.random() < 0.4:
            expression = self.expression(dtype)
            row = x.array.shape[self.rng.randint(0, x.array.ndim) :]
            operands.append(self.operand(dtype, shape=row))
            fields["expression"], fields["with"] = expression.message(), [operands[1].message]

        def values():
            seen = [wide(operand.array, dtype) for operand in operands]
            return expression.values(*seen) if expression else seen[0]

        return expression, operands, values

    def axis(self, x, fault, fields):
        """Adds an axis. Returns the axis, and the reasons why it is refused."""
        rng, rank = self.rng, x.array.ndim
        axis = rng.randrange(-rank, rank) if rank else 0
        if fault == "shape":
            axis = rng.choice((rank, -rank - 1, 2**31 - 1))
        if axis != -1 or rng.random() < 0.5:
            fields["axis"] = axis
        return axis, ("BAD_AXES",) if rank == 0 or fault == "shape" else ()

    # --- Operations ---

    def case(self, kind=None):
        return getattr(self, kind or self.rng.choice(self.KINDS))()

    def dot(self):
        dtype = self.dtype()
        a, b, reasons = self.pair(dtype, self.fault())

        def judge(response, _):
            x, y = wide(a.array, dtype), wide(b.array, dtype)
            with np.errstate(all="ignore"):
                total, terms = (x * y).sum(dtype=x.dtype), float(np.abs(x * y).sum())
            check_scalar(response, dtype in INTEGERS, total, terms, "dot")

        fields = dict(a=a.message, b=b.message)
        return Case("dot", "Dot", fields, dtype, reasons, (a, b), judge=judge)

    def add(self):
        dtype = self.dtype()
        a, b, reasons = self.pair(dtype, self.fault())

        def judge(_, stored):
            with np.errstate(all="ignore"):
                total = wide(a.array, dtype) + wide(b.array, dtype)
            check_equal(stored, narrow(total, dtype), dtype)

        result = None if reasons else (dtype, a.array.shape)
        fields = dict(a=a.message, b=b.message)
        return Case("add", "Add", fields, dtype, reasons, (a, b), result, judge)

    def map(self):
        """Makes an expression of an operand and one of its rows, which is broadcast."""
        rng, fault = self.rng, self.fault()
        dtype = self.dtype(*BYTES)
        a = self.bad_operand(dtype) if fault == "view" else self.operand(dtype)
        reasons, x = a.reasons, a.array
        b = self.operand(dtype, shape=() if x is None else x.shape[rng.randint(0, x.ndim) :])
        if fault == "view":
            reasons = (*reasons, "BAD_SHAPE")
            if a.message.WhichOneof("source") == "buffer":
                reasons = (*reasons, "BAD_EXPRESSION", "BAD_DTYPE")  # It may be of another type.
        expression = self.expression(dtype)
        message = expression.message()
        if fault == "dtype":
            ops = [node for node in message.nodes if node.op]
            rng.choice(ops).args[0], reasons = len(message.nodes), ("BAD_EXPRESSION",)
        elif fault == "shape":
            # The extents cannot be broadcast, or the rank is too high.
            fits = not x.ndim or x.shape[-1] == 1
            array = self.array(dtype, (2, 0, 2) + (1,) * 7 if fits else (1, 23))
            b, reasons = self.seen(array, shape=array.shape), ("BAD_SHAPE",)

        def judge(_, stored):
            values = expression.values(wide(x, dtype), wide(b.array, dtype))
            check_equal(stored, narrow(values, expression.dtype), expression.dtype)

        result = None if reasons else (expression.dtype, x.shape)
        fields = dict(operands=[a.message, b.message], expression=message)
        case = Case("map", "Map", fields, dtype, reasons, (a, b), result, judge)
        case.is_exact = expression.is_exact
        return case

    def matmul(self):
        rng, fault, reasons = self.rng, self.fault(), ()
        dtype = self.dtype(*BYTES)
        m, n, k = self.extent(), self.extent(), self.extent()
        ta, tb = rng.random() < 0.3, rng.random() < 0.3
        out = rng.choice((0, 0, 0, dtype, *DTYPES))
        stack = [rng.choice((0, 1, 2, 3)) for _ in range(rng.choice((0, 0, 1, 2)))]

        def shape_of(matrix):
            if rng.random() < 0.1:
                return (k,)
            leading = (rng.choice((extent, extent, 1)) for extent in stack[rng.randrange(3):])
            return *leading, *matrix

        shape_a = shape_of((k, m) if ta else (m, k))
        shape_b = shape_of((n, k) if tb else (k, n))
        rows, columns = (m,) * (len(shape_a) > 1), (n,) * (len(shape_b) > 1)
        shape = (*np.broadcast_shapes(shape_a[:-2], shape_b[:-2]), *rows, *columns)
        a = self.operand(dtype, shape=shape_a, special=False)
        mixed = dtype in (U8, I8) and rng.random() < 0.5
        b = self.operand(U8 + I8 - dtype if mixed else dtype, shape=shape_b, special=False)
        if fault == "view":
            a = self.bad_operand(dtype)
            reasons = (*a.reasons, "BAD_SHAPE", "BAD_DTYPE")
        elif fault == "dtype":
            array = self.array(F64 if dtype != F64 else F32, b.array.shape)
            b, reasons = self.seen(array, shape=array.shape), ("BAD_DTYPE",)
        elif fault == "shape":
            array = self.array(dtype, rng.choice(((k + 1, k + 1), (k + 1,), (1, k + 1, k + 1), ())))
            b, reasons = self.seen(array, shape=array.shape), ("BAD_SHAPE",)
        result = out or (I32 if dtype in (U8, I8) else dtype)
        if dtype == I64:
            reasons = (*reasons, "BAD_DTYPE", "STRATEGY_UNSUPPORTED")
        elif dtype in BYTES:
            if dtype == BOOL or result != I32:
                reasons = (*reasons, "BAD_DTYPE")
        elif result not in (dtype, {F16: F32, BF16: F32, I32: I64}.get(dtype)):
            reasons = (*reasons, "BAD_DTYPE")
        fields = dict(a=a.message, b=b.message, transpose_a=ta, transpose_b=tb, out_dtype=out)
        operands, bias = [a, b], None
        if not reasons and rng.random() < 0.3:
            biased = rng.choice(((), columns, (*rows, *(1 for _ in columns)), shape))
            bias = self.operand(result, shape=biased, special=False)
            operands.append(bias)
            fields["expression"] = Expression(result, 0, 1, ("ADD", 0, 1)).message()
            fields["with"] = [bias.message]

        def judge(response, stored):
            x, y = wide(a.array, dtype), wide(b.array, dtype)
            x = x.swapaxes(-2, -1) if ta and rows else x if rows else x[None]
            y = y.swapaxes(-2, -1) if tb and columns else y if columns else y[:, None]
            with np.errstate(all="ignore"):
                # Computed row by row, because the library behind @ may treat NaN and infinity
                # differently.
                terms = x[..., :, :, None] * y[..., None, :, :]
                product = terms.sum(axis=-2).reshape(shape)
                sizes = np.abs(terms).sum(axis=-2).reshape(shape)
                expected = product if bias is None else product + wide(bias.array, result)
            rounded = 0 if bias is None else product
            check_near(stored, expected, sizes, result, response.stats.roundoff, rounded, k)

        case = Case("matmul", "Matmul", fields, dtype, reasons, operands, (result, shape), judge)
        case.is_mixed = mixed
        return case

    def window_sum(self):
        rng, fault, reasons = self.rng, self.fault(), ()
        dtype = self.dtype()
        radius = rng.choice((0, 1, 2, 5, 100, 2**31, 2**62, 2**63 - 1))
        if fault == "view":
            x = self.bad_operand(dtype)
            reasons = (*x.reasons, "BAD_SHAPE", "BAD_DTYPE")
        elif fault == "shape":
            x, reasons = self.seen(self.array(dtype, (2, 2)), shape=(2, 2)), ("BAD_SHAPE",)
        else:
            x = self.operand(dtype, rank=1, special=False)
            if fault == "dtype":
                radius, reasons = rng.choice((-1, -(2**63))), ("BAD_RADIUS",)
        out = I64 if dtype in INTEGERS else dtype

        def judge(response, stored):
            values = wide(x.array, dtype)
            count = len(values)
            reach = min(radius, count)
            sums = np.zeros_like(values)
            with np.errstate(all="ignore"):
                for shift in range(-reach, reach + 1) if reach < count else ():
                    low, high = max(0, shift), count + min(0, shift)
                    sums[low - shift : high - shift] += values[low:high]
                sums = sums if reach < count else np.full(count, values.sum())
                # A running sum is rounded relative to everything that it has passed.
                passed = np.abs(values[np.isfinite(values)]).sum()
            check_near(stored, sums, np.full(count, passed), out, response.stats.roundoff)

        result = None if reasons else (out, x.array.shape)
        fields = dict(x=x.message, radius=radius)
        return Case("window_sum", "WindowSum", fields, dtype, reasons, (x,), result, judge)

    def top_k(self):
        rng, fault = self.rng, self.fault()
        dtype = self.dtype()
        x = self.bad_operand(dtype) if fault == "view" else self.operand(dtype)
        k, axis, smallest = rng.choice((1, 1, 2, 3, 5)), None, rng.random() < 0.5
        reasons = x.reasons
        if reasons:
            reasons = (*reasons, "BAD_K", "BAD_AXES", "BAD_DTYPE")
        else:
            rank = x.array.ndim
            axis = rng.randrange(-rank, rank) if rank else 0
            if fault == "dtype":
                axis, reasons = rng.choice((rank, -rank - 1, 2**31 - 1)), ("BAD_AXES",)
            elif rank == 0:
                reasons = ("BAD_AXES",)
            elif fault == "shape":
                k = rng.choice((0, -1, x.array.shape[axis] + 1, 2**63 - 1))
            if not reasons and not 1 <= k <= x.array.shape[axis]:
                reasons = ("BAD_K",)

        def judge(response, _):
            rows = np.moveaxis(wide(x.array, dtype), axis, -1)
            indices = np.moveaxis(top_indices(rows, k, smallest), -1, axis)
            values = np.take_along_axis(np.asarray(x.array), indices, axis=axis)
            check_arrays(response, values, indices, dtype)

        fields = dict(x=x.message, k=k, axis=axis, smallest=smallest)
        return Case("top_k", "TopK", fields, dtype, reasons, (x,), judge=judge)

    def reduce(self):
        rng, fault = self.rng, self.fault()
        dtype, op = self.dtype(*BYTES), rng.choice(OPS)
        if fault in ("view", "dtype"):
            x = self.bad_operand(dtype) if fault == "view" else self.operand(dtype)
            reasons = (*x.reasons, "EMPTY_INPUT", "BAD_DTYPE")
            wrong = rng.choice((0, 15, 99, -1, 2**31 - 1))
            if fault == "dtype":
                reasons = ("BAD_OPERATION",)
            fields = dict(x=x.message, op="REDUCE_OP_" + op if fault == "view" else wrong)
            return Case("reduce", "Reduce", fields, dtype, reasons, (x,))
        if dtype == BOOL and rng.random() < 0.9:
            op = rng.choice(OPS_OF_TRUTH)
        x = self.operand(dtype)
        fields = dict(x=x.message, op="REDUCE_OP_" + op)
        expression, operands, values = self.with_expression(x, dtype, fields)
        kind = expression.dtype if expression else dtype
        if kind == BOOL and op not in OPS_OF_TRUTH:
            return Case("reduce", "Reduce", fields, kind, ("BAD_DTYPE",), operands)
        # The type in which bytes are folded.
        folded = I32 if kind in BYTES else kind
        if x.array.ndim and rng.random() < 0.5:
            case = self.reduce_axes(fields, op, folded, values, operands, fault)
        else:
            case = self.reduce_all(fields, op, folded, values, operands)
        case.is_exact = expression is None or expression.is_exact
        return case

    def reduce_all(self, fields, op, dtype, values, operands):
        integer = op in ("ALL", "ANY") or dtype in INTEGERS and op not in REAL_OF_INTEGERS
        reasons = ("EMPTY_INPUT",) if not operands[0].array.size and op not in EMPTY else ()

        def judge(response, _):
            flat = values().ravel()
            value, terms, index = fold(op, flat)
            if index is not None:
                check(response.index == index, "index", response.index, "is not", index)
            if product_is_safe(op, flat):
                check_scalar(response, integer, value, terms, op)

        return Case("reduce", "Reduce", fields, dtype, reasons, operands, judge=judge)

    def reduce_axes(self, fields, op, dtype, values, operands, fault):
        rng, shape = self.rng, operands[0].array.shape
        rank = len(shape)
        axes = rng.sample(range(rank), rng.randint(1, rank))
        fields["axes"] = [axis - rank if rng.random() < 0.3 else axis for axis in axes]
        fields["keep_dims"] = keep = rng.random() < 0.3
        reasons, kept = (), [axis for axis in range(rank) if axis not in axes]
        folded = math.prod(shape[axis] for axis in axes)
        rows = math.prod(shape[axis] for axis in kept)
        if fault == "shape":
            fields["axes"] = rng.choice(([rank], [-rank - 1], [0, 0], [2**31 - 1], [0, -rank]))
            reasons = ("BAD_AXES",)
        elif folded == 0 and op not in EMPTY:
            reasons = ("EMPTY_INPUT",)
        out = result_of_fold(op, dtype)
        extents = tuple(
            1 if axis in axes else shape[axis] for axis in range(rank) if keep or axis in kept)

        def judge(response, stored):
            table = values().transpose(kept + sorted(axes)).reshape(rows, folded)
            if not rows or not all(product_is_safe(op, row) for row in table):
                return
            # Along axes, the index counts the folded elements.
            ends = [fold(op, row) for row in table]
            result = np.array([value if at is None else at for value, _, at in ends],
                              np.int64 if out in INTEGERS else np.float64)
            terms = np.array([term for _, term, _ in ends], np.float64).reshape(extents)
            check_near(stored, result.reshape(extents), terms, out, response.stats.roundoff)

        result = out, extents
        case = Case("reduce_axes", "Reduce", fields, dtype, reasons, operands, result, judge)
        # For a result without elements, both outcomes are right.
        case.may_succeed = not reasons or reasons == ("EMPTY_INPUT",) and rows == 0
        return case

    def scan(self):
        rng, fault = self.rng, self.fault()
        dtype, op = self.dtype(*BYTES), rng.choice(SCANS)
        x = self.bad_operand(dtype) if fault == "view" else self.operand(dtype)
        exclusive, reverse = rng.random() < 0.3, rng.random() < 0.3
        fields = dict(x=x.message, op="REDUCE_OP_" + op, exclusive=exclusive, reverse=reverse)
        if fault in ("view", "dtype"):
            reasons = (*x.reasons, "BAD_AXES", "BAD_DTYPE")
            if fault == "dtype":
                wrong = [name for name in OPS if name not in SCANS]
                fields["op"] = rng.choice((0, 15, 99, -1, "REDUCE_OP_" + rng.choice(wrong)))
                reasons = ("BAD_OPERATION",)
            return Case("scan", "Scan", fields, dtype, reasons, (x,))
        axis, reasons = self.axis(x, fault, fields)
        expression, operands, values_of = self.with_expression(x, dtype, fields)
        kind = expression.dtype if expression else dtype
        if kind == BOOL and op not in OPS_OF_TRUTH:
            reasons = (*reasons, "BAD_DTYPE")
        # The type in which bytes and truths are folded.
        folded = I32 if kind in BYTES or op in ("ALL", "ANY") else kind
        out = result_of_fold(op, folded)

        def judge(response, stored):
            values = values_of()
            if product_is_safe(op, values.ravel()):
                folds, terms = scan_along(op, values, axis, exclusive, reverse, out)
                check_near(stored, folds, terms, out, response.stats.roundoff, count=values.size)

        result = None if reasons else (out, x.array.shape)
        case = Case("scan", "Scan", fields, folded, reasons, operands, result, judge)
        case.is_exact = expression is None or expression.is_exact
        return case

    def sort(self):
        rng, fault = self.rng, self.fault()
        dtype, descending = self.dtype(*BYTES), rng.random() < 0.5
        x = self.bad_operand(dtype) if fault == "view" else self.operand(dtype)
        fields = dict(x=x.message, descending=descending)
        if fault == "view":
            return Case("sort", "Sort", fields, dtype, (*x.reasons, "BAD_AXES"), (x,))
        axis, reasons = self.axis(x, fault, fields)
        left_out = rng.choice(((), ("values",), ("indices",)))
        for name in left_out:
            fields[name] = dict(none=True)
        if fault == "dtype":
            fields["values"] = fields["indices"] = dict(none=True)
            reasons = ("BAD_RESULT",)
        expression, operands, _ = self.with_expression(x, dtype, fields)
        kind = expression.dtype if expression else dtype

        def judge(response, _):
            if expression:
                check(not expression.is_exact or response.stats.roundoff == 0)
                return
            rows = np.moveaxis(wide(x.array, dtype), axis, -1)
            order = top_indices(rows, rows.shape[-1], not descending) if rows.size else rows
            indices = np.moveaxis(order.astype(np.int64), -1, axis)
            values = np.take_along_axis(np.asarray(x.array), indices, axis=axis)
            check_arrays(response, values, indices, dtype, left_out)

        # Elements of one byte are sorted as i32.
        sorted_as = I32 if kind in BYTES else kind
        case = Case("sort", "Sort", fields, sorted_as, reasons, operands, judge=judge)
        case.is_exact = expression is None or expression.is_exact
        return case

    def take(self):
        rng, fault = self.rng, self.fault()
        dtype, mode = self.dtype(*BYTES), rng.choice(("raise", "raise", "wrap", "clip"))
        x = self.bad_operand(dtype) if fault == "view" else self.operand(dtype)
        kind = rng.choice(INTEGERS if fault != "dtype" else (F32, F16, BOOL, U8, I8))
        fields = dict(x=x.message, mode=1 + ("raise", "wrap", "clip").index(mode))
        if fault in ("view", "dtype"):
            fields["indices"] = o.inline(self.array(kind, (2,), special=False))
            reasons = x.reasons or ("BAD_DTYPE",)
            if fault == "dtype" and rng.random() < 0.3:
                fields["mode"], reasons = rng.choice((4, 99, -1, 2**31 - 1)), ("BAD_OPERATION",)
            return Case("take", "Take", fields, dtype, reasons, (x,))
        shape, axis, reasons = x.array.shape, None, ()
        if shape and rng.random() < 0.7:
            axis = fields["axis"] = rng.randrange(-len(shape), len(shape))
        along = fields["along"] = rng.random() < 0.3
        count = math.prod(shape) if axis is None else shape[axis]
        if along and axis is not None:
            wanted = list(shape)
            wanted[axis] = rng.randrange(6)
        else:
            wanted = rng.choice(((), (3,), (rng.randrange(6),), (2, 3)))
        indices = self.operand(kind, shape=wanted)
        fields["indices"] = indices.message
        places = wide(indices.array, kind)
        if fault == "shape":
            fields["axis"] = rng.choice((len(shape), -len(shape) - 1, 2**31 - 1))
            reasons = ("BAD_AXES",)
        elif along and axis is None and indices.array.ndim != 1:
            reasons = ("BAD_SHAPE",)
        elif along or axis is None:
            extents = indices.array.shape
        else:
            at = axis % len(shape)
            extents = (*shape[:at], *indices.array.shape, *shape[at + 1 :])
        if not reasons and math.prod(extents):
            outside = mode == "raise" and ((places < -count) | (places >= count)).any()
            reasons = ("BAD_INDEX",) if outside or not count else ()

        def judge(_, stored):
            at = places % max(count, 1) if mode != "clip" else np.clip(places, 0, max(count - 1, 0))
            if along and axis is not None:
                want = np.take_along_axis(x.array, at, axis)
            elif not math.prod(extents):
                want = np.empty(extents, x.array.dtype)
            else:
                want = np.take(x.array, at, axis)
            check(stored.tobytes() == want.tobytes(), "elements at", places.tolist())

        result = None if reasons else (dtype, extents)
        return Case("take", "Take", fields, dtype, reasons, (x, indices), result, judge)

    def select(self):
        rng, fault = self.rng, self.fault()
        dtype = self.dtype(*BYTES)
        x = self.bad_operand(dtype) if fault == "view" else self.operand(dtype)
        fields, reasons = dict(x=x.message), x.reasons
        shape = (2,) if reasons else x.array.shape
        if fault == "shape":
            shape, reasons = (*shape, 2), ("BAD_SHAPE", "BAD_VIEW")
        kind = BOOL if fault != "dtype" else rng.choice((*DTYPES, U8, I8))
        if fault == "dtype":
            reasons = ("BAD_DTYPE",)
        mask = self.operand(kind, shape=shape)
        fields["mask"] = mask.message
        left_out = rng.choice(((), ("values",), ("indices",)))
        if not reasons and rng.random() < 0.05:
            left_out, reasons = ("values", "indices"), ("BAD_RESULT",)
        for name in left_out:
            fields[name] = dict(none=True)
        if fault == "view":
            reasons = (*reasons, "BAD_SHAPE")

        def judge(response, _):
            places = np.flatnonzero(mask.array)
            values = np.asarray(x.array).ravel()[places]
            check_arrays(response, values, places, dtype, left_out)

        return Case("select", "Select", fields, dtype, reasons, (x, mask), judge=judge)

    def histogram(self):
        rng, fault = self.rng, self.fault()
        dtype = self.dtype(*BYTES)
        x = self.bad_operand(dtype) if fault == "view" else self.operand(dtype)
        whole = dtype in (*INTEGERS, *BYTES)
        kind = rng.choice(("even", "edges", "integers"))
        operands, reasons, fields, edges = (x,), x.reasons, dict(x=x.message), None
        if kind == "integers" and (whole or fault == "dtype"):
            count = rng.choice((1, 3, 200))
            fields["integers"], edges = count, np.append(np.arange(count), count - 1)
            if not whole:
                reasons = ("BAD_DTYPE",)
        elif kind == "edges":
            of = rng.choice((F64, I64)) if whole else F64
            of = rng.choice((F32, F16, BOOL, U8)) if fault == "dtype" else of
            array = np.sort(self.array(of, (rng.choice((1, 2, 5, 40)),), special=False))
            if fault == "shape":
                array = array[:, None] if rng.random() < 0.5 else array[:0]
                reasons = ("BAD_SHAPE", "BAD_BINS")
            seen = self.seen(array, shape=array.shape)
            operands, fields["edges"], edges = (x, seen), seen.message, array
            if fault == "dtype":
                reasons = ("BAD_DTYPE",)
        else:
            count, low = rng.choice((1, 2, 7, 100)), rng.choice((-3, 0, 0.5))
            high = low + rng.choice((1, 0.1, 100))
            if fault in ("shape", "dtype"):
                count, high = rng.choice(((0, high), (-1, high), (2**62, high), (count, low),
                                          (count, float("nan")), (count, -float("inf"))))
                reasons = ("BAD_BINS",)
            fields["even"] = dict(count=count, low=low, high=high)
            if not reasons:
                edges = np.arange(count + 1) * ((high - low) / count) + low
                edges[-1] = high
                edges = edges if whole else wide(narrow(edges, dtype), dtype)
        if fault == "view":
            reasons = (*reasons, "BAD_DTYPE")

        def judge(_, stored):
            values = wide(x.array, dtype).ravel()
            inside = values[(values >= edges[0]) & (values <= edges[-1])]
            bins = len(edges) - 1
            at = np.searchsorted(edges[:bins], inside, "right") - 1
            want = np.bincount(at, minlength=bins) if bins else np.empty(0)
            check(np.array_equal(stored, want), "counts", stored.tolist(), want.tolist())

        result = None if reasons else (I64, (len(edges) - 1,))
        return Case("histogram", "Histogram", fields, dtype, reasons, operands, result, judge)

    def search_sorted(self):
        rng, fault = self.rng, self.fault()
        dtype = self.dtype(*BYTES)
        keys = self.bad_operand(dtype) if fault == "view" else self.operand(dtype)
        array = self.array(dtype, (rng.choice((0, 1, 2, 5, 40)),))
        values = wide(array, dtype)
        order = np.argsort(values, kind="stable")
        array, values, reasons = array[order], values[order], keys.reasons
        if fault == "shape":
            array, reasons = array[:, None], ("BAD_SHAPE",)
        x = self.seen(array, shape=array.shape)
        right = rng.random() < 0.5
        if fault == "dtype":
            other = self.array(F64 if dtype != F64 else F32, (2,))
            keys, reasons = self.seen(other, shape=(2,)), ("BAD_DTYPE",)
        if fault == "view":
            reasons = (*reasons, "BAD_DTYPE")

        def judge(_, stored):
            side = "right" if right else "left"
            want = np.searchsorted(values, wide(keys.array, dtype), side)
            check(np.array_equal(stored, want), "positions", stored.tolist(), want.tolist())

        result = None if reasons else (I64, np.shape(keys.array))
        fields = dict(x=x.message, keys=keys.message, right=right)
        return Case("search_sorted", "SearchSorted", fields, dtype, reasons, (x, keys), result,
                    judge)

    def sum_by_label(self):
        rng, fault = self.rng, self.fault()
        dtype, mode = self.dtype(*BYTES), rng.choice(("raise", "raise", "wrap", "clip"))
        x = self.bad_operand(dtype) if fault == "view" else self.operand(dtype, rng.randint(1, 3))
        kind = rng.choice(INTEGERS if fault != "dtype" else (F32, F16, BOOL, U8, I8))
        length = rng.choice((1, 2, 3, 100, rng.randrange(2000)))
        if not x.reasons:  # The result fits in a response.
            length = min(length, max(1, 300_000 // max(1, math.prod(x.array.shape[1:]))))
        shape, reasons = (2,) if x.reasons else x.array.shape[:1], x.reasons
        if fault == "shape":
            shape, reasons = rng.choice((((shape[0] + 1,), ("BAD_SHAPE",)), ((), ("BAD_SHAPE",)),
                                         (shape, ("BAD_SHAPE",))))
            length = -1 if len(shape) == 1 and shape == x.array.shape[:1] else length
        count = math.prod(shape)
        array = np.array([rng.randrange(-length, length) if length > 0 else 0
                          for _ in range(count)], np.int64)
        if rng.random() < 0.1:
            array = array + rng.choice((0, length, -length - 1, 2**30))
        labels = self.seen(narrow(array.reshape(shape), kind), shape=shape)
        fields = dict(x=x.message, labels=labels.message, length=length,
                      mode=1 + ("raise", "wrap", "clip").index(mode))
        if fault == "dtype":
            reasons = (*reasons, "BAD_DTYPE")
        if fault == "view":
            reasons = (*reasons, "BAD_SHAPE", "BAD_INDEX")
        if not reasons and x.array.size:
            outside = mode == "raise" and ((array < -length) | (array >= length)).any()
            reasons = ("BAD_INDEX",) if outside or not length else ()
        of = I64 if dtype in (*INTEGERS, *BYTES) else dtype

        def judge(response, stored):
            rows = wide(x.array, dtype)
            at = array % max(length, 1) if mode != "clip" else np.clip(array, 0, length - 1)
            want, sizes = (np.zeros((length, *rows.shape[1:]), rows.dtype) for _ in range(2))
            if rows.size:
                with np.errstate(all="ignore"):
                    np.add.at(want, at, rows)
                    np.add.at(sizes, at, abs(rows))
            check_near(stored, want, sizes, of, response.stats.roundoff)

        result = None if reasons else (of, (length, *x.array.shape[1:]))
        return Case("sum_by_label", "SumByLabel", fields, dtype, reasons, (x, labels), result,
                    judge)

    def linalg(self):
        rng, fault = self.rng, self.fault()
        dtype = rng.choice((F32, F64)) if self.only not in (F32, F64) else self.only
        function = rng.randint(1, 7)
        cholesky, solve, determinant, eigh, qr = function == 1, function == 2, *(
            function == number for number in (4, 5, 6))
        stack, m = rng.choice(((), (), (2,), (3, 1))), rng.choice((0, 1, 2, 3, 5, 9))
        n = rng.choice((0, 1, 3, 8)) if function > 5 else m
        # The diagonal is so large that every matrix is positive definite.
        array = self.array(dtype, (*stack, m, n), special=False).astype("f8") / 8
        array = narrow(array + 9 * (1 + n) * np.eye(m, n), dtype)
        reasons = ()
        if fault == "shape":
            reasons = ("BAD_SHAPE",)
            array = array.reshape(-1)[:3]
        if fault == "dtype":
            array, reasons = narrow(array.astype("f8"), I64), ("BAD_DTYPE",)
        x = self.bad_operand(dtype) if fault == "view" else self.seen(array, shape=array.shape)
        operands, fields = (x,), dict(function=function, x=x.message)
        if fault == "view":
            reasons = (*x.reasons, "BAD_SHAPE")
        if solve:
            columns = rng.choice((0, 1, 4))
            of_b = rng.choice(((), (1,) if stack == (3, 1) else stack))
            b = self.array(dtype, (*of_b, m, columns), special=False)
            right = self.seen(b, shape=b.shape)
            operands, fields = (x, right), dict(fields, b=right.message)
            if fault == "dtype":
                reasons = ("BAD_DTYPE",)
        k = min(m, n)
        of = {1: (n, n), 3: (n, n), 4: (2,), 5: (n + 1, n), 6: (m + n, k), 7: (m + 1 + n, k)}
        result = None
        if not reasons:
            leading = np.broadcast_shapes(stack, b.shape[:-2]) if solve else stack
            result = dtype, (*leading, *((n, columns) if solve else of[function]))

        def judge(response, stored):
            full, stored = array.astype("f8"), stored.astype("f8")
            bound = 4 * response.stats.roundoff * max(1, m + n)

            def same(found, want, of_size):
                size = bound * np.max(np.abs(of_size), initial=100)
                check(np.all(np.abs(found - want) <= size), function, found.tolist(), want.tolist())

            if cholesky or eigh:
                full = np.tril(full) + np.swapaxes(np.tril(full, -1), -1, -2)
            if cholesky:
                same(stored @ np.swapaxes(stored, -1, -2), full, full)
            elif solve:
                same(full @ stored, np.broadcast_to(b, np.shape(full @ stored)), b)
            elif determinant:
                sign, log = np.linalg.slogdet(full)
                same(stored, np.stack([sign, log], -1), log)
            elif function == 3:
                same(full @ stored, np.broadcast_to(np.eye(n), full.shape), full)
            elif eigh:
                vectors = stored[..., 1:, :]
                same(full @ vectors, vectors * stored[..., :1, :], full)
            else:
                middle = np.zeros(0) if qr else stored[..., m:m + 1, :]
                right = stored[..., m + (not qr):, :]
                left = stored[..., :m, :] if qr else stored[..., :m, :] * middle
                same(left @ np.swapaxes(right, -1, -2), full, full)

        return Case("linalg", "Linalg", fields, dtype, reasons, operands, result, judge)

    # --- Sending a case ---

    def vary(self, case):
        """Adds a strategy and a launch to a valid case."""
        rng, kind = self.rng, self.rng.random()
        strategies = self.strategies.get(case.operation, [])
        if case.reasons or kind < 0.4 or not strategies:
            return case
        case.may_succeed = False
        if kind < 0.43:
            case.fields["strategy"] = rng.choice(("guess", "x" * 300, "cpu_serial "))
            case.reasons = ("UNKNOWN_STRATEGY",)
            return case
        strategy = rng.choice(strategies)
        case.fields["strategy"] = strategy.name
        refused = case.is_mixed and strategy.name not in MULTIPLY_MIXED
        # Only LAPACK's strategies decompose into singular values.
        refused |= case.fields.get("function") == 7 and "library" not in strategy.name
        if refused or not strategy.available or case.dtype not in strategy.dtypes:
            case.reasons = ("STRATEGY_UNSUPPORTED",)
            return case
        launch, knobs = {}, ("block_size", "grid_size", "items_per_thread")
        for knob in knobs:
            allowed = getattr(strategy, knob)
            if strategy.HasField(knob) and rng.random() < 0.2:
                launch[knob] = rng.choice((0, allowed.min, allowed.max))
        if rng.random() < 0.05:
            launch[rng.choice(knobs)] = 2**32 - 1
            case.reasons = ("BAD_LAUNCH",)
        case.fields["launch"] = launch or None
        case.may_succeed = not case.reasons
        return case


class ThroughPrograms(o.Client):
    """A client that sends half of its operations as steps of programs, among other steps."""

    def __init__(self, address, requests):
        super().__init__(address)
        self.requests = requests
        self.programs = 0

    def attempt(self, rpc, **fields):
        rng = self.requests.rng
        if rpc not in STEPS or rng.random() < 0.5:
            return super().attempt(rpc, **fields)
        # Cases of a few kinds, which may share launches.
        kinds = rng.choice((Requests.KINDS, ("dot",), ("reduce",), ("dot", "reduce", "matmul")))
        before, behind = rng.choice((0, 0, 1, 3, 20)), rng.choice((0, 0, 1, 4))
        make = self.requests
        make.only = rng.choice((None,) * 12 + DTYPES)
        cases = {None: Case("", rpc, fields, 0)}
        for i in range(before + behind):
            cases[i] = make.case(rng.choice(kinds))
            if rng.random() < 0.2:  # Steps with a strategy share no launch.
                make.vary(cases[i])
        make.only = None
        steps, places = [], {}
        for key in (*range(before), None, *range(before, before + behind)):
            step = cases[key].step()
            request = getattr(step, step.WhichOneof("operation"))
            for name in ("a", "b", "x", "mask", "edges", "keys"):
                if (name in request.DESCRIPTOR.fields_by_name and request.HasField(name)
                        and rng.random() < 0.3):
                    self.make_step_of(getattr(request, name), steps)
            places[key] = len(steps)
            steps.append(step)
        mine = places[None]
        if rng.random() < 0.2:
            reader = o.compute.ReduceRequest(x=o.compute.Operand(step=mine), op="REDUCE_OP_ANY")
            steps.append(o.compute.Step(reduce=reader))
        self.programs += 1
        outcome = super().attempt("Execute", steps=steps, stats=True)
        if not outcome.ok:
            return outcome
        results = [o.Outcome.of_step(result) for result in outcome.answer.results]
        check(len(results) == len(steps), len(results), "results of", len(steps), "steps")
        check(outcome.answer.device in o.Program.device.split(","), outcome.answer.device)
        for i, result in enumerate(results):
            if not result.ok:
                check(result.metadata.pop("step") == str(i), result)
        for key, case in cases.items():
            if key is not None:
                try:
                    case.check_outcome(results[places[key]])
                except Exception as error:
                    raise Wrong(f"step {places[key]} of {len(steps)}, {case}: {error}") from error
        if steps[-1].reduce.x.HasField("step") and steps[-1].reduce.x.step == mine:
            failed = results[-1].reason == "STEP_FAILED"
            # No step can use the result of a Select, or values that are not computed.
            unusable = rpc == "Select" or fields.get("values") == dict(none=True)
            refused = unusable and results[-1].reason == "BAD_OPERAND"
            check(refused or failed != results[mine].ok, results[-1], "after step", mine,
                  results[mine])
        return results[mine]

    @staticmethod
    def make_step_of(operand, steps):
        """Replaces an inline operand by a step that gives the same array."""
        tensor = operand.tensor
        if not operand.HasField("tensor") or len(tensor.shape) > 6 or -1 in tensor.shape:
            return
        size = math.prod(tensor.shape) * SIZES.get(tensor.dtype, 0)
        if len(tensor.data) != size or tensor.dtype not in DTYPES:
            return
        folded = o.compute.Tensor(dtype=tensor.dtype, shape=[*tensor.shape, 1], data=tensor.data)
        request = o.compute.ReduceRequest(
            x=o.compute.Operand(tensor=folded), op="REDUCE_OP_MAX", axes=[len(tensor.shape)],
            result=o.compute.Result(scratch=True))
        operand.step = len(steps)
        steps.append(o.compute.Step(reduce=request))
