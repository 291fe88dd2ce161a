"""Checks of a list of page moves, on the host. NumPy only, since the scheduler's side imports it."""

from __future__ import annotations

import numpy as np


def check_moves(
    from_pages: np.ndarray, to_pages: np.ndarray, *, target_pages: int, source_pages: int | None = None
) -> None:
    """Raise ValueError, naming the clash, unless the moves give the same result in any order.

    from_pages, to_pages: i32[N]; entries with to_pages outside [0, target_pages) are padding and may hold anything.
    target_pages: P of the pool written; source_pages: P of the pool read, None: the same pool, in which no page may
    be both read and written.
    """
    if from_pages.ndim != 1 or from_pages.shape != to_pages.shape:
        raise ValueError(
            f"from_pages and to_pages must be one list each, as long: {from_pages.shape}, {to_pages.shape}"
        )
    live = (to_pages >= 0) & (to_pages < target_pages)
    read, written = from_pages[live], to_pages[live]
    readable = target_pages if source_pages is None else source_pages
    outside = read[(read < 0) | (read >= readable)]
    if len(outside):
        raise ValueError(f"moves read pages that the source does not have: {_some(outside)}; it has {readable} pages")
    pages, times = np.unique(written, return_counts=True)
    if (times > 1).any():
        raise ValueError(f"moves write pages more than once: {_some(pages[times > 1])}")
    if source_pages is None and len(both := np.intersect1d(read, written)):
        raise ValueError(f"moves inside one pool both read and write pages: {_some(both)}; move them by way of others")


def _some(pages: np.ndarray, most: int = 8) -> str:
    """List the first few pages, for a message."""
    return ", ".join(map(str, pages[:most].tolist())) + (", ..." if len(pages) > most else "")
