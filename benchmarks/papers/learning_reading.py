"""What OSD's tables 1, 3 and 4 and figures 3 to 6 state, read from adaserve distill, benchmarks/osd/online_learning.py
and benchmarks/osd/latency.py. Runs nothing.

Acceptance is the mean over positions of the sum of min(p, q), on texts of the target that nobody was served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from adaserve_jax.report.document import Figure, Series
from benchmarks.osd.views import (
    OFFLINE,
    ONE,
    ONLINE,
    SHIPPED,
    START,
    TAG,
    TOPIC,
    Result,
    Run,
    curve,
    last,
    phases,
    runs_by_way,
)
from benchmarks.papers.entry import Claim, Folders, Found
from benchmarks.papers.reading import figure, largest, least, over, read_json, series

Read = Callable[[Folders], Found]
TEACHER, STUDENT, MIXED, REVERSE, JSD = "teacher", "student", "mixed", "reverse_kl", "jsd"
SAMPLINGS, LOSSES = (STUDENT, MIXED), (REVERSE, JSD)
"""Beside the target's own texts and the forward KL."""
CODE_START = 0.38
CODE = {TEACHER: 0.65, STUDENT: 0.51, MIXED: 0.61}
"""Acceptance of Vicuna-7B's draft on Code-search-Python: before, and by sampling."""
CODE_SPEEDUP = 1.69
"""On the same data: of the 1.1B draft for 33B."""
CODE_OVER_START = 1.64
"""Section 4.2.2: speed with the distilled 160M draft over that with the original one, on the same, by its formula."""
MEDUSA, MEDUSA_LEARNED, DRAFT_LEARNED = "Medusa", "Medusa, online", "draft, online"
MEDUSA_SPEEDUPS = {
    "code": {MEDUSA: 1.34, MEDUSA_LEARNED: 2.01, DRAFT_LEARNED: 2.17},
    "maths": {MEDUSA: 2.03, MEDUSA_LEARNED: 2.38, DRAFT_LEARNED: 1.51},
}
"""By traffic here: code is what the heads were not taught (there Spider), maths what they were (there Arena)."""
RESET, CUT = "the draft begins with a random top layer", "drafts begin with one layer of the embedded draft's"
GAINS = (0.1, 0.65)
ROUTED = (0.1, 0.2)
TOPICS = 0.6
"""Acceptance on every topic that figure 5 shows is above."""


def _printed(domain: str, way: str, of: str) -> float:
    """Return the ratio of two of the paper's speedups."""
    return MEDUSA_SPEEDUPS[domain][way] / MEDUSA_SPEEDUPS[domain][of]


OFFLINE_CLAIMS = (
    *(
        Claim(f"acceptance gained on code, {way} sampling", f"{way}: gain", "above", 0.0, CODE[way] - CODE_START,
              "share")
        for way in CODE
    ),
    Claim("teacher sampling's acceptance above the best other sampling's", "teacher above other samplings", "at least",
          0.0, CODE[TEACHER] - max(CODE[way] for way in SAMPLINGS), "share"),
    Claim("forward KL's acceptance above the best other distance's", "kl above other losses", "at least", 0.0, None,
          "share"),
)  # fmt: skip
SPEED_CLAIMS = (
    Claim("code: speedup with the draft distilled offline, its best chain", "offline: times plain", "above", 1.0,
          CODE_SPEEDUP),
    Claim("code: speedup with the draft that learned online, its best chain", "online: times plain", "above", 1.0),
    Claim("code: time per token with the first draft over that with the distilled one, the same chain (the paper: "
          "expected, by its formula)", "start over offline", "above", 1.0, CODE_OVER_START),
    Claim("code: time per token with the first draft over that with the online one, the same chain",
          "start over online", "above", 1.0),
)  # fmt: skip
MEDUSA_CLAIMS = (
    *(
        Claim(f"{domain}: speedup with {way}, its best chain", f"{domain}: {way}", "above", 1.0, times)
        for domain, ways in MEDUSA_SPEEDUPS.items()
        for way, times in ways.items()
    ),
    *(
        Claim(f"{domain}: the learned heads' speedup over the first heads'", f"{domain}: learned over first", "above",
              1.0, _printed(domain, MEDUSA_LEARNED, MEDUSA))
        for domain in MEDUSA_SPEEDUPS
    ),
    Claim("code, which the heads did not know: the learned draft's speedup over the learned heads'",
          "code: draft over learned heads", "above", 1.0, _printed("code", DRAFT_LEARNED, MEDUSA_LEARNED)),
    Claim("maths, which the heads knew: the learned draft's speedup over the first heads'",
          "maths: draft over first heads", "at most", 1.0, _printed("maths", DRAFT_LEARNED, MEDUSA)),
)  # fmt: skip
NARROW_CLAIMS = (
    Claim("smallest gain in acceptance online", "least gain", "above", 0.0, GAINS[0], "share"),
    Claim("largest gain in acceptance online", "most gain", "above", 0.0, GAINS[1], "share"),
    Claim("largest ratio of acceptance at the start to that of the draft distilled offline", "most start over offline",
          "at most", 1.0),
    Claim("smallest ratio of final online acceptance to that of the draft distilled offline (comparable: 0.9)",
          "least online over offline", "at least", 0.9),
)  # fmt: skip
SHIFT_CLAIMS = (
    Claim("largest drop in acceptance of served requests at a change of traffic", "most dip", "above",
          0.0, None, "share"),
    Claim("smallest recovery in acceptance until the next change", "least regained", "above", 0.0, None, "share"),
    Claim("recovery over the drop, at the change with the largest drop", "regained over the most dip",
          "at least", 1.0),
)  # fmt: skip
TOPIC_CLAIMS = (
    Claim("topics: smallest gain in acceptance by a topic's own draft", "least gain", "above", 0.0, None, "share"),
    Claim("topics: smallest final acceptance", "least acceptance", "at least", TOPICS, TOPICS, "share"),
)
ROUTED_CLAIMS = tuple(
    Claim(f"{word} lead in acceptance of a draft for each kind, found by {way}, over one draft", f"{way}: {name} lead",
          "above", 0.0, paper, "share")
    for way in (TAG, TOPIC)
    for (word, name), paper in zip((("smallest", "least"), ("largest", "most")), ROUTED, strict=True)
)  # fmt: skip


def offline(steps: Mapping[str, str]) -> Read:
    """steps: by what a draft was taught with, TEACHER being the target's texts and the forward KL; each wrote
    distilled.json."""

    def read(folders: Folders) -> Found:
        results = {way: read_json(folders[step] / "distilled.json") for way, step in steps.items()}
        curves = {
            way: {each["epoch"]: each["acceptance"] for each in result["evaluations"]}
            for way, result in results.items()
        }
        ends = {way: list(accepted.values())[-1] for way, accepted in curves.items()}
        values: dict[str, float | None] = {
            f"{way}: gain": ends[way] - next(iter(accepted.values())) for way, accepted in curves.items()
        }
        values["teacher above other samplings"] = _lead(ends, SAMPLINGS)
        values["kl above other losses"] = _lead(ends, LOSSES)
        shown = _figure("offline", "Distilled beforehand", "epochs", {"held-out acceptance": series(curves)})
        return Found(values, (shown,), _about(results[TEACHER]))

    return read


def latency(step: str) -> Read:
    """The best of the chains; drafts beside each other under the same one, the longest."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "latency.json")
        rows = result["rows"]
        drafts = list(dict.fromkeys(row["draft"] for row in rows))
        chain = rows[-1]["policy"]
        tpot = {row["draft"]: row["tpot_ms"] for row in rows if row["policy"] == chain}
        values: dict[str, float | None] = {
            f"{draft}: times plain": _best_times(folders[step]).get(draft) for draft in (OFFLINE, ONLINE)
        }
        values |= {f"{START} over {draft}": over(tpot.get(START), tpot.get(draft)) for draft in (OFFLINE, ONLINE)}
        bars = {
            name: {f"{draft}, {row['policy']}": row[what] for draft in drafts for row in rows if row["draft"] == draft}
            for name, what in (("measured", "times"), ("closed form", "formula_times"))
        }
        shown = figure(
            "latency", "Speed by draft", f"The real engine, {result['target']}, {result['domain']}.", "draft, policy",
            [("speedup", "times plain decoding", series(bars))], kind="bars",
        )  # fmt: skip
        return Found(values, (shown,), _about(result) | {"target": result["target"]})

    return read


def medusa(latencies: Mapping[tuple[str, str], str], learning: str) -> Read:
    """latencies: steps that wrote latency.json, by what drafts, "heads" or "draft", and domain. learning: the step that
    wrote medusa.json."""

    def read(folders: Folders) -> Found:
        learned = read_json(folders[learning] / "medusa.json")
        values: dict[str, float | None] = {}
        bars: dict[str, dict[str, float | None]] = {way: {} for way in (MEDUSA, MEDUSA_LEARNED, DRAFT_LEARNED)}
        for domain in MEDUSA_SPEEDUPS:
            of_heads, of_drafts = (_best_times(folders[latencies[what, domain]]) for what in ("heads", "draft"))
            found = dict(zip(bars, (of_heads[START], of_heads[ONLINE], of_drafts[ONLINE]), strict=True))
            for way, times in found.items():
                bars[way][domain] = values[f"{domain}: {way}"] = times
            values[f"{domain}: learned over first"] = over(found[MEDUSA_LEARNED], found[MEDUSA])
            values[f"{domain}: draft over learned heads"] = over(found[DRAFT_LEARNED], found[MEDUSA_LEARNED])
            values[f"{domain}: draft over first heads"] = over(found[DRAFT_LEARNED], found[MEDUSA])
        speed = figure(
            "speed", "Speed of Medusa heads and of a draft", "The real engine, one request at a time.", "traffic",
            [("speedup", "times plain decoding", series(bars))], kind="bars",
        )  # fmt: skip
        of_run = {run["name"]: run for run in learned["runs"]}
        panels = {
            domain: series({
                name: curve(of_run[f"{domain}/{what}"], domain)
                for what, name in (("heads", MEDUSA_LEARNED), ("draft", DRAFT_LEARNED))
            })
            for domain in MEDUSA_SPEEDUPS
        }  # fmt: skip
        title = "Heads and a draft that learn from one kind of traffic"
        shown = _figure("medusa", title, "requests served", panels, f"the heads are distilled from maths, {RESET}")
        return Found(values, (speed, shown), _about(learned))

    return read


def _best_times(folder: Path) -> dict[str, float]:
    """The speedup of each draft of a latency.json under its best chain."""
    rows = read_json(folder / "latency.json")["rows"]
    return {name: max(row["times"] for row in rows if row["draft"] == name) for name in {row["draft"] for row in rows}}


def narrow(steps: Mapping[str, str]) -> Read:
    """steps: by domain."""

    def read(folders: Folders) -> Found:
        results = {domain: read_json(folders[step] / f"narrow-{domain}.json") for domain, step in steps.items()}
        runs = {domain: runs_by_way(result)[ONLINE] for domain, result in results.items()}
        still = {
            name: {domain: result["acceptance"][name][domain] for domain, result in results.items()}
            for name in (START, OFFLINE, SHIPPED)
        }
        ends = {domain: last(run, domain) for domain, run in runs.items()}
        gains = [ends[domain] - still[START][domain] for domain in runs]
        values = {
            "least gain": least(gains),
            "most gain": largest(gains),
            "most start over offline": largest(over(still[START][d], still[OFFLINE][d]) for d in runs),
            "least online over offline": least(over(ends[d], still[OFFLINE][d]) for d in runs),
        }
        panels = {}
        for domain, run in runs.items():
            learned = curve(run, domain)
            flat = {name: dict.fromkeys(learned, still[name][domain]) for name in (OFFLINE, SHIPPED)}
            panels[domain] = series({ONLINE: learned, **flat})
        shown = _figure("online", "Learning from one kind of traffic", "requests served", panels)
        return Found(values, (shown,), _about(next(iter(results.values()))))

    return read


def shift(step: str) -> Read:
    """What is served is judged on its own domain: it drops when another begins, by whatever the new one has less."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "shift.json")
        stretches = phases(result)
        dips = [(before.after - after.before, after.gain) for before, after in pairwise(stretches)]
        dip, regained = max(dips)
        values = {
            "most dip": dip,
            "least regained": least(gain for _, gain in dips),
            "regained over the most dip": regained / dip if dip > 0 else None,
        }
        run = result["runs"][0]
        curves = {each.domain: curve(run, each.domain) for each in stretches}
        served = {
            f"{each.domain}, served": {
                at: value for at, value in curves[each.domain].items() if each.first <= at <= each.stop
            }
            for each in stretches
        }
        panels = {"what is served": series(served), "every kind": series(curves)}
        shown = _figure("shift", "One kind of traffic after another", "requests served", panels)
        return Found(values, (shown,), _about(result))

    return read


def topics(step: str) -> Read:
    """Of drafts that are found by topic."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "mixed.json")
        run = runs_by_way(result)[TOPIC]
        domains = _domains(result)
        ends = {domain: last(run, domain) for domain in domains}
        values = {
            "least gain": least(ends[domain] - result["acceptance"][START][domain] for domain in domains),
            "least acceptance": least(ends.values()),
        }
        panels = {"a draft for each topic": series({domain: curve(run, domain) for domain in domains})}
        shown = _figure("topics", "Topics", "requests served, of all topics", panels, CUT)
        return Found(values, (shown,), _about(result))

    return read


def routed(step: str) -> Read:
    """One draft beside one for each kind, by what they accept in the end."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "mixed.json")
        runs = runs_by_way(result)
        domains = _domains(result)
        values: dict[str, float | None] = {}
        for way in (TAG, TOPIC):
            leads = _leads(runs[way], runs[ONE], domains) if way in runs else []
            values |= {f"{way}: least lead": least(leads), f"{way}: most lead": largest(leads)}
        panels = {
            domain: series({name: curve(run, domain) for name, run in runs.items()}) for domain in domains
        }  # fmt: skip
        shown = _figure("mixed", "One draft, and one for each kind", "requests served, of all kinds", panels, CUT)
        return Found(values, (shown,), _about(result))

    return read


def _lead(ends: Mapping[str, float], others: tuple[str, ...]) -> float | None:
    best = largest(ends.get(way) for way in others)
    return None if best is None else ends[TEACHER] - best


def _leads(run: Run, one: Run, domains: list[str]) -> list[float]:
    return [last(run, domain) - last(one, domain) for domain in domains]


def _domains(result: Result) -> list[str]:
    return sorted(set(result["order"]))


def _figure(
    key: str, title: str, x_label: str, panels: Mapping[str, tuple[Series, ...]], begins: str = RESET
) -> Figure:  # fmt: skip
    drawn = [(name, "acceptance", curves) for name, curves in panels.items()]
    return figure(key, title, f"The real engine, the embedded pair; {begins}.", x_label, drawn, percent=panels)


def _about(result: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(result[name]) for name in ("commit", "machine")}
