#!/usr/bin/env python3
"""Runs the examples against a server and generates docs/examples/NAME.md for each: its text, its
code, what each cell printed, and its plot (matplotlib).

usage: render_examples.py ADDRESS --caption "MACHINE, DATE" [NAME...]
       render_examples.py --check

--check runs nothing and exits 1 if the text or the code of a page differs from its example.
"""

import argparse
import contextlib
import io
import pathlib
import re
import subprocess
import sys
import textwrap

HERE = pathlib.Path(__file__).resolve().parent
PAGES = HERE.parents[1] / "docs" / "examples"
EXAMPLES = sorted((HERE / "examples").glob("*.py"))


def cells(example):
    """Yields the (kind, text) of each cell of an example: first the docstring, as "markdown", and
    then the cells, each "markdown" or "python"."""
    docstring, *rest = re.split(r"^# %%", example.read_text(encoding="utf-8"), flags=re.M)
    yield "markdown", docstring.strip().strip('"').strip()
    for part in rest:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            yield "markdown", re.sub(r"^# ?", "", body, flags=re.M).strip()
        else:
            yield "python", body.strip("\n")


def page(example, outputs, caption):
    """Returns the page of an example. outputs: the output of each code cell, in order, or nothing
    for the page that --check compares."""
    title, _, rest = next(cells(example))[1].partition("\n\n")
    title = " ".join(title.split())
    lines = [f"# {title.split(':')[0]}", "", textwrap.fill(title, 100), "",
             "```", rest.strip(), "```", ""]
    outputs = iter(outputs)
    for kind, text in list(cells(example))[1:]:
        if kind == "markdown":
            lines += [text, ""]
            continue
        if "options.plot" not in text:
            lines += ["```python", text, "```", ""]
        output = next(outputs, "").rstrip()
        if output:
            lines += ["```text", output, "```", ""]
    lines += [f"![]({example.stem}.svg)", ""]
    if caption:
        lines += [f"*{caption}*", ""]
    name = example.name
    lines.append(f"The example: [{name}](../../client/python/examples/{name}).")
    return "\n".join(lines) + "\n"


def without_outputs(text):
    text = re.sub(r"^```text\n.*?\n```\n\n", "", text, flags=re.M | re.S)
    return re.sub(r"^\*.*\*\n\n", "", text, flags=re.M)


def run(example, arguments):
    """Yields what each code cell printed."""
    space = {"__name__": "__main__", "__file__": str(example)}
    sys.argv = [str(example), *arguments]
    for kind, text in list(cells(example))[1:]:
        if kind != "python":
            continue
        printed = io.StringIO()
        code = compile(text, str(example), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, space)  # pylint: disable=exec-used
        yield printed.getvalue()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("address", nargs="?")
    parser.add_argument("names", nargs="*", help="names of examples; default: all")
    parser.add_argument("--caption", default="")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--arguments", default="", help="further arguments for the examples")
    options = parser.parse_args()
    if options.check:
        stale = [
            example.stem
            for example in EXAMPLES
            if not (PAGES / f"{example.stem}.md").exists()
            or without_outputs((PAGES / f"{example.stem}.md").read_text(encoding="utf-8"))
            != page(example, (), "")
        ]
        sys.exit(f"these pages are out of date: {' '.join(stale)}" if stale else 0)
    if not options.address:
        parser.error("the argument ADDRESS is missing")
    names = options.names or [example.stem for example in EXAMPLES]
    if len(names) > 1:
        # Each example gets its own process, because some print their memory use.
        for name in names:
            more = ["--caption", options.caption, f"--arguments={options.arguments}"]
            subprocess.run([sys.executable, __file__, options.address, name, *more], check=True)
        return
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tessera"})
    sys.path.insert(0, str(HERE))
    PAGES.mkdir(exist_ok=True)
    for example in EXAMPLES:
        if example.stem not in names:
            continue
        plot = PAGES / f"{example.stem}.svg"
        arguments = [options.address, "--plot", str(plot), *options.arguments.split()]
        outputs = list(run(example, arguments))
        (PAGES / f"{example.stem}.md").write_text(
            page(example, outputs, options.caption), encoding="utf-8"
        )
        print(example.stem)


if __name__ == "__main__":
    main()
