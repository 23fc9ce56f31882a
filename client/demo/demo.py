#!/usr/bin/env python3
"""Classifies handwritten digits on a Tessera server and checks every operation against NumPy.

The training images are uploaded once and stay on the device. All distances between test and
training images come from ||x - y||^2 = ||x||^2 - 2 x.y + ||y||^2, whose last term is the same for
all x and can be left out:

    norms     = Reduce SUM_SQUARES of the training images, one per row
    scores    = Matmul of -2 * test and the transposed training images
    distances = Add of scores and norms, repeated for every test image by a view with stride 0
    nearest   = Reduce ARGMIN of every row of the distances

These are the four steps of one program, nearest.json. Only the 540 indices of the last step are
sent back.

The exit code is 1 if the accuracy differs from NumPy's, or if an error exceeds the bound that its
strategy promises.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

TRAINING_IMAGES = 1257
PROGRAM = pathlib.Path(__file__).parent / "nearest.json"
# Unit roundoff of an array result's type.
ROUNDOFF = {"f32": 2.0**-24, "f64": 2.0**-53}
NUMPY_TYPE = {"f32": np.float32, "f64": np.float64}
# Flags for a server with --tokens or TLS. The tessera command's environment variables also apply.
CREDENTIALS = {
    "token-file": "file with a token of the role write",
    "tls-ca": "CA of the server's certificate, in PEM",
    "tls-cert": "certificate to present to the server, in PEM",
    "tls-key": "key of --tls-cert, in PEM",
}


class Tessera:
    """Runs the command-line client, and counts the bytes in its messages."""

    def __init__(self, cli, server, *flags):
        self.command = [cli, "--json", "--server", server, *flags]
        self.calls = 0
        self.travelled = 0  # bytes
        self.computed_on = 0  # bytes

    def __call__(self, *arguments, may_refuse=False):
        """Returns the response, or None if may_refuse is set and the strategy refuses the call."""
        process = subprocess.run([*self.command, *map(str, arguments)], stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True)
        if may_refuse and process.returncode == 5 and "STRATEGY_UNSUPPORTED" in process.stderr:
            return None
        if process.returncode != 0:
            sys.exit(f"demo: tessera {' '.join(map(str, arguments))}\n{process.stderr.strip()}")
        answer = json.loads(process.stdout)
        self.calls += 1
        self.travelled += sum(answer["traffic"].values())
        for part in (answer, *answer.get("steps", ())):
            self.computed_on += part.get("stats", {}).get("bytes", 0)
        return answer

    def put(self, folder, name, array):
        path = folder / "array.npy"
        np.save(path, array)
        return self("put", path, "--name", name, "--replace", "--ttl", "1h")["buffer"]


def human_bytes(n):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024


def human_us(us):
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def classify(tessera):
    """Prints the steps. Returns the index of the nearest training image for every test image."""
    titles = ("reduce sum_squares of each training image",
              "matmul of -2 test and train, transposed",
              "add the norms to every row", "reduce argmin of each row")
    answer = tessera("run", PROGRAM)
    print(f"{'step':<42}{'result':<18}{'strategy':<16}{'on device':>10}")
    for title, step in zip(titles, answer["steps"]):
        stats = step["stats"]
        result = "in scratch" if "scratch" in step else f"{step['shape'][0]} sent back"
        print(f"{title:<42}{result:<18}{stats['strategy']:<16}{human_us(stats['kernel_us']):>10}")
    print(f"{'all, in one call':<76}{human_us(answer['wall_us']):>10}")
    return np.array(answer["steps"][-1]["data"])


class Case:
    """One operation on standardised images, with its exact value and a bound on its error.

    bound(roundoff, result_roundoff) is the bound that a strategy promises: `roundoff` times the
    sum of the absolute values of the terms, plus the rounding of the result to its type.
    """

    def __init__(self, operation, title, command, exact, bound):
        self.operation = operation
        self.title = title
        self.command = command
        self.exact = np.asarray(exact)
        self.bound = bound


def cases(buffer, z):
    """Returns the cases for a buffer with content z. Exact values have extended precision."""
    x = z.astype(np.longdouble)
    a, b = x[0], x[1]
    column = x[::100, 28]
    block = x[:512]
    product = np.prod(column)
    norm = np.sqrt(np.sum(block * block))
    scores = x[:540] @ x[540:].T
    weights = np.abs(x[:540]) @ np.abs(x[540:]).T
    squares = np.sum(x * x, axis=1)
    total = x[:900] + x[897:]

    exactly = lambda roundoff, result: 0.0
    return [
        Case("dot", "dot of two images", ("dot", f"{buffer}[0]", f"{buffer}[1]"), a @ b,
             lambda r, u: r * (np.abs(a) @ np.abs(b))),
        Case("reduce", "norm_l2 of 512 images", ("reduce", "norm_l2", f"{buffer}[:512]"), norm,
             lambda r, u: r * norm),
        Case("reduce", "mean of a window", ("reduce", "mean", f"{buffer}[:, 8:56]"),
             np.mean(x[:, 8:56]),
             lambda r, u: r * np.mean(np.abs(x[:, 8:56])) + ROUNDOFF["f64"]),
        Case("reduce", "min of every other image", ("reduce", "min", f"{buffer}[::2]"),
             np.min(x[::2]), exactly),
        Case("reduce", "max, backwards", ("reduce", "max", f"{buffer}[::-1, ::-1]"), np.max(x),
             exactly),
        Case("reduce", "argmax of a column", ("reduce", "argmax", f"{buffer}[:, 28]"),
             np.argmax(x[:, 28]), exactly),
        Case("reduce", "product of 18 pixels", ("reduce", "product", f"{buffer}[::100, 28]"),
             product, lambda r, u: r * abs(product)),
        Case("reduce_axes", "sum of squares by image",
             ("reduce", "sum_squares", buffer, "--axes", 1), squares,
             lambda r, u: (r + u) * squares),
        Case("matmul", "540 x 64 by 64 x 1257",
             ("matmul", f"{buffer}[:540]", f"{buffer}[540:]", "--transpose-b"), scores,
             lambda r, u: r * weights + u * np.abs(scores)),
        Case("window_sum", "radius 3 along an image", ("window-sum", f"{buffer}[7]", "--radius", 3),
             np.convolve(x[7], np.ones(7, np.longdouble), "same"),
             lambda r, u: (r + u) * np.convolve(np.abs(x[7]), np.ones(7, np.longdouble), "same")),
        Case("add", "two overlapping windows", ("add", f"{buffer}[:900]", f"{buffer}[897:]"),
             total, lambda r, u: np.maximum(r, u) * np.abs(total)),
    ]


def check_operations(tessera, folder, images, backend):
    """Runs every case with every strategy of the device.

    Returns the number of results that exceed their bounds.
    """
    strategies = [row for row in tessera("strategies")["strategies"]
                  if row["available"] and row["backend"] == backend]
    deviation = images.std(axis=0)
    standardised = (images - images.mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    print(f"{'operation':<26}{'strategy':<25}{'type':<5}{'on device':>10}{'in all':>10}"
          f"{'error':>11}{'bound':>11}")
    failures = 0
    all_cases = {}
    for dtype, numpy_type in NUMPY_TYPE.items():
        z = standardised.astype(numpy_type)
        buffer = f"digits/standardised-{dtype}"
        tessera.put(folder, buffer, z)
        all_cases[dtype] = cases(buffer, z)
    for i, case in enumerate(all_cases["f32"]):
        for row in strategies:
            for dtype in NUMPY_TYPE:
                if row["operation"] != case.operation or dtype not in row["dtypes"]:
                    continue
                failures += not check(tessera, folder, all_cases[dtype][i], row["name"], dtype)
    return failures


def check(tessera, folder, case, strategy, dtype):
    command = [*case.command, "--strategy", strategy, "--timing"]
    if case.exact.ndim > 0:
        command += ["-o", folder / "result.npy"]
    # A strategy may refuse operands: some accept only a few rows, and one refuses products.
    answer = tessera(*command, may_refuse=True)
    if answer is None:
        print(f"{case.title:<26}{strategy:<25}{dtype:<5}{'refused':>10}")
        return True
    if case.exact.ndim > 0:
        value = np.load(folder / "result.npy").astype(np.longdouble)
    else:
        value = np.longdouble(answer.get("index", answer["value"]))
    stats = answer["stats"]
    error = np.abs(value - case.exact)
    bound = np.broadcast_to(case.bound(stats["roundoff"], ROUNDOFF[dtype]), error.shape)
    good = bool(np.all(error <= bound))
    # The element that is shown is the one whose error comes nearest to its bound.
    worst = np.argmax(error / np.where(bound > 0, bound, 1)) if good else np.argmax(error - bound)
    print(f"{case.title:<26}{strategy:<25}{dtype:<5}{human_us(stats['kernel_us']):>10}"
          f"{human_us(stats['wall_us']):>10}{float(error.flat[worst]):>11.1e}"
          f"{float(bound.flat[worst]):>11.1e}{'' if good else '  TOO LARGE'}")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cli", required=True, help="path of the tessera command")
    parser.add_argument("--server", default="127.0.0.1:50051")
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path(__file__).parent,
                        help="folder of digits.npy and labels.npy")
    for flag, what in CREDENTIALS.items():
        parser.add_argument(f"--{flag}", metavar="FILE", help=f"{what}; as for the tessera command")
    options = parser.parse_args()
    given = {flag: getattr(options, flag.replace("-", "_")) for flag in CREDENTIALS}
    flags = [word for flag, file in given.items() if file for word in (f"--{flag}", file)]

    images = np.load(options.data / "digits.npy")
    labels = np.load(options.data / "labels.npy")
    train, test = images[:TRAINING_IMAGES], images[TRAINING_IMAGES:]
    train_labels, test_labels = labels[:TRAINING_IMAGES], labels[TRAINING_IMAGES:]
    tessera = Tessera(options.cli, options.server, *flags)

    info = tessera("info")
    device = info["devices"][0]
    print(f"Tessera {info['version']} at {options.server}: {device['name']}, {device['model']}")
    if all(d["backend"] == "cpu" for d in info["devices"]):
        print("This server has no GPU: everything below runs on its CPU device.")

    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        print("\nNearest neighbours of handwritten digits, with the training images resident\n")
        resident = tessera.put(folder, "digits/train", train)
        tessera.put(folder, "digits/test", -2 * test)
        nearest = classify(tessera)
        accuracy = np.mean(train_labels[nearest] == test_labels)

        x, y = train.astype(np.float64), test.astype(np.float64)
        reference = np.argmin(np.sum(x * x, axis=1) - 2 * y @ x.T, axis=1)
        numpy_accuracy = np.mean(train_labels[reference] == test_labels)
        print(f"\n{len(test)} test images, {len(train)} training images of "
              f"{train.shape[1]} pixels\n"
              f"  accuracy on {resident['device']:<8} {accuracy:.6f}\n"
              f"  accuracy in NumPy    {numpy_accuracy:.6f}   (float64)")

        print(f"\n{human_bytes(tessera.travelled)} were sent, and operations on the server "
              f"computed on {human_bytes(tessera.computed_on)}.")

        print("\nEvery operation with every strategy of the device, on standardised images\n")
        failures = check_operations(tessera, folder, images.astype(np.float64), device["backend"])

    print(f"\nWith these checks, {human_bytes(tessera.travelled)} were sent in {tessera.calls} "
          f"commands, and operations computed on {human_bytes(tessera.computed_on)}.")
    if accuracy != numpy_accuracy:
        sys.exit("FAILED: the accuracy differs from NumPy's")
    if failures:
        sys.exit(f"FAILED: {failures} results exceed the error bound of their strategy")
    print("PASSED: the same accuracy as NumPy, and every error within its strategy's bound.")


if __name__ == "__main__":
    main()
