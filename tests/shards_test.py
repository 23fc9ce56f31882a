#!/usr/bin/env python3
"""Tests sharded buffers over the wire: where they are, what they cost, and every call on them, with
the bits of one device.

usage: shards_test.py --server build/bin/tessera-server [--device cuda:0,cuda:1] [test ...]
"""

import itertools
import sys
import time

import numpy as np

import outsider as o
from outsider import eventually

RNG = np.random.default_rng(20261126)
# Arrays for GPUs are larger, and some calls need more scratch memory for them. Without
# --no-warm-up, warming up eight devices would take a long time on few cores.
FLAGS = ("--scratch-limit", "1Gi" if "cuda" in " ".join(sys.argv) else "64Mi", "--no-warm-up")


def unit(client):
    """Returns the unit. Every shard begins at a multiple of it."""
    return 2 * o.MI if client.info().devices[0].backend == "cuda" else 4096


def used(client):
    return [device.buffer_used_bytes for device in client.info().devices]


def test_where_the_shards_are(server, client):
    names, step = client.devices(), unit(client)
    for count in range(1, len(names) + 1):
        for units in (0.001, 1, 1.5, 2, count, count + 0.25, 3 * count + 1.75):
            size = max(1, int(units * step) // 4)
            before = used(client)
            array = np.zeros(size, np.float32)
            buffer = client.put("x", array, placement=names[:count])
            whole = -(-size * 4 // step)
            parts = min(count, whole)
            shards = [(s.device, s.begin, s.end) for s in buffer.shards]
            if parts == 1:
                assert shards == [] and buffer.device == names[0], buffer
                shards = [(names[0], 0, size * 4)]
            assert [s[0] for s in shards] == names[:parts]
            assert shards[0][1] == 0 and shards[-1][2] == size * 4
            for (_, _, end), (_, begin, _) in zip(shards, shards[1:]):
                assert end == begin and begin % step == 0, shards
            held = [-(-(s[2] - s[1]) // step) for s in shards]
            assert sum(held) == whole and max(held) - min(held) <= 1, shards
            # Each device is charged for its part, rounded to the unit, and everything is returned.
            taken = [a - b for a, b in zip(used(client), before)]
            if parts > 1:
                assert taken == [n * step for n in held] + [0] * (len(names) - parts), taken
            client.call("DeleteBuffer", name="x")
            assert eventually(lambda: used(client) == before), (used(client), before)
    everywhere = client.put("all", np.zeros(64 * step // 4, np.float32), placement=["all"])
    assert [s.device for s in everywhere.shards] == names
    backwards = client.put("back", np.zeros(step, np.float32), placement=names[::-1][:2])
    assert [s.device for s in backwards.shards] == names[::-1][:2]
    assert backwards.device == names[-1]


def test_results_smaller_than_the_team(server, client):
    """Devices write their parts of results that are entirely on other devices."""
    rows, columns = 3 * unit(client) // 8, 128
    x = RNG.integers(-9, 9, (rows, columns)).astype("f4")
    y = RNG.integers(-9, 9, (columns, 1)).astype("f4")
    client.put("x", x, placement=["all"])
    client.put("y", y)
    for rpc, fields, expected in (
            ("Reduce", dict(x=o.resident("x"), op="REDUCE_OP_SUM", axes=[1]), x.sum(1)),
            ("Matmul", dict(a=o.resident("x"), b=o.resident("y")), x @ y)):
        answer = client.call(rpc, **fields, result=o.into("out", replace=True, placement=["all"]))
        got = np.frombuffer(client.download("out"), "f4").reshape(expected.shape)
        assert np.array_equal(got, expected), rpc
        shards = client.call("GetBuffer", name="out").buffer.shards
        print(f"   {rpc}: {answer.stats.devices} devices, result on {len(shards)}")


def test_a_device_that_is_full(server, client):
    """If a single shard does not fit, no device is charged."""
    flags = (*FLAGS, "--memory-limit", f"{64 * unit(client)}")
    with o.Server(server.log_path.parent, *flags) as limited:
        own = limited.client()
        names, step = own.devices(), unit(own)
        floats = step // 4
        own.put("most", np.zeros(60 * floats, np.float32), device=names[1])
        before = used(own)
        too_much = o.spec_of(np.zeros(16 * floats, np.float32), placement=names[:2])
        outcome = own.attempt("CreateBuffer", name="x", spec=too_much)
        assert outcome.reason == "QUOTA_EXCEEDED", outcome
        assert outcome.metadata["device"] == names[1], outcome
        assert int(outcome.metadata["requested"]) == 8 * step, outcome
        assert int(outcome.metadata["free"]) == 4 * step, outcome
        assert used(own) == before
        # A buffer that is too large for one device fits on several devices together.
        own.call("DeleteBuffer", name="most")
        assert eventually(lambda: not any(used(own))), used(own)
        large = np.zeros(100 * floats, np.float32)
        outcome = own.attempt("CreateBuffer", name="large", spec=o.spec_of(large))
        assert outcome.reason == "QUOTA_EXCEEDED", outcome
        spec = o.spec_of(large, placement=names[:2])
        assert own.attempt("CreateBuffer", name="large", spec=spec).ok


def test_copies(server, client):
    names, step = client.devices(), unit(client)
    n = 5 * step // 4 + 77
    x = RNG.standard_normal(n).astype(np.float32)
    client.put("x", x, placement=["all"])
    client.put("plain", x, device=names[-1])
    copies = [
        ("x", dict(device=names[0]), ()), ("x", dict(device=names[-1]), ()), ("x", {}, names),
        ("x", dict(placement=names[::-1]), names[::-1]), ("plain", dict(placement=["all"]), names),
        ("plain", dict(placement=names[:2]), names[:2]),
        ("x", dict(placement=names[-2:]), names[-2:])]
    for source, fields, expected in copies:
        copy = client.call("CopyBuffer", source=source, name="copy", replace=True, **fields).buffer
        assert client.download("copy") == x.tobytes(), (source, fields)
        at_most = -(-4 * n // step)
        assert [s.device for s in copy.shards] == list(expected)[:at_most], (fields, copy)
    assert eventually(client.is_idle)


def test_operations_that_are_shared_out(server, client):
    """Compares each result bit by bit with the same call on one device. tests/team_test.cc covers
    all kinds of problems, and tests/fuzz_model_test.py covers all operations on shards."""
    names, step = client.devices(), unit(client)
    rows, columns = 96, 3 * step // 4 // 32 + 5
    arrays = {key: RNG.standard_normal((rows, columns)).astype(np.float32) for key in "xy"}
    arrays["long"] = RNG.standard_normal(9 * 65536 + 77).astype(np.float32)
    for name, array in arrays.items():
        client.put(f"{name}1", array)
        client.put(f"{name}N", array, placement=["all"])
    squares = o.expression(o.operand(0), o.node("MULTIPLY", 0, 0))

    def calls(k):
        """Yields a method, its fields, and the field that says where its array goes, if any."""
        x, y, long = (o.resident(name + k) for name in arrays)
        yield "Add", dict(a=x, b=y), "result"
        yield "Map", dict(operands=[x], expression=squares), "result"
        # The default for an operand on one device may be a strategy that cannot be divided.
        tiled = "cpu_cache_tiled" if step == 4096 else "warp_tiled"
        yield "Matmul", dict(a=x, b=y, transpose_b=True, strategy=tiled), "result"
        yield "WindowSum", dict(x=long, radius=3), "result"
        yield "Reduce", dict(op="REDUCE_OP_VARIANCE", x=x, axes=[1]), "result"
        yield "Scan", dict(x=x, op="REDUCE_OP_SUM"), "result"
        yield "Sort", dict(x=x, values=dict(none=True)), "indices"
        yield "Dot", dict(a=long, b=long), None
        yield "Reduce", dict(op="REDUCE_OP_SUM", x=long, expression=squares), None

    def result(rpc, fields, where):
        """Returns the bits, and how many devices have worked."""
        if where is None:
            answer = client.call(rpc, **fields)
            return answer.value.SerializeToString(), answer.stats.devices
        answer = client.call(rpc, **fields, **{where: o.into("out", replace=True)})
        return client.download("out"), answer.stats.devices

    for one, many in zip(calls("1"), calls("N")):
        (expected, _), (got, devices) = result(*one), result(*many)
        assert got == expected, one
        assert devices == len(names) or step != 4096, (many, devices)
    assert eventually(client.is_idle)


def test_where_results_go(server, client):
    names, step = client.devices(), unit(client)
    n = 8 * step // 4
    x = RNG.standard_normal(n).astype(np.float32)
    client.put("x", x, placement=["all"])
    for placement in ([], ["all"], names[::-1]):
        result = o.into("sum", replace=True, placement=placement)
        got = client.call("Add", a=o.resident("x"), b=o.resident("x"), result=result)
        expected = {"": [], "all": names}.get("".join(placement), placement)
        assert [s.device for s in got.buffer.shards] == expected, got.buffer
        assert client.download("sum") == (x + x).tobytes()
    # The array is too small to be divided. It is on the device where the operation ran, or within
    # that device's reach.
    small = client.put("small", np.ones(3, np.float32), device=names[-1])
    result = o.into("result", placement=["all"])
    a = o.resident(small.name)
    got = client.call("Add", a=a, b=a, result=result)
    assert got.buffer.device == names[-1] and not got.buffer.shards, got.buffer
    result = o.into("other", placement=names[:1])  # The device cannot reach it.
    o.check_refusal(client.attempt("Add", a=a, b=a, result=result), "INVALID_ARGUMENT",
                    "BAD_PLACEMENT")


def test_products_of_views_and_steps(server, client):
    names, step = client.devices(), unit(client)
    # a is large enough to be divided.
    m, n, k = (200, 130, 120) if step == 4096 else (2048 + 200, 2048 + 100, 1096)
    a = RNG.standard_normal((m, k)).astype(np.float32)
    b = RNG.standard_normal((k, n)).astype(np.float32)
    client.put("a", a, placement=["all"])
    client.put("b", b)
    whole = client.call("Matmul", a=o.resident("a"), b=o.resident("b"), result=o.into("c"))
    c = np.frombuffer(client.download("c"), "f4").reshape(m, n)
    assert whole.stats.devices > 1
    # A product with only some of the rows, which may all be on one device, gives the same elements.
    # On a GPU, strategies may be chosen by the extents.
    for first, end in ((0, m // 8 or 1), (m // 2, m), (m - 3, m)):
        window = o.view([end - first, k], [k, 1], first * k)
        got = client.call("Matmul", a=o.resident("a", window), b=o.resident("b"),
                          strategy=whole.stats.strategy, result=o.into("part", replace=True))
        part = np.frombuffer(client.download("part"), "f4").reshape(-1, n)
        if step == 4096 or got.stats.devices > 1:
            assert part.tobytes() == c[first:end].tobytes(), (first, end, got.stats)
        np.testing.assert_allclose(part, a[first:end] @ b, atol=1e-4 * np.sqrt(k), rtol=1e-4)
    # Tests an inline b, a transposed a (which is not divided), and a program.
    if step == 4096:
        inline = client.call("Matmul", a=o.resident("a"), b=o.inline(b))
        assert inline.tensor.data == c.tobytes()
        assert inline.stats.devices == whole.stats.devices, inline.stats
    turned = client.call("Matmul", a=o.resident("a"), b=o.resident("a"), transpose_a=True,
                         result=o.into("gram"))
    assert turned.stats.devices == 1
    result = o.into("again", placement=names[::-1])
    again = dict(a=o.resident("a"), b=o.resident("b"), result=result)
    answer = client.call("Execute", steps=[o.compute.Step(matmul=again)], stats=True)
    outcome = o.Outcome.of_step(answer.results[0])
    assert outcome.ok and outcome.answer.stats.devices == whole.stats.devices, outcome
    assert client.download("again") == c.tobytes()
    # One device computes a result that some of the working devices could not reach.
    if len(names) > 2:
        client.put("two", a, placement=names[:2])
        for placement, count in (([names[0], names[2]], 1), (names[:3], 2)):
            request = dict(a=o.resident("two"), b=o.resident("two"), transpose_b=True)
            got = client.call("Matmul", result=o.into("d", replace=True, placement=placement),
                              **request)
            assert got.stats.devices == count, got.stats
    assert eventually(client.is_idle)


def test_calls_that_need_each_others_devices(server, client):
    """Sums over all devices begin on different devices, together with copies in both directions.
    There is no deadlock and no wrong value. Callers that leave in the meantime leave nothing
    behind."""
    names, step = client.devices(), unit(client)
    n = 24 * step // 4
    array = RNG.integers(-8, 8, n).astype(np.float32)
    expected = float(np.dot(array.astype(np.float64), array))
    # The device with most of a window runs the call.
    client.put("ab", array, placement=names)
    client.put("ba", array, placement=names[::-1])
    client.put("plain", array, device=names[0])

    def work(i):
        own = server.client()
        for k in range(15):
            name = ("ab", "ba")[(i + k) % 2]
            other = ("ab", "ba", "plain")[(i * k) % 3]
            got = own.call("Dot", a=o.resident(name), b=o.resident(other))
            assert got.value.real == expected
            own.call("CopyBuffer", source=name, name=f"copy{i}", device=names[k % len(names)],
                     replace=True)
            call = own.future("Dot", a=o.resident(name), b=o.resident(name))
            time.sleep(RNG.uniform(0, 0.002))
            call.cancel()
            assert own.download(f"copy{i}") == array.tobytes()

    o.in_threads(6, work)
    assert eventually(client.is_idle)


def test_replaced_and_deleted_meanwhile(server, client):
    names, step = client.devices(), unit(client)
    n = 4 * step // 4
    client.put("x", np.zeros(n, np.float32), placement=["all"])
    own, numbers = server.client(), itertools.count(1)

    def replace():
        k = next(numbers)
        placement = (["all"], names[::-1], [names[k % len(names)]])[k % 3]
        own.put("x", np.full(n, k % 50, np.float32), placement=placement, replace=True)

    with o.meanwhile(replace):
        for _ in range(60):
            got = client.call("Reduce", op="REDUCE_OP_SUM", x=o.resident("x")).value.real
            assert got % n == 0 and 0 <= got < 50 * n, "a mixture of two versions"
    client.call("DeleteBuffer", name="x")
    assert eventually(lambda: not any(used(client))), used(client)


if __name__ == "__main__":
    sys.exit(o.run_tests(globals(), *FLAGS, device=",".join(f"cpu:{i}" for i in range(8))))
