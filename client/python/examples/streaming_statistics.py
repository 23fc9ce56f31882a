"""Mean, standard deviation and extremes of the columns of a file that does not fit into memory:
each piece is on the server only while it is needed, and the running statistics stay there.

usage: streaming_statistics.py [ADDRESS] [--file FILE.npy] [--mib 64] [--piece-mib 16]
                               [--plot FILE.svg]

Without --file it makes a file of --mib MiB in a temporary folder. Neither this process nor the
server needs memory for more than a few pieces, however long the file is.
"""

# %%
import argparse
import pathlib
import resource
import tempfile
import time

import numpy as np

import tessera as ts

parser = argparse.ArgumentParser()
parser.add_argument("address", nargs="?", default="127.0.0.1:50051")
parser.add_argument("--file", type=pathlib.Path)
parser.add_argument("--mib", type=int, default=64)
parser.add_argument("--piece-mib", type=int, default=16)
parser.add_argument("--plot")
options = parser.parse_args()
COLUMNS = 16
folder = tempfile.TemporaryDirectory()


def make_file(path):
    """Writes rows of f32 whose columns differ in mean and standard deviation, piece by piece."""
    rows = options.mib * (1 << 20) // (4 * COLUMNS)
    array = np.lib.format.open_memmap(path, "w+", np.float32, (rows, COLUMNS))
    random = np.random.default_rng(1)
    step = 1 << 17
    for begin in range(0, rows, step):
        part = array[begin : begin + step]
        random.standard_normal(out=(noise := np.empty(part.shape, np.float32)), dtype=np.float32)
        part[:] = noise * np.arange(1, COLUMNS + 1) + np.arange(COLUMNS)
    array.flush()


path = options.file or pathlib.Path(folder.name, "rows.npy")
if options.file is None:
    make_file(path)
rows = np.load(path, mmap_mode="r")
t = ts.connect(options.address)

# %% [markdown]
# ## Chan's formula
# Let a and b be the means of two samples of n and m elements, and A and B their sums of squared
# deviations. Together, the samples have the mean a + d m / (n + m) and the sum of squared
# deviations A + B + d^2 n m / (n + m), where d is b - a. One call merges each piece with the
# statistics so far. `keep` leaves four arrays on the server, with one number per column.


# %%
def pieces():
    step = max(1, (options.piece_mib << 20) // (rows.shape[1] * rows.dtype.itemsize))
    for begin in range(0, len(rows), step):
        # Use a new mapping each time, so that pages that were read do not stay in memory.
        yield np.load(path, mmap_mode="r")[begin : begin + step]


count, known = 0, None
begin = time.perf_counter()
progress = []
for piece in pieces():
    x, n, m = t.put(piece).astype("f64"), count, len(piece)
    mean, squares = x.mean(axis=0), x.var(axis=0) * m
    low, high = x.min(axis=0), x.max(axis=0)
    if known:
        delta = mean - known[0]
        mean = known[0] + delta * (m / (n + m))
        squares = known[1] + squares + delta**2 * (n * m / (n + m))
        low, high = np.minimum(known[2], low), np.maximum(known[3], high)
    known = t.keep(mean, squares, low, high)
    count += m
    progress.append((count * rows.dtype.itemsize * rows.shape[1], time.perf_counter() - begin))

mean, deviation, low, high = t.compute(known[0], np.sqrt(known[1] / count), known[2], known[3])
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"{count} rows, {progress[-1][0] / 2**20:.0f} MiB, in {seconds:.2f} s")
print(f"this process: {peak:.0f} MiB at most")
print("means              ", mean[:6].round(3))
print("standard deviations", deviation[:6].round(3))

# %% [markdown]
# If the file fits into the memory of this process, this cell compares the results with NumPy's:

# %%
if rows.nbytes <= 1 << 28:
    whole = np.asarray(rows, np.float64)
    np.testing.assert_allclose(mean, whole.mean(axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(deviation, whole.std(axis=0), rtol=1e-9)
    np.testing.assert_array_equal(high, whole.max(axis=0))

# %%
if options.plot:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3))
    done, when = np.array(progress).T
    axes.plot(when, done / 2**20)
    axes.set_xlabel("s")
    axes.set_ylabel("MiB of the file")
    figure.tight_layout()
    figure.savefig(options.plot)
t.close()
folder.cleanup()
