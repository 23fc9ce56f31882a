#!/usr/bin/python3
"""Fits the decision trees of kernels/tuning.h to the times of random products.

    strategy_bench --regret=2000 --seed=11 --operation=matmul --json=a.json
    kernels/bench/tune.py a.json [b.json...] >kernels/tuning/matmul_sm90.inc

A tree for each type of operands; those of 16 bits differ in the names of their strategies alone and
are fitted as one. A product costs what its strategy's time is above the best one's,
as a ratio less 1; a split is the one that leaves least cost where each side takes one strategy, and
a side has at least LEAST products. How deep trees go is decided by what they cost on products that
they were not fitted to. Needs NumPy."""

import json
import sys

import numpy as np

FEATURES = [
    "kM",
    "kN",
    "kK",
    "kLeast",
    "kMost",
    "kResults",
    "kWork",
    "kDepth",
    "kTransposeA",
    "kTransposeB",
    "kAlignmentA",
    "kAlignmentB",
]
# Types of 16 bits share a tree, which calls strategies by their names for f16.
TWINS = {"bf16": "f16", "tensor_bf16": "tensor_f16"}
FALLBACKS = ["cublas", "tensor_f64", "tensor_mma", "warp_tiled", "shared_tiled"]
DEPTHS = range(3, 11)
LEAST = 8
FOLDS = 8
# Ratios above this one are no worse than it, lest a single product decide a split.
WORST = 4


def read(paths):
    """{type: (features, costs, strategies)}, and the devices' names."""
    rows, devices = {}, []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            run = json.load(file)
        devices.append(f"{run['model']}, seed {run['seed']}")
        for row in run["rows"]:
            if row["operation"] == "matmul":
                rows.setdefault(TWINS.get(row["dtype"], row["dtype"]), []).append(row)
    data = {}
    for dtype, problems in rows.items():
        times = [
            {TWINS.get(t["name"], t["name"]): t["us"] for t in p["times"] if not t.get("call")}
            for p in problems
        ]
        names = sorted({name for t in times for name in t})
        costs = np.empty((len(problems), len(names)))
        for i, t in enumerate(times):
            best = min(t.values())
            # Where a strategy does not take a product, the one that takes its place costs.
            instead = next((t[name] for name in FALLBACKS if name in t), WORST * best)
            for j, name in enumerate(names):
                costs[i, j] = min(t.get(name, instead * 1.1) / best, WORST) - 1
        data[dtype] = np.array([p["features"] for p in problems]), costs, names
    return data, devices


def split(x, costs):
    """The best (cost, feature, threshold), or None if no split helps."""
    best = costs.sum(axis=0).min() - 1e-9, None, None
    for feature in range(x.shape[1]):
        order = np.argsort(x[:, feature], kind="stable")
        values = x[order, feature]
        below = np.cumsum(costs[order], axis=0)
        total = below[-1]
        cost = below[:-1].min(axis=1) + (total - below[:-1]).min(axis=1)
        allowed = values[:-1] < values[1:]
        allowed[: LEAST - 1] = False
        allowed[len(values) - LEAST :] = False
        if not allowed.any():
            continue
        cost = np.where(allowed, cost, np.inf)
        at = int(np.argmin(cost))
        if cost[at] < best[0]:
            best = cost[at], feature, (values[at] + values[at + 1]) / 2
    return None if best[1] is None else best


def fit(x, costs, depth):
    """A leaf is a strategy's number, an inner node (feature, threshold, below, above)."""
    found = split(x, costs) if depth > 0 and len(x) >= 2 * LEAST else None
    if found is None:
        return int(costs.sum(axis=0).argmin())
    _, feature, threshold = found
    side = x[:, feature] <= threshold
    below = fit(x[side], costs[side], depth - 1)
    above = fit(x[~side], costs[~side], depth - 1)
    if below == above and isinstance(below, int):
        return below
    return feature, threshold, below, above


def choose(tree, features):
    while not isinstance(tree, int):
        feature, threshold, below, above = tree
        tree = below if features[feature] <= threshold else above
    return tree


def cost_of(tree, x, costs):
    return np.array([costs[i, choose(tree, features)] for i, features in enumerate(x)])


def depth_for(x, costs):
    """The depth that costs least on parts left out, and what it costs there on average."""
    fold = np.random.default_rng(1).permutation(len(x)) % FOLDS
    found = []
    for depth in DEPTHS:
        left_out = [
            cost_of(fit(x[fold != f], costs[fold != f], depth), x[fold == f], costs[fold == f])
            for f in range(FOLDS)
        ]
        found.append((np.concatenate(left_out).mean(), depth))
    return min(found)


def preorder(tree, names):
    if isinstance(tree, int):
        return [f'{{"{names[tree]}"}}']
    feature, threshold, below, above = tree
    below, above = preorder(below, names), preorder(above, names)
    at = f"MatmulFeature::{FEATURES[feature]}, {threshold:.3f}f, {len(below) + 1}"
    return [f'{{"", {at}}}', *below, *above]


def main():
    data, devices = read(sys.argv[1:])
    print("// Written by kernels/bench/tune.py, from random products on")
    for device in devices:
        print(f"//   {device}")
    for dtype, (x, costs, names) in data.items():
        expected, depth = depth_for(x, costs)
        tree = fit(x, costs, depth)
        print(
            f"{dtype}: {len(x)} products, a tree of depth {depth}: regret"
            f" {100 * cost_of(tree, x, costs).mean():.1f} % on these, {100 * expected:.1f} % on"
            f" others; {100 * costs.mean(axis=0).min():.1f} % of one strategy for all",
            file=sys.stderr,
        )
        print(f"constexpr TuningNode kTree{dtype.upper()}[] = {{")
        for node in preorder(tree, names):
            print(f"    {node},")
        print("};")


if __name__ == "__main__":
    main()
