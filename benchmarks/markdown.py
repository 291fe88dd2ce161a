"""Markdown tables, and text between the markers of a page. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def line(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def head(*columns: str) -> str:
    """Return the first two lines of a table."""
    return f"{line(*columns)}\n|{'---|' * len(columns)}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a whole table."""
    return "\n".join(line(*cells) for cells in (columns, ["---"] * len(columns), *rows))


def between(page: str, name: str, content: str, where: str) -> str:
    """Return `page` with what stands between the markers of `name` replaced. Raises ValueError without both markers."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{where} must hold {begin} and {end}, in this order")
    return f"{before}{begin}{content}{end}{after}"


def short_commit(commit: str) -> str:
    """Return the first 12 digits of a commit, and "-dirty" where files differed from it."""
    digits, dirty, _ = commit.partition("-dirty")
    return digits[:12] + dirty
