#!/usr/bin/python3
"""Fits the decision trees of kernels/choose/tuning.h to the times of random products.

    strategy_bench --regret=400 --seed=11 --operation=matmul --json=a.json
    kernels/bench/tune.py a.json [b.json...] >kernels/choose/matmul_sm90.inc

`./dev tune` does this with as many seeds as time allows.

There is one tree for each operand type. The 16-bit types differ only in the names of their
strategies and share a tree. The cost of a strategy for a product is its time over the best
strategy's time, minus 1.

A tree that is fitted to the times themselves also fits their noise. TREES trees are therefore grown
first, each on products drawn with replacement and with a random subset of the features at each
split. Their mean is the expected cost of a strategy for a product (a random forest: Breiman, 2001).
The resulting tree is fitted to the expected costs of random products that were not timed. Any
number of such products can be generated. The script needs NumPy and scikit-learn."""

import json
import sys

import numpy as np
from sklearn.ensemble import RandomForestRegressor

FEATURES = (
    "kM kN kK kLeast kMost kResults kWork kDepth kTransposeA kTransposeB kAlignmentA kAlignmentB"
).split()
EXTENTS = 8  # features that follow from m, n and k
# The 16-bit types share a tree, which uses the names of strategies for f16.
TWINS = {"bf16": "f16", "tensor_bf16": "tensor_f16"}
FALLBACKS = ["cublas", "tensor_f64", "tensor_mma", "warp_tiled", "shared_tiled"]
# Larger ratios count as WORST, so that a single product does not decide a split.
WORST = 4
# Parameters of the forest: the number of trees, the minimum number of products in a leaf, and the
# number of features tried at a split.
TREES, TREE_LEAST, TREE_FEATURES = 64, 3, 6
# Parameters of the final tree: the number of products to which it is fitted, the minimum number of
# products in a leaf, and the maximum depth.
SAMPLES, LEAST, DEPTH = 30000, 20, 12
# A split is worth its nodes if it reduces the cost per product by this much.
LEAST_GAIN = 2e-5
FOLDS = 4
# Limits on random products, as base-2 logarithms. LONG_SHARE of the products have one extent of up
# to LONG_EXTENT.
MOST_EXTENT, MOST_WORK = 15, 40
LONG_SHARE, LONG_EXTENT = 0.1, 21


def times_of(row):
    """Returns {strategy: time} of one product, with the names for f16."""
    return {TWINS.get(t["name"], t["name"]): t["us"] for t in row["times"] if not t.get("call")}


def products(paths):
    """Returns {type: rows of its products}, and the devices' names."""
    rows, devices = {}, []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            run = json.load(file)
        devices.append(f"{run['model']}, seed {run['seed']}")
        for row in run["rows"]:
            if row["operation"] == "matmul":
                rows.setdefault(TWINS.get(row["dtype"], row["dtype"]), []).append(row)
    return rows, devices


def costs_of(rows):
    """Returns the cost of each strategy for each product, and the strategies' names."""
    times = [times_of(row) for row in rows]
    names = sorted({name for t in times for name in t})
    costs = np.empty((len(rows), len(names)))
    for i, t in enumerate(times):
        best = min(t.values())
        # If a strategy does not accept a product, the cost is that of its replacement.
        instead = next((t[name] for name in FALLBACKS if name in t), WORST * best)
        for j, name in enumerate(names):
            costs[i, j] = min(t.get(name, instead * 1.1) / best, WORST) - 1
    return costs, names


def imagined(like):
    """Returns the features of SAMPLES products with random extents, and with the transposes and
    alignments of products that were timed."""
    random = np.random.default_rng(2)
    logs = random.uniform(0, MOST_EXTENT, (4 * SAMPLES, 3))
    is_long = np.flatnonzero(random.uniform(size=len(logs)) < LONG_SHARE)
    logs[is_long, random.integers(0, 3, len(is_long))] = random.uniform(
        0, LONG_EXTENT, len(is_long)
    )
    extents = np.round(2**logs)
    m, n, k = np.log2(extents[np.log2(extents).sum(axis=1) <= MOST_WORK][:SAMPLES]).T
    least = np.minimum(m, n)
    sizes = np.column_stack((m, n, k, least, np.maximum(m, n), m + n, m + n + k, k - least))
    return np.hstack((sizes, like[random.integers(0, len(like), len(sizes)), EXTENTS:]))


def split(x, costs):
    """Returns the best (cost, feature, threshold), or None if no split helps."""
    best = costs.sum(axis=0).min() - LEAST_GAIN * SAMPLES, None, None
    for feature in range(x.shape[1]):
        order = np.argsort(x[:, feature], kind="stable")
        values = x[order, feature]
        # Each side has at least LEAST products.
        allowed = values[:-1] < values[1:]
        allowed[: LEAST - 1] = allowed[len(values) - LEAST :] = False
        if not allowed.any():
            continue
        below = np.cumsum(costs[order], axis=0)
        total = below[-1]
        cost = below[:-1].min(axis=1) + (total - below[:-1]).min(axis=1)
        cost = np.where(allowed, cost, np.inf)
        at = int(np.argmin(cost))
        if cost[at] < best[0]:
            best = cost[at], feature, (values[at] + values[at + 1]) / 2
    return None if best[1] is None else best


def fit(x, costs, depth):
    """Returns a tree. A leaf is a strategy's index; an inner node is (feature, threshold, below,
    above)."""
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


def tree_for(x, costs):
    forest = RandomForestRegressor(
        TREES, min_samples_leaf=TREE_LEAST, max_features=TREE_FEATURES, random_state=1
    )
    samples = imagined(x)
    expected = forest.fit(x, costs).predict(samples).reshape(len(samples), -1)
    return fit(samples, expected - expected.min(axis=1, keepdims=True), DEPTH)


def choose(tree, features):
    while not isinstance(tree, int):
        feature, threshold, below, above = tree
        tree = below if features[feature] <= threshold else above
    return tree


def cost_of(tree, x, costs):
    return np.array([costs[i, choose(tree, features)] for i, features in enumerate(x)])


def on_others(x, costs):
    """Returns the average cost of trees on products to which they were not fitted."""
    fold = np.random.default_rng(1).permutation(len(x)) % FOLDS
    left_out = [
        cost_of(tree_for(x[fold != f], costs[fold != f]), x[fold == f], costs[fold == f])
        for f in range(FOLDS)
    ]
    return np.concatenate(left_out).mean()


def preorder(tree, names):
    if isinstance(tree, int):
        return [f'{{"{names[tree]}"}}']
    feature, threshold, below, above = tree
    below, above = preorder(below, names), preorder(above, names)
    at = f"MatmulFeature::{FEATURES[feature]}, {threshold:.3f}f, {len(below) + 1}"
    return [f'{{"", {at}}}', *below, *above]


def main():
    rows, devices = products(sys.argv[1:])
    print("// Written by kernels/bench/tune.py, from random products on")
    for device in devices:
        print(f"//   {device}")
    for dtype, of_type in rows.items():
        x = np.array([row["features"] for row in of_type])
        costs, names = costs_of(of_type)
        tree = tree_for(x, costs)
        nodes = preorder(tree, names)
        print(
            f"{dtype}: {len(x)} products, a tree with {len(nodes)} nodes. Average regret of the"
            f" tree: {100 * cost_of(tree, x, costs).mean():.1f} % on these products,"
            f" {100 * on_others(x, costs):.1f} % in cross-validation. Average regret of the best"
            f" single strategy: {100 * costs.mean(axis=0).min():.1f} %.",
            file=sys.stderr,
        )
        print(f"constexpr TuningNode kTree{dtype.upper()}[] = {{")
        for node in nodes:
            print(f"    {node},")
        print("};")


if __name__ == "__main__":
    main()
