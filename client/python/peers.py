#!/usr/bin/env python3
"""Times ten expressions, evaluated by one caller, through Tessera and through its alternatives:

  tessera            arrays resident on the server, one call per expression
  tessera, put       the same, but the arrays are uploaded for each call
  CuPy               in this process, arrays on the GPU
  CuPy, copied       in this process, arrays copied to the GPU for each expression
  CuPy service       a grpcio server in a separate process that has the arrays on the GPU

usage: peers.py ADDRESS [--json FILE] [--elements 4096,1048576,16777216] [--rounds 5]
                [--seconds 0.1] [--peer cupy|numpy] [--only NAME,...]

Tessera and its alternatives take turns in each round. A time is the median over the rounds, and a
round's time is the median of as many calls as fit into --seconds. An expression counts as done when
its number has arrived or its array is complete on the device. --peer numpy replaces CuPy on
machines without a GPU. All results are compared.
"""

import argparse
import concurrent.futures
import datetime
import functools
import importlib
import json
import math
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time

import grpc
import numpy as np

import tessera as ts

METHOD = "/tessera.peers/Run"
# The operands of an expression: x and y are vectors of n f32, a and b are square matrices of about
# n elements, and v is a vector as long as their sides.
EXPRESSIONS = {
    "dot": lambda o: o.x.dot(o.y),
    "sum": lambda o: o.x.sum(),
    "argmax": lambda o: o.x.argmax(),
    "axpy": lambda o: 2 * o.x + o.y,
    "normalise": lambda o: (o.x - o.x.mean()) / o.x.std(),
    "masked mean": lambda o: np.where(o.x > 0, o.x, 0).sum() / (o.x > 0).sum(),
    "gelu": lambda o: 0.5 * o.x * (1 + np.tanh(0.79788 * (o.x + 0.044715 * o.x**3))),
    "matmul": lambda o: o.a @ o.b,
    "scores": lambda o: (o.a @ o.v).argmax(),
    "nearest": lambda o: ((o.a * o.a).sum(axis=1) - 2 * (o.a @ o.v)).argmin(),
}


class Operands:
    """The operands as NumPy arrays from a fixed seed, so they are the same in every process; `make`
    converts each of them."""

    NAMES = "xyabv"

    def __init__(self, elements, make=lambda array: array):
        random = np.random.default_rng(elements)
        side = math.isqrt(elements)
        shapes = {"x": elements, "y": elements, "a": (side, side), "b": (side, side), "v": side}
        self.host = {
            name: random.standard_normal(shapes[name], np.float32) for name in self.NAMES
        }
        self.move(make)

    def move(self, make, names=NAMES):
        for name in names:
            setattr(self, name, make(self.host[name]))


def taken(name):
    """Returns the names of the operands that an expression takes."""
    return [operand for operand in Operands.NAMES if operand in EXPRESSIONS[name].__code__.co_names]


class Peer:
    """Runs expressions in this process, with CuPy or with NumPy in its place."""

    def __init__(self, module):
        self.module = importlib.import_module(module)
        self.name = {"cupy": "CuPy", "numpy": "NumPy"}[module]
        self.title = f"{self.name} {self.module.__version__}"
        self.make = self.module.asarray if module == "cupy" else np.array

    def finish(self, result):
        """Waits until a number has arrived or an array is complete."""
        if result.ndim == 0:
            return float(result)
        if self.name == "CuPy":
            self.module.cuda.get_current_stream().synchronize()
        return result

    def host(self, result):
        return self.module.asnumpy(result) if self.name == "CuPy" else np.asarray(result)


def serve(module):
    """Serves calls that take an expression's name and the number of elements. A call returns a
    number or nothing."""
    peer, kept = Peer(module), {}

    def run(request, _):
        name, elements = request.decode().split(":")
        if elements not in kept:
            kept.clear()
            kept[elements] = Operands(int(elements), peer.make)
        result = peer.finish(EXPRESSIONS[name](kept[elements]))
        return str(result).encode() if isinstance(result, float) else b""

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    service, method = METHOD[1:].split("/")
    handler = grpc.unary_unary_rpc_method_handler(run)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()  # The service ends with the process that started it.


class Servers:
    """The five alternatives for one number of elements. ways = {name: function of an expression's
    name}."""

    def __init__(self, t, peer, service, elements):
        self.t, self.peer, self.service, self.elements = t, peer, service, elements
        self.resident = Operands(elements, t.put)
        self.here = Operands(elements, peer.make)
        self.fresh = Operands(elements)
        self.ways = {
            "tessera": lambda name: self.finish(EXPRESSIONS[name](self.resident)),
            "tessera, put": functools.partial(self.moved, t.put, self.finish),
            peer.name: lambda name: peer.finish(EXPRESSIONS[name](self.here)),
            f"{peer.name}, copied": functools.partial(self.moved, peer.make, peer.finish),
            f"{peer.name} service": self.called,
        }

    def finish(self, expression):
        return float(expression) if expression.ndim == 0 else self.t.keep(expression)[0]

    def moved(self, make, finish, name):
        """Moves the operands, computes the expression, and forgets the operands."""
        self.fresh.move(make, taken(name))
        result = finish(EXPRESSIONS[name](self.fresh))
        self.fresh.move(lambda array: array, taken(name))
        return result

    def called(self, name):
        answer = self.service(f"{name}:{self.elements}".encode(), timeout=600)
        return float(answer) if answer else None

    def compare(self, name):
        """Checks that all alternatives give the same result, up to rounding."""
        want = np.asarray(EXPRESSIONS[name](Operands(self.elements)), "f8")
        scale = np.abs(want).max() + (math.sqrt(self.elements) if name in ("dot", "sum") else 1)
        for way, call in self.ways.items():
            got = call(name)
            if got is None or isinstance(got, float):
                close = got is None or abs(got - want) <= 1e-4 * scale
            else:
                got = got.numpy() if hasattr(got, "_session") else self.peer.host(got)
                close = np.abs(got - want).max() <= 1e-3 * scale
            if not close:
                raise SystemExit(f"peers.py: {name}({self.elements}) by {way} is {got}, not {want}")


def median_us(call, name, seconds):
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call(name)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def measure(options, t, peer, service):
    rows = []
    for elements in options.elements:
        servers = Servers(t, peer, service, elements)
        for name in options.only:
            servers.compare(name)
            found = {way: [] for way in servers.ways}
            for _ in range(options.rounds):
                for way, call in servers.ways.items():
                    found[way].append(median_us(call, name, options.seconds))
            for way, times in found.items():
                row = {"expression": name, "elements": elements, "server": way}
                rows.append({**row, "us": statistics.median(times), "rounds": times})
                print(f"{elements:>9} {name:<12} {way:<16} {rows[-1]['us']:10.1f} us", flush=True)
    return rows


def machine(t):
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    devices = [device.model for device in t.info().devices if device.backend != "cpu"]
    return {"cpu": cpu.group(1) if cpu else platform.machine(), "devices": devices}


def names(text):
    found = text.split(",")
    for name in found:
        if name not in EXPRESSIONS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(EXPRESSIONS)}")
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", nargs="?")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument(
        "--elements",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[1 << 12, 1 << 20, 1 << 24],
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--peer", choices=("cupy", "numpy"), default="cupy")
    parser.add_argument("--only", type=names, default=list(EXPRESSIONS))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.peer)
        return
    peer = Peer(options.peer)
    command = [sys.executable, __file__, "--serve", "--peer", options.peer]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        port = int(process.stdout.readline())
        service = grpc.insecure_channel(f"127.0.0.1:{port}")
        with ts.connect(options.address) as t, service as channel:
            rows = measure(options, t, peer, channel.unary_unary(METHOD))
            document = {
                "date": datetime.date.today().isoformat(),
                "machine": machine(t),
                "peer": peer.title,
                "grpcio": grpc.__version__,
                "rounds": options.rounds,
                "rows": rows,
            }
        process.stdin.close()
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
