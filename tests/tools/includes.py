#!/usr/bin/env python3
"""Checks that each folder includes only what includes.txt, in this folder, allows, and that the
Python package imports only what it allows. ./dev lint runs it."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOPS = ("client/", "kernels/", "server/")
CODE = (".h", ".cc", ".cu", ".cuh")
INCLUDE = re.compile(r'^#include "((?:client|kernels|server)/[^"]+)"', re.M)
IMPORT = re.compile(r"^\s*from \.(\.*)([\w.]*) import", re.M)


def read_table(text):
    """Returns {row: the rows that it may include}. A row names only rows above it, so there are no
    cycles."""
    rows = {}
    for line in re.sub(r"\n +", " ", text).splitlines():
        names, _, allowed = line.partition("#")[0].partition(":")
        for row in names.split():
            top = row.split("/")[0] + "/"
            others = [n if n.startswith(TOPS) else top + n for n in allowed.split()]
            if row in rows or not rows.keys() >= set(others):
                sys.exit(f"includes.txt: {row} occurs twice, or names a row that is not above it")
            rows[row] = {row, *others}
    return rows


def row_of(name, rows):
    """Returns a file's row, which is the file's own row, the row for such files in its folder, or
    the row of its folder or of the folder's siblings."""
    folder, path = name.rpartition("/")[0], pathlib.PurePath(name)
    own = (str(path.with_suffix("")), f"{folder}/*{path.suffix}", folder, f"{path.parent.parent}/*")
    return next((row for row in own if row in rows), None)


def targets(path):
    """Returns the files of the project that a file includes or imports."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return INCLUDE.findall(text)
    places = [path.parents[len(up)] / name.replace(".", "/") for up, name in IMPORT.findall(text)]
    return [str((one / "_" if one.is_dir() else one).relative_to(ROOT)) for one in places]


def main():
    rows = read_table(pathlib.Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))
    files = [path for top in TOPS for path in (ROOT / top).rglob("*.*") if path.suffix in CODE]
    wrong = []
    for path in sorted(files) + sorted((ROOT / "client/python/tessera").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        row = row_of(name, rows)
        if row is None:
            wrong.append(f"{name}: includes.txt has no row for its folder")
        bad = [one for one in targets(path) if row_of(one, rows) not in rows.get(row, rows)]
        wrong += [f"{name} includes {target}, which {row} may not" for target in bad]
    sys.exit("\n".join(wrong) or None)


main()
