"""What StarSD's table 1 and figures 4 to 6 state, read from benchmarks/starsd. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, quantiles, stdev
from typing import Any

from adaserve_jax.report.document import Figure, Table
from benchmarks.papers.entry import Folders, Found
from benchmarks.papers.reading import figure, over, read_json, series
from benchmarks.papers.star_claims import FULL, MOST, ONE, PAPER
from benchmarks.starsd.paper import TARGET_ROUNDS_PER_S

Read = Callable[[Folders], Found]
ONE_BY_ONE, BATCHED = "one by one", "batched"
QUANTITIES = (
    ("throughput_tps", "throughput", "tokens/s", 1.0), ("per_target_tps", "of each target", "tokens/s", 1.0),
    ("wait_s", "wait in the queue", "ms", 1e3), ("idle_s", "idle between two drafts", "ms", 1e3),
    ("rounds_per_s", "rounds of the draft", "rounds/s", 1.0), ("load", "load of the draft", "share", 1.0),
)  # fmt: skip
HEAD = "EAGLE-3 head"
"""What an engine drafts with in place of the service, in `colocated` of table1.py."""
IDLE_S, WARM = 0.03, 8
"""The idle time of the paper's one target, and the most drafts that warm it up."""


def table1(step: str) -> Read:
    """The paper's table is of drafts one by one."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "table1.json")
        alone = _measured(result["rows"], batched=False)
        values = {
            "tokens: six over one": _ratio(alone, "throughput_tps", MOST, ONE),
            "tokens: three over colocated": over(
                _of(alone, "throughput_tps", FULL), result["colocated"]["throughput_tps"]
            ),
            "of a target: six over one": _ratio(alone, "per_target_tps", MOST, ONE),
            "load: six": _of(alone, "load", MOST),
            "idle: six": None if (idle_s := _of(alone, "idle_s", MOST)) is None else idle_s * 1e3,
        }
        return Found(values, (_quantities(result),), _about(result, _paced(result)))

    return read


def engines(step: str) -> Read:
    """Of the targets that are whole engines, one by one."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "table1.json")
        real = result["engines"]
        alone = _measured(real["rows"], batched=False)
        own = {name: fmean(each["throughput_tps"] for each in found) for name, found in real["colocated"].items()}
        values = {
            "tokens: two over one": _ratio(alone, "throughput_tps", 2, ONE),
            "tokens: head over service": over(own.get(HEAD), _of(alone, "throughput_tps", ONE)),
            "tokens: two over head": over(_of(alone, "throughput_tps", 2), own.get(HEAD)),
            "same texts": over(real["same_texts"], real["texts"]),
        }
        columns = ("targets", "drafts", *(f"{title}, {unit}" for _, title, unit, _ in QUANTITIES))
        rows = [
            (str(row["n"]), BATCHED if row["batched"] else ONE_BY_ONE,
             *(f"{row[name] * factor:.2f}" for name, _, _, factor in QUANTITIES))
            for row in real["rows"]
        ]  # fmt: skip
        shown = Table(
            "engines", "Targets that are whole engines",
            f"Target {real['target']}, {real['verify_s'] * 1e3:.1f} ms a verification; in the target's process "
            f"{', '.join(f'{name} {tps:.1f} tokens/s' for name, tps in own.items())}.",
            columns, tuple(rows), frozenset(range(2, len(columns))),
        )  # fmt: skip
        return Found(values, (shown,), _about(result, f"whole engines of {real['target']}"))

    return read


def rounds(step: str) -> Read:
    """R_p is the draft's rounds over the targets, which have one request each."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "table1.json")
        alone = _measured(result["rows"], batched=False)
        each = {n: row["rounds_per_s"] / n for n, row in alone.items()}
        values = {
            "draft: three over one": _ratio(alone, "rounds_per_s", FULL, ONE),
            "draft: six over four": _ratio(alone, "rounds_per_s", MOST, 4),
            "target: two over one": over(each.get(2), each.get(ONE)),
            "target: six over three": over(each.get(MOST), each.get(FULL)),
            "load: four": _of(alone, "load", 4),
        }
        paper_each = dict(enumerate(TARGET_ROUNDS_PER_S, 1))
        paper = {name: {n: row[name] for n, row in PAPER.items()} for name in ("rounds_per_s", "load")}
        curve = {n: row["rounds_per_s"] for n, row in alone.items()}
        load = {n: row["load"] for n, row in alone.items()}
        panels = [
            ("the draft", "rounds/s", series({"here": curve, "the paper": paper["rounds_per_s"]})),
            ("a target", "rounds/s", series({"here": each, "the paper": paper_each})),
            ("load", "share", series({"here": load, "the paper": paper["load"]})),
        ]
        shown = figure(
            "rounds", "Rounds and load by targets", _paced(result), "targets", panels, percent=["load"]
        )  # fmt: skip
        return Found(values, (shown,), _about(result, _paced(result)))

    return read


def apart(step: str) -> Read:
    """Window by window."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "apart.json")
        sides = {side: [each[side] for each in result["windows"]] for side in ("together", "apart")}
        mean = {
            (side, name): fmean(each[name] for each in found)
            for side, found in sides.items() for name in ("throughput_tps", "rounds_per_s")
        }  # fmt: skip
        values = {
            "tokens: apart over together": over(mean["apart", "throughput_tps"], mean["together", "throughput_tps"]),
            "rounds: apart over together": over(mean["apart", "rounds_per_s"], mean["together", "rounds_per_s"]),
            "fluctuation: rounds over tokens": over(
                _fluctuation(sides["apart"], "rounds_per_s"), _fluctuation(sides["apart"], "throughput_tps")
            ),
        }
        panels = [
            (title, unit, series({side: _course(found, name, 1.0) for side, found in sides.items()}))
            for name, title, unit in (
                ("throughput_tps", "throughput", "tokens/s"),
                ("rounds_per_s", "rounds", "rounds/s"),
            )
        ]
        parts = {"messages": "message_s", "wait in the queue": "wait_s", "the draft": "service_s"}
        of_round = series({part: _course(sides["apart"], name, 1e3) for part, name in parts.items()})
        panels.append(("a round apart, without verification", "ms", of_round))
        shown = figure("apart", "Together and apart", _paced(result), "window", panels)
        return Found(values, (shown,), _about(result, _paced(result)))

    return read


def idle(step: str) -> Read:
    """Medians and standard deviations over samples."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "idle.json")
        times = {(row["idle_s"], row["warm"]): row["token_s"] for row in result["rows"]}
        steady, cold, warm = times[0.0, 0], times[IDLE_S, 0], times[IDLE_S, WARM]
        values = {
            "token: idle over steady": over(median(cold), median(steady)),
            "deviation: idle over steady": over(_deviation(cold), _deviation(steady)),
            "token: warm over cold": over(median(warm), median(cold)),
        }
        by_idle = {idle_s * 1e3: seconds for (idle_s, warm), seconds in times.items() if not warm}
        by_warm = {warm: seconds for (idle_s, warm), seconds in times.items() if idle_s == IDLE_S}
        shown = tuple(
            figure(key, title, f"Chains of {result['depth']} tokens of {result['draft']}.", x_label, [
                ("time of a token", "ms", series(_quartiles(found))),
            ])
            for key, title, x_label, found in (
                ("idle", "By idle time", "idle before, ms", by_idle),
                ("warm", f"Warmed up after {IDLE_S * 1e3:g} ms idle", "chains drafted before", by_warm),
            )
        )  # fmt: skip
        about = {name: result[name] for name in ("commit", "machine", "device")}
        return Found(values, shown, about | {"draft": f"{result['draft']}, chains of {result['depth']}"})

    return read


def _quartiles(found: Mapping[float, Sequence[float]]) -> dict[str, dict[float, float]]:
    """Milliseconds by x."""
    cut = {x: quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3 for x, seconds in found.items()}
    return {name: {x: at[index] * 1e3 for x, at in cut.items()} for index, name in enumerate(
        ("lower quartile", "median", "upper quartile"))}  # fmt: skip


def _deviation(seconds: Sequence[float]) -> float | None:
    return stdev(seconds) if len(seconds) > 1 else None


def _fluctuation(windows: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Standard deviation over mean."""
    found = [each[name] for each in windows]
    return None if len(found) < 2 else stdev(found) / fmean(found)


def _course(windows: Sequence[Mapping[str, float]], name: str, factor: float) -> dict[float, float]:
    return {float(number): each[name] * factor for number, each in enumerate(windows, 1)}


def _measured(rows: Sequence[dict[str, Any]], *, batched: bool) -> dict[int, dict[str, Any]]:
    """By number of targets."""
    return {row["n"]: row for row in rows if (row["kind"], row["batched"]) == ("measured", batched)}


def _of(rows: Mapping[int, dict[str, Any]], name: str, n: int) -> float | None:
    return rows[n][name] if n in rows else None


def _ratio(rows: Mapping[int, dict[str, Any]], name: str, n: int, of: int) -> float | None:
    return over(_of(rows, name, n), _of(rows, name, of))


def _quantities(result: dict[str, Any]) -> Figure:
    """Every row of the table beside the paper's."""
    found = {BATCHED: _measured(result["rows"], batched=True), ONE_BY_ONE: _measured(result["rows"], batched=False),
             "the paper": PAPER}  # fmt: skip
    panels = [
        (title, unit, series({who: {n: row[name] * factor for n, row in rows.items()} for who, rows in found.items()}))
        for name, title, unit, factor in QUANTITIES
    ]
    return figure("table-1", "By targets", _paced(result), "targets", panels, percent=["load of the draft"])


def _paced(result: dict[str, Any]) -> str:
    shape = result["shape"]
    return (
        f"chains of {shape['depth']} of {result['draft']}, verifications of {shape['verify_s'] * 1e3:g} ms that are "
        f"slept, texts of {result['target']}"
    )


def _about(result: dict[str, Any], what: str) -> dict[str, str]:
    return {"commit": result["commit"], "machine": result["machine"], "device": "CPU", "targets": what}
