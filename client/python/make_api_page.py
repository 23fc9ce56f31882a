#!/usr/bin/env python3
"""Generates docs/python_api.md from the sources of the package: the public names with their
signatures and docstrings.

usage: make_api_page.py [--check]

--check writes nothing and exits 1 if the page is out of date. The sources are parsed, not imported,
so the page is the same under every version of Python.
"""

import argparse
import ast
import pathlib
import re
import sys
import textwrap

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE / "tessera"
PAGE = HERE.parents[1] / "docs" / "python_api.md"
HEAD = """# The Python client: reference

Made by `client/python/make_api_page.py` from the docstrings; the [tutorial](python.md) comes first.
In [`ts.aio`](#asyncio) the classes have the same methods with the same errors, and those that talk
to the server are awaited.
"""
# Each section has a title, and the file and name of each of its entries.
SECTIONS = (
    ("Connections", (("_client", "connect"), ("_client", "Client"), ("_client", "Scope"),
                     ("_ring", "Ring"))),
    ("Arrays and expressions", (("arrays/_lazy", "Lazy"), ("_client", "Expr"),
                                ("_client", "Array"))),
    ("asyncio", (("aio", "connect"), ("aio", "Client"), ("aio", "Scope"), ("aio", "Expr"),
                 ("aio", "Array"))),
    ("Costs", (("graph/_plan", "Stats"),)),
    ("Dask", (("dask/_servers", "Servers"), ("dask/_servers", "use"), ("dask/_arrays", "put"),
              ("dask/_arrays", "numpy"), ("dask/_arrays", "from_buffers"))),
)
# The prefix of the names of a module's functions if it is not "ts.".
SPACES = {"dask/_servers": "tessera.dask.", "dask/_arrays": "tessera.dask.",
          "aio": "ts.aio."}
# Classes that readers know by another name than the one in the sources.
SHOWN = {"Lazy": "Array and Expr"}


def exported(module):
    """Returns the names that __init__.py imports from a module, in its order."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == module.replace("/", "."):
            return [alias.name for alias in node.names]
    return []


def definitions(module):
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    kinds = ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


def signature(function, name):
    arguments = function.args
    positional = arguments.posonlyargs + arguments.args
    if positional and positional[0].arg == "self":
        arguments.args = arguments.args[1:]
        positional = positional[1:]
    for one in [*positional, *arguments.kwonlyargs]:
        # Any says nothing, and neither does the type of self.
        if one.annotation is not None and ast.unparse(one.annotation) == "Any":
            one.annotation = None
    result = function.returns and ast.unparse(function.returns).strip("'\"")
    awaited = re.fullmatch(r"Coroutine\[Any, Any, (.*)\]", result or "")
    result = awaited.group(1) if awaited else result
    if awaited or isinstance(function, ast.AsyncFunctionDef):
        name = f"await {name}"
    arrow = "" if result in (None, "Any", "Self", "None") else f" -> {result}"
    arrow = arrow.replace("npt.NDArray[Any]", "numpy.ndarray")
    return f"{name}({ast.unparse(arguments)}){arrow}"


def docstring(node, where):
    text = ast.get_docstring(node)
    if not text:
        raise SystemExit(f"make_api_page.py: {where} has no docstring")
    return text


def members(node):
    for member in node.body:
        if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not member.name.startswith("_") or member.name in ("__getitem__", "__contains__"):
                yield member


def entry(title, text):
    head = [f"`{title}`"]
    if len(head[0]) > 100:
        words = title.replace(" ", "\0").replace(",\0", ", ")  # lines end between arguments
        lines = textwrap.wrap(words, 100, subsequent_indent="    ", break_on_hyphens=False)
        head = ["```python", *(line.replace("\0", " ") for line in lines), "```"]
    return [*head, "", *("> " + line if line else ">" for line in text.splitlines()), ""]


def function_lines(module, name):
    node = definitions(module)[name]
    package = SPACES.get(module, "ts.")
    return entry(signature(node, package + name), docstring(node, name))


def class_lines(module, name):
    node = definitions(module)[name]
    shown = f"aio.{name}" if module == "aio" else SHOWN.get(name, name)
    lines = [f"### {shown}", "", *docstring(node, name).splitlines(), ""]
    for member in members(node):
        title = signature(member, member.name)
        if any(ast.unparse(one) == "property" for one in member.decorator_list):
            title = "." + member.name
        lines += entry(title, docstring(member, f"{name}.{member.name}"))
    return lines


def error_lines():
    """Returns a table of the errors with their names, other base classes and reasons."""
    lines = ["## Errors", ""]
    classes = definitions("wire/_errors")
    lines += [*docstring(classes["Error"], "Error").splitlines(), ""]
    lines += ["| class | is also | reason |", "|---|---|---|"]
    for name, node in classes.items():
        if not isinstance(node, ast.ClassDef) or name == "Error":
            continue
        bases = [ast.unparse(base) for base in node.bases if ast.unparse(base) != "Error"]
        reason = re.search(r"reason = '(\w+)'", ast.unparse(node))
        what = f"`{reason.group(1)}`" if reason else docstring(node, name)
        lines.append(f"| `{name}` | {' '.join(f'`{base}`' for base in bases)} | {what} |")
    return [*lines, ""]


def page():
    lines = [HEAD]
    for title, names in SECTIONS:
        lines += [f"## {title}", ""]
        for module, name in names:
            kind = definitions(module)[name]
            make = class_lines if isinstance(kind, ast.ClassDef) else function_lines
            lines += make(module, name)
    lines += ["## Functions", ""]
    for name in exported("arrays/_functions"):
        lines += function_lines("arrays/_functions", name)
    return "\n".join([*lines, *error_lines()]).rstrip() + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE} is not what {pathlib.Path(__file__).name} makes: run it")


if __name__ == "__main__":
    main()
