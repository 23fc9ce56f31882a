#!/usr/bin/env python3
"""What counting costs: a server as it is built, one whose counters do nothing, and one whose metrics are read
every two seconds, in turns: calls a second, and processor time of the server for each call, which tells
smaller differences apart where other programs run. Needs a build folder with tessera-server; CI does
without it.

usage: metrics_cost.py --build build/cpu [--bench PATH/service_bench] [--rounds 10] [--seconds 2]
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import outsider as o  # noqa: E402

CALLERS, ELEMENTS = 16, 4096
COUNTING = re.compile(r"^(void (?:Histogram::Add|Metrics::Count\w*)\([^{]*\{)", re.MULTILINE)


def without_counters(build, folder):
    """A server that differs from the built one in functions that return at once."""
    source = (o.ROOT / "server" / "metrics.cc").read_text()
    empty, changed = COUNTING.subn(r"\1 return;", source)
    assert changed > 4, changed
    stub = pathlib.Path(folder) / "metrics.cc"
    stub.write_text(empty)
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"].endswith("server/metrics.cc"):
            words = shlex.split(entry["command"])
            words[words.index(entry["file"])] = str(stub)
            words[words.index("-o") + 1] = f"{stub}.o"
            subprocess.run(words, cwd=entry["directory"], check=True)
    link = subprocess.run(["ninja", "-C", build, "-t", "commands", "tessera-server"], check=True,
                          capture_output=True, text=True).stdout.splitlines()[-1]
    # An object of the command line comes before that of the library.
    link = link.replace("-o bin/tessera-server", f"{stub}.o -o {folder}/tessera-server")
    subprocess.run(link, shell=True, cwd=build, check=True)
    return f"{folder}/tessera-server", {**os.environ, "LD_LIBRARY_PATH": str(build)}


def processor_seconds(server):
    fields = pathlib.Path(f"/proc/{server.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def scraped(server):
    """Reads a server's metrics every two seconds."""
    address = re.search(r"metrics at http://([\d.:]+)/", server.log())[1]
    stop = threading.Event()

    def read():
        while not stop.wait(2):
            urllib.request.urlopen(f"http://{address}/metrics", timeout=20).read()

    thread = threading.Thread(target=read)
    thread.start()
    yield
    stop.set()
    thread.join()


def main(arguments, folder):
    build = arguments.build.resolve()
    usual = str(build / "bin" / "tessera-server")
    other, environment = without_counters(build, folder)
    kinds = {"without the counters": (other, ()), "with them": (usual, ()),
             "read every 2 s": (usual, ("--metrics-listen", "127.0.0.1:0"))}
    os.environ.update(environment)  # the other server lies in another folder than its library
    servers = {}
    for name, (program, flags) in kinds.items():
        o.Program.path = program
        servers[name] = o.Server(folder, "--memory-limit", "256Mi", *flags)
    rates, cost = {name: [] for name in kinds}, {name: [] for name in kinds}
    try:
        for turn in range(arguments.rounds):
            names = list(kinds)
            for name in names[turn % 3:] + names[:turn % 3]:  # nobody is always first
                server, path = servers[name], f"{folder}/row.json"
                with scraped(server) if name == "read every 2 s" else contextlib.nullcontext():
                    before = processor_seconds(server)
                    subprocess.run(
                        [arguments.bench, "--target", f"us={server.address}", "--operations", "dot", "--callers",
                         str(CALLERS), "--elements", str(ELEMENTS), "--seconds", str(arguments.seconds), "--rounds",
                         "1", "--json", path], check=True, stdout=subprocess.DEVNULL)
                    used = processor_seconds(server) - before
                row = next(r for r in json.loads(pathlib.Path(path).read_text())["rows"]
                           if r["target"] == "us" and r["operation"] == "dot")
                rates[name].append(row["median"]["per_second"])
                cost[name].append(1e6 * used / (arguments.seconds * rates[name][-1]))
                print(f"{turn + 1}: {name}: {rates[name][-1]:.0f} calls/s", flush=True)
    finally:
        for server in servers.values():
            server.kill()
    base = statistics.median(cost["without the counters"])
    print("\n| server | calls/s | quartiles | processor time a call |\n|---|---|---|---|")
    for name in kinds:
        low, middle, high = statistics.quantiles(rates[name], n=4)
        print(f"| {name} | {middle / 1000:.2f} k | {low / 1000:.2f} k, {high / 1000:.2f} k "
              f"| {statistics.median(cost[name]):.1f} us, {100 * (statistics.median(cost[name]) / base - 1):+.1f} % |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--bench")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2)
    flags = parser.parse_args()
    flags.bench = os.path.abspath(flags.bench or flags.build / "bin" / "service_bench")
    with tempfile.TemporaryDirectory() as place:
        o.make_stubs(place)
        main(flags, place)
