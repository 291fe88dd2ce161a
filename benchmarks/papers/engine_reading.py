"""What Nightjar's figures state, read from the runs of benchmarks/nightjar/engine.py and offload.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.nightjar.views import BUSY, LATENCY, OURS, PLAIN, THROUGHPUT
from benchmarks.papers.entry import Claim, Folders, Found
from benchmarks.papers.reading import figure, largest, least, over, read_json, series

ENGINE_CLAIMS = (
    Claim("low load: throughput while busy over plain decoding's", "low: busy times plain", "at least", 1.0),
    Claim("high load: throughput over plain decoding's", "high: times plain", "at least", 1.0),
    Claim("smallest ratio of throughput to the best other method's, all loads", "least times best", "at least", 1.0),
    Claim("mean latency over plain decoding's, at the worst load", "most latency times plain", "at most", 1.0),
)
OFFLOAD_CLAIMS = (
    Claim("largest ratio of throughput with the draft offloaded to that with it staying", "most times", "at least", 1.0,
          6315.9 / 5982.6),
)  # fmt: skip
MIDDLE = "median"


def engine_points(step: str) -> Callable[[Folders], Found]:
    """Medians over rounds; ratios within rounds."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "nightjar-engine.json")
        loads: dict[str, dict[str, dict[str, Any]]] = {}
        for point in result["points"]:
            loads.setdefault(point["load"], {})[point["policy"]] = point
        loads = {load: at for load, at in loads.items() if OURS in at}
        ours = {load: at[OURS] for load, at in loads.items()}
        values = {
            "low: busy times plain": _plain(ours.get("low"), BUSY),
            "high: times plain": _plain(ours.get("high"), THROUGHPUT),
            "least times best": least(_over_best(at) for at in loads.values()),
            "most latency times plain": largest(_plain(each, LATENCY) for each in ours.values()),
        }
        names = list(dict.fromkeys(name for at in loads.values() for name in at))
        panels = [
            (label, unit, series({
                name: {load: at[name][what][MIDDLE] if name in at else None for load, at in loads.items()}
                for name in names
            }))
            for what, label, unit in ((THROUGHPUT, "throughput", "tokens/s"), (LATENCY, "latency", "s"))
        ]  # fmt: skip
        shown = figure(
            "methods", "Methods by load", "The real engine; medians over rounds.", "load", panels, kind="bars"
        )
        return Found(values, (shown,), _about(result))

    return read


def engine_offload(step: str) -> Callable[[Folders], Found]:
    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "nightjar-offload.json")
        points = [point for point in result["points"] if point["policy"] == OURS]
        values = {"most times": largest(point["times"][THROUGHPUT][MIDDLE] for point in points)}
        curves = series({
            name: {point["share"]: point[side][THROUGHPUT][MIDDLE] for point in points}
            for name, side in (("draft stays", "off"), ("offloaded", "on"))
        })  # fmt: skip
        shown = figure(
            "offload", "Offloading the draft", "The real engine; medians over rounds.", "share of the capacity",
            [("throughput", "tokens/s", curves)], kind="bars",
        )  # fmt: skip
        return Found(values, (shown,), _about(result))

    return read


def _plain(point: dict[str, Any] | None, what: str) -> float | None:
    return None if point is None else point["times_plain"][what][MIDDLE]


def _over_best(at: dict[str, dict[str, Any]]) -> float | None:
    others = [point[THROUGHPUT][MIDDLE] for name, point in at.items() if name not in (OURS, "adaserve")]
    return over(at[OURS][THROUGHPUT][MIDDLE], max(others, default=None)) if PLAIN in at else None


def _about(result: dict[str, Any]) -> dict[str, str]:
    size = "unknown" if result["target_params"] is None else f"{result['target_params'] / 1e6:.1f}M parameters"
    return {name: str(result[name]) for name in ("commit", "machine", "device")} | {"target": size}
