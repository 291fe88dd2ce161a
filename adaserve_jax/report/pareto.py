"""What one user gets against what the machine gives: tokens per second of one request, and of all together."""

from __future__ import annotations

from collections.abc import Sequence

from adaserve_jax.report.document import Figure, Panel, Section, Series, Text
from adaserve_jax.report.measures import THROUGHPUT, TPOT_P50
from adaserve_jax.report.points import Group
from adaserve_jax.report.view import View
from adaserve_jax.report.words import listed


def pareto(view: View) -> Section | None:
    """None: no group has both figures."""
    axes = view.measured.varied
    known = [(group, at) for group in view.measured.groups.values() if (at := _place(view, group)) is not None]
    if not known:
        return None
    series = []
    for who in view.measured.whos:
        own = sorted(((g, at) for g, at in known if g.who == who), key=lambda each: each[0].setting.order)
        if own:
            x, y = zip(*(at for _, at in own), strict=True)
            labels = tuple(group.setting.describe(axes) for group, _ in own)
            series.append(Series(who, x, y, labels=labels, colour=view.colour(who)))
    front = [f"{group.who} {group.setting.describe(axes)}".strip() for group, _ in undominated(known)]
    figure = Figure(
        key="pareto",
        title="Tokens per second and user against tokens per second",
        caption=view.caption("Each mark is one setting. A user's rate is 1 / median TPOT over all requests."),
        kind="scatter",
        x_label="all output tokens per second",
        panels=(Panel("", tuple(series), "tokens per second and user"),),
    )
    text = f"No other setting gives both more to each user and more in all than {listed(front)}."
    return Section("pareto", "Users and machine", (figure, Text(text)))


def undominated(
    placed: Sequence[tuple[Group, tuple[float, float]]],
) -> list[tuple[Group, tuple[float, float]]]:
    """Those to which no other is equal or better in both and better in one, from least to most throughput."""
    front = [
        (group, at)
        for group, at in placed
        if not any(other[0] >= at[0] and other[1] >= at[1] and other != at for _, other in placed)
    ]
    return sorted(front, key=lambda each: each[1])


def _place(view: View, group: Group) -> tuple[float, float] | None:
    throughput, tpot_s = (view.estimates.value(group, measure) for measure in (THROUGHPUT, TPOT_P50))
    return (throughput, 1 / tpot_s) if throughput and tpot_s else None
