#!/usr/bin/env python3
"""What small calls of one tenant take alone, and while another floods the server with large products.

usage: fair_share.py --server build/bin/tessera-server [--device cuda:0] [--side N] [--seconds S]

Prints p50 and p99 of Dots of 4096 resident floats in microseconds, in turns, and exits with 1 if p99 is
more than five times that of the calls alone.
"""

import argparse
import hashlib
import os
import pathlib
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import outsider as o  # noqa: E402

IN_FLIGHT = 16  # of the flood
MOST = 5


class Tenant:
    """A client whose calls carry a token."""

    def __init__(self, server, token):
        self.client = server.client()
        self.metadata = (("authorization", f"Bearer {token}"),)

    def put(self, name, array):
        first = o.buffers.UploadRequest(
            name=name, spec=o.spec_of(array, replace=True), data=array.tobytes()[: 1 << 20]
        )
        rest = array.tobytes()[1 << 20 :]
        parts = [rest[i : i + (1 << 20)] for i in range(0, len(rest), 1 << 20)]
        messages = [first] + [o.buffers.UploadRequest(data=part) for part in parts]
        self.client.b.Upload(iter(messages), metadata=self.metadata)

    def dot(self):
        x = o.resident("x")
        self.client.c.Dot(o.compute.DotRequest(a=x, b=x), metadata=self.metadata)

    def product(self):
        m = o.resident("m")
        request = o.compute.MatmulRequest(a=m, b=m, result=o.into("p", replace=True))
        return self.client.c.Matmul.future(request, metadata=self.metadata)


def sample(tenant, seconds, flood=None):
    """Microseconds of each call; flood: keeps so many products in flight."""
    took, products, done = [], [], 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if flood:
            left = [f for f in products if not f.done()]
            done += len(products) - len(left)
            products = left + [flood.product() for _ in range(IN_FLIGHT - len(left))]
        begin = time.perf_counter()
        tenant.dot()
        took.append((time.perf_counter() - begin) * 1e6)
    for product in products:
        product.result()
    return took, done


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=10)
    arguments = parser.parse_args()
    o.Program.path, o.Program.device = os.path.abspath(arguments.server), arguments.device
    with tempfile.TemporaryDirectory() as folder:
        o.make_stubs(folder)
        tokens = pathlib.Path(folder) / "tokens"
        tokens.write_text(
            "".join(
                f"{hashlib.sha256(name.encode()).hexdigest()} write {name}\n"
                for name in ("small", "large")
            )
        )
        server = o.Server(folder, f"--tokens={tokens}")
        try:
            small, large = Tenant(server, "small"), Tenant(server, "large")
            small.put("x", np.ones(4096, np.float32))
            large.put("m", np.ones((arguments.side, arguments.side), np.float32))
            large.product().result()
            sample(small, 1)
            alone, beside, products = [], [], 0
            for _ in range(3):
                alone += sample(small, arguments.seconds / 3)[0]
                took, done = sample(small, arguments.seconds / 3, large)
                beside += took
                products += done
        finally:
            server.kill()
    figures = {}
    for what, took in (("alone", alone), ("beside", beside)):
        figures[what] = np.percentile(took, 99)
        print(f"{what:7} p50 {np.median(took):8.0f} us  p99 {figures[what]:8.0f} us  {len(took)} calls")
    print(f"{products} products of {arguments.side}^3 beside them")
    print(f"p99 beside is {figures['beside'] / figures['alone']:.1f} times that alone")
    return 0 if figures["beside"] <= MOST * figures["alone"] else 1


if __name__ == "__main__":
    sys.exit(main())
