"""Tables of docs/results.md and docs/reproduce.md: the papers' figures and where they stand. Imports no jax.

Read from benchmarks/results/reproduce.json, which `python -m benchmarks.papers.reproduce status --out` wrote. No word
here says that a figure is reproduced: a statement of a paper is true of what was measured, or it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from benchmarks.markdown import head, line, short_commit
from benchmarks.papers.pages import COLUMNS, claim_cells

STANDS = (
    "| figure | the paper shows | size | state | statements true here | one with the paper's number | the paper | here "
    "| here / the paper |\n|---|---|---|---|---|---|---|---|---|"
)
CLAIMS = head(*COLUMNS)
MEASURED = "measured"


def stand_tables(status: dict[str, Any]) -> str:
    """Return a line for every figure and size."""
    rows = []
    for entry, size, form in _forms(status):
        claims = form.get("claims", [])
        known = [claim for claim in claims if claim["holds"] is not None]
        held = f"{sum(claim['holds'] for claim in known)} of {len(known)}" if known else "-"
        first = next((claim for claim in claims if claim["paper"] is not None), None)
        cells = ("-",) * 4 if first is None else itemgetter(0, 2, 3, 5)(claim_cells(first))
        state = form["state"] if "needs" not in form else f"{form['state']}: needs {form['needs']}"
        rows.append(line(_title(entry), entry["shows"], size, state, held, *cells))
    return "\n".join([STANDS, *rows])


def claim_tables(status: dict[str, Any]) -> str:
    """Return every figure: what is measured, the commands, and the statements of what was run."""
    parts = []
    for entry in status["entries"]:
        forms = entry["forms"]
        parts += [f"### `{entry['name']}`: {_title(entry)}", f"{entry['shows']} Here: {entry['here']}"]
        waiting = {size: form["needs"] for size, form in forms.items() if "needs" in form}
        for needs in dict.fromkeys(waiting.values()):
            sizes = ", ".join(size for size, what in waiting.items() if what == needs)
            parts.append(f"Not there yet ({sizes}): needs {needs}.")
        for size, form in forms.items():
            if "commands" in form:
                parts += list(_form(size, form))
    return "\n\n".join(parts)


def _form(size: str, form: dict[str, Any]) -> Iterator[str]:
    yield f"**{size}**, about {form['minutes']:g} min; workload: {form['workload']}. {form['differs']}".rstrip()
    yield "\n".join(["```", *form["commands"], "```"])
    run = form.get("run")
    if run is None:
        return
    yield "\n".join([CLAIMS, *(line(*claim_cells(claim)) for claim in form["claims"])])
    about = run["about"]
    where = [about[name] for name in ("device", "target", "machine") if name in about]
    where = [each for each in where if not each.endswith(", simulated")]  # a simulated row's machine is its device
    data = f"data: {run['data']}; " if run["data"] else ""
    commit = f" Commit {short_commit(about['commit'])}." if "commit" in about else ""
    yield f"{data}{'; '.join([*where, run['measured_at'][:10]])}.{commit}"


def _forms(status: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Yield what was measured, size by size. Of a figure without any: sizes of the same state together, as `cpu,
    gpu`."""
    for entry in status["entries"]:
        forms = entry["forms"]
        measured = {size: form for size, form in forms.items() if form["state"] == MEASURED}
        if measured:
            yield from ((entry, size, form) for size, form in measured.items())
            continue
        alike: dict[tuple[str, str | None], list[str]] = {}
        for size, form in forms.items():
            alike.setdefault((form["state"], form.get("needs")), []).append(size)
        yield from ((entry, ", ".join(sizes), forms[sizes[0]]) for sizes in alike.values())


def _title(entry: dict[str, Any]) -> str:
    return f"{entry['paper']}, {entry['item']}"
