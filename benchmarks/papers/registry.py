"""Every figure and table of the papers, by name."""

from __future__ import annotations

from collections.abc import Sequence

from adaserve_jax.errors import ConfigError
from benchmarks.papers import adaserve, nightjar, online, star
from benchmarks.papers.entry import SIZES, Entry, Form, NotYet

ENTRIES: dict[str, Entry] = {
    entry.name: entry for module in (adaserve, nightjar, online, star) for entry in module.ENTRIES
}
PAPERS = {entry.paper.lower() for entry in ENTRIES.values()}


def find(names: Sequence[str]) -> list[Entry]:
    """Entries by name, or all of a paper by its name. Raises ConfigError that lists the names."""
    found: dict[str, Entry] = {}
    for name in names:
        mine = [entry for entry in ENTRIES.values() if name in (entry.name, entry.paper.lower())]
        if not mine:
            known = ", ".join([*sorted(PAPERS), *ENTRIES])
            raise ConfigError(f"no figure or table {name!r}; there are {known}")
        found |= {entry.name: entry for entry in mine}
    return list(found.values())


def form_of(entry: Entry, size: str) -> Form | NotYet:
    """Raises ConfigError: there is no such size of any figure."""
    if size not in SIZES:
        raise ConfigError(f"--size must be one of {', '.join(SIZES)}, got {size!r}")
    has = ", ".join(known for known in SIZES if isinstance(entry.forms.get(known), Form))
    return entry.forms.get(size) or NotYet(f"a form of this size; {entry.name} has {has or 'none'}")
