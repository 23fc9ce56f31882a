"""Exact nearest neighbours: the vectors stay on the server, queries are sent to it, and only
indices come back.

usage: nearest_neighbours.py [ADDRESS] [--rows 1000000] [--queries 64] [--plot FILE.svg]
"""

# %% [markdown]
# ||x - q||^2 = ||x||^2 - 2 x.q + ||q||^2. The last term is the same for all neighbours of q, so the
# nearest x have the smallest ||x||^2 - 2 x.q. A matrix product, a sum of squares and a topk find
# them. This is fast, but only as exact as the squares are. Far from the origin, rounding hides the
# small distances between vectors. For few vectors, use ((q[:, None] - x) ** 2).sum(axis=2) instead.
# For many vectors, subtract their mean, search, and score the best candidates again, as shown
# below.

# %%
import argparse
import pathlib
import time

import numpy as np

import tessera as ts

parser = argparse.ArgumentParser()
parser.add_argument("address", nargs="?", default="127.0.0.1:50051")
parser.add_argument("--rows", type=int, default=1_000_000)
parser.add_argument("--queries", type=int, default=64)
parser.add_argument("--plot")
options = parser.parse_args()
t = ts.connect(options.address)

# %% [markdown]
# ## Handwritten digits
# There are 1797 images of 8 x 8 pixels, one in each row. Views of one resident array separate the
# known images from the queries.

# %%
data = pathlib.Path(__file__).resolve().parents[2] / "demo"
images, labels = np.load(data / "digits.npy"), np.load(data / "labels.npy")
digits = t.put(images)
train, test = digits[:1257], digits[1257:]
scores = ts.sum_squares(train, axis=1) - 2 * (test @ train.T)
_, nearest = scores.topk(5, largest=False)
print(nearest.explain())

# %%
found = nearest.numpy()
x, y = images[:1257].astype(float), images[1257:].astype(float)
expected = np.argsort((x * x).sum(axis=1) - 2 * y @ x.T, axis=1, kind="stable")[:, :5]
assert (found == expected).all()
print(f"{found.nbytes} bytes came back")
known, asked = labels[:1257][found], labels[1257:]
for k in (1, 3, 5):
    votes = [np.bincount(neighbours[:k], minlength=10).argmax() for neighbours in known]
    print(f"accuracy by the nearest {k}: {(votes == asked).mean():.4f}")

# %% [markdown]
# ## A million vectors
# Their norms are computed once and stay on the server. Each call sends a batch of queries and
# returns the indices of the ten vectors that are nearest to each query.

# %%
DIMENSIONS = 128
random = np.random.default_rng(7)
vectors = random.standard_normal((options.rows, DIMENSIONS), np.float32)
begin = time.perf_counter()
resident = t.put(vectors)
norms = ts.sum_squares(resident, axis=1).save()
print(f"{vectors.nbytes / 1e6:.0f} MB put in {time.perf_counter() - begin:.2f} s")

# Each query is a vector with added noise, so its nearest neighbour is known.
target = random.integers(0, options.rows, options.queries)
queries = vectors[target] + random.normal(0, 0.1, (options.queries, DIMENSIONS)).astype("f4")


def search(batch):
    _, nearest = (norms - 2 * (batch @ resident.T)).topk(10, largest=False)
    return nearest.numpy()


assert (search(queries)[:, 0] == target).all()

# %%
rates = {}
for batch in (1, 8, 64):
    here = queries[:batch]
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        search(here)
        seconds.append(time.perf_counter() - begin)
    rates[batch] = len(here) / sorted(seconds)[2]
    print(f"{len(here):3} queries a call: {rates[batch]:8.0f} queries/s")

# %% [markdown]
# ## Far from the origin
# This function subtracts the mean of the vectors, and computes the distances to the best candidates
# again in f64, from differences. Where rounding may have hidden a closer vector, it compares the
# query with all vectors. A vector that contains NaN has no distance, so topk sorts it last. The
# mean skips NaN.

# %%
def nearest(x, queries, k):
    """Returns (squared distances, indices) of the k vectors of x that are nearest to each query."""
    centre = np.mean(x, axis=0, where=np.isfinite(x)).save()
    around, asked = (x - centre).save(), (t.put(queries) - centre).save()
    norms = ts.sum_squares(around, axis=1).save()
    scores, found = (norms - 2 * (asked @ around.T)).topk(min(4 * k, len(x)), largest=False)
    scores, found = t.compute(scores, found)
    # The smallest score that a vector outside the candidates can have, and the rounding error of
    # a score.
    sizes = ts.sum_squares(asked, axis=1).numpy().astype("f8")
    last = scores[:, -1] + sizes
    rounding = (x.shape[1] + 8) * np.finfo("f4").eps * (np.nanmax(norms).numpy() + sizes)

    found.sort(axis=1)
    queries, wide = queries.astype("f8"), x.astype("f8")
    pairs = [(wide[i], query) for query, some in zip(queries, found) for i in some]
    squares = []
    for begin in range(0, len(pairs), 1000):  # A call has at most 4096 steps.
        squares += t.compute(*[((v - q) ** 2).sum() for v, q in pairs[begin : begin + 1000]])
    squares = np.reshape(squares, found.shape)
    order = np.argsort(squares, axis=1, kind="stable")[:, :k]
    squares = np.take_along_axis(squares, order, 1)
    found = np.take_along_axis(found, order, 1)
    # Compare a query with all vectors if rounding may have hidden a closer one.
    for i in np.flatnonzero(~(last - rounding > squares[:, -1])):
        distances = ((wide - queries[i]) ** 2).sum(axis=1)
        squares[i], found[i] = t.compute(*distances.topk(k, largest=False))
    return squares, found


far = (100 + 0.01 * random.standard_normal((1000, 64))).astype("f4")
far[7, 3] = np.nan
asked = np.delete(far[:21], 7, axis=0)
squares, found = nearest(t.put(far), asked, 10)
itself = np.delete(np.arange(21), 7)
assert (found[:, 0] == itself).all() and (squares[:, 0] == 0).all() and not (found == 7).any()
differences = far.astype("f8") - asked.astype("f8")[:, None]
assert (found == np.argsort((differences**2).sum(axis=2), axis=1)[:, :10]).all()
print(f"{len(asked)} of {len(asked)} vectors are their own nearest neighbours")

apart = (0.01 * random.standard_normal((2000, 64))).astype("f4")
apart[1000:] += 1000  # Two clouds, whose mean is far from both.
squares, found = nearest(t.put(apart), apart[990:1010], 10)
assert (found[:, 0] == np.arange(990, 1010)).all() and (squares[:, 0] == 0).all()
print("the same holds for vectors in two clouds that are far apart")

# %%
if options.plot:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3))
    axes.bar([str(batch) for batch in rates], list(rates.values()))
    axes.set_xlabel("queries a call")
    axes.set_ylabel("queries a second")
    axes.set_title(f"Exact search in {options.rows} vectors of {DIMENSIONS} f32")
    figure.tight_layout()
    figure.savefig(options.plot)
t.close()
