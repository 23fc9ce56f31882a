#!/usr/bin/env python3
"""Times small calls of one tenant, undisturbed and while another tenant floods the server with
work.

usage: fair_share.py --server build/bin/tessera-server [--device cuda:0] [--flood product top_k ...]
                     [--side N] [--scale N] [--seconds S] [--turns N]

Small calls are Dots of 4096 resident floats, one after the other. The flood is a separate process,
which keeps 16 calls in flight. The small calls are timed alternately without and with the flood,
and the results are medians over all rounds. Prints p50 and p99 in microseconds, and exits with 1 if
p99 during a flood is more than five times p99 without it."""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import types

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import outsider as o  # noqa: E402
from callers import Caller, line_of  # noqa: E402

IN_FLIGHT = 16  # The number of the flood's calls in flight.
MOST = 5


def dot(client):
    x = o.resident("x")
    client.call("Dot", a=x, b=x)


# --- Floods ---------------------------------------------------------------------------------------

def randoms(*shape):
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def product_of(side):
    m = o.resident("flood")
    request = o.compute.MatmulRequest(a=m, b=m, result=o.into("p", replace=True))
    return np.ones((side, side), np.float32), "Matmul", request


def top_k_of(array, k, **results):
    request = o.compute.TopKRequest(x=o.resident("flood"), k=k, **results)
    return array, "TopK", request


def top_k_of_rows(rows):
    """Returns a top_k of rows. Its results stay on the device, because inline results of this size
    are too large."""
    results = {name: o.into(name, replace=True) for name in ("values", "indices")}
    return top_k_of(randoms(rows, 1024), 100, **results)


def map_of(n):
    """Returns a Map that computes exp(x * x + 1)."""
    nodes = [dict(operand=0), dict(op="MAP_OP_MULTIPLY", args=[0, 0]), dict(real=1, dtype=1),
             dict(op="MAP_OP_ADD", args=[1, 2]), dict(op="MAP_OP_EXP", args=[3])]
    result = o.into("mapped", replace=True)
    request = o.compute.MapRequest(
        expression=dict(nodes=nodes), operands=[o.resident("flood")], result=result)
    return randoms(n), "Map", request


def reduce_of(n):
    x = o.resident("flood")
    return randoms(n), "Reduce", o.compute.ReduceRequest(x=x, op=o.compute.REDUCE_OP_SUM)


# Each flood has an array "flood", a method and its request, which depend on the command line.
FLOODS = {"product": lambda a: product_of(a.side),
          "top_k": lambda a: top_k_of(randoms(a.scale * 250_000), 100),
          # Every element is larger than all elements before it.
          "top_k_sorted": lambda a: top_k_of(np.sort(randoms(a.scale * 250_000)), 100),
          "top_k_rows": lambda a: top_k_of_rows(a.scale * 4096),
          "map": lambda a: map_of(a.scale << 22),
          "reduce": lambda a: reduce_of(a.scale << 24)}


def flood(arguments):
    """Starts to flood the server at one line on standard input, and stops at the next. Prints "on"
    once a call has ended, and then, when no call is left, the number of calls that have succeeded
    since. Ends when its input ends. It has a lower priority than the client of the small calls,
    because it stands for another host."""
    os.nice(19)
    with tempfile.TemporaryDirectory() as folder:
        o.make_stubs(folder)
        tenant = Caller(types.SimpleNamespace(address=arguments.at, clients=[]), "large")
        array, method, request = FLOODS[arguments.flood[0]](arguments)
        tenant.put("flood", array, replace=True)
        call = getattr(tenant.c, method)
        call(request)
        print("ready", flush=True)
        while sys.stdin.readline():
            places, ended, stop, done = (
                threading.Semaphore(IN_FLIGHT), threading.Event(), threading.Event(), [])

            def note(future, places=places, ended=ended, done=done):
                done.append(future.exception() is None)
                ended.set()
                places.release()

            def run(places=places, stop=stop, note=note):
                while not stop.is_set():
                    places.acquire()
                    call.future(request).add_done_callback(note)

            thread = threading.Thread(target=run)
            thread.start()
            ended.wait()
            print("on", flush=True)
            sys.stdin.readline()
            stop.set()
            thread.join()
            for _ in range(IN_FLIGHT):
                places.acquire()
            if not all(done):
                sys.exit(f"{done.count(False)} of {len(done)} calls of the flood failed")
            print(len(done), flush=True)
        tenant.close()


class Flood:
    """The process of a flood, and the number of its successful calls."""

    def __init__(self, address, kind, arguments):
        command = [sys.executable, __file__, "--flood", kind, "--at", address]
        command += [f"--side={arguments.side}", f"--scale={arguments.scale}"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.done = 0
        self.hear()

    def hear(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("the flood has ended")
        return line

    def toggle(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.hear()

    def __enter__(self):
        self.toggle()

    def __exit__(self, *error):
        self.done += int(self.toggle())

    def end(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


# --- Measuring ------------------------------------------------------------------------------------

def sample(tenant, seconds):
    """Returns p50 and p99 of the tenant's calls, in microseconds."""
    took = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.perf_counter()
        dot(tenant)
        took.append((time.perf_counter() - begin) * 1e6)
    return np.percentile(took, [50, 99])


def measure(server, small, kind, arguments):
    """Prints a line, and returns whether p99 during the flood is small enough."""
    beside_it = Flood(server.address, kind, arguments)
    try:
        sample(small, 0.5)
        alone, beside = [], []
        for _ in range(arguments.turns):
            alone.append(sample(small, arguments.seconds))
            with beside_it:
                beside.append(sample(small, arguments.seconds))
    finally:
        beside_it.end()
    alone, beside = (np.median(turns, axis=0) for turns in (alone, beside))
    ratio = beside[1] / alone[1]
    figures = "".join(f"{figure:10.0f}" for figure in (alone[0], beside[0], alone[1], beside[1]))
    print(f"{kind:13}{figures}{ratio:8.1f}{beside_it.done:9}", flush=True)
    return ratio <= MOST


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--server")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--flood", nargs="+", choices=FLOODS, default=list(FLOODS))
    parser.add_argument("--side", type=int, default=1024, help="of products")
    parser.add_argument("--scale", type=int, default=1,
                        help="multiplies the elements of other floods")
    parser.add_argument("--seconds", type=float, default=2, help="of a turn")
    parser.add_argument("--turns", type=int, default=5, help="alone, and as many with each flood")
    parser.add_argument("--at", help=argparse.SUPPRESS)  # The address that a flood calls.
    arguments = parser.parse_args()
    if arguments.at:
        return flood(arguments)
    if not arguments.server:
        parser.error("--server is needed")
    o.Program.path, o.Program.device = os.path.abspath(arguments.server), arguments.device
    with tempfile.TemporaryDirectory() as folder:
        o.make_stubs(folder)
        tokens = pathlib.Path(folder) / "tokens"
        lines = (line_of(name, "write", name) + "\n" for name in ("small", "large"))
        tokens.write_text("".join(lines))
        with o.Server(folder, f"--tokens={tokens}") as server:
            small = Caller(server, "small")
            small.put("x", np.ones(4096, np.float32))
            sample(small, 1)
            columns = ("p50 alone", "beside", "p99 alone", "beside")
            print("flood".ljust(13) + "".join(f"{column:>10}" for column in columns), end="")
            print("   ratio    calls")
            fair = [measure(server, small, kind, arguments) for kind in arguments.flood]
    return 0 if all(fair) else 1


if __name__ == "__main__":
    sys.exit(main())
