#!/usr/bin/env python3
"""Talks to a running server with only the .proto files of this project, and compares with NumPy.

The client is the distribution's grpcio with its default options. Clients in any other language can
do everything that this test does."""

import sys

import numpy as np

import outsider as o
from outsider import into, resident, view

RNG = np.random.default_rng(7)


def test_results_stay_resident_and_chain(server, client):
    """Computes squared distances between two sets of points without downloading the distances."""
    points = RNG.standard_normal((300, 16)).astype(np.float32)
    queries = RNG.standard_normal((40, 16)).astype(np.float32)
    client.put("points", points)
    client.put("queries", -2 * queries)
    client.call(
        "Reduce", x=resident("points"), op="REDUCE_OP_SUM_SQUARES", axes=[1], result=into("norms"))
    client.call("Matmul", a=resident("queries"), b=resident("points"), transpose_b=True,
                result=into("distances"))
    answer = client.call(
        "Add", a=resident("distances"), b=resident("norms", view((40, 300), (0, 1))),
        result=into("distances", replace=True))
    assert not answer.HasField("tensor")
    assert tuple(answer.buffer.shape) == (40, 300)
    answer = client.call("Reduce", x=resident("distances"), op="REDUCE_OP_ARGMIN", axes=[1])
    distances = ((queries[:, None, :].astype(np.float64) - points[None]) ** 2).sum(-1)
    np.testing.assert_array_equal(o.to_numpy(answer.tensor), distances.argmin(1))
    stored = np.frombuffer(client.download("distances"), "<f4").reshape(40, 300)
    offsets = (queries.astype(np.float64) ** 2).sum(1)[:, None]
    np.testing.assert_allclose(stored + offsets, distances, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    sys.exit(o.run_tests(globals(), device="auto"))
