#!/usr/bin/env python3
"""Tests kernels/bench/map_peers.py: its table of times, and its expressions in NumPy."""

import pathlib
import sys
import unittest

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "kernels" / "bench"))

import map_peers  # noqa: E402


def row(who, us, expression="ab+c", operands=3, elements=1 << 28):
    return dict(expression=expression, operands=operands, elements=elements, who=who, us=us,
                us_min=us, us_max=us)


class MapPeersTest(unittest.TestCase):
    def test_table(self):
        document = {
            "about": "a GPU, cupy 14, torch 3, 2026-01-31",
            "rounds": 5,
            "calls": 20,
            "rows": [row("tessera", 1000), row("cupy", 1250), row("torch", 900),
                     row("tessera", 4, "gelu", 1, 256), row("torch", 8, "gelu", 1, 256)],
        }
        lines = map_peers.render(document).splitlines()
        self.assertEqual(lines[0], "| expression | f32 | Tessera, us | GB/s | cupy, us "
                                   "| cupy over ours | torch, us | torch over ours |")
        self.assertEqual(lines[2], "| ab+c | 2^28 | 1000.0 | 4295 | 1250.0 | 1.25 | 900.0 | 0.90 |")
        # The peer was not run for this expression.
        self.assertEqual(lines[3], "| gelu | 2^8 | 4.0 | 1 | - | - | 8.0 | 2.00 |")
        self.assertEqual(lines[5], "a GPU, cupy 14, torch 3, 2026-01-31; medians of 5 interleaved "
                                   "rounds of 20 calls each.")

    def test_expressions(self):
        """The expressions take the operands that they name, from one to four."""
        values = np.float32([2, 3, 5, 7])
        want = {"2a+1": 5, "(a-b)^2": 1, "ab+c": 11, "ab+cd": 41, "where": 5, "gelu": 1.9546}
        for name, (count, function) in map_peers.EXPRESSIONS.items():
            self.assertAlmostEqual(function(np, *values[:count]), want[name], 3, name)
        self.assertEqual({count for count, _ in map_peers.EXPRESSIONS.values()}, {1, 2, 3, 4})


if __name__ == "__main__":
    unittest.main()
