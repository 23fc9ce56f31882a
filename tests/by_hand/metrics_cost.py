#!/usr/bin/env python3
"""Measures what counting costs, in many short rounds with separate processes: a server as it is
built, the same server again, one whose counters do nothing, and one whose metrics are read every
two seconds. The processor time of the server's process per call is compared round by round. Other
programs take time from all servers, and a disturbed round does not move a median. The difference
between the two equal servers shows how precise the result is. Then the script counts the
instructions of a call, and those of the counting in it, which other programs do not affect. Needs a
build folder with tessera-server and service_bench, and valgrind. CI does not run it.

usage: metrics_cost.py --build build/release [--bench PATH/service_bench] [--turns 60] [--seconds
0.5]
       --turns 0: only instructions
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import grpc
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import outsider as o  # noqa: E402

CALLERS, ELEMENTS = 16, 4096
BASE = "without the counters"
COUNTING = re.compile(r"^(void (?:Histogram::Add|Metrics::Count\w*)\([^{]*\{)", re.MULTILINE)


def without_counters(build, folder):
    """Returns a server that differs from the built one in functions that return immediately."""
    source = (o.ROOT / "server" / "observe" / "metrics.cc").read_text()
    empty, changed = COUNTING.subn(r"\1 return;", source)
    assert changed > 4, changed
    stub = pathlib.Path(folder) / "metrics.cc"
    stub.write_text(empty)
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"].endswith("server/observe/metrics.cc"):
            words = shlex.split(entry["command"])
            words[words.index(entry["file"])] = str(stub)
            words[words.index("-o") + 1] = f"{stub}.o"
            subprocess.run(words, cwd=entry["directory"], check=True)
    link = subprocess.run(["ninja", "-C", build, "-t", "commands", "tessera-server"], check=True,
                          capture_output=True, text=True).stdout.splitlines()[-1]
    # An object on the command line takes precedence over the object in the library.
    link = link.replace("-o bin/tessera-server", f"{stub}.o -o {folder}/tessera-server")
    subprocess.run(link, shell=True, cwd=build, check=True)
    return f"{folder}/tessera-server", {**os.environ, "LD_LIBRARY_PATH": str(build)}


def processor_seconds(server):
    """Returns the processor time of all threads of the process, in nanosecond steps
    (clock_getcpuclockid)."""
    return time.clock_gettime(~server.pid << 3 | 2)


@contextlib.contextmanager
def scraped(server):
    """Reads a server's metrics every two seconds."""
    stop = threading.Event()

    def read():
        while not stop.wait(2):
            server.page()

    thread = threading.Thread(target=read)
    thread.start()
    yield
    stop.set()
    thread.join()


def interval(ratios):
    """Returns the median, and the interval that contains the medians of 95 of 100 samples drawn
    from these values."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(10000))
    return statistics.median(ratios), medians[250], medians[-250]


def count_instructions(build, folder):
    """Counts the instructions of a Dot, and those among them that count it for the metrics
    (callgrind). 16 Dots are always in flight."""
    address, out, rounds = f"unix:{folder}/counted", f"{folder}/callgrind", 100
    server = subprocess.Popen(
        ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}",
         build / "bin" / "tessera-server", "--listen", address, "--device", "cpu", "--no-warm-up",
         "--memory-limit", "64Mi"],
        stderr=subprocess.DEVNULL)
    try:
        client = o.Client(address)
        grpc.channel_ready_future(client.channel).result(300)
        client.put("x", np.ones(ELEMENTS, np.float32))
        x = o.resident("x")

        def calls(count):
            for _ in range(count):
                for call in [client.future("Dot", a=x, b=x) for _ in range(CALLERS)]:
                    call.result(timeout=300)

        def switch(state):
            subprocess.run(["callgrind_control", "-i", state, str(server.pid)], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        calls(5)
        switch("on")
        calls(rounds)
        switch("off")
        client.close()
        server.terminate()
        server.wait(300)
    finally:
        server.kill()
    text = subprocess.run(["callgrind_annotate", "--inclusive=yes", "--threshold=100", out],
                          check=True, capture_output=True, text=True).stdout
    found = {}
    for line in text.splitlines():
        for name, pattern in (("all", "PROGRAM TOTALS"),
                              ("counting", r":tessera::Metrics::Count\(")):
            if re.search(pattern, line):
                found[name] = int(line.split()[0].replace(",", "")) / (rounds * CALLERS)
    print(f"\n{found['all']:.0f} instructions a call, {found['counting']:.0f} of them to count it: "
          f"{100 * found['counting'] / found['all']:.2f} %")


def compare(arguments, folder):
    build = arguments.build.resolve()
    usual = str(build / "bin" / "tessera-server")
    other, environment = without_counters(build, folder)
    os.environ.update(environment)  # The other server is outside its library's folder.
    read = "read every 2 s"
    kinds = {BASE: (other, ()), "with them": (usual, ()), "with them, once more": (usual, ()),
             read: (usual, ("--metrics-listen", "127.0.0.1:0"))}
    rates, cost = {name: [] for name in kinds}, {name: [] for name in kinds}
    for turn in range(arguments.turns):
        # Each round has its own processes, because the position of memory makes a difference of a
        # few per cent between equal servers.
        with contextlib.ExitStack() as stack:
            servers = {}
            for name, (program, flags) in sorted(kinds.items(), key=lambda _: random.random()):
                o.Program.path = program
                servers[name] = o.Server(folder, "--memory-limit", "256Mi", "--no-warm-up", *flags)
                stack.callback(servers[name].kill)
            stack.enter_context(scraped(servers[read]))
            targets = [word for name, server in servers.items()
                       for word in ("--target", f"{name}={server.address}")]
            before = {name: processor_seconds(server) for name, server in servers.items()}
            path = f"{folder}/rows.json"
            subprocess.run(
                [arguments.bench, *targets, "--operations", "dot", "--callers", str(CALLERS),
                 "--elements", str(ELEMENTS),
                 "--seconds", str(arguments.seconds), "--rounds", "1", "--seed", str(turn + 1),
                 "--json", path],
                check=True, stdout=subprocess.DEVNULL)
            found = {row["target"]: row["median"]["per_second"]
                     for row in json.loads(pathlib.Path(path).read_text())["rows"]
                     if row["operation"] == "dot"}
            for name, server in servers.items():
                used = processor_seconds(server) - before[name]
                rates[name].append(found[name])
                cost[name].append(1e6 * used / (arguments.seconds * found[name]))
        print(f"{turn + 1}: " + ", ".join(f"{cost[name][-1]:.2f} us" for name in kinds), flush=True)
    print("\n| server | calls/s | processor time a call"
          " | relative to the first, turn by turn (95 % interval) |\n|---|---|---|---|")
    for name in kinds:
        ratios = [100 * (mine / base - 1) for mine, base in zip(cost[name], cost[BASE])]
        middle, low, high = interval(ratios)
        beside = "" if name == BASE else f"{middle:+.2f} % ({low:+.2f} to {high:+.2f} %)"
        print(f"| {name} | {statistics.median(rates[name]) / 1000:.2f} k"
              f" | {statistics.median(cost[name]):.2f} us | {beside} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--bench")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.5)
    flags = parser.parse_args()
    flags.bench = os.path.abspath(flags.bench or flags.build / "bin" / "service_bench")
    with tempfile.TemporaryDirectory() as place:
        o.make_stubs(place)
        if flags.turns:
            compare(flags, place)
        count_instructions(flags.build.resolve(), place)
