#!/usr/bin/env python3
"""Checks that the same request gives the same bits: alone, among 64 others, as a step of a program,
with other settings of the server, after a restart, and, where devices agree, as in bits.txt.

The requests are random, cover every operation and element type, and name no strategy.

usage: bits_test.py --server build/bin/tessera-server [--device cuda:0] [--seconds N] [--seed S]
                    [--write] [test ...]

--seconds: the minimum time for which each load of other requests lasts. --seed: uses requests other
than those of bits.txt. --write replaces bits.txt with the responses of this server."""

import hashlib
import pathlib
import random
import sys
import time

import numpy as np

import outsider as o
import random_requests as r
from random_requests import BF16, BOOL, BYTES, F16, F32, F64, I8, I32, I64, U8, Operand

LENGTH = 1 << 16  # The length of the resident arrays.
# The kinds of the last requests, how many there are of each kind, and the total number of requests.
LATE = {"take": 24, "select": 24, "histogram": 24, "search_sorted": 24, "sum_by_label": 24}
# LAPACK may divide its work among threads differently each time.
LEFT_OUT = ("linalg",)
COUNT = 288 + sum(LATE.values())
AT_ONCE = 64
GOLDEN = pathlib.Path(__file__).with_name("bits.txt")
SEED = 20261125  # The seed of GOLDEN.
# Operations whose results are the same on every device (docs/design/reproducible-bits.md), and
# hence on every machine. Expressions are included if they need no library function of the device or
# the host. The bits of NaN are excluded.
ON_EVERY_DEVICE = ("dot", "add", "map", "reduce", "top_k", "scan", "sort", "bytes", "take",
                   "select", "histogram", "search_sorted", "sum_by_label")
# Reductions of one-byte types that are computed in integers.
EXACT = ("SUM", "MIN", "MAX", "ARGMIN", "ARGMAX", "ALL", "ANY")
BOUNDS = {I32: (-(1 << 20), 1 << 20), I64: (-(1 << 20), 1 << 20), U8: (0, 256), I8: (-128, 128),
          BOOL: (0, 2)}


class Held:
    """A resident array."""

    version = 0

    def __init__(self, dtype, numbers):
        self.dtype = dtype
        if dtype in BOUNDS:
            values = numbers.randint(*BOUNDS[dtype], LENGTH)
        else:
            values = numbers.random_sample(LENGTH) - 0.5
            values *= 2.0 ** numbers.randint(-6, 6, LENGTH)
        self.values = r.narrow(values, dtype)

    def array(self):
        return self.values


class Windows(r.Requests):
    """Valid requests for windows of resident arrays."""

    FAULTS = (None,)
    UNARY_FUNCTIONS = (*r.Requests.UNARY_FUNCTIONS, *r.LIBRARY)

    def __init__(self, seed):
        super().__init__(random.Random(seed))
        # The streams of RandomState never change, but those of NumPy's newer generators may.
        numbers = np.random.RandomState(seed)
        for dtype in (F32, F64, F16, BF16, I32, I64, *BYTES):
            self.live |= {f"{dtype}/{part}": Held(dtype, numbers) for part in "ab"}

    def extent(self):
        return self.rng.randrange(1, 160)

    def shape(self, rank=None):
        if rank == 1 or rank is None and self.rng.random() < 0.5:
            return (self.rng.choice([1, 3, 255, 1024, 4097, 9001, 50_000]),)
        return (self.extent(), self.extent(), 2)[: rank or self.rng.randint(2, 3)]

    def operand(self, dtype, rank=None, shape=None, special=True):
        shape = self.shape(rank) if shape is None else tuple(shape)
        name, size = f"{dtype}/{self.rng.choice('ab')}", int(np.prod(shape))
        begin = self.rng.randrange(LENGTH - size)
        array = self.live[name].array()[begin : begin + size].reshape(shape)
        return Operand(o.resident(name, o.view(shape, offset=begin)), array, 0, ())

    def valid(self, kind):
        while True:
            case = self.case(kind)
            if not case.reasons:
                return case


def bits(response):
    """Returns the bits of a response, without the fields that say how it was computed."""
    response.ClearField("stats")
    return response.SerializeToString(deterministic=True)


def group_on_every_device(case):
    """Returns the entry of ON_EVERY_DEVICE, or None if devices may differ."""
    group = case.operation
    if group not in ON_EVERY_DEVICE or not case.is_exact:
        return None
    request = case.request()
    if group == "reduce" and request.x.buffer[0] in "789":
        op = o.compute.ReduceOp.Name(request.op).removeprefix("REDUCE_OP_")
        return "bytes" if op in EXACT else None
    return group


def without_bits_of_nan(case, answer):
    if case.rpc not in ("Map", "Scan") or case.result[0] not in (F32, F64, F16, BF16):
        return answer
    response = getattr(o.compute, case.rpc + "Response").FromString(answer)
    values = o.to_numpy(response.tensor).copy()
    if case.result[0] == BF16:
        values[values & 0x7FFF > 0x7F80] = 0x7FC0
    else:
        values[np.isnan(values)] = np.nan
    response.tensor.data = values.tobytes()
    return response.SerializeToString(deterministic=True)


class Suite:
    """The requests, and the bits that each of them has by itself, from the first server that was
    asked."""

    def __init__(self, server):
        self.requests = Windows(ARGUMENTS.seed)
        # Rotates through the kinds, so every kind occurs.
        kinds = [kind for kind in r.Requests.KINDS if kind not in (*LATE, *LEFT_OUT)]
        kinds += ["reduce"] * 3
        # Earlier requests do not depend on these.
        kinds = [kinds[i % len(kinds)] for i in range(COUNT - sum(LATE.values()))]
        kinds += [kind for kind, count in LATE.items() for _ in range(count)]
        self.cases = [self.requests.valid(kind) for kind in kinds]
        self.alone = []
        for case, response in zip(self.cases, self.responses(server)):
            case.check_values(response)
            self.alone.append(bits(response))

    def client_of(self, server):
        client = server.client()
        if not client.names():
            for name, held in self.requests.live.items():
                client.put(name, held.array())
        return client

    def call(self, client, i):
        case = self.cases[i]
        return getattr(client.c, case.rpc).future(case.request(), timeout=120)

    def responses(self, server):
        client = self.client_of(server)
        return (self.call(client, i).result() for i in range(COUNT))

    def check(self, i, response):
        got, expected = bits(response), self.alone[i]
        r.check(got == expected, f"request {i}, {self.cases[i]}, has other bits:", got[:100],
                "is not", expected[:100])

    def check_alone(self, server):
        for i, response in enumerate(self.responses(server)):
            self.check(i, response)

    def shuffled(self):
        return self.requests.rng.sample(range(COUNT), COUNT)

    def check_among_others(self, server):
        self.client_of(server)
        clients = [server.client() for _ in range(8)]
        end, waiting, sent = time.monotonic() + ARGUMENTS.seconds / 5, [], 0
        while sent == 0 or time.monotonic() < end:
            for i in self.shuffled():
                waiting.append((i, self.call(clients[sent % len(clients)], i)))
                sent += 1
                if len(waiting) >= AT_ONCE:
                    first, future = waiting.pop(0)
                    self.check(first, future.result())
        for i, future in waiting:
            self.check(i, future.result())


SUITE = []


def suite(server):
    if not SUITE:
        SUITE.append(Suite(server))
    return SUITE[0]


def test_alone_and_again(server, client):
    suite(server).check_alone(server)


def test_among_others(server, client):
    suite(server).check_among_others(server)


def test_as_steps_of_programs(server, client):
    mine = suite(server)
    client, order = mine.client_of(server), mine.shuffled()
    for begin in range(0, COUNT, 40):  # Results must fit into one message.
        part = order[begin : begin + 40]
        steps = [mine.cases[i].step() for i in part]
        for i, result in zip(part, client.call("Execute", steps=steps).results):
            outcome = o.Outcome.of_step(result)
            r.check(outcome.ok, outcome)
            mine.check(i, outcome.answer)


def test_other_settings(server, client):
    """Tests other numbers of workers, and rates that are measured rather than assumed."""
    mine = suite(server)
    for flags in (["--workers=1"], ["--workers=8", "--no-warm-up=false"]):
        other = o.Server(server.log_path.parent, *flags)
        try:
            mine.check_alone(other)
            mine.check_among_others(other)
        finally:
            other.kill()


def test_the_bits_of_every_device(server, client):
    mine = suite(server)
    digests = {name: hashlib.sha256() for name in ON_EVERY_DEVICE}
    counts = dict.fromkeys(ON_EVERY_DEVICE, 0)
    for case, answer in zip(mine.cases, mine.alone):
        group = group_on_every_device(case)
        if group is not None:
            same = without_bits_of_nan(case, answer)
            digests[group].update(len(same).to_bytes(4, "big") + same)
            counts[group] += 1
    r.check(min(counts.values()) >= 5, counts)
    if ARGUMENTS.seed != SEED:
        return
    text = "".join(f"{name} {digest.hexdigest()}\n" for name, digest in digests.items())
    if WRITE:
        GOLDEN.write_text(text)
    expected = GOLDEN.read_text()
    r.check(text == expected, f"bits differ; they are\n{text}and should be\n{expected}")


if __name__ == "__main__":
    WRITE = "--write" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--write"]
    ARGUMENTS = r.take_arguments(SEED)
    sys.exit(r.run_tests(globals(), ARGUMENTS))
