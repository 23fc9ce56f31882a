#!/usr/bin/env python3
"""Measures how times fall when arrays are divided among one, two, three... devices of a server. For
a host with several GPUs; CI does not run it. shards_test.py, with --device, checks the bits.

usage: many_gpus.py --server bin/tessera-server [--devices cuda:0,cuda:1,cuda:2,cuda:3]
                    [--elements 32,34,36] [--products bf16:8192,f32:8192] [--scratch 2Gi]
                    [--copy-gib 1,8,32] [--upload-gib 64] [--json FILE]

--elements: arrays of 2^N f32, each on the smallest number of devices that hold it and on all larger
numbers of them. --products: products of square matrices, of which all three are divided; each GPU
needs room for the whole second operand in its --scratch, which is the server's --scratch-limit.
--copy-gib: CopyBuffer from the first device to the second, including the allocation of the new
buffer. --upload-gib: an array that is uploaded through shared memory, and over streams, to all
devices at the same time."""

import argparse
import importlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "python")]

import outsider as o  # noqa: E402

ts = None  # The Python client, imported later.
ROUNDS = 7
SEED = 26


def add(*operands):
    """Returns the fields of a Map that adds two operands."""
    both = o.expression(o.operand(0), o.operand(1), o.node("ADD", 0, 1))
    return {"operands": operands, "expression": both}


def make(client, name, rows, columns, devices):
    """Makes an f32 array on these devices without a copy on a host. Rows of 1 and 2 alternate."""
    column = (1 + np.arange(rows) % 2).astype("f4").reshape(rows, 1)
    row = o.inline(np.zeros(1, "f4"), o.view((1, columns), (0, 0)))
    client.call("Map", **add(o.inline(column), row), result=o.into(name, placement=devices),
                timeout=300)
    return 1.5 * rows * columns


# --- Speed ----------------------------------------------------------------------------------------

def median_us(client, rpc, **fields):
    answers_ = [client.call(rpc, timing=True, timeout=300, **fields) for _ in range(ROUNDS)]
    return statistics.median(answer.stats.kernel_us for answer in answers_[1:]), answers_[0]


def speed(client, devices, exponents, rows_):
    print("== Device time, medians; GB/s of all devices; how many times as fast as one")
    x = o.resident("x")
    operations = {"SUM": ("Reduce", {"x": x, "op": "REDUCE_OP_SUM"}),
                  "VARIANCE": ("Reduce", {"x": x, "op": "REDUCE_OP_VARIANCE"}),
                  "SUM along rows": ("Reduce", {"x": x, "op": "REDUCE_OP_SUM", "axes": [1]}),
                  "SUM along columns": ("Reduce", {"x": x, "op": "REDUCE_OP_SUM", "axes": [0],
                                                   "result": o.into("sums", replace=True)}),
                  "Dot with itself": ("Dot", {"a": x, "b": x})}
    for exponent in exponents:
        columns = 1 << min(20, exponent - 2)
        rows = (1 << exponent) // columns
        one = {}
        for count in range(1, len(devices) + 1):
            room = min(device.buffer_limit_bytes for device in client.info().devices)
            if (4 << exponent) // count > 0.95 * room:
                continue
            total = make(client, "x", rows, columns, devices[:count])
            for what, (rpc, fields) in operations.items():
                us, answer = median_us(client, rpc, **fields)
                if what == "SUM":
                    assert answer.value.real == total, (answer.value.real, total)
                if count == 1:
                    one[what] = us
                ratio = one[what] / us if what in one else None
                rate = (4 << exponent) / us / 1000
                print(f"   2^{exponent} {what} on {count} ({answer.stats.devices} worked):"
                      f" {us / 1000:.3f} ms, "
                      f"{rate:.0f} GB/s" + (f", {ratio:.2f} x" if ratio else ""), flush=True)
                rows_.append({"elements": 1 << exponent, "what": what, "devices": count, "us": us,
                              "GB/s": rate,
                              "times": ratio, "worked": answer.stats.devices})
            client.call("DeleteBuffer", name="x")


def products(server, devices, wanted, rows_):
    print("== Device time of products, medians; TFLOP/s; how many times as fast as one")
    with ts.connect(server.address) as t:
        for dtype, side in (product.split(":") for product in wanted):
            column, row = (t.put(np.linspace(1, 500, int(side), dtype="f4").reshape(shape))
                           for shape in ((-1, 1), (1, -1)))
            one = None
            for count in range(1, len(devices) + 1):
                place = {"placement": devices[:count], "replace": True}
                # Values between -1 and 1, made on the devices.
                values = (column * row % 2 - 1).astype(dtype)
                a, b = (values.save(name, **place) for name in "ab")
                product, found = (a @ b).with_(timing=True), []
                for _ in range(ROUNDS):
                    product.save("c", **place)
                    found.append(product.stats[0])
                us = statistics.median(stats.kernel_us for stats in found[1:])
                one = us if count == 1 else one
                print(f"   {dtype} {side} by {found[0].strategy} on {count} ({found[0].devices}"
                      f" worked): {us / 1000:.3f} ms, {2 * int(side) ** 3 / us / 1e6:.1f} TFLOP/s,"
                      f" {one / us:.2f} x", flush=True)
                rows_.append({"dtype": dtype, "side": int(side), "devices": count, "us": us,
                              "times": one / us, "worked": found[0].devices})
        for name in "abc":
            t.delete(name)


def copies(client, devices, sizes, rows_):
    print(f"== CopyBuffer from {devices[0]} to {devices[1]}, as the client sees it, medians")
    for gib in sizes:
        make(client, "x", gib << 10, 1 << 18, devices[:1])
        seconds = []
        for _ in range(ROUNDS + 1):
            client.attempt("DeleteBuffer", name="y")
            begin = time.perf_counter()
            client.call("CopyBuffer", source="x", name="y", device=devices[1], timeout=300)
            seconds.append(time.perf_counter() - begin)
        median = statistics.median(seconds[1:])
        print(f"   {gib} GiB: {1000 * median:.2f} ms, {(gib << 30) / median / 1e9:.0f} GB/s",
              flush=True)
        rows_.append({"what": "CopyBuffer", "bytes": gib << 30, "seconds": median})
        for name in "xy":
            client.call("DeleteBuffer", name=name)


def upload(server, client, devices, gib, rows_):
    print(f"== {gib} GiB from the host to {len(devices)} devices")
    block = np.random.default_rng(SEED).standard_normal(1 << 22, "f4")
    values = np.empty((max(1, int(gib * 64)), block.size), "f4")
    values[:] = block
    for shared in (True, False):
        with ts.connect(server.address, shared_memory=shared) as t:
            for turn in range(2):
                begin = time.monotonic()
                x = t.put(values, placement=devices)
                seconds = time.monotonic() - begin
                rate = values.nbytes / seconds / 1e9
                print(f"   {'shared memory' if shared else 'streams'}: {seconds:.2f} s,"
                      f" {rate:.1f} GB/s")
                rows_.append({"what": "put", "shared": shared, "turn": turn, "bytes": values.nbytes,
                              "seconds": seconds})
                for row in (0, len(values) // 2, len(values) - 1):
                    assert np.array_equal(x[row].numpy(), block), row
                del x


def main(arguments, folder):
    devices = arguments.devices.split(",")
    gpus = devices[0].startswith("cuda")
    o.Program.path = os.path.abspath(arguments.server)
    o.Program.device = arguments.devices
    o.make_stubs(folder)
    global ts
    ts = importlib.import_module("tessera")
    flags = ["--memory-limit", "92%" if gpus else "1Gi", "--shared-memory", f"{folder}/memory"]
    flags += ["--scratch-limit", arguments.scratch or ("2Gi" if gpus else "256Mi")]
    server = o.Server(folder, *flags)
    rows = []
    try:
        client = server.client(options=[("grpc.max_receive_message_length", -1)])
        speed(client, devices, [int(e) for e in arguments.elements.split(",")], rows)
        if arguments.products:
            products(server, devices, arguments.products.split(","), rows)
        if arguments.copy_gib:
            copies(client, devices, [int(gib) for gib in arguments.copy_gib.split(",")], rows)
        if arguments.upload_gib:
            upload(server, client, devices, arguments.upload_gib, rows)
    finally:
        server.stop()
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--elements", default="32")
    parser.add_argument("--products")
    parser.add_argument("--scratch")
    parser.add_argument("--copy-gib")
    parser.add_argument("--upload-gib", type=float, default=0)
    parser.add_argument("--json")
    with tempfile.TemporaryDirectory() as place:
        main(parser.parse_args(), place)
