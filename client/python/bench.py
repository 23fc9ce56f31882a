#!/usr/bin/env python3
"""Measures transfer rates, and what the package adds to bare gRPC, in one run that interleaves the
calls.

usage: bench.py ADDRESS [--mib 256] [--rounds 7] [--cli build/bin/tessera]

A ping is a call of grpc.health.v1.Health/Check by grpcio that sends and receives bytes, not
messages. "bare Dot" is such a call of Dot, whose request was serialised beforehand, and "Dot by a
stub" builds and parses messages as generated code does. There are four kinds of asyncio callers:
bare_bytes sends a serialised request repeatedly, bare_messages builds the messages for each call,
as callers of stubs do, and same_expression and new_expression use the package. --cli names the C++
client's command line, which uploads the same array from a file in memory and downloads it to such a
file; the time to start its process is not counted.
"""

import argparse
import asyncio
import contextlib
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from unittest import mock

import grpc
import numpy as np

import tessera as ts
from tessera.transfers import _messages
from tessera.wire import _protocol as p

PING = "/grpc.health.v1.Health/Check"
CALLERS = 64


def microseconds(call, count):
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def latencies(address, rounds, count=400):
    """Prints the median time of each kind of call from one caller, and what it adds to a ping."""
    with ts.connect(address) as t, grpc.insecure_channel(address) as channel:
        x = t.put(np.ones(4096, np.float32))
        ping = channel.unary_unary(PING)
        dot = channel.unary_unary(p.METHODS["Dot"].path)
        operand = p.Operand(buffer=x.name, version=x.version)
        request = p.METHODS["Dot"].request(a=operand, b=operand).SerializeToString()
        method = p.METHODS["Dot"]
        stub = channel.unary_unary(
            method.path, method.request.SerializeToString, method.response.FromString
        )
        buffer, version = x.name, x.version

        def by_stub():
            a = p.Operand(buffer=buffer, version=version)
            b = p.Operand(buffer=buffer, version=version)
            return stub(method.request(a=a, b=b), timeout=60).value.real

        calls = {
            "ping": lambda: ping(b"", timeout=60),
            "bare Dot": lambda: dot(request, timeout=60),
            "Dot by a stub": by_stub,
            "float(x.dot(x))": lambda: float(x.dot(x)),
            "program of 2": lambda: float((x + 1).sum() + 1),
        }
        found = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                found[name].append(microseconds(call, count))
        for name, values in found.items():
            print(f"{name:<18}{statistics.median(values):9.1f} us")
        for name in ("bare Dot", "Dot by a stub", "float(x.dot(x))"):
            added = [a - b for a, b in zip(found[name], found["ping"])]
            print(f"{statistics.median(added):5.1f} us more than a ping: {name}")


async def rate(call, seconds=1.0):
    end = time.perf_counter() + seconds

    async def caller():
        count = 0
        while time.perf_counter() < end:
            await call()
            count += 1
        return count

    return sum(await asyncio.gather(*(caller() for _ in range(CALLERS)))) / seconds


async def throughput(address, rounds):
    async with await ts.aio.connect(address) as t, grpc.aio.insecure_channel(address) as channel:
        x = await t.put(np.ones(4096, np.float32))
        method = p.METHODS["Dot"]
        path, parse = method.path, method.response.FromString
        of_bytes = channel.unary_unary(path, response_deserializer=parse)
        of_messages = channel.unary_unary(path, method.request.SerializeToString, parse)
        name, version = x.name, x.version
        operand = p.Operand(buffer=name, version=version)
        request = method.request(a=operand, b=operand).SerializeToString()
        known = x.dot(x)

        async def bare_bytes():
            return (await of_bytes(request, timeout=60)).value.real

        async def bare_messages():
            a = p.Operand(buffer=name, version=version)
            b = p.Operand(buffer=name, version=version)
            return (await of_messages(method.request(a=a, b=b), timeout=60)).value.real

        async def same_expression():
            return await known.item()

        async def new_expression():
            return await x.dot(x).item()

        calls = (bare_bytes, bare_messages, same_expression, new_expression)
        rates = []
        for _ in range(rounds):
            rates.append([await rate(call) for call in calls])
        print(f"{CALLERS} asyncio callers")
        for i, call in enumerate(calls):
            each = statistics.median(row[i] for row in rates)
            ratios = [statistics.median(row[i] / row[j] for row in rates) for j in (0, 1)]
            print(
                f"  {call.__name__:<16}{each:8.0f}/s, {ratios[0]:.2f} times bare_bytes,"
                f" {ratios[1]:.2f} times bare_messages"
            )


def timed(call):
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def transfers(address, mib, rounds, cli):
    """Prints the rates, and the medians of their ratios to the C++ client's rates in the same
    round. Both clients use shared memory where the server offers it; "streams" is this client
    without shared memory, and "one stream" is this client on a single connection."""
    array = np.ones(mib << 18, np.float32)
    gb = array.nbytes / 1e9
    streams = ts.connect(address, shared_memory=False)
    whole = mock.patch.object(_messages, "DIVIDED", sys.maxsize)
    clients = (
        ("", ts.connect(address), contextlib.nullcontext()),
        (" by streams", streams, contextlib.nullcontext()),
        (" by one stream", streams, whole),
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = pathlib.Path(folder, "array.npy")
        np.save(path, array)

        def run(*arguments):
            command = [cli, "--server", address, *map(str, arguments)]
            return timed(lambda: subprocess.run(command, check=True, capture_output=True))[0]

        found = []
        for _ in range(rounds):
            row = {}
            for way, t, context in clients:
                with context:
                    seconds, x = timed(lambda t=t: t.put(array, "bench/array", replace=True))
                    row["put" + way] = gb / seconds
                    row["numpy" + way] = gb / timed(x.numpy)[0]
                    row["numpy(out)" + way] = gb / timed(lambda x=x: x.numpy(out=array))[0]
            if cli:
                start = run("info")
                seconds = run("put", path, "--name", "bench/array", "--replace") - start
                row["C++ put"] = gb / seconds
                row["C++ get"] = gb / (run("get", "bench/array", "-o", path) - start)
            found.append(row)
    for name in found[0]:
        line = f"{name:<24} of {mib} MiB {statistics.median(row[name] for row in found):6.2f} GB/s"
        peer = "C++ put" if name.startswith("put") else "C++ get"
        if cli and name != peer and not name.startswith("C++"):
            ratio = statistics.median(row[name] / row[peer] for row in found)
            line += f", {ratio:.2f} times {peer}"
        print(line)
    streams.delete("bench/array")
    for _, t, _ in clients:
        t.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("address")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cli")
    options = parser.parse_args()
    latencies(options.address, options.rounds)
    asyncio.run(throughput(options.address, options.rounds))
    transfers(options.address, options.mib, options.rounds, options.cli)


if __name__ == "__main__":
    main()
