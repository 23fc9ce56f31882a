#!/usr/bin/env python3
"""The same request gives the same bits: alone, among 64 others, as a step of a program, with other
settings of the server, after a restart, and, where devices agree, those in bits.txt.

The requests are random, of every operation and element type, and name no strategy.

usage: bits_test.py --server build/bin/tessera-server [--device cuda:0] [--write] [test ...]

--write replaces bits.txt by what this server answers.
"""

import hashlib
import pathlib
import random
import sys

import numpy as np

import outsider as o

LENGTH = 1 << 16  # of the resident arrays
COUNT = 160  # requests of the types that all operations take
BYTES = 60  # requests of u8, i8 and bool, which Map and Reduce take, and of Map on integers
AT_ONCE = 64
ROUNDS = 6
GOLDEN = pathlib.Path(__file__).with_name("bits.txt")
# Their answers are the same on every device (CONTRIBUTING.md), and so on every machine: those of Map
# where no function of the device's or the host's own library is in it, and but for the bits of NaN.
ON_EVERY_DEVICE = ("Add", "Dot", "Map", "Reduce", "TopK", "MapIntegers", "ReduceBytes")
# Of bytes: what is computed in integers.
EXACT = {"REDUCE_OP_" + name for name in ("SUM", "MIN", "MAX", "ARGMIN", "ARGMAX", "ALL", "ANY")}
OF_LIBRARIES = {"MAP_OP_" + name for name in ("EXP", "TANH", "LOG")}
WRITE = "--write" in sys.argv
if WRITE:
    sys.argv.remove("--write")

# Streams of RandomState never change, those of NumPy's newer generators may.
NUMBERS = np.random.RandomState(20261125)
CHOICES = random.Random(20261125)
BYTE_TYPES = {"u1": (0, 256), "i1": (-128, 128), "bool": (0, 2)}


def random_array(dtype):
    if dtype in ("i4", "i8"):
        return NUMBERS.randint(-(1 << 20), 1 << 20, LENGTH).astype(dtype)
    values = (NUMBERS.random_sample(LENGTH) - 0.5) * 2.0 ** NUMBERS.randint(-6, 6, LENGTH)
    if dtype == "bf16":
        return (values.astype("f4").view("u4") >> 16).astype("u2")
    return values.astype(dtype)


ARRAYS = {
    f"{dtype}/{part}": random_array(dtype)
    for dtype in ("f4", "f8", "f2", "bf16", "i4", "i8")
    for part in "ab"
}
ARRAYS |= {
    f"{dtype}/{part}": NUMBERS.randint(*values, LENGTH).astype(dtype)
    for dtype, values in BYTE_TYPES.items()
    for part in "ab"
}
FLOATS = ("f4", "f8", "f2", "bf16")


def window(name, shape):
    size = int(np.prod(shape))
    return o.resident(name, o.view(shape, offset=CHOICES.randrange(LENGTH - size)))


def pair(dtype, first, second=None):
    return window(f"{dtype}/a", first), window(f"{dtype}/b", second or first)


def length():
    return CHOICES.choice([1, 3, 255, 1024, 4097, 9001, 50_000])


def random_request():
    """(rpc, request)"""
    dtype = CHOICES.choice(("f4", "f8", "f2", "bf16", "i4", "i8"))
    rows, columns, depth = (CHOICES.randrange(1, 160) for _ in range(3))
    kind = CHOICES.randrange(8)
    if kind == 0:
        a, b = pair(dtype, [length()])
        return "Dot", o.compute.DotRequest(a=a, b=b)
    if kind == 1:
        names = o.compute.ReduceOp.keys()[1:]
        x = window(f"{dtype}/a", [length()])
        return "Reduce", o.compute.ReduceRequest(x=x, op=CHOICES.choice(names))
    if kind == 2:
        x = window(f"{dtype}/a", [rows, columns, 2])
        op = CHOICES.choice(["SUM", "MAX", "ARGMIN", "MEAN", "NORM_L2", "VARIANCE"])
        return "ReduceAxes", o.compute.ReduceRequest(
            x=x, op="REDUCE_OP_" + op, axes=CHOICES.choice([[0], [1], [0, 2], [-1]])
        )
    if kind == 3:
        dtype = CHOICES.choice(FLOATS + ("i4",))
        a, b = pair(dtype, [rows, depth], [depth, columns])
        out = "DTYPE_I64" if dtype == "i4" else "DTYPE_UNSPECIFIED"
        return "Matmul", o.compute.MatmulRequest(a=a, b=b, out_dtype=out)
    if kind == 4:
        a, b = pair(dtype, [rows, columns])
        return "Add", o.compute.AddRequest(a=a, b=b)
    if kind == 5:
        x = window(f"{dtype}/a", [length()])
        return "WindowSum", o.compute.WindowSumRequest(x=x, radius=CHOICES.randrange(40))
    if kind == 6:
        x = window(f"{dtype}/a", [rows, columns])
        k = CHOICES.randrange(1, columns + 1)
        return "TopK", o.compute.TopKRequest(x=x, k=k, axis=1, smallest=CHOICES.random() < 0.5)
    dtype = CHOICES.choice(FLOATS)
    a, b = pair(dtype, [rows, columns])
    return "Map", o.compute.MapRequest(operands=[a, b], expression=random_expression())


def random_expression():
    """Of two floating-point operands."""
    node = o.compute.Expression.Node
    nodes = [node(operand=0), node(operand=1)]
    functions = CHOICES.choice([["SQRT", "ABS"], ["SQRT", "EXP", "TANH", "ABS", "LOG"]])
    for _ in range(CHOICES.randrange(1, 8)):
        args = [CHOICES.randrange(len(nodes)) for _ in range(2)]
        op = CHOICES.choice(["ADD", "SUBTRACT", "MULTIPLY", "DIVIDE", "MINIMUM", "MAXIMUM"])
        nodes.append(node(op="MAP_OP_" + op, args=args))
        if CHOICES.random() < 0.4:
            nodes.append(node(op="MAP_OP_" + CHOICES.choice(functions), args=[len(nodes) - 1]))
    return o.compute.Expression(nodes=nodes)


def random_request_of_bytes():
    """(rpc, request)"""
    dtype = CHOICES.choice(list(BYTE_TYPES))
    rows, columns = (CHOICES.randrange(1, 160) for _ in range(2))
    kind = CHOICES.randrange(3)
    if kind == 0:
        dtype = CHOICES.choice([*BYTE_TYPES, "i4", "i8"])
        a, b = pair(dtype, [rows, columns])
        return "MapIntegers", o.compute.MapRequest(
            operands=[a, b], expression=random_integers(dtype == "bool")
        )
    ops = ["SUM", "MEAN", "ALL", "ANY"] if dtype == "bool" else whole_ops()
    shape, axes = ([length()], []) if kind == 1 else ([rows, columns], [CHOICES.randrange(2)])
    return "ReduceBytes" if kind == 1 else "ReduceAxes", o.compute.ReduceRequest(
        x=window(f"{dtype}/a", shape), op="REDUCE_OP_" + CHOICES.choice(ops), axes=axes
    )


def whole_ops():
    return [name.removeprefix("REDUCE_OP_") for name in o.compute.ReduceOp.keys()[1:]]


def random_integers(truth):
    """An expression of two operands: truth values, or integers."""
    node = o.compute.Expression.Node
    nodes = [node(operand=0), node(operand=1)]
    ops = ["AND", "OR", "XOR"] if truth else ["ADD", "SUBTRACT", "MULTIPLY", "MINIMUM", "MAXIMUM"]
    for _ in range(CHOICES.randrange(1, 6)):
        args = [CHOICES.randrange(len(nodes)) for _ in range(2)]
        nodes.append(node(op="MAP_OP_" + CHOICES.choice(ops), args=args))
    if CHOICES.random() < 0.5:
        last = [len(nodes) - 1, 0]
        nodes.append(node(op="MAP_OP_" + CHOICES.choice(["EQUAL", "NOT_EQUAL"]), args=last))
    return o.compute.Expression(nodes=nodes)


STEPS = {
    "ReduceAxes": "reduce", "ReduceBytes": "reduce", "MapIntegers": "map", "WindowSum": "window_sum",
    "TopK": "top_k",
}
REQUESTS = []  # once the protocol is there


def requests():
    if not REQUESTS:
        REQUESTS.extend([random_request() for _ in range(COUNT)])
        REQUESTS.extend([random_request_of_bytes() for _ in range(BYTES)])
    return REQUESTS


def call(client, name, request):
    method = name.replace("Axes", "").replace("Bytes", "").replace("Integers", "")
    return getattr(client.c, method).future(request, timeout=120)


def bits(answer):
    """Of an answer, without what says how it came about."""
    answer.ClearField("stats")
    return answer.SerializeToString(deterministic=True)


def bits_of_every_device(name, request, answer):
    """None: devices may differ."""
    if name not in ON_EVERY_DEVICE:
        return None
    if name == "ReduceBytes" and o.compute.ReduceOp.Name(request.op) not in EXACT:
        return None
    if name != "Map":
        return answer
    if any(o.compute.MapOp.Name(node.op) in OF_LIBRARIES for node in request.expression.nodes):
        return None
    response = o.compute.MapResponse.FromString(answer)
    dtype = o.buffers.Dtype.Name(response.tensor.dtype)
    if dtype == "DTYPE_BF16":
        values = np.frombuffer(response.tensor.data, "u2").copy()
        values[values & 0x7FFF > 0x7F80] = 0x7FC0
    else:
        values = np.frombuffer(response.tensor.data, dtype.replace("DTYPE_F", "float")).copy()
        values[np.isnan(values)] = np.nan
    response.tensor.data = values.tobytes()
    return response.SerializeToString(deterministic=True)


def put_arrays(client):
    for name, array in ARRAYS.items():
        client.put(name, array)


ALONE = []  # the bits of each request alone, of the first server that was asked


def alone(client):
    if not ALONE:
        put_arrays(client)
        ALONE.extend([bits(call(client, *one).result()) for one in requests()])
    return ALONE


def difference(i, got):
    return f"request {i} has other bits: {requests()[i]}\n{alone(None)[i][:100]}\n{got[:100]}"


def check_alone(client):
    expected = alone(client)
    for i, one in enumerate(requests()):
        got = bits(call(client, *one).result())
        assert got == expected[i], difference(i, got)


def check_among_others(server, client):
    expected = alone(client)
    clients = [server.client() for _ in range(8)]
    order = list(range(len(requests()))) * ROUNDS
    CHOICES.shuffle(order)
    waiting = []
    for at, i in enumerate(order + [None] * AT_ONCE):
        if i is not None:
            waiting.append((i, call(clients[at % len(clients)], *requests()[i])))
        if len(waiting) >= AT_ONCE or (i is None and waiting):
            first, future = waiting.pop(0)
            got = bits(future.result())
            assert got == expected[first], difference(first, got)


def check_as_steps(client):
    expected = alone(client)
    order = list(range(len(requests())))
    CHOICES.shuffle(order)
    for begin in range(0, len(order), 40):  # what a client receives bounds a program's answers
        part = order[begin : begin + 40]
        steps = []
        for i in part:
            name, request = requests()[i]
            steps.append(o.compute.Step(**{STEPS.get(name, name.lower()): request}))
        for i, result in zip(part, client.call("Execute", steps=steps).results):
            outcome = o.Outcome.of_step(result)
            assert outcome.ok, outcome
            got = bits(outcome.answer)
            assert got == expected[i], difference(i, got)


def test_alone_and_again(server, client):
    alone(client)
    check_alone(client)


def test_among_others(server, client):
    alone(client)  # of another server
    if not client.names():
        put_arrays(client)
    check_among_others(server, client)


def test_as_steps_of_programs(server, client):
    alone(client)
    if not client.names():
        put_arrays(client)
    check_as_steps(client)


def test_other_settings(server, client):
    """Other workers, no work on the threads of the queues, rates that were measured."""
    alone(client)
    folder = server.log_path.parent
    for flags in (["--workers=1", "--inline=0", "--spin=0"], ["--workers=8", "--no-warm-up=false"]):
        other = o.Server(folder, *flags)
        try:
            put_arrays(other.client())
            check_alone(other.client())
            check_among_others(other, other.client())
        finally:
            other.kill()


def test_the_bits_of_every_device(server, client):
    digests = {name: hashlib.sha256() for name in ON_EVERY_DEVICE}
    counts = dict.fromkeys(ON_EVERY_DEVICE, 0)
    for (name, request), answer in zip(requests(), alone(client)):
        same = bits_of_every_device(name, request, answer)
        if same is not None:
            digests[name].update(len(same).to_bytes(4, "big") + same)
            counts[name] += 1
    assert min(counts.values()) >= 5, counts
    text = "".join(f"{name} {digest.hexdigest()}\n" for name, digest in digests.items())
    if WRITE:
        GOLDEN.write_text(text)
    expected = GOLDEN.read_text()
    assert text == expected, f"bits have moved; they are\n{text}and were\n{expected}"


if __name__ == "__main__":
    sys.exit(o.run_tests(globals()))
