"""Where the time of a step goes: planning, drafting, selecting, verifying and committing, from samples."""

from __future__ import annotations

from dataclasses import dataclass

from adaserve_jax.report.document import Figure, Panel, Section, Series, Table, Text
from adaserve_jax.report.points import Group
from adaserve_jax.report.view import MOST_PANELS, View, spread
from adaserve_jax.report.words import listed, ms, percent

TITLE = "Where the time goes"
NO_SAMPLES = "No point has samples: what was measured through a URL has none, nor have runs from before they existed."
PHASES = ("plan_s", "draft_s", "select_s", "verify_s", "commit_s")


@dataclass(frozen=True)
class Steps:
    """What the last samples of all repeats counted. seconds: by phase; of_s: that they cover; wait_s: waiting for the
    device, inside of drafting and verifying."""

    steps: int
    spec_steps: int
    preemptions: int
    swaps: int
    seconds: tuple[float, ...]
    wait_s: float
    of_s: float

    @classmethod
    def of(cls, group: Group) -> Steps | None:
        """None: a point has no samples, or no step was taken."""
        if not all(point.samples for point in group.points):
            return None
        last = [max(point.samples, key=lambda s: s.t_s) for point in group.points]
        if not any(sample.steps for sample in last):
            return None
        return cls(
            steps=sum(s.steps for s in last),
            spec_steps=sum(s.spec_steps for s in last),
            preemptions=sum(s.preemptions for s in last),
            swaps=sum(s.swaps for s in last),
            seconds=tuple(sum(getattr(s, phase) for s in last) for phase in PHASES),
            wait_s=sum(s.wait_s for s in last),
            of_s=sum(s.t_s for s in last),
        )


def phases(view: View) -> Section:
    known = {group: steps for group in view.measured.groups.values() if (steps := Steps.of(group)) is not None}
    if not known:
        return Section("phases", TITLE, (Text(NO_SAMPLES),))
    panels = []
    for setting in spread(view.line, MOST_PANELS):
        groups = [group for group in view.measured.at(setting) if group in known]
        if groups:
            series = tuple(
                Series(
                    phase.removesuffix("_s"),
                    tuple(group.who for group in groups),
                    tuple(known[group].seconds[i] / known[group].steps * 1e3 for group in groups),
                    colour=i,
                )
                for i, phase in enumerate(PHASES)
            )
            panels.append(Panel(setting.describe(view.measured.varied), series, "ms per step"))
    items: list[Figure | Table | Text] = []
    if panels:
        text = "Mean milliseconds of a step by phase; drafting is spread over all steps, also those without a draft."
        items.append(Figure("phases", "Time per phase", view.caption(text), "stack", "policy", tuple(panels)))
    items.append(_table(view, known))
    absent = dict.fromkeys(group.who for group in view.measured.groups.values() if group not in known)
    if absent:
        items.append(Text(f"Without samples, and so without phases, at some setting or all: {listed(list(absent))}."))
    return Section("phases", TITLE, tuple(items))


def _table(view: View, known: dict[Group, Steps]) -> Table:
    rows = []
    for group, first in view.along_line():
        if group in known:
            steps = known[group]
            busy_s = sum(steps.seconds)
            cells = (
                f"{steps.steps:,}", percent(steps.spec_steps / steps.steps), ms(busy_s / steps.steps),
                percent(steps.wait_s / busy_s if busy_s else None),
                percent(busy_s / steps.of_s if steps.of_s else None), f"{steps.preemptions:,}", f"{steps.swaps:,}",
            )  # fmt: skip
            rows.append((*first, *cells))
    columns = (
        *view.line_titles, "steps", "that drafted", "ms per step", "waiting for the device",
        "of the time in steps", "preemptions", "swaps of the draft",
    )  # fmt: skip
    numeric = frozenset(range(len(view.line_titles), len(columns)))
    caption = "From the last sample of each point, warm-up not counted."
    return Table("steps", "Steps", view.caption(caption), columns, tuple(rows), numeric)
