#!/usr/bin/env python3
"""Tests a server with several devices over the wire: programs, and operands on any of the devices,
compared with NumPy and with the bits of one device.

usage: devices_test.py --server build/bin/tessera-server [--device cuda:0,cuda:1,cpu] [test ...]
"""

import sys

import numpy as np

import outsider as o
from outsider import eventually

RNG = np.random.default_rng(20261125)
FLAGS = ("--scratch-limit", "64Mi")


def named(key, device):
    return f"{key}/{device.replace(':', '-')}"


def test_names_and_budgets(server, client):
    info = client.info()
    assert len({device.name for device in info.devices}) == len(info.devices) >= 3
    shared = [device.buffer_limit_bytes for device in info.devices if device.backend == "cpu"]
    memory = [device.memory_total_bytes for device in info.devices if device.backend == "cpu"]
    assert sum(shared) <= max(memory, default=0), "CPU devices promise more than the host has"
    x = np.arange(1000, dtype=np.float32)
    for i, name in enumerate(client.devices()):
        assert client.put(f"on{i}", x, device=name).device == name
        used = [device.buffer_used_bytes for device in client.info().devices]
        assert [bytes_used > 0 for bytes_used in used] == [k <= i for k in range(len(used))], used


def test_operands_everywhere(server, client):
    names = client.devices()
    x = RNG.standard_normal(100_003).astype(np.float32)
    y = RNG.standard_normal(100_003).astype(np.float32)
    for name in names:
        for key, array in dict(x=x, y=y).items():
            client.put(named(key, name), array, device=name)

    def at(key, name):
        return o.resident(named(key, name))

    home = names[0]
    expected = client.call("Dot", a=at("x", home), b=at("y", home)).value.real
    exact = float(np.dot(x.astype(np.longdouble), y.astype(np.longdouble)))
    for first in names:
        for second in names:
            got = client.call("Dot", a=at("x", first), b=at("y", second))
            assert got.value.real == expected, (first, second)
            assert abs(got.value.real - exact) < 1e-2
            assert got.stats.device == first
            # The result is on the device where the call ran.
            result = o.into("result", replace=True)
            stored = client.call("Add", a=at("x", first), b=at("y", second), result=result)
            assert stored.buffer.device == first
            assert client.download("result") == (x + y).tobytes(), (first, second)
    assert eventually(client.is_idle)


def test_the_largest_operand_stays(server, client):
    small, large = np.ones(10, np.float32), np.ones((1000, 10), np.float32)
    first, second = client.devices()[:2]
    client.put("small", small, device=first)
    client.put("large", large, device=second)
    for operands in (("small", "large"), ("large", "small")):
        a, b = (o.resident(name) for name in operands)
        nodes = [dict(operand=0), dict(operand=1), dict(op="MAP_OP_ADD", args=[0, 1])]
        answer = client.call("Map", operands=[a, b], expression=dict(nodes=nodes))
        assert answer.stats.device == second
        assert np.array_equal(o.to_numpy(answer.tensor), small + large)


def test_views_of_another_device(server, client):
    """Only the part of the other device's buffer between the view's first and last element is
    moved, because the buffer is larger than the scratch memory."""
    first, second = client.devices()[:2]
    rows, columns = 5000, 4096  # 78 MiB
    big = RNG.integers(-1000, 1000, (rows, columns)).astype(np.float32)
    client.put("big", big, device=second)
    client.put("as_big", big, device=first)
    n = 20_000
    ones = np.ones(100_000, np.float32)
    client.put("ones", ones, device=first)
    flat = big.ravel()
    for view, expected in (
        (o.view([n], [1], 77), flat[77 : 77 + n]), (o.view([n], [3], 5), flat[5 : 5 + 3 * n : 3]),
        (o.view([n], [-2], 900_000), flat[900_000 : 900_000 - 2 * n : -2]),
        (o.view([1], [1], rows * columns - 1), flat[-1:]), (o.view([0], [1], 12), flat[:0]),
    ):
        # The array of ones spans more memory than the other operand's view, so that view is moved.
        got = client.attempt(
            "Add", a=o.resident("ones", o.view([len(expected)], [5])), b=o.resident("big", view))
        assert got.ok, got
        assert got.answer.stats.device == first, view
        assert np.array_equal(o.to_numpy(got.answer.tensor), expected + 1), view
    # A repeated element is moved once.
    repeated = client.call(
        "Dot", a=o.resident("ones"), b=o.resident("big", o.view([100_000], [0], 123)))
    assert repeated.value.real == 100_000 * flat[123]
    # A column spans all rows, which are larger than the scratch memory.
    column = client.attempt("Add", a=o.resident("as_big", o.view([rows], [columns])),
                            b=o.resident("big", o.view([rows], [columns])))
    assert column.reason == "SCRATCH_EXHAUSTED", column
    assert eventually(client.is_idle)


def test_programs(server, client):
    names = client.devices()
    arrays = [RNG.standard_normal(1000 * (i + 1)).astype(np.float32) for i in range(len(names))]
    for name, array in zip(names, arrays):
        client.put(named("p", name), array, device=name)
    steps, expected = [], []
    for i, name in enumerate(names):
        for other, array in zip(names[i:], arrays[i:]):
            n = len(arrays[i])
            here = o.resident(named("p", name))
            there = o.resident(named("p", other), o.view([n], [1], len(array) - n))
            steps.append(o.compute.Step(dot=dict(a=here, b=there)))
            expected.append(client.call("Dot", a=here, b=there).value.real)
    steps.append(o.compute.Step(dot=dict(a=o.resident("missing"), b=o.resident("missing"))))
    half = o.resident(named("p", names[1]), o.view([1000], [2]))
    add = dict(a=o.resident(named("p", names[0])), b=half, result=o.into("sum"))
    steps.append(o.compute.Step(add=add))
    answer = client.call("Execute", steps=steps)
    got = [o.Outcome.of_step(result) for result in answer.results]
    assert [outcome.answer.value.real for outcome in got[:-2]] == expected
    assert got[-2].reason == "BUFFER_NOT_FOUND"
    assert got[-1].ok, got[-1]
    assert got[-1].answer.buffer.device == names[-1], "the largest buffer stays"
    total = arrays[0] + arrays[1][:2000:2][:1000]
    assert client.download("sum") == total.tobytes()
    assert eventually(client.is_idle)


if __name__ == "__main__":
    sys.exit(o.run_tests(globals(), *FLAGS, device="cpu:0,cpu:1,cpu:2"))
