"""How much speculation earned: accepted tokens per verification, and the drafts they are of."""

from __future__ import annotations

from adaserve_jax.report.curves import by_class, figures
from adaserve_jax.report.document import Section, Table
from adaserve_jax.report.measures import MEAN_ACCEPTED
from adaserve_jax.report.points import Group
from adaserve_jax.report.view import View
from adaserve_jax.report.words import cell, percent


def acceptance(view: View) -> Section | None:
    """None: nobody drafted."""
    if not any(_sums(group)[1] for group in view.measured.groups.values()):
        return None
    bars = by_class(view, MEAN_ACCEPTED)
    lines = [figure for figure in figures(view, (MEAN_ACCEPTED,)) if figure.key != bars.key]
    return Section("acceptance", "Accepted tokens", (bars, *lines, _table(view)))


def _table(view: View) -> Table:
    rows = []
    for group, first in view.along_line():
        steps, drafted, accepted = _sums(group)
        if drafted:
            rate = percent(accepted / drafted)
            counts = (f"{steps:,}", f"{drafted:,}", f"{accepted:,}", rate)
            rows.append((*first, *counts, cell(MEAN_ACCEPTED, view.estimates.of(group, MEAN_ACCEPTED))))
    columns = (
        *view.line_titles, "verifications", "drafted", "accepted", "acceptance rate",
        MEAN_ACCEPTED.title,
    )  # fmt: skip
    numeric = frozenset(range(len(view.line_titles), len(columns)))
    caption = "Verifications are counted per request; drafted tokens are those that were verified."
    return Table("drafts", "Drafts and what became of them", view.caption(caption), columns, tuple(rows), numeric)


def _sums(group: Group) -> tuple[int, int, int]:
    """Verifications, drafted and accepted tokens of all repeats."""
    rows = [point.row for point in group.points]
    return (
        sum(row.verify_steps for row in rows), sum(row.drafted_tokens for row in rows),
        sum(row.accepted_tokens for row in rows),
    )  # fmt: skip
