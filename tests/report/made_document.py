"""A made document that uses every kind of text, table and figure, with names that would be markup anywhere else."""

from __future__ import annotations

import math

from adaserve_jax.report.document import Document, Figure, Panel, Section, Series, Table, Text

HOSTILE = '<script>alert("x")</script>&amp; $x_1$ {}'
POLICIES = ("ar", "spec:4", "nightjar", "adaserve")
RATES = (0.5, 1.0, 2.0, 4.0, 8.0)
COLUMNS = (
    "policy", "rate, 1/s", "attainment", "TPOT only", "goodput, tokens/s", "throughput, tokens/s", "TPOT p50, ms",
    "TPOT p99, ms", "TTFT p99, ms", "accepted",
)  # fmt: skip
CAPTION = "workload packaged (a1b2c3d4), machine 2 x cpu, target 110M, draft 3M, jax 0.10.2, commit 0123abc"


def attainment(policy: int, rate: float) -> float:
    return 1 / (1 + math.exp(1.3 * (math.log2(rate) - 0.8 * policy - 0.2)))


def line_series(policy: int, *, half: float = 0.04) -> Series:
    y = tuple(attainment(policy, rate) for rate in RATES)
    low, high = tuple(max(0.0, v - half) for v in y), tuple(min(1.0, v + half) for v in y)
    return Series(POLICIES[policy], RATES, y, low, high, colour=policy)


def lines(key: str = "attainment", panels: int = 3) -> Figure:
    names = ("all classes", "interactive", "chat")[:panels]
    four = tuple(line_series(i) for i in range(4))
    made = tuple(Panel(name, four, "requests that met all targets", (0.0, 1.0), True) for name in names)
    return Figure(key, "Attainment against rate", CAPTION, "line", "requests/s", made, log_x=True)


def distribution() -> Figure:
    def curve(policy: int) -> Series:
        n = 1500
        x = tuple(0.3 * (1 + policy / 4) * math.exp(1.2 * i / n + 0.3 * math.sin(i / 90)) for i in range(n))
        return Series(POLICIES[policy], tuple(sorted(x)), tuple((i + 1) / n for i in range(n)), colour=policy)

    panel = Panel("", tuple(curve(i) for i in range(4)), "share of requests", (0.0, 1.0), True)
    return Figure("cdf", "TPOT over target", CAPTION, "line", "TPOT / target", (panel,), marks=((1.0, "target"),))


def pareto() -> Figure:
    def points(policy: int) -> Series:
        x = tuple(60.0 * r / (1 + 0.03 * r) for r in RATES)
        y = tuple((30 + 12 * policy) / (1 + r / 6) for r in RATES)
        return Series(POLICIES[policy], x, y, labels=tuple(f"{r:g}/s" for r in RATES), colour=policy)

    panel = Panel("", tuple(points(i) for i in range(4)), "tokens/s of a user, 1 / median TPOT")
    return Figure("pareto", "Speed of a user against throughput", CAPTION, "scatter", "tokens/s", (panel,))


def bars() -> Figure:
    classes = ("interactive", "chat", "batch")
    made = []
    for i, policy in enumerate(POLICIES):
        y = tuple(1.5 + 0.5 * i + 0.2 * j if i else None for j in range(3))
        low, high = (tuple(v and v + d for v in y) for d in (-0.2, 0.2))
        made.append(Series(policy, classes, y, low, high, colour=i))
    panel = Panel("", tuple(made), "accepted tokens per verification")
    return Figure("accepted", "Accepted tokens per verification", CAPTION, "bars", "class", (panel,))


def stack() -> Figure:
    causes = (
        "rejected",
        "queueing",
        "prefill",
        "infeasible",
        "preemption",
        "low acceptance",
        "budget",
        "unfinished",
        "failed",
    )
    points = tuple(f"{policy} @ {rate:g}/s" for policy in POLICIES for rate in RATES)
    made = tuple(
        Series(cause, points, tuple(float((7 * i + 3 * j) % 11) for j in range(len(points))), colour=i)
        for i, cause in enumerate(causes)
    )
    return Figure("causes", "Targets missed, by cause", CAPTION, "stack", "point", (Panel("", made, "requests"),))


def steps() -> Figure:
    times = tuple(i / 10 for i in range(1200))

    def gauge(name: str, value, colour: int = 0) -> Series:
        return Series(
            name, times, tuple(None if 400 <= i < 480 else float(value(i)) for i in range(1200)), colour=colour
        )

    panels = (
        Panel(
            "Speculation",
            (gauge("depth", lambda i: i // 37 % 5), gauge("width", lambda i: 1 + i // 53 % 3, 1)),
            "tokens",
        ),
        Panel("Draft", (gauge("draft", lambda i: i // 300 % 2, 2),), "resident", (0.0, 1.0)),
        Panel(
            "Requests", (gauge("running", lambda i: i * 7 % 16), gauge("waiting", lambda i: i // 11 % 9, 3)), "requests"
        ),
    )
    return Figure(
        "timeline", "One run over time", CAPTION, "step", "s", panels, marks=((12.0, "draft away"), (14.0, "back"))
    )


def hostile() -> Figure:
    one = Series(HOSTILE, (1.0, 2.0), (1.0, 30.0), colour=11, labels=(HOSTILE, "\x00\ud800"))
    log = Panel("Two points", (one, Series(HOSTILE + "2", (1.0, 2.0), (0.01, None), colour=11)), HOSTILE)
    empty = Panel(HOSTILE, (Series("none", (1.0,), (None,)),), "tokens")
    return Figure(f"odd key {HOSTILE}", HOSTILE, HOSTILE, "line", HOSTILE, (log, empty), marks=((1.5, HOSTILE),))


def document() -> Document:
    rows = tuple(
        (
            policy,
            "2",
            f"{attainment(i, 2):.1%} (80.1 to 99.0)",
            "92.0%",
            f"{100 + 9 * i}.0",
            "120.5",
            "41.0",
            "88.2",
            "412.0",
            f"{1 + i / 2:.2f}",
        )
        for i, policy in enumerate(POLICIES)
    )
    head = Table(
        "headline-table",
        "Policies at 2 requests/s",
        "95 % intervals by bootstrap.",
        COLUMNS,
        rows,
        frozenset(range(1, 10)),
        frozenset({(3, 2), (3, 4)}),
    )
    odd = Table("headline-table", "Odd names", HOSTILE, ("class", HOSTILE), ((HOSTILE, "1|2"), ("`code`", "_x_ *y*")))
    return Document(
        f"Four policies on 110M {HOSTILE}",
        (("machine", "2 x cpu"), ("target", "grown 110M `demo`"), ("workload", HOSTILE), ("commit", "0123abc")),
        (
            Section("headline", "Headline", (Text("At 2 requests/s `adaserve` meets 94.1% of targets."), head)),
            Section("notices", "Notices", (Text(f"1 of 20 points is invalid: {HOSTILE}", warns=True), odd)),
            Section("curves", "Against rate", (lines(), lines("two", 2), distribution())),
            Section("detail", HOSTILE, (pareto(), bars(), stack(), hostile())),
            Section("time", "Over time", (Text("1. not a list"), steps())),
        ),
    )  # fmt: skip
