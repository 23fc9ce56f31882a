#!/usr/bin/env python3
"""Random requests against all methods, and a model in NumPy and Python that knows every answer.

The first half of the time one client sends requests of which most are valid and the others have one
fault each; the model shares no code with the server and predicts status, values, metadata, versions
and lists. The second half twelve clients upload, cancel, replace, copy, delete and download three
names, in arrays that check themselves.

The sequence of the first half follows from the seed, which a failure prints.

usage: fuzz_model_test.py --server build/bin/tessera-server [--device cuda:0] [--seconds N]
                          [--seed S]
"""

import argparse
import math
import os
import random
import sys
import tempfile
import threading
import time
import traceback

import numpy as np

import outsider as o
from outsider import eventually, in_threads, outcome_of

F32, F64, F16, BF16, I32, I64, BOOL, U8, I8 = 1, 2, 3, 4, 5, 6, 7, 8, 9
DTYPES = (F32, F64, F16, BF16, I32, I64)
BYTES = (BOOL, U8, I8)
SIZES = {F32: 4, F64: 8, F16: 2, BF16: 2, I32: 4, I64: 8, BOOL: 1, U8: 1, I8: 1}
INTEGERS = (I32, I64)
EXTREMES = (
    -(2**63),
    -(2**62),
    -(2**31),
    -1,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
)
NAMES = ["a", "a/b", "a.b", "b", "b-1", "Z"]
BAD_NAMES = ["", "white space", "x" * 129, "\u00e4", "x\n", "x\0", "*", "\u2028"]
WRITING, READY = 1, 2
# A valid request may be too much for the limits that the server was started with.
TOO_MUCH = {
    "OPERATION_TOO_LONG",
    "SCRATCH_EXHAUSTED",
    "RESULT_TOO_LARGE",
    "QUOTA_EXCEEDED",
    "HOST_MEMORY_EXHAUSTED",
}
CODES = {
    "BUFFER_NOT_FOUND": "NOT_FOUND",
    "BUFFER_EXISTS": "ALREADY_EXISTS",
    "BUFFER_NOT_READY": "FAILED_PRECONDITION",
    "BUFFER_SEALED": "FAILED_PRECONDITION",
    "VERSION_MISMATCH": "FAILED_PRECONDITION",
    "VERSION_REQUIRED": "FAILED_PRECONDITION",
    "CHECKSUM_UNKNOWN": "FAILED_PRECONDITION",
    "STRATEGY_UNSUPPORTED": "FAILED_PRECONDITION",
    "OPERATION_TOO_LONG": "FAILED_PRECONDITION",
    "BAD_CHECKSUM": "DATA_LOSS",
    "SCRATCH_EXHAUSTED": "RESOURCE_EXHAUSTED",
    "QUOTA_EXCEEDED": "RESOURCE_EXHAUSTED",
    "HOST_MEMORY_EXHAUSTED": "RESOURCE_EXHAUSTED",
    "GPU_MEMORY_EXHAUSTED": "RESOURCE_EXHAUSTED",
}  # all others: INVALID_ARGUMENT


class Wrong(Exception):
    """The server's answer is not the model's."""


def check(condition, *what):
    if not condition:
        raise Wrong(" ".join(map(str, what)))


# --- Arithmetic of the model ----------------------------------------------------------------------


def bf16_values(bits):
    bits = np.asarray(bits)
    return (bits.ravel().astype(np.uint32) << 16).view(np.float32).reshape(bits.shape)


def bf16_bits(values):
    """Nearest, ties to even, of f64 values."""
    shape = np.shape(values)
    values = np.asarray(values, np.float64).ravel()
    # Below the normal range the numbers are the multiples of one.
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
    """The values as f64, or as i64."""
    array = np.asarray(array)
    if dtype == BF16:
        return bf16_values(array).astype(np.float64)
    return array.astype(np.int64 if dtype in (*INTEGERS, *BYTES) else np.float64)


def narrow(values, dtype):
    """f64 or i64 to an array of the wire's type, rounded to nearest; integers wrap."""
    values = np.asarray(values)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == BF16:
            return bf16_bits(values.astype(np.float64))
        return values.astype(o.NUMPY_TYPES[dtype])


def cast(array, source, target):
    """CopyBuffer's: to nearest; to integers truncated and saturated, NaN is 0."""
    if source == target:
        return array
    values = wide(array, source)
    if target == BOOL:
        return values != 0
    if target in (*INTEGERS, U8, I8):
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
    return narrow(values, target)


def random_array(rng, dtype, shape, special=True):
    count = int(np.prod(shape, dtype=np.int64)) if shape else 1
    kind = rng.random()
    if dtype == BOOL:
        return np.array([rng.random() < 0.5 for _ in range(count)], bool).reshape(shape)
    if dtype in (U8, I8):
        return np.frombuffer(rng.randbytes(count), o.NUMPY_TYPES[dtype]).reshape(shape)
    if dtype in INTEGERS:
        values = np.array([rng.randint(-9, 9) for _ in range(count)], np.int64)
        if special and kind < 0.05 and count:
            values[rng.randrange(count)] = rng.choice([2**31 - 1, -(2**31)])
        return values.astype(o.NUMPY_TYPES[dtype]).reshape(shape)
    if kind < 0.6:
        values = np.array([float(rng.randint(-8, 8)) for _ in range(count)])
    else:
        values = np.array([rng.gauss(0, 1) for _ in range(count)])
    if special and kind > 0.95 and count:
        values[rng.randrange(count)] = rng.choice([math.nan, math.inf, -math.inf, -0.0])
    return narrow(values, dtype).reshape(shape)


def strided(array, view):
    """The view's elements; view is None or (offset, shape, strides) and valid."""
    if view is None:
        return array
    offset, shape, strides = view
    flat = array.ravel()
    index = np.full(shape, offset, np.int64)
    for axis, (extent, stride) in enumerate(zip(shape, strides)):
        steps = np.arange(extent, dtype=np.int64) * stride
        index += steps.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return flat[index.ravel()].reshape(shape)


# --- The model's buffers --------------------------------------------------------------------------


class Held:
    """A READY buffer or a draft."""

    def __init__(self, name, dtype, shape, version, replace=False, ttl=False):
        self.name, self.dtype, self.shape, self.version = name, dtype, tuple(shape), version
        self.replace, self.ttl = replace, ttl
        size = SIZES[dtype] * math.prod(shape)
        self.data = bytearray(size)
        self.written = bytearray(size)  # how often, up to 2
        self.summed = bytearray(size)  # came with a checksum
        self.ready = False
        self.crc = None  # None: absent; "?": either

    def set(self, data, crc=None):
        self.data = bytearray(data)
        self.written = bytearray(b"\1" * len(data))
        self.ready, self.crc = True, crc
        return self

    def write(self, offset, data, summed):
        self.data[offset : offset + len(data)] = data
        for i in range(offset, offset + len(data)):
            self.written[i] = min(2, self.written[i] + 1)
            self.summed[i] = summed

    def missing(self):
        gaps, begin = [], None
        for i, count in enumerate(self.written):
            if not count and begin is None:
                begin = i
            elif count and begin is not None:
                gaps.append((begin, i))
                begin = None
        if begin is not None:
            gaps.append((begin, len(self.written)))
        return gaps

    def committed(self):
        gaps = self.missing()
        return gaps[0][0] if gaps else len(self.data)

    def crc_known(self):
        return all(count == 1 for count in self.written) and all(self.summed)

    def array(self):
        return np.frombuffer(bytes(self.data), o.NUMPY_TYPES[self.dtype]).reshape(self.shape)

    def check(self, message):
        """That the server's Buffer says the same."""
        said = (
            message.name,
            message.dtype,
            tuple(message.shape),
            message.size_bytes,
            message.state,
            message.version,
            message.committed_bytes,
        )
        known = (
            self.name,
            self.dtype,
            self.shape,
            len(self.data),
            READY if self.ready else WRITING,
            self.version,
            self.committed(),
        )
        check(said == known, "buffer", said, "is not", known)
        check(message.device in o.Program.device.split(","), "device", message.device)
        if message.shards:
            cuts = [(s.begin, s.end) for s in message.shards]
            check(len(cuts) > 1 and message.shards[0].device == message.device, "shards", message)
            check([0, *(c[1] for c in cuts)] == [*(c[0] for c in cuts), len(self.data)], cuts)
        check(message.create_time.seconds > 0, "no create_time")
        if self.ready:
            check(message.HasField("expire_time") == self.ttl, "expire_time", message.expire_time)
            if self.crc is None:
                check(not message.HasField("crc32c"), "a crc32c that nobody gave")
            elif self.crc != "?":
                check(
                    message.HasField("crc32c") and message.crc32c == self.crc,
                    "crc32c",
                    message.crc32c,
                    "is not",
                    self.crc,
                )


STEPS = {
    "Dot": "dot",
    "Reduce": "reduce",
    "Matmul": "matmul",
    "Add": "add",
    "WindowSum": "window_sum",
    "Map": "map",
    "TopK": "top_k",
}


class ThroughPrograms(o.Client):
    """A client whose operations are, half of them, steps of programs among other steps."""

    def __init__(self, address, seed):
        super().__init__(address)
        self.rng = random.Random(seed)
        self.programs = 0

    def attempt(self, rpc, **fields):
        if rpc not in STEPS or self.rng.random() < 0.5:
            return super().attempt(rpc, **fields)
        request = getattr(o.compute, rpc + "Request")(**fields)
        steps = [self.other_step() for _ in range(self.rng.choice((0, 0, 1, 3, 20)))]
        for name in ("a", "b", "x"):
            if name in request.DESCRIPTOR.fields_by_name and self.rng.random() < 0.3:
                self.make_step_of(getattr(request, name), steps)
        mine = len(steps)
        steps.append(o.compute.Step(**{STEPS[rpc]: request}))
        steps += [self.other_step(mine) for _ in range(self.rng.choice((0, 1, 4)))]
        self.programs += 1
        outcome = super().attempt("Execute", steps=steps, stats=True)
        if not outcome.ok:
            return outcome
        results = outcome.answer.results
        check(len(results) == len(steps), len(results), "results of", len(steps), "steps")
        check(outcome.answer.device in o.Program.device.split(","), outcome.answer.device)
        mine_failed = results[mine].WhichOneof("result") == "error"
        for i, (step, result) in enumerate(zip(steps, results)):
            if i != mine:
                self.check_other(step, o.Outcome.of_step(result), mine, mine_failed)
        outcome = o.Outcome.of_step(results[mine])
        if not outcome.ok:
            check(outcome.metadata.pop("step") == str(mine), outcome)
        return outcome

    def make_step_of(self, operand, steps):
        """Replaces an inline operand by a step that gives the same array."""
        tensor = operand.tensor
        if not operand.HasField("tensor") or len(tensor.shape) > 6 or -1 in tensor.shape:
            return
        size = math.prod(tensor.shape) * SIZES.get(tensor.dtype, 0)
        if len(tensor.data) != size or tensor.dtype not in DTYPES:
            return
        axis = len(tensor.shape)
        folded = o.compute.Tensor(
            dtype=tensor.dtype, shape=[*tensor.shape, 1], data=tensor.data
        )
        request = o.compute.ReduceRequest(
            x=o.compute.Operand(tensor=folded),
            op="REDUCE_OP_MAX",
            axes=[axis],
            result=o.compute.Result(scratch=True),
        )
        operand.step = len(steps)
        steps.append(o.compute.Step(reduce=request))

    def other_step(self, before=None):
        """A step whose result is known, or that fails."""
        rng = self.rng
        vector = np.array([rng.randint(-9, 9) for _ in range(rng.choice((1, 7, 300)))], "<f4")
        x = o.inline(vector)
        kind = rng.randrange(4)
        if kind == 0:
            return o.compute.Step(dot=o.compute.DotRequest(a=x, b=x))
        if kind == 1:
            return o.compute.Step(reduce=o.compute.ReduceRequest(x=x, op="REDUCE_OP_SUM"))
        if kind == 2 and before is not None:
            return o.compute.Step(
                reduce=o.compute.ReduceRequest(
                    x=o.compute.Operand(step=before), op="REDUCE_OP_ANY"
                )
            )
        return o.compute.Step(dot=o.compute.DotRequest(a=x, b=o.resident("no such buffer")))

    @staticmethod
    def check_other(step, outcome, mine, mine_failed):
        kind = step.WhichOneof("operation")
        operand = step.dot.a if kind == "dot" else step.reduce.x
        if kind == "dot" and step.dot.b.HasField("buffer"):
            check(outcome.reason == "BUFFER_NOT_FOUND", outcome)
        elif operand.HasField("step"):
            failed = outcome.reason == "STEP_FAILED"
            check(failed == mine_failed, outcome, "after step", mine, "failed:", mine_failed)
        elif operand.tensor.dtype == F32 and len(operand.tensor.shape) == 1:
            values = o.to_numpy(operand.tensor).astype(np.float64)
            expected = (values * values).sum() if kind == "dot" else values.sum()
            if kind == "dot" or step.reduce.op == 1:
                check(outcome.ok and outcome.answer.value.real == expected, outcome, expected)


class Fuzzer:
    def __init__(self, client, seed):
        self.client = client
        self.rng = random.Random(seed)
        self.live = {}
        self.drafts = {}  # name: drafts by version
        self.newest = 0  # version
        self.history = {}  # name: the largest version that was READY
        self.calls = {}
        self.ended = {}
        self.what = ""
        rows = client.call("ListStrategies", backend=client.device().backend).strategies
        self.rows = {}
        for row in rows:
            self.rows.setdefault(row.operation, []).append(row)

    # --- Helpers ----------------------------------------------------------------------------------

    def pick_name(self):
        return self.rng.choice(NAMES)

    def expect(self, outcome, *reasons, ok=False):
        """That the call ended with one of the reasons, or with OK; whether it is OK."""
        self.ended[outcome.reason or outcome.code] = (
            self.ended.get(outcome.reason or outcome.code, 0) + 1
        )
        if outcome.ok:
            check(ok, "OK, not", reasons)
            return True
        # What a row of a GPU can take beside its types is the row's own knowledge.
        own_needs = (
            outcome.reason == "STRATEGY_UNSUPPORTED"
            and o.Program.device != "cpu"
            and not outcome.metadata.get("needs", "dtype").startswith("dtype")
        )
        check(own_needs or outcome.reason in reasons, outcome, "is not", ("OK",) * ok + reasons)
        check(outcome.code == CODES.get(outcome.reason, "INVALID_ARGUMENT"), outcome)
        check(outcome.domain == "tessera", outcome)
        check(outcome.text, "no text", outcome)
        return False

    def new_version(self, message):
        check(message.version > self.newest, "version", message.version, "after", self.newest)
        self.newest = message.version
        return message.version

    def taken(self, name):
        """Whether a new buffer without replace is refused: yes, no, or None for either."""
        if name in self.live:
            return True
        return any(not draft.replace for draft in self.drafts.get(name, []))

    def become_ready(self, held):
        self.live[held.name] = held
        self.history[held.name] = max(held.version, self.history.get(held.name, 0))

    def spec(self, dtype, shape, **more):
        return o.buffers.BufferSpec(dtype=dtype, shape=shape, **more)

    def random_spec(self):
        """(spec, dtype, shape, replace, ttl), or with one fault (spec, reasons)."""
        rng = self.rng
        dtype = rng.choice((*DTYPES, *BYTES))
        shape = [rng.choice((0, 1, 2, 3, 5, 8)) for _ in range(rng.randrange(4))]
        replace, ttl = rng.random() < 0.6, rng.random() < 0.2
        more = dict(replace=replace)
        if ttl:
            more["ttl"] = {"seconds": 3600}
        fault = rng.random()
        if 0.11 <= fault < 0.13:
            placement, reason = rng.choice(
                ((["all", "all"], "BAD_PLACEMENT"), ([""], "BAD_PLACEMENT"), (["x"], "BAD_DEVICE"))
            )
            return self.spec(dtype, shape, placement=placement, **more), (reason,)
        if fault > 0.7:
            more["placement"] = ["all"]
            if rng.random() < 0.3:
                shape = [rng.choice((1500, 2049, 4001))]  # enough for several devices
        if fault < 0.02:
            return self.spec(rng.choice((0, 10, 99, -1)), shape, **more), ("BAD_DTYPE",)
        if fault < 0.06:
            bad = rng.choice(([-1], [2, -(2**63)], [2**62, 2**62], [1] * 9, [2**63 - 1, 2]))
            return self.spec(dtype, bad, **more), ("BAD_SHAPE", "QUOTA_EXCEEDED")
        if fault < 0.07:
            return self.spec(dtype, [2**40], **more), ("QUOTA_EXCEEDED",)
        if fault < 0.09:
            more["ttl"] = rng.choice(
                (
                    {"seconds": -1},
                    {"seconds": 1, "nanos": -1},
                    {"nanos": 2_000_000_000},
                    {"seconds": 2**63 - 1},
                )
            )
            return self.spec(dtype, shape, **more), ("BAD_TTL",)
        if fault < 0.11:
            return self.spec(dtype, shape, device="cuda:77", **more), ("BAD_DEVICE",)
        return self.spec(dtype, shape, **more), dtype, shape, replace, ttl

    def wrong_version(self):
        return self.rng.choice((1, self.newest + 1, self.newest + 10**9, 2**64 - 1))

    def random_bytes(self, dtype, shape):
        return random_array(self.rng, dtype, tuple(shape)).tobytes()

    # --- Buffers ----------------------------------------------------------------------------------

    def create(self):
        name = self.pick_name()
        if len(self.drafts.get(name, ())) >= 4:
            return
        spec, *rest = self.random_spec()
        if self.rng.random() < 0.03:
            outcome = self.client.attempt(
                "CreateBuffer", name=self.rng.choice(BAD_NAMES), spec=self.spec(F32, [1])
            )
            self.expect(outcome, "BAD_NAME")
            return
        outcome = self.client.attempt("CreateBuffer", name=name, spec=spec)
        if len(rest) == 1:
            self.expect(outcome, *rest[0], *(("BUFFER_EXISTS",) * self.taken(name)))
            return
        dtype, shape, replace, ttl = rest
        if not replace and self.taken(name):
            self.expect(outcome, "BUFFER_EXISTS")
            return
        self.expect(outcome, ok=True)
        draft = Held(name, dtype, shape, self.new_version(outcome.answer.buffer), replace, ttl)
        draft.check(outcome.answer.buffer)
        self.drafts.setdefault(name, []).append(draft)

    def upload(self):
        """A stream that creates."""
        rng, name = self.rng, self.pick_name()
        spec, *rest = self.random_spec()
        if len(rest) == 1:
            outcome = self.client.try_upload([dict(name=name, spec=spec, data=b"")])
            self.expect(outcome, *rest[0], *(("BUFFER_EXISTS",) * self.taken(name)))
            return
        dtype, shape, replace, ttl = rest
        data = self.random_bytes(dtype, shape)
        cuts = sorted(rng.sample(range(len(data) + 1), min(len(data), rng.randrange(4))))
        pieces = [(a, data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)])]
        explicit = rng.random() < 0.4
        if explicit:
            rng.shuffle(pieces)
        sums = rng.random() < 0.5
        fault = rng.choice(
            (None,) * 6 + ("crc", "whole", "unknown", "range", "short", "other", "repeat")
        )
        messages = []
        for i, (offset, piece) in enumerate(pieces):
            fields = dict(data=piece)
            if i == 0 or rng.random() < 0.3:
                fields.update(name=name, spec=spec)
            if explicit:
                fields["offset"] = offset
            if sums:
                fields["crc32c"] = o.crc32c(piece)
            messages.append(fields)
        whole = sums and rng.random() < 0.5
        right = o.crc32c(data)
        if whole:
            rng.choice(messages)["buffer_crc32c"] = right
        reasons = ()
        if fault == "crc":
            message = rng.choice(messages)
            message["crc32c"] = o.crc32c(message["data"]) ^ (1 << rng.randrange(32))
            reasons = ("BAD_CHECKSUM",)
        elif fault == "whole" and sums:
            for message in messages:
                message.pop("buffer_crc32c", None)
            messages[-1]["buffer_crc32c"] = right ^ 0x80000000
            reasons = ("BAD_CHECKSUM",)
        elif fault == "unknown" and data and not sums:
            messages[0]["buffer_crc32c"] = right
            reasons = ("CHECKSUM_UNKNOWN",)
        elif fault == "range":
            messages.append(
                dict(
                    rng.choice(
                        (
                            dict(data=b"x", offset=len(data)),
                            dict(data=b"xy", offset=2**64 - 1),
                            dict(data=b"x" * (len(data) + 1), offset=0),
                        )
                    )
                )
            )
            reasons = ("BAD_RANGE", *(("CHECKSUM_UNKNOWN",) if whole else ()))
        elif fault == "short" and len(data):
            messages[-1]["data"] = messages[-1]["data"][:-1]
            messages[-1].pop("crc32c", None)
            messages[-1].pop("buffer_crc32c", None)
            if len(pieces[-1][1]):
                reasons = ("MISSING_DATA", "CHECKSUM_UNKNOWN")
            else:
                return
        elif fault == "other":
            messages.append(rng.choice((dict(name="other"), dict(spec=self.spec(dtype, [77])))))
            reasons = ("BAD_MESSAGE", *(("CHECKSUM_UNKNOWN",) if whole else ()))
        crc = right if sums and data else "?" if not data else None
        if fault == "repeat" and pieces[-1][1]:
            # The last piece once more: the bytes are the same, but some came twice.
            offset, piece = pieces[-1]
            messages.append(dict(data=piece, offset=offset))
            crc = None
            if whole:
                reasons = ("CHECKSUM_UNKNOWN",)
        exists = not replace and self.taken(name)
        outcome = self.client.try_upload(messages)
        if exists:
            self.expect(outcome, "BUFFER_EXISTS")
        elif reasons:
            self.expect(outcome, *reasons)
        else:
            self.expect(outcome, ok=True)
            answer = outcome.answer
            check(
                answer.received_bytes == sum(len(m.get("data", b"")) for m in messages),
                "received_bytes",
                answer.received_bytes,
            )
            held = Held(name, dtype, shape, self.new_version(answer.buffer), replace, ttl)
            held.set(data, crc).check(answer.buffer)
            self.become_ready(held)

    def find_draft(self, name, version):
        """(draft, reasons why there is none)"""
        drafts = self.drafts.get(name, [])
        if version == 0:
            if len(drafts) == 1:
                return drafts[0], ()
            return None, ("VERSION_REQUIRED",) if drafts else ("BUFFER_NOT_FOUND",)
        for draft in drafts:
            if draft.version == version:
                return draft, ()
        if drafts or name in self.live:
            return None, ("VERSION_MISMATCH", "BUFFER_NOT_FOUND")
        return None, ("BUFFER_NOT_FOUND",)

    def pick_version(self, name):
        drafts = self.drafts.get(name, [])
        kind = self.rng.random()
        if drafts and kind < 0.7:
            return self.rng.choice(drafts).version
        if kind < 0.8 and name in self.live:
            return self.live[name].version
        return 0 if kind < 0.93 else self.wrong_version()

    def upload_ranges(self):
        rng = self.rng
        names = [name for name in self.drafts if self.drafts[name]]
        name = rng.choice(names) if names and rng.random() < 0.9 else self.pick_name()
        version = self.pick_version(name)
        draft, reasons = self.find_draft(name, version)
        if draft is None and name in self.live:
            live = self.live[name]
            if version in (0, live.version) and not (version == 0 and self.drafts.get(name)):
                reasons = ("BUFFER_SEALED",)
            elif version:
                reasons = (*reasons, "BUFFER_SEALED")
        size = len(draft.data) if draft else 8
        if draft and draft.dtype == BOOL:
            data = random_array(rng, BOOL, (size,)).tobytes()
        else:
            data = random_array(rng, I64, (size // 8 + 1,)).tobytes()[:size]
        wrong = rng.random()
        first = dict(name=name, version=version)
        if draft and wrong < 0.05:
            outcome = self.client.try_upload(
                [dict(first, offset=rng.choice((size, 2**63, 2**64 - 1)), data=b"x")]
            )
            self.expect(outcome, "BAD_RANGE")
            return
        if draft and wrong < 0.1 and size:
            outcome = self.client.try_upload([dict(first, offset=0, data=data, crc32c=12345)])
            self.expect(outcome, "BAD_CHECKSUM")
            return
        begin = rng.randrange(size + 1)
        end = rng.randrange(begin, size + 1)
        if draft and rng.random() < 0.6 and draft.missing():
            begin, end = rng.choice(draft.missing())
        summed = rng.random() < 0.7
        middle = (begin + end) // 2
        pieces = [(begin, middle), (middle, end)] if rng.random() < 0.5 else [(begin, end)]
        messages = []
        for i, (a, b) in enumerate(pieces):
            fields = dict(data=data[a:b])
            if i == 0:
                fields.update(first, offset=a)
            if summed:
                fields["crc32c"] = o.crc32c(data[a:b])
            messages.append(fields)
        outcome = self.client.try_upload(messages)
        if self.expect(outcome, *reasons, ok=draft is not None):
            check(outcome.answer.received_bytes == end - begin, "received_bytes")
            for a, b in pieces:
                draft.write(a, data[a:b], summed)
            draft.check(outcome.answer.buffer)

    def seal(self):
        rng = self.rng
        names = [name for name in self.drafts if self.drafts[name]]
        name = rng.choice(names) if names and rng.random() < 0.9 else self.pick_name()
        version = self.pick_version(name)
        live = self.live.get(name)
        if live and version == live.version:
            outcome = self.client.attempt("SealBuffer", name=name, version=version)
            self.expect(outcome, ok=True)
            live.check(outcome.answer.buffer)
            return
        draft, reasons = self.find_draft(name, version)
        fields = dict(name=name, version=version)
        if draft and draft.data and rng.random() < 0.4:
            fields["crc32c"] = o.crc32c(draft.data)
            if rng.random() < 0.2:
                fields["crc32c"] ^= 1
        outcome = self.client.attempt("SealBuffer", **fields)
        if draft is None:
            self.expect(outcome, *reasons)
            return
        reasons = []
        if draft.missing():
            reasons.append("BUFFER_NOT_READY")
        if name in self.live and not draft.replace:
            reasons.append("BUFFER_EXISTS")
        if "crc32c" in fields:
            if not draft.crc_known():
                reasons.append("CHECKSUM_UNKNOWN")
            elif fields["crc32c"] != o.crc32c(draft.data):
                reasons.append("BAD_CHECKSUM")
        if not self.expect(outcome, *reasons, ok=not reasons):
            if outcome.reason in ("BUFFER_EXISTS", "BAD_CHECKSUM"):
                # The proto does not say whether the draft stays.
                self.client.attempt("DeleteBuffer", name=name, version=draft.version)
                self.drafts[name].remove(draft)
            return
        message = outcome.answer.buffer
        if name in self.live and self.live[name].version > draft.version:
            check(message.version != draft.version, "an old version after a newer one")
        elif self.history.get(name, 0) < draft.version:
            check(message.version == draft.version, "the draft's version has changed")
        if message.version != draft.version:
            draft.version = self.new_version(message)
        draft.ready = True
        draft.crc = "?" if not draft.data else o.crc32c(draft.data) if draft.crc_known() else None
        draft.check(message)
        self.drafts[name].remove(draft)
        self.become_ready(draft)

    def get(self):
        name = self.pick_name()
        version = self.pick_version(name) if self.rng.random() < 0.5 else 0
        outcome = self.client.attempt("GetBuffer", name=name, version=version)
        drafts = self.drafts.get(name, [])
        held = [x for x in [self.live.get(name), *drafts] if x]
        if version:
            found = [x for x in held if x.version == version]
        else:
            found = [self.live[name]] if name in self.live else drafts[-1:]
        if not found:
            self.expect(outcome, "VERSION_MISMATCH" if held else "BUFFER_NOT_FOUND")
            return
        self.expect(outcome, ok=True)
        answer = outcome.answer
        found[0].check(answer.buffer)
        if not found[0].ready:
            check(
                [(gap.begin, gap.end) for gap in answer.missing] == found[0].missing()[:100],
                "missing",
                answer.missing,
                "is not",
                found[0].missing(),
            )
        check(len(answer.drafts) == len(drafts), "drafts", answer.drafts)
        for message, draft in zip(answer.drafts, drafts):
            draft.check(message)

    def list(self):
        rng = self.rng
        prefix = rng.choice(("", "a", "a/", "b", "Z", "none"))
        size = rng.choice((0, 1, 2, 5, 1000))
        if rng.random() < 0.1:
            fields = rng.choice(
                (
                    dict(page_size=-1),
                    dict(page_size=1001),
                    dict(page_size=2**31 - 1),
                    dict(page_size=-(2**31)),
                    dict(page_token="guess\0"),
                )
            )
            self.expect(self.client.attempt("ListBuffers", **fields), "BAD_PAGE")
            return
        expected = []
        for name in sorted({*self.live, *(n for n in self.drafts if self.drafts[n])}):
            if name.startswith(prefix):
                expected.append(self.live.get(name) or self.drafts[name][-1])
        seen, token = [], ""
        for _ in range(20):
            outcome = self.client.attempt(
                "ListBuffers", prefix=prefix, page_size=size, page_token=token
            )
            self.expect(outcome, ok=True)
            check(len(outcome.answer.buffers) <= (size or 100), "a page is too long")
            seen += outcome.answer.buffers
            token = outcome.answer.next_page_token
            if not token:
                break
        check(
            [x.name for x in seen] == [x.name for x in expected],
            [x.name for x in seen],
            "is not",
            [x.name for x in expected],
        )
        for message, held in zip(seen, expected):
            held.check(message)

    def update(self):
        name = self.pick_name()
        drafts = self.drafts.get(name, [])
        held = self.live.get(name) or (drafts[0] if len(drafts) == 1 else None)
        if held is None and drafts:
            return
        fields, reasons = dict(name=name), ()
        ttl = self.rng.random() < 0.5
        if ttl:
            fields["ttl"] = {"seconds": 7200}
        if self.rng.random() < 0.1:
            fields["ttl"], reasons = {"seconds": -5}, ("BAD_TTL", "BUFFER_NOT_FOUND")
        elif self.rng.random() < 0.1:
            fields["version"] = self.wrong_version()
            reasons = ("VERSION_MISMATCH",) if held else ("BUFFER_NOT_FOUND",)
        elif held is None:
            reasons = ("BUFFER_NOT_FOUND",)
        outcome = self.client.attempt("UpdateBuffer", **fields)
        if self.expect(outcome, *reasons, ok=not reasons):
            held.ttl = ttl
            held.check(outcome.answer.buffer)

    def delete(self):
        name = self.pick_name()
        version = self.pick_version(name) if self.rng.random() < 0.6 else 0
        drafts = self.drafts.get(name, [])
        outcome = self.client.attempt("DeleteBuffer", name=name, version=version)
        if not drafts and name not in self.live:
            self.expect(outcome, "BUFFER_NOT_FOUND")
        elif version == 0:
            self.expect(outcome, ok=True)
            self.live.pop(name, None)
            self.drafts.pop(name, None)
        elif name in self.live and self.live[name].version == version:
            self.expect(outcome, ok=True)
            del self.live[name]
        else:
            found = [draft for draft in drafts if draft.version == version]
            if self.expect(outcome, "VERSION_MISMATCH", ok=bool(found)):
                drafts.remove(found[0])
            else:
                check(not found, "a draft that is there is not found")

    def not_readable(self, name, version=0):
        """Reasons why the name cannot be read."""
        if name in self.live:
            return () if version in (0, self.live[name].version) else ("VERSION_MISMATCH",)
        if self.drafts.get(name):
            return ("BUFFER_NOT_READY", *(("VERSION_MISMATCH",) if version else ()))
        return ("BUFFER_NOT_FOUND",)

    def download(self):
        rng, name = self.rng, self.pick_name()
        live = self.live.get(name)
        version = rng.choice((0, 0, live.version if live else 0, self.wrong_version()))
        size = len(live.data) if live else 8
        offset, limit = rng.randrange(size + 1), rng.choice((0, 0, rng.randrange(size + 2)))
        reasons = self.not_readable(name, version)
        if not reasons and rng.random() < 0.1:
            offset, reasons = rng.choice((size + 1, 2**63, 2**64 - 1)), ("BAD_RANGE",)
        beyond = not reasons and offset + limit > size
        sums = rng.random() < 0.5
        request = o.buffers.DownloadRequest(
            name=name, offset=offset, limit=limit, version=version, checksums=sums
        )
        outcome = outcome_of(lambda: list(self.client.b.Download(request, timeout=30)))
        if not self.expect(outcome, *reasons, *(("BAD_RANGE",) if beyond else ()), ok=not reasons):
            return
        messages = outcome.answer
        at = offset
        for i, message in enumerate(messages):
            check(message.HasField("buffer") == (i == 0), "buffer in message", i)
            check(message.offset == at, "offset", message.offset, "is not", at)
            check(message.HasField("crc32c") == sums, "checksum")
            check(not sums or message.crc32c == o.crc32c(message.data), "wrong checksum")
            at += len(message.data)
        if messages:
            live.check(messages[0].buffer)
        end = min(size, offset + limit) if limit else size
        check(b"".join(m.data for m in messages) == bytes(live.data[offset:end]), "data differs")

    # --- Operands ---------------------------------------------------------------------------------

    def random_view(self, count, rank=None):
        """A valid view of an array of count elements: (offset, shape, strides)."""
        rng = self.rng
        if rank is None:
            rank = rng.randrange(4)
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

    def bad_view(self, count):
        """A view that reaches outside, or is none: (message, reasons)."""
        rng = self.rng
        view = o.buffers.View
        size = max(count, 1)
        return rng.choice(
            (
                view(offset=count, shape=[1]),
                view(offset=rng.choice(EXTREMES), shape=[1 if count else 2]),
                view(shape=[size + 1]),
                view(shape=[2], strides=[size]),
                view(shape=[2], strides=[-1]),
                view(shape=[2], strides=[rng.choice(EXTREMES)])
                if count < 3
                else view(shape=[count + 1]),
                view(shape=[2, 2], strides=[2**62, 2**62]),
                view(shape=[2**63 - 1], strides=[2**63 - 1]),
                view(shape=[-1]),
                view(shape=[2, -(2**63)]),
                view(shape=[1] * 9, strides=[0] * 9),
                view(shape=[1, 1], strides=[1]),
                view(shape=[1], strides=[1, 1]),
            )
        ), ("BAD_VIEW", "BAD_SHAPE")

    def operand(self, dtype, rank=None, shape=None, special=True, fault=False):
        """(message, array as the view shows it, reasons, version)"""
        rng = self.rng
        if fault and rng.random() < 0.3:
            name = rng.choice(NAMES)
            version = self.wrong_version()
            if name in self.live:
                return (o.resident(name, version=version), None, ("VERSION_MISMATCH",), 0)
            return o.resident(name), None, self.not_readable(name), 0
        if fault and rng.random() < 0.3:
            data = rng.choice((b"", b"1234567", b"x" * 100))
            bad = o.compute.Tensor(
                dtype=dtype, shape=rng.choice(([1, 3], [-1], [2**62, 8])), data=data
            )
            return (
                rng.choice((o.compute.Operand(), o.compute.Operand(tensor=bad))),
                None,
                ("BAD_OPERAND", "BAD_SHAPE", "BAD_MESSAGE", "BAD_BOOL"),
                0,
            )
        if fault and rng.random() < 0.1:
            bad = o.compute.Tensor(dtype=rng.choice((0, 10, -3)), shape=[1], data=b"1234")
            return o.compute.Operand(tensor=bad), None, ("BAD_DTYPE", "BAD_OPERAND"), 0
        names = [n for n, held in self.live.items() if held.dtype == dtype]
        array, name, version = None, None, 0
        if names and rng.random() < 0.5:
            name = rng.choice(names)
            array = self.live[name].array()
            version = self.live[name].version
            if shape is not None and array.size == 0 and math.prod(shape):
                name = None
        if name is None:
            version = 0
            own = (
                tuple(shape)
                if shape is not None
                else tuple(
                    rng.choice((0, 1, 2, 3, 5)) if rng.random() < 0.9 else 17
                    for _ in range(rng.randrange(4) if rank is None else rank)
                )
            )
            array = random_array(rng, dtype, own, special)
        if fault:
            view, reasons = self.bad_view(array.size)
        else:
            reasons, view = (), None
            if shape is not None:
                if tuple(shape) != array.shape:
                    view = self.view_of_shape(array.size, shape)
            elif (rank is not None and array.ndim != rank) or rng.random() < 0.5:
                chosen = self.random_view(array.size, rank)
                view = chosen if chosen is not None else None
        message = None
        if view is not None and not reasons:
            offset, extents, strides = view
            message = o.buffers.View(offset=offset, shape=extents, strides=strides)
            array_seen = strided(array, view)
        else:
            message = view
            array_seen = array
        pinned = version if rng.random() < 0.3 else 0
        made = o.resident(name, message, pinned) if name else o.inline(array, message)
        return made, array_seen, reasons, version

    def view_of_shape(self, count, shape):
        """A valid view with these extents of an array of count elements (some, if they have)."""
        strides, left = [], count - 1
        for extent in shape:
            stride = 0
            if extent > 1 and left > 0:
                reach = left // (extent - 1)
                stride = self.rng.randint(0, min(reach, 3))
                left -= stride * (extent - 1)
            strides.append(stride)
        return self.rng.randint(0, max(0, left)), list(shape), strides

    def strategy(self, operation, dtype):
        """(name, launch, reasons)"""
        rng = self.rng
        rows = self.rows.get(operation, [])
        kind = rng.random()
        if kind < 0.4:
            return "", None, ()
        if kind < 0.43:
            return rng.choice(("guess", "x" * 300, "cpu_serial ")), None, ("UNKNOWN_STRATEGY",)
        row = rng.choice(rows)
        if not row.available or dtype not in row.dtypes:
            return row.name, None, ("STRATEGY_UNSUPPORTED",)
        launch, reasons = {}, ()
        for knob in ("block_size", "grid_size", "items_per_thread"):
            allowed = getattr(row, knob)
            if row.HasField(knob) and rng.random() < 0.2:
                launch[knob] = rng.choice((0, allowed.min, allowed.max))
        if rng.random() < 0.05:
            launch[rng.choice(("block_size", "grid_size", "items_per_thread"))] = 2**32 - 1
            reasons = ("BAD_LAUNCH",)
        return row.name, launch or None, reasons

    def target(self):
        """(result, name or None, replace, ttl, reasons)"""
        rng = self.rng
        kind = rng.random()
        if kind < 0.55:
            return rng.choice((None, o.compute.Result(inline=True))), None, False, False, ()
        if kind < 0.58:
            return o.into(rng.choice(BAD_NAMES)), None, False, False, ("BAD_NAME",)
        name, replace, ttl = self.pick_name(), rng.random() < 0.7, rng.random() < 0.2
        more = dict(ttl={"seconds": 3600}) if ttl else {}
        return o.into(name, replace=replace, **more), name, replace, ttl, ()

    def land(self, outcome, target, expected, dtype, near, reasons):
        """Checks an array result, inline or in a buffer, by near(actual)."""
        _, name, replace, ttl, bad_target = target
        reasons = tuple(reasons) + bad_target
        exists = (
            name is not None and not replace and (name in self.live or bool(self.drafts.get(name)))
        )
        if name is not None and not replace and name in self.live:
            reasons += ("BUFFER_EXISTS",)
        allowed = reasons + (("BUFFER_EXISTS",) if exists else ())
        if not self.expect(outcome, *allowed, ok=not reasons):
            return
        answer = outcome.answer
        if name is None:
            check(answer.HasField("tensor"), "no tensor")
            check(answer.tensor.dtype == dtype, "dtype", answer.tensor.dtype, "is not", dtype)
            check(tuple(answer.tensor.shape) == expected.shape, "shape", answer.tensor.shape)
            near(o.to_numpy(answer.tensor), answer.stats.roundoff)
            return
        held = Held(name, dtype, expected.shape, self.new_version(answer.buffer), replace, ttl)
        held.set(self.client.download(name)).check(answer.buffer)
        self.become_ready(held)
        near(held.array(), answer.stats.roundoff)

    def check_stats(self, answer, strategy, versions):
        stats = answer.stats
        check(not strategy or stats.strategy == strategy, "strategy", stats.strategy)
        check(stats.strategy and stats.device in o.Program.device.split(","), "stats", stats)
        check(
            list(stats.operand_versions) == versions,
            "operand_versions",
            list(stats.operand_versions),
            "is not",
            versions,
        )

    @staticmethod
    def near_scalar(actual, expected, terms, roundoff, what):
        if math.isnan(expected):
            check(math.isnan(actual), what, actual, "is not NaN")
        elif math.isinf(expected):
            check(actual == expected, what, actual, "is not", expected)
        else:
            error = abs(actual - expected)
            check(
                # The last term: what products lose that are below the range of an f32.
                error <= 4 * (roundoff + 2.0**-50) * terms + 1e-33,
                what,
                actual,
                "is not",
                expected,
                "error",
                error,
                "roundoff",
                roundoff,
            )

    @staticmethod
    def near_array(expected, terms, dtype, rounded=0, count=1):
        """A judge of arrays: expected and the sum of |terms| of each element, in f64 or i64; rounded:
        what was rounded to the type on the way; count: of the terms, each of which may be below the
        least number and rounded to that."""

        def judge(actual, roundoff):
            values = wide(actual, dtype)
            if dtype in INTEGERS:
                wrapped = (
                    np.asarray(expected)
                    .astype(np.int64)
                    .astype(o.NUMPY_TYPES[dtype])
                    .astype(np.int64)
                )
                check(np.array_equal(values, wrapped), values, "is not", wrapped)
                return
            ulp = {F32: 2.0**-24, F64: 2.0**-53, F16: 2.0**-11, BF16: 2.0**-8}[dtype]
            tiny = {F32: 2.0**-149, F64: 1e-300, F16: 2.0**-24, BF16: 2.0**-133}[dtype]
            top = {F32: 3.4e38, F64: 1e308, F16: 65000.0, BF16: 3.38e38}[dtype]
            top_of_parts = top if dtype == F64 else 3.4e38
            want = np.asarray(expected, np.float64)
            with np.errstate(all="ignore"):
                special = ~np.isfinite(want)
                same = np.isnan(want) & np.isnan(values) | (want == values)
                bound = 4 * (roundoff + 2.0**-50) * terms + max(1, count) * tiny
                bound = bound + 2 * ulp * (np.abs(want) + np.abs(rounded))
                close = np.abs(values - want) <= bound
                # Parts of a sum are kept in f32 or f64 and may overflow where the whole does not.
                over = (np.abs(want) > top) | (terms > top_of_parts) & ~np.isfinite(values)
            good = np.where(special, same, close | over)
            check(np.all(good), values, "is not", want)

        return judge

    # --- Operations -------------------------------------------------------------------------------

    def two_operands(self, dtype, fault):
        """Operands of one type and shape, or with one fault: (a, b, x, y, reasons, versions)."""
        rng = self.rng
        if fault == "view":
            a, x, reasons, _ = self.operand(dtype, fault=True)
            b = o.inline(random_array(rng, dtype, (2,)))
            if a.WhichOneof("source") == "buffer":
                reasons = (*reasons, "BAD_DTYPE")  # it may be of another type as well
            if rng.random() < 0.5:
                a, b = b, a
            # The other operand may not fit either.
            return a, b, None, None, (*reasons, "BAD_SHAPE"), None
        a, x, _, first = self.operand(dtype)
        if fault == "dtype":
            other = rng.choice([d for d in DTYPES if d != dtype])
            b = o.inline(random_array(rng, other, x.shape))
            return a, b, None, None, ("BAD_DTYPE",), None
        if fault == "shape":
            b = o.inline(random_array(rng, dtype, (*x.shape, 2) if x.ndim < 8 else (1,)))
            return a, b, None, None, ("BAD_SHAPE",), None
        b, y, _, second = self.operand(dtype, shape=x.shape)
        return a, b, x, y, (), [first, second]

    def fault(self):
        return self.rng.choice((None,) * 12 + ("view", "view", "view", "dtype", "shape"))

    def dot(self):
        dtype = self.rng.choice(DTYPES)
        a, b, x, y, reasons, versions = self.two_operands(dtype, self.fault())
        strategy, launch, more = self.strategy("dot", dtype) if not reasons else ("", None, ())
        outcome = self.client.attempt("Dot", a=a, b=b, strategy=strategy, launch=launch)
        reasons = (*reasons, *more)
        if not self.expect(outcome, *reasons, ok=not reasons):
            return
        answer = outcome.answer
        self.check_stats(answer, strategy, versions)
        x, y = wide(x, dtype), wide(y, dtype)
        with np.errstate(all="ignore"):
            if dtype in INTEGERS:
                check(answer.value.WhichOneof("value") == "integer", "not an integer")
                check(
                    answer.value.integer == int((x * y).sum(dtype=np.int64)),
                    answer.value.integer,
                    "is not",
                    int((x * y).sum(dtype=np.int64)),
                )
                return
            check(answer.value.WhichOneof("value") == "real", "not a real number")
            self.near_scalar(
                answer.value.real,
                float((x * y).sum()),
                float(np.abs(x * y).sum()),
                answer.stats.roundoff,
                "dot",
            )

    def add(self):
        dtype = self.rng.choice(DTYPES)
        a, b, x, y, reasons, versions = self.two_operands(dtype, self.fault())
        target = self.target() if not reasons else (None, None, False, False, ())
        strategy, launch, more = ("", None, ())
        if not reasons and not target[4]:
            strategy, launch, more = self.strategy("add", dtype)
        outcome = self.client.attempt(
            "Add", a=a, b=b, strategy=strategy, launch=launch, result=target[0]
        )
        reasons = (*reasons, *more)
        if x is None:
            self.expect(outcome, *reasons)
            return
        with np.errstate(all="ignore"):
            expected = wide(x, dtype) + wide(y, dtype)
        exact = narrow(expected, dtype)

        def judge(actual, _):
            got, want = wide(actual, dtype), wide(exact, dtype)
            check(np.array_equal(got, want, equal_nan=dtype not in INTEGERS), got, "is not", want)

        self.land(outcome, target, exact, dtype, judge, reasons)
        if outcome.ok:
            self.check_stats(outcome.answer, strategy, versions)

    def map(self):
        """where(a < b, a - b, a + b), of an operand and a row of it that is broadcast."""
        rng = self.rng
        dtype = rng.choice(DTYPES)
        fault = self.fault()
        a, x, reasons, version = self.operand(dtype, fault=fault == "view")
        y = random_array(rng, dtype, () if x is None or not x.ndim else x.shape[-1:])
        args = {2: [0, 1], 3: [0, 1], 4: [0, 1], 5: [2, 3, 4]}
        if fault == "dtype":
            args[rng.choice((2, 3, 4, 5))], reasons = [rng.choice((0, 9))], ("BAD_EXPRESSION",)
        elif fault == "shape":
            y = random_array(rng, dtype, (1, 23))
            if x is not None and (not x.ndim or x.shape[-1] == 1):
                y = random_array(rng, dtype, (2, 0, 2) + (1,) * 7)  # of too high a rank
            reasons = ("BAD_SHAPE",)
        ops = {2: "LESS", 3: "SUBTRACT", 4: "ADD", 5: "WHERE"}
        make = o.compute.Expression.Node
        nodes = [make(operand=0), make(operand=1)]
        nodes += [make(op="MAP_OP_" + ops[i], args=args[i]) for i in range(2, 6)]
        target = self.target() if not reasons else (None, None, False, False, ())
        strategy, launch, more = ("", None, ())
        if not reasons and not target[4]:
            strategy, launch, more = self.strategy("map", dtype)
        outcome = self.client.attempt(
            "Map",
            operands=[a, o.inline(y)],
            expression=o.compute.Expression(nodes=nodes),
            strategy=strategy,
            launch=launch,
            result=target[0],
        )
        reasons = (*reasons, *more)
        if x is None or reasons:
            self.expect(outcome, *reasons)
            return
        first, second = wide(x, dtype), wide(y, dtype)
        with np.errstate(all="ignore"):
            exact = narrow(np.where(first < second, first - second, first + second), dtype)

        def judge(actual, _):
            got, want = wide(actual, dtype), wide(exact, dtype)
            check(np.array_equal(got, want, equal_nan=dtype not in INTEGERS), got, "is not", want)

        self.land(outcome, target, exact, dtype, judge, reasons)
        if outcome.ok:
            self.check_stats(outcome.answer, strategy, [version, 0])

    def matmul(self):
        rng = self.rng
        dtype = rng.choice((F32, F64, F16, BF16, I32, I32, I64))
        m, n, k = (rng.choice((0, 1, 2, 3, 5, 9)) for _ in range(3))
        ta, tb = rng.random() < 0.3, rng.random() < 0.3
        out = rng.choice((0, 0, 0, dtype, *DTYPES))
        fault = self.fault()
        reasons = ()
        a, x, _, first = self.operand(dtype, shape=(k, m) if ta else (m, k), special=False)
        b, y, _, second = self.operand(dtype, shape=(n, k) if tb else (k, n), special=False)
        if fault == "view":
            a, _, reasons, _ = self.operand(dtype, fault=True)
            reasons = (*reasons, "BAD_SHAPE", "BAD_DTYPE")
        elif fault == "dtype":
            b = o.inline(random_array(rng, F64 if dtype != F64 else F32, y.shape))
            reasons = ("BAD_DTYPE",)
        elif fault == "shape":
            b = o.inline(random_array(rng, dtype, rng.choice(((k + 1, k + 1), (k,), (1, k, n)))))
            reasons = ("BAD_SHAPE",)
        wide_out = {F16: F32, BF16: F32, I32: I64}
        result_type = out or dtype
        if dtype == I64:
            reasons = (*reasons, "BAD_DTYPE", "STRATEGY_UNSUPPORTED")
        elif result_type != dtype and result_type != wide_out.get(dtype):
            reasons = (*reasons, "BAD_DTYPE")
        more_fields, bias = {}, None
        if not reasons and rng.random() < 0.3:
            bias = random_array(rng, result_type, rng.choice(((), (n,), (m, 1), (m, n))), special=False)
            make = o.compute.Expression.Node
            nodes = [make(operand=0), make(operand=1), make(op="MAP_OP_ADD", args=[0, 1])]
            more_fields["expression"] = o.compute.Expression(nodes=nodes)
            more_fields["with"] = [o.inline(bias)]
        target = self.target() if not reasons else (None, None, False, False, ())
        strategy, launch, more = ("", None, ())
        if not reasons and not target[4]:
            strategy, launch, more = self.strategy("matmul", dtype)
        outcome = self.client.attempt(
            "Matmul",
            a=a,
            b=b,
            transpose_a=ta,
            transpose_b=tb,
            out_dtype=out,
            strategy=strategy,
            launch=launch,
            result=target[0],
            **more_fields,
        )
        reasons = (*reasons, *more)
        if reasons:
            self.expect(outcome, *reasons, *target[4], *(("BUFFER_EXISTS",) if target[1] else ()))
            return
        x, y = wide(x, dtype), wide(y, dtype)
        x, y = x.T if ta else x, y.T if tb else y
        with np.errstate(all="ignore"):
            # Row by row: the library behind @ may treat NaN and infinity in its own way.
            terms = x[:, :, None] * y[None, :, :]
            expected = terms.sum(axis=1)
            sizes = np.abs(terms).sum(axis=1)
            product = expected if bias is not None else 0
            if bias is not None:
                expected = expected + wide(bias, result_type)
            judge = self.near_array(expected, sizes, result_type, rounded=product, count=k)
        self.land(outcome, target, expected, result_type, judge, ())
        if outcome.ok:
            versions = [first, second] + [0] * (bias is not None)
            self.check_stats(outcome.answer, strategy, versions)

    def window_sum(self):
        rng = self.rng
        dtype = rng.choice(DTYPES)
        fault = self.fault()
        radius = rng.choice((0, 1, 2, 5, 100, 2**31, 2**62, 2**63 - 1))
        reasons = ()
        if fault == "view":
            x, array, reasons, version = self.operand(dtype, fault=True)
            reasons = (*reasons, "BAD_SHAPE", "BAD_DTYPE")
        elif fault == "shape":
            x, array, reasons, version = (
                o.inline(random_array(rng, dtype, (2, 2))),
                None,
                ("BAD_SHAPE",),
                0,
            )
        else:
            x, array, _, version = self.operand(dtype, rank=1, special=False)
            if fault == "dtype":
                radius, reasons = rng.choice((-1, -(2**63))), ("BAD_RADIUS",)
        target = self.target() if not reasons else (None, None, False, False, ())
        strategy, launch, more = ("", None, ())
        if not reasons and not target[4]:
            strategy, launch, more = self.strategy("window_sum", dtype)
        outcome = self.client.attempt(
            "WindowSum", x=x, radius=radius, strategy=strategy, launch=launch, result=target[0]
        )
        reasons = (*reasons, *more)
        if reasons:
            self.expect(outcome, *reasons, *target[4], *(("BUFFER_EXISTS",) if target[1] else ()))
            return
        values = wide(array, dtype)
        count = len(values)
        reach = min(radius, count)

        def window(v):
            return np.array(
                [v[max(0, i - reach) : i + reach + 1].sum() for i in range(count)], v.dtype
            )

        out = I64 if dtype in INTEGERS else dtype
        with np.errstate(all="ignore"):
            # A running sum rounds against all that it has passed.
            passed = np.abs(values[np.isfinite(values)]).sum()
            judge = self.near_array(window(values), np.full(count, passed), out)
        self.land(outcome, target, values, out, judge, ())
        if outcome.ok:
            self.check_stats(outcome.answer, strategy, [version])

    def top_k(self):
        rng = self.rng
        dtype = rng.choice(DTYPES)
        fault = self.fault()
        x, array, reasons, version = self.operand(dtype, fault=fault == "view")
        k, axis, smallest = rng.choice((1, 1, 2, 3, 5)), None, rng.random() < 0.5
        if reasons:
            reasons = (*reasons, "BAD_K", "BAD_AXES")
        else:
            rank = array.ndim
            axis = rng.randrange(-rank, rank) if rank else 0
            if fault == "dtype":
                axis, reasons = rng.choice((rank, -rank - 1, 2**31 - 1)), ("BAD_AXES",)
            elif rank == 0:
                reasons = ("BAD_AXES",)
            elif fault == "shape":
                k = rng.choice((0, -1, array.shape[axis] + 1, 2**63 - 1))
            if not reasons and not 1 <= k <= array.shape[axis]:
                reasons = ("BAD_K",)
        strategy, launch, more = self.strategy("top_k", dtype) if not reasons else ("", None, ())
        outcome = self.client.attempt(
            "TopK", x=x, k=k, axis=axis, smallest=smallest, strategy=strategy, launch=launch
        )
        reasons = (*reasons, *more)
        if not self.expect(outcome, *reasons, ok=not reasons):
            return
        rows = np.moveaxis(wide(array, dtype), axis, -1)
        # Place by place: how many elements of the row come before each.
        one, other = rows[..., :, None], rows[..., None, :]
        with np.errstate(invalid="ignore"):
            less = other < one if smallest else other > one
        nan = np.isnan(rows) if rows.dtype.kind == "f" else np.zeros(rows.shape, bool)
        is_nan, other_nan = nan[..., :, None], nan[..., None, :]
        less |= is_nan & ~other_nan if smallest else ~is_nan & other_nan
        equal = (other == one) | (is_nan & other_nan)
        count = rows.shape[-1]
        less |= equal & np.tri(count, count, -1, dtype=bool)
        places = less.sum(axis=-1)
        indices = np.moveaxis(np.argsort(places, axis=-1)[..., :k], -1, axis)
        got = o.to_numpy(outcome.answer.indices)
        check(np.array_equal(got, indices), "indices", got.tolist(), "are not", indices.tolist())
        values = np.take_along_axis(np.asarray(array), indices, axis=axis)
        check(outcome.answer.values.data == values.tobytes(), "values of", indices.tolist())
        check(outcome.answer.values.dtype == dtype, outcome.answer.values.dtype)
        self.check_stats(outcome.answer, strategy, [version])

    OPS = (
        "SUM",
        "PRODUCT",
        "MIN",
        "MAX",
        "ARGMIN",
        "ARGMAX",
        "MEAN",
        "NORM_L1",
        "NORM_L2",
        "SUM_SQUARES",
        "VARIANCE",
        "ALL",
        "ANY",
    )
    NEED_ONE = {"MIN", "MAX", "ARGMIN", "ARGMAX", "MEAN", "VARIANCE"}

    @staticmethod
    def fold(op, x, integer):
        """(value, terms, index) of a flat array of one element or more, in f64 or i64."""
        with np.errstate(all="ignore"):
            real = x.astype(np.float64)
            size = float(np.abs(real).sum())
            if op == "SUM":
                return x.sum(dtype=x.dtype), size, None
            if op == "PRODUCT":
                product = np.prod(x, dtype=x.dtype)
                return product, abs(float(product)), None
            if op in ("MIN", "MAX", "ARGMIN", "ARGMAX"):
                index = int((np.argmin if op.endswith("MIN") else np.argmax)(x))
                return x[index], 0.0, index if op.startswith("ARG") else None
            if op == "MEAN":
                if integer:
                    return sum(x.tolist()) / len(x), size / len(x), None
                return real.sum() / len(x), size / len(x), None
            if op == "NORM_L1":
                return np.abs(x).sum(dtype=x.dtype), size, None
            squares = real * real
            if op == "NORM_L2":
                norm = float(np.sqrt(squares.sum()))
                return norm, norm if math.isfinite(norm) else 0.0, None
            if op == "SUM_SQUARES":
                return (x * x).sum(dtype=x.dtype), float(squares.sum()), None
            if op == "VARIANCE":
                return float(np.var(real)), 4 * float(squares.mean()), None
            if op == "ALL":
                return int(bool(np.all(x != 0))), 0.0, None
            return int(bool(np.any(x != 0))), 0.0, None

    EMPTY = {
        "SUM": 0,
        "PRODUCT": 1,
        "NORM_L1": 0,
        "NORM_L2": 0,
        "SUM_SQUARES": 0,
        "ALL": 1,
        "ANY": 0,
    }

    @staticmethod
    def scalar_is_integer(op, dtype):
        return op in ("ALL", "ANY") or (
            dtype in INTEGERS and op not in ("MEAN", "NORM_L2", "VARIANCE")
        )

    @staticmethod
    def product_is_safe(x, op):
        """Whether no partial product leaves the range of f32, whatever the order."""
        if op != "PRODUCT" or x.dtype == np.int64:
            return True
        finite = x[np.isfinite(x) & (x != 0)]
        return len(finite) == len(x) and np.abs(np.log2(np.abs(finite))).sum() < 100

    @staticmethod
    def expression_of(dtype, x, y, result):
        """(nodes, values) of (a - b) * b, or of a > b, which is of BOOL."""
        make = o.compute.Expression.Node
        nodes = [make(operand=0), make(operand=1)]
        first, second = wide(x, dtype), wide(y, dtype)
        with np.errstate(all="ignore"):
            if result == BOOL:
                nodes += [make(op="MAP_OP_GREATER", args=[0, 1])]
                return o.compute.Expression(nodes=nodes), (first > second).astype(np.int64)
            nodes += [make(op="MAP_OP_SUBTRACT", args=[0, 1]), make(op="MAP_OP_MULTIPLY", args=[2, 1])]
            difference = wide(narrow(first - second, dtype), dtype)
            return o.compute.Expression(nodes=nodes), wide(narrow(difference * second, dtype), dtype)

    def reduce(self):
        rng = self.rng
        dtype, op = rng.choice((*DTYPES, *BYTES)), rng.choice(self.OPS)
        fault = self.fault()
        if fault == "view":
            x, _, reasons, _ = self.operand(dtype, fault=True)
            self.expect(
                self.client.attempt("Reduce", x=x, op="REDUCE_OP_" + op), *reasons, "EMPTY_INPUT"
            )
            return
        if fault == "dtype":
            x, _, _, _ = self.operand(dtype)
            outcome = self.client.attempt(
                "Reduce", x=x, op=rng.choice((0, 14, 99, -1, 2**31 - 1))
            )
            self.expect(outcome, "BAD_OPERATION")
            return
        x, array, _, version = self.operand(dtype)
        values = wide(array, dtype)
        fields, versions = dict(x=x, op="REDUCE_OP_" + op), [version]
        if rng.random() < 0.4 and dtype != BOOL:
            y = random_array(rng, dtype, array.shape[rng.randint(0, array.ndim) :])
            dtype = I32 if dtype in BYTES else dtype  # what operations take them as
            result = rng.choice((dtype, BOOL))
            expression, values = self.expression_of(dtype, array, y, result)
            fields.update({"expression": expression, "with": [o.inline(y)]})
            dtype, versions = result, [version, 0]
        if dtype == BOOL:
            if op not in ("SUM", "MEAN", "ALL", "ANY"):
                self.expect(self.client.attempt("Reduce", **fields), "BAD_DTYPE")
                return
        if dtype in BYTES:
            dtype = I32  # what they are folded as
        if values.ndim and rng.random() < 0.5:
            self.reduce_axes(fields, values, dtype, op, versions, fault)
            return
        strategy, launch, reasons = self.strategy("reduce", dtype)
        outcome = self.client.attempt("Reduce", **fields, strategy=strategy, launch=launch)
        if values.size == 0 and op in self.NEED_ONE:
            self.expect(outcome, "EMPTY_INPUT", *reasons)
            return
        if not self.expect(outcome, *reasons, ok=not reasons):
            return
        answer = outcome.answer
        self.check_stats(answer, strategy, versions)
        if values.size:
            value, terms, index = self.fold(op, values.ravel(), dtype in INTEGERS)
        else:
            value, terms, index = self.EMPTY[op], 0.0, None
        if index is not None:
            check(answer.index == index, "index", answer.index, "is not", index)
        if self.scalar_is_integer(op, dtype):
            check(answer.value.WhichOneof("value") == "integer", "not an integer", answer)
            check(answer.value.integer == int(value), op, answer.value.integer, "is not", value)
            return
        check(answer.value.WhichOneof("value") == "real", "not a real number", answer)
        if self.product_is_safe(values.ravel(), op):
            self.near_scalar(answer.value.real, float(value), terms, answer.stats.roundoff, op)

    def reduce_axes(self, fields, values, dtype, op, versions, fault):
        rng = self.rng
        rank = values.ndim
        axes = rng.sample(range(rank), rng.randint(1, rank))
        asked = [axis - rank if rng.random() < 0.3 else axis for axis in axes]
        reasons = ()
        if fault == "shape":
            asked = rng.choice(([rank], [-rank - 1], [0, 0], [2**31 - 1], [0, -rank]))
            reasons = ("BAD_AXES",)
        keep = rng.random() < 0.3
        target = self.target() if not reasons else (None, None, False, False, ())
        strategy, launch, more = ("", None, ())
        if not reasons and not target[4]:
            strategy, launch, more = self.strategy("reduce_axes", dtype)
        outcome = self.client.attempt(
            "Reduce",
            **fields,
            axes=asked,
            keep_dims=keep,
            strategy=strategy,
            launch=launch,
            result=target[0],
        )
        reasons = (*reasons, *more)
        kept = [axis for axis in range(rank) if axis not in axes]
        folded = math.prod(values.shape[axis] for axis in axes)
        rows = math.prod(values.shape[axis] for axis in kept)
        empty = folded == 0 and op in self.NEED_ONE
        if reasons or empty:
            if rows == 0 and empty and outcome.ok and target[1] is None:
                return  # nothing of nothing: both are right
            self.expect(
                outcome,
                *reasons,
                *(("EMPTY_INPUT",) if empty else ()),
                *target[4],
                *(("BUFFER_EXISTS",) if target[1] else ()),
                ok=rows == 0 and empty,
            )
            if outcome.ok:
                self.land_anything(outcome, target)
            return
        if op in ("ARGMIN", "ARGMAX"):
            out = I64
        elif op in ("ALL", "ANY"):
            out = I32
        elif dtype in INTEGERS:
            out = (
                F64
                if op in ("MEAN", "NORM_L2", "VARIANCE")
                else dtype
                if op in ("MIN", "MAX")
                else I64
            )
        else:
            out = dtype
        table = values.transpose(kept + sorted(axes)).reshape(rows, folded)
        result, terms, safe = [], [], True
        for row in table:
            if folded:
                value, term, index = self.fold(op, row, dtype in INTEGERS)
                safe = safe and self.product_is_safe(row, op)
            else:
                value, term, index = self.EMPTY[op], 0.0, None
            # Of axes, the index counts along the folded ones.
            result.append(value if index is None else index)
            terms.append(term)
        shape = tuple(
            1 if axis in axes else values.shape[axis]
            for axis in range(rank)
            if keep or axis not in axes
        )
        expected = np.array(result, np.int64 if out in INTEGERS else np.float64).reshape(shape)
        judge = self.near_array(expected, np.array(terms, np.float64).reshape(shape), out)
        self.what += f" {op} of {values.shape} {dtype} over {asked}"
        self.land(outcome, target, expected, out, judge if safe else lambda *_: None, ())
        if outcome.ok:
            self.check_stats(outcome.answer, strategy, versions)

    def land_anything(self, outcome, target):
        """Takes over a result of which the model knows nothing."""
        message = outcome.answer.buffer
        held = Held(
            target[1], message.dtype, message.shape, self.new_version(message), target[2], target[3]
        )
        self.become_ready(held.set(self.client.download(target[1])))

    def copy(self):
        rng = self.rng
        source, name = self.pick_name(), self.pick_name()
        reasons = self.not_readable(source)
        replace, ttl = rng.random() < 0.7, rng.random() < 0.2
        fields = dict(source=source, name=name, replace=replace)
        if rng.random() < 0.2:
            fields["placement"] = ["all"]
        if ttl:
            fields["ttl"] = {"seconds": 3600}
        array = None
        if not reasons:
            held = self.live[source]
            dtype = rng.choice((0, 0, *DTYPES, *BYTES))
            fields["dtype"] = dtype
            dtype = dtype or held.dtype
            view = self.random_view(held.array().size) if rng.random() < 0.5 else None
            array = cast(strided(held.array(), view), held.dtype, dtype)
            if view is not None:
                fields["view"] = o.buffers.View(offset=view[0], shape=view[1], strides=view[2])
            if rng.random() < 0.3:
                fields["source_version"] = held.version
            fault = rng.random()
            if fault < 0.05:
                fields["view"], reasons = self.bad_view(held.array().size)
            elif fault < 0.08:
                fields["source_version"], reasons = self.wrong_version(), ("VERSION_MISMATCH",)
            elif fault < 0.1:
                fields["dtype"], reasons = 77, ("BAD_DTYPE",)
            elif fault < 0.12:
                fields["name"], reasons = rng.choice(BAD_NAMES), ("BAD_NAME",)
            elif fault < 0.14:
                reasons = ("BAD_PLACEMENT" if "placement" in fields else "BAD_DEVICE",)
                fields["device"] = "cuda:77"
        outcome = self.client.attempt("CopyBuffer", **fields)
        if not replace and self.taken(name):
            reasons = (*reasons, "BUFFER_EXISTS")
        if not self.expect(outcome, *reasons, ok=not reasons):
            return
        made = Held(name, dtype, array.shape, self.new_version(outcome.answer.buffer), replace, ttl)
        made.set(self.client.download(name)).check(outcome.answer.buffer)
        got, want = wide(made.array(), dtype), wide(array, dtype)
        check(
            np.array_equal(got, want, equal_nan=dtype not in INTEGERS),
            "cast of",
            held.dtype,
            "to",
            dtype,
            got,
            "is not",
            want,
        )
        self.become_ready(made)

    def large(self):
        """Valid views of very many elements: an answer or a clear refusal, soon."""
        rng = self.rng
        dtype = rng.choice(DTYPES)
        extents = rng.choice(
            (
                [2**20],
                [2**31],
                [2**62],
                [2**16, 2**16],
                [2**31, 2**31],
                [3, 2**40],
                [2**63 - 1],
                [2**32, 2**32],
            )
        )
        view = o.buffers.View(shape=extents, strides=[0] * len(extents))
        x = o.inline(random_array(rng, dtype, (1,), special=False), view)
        calls = {
            "Dot": dict(a=x, b=x),
            "Reduce": dict(x=x, op=rng.randint(1, 13)),
            "Add": dict(a=x, b=x, result=rng.choice((None, o.into("large", replace=True)))),
            "Matmul": dict(a=x, b=x, result=rng.choice((None, o.into("large", replace=True)))),
            "WindowSum": dict(x=x, radius=rng.choice((0, 5, 2**62))),
            "TopK": dict(x=x, k=rng.choice((1, 100, 4096)), axis=rng.choice((-1, 0))),
        }
        rpc = rng.choice(list(calls))
        outcome = self.client.attempt(rpc, **calls[rpc])
        self.expect(
            outcome,
            *TOO_MUCH,
            "BAD_VIEW",
            "BAD_SHAPE",
            "BAD_K",
            "STRATEGY_UNSUPPORTED",
            "BAD_DTYPE",
            ok=True,
        )
        if outcome.ok and calls[rpc].get("result") is not None:
            self.newest = outcome.answer.buffer.version
            self.client.call("DeleteBuffer", name="large")

    def bare(self):
        """Requests with nothing in them, and methods that only tell."""
        rng = self.rng
        rpc = rng.choice(
            (
                "CreateBuffer",
                "GetBuffer",
                "SealBuffer",
                "UpdateBuffer",
                "CopyBuffer",
                "DeleteBuffer",
                "Dot",
                "Reduce",
                "Matmul",
                "Add",
                "WindowSum",
                "Map",
                "TopK",
            )
        )
        outcome = self.client.attempt(rpc)
        self.expect(
            outcome,
            "BAD_EXPRESSION",
            "BAD_NAME",
            "BUFFER_NOT_FOUND",
            "BAD_OPERAND",
            "BAD_DTYPE",
            "BAD_OPERATION",
            "BAD_SHAPE",
        )
        outcome = self.client.attempt(
            "ListStrategies", operation=rng.choice(("", "dot", "guess", "x" * 1000))
        )
        self.expect(outcome, "BAD_OPERATION", ok=True)

    WEIGHTS = {
        "create": 8,
        "upload": 16,
        "upload_ranges": 14,
        "seal": 10,
        "get": 8,
        "list": 3,
        "update": 4,
        "delete": 5,
        "download": 6,
        "copy": 12,
        "dot": 12,
        "add": 12,
        "matmul": 12,
        "reduce": 20,
        "window_sum": 8,
        "map": 12,
        "top_k": 10,
        "large": 2,
        "bare": 1,
    }

    def run(self, seconds):
        kinds, weights = zip(*self.WEIGHTS.items())
        end = time.monotonic() + seconds
        steps = 0
        while time.monotonic() < end:
            kind = self.rng.choices(kinds, weights)[0]
            self.what = f"step {steps}: {kind}"
            self.calls[kind] = self.calls.get(kind, 0) + 1
            getattr(self, kind)()
            steps += 1
        return steps


# --- Churn ----------------------------------------------------------------------------------------

CHURN_NAMES = ("p", "q", "r")
HARMLESS = {
    "BUFFER_NOT_FOUND",
    "BUFFER_EXISTS",
    "BUFFER_NOT_READY",
    "BUFFER_SEALED",
    "VERSION_MISMATCH",
    "VERSION_REQUIRED",
    "QUOTA_EXCEEDED",
    "TOO_MANY_UPLOADS",
    "TOO_MANY_DOWNLOADS",
    "QUEUE_FULL",
    "HOST_MEMORY_EXHAUSTED",
    "SCRATCH_EXHAUSTED",
    "TOO_MANY_BUFFERS",
}


def self_checking(rng):
    """i64: the first says all others, and how many there are."""
    count = rng.choice((1, 2, 100, 5000, 40_000))
    seed = rng.randrange(1 << 20)
    return np.arange(count, dtype=np.int64) * (2 * seed + 1) + (seed << 20 | count)


def is_whole(data):
    if len(data) % 8 or not data:
        return False
    array = np.frombuffer(data, np.int64)
    seed, count = int(array[0]) >> 20, int(array[0]) & (1 << 20) - 1
    return count == len(array) and np.array_equal(
        array, np.arange(count, dtype=np.int64) * (2 * seed + 1) + array[0]
    )


def churn(server, seed, seconds, threads=12):
    """Twelve clients at the same three names; returns how the calls ended."""
    end = time.monotonic() + seconds
    ended, wrong = {}, []
    lock = threading.Lock()

    def note(rpc, outcome):
        with lock:
            key = outcome.reason or outcome.code
            ended[key] = ended.get(key, 0) + 1
            if not outcome.ok and outcome.reason not in HARMLESS and outcome.code != "CANCELLED":
                wrong.append(f"{rpc}: {outcome}")

    def work(i):
        rng = random.Random(seed * 1000 + i)
        client = server.client()

        def pieces(name, array, spec, version, cancel):
            data = array.tobytes()
            step = max(1, len(data) // 3 + 1)
            for at in range(0, len(data), step):
                fields = dict(data=data[at : at + step], offset=at)
                if at == 0:
                    fields.update(name=name, version=version)
                    if spec is not None:
                        fields["spec"] = spec
                yield o.buffers.UploadRequest(**fields)
            if cancel:
                time.sleep(5)

        while time.monotonic() < end and not wrong:
            name = rng.choice(CHURN_NAMES)
            kind = rng.random()
            if kind < 0.3:
                array = self_checking(rng)
                placement = rng.choice(([], [], ["all"]))
                spec = o.spec_of(array, replace=rng.random() < 0.8, placement=placement)
                cancel = rng.random() < 0.25
                call = client.b.Upload.future(pieces(name, array, spec, 0, cancel), timeout=30)
                if cancel:
                    time.sleep(rng.random() * 0.01)
                    call.cancel()
                note("Upload", outcome_of(call))
            elif kind < 0.4:
                array = self_checking(rng)
                made = outcome_of(lambda: client.create(name, array, replace=True))
                note("CreateBuffer", made)
                if made.ok and rng.random() < 0.8:
                    version = made.answer.version
                    note(
                        "ranges",
                        outcome_of(
                            client.b.Upload.future(
                                pieces(name, array, None, version, False), timeout=30
                            )
                        ),
                    )
                    note("SealBuffer", client.attempt("SealBuffer", name=name, version=version))
            elif kind < 0.55:
                note(
                    "CopyBuffer",
                    client.attempt(
                        "CopyBuffer",
                        source=rng.choice(CHURN_NAMES),
                        name=name,
                        replace=rng.random() < 0.8,
                    ),
                )
            elif kind < 0.62:
                note("DeleteBuffer", client.attempt("DeleteBuffer", name=name))
            elif kind < 0.9:
                outcome = outcome_of(lambda: client.download(name))
                note("Download", outcome)
                if outcome.ok and not is_whole(outcome.answer):
                    wrong.append(f"a torn read of {name}: {len(outcome.answer)} bytes")
            else:
                x = o.resident(name)
                outcome = client.attempt("Dot", a=x, b=x)
                note("Dot", outcome)
                if outcome.ok:
                    a, b = outcome.answer.stats.operand_versions
                    if a != b:
                        wrong.append(f"Dot of {name} with itself read versions {a} and {b}")

    in_threads(threads, work)
    check(not wrong, len(wrong), "wrong endings; the first:", wrong[:1])
    return ended


def delete_everything(client):
    for name in client.names():
        client.attempt("DeleteBuffer", name=name)
    check(client.names() == [], "left:", client.names())
    device = None

    def is_empty():
        nonlocal device
        device = client.device()
        return device.buffer_used_bytes == 0 and device.scratch_used_bytes == 0

    check(
        eventually(is_empty, 5),
        "the account ends at",
        device.buffer_used_bytes,
        "bytes of buffers and",
        device.scratch_used_bytes,
        "of scratch",
    )
    for name in ("buffers", "uploads", "downloads"):
        check(
            eventually(lambda name=name: client.budget(name).used == 0, 3),
            "budget",
            name,
            "ends at",
            client.budget(name).used,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--known-flags-only", action="store_true")
    arguments = parser.parse_args()
    o.Program.path = os.path.abspath(arguments.server)
    o.Program.device = arguments.device
    o.Program.known_flags_only = arguments.known_flags_only
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed

    passed = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        o.make_stubs(folder)
        server = o.Server(
            folder,
            "--memory-limit",
            "256Mi",
            "--scratch-limit",
            "64Mi",
            "--max-operation-seconds",
            "1",
            "--max-slow-operation-seconds",
            "0.5",
            "--max-uploads",
            "64",
            "--upload-timeout",
            "300s",
        )
        client = ThroughPrograms(server.address, seed)
        fuzzer = Fuzzer(client, seed)

        def model():
            try:
                steps = fuzzer.run(arguments.seconds / 2)
            except Exception as error:
                raise Wrong(f"{fuzzer.what}: {error}") from error
            # Every kind of request has come, and most of them were valid.
            if steps > 20 * sum(fuzzer.WEIGHTS.values()):
                check(len(fuzzer.calls) == len(fuzzer.WEIGHTS), "only", fuzzer.calls)
                check(fuzzer.ended.get("OK", 0) > steps / 3, fuzzer.ended)
            check(client.programs > steps / 10, "only", client.programs, "programs")
            delete_everything(client)
            calls = sum(fuzzer.ended.values())
            return f"{steps} steps, {calls} calls, {client.programs} programs: {fuzzer.ended}"

        def crowd():
            ended = churn(server, seed, arguments.seconds / 2)
            check(ended.get("OK", 0) > 50, ended)
            delete_everything(client)
            return f"{sum(ended.values())} calls: {ended}"

        def clean_exit():
            check(server.alive(), "the server has ended:", server.process.poll())
            code = server.stop()
            check(code == 0, "exit code", code)
            return ""

        for name, test in (("model", model), ("churn", crowd), ("clean_exit", clean_exit)):
            try:
                print(f"ok      {name} {test()}", flush=True)
                passed += 1
            except Exception:  # pylint: disable=broad-except
                failed += 1
                print(f"FAILED  {name}, seed {seed}\n{traceback.format_exc()}", flush=True)
        if failed:
            print(server.log()[-2000:])
            print(f"to repeat: --seed {seed} --seconds {arguments.seconds:g}")
        server.kill()
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
