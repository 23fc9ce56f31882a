"""Tables and plots of the results of client/python/peers.py, for docs/performance.md and
docs/measured."""

import json

import pages
from pages import MEASURED, markdown, time_text


class Peers:
    """The results in docs/measured/NAME.json. There are no rows if the file is missing."""

    def __init__(self, name):
        path = MEASURED / f"{name}.json"
        self.document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        self.rows = self.document["rows"] if self.document else []

    def unique(self, key):
        return list(dict.fromkeys(row[key] for row in self.rows))

    def us(self, expression, elements, server):
        for row in self.rows:
            found = row["expression"], row["elements"], row["server"]
            if found == (expression, elements, server):
                return row["us"]
        return None

    @property
    def caption(self):
        document, machine = self.document, self.document["machine"]
        parts = [machine["cpu"].replace("(R)", ""), *dict.fromkeys(machine["devices"])]
        parts += [document["peer"], f"grpcio {document['grpcio']}", document["date"]]
        return ", ".join(parts)


PLOTTED = ("dot", "gelu", "matmul")


def table(run, sizes):
    """Returns a table with a line for each expression and number of elements, and a column for
    each server."""
    servers = run.unique("server")
    lines = []
    for expression in run.unique("expression"):
        for elements in sizes:
            times = [run.us(expression, elements, server) for server in servers]
            cells = [time_text(us) if us else "-" for us in times]
            lines.append([f"`{expression}`", f"{elements}", *cells])
    note = f"us unless said otherwise. {run.caption}. Medians of {run.document['rounds']} rounds."
    return markdown(["expression", "elements", *servers], lines, note)


def full(name):
    """Returns a table of all sizes, followed by plots."""
    run = Peers(name)
    if not run.rows:
        return unmeasured(name)
    plots = [
        f"\n![Times of {expression} against elements]({name}_{expression}_us.svg)\n"
        for expression in PLOTTED
        if expression in run.unique("expression")
    ]
    return table(run, run.unique("elements")) + "".join(plots)


def brief(name):
    """Returns a table of only the largest arrays."""
    run = Peers(name)
    return table(run, [max(run.unique("elements"))]) if run.rows else unmeasured(name)


def unmeasured(name):
    return f"unmeasured: docs/measured/{name}.json is made by client/python/peers.py\n"


TABLES = {"full": full, "brief": brief}


def plot(name, expression):
    """Returns a plot of times against the number of elements, with a line for each server."""

    run = Peers(name)
    sizes = sorted(run.unique("elements"))
    lines = [
        pages.Line(server, [(n, us) for n in sizes if (us := run.us(expression, n, server))])
        for server in run.unique("server")
    ]
    return pages.plot(f"{expression}: us against elements", run.caption, lines, str)
