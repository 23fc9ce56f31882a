#!/usr/bin/env python3
"""Writes manual pages from the help texts of programs: one for each program and subcommand.

usage: manual.py --out FOLDER PROGRAM:SECTION...

`tessera:1` becomes man1/tessera.1, man1/tessera-put.1 and so on. EXTRA below has the sections FILES
and SEE ALSO, which help texts lack.
"""

import argparse
import pathlib
import re
import subprocess

EXTRA = {
    "tessera": [("SEE ALSO", "tessera-server(8)")],
    "tessera-server": [
        ("FILES", "/etc/tessera/server.toml\n\nThe options of the service that systemd runs."),
        ("SEE ALSO", "tessera(1)"),
    ],
}


def escape(text):
    """Escapes text for roff: backslashes, hyphens, and characters that would begin a request at a
    line's start."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def help_of(command):
    # With a fixed width and no other variables, a page is the same wherever it is generated.
    result = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, check=True, env={"COLUMNS": "80"}
    )
    return result.stdout.rstrip().splitlines()


def parse_items(lines, column):
    """Returns [(term, description)] of a section. Descriptions begin at the column, after a long
    term on the next line."""
    items = []
    for line in lines:
        if line[:column].strip() and line[column - 1 : column] in (" ", ""):
            items.append((line[:column].strip(), line[column:].strip()))
        elif line[:column].strip():
            items.append((line.strip(), ""))
        else:
            items[-1] = (items[-1][0], f"{items[-1][1]} {line.strip()}".strip())
    return items


def parse(lines):
    """Returns (summary, usage, [(section, items)], footer) of a help text."""
    summary, usage, sections, footer = lines[0].strip(), "", [], []
    column = max(re.match("(  -h,--help +)?", line).end() for line in lines)
    for line in lines[1:]:
        if line.startswith("Usage: "):
            usage = line.removeprefix("Usage: ")
        elif line in ("Positionals:", "Options:", "Subcommands:") and not footer:
            sections.append((line.rstrip(":"), []))
        elif sections and line.startswith("  ") and not footer:
            sections[-1][1].append(line)
        elif line.strip() or footer:
            footer.append(line)
    return summary, usage, [(name, parse_items(body, column)) for name, body in sections], footer


def definitions(items):
    out = []
    for term, description in items:
        out += [".TP", f".B {escape(term)}", escape(description) or "\\&"]
    return out


def page(name, section, version, text, parent):
    summary, usage, sections, footer = parse(text)
    summary = summary.rstrip(".")
    out = [
        f'.TH {name.upper()} {section} "" "tessera {version}" "Tessera"',
        ".SH NAME",
        f"{escape(name)} \\- {escape(summary[0].lower() + summary[1:])}",
        ".SH SYNOPSIS",
        f".B {escape(usage)}",
    ]
    titles = {"Positionals": "ARGUMENTS", "Options": "OPTIONS", "Subcommands": "COMMANDS"}
    for title, items in sections:
        out.append(f".SH {titles[title]}")
        out += definitions(items)
    if footer:
        out += [".SH NOTES", ".nf", escape("\n".join(footer)).strip("\n"), ".fi"]
    for title, body in EXTRA.get(name, [("SEE ALSO", parent)] if parent else []):
        out.append(f".SH {title}")
        out += [".PP" if not line else escape(line) for line in body.split("\n")]
    return "\n".join(line for line in out if line) + "\n"


def write(folder, program, section, command, version, name, parent):
    text = help_of(command)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.{section}").write_text(page(name, section, version, text, parent))
    for title, items in parse(text)[2]:
        for subcommand, _ in items if title == "Subcommands" else []:
            write(folder, program, section, [*command, subcommand], version,
                  f"{name}-{subcommand}", f"{name}({section})")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("programs", nargs="+")
    options = parser.parse_args()
    for argument in options.programs:
        program, _, section = argument.rpartition(":")
        version = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
        write(options.out / f"man{section}", program, section, [program], version,
              pathlib.Path(program).name, None)


if __name__ == "__main__":
    main()
