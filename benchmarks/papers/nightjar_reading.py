"""What Nightjar states, read from the results of benchmarks/nightjar/tables.py and elastic.py. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median

from adaserve_jax.report.document import Figure, Table
from benchmarks.nightjar.paper import NAMES
from benchmarks.nightjar.points import CLASSES, MAIN, METHODS, POISSON, THRESHOLD_SHARE
from benchmarks.nightjar.summary import offload_pairs
from benchmarks.nightjar.views import BUSY, LATENCY, OURS, PLAIN, THROUGHPUT, Line, Tables, View, ratio
from benchmarks.papers.entry import Claim, Folders, Found
from benchmarks.papers.reading import figure, largest, least, read_json, series

BANDITS = ("linucb", "lints", "bingreedy")
OTHERS = tuple(policy for policy in METHODS if policy not in (OURS, MAIN, "nightjar-v1"))
BASELINES = tuple(policy for policy in NAMES if policy != OURS)
"""The methods that the paper's tables compare with."""
EXPANSION_S, CONTRACTION_S, DISPATCH_S = 0.1439, 0.0119, 21.9e-6
"""The paper's, of a 32B target on two L20 GPUs."""
ELASTIC_CLAIMS = (
    Claim("expansion over contraction", "expansion over contraction", "at least", 1.0, EXPANSION_S / CONTRACTION_S),
    Claim("expansion", "expansion, s", "at most", EXPANSION_S, EXPANSION_S, "s"),
    Claim("contraction", "contraction, s", "at most", CONTRACTION_S, CONTRACTION_S, "s"),
    Claim("dispatch of the draft's reload, over a whole contraction", "dispatch share", "at most", 0.1,
          DISPATCH_S / CONTRACTION_S, "share"),
)  # fmt: skip
Read = Callable[[Folders], Found]


def _read(step: str, of: Callable[[Tables, str], tuple[dict[str, float | None], Sequence[Figure | Table]]]) -> Read:
    """Reads one setup's points by `of`, given the tables and the setup."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "nightjar-lines.json")
        tables = Tables([Line(**values) for values in result["lines"]])
        values, shown = of(tables, tables.setups[0])
        about = {"commit": result["commit"], "machine": result["machine"], "device": f"simulated: {tables.setups[0]}"}
        return Found(values, tuple(shown), about | {"workload": result["segment"]["trace"]})

    return read


def methods(step: str) -> Read:
    """Every method at a low, a high and a dynamic load."""

    def of(tables: Tables, setup: str):
        views = dict(_loads(tables, setup))
        low, high, _ = (views.get(name) for name in CLASSES)
        values = {
            "low: busy times plain": _times(low, OURS, BUSY, PLAIN),
            "low: busy times best": _times_best(low, BUSY),
            "high: times plain": _times(high, OURS, THROUGHPUT, PLAIN),
            "high: times best": _times_best(high, THROUGHPUT),
            "high: times SD": _times(high, OURS, THROUGHPUT, "spec:3"),
            "least times best": least(_times_best(view, THROUGHPUT) for view in views.values()),
        }
        for figure_name, what in ((THROUGHPUT, "throughput"), (LATENCY, "latency")):
            for other in BASELINES:
                ratios = [_times(view, OURS, figure_name, other) for view in views.values()]
                known = [value for value in ratios if value is not None]
                values[f"mean {what} over {other}"] = fmean(known) if known else None
        values["least latency over ar"] = least(_times(view, OURS, LATENCY, PLAIN) for view in views.values())
        return values, [_bars(views), *(_method_table(name, view) for name, view in views.items())]

    return _read(step, of)


def methods_and_longer(step: str, longer: str) -> Read:
    """`methods`, and what of its loss at the high load is left in a longer run."""

    def read(folders: Folders) -> Found:
        found, long = methods(step)(folders), methods(longer)(folders)
        best, best_longer = (each.values["high: times best"] for each in (found, long))
        lost = best is not None and best_longer is not None and best < 1
        left = (1 - best_longer) / (1 - best) if lost else None
        return replace(found, values={**found.values, "high: loss left in a longer run": left})

    return read


def methods_on_both(step: str, larger: str) -> Read:
    """`methods`, and its means on another machine, named `larger: ...`."""

    def read(folders: Folders) -> Found:
        found, other = methods(step)(folders), methods(larger)(folders)
        means = {f"larger: {name}": value for name, value in other.values.items() if name.startswith("mean ")}
        return replace(found, values={**found.values, **means})

    return read


def lengths(step: str) -> Read:
    """Beside the fixed lengths, none included, at every rate."""

    def of(tables: Tables, setup: str):
        beside = tables.against_fixed(setup, POISSON)
        times = [each.throughput_times for each in beside]
        values = {"least times best length": least(times), "most times best length": largest(times)}
        return values, [_by_share(tables, setup, "lengths", "Fixed lengths", lambda view: [*view.fixed, OURS])]

    return _read(step, of)


def bandits(step: str) -> Read:
    """Beside bandits that know the size of the batch in other ways, at every rate."""

    def of(tables: Tables, setup: str):
        views = [tables.view(setup, POISSON, share) for share in tables.shares(setup, POISSON)]
        pairs = [(view, other) for view in views for other in BANDITS]
        values = {
            "least throughput times": least(_times(view, OURS, THROUGHPUT, other) for view, other in pairs),
            "most latency times": largest(_times(view, OURS, LATENCY, other) for view, other in pairs),
        }
        return values, [_by_share(tables, setup, "bandits", "Contextual bandits", lambda _: [*BANDITS, OURS])]

    return _read(step, of)


def offload(step: str) -> Read:
    """The draft's memory becoming KV pages, beside its staying."""

    def of(tables: Tables, setup: str):
        pairs = [(share, off, on) for share, policy, off, on in offload_pairs(tables, setup) if policy == OURS]
        times = {share: ratio(on, off, THROUGHPUT) for share, off, on in pairs}
        values = {"most times": largest(times.values()), "least times": least(times.values())}
        curves = series({
            "draft stays": {share: View(off).mean(OURS, THROUGHPUT) for share, off, _ in pairs},
            "offloaded": {share: View(on).mean(OURS, THROUGHPUT) for share, _, on in pairs},
        })  # fmt: skip
        drawn = figure(
            "offload", "Offloading the draft", f"{setup}, simulated, few KV pages.", "share of the capacity",
            [("throughput", "tokens/s", curves)],
        )  # fmt: skip
        return values, [drawn]

    return _read(step, of)


def thresholds(step: str) -> Read:
    """Throughput by the share of free pages below which the draft goes, beside the draft staying."""

    def of(tables: Tables, setup: str):
        at = [
            line for line in tables.pools(setup)
            if line.pool and (line.policy, line.share) == (OURS, THRESHOLD_SHARE)
        ]  # fmt: skip
        off = [line for line in at if line.pool and line.pool["elastic"] == "off"]
        by_tau: dict[float, dict[int, list[Line]]] = {}
        for line in at:
            if line.pool and line.pool["elastic"] == "on":
                by_tau.setdefault(line.pool["tau_low"], {}).setdefault(line.pool["persist_steps"], []).append(line)
        swept = {tau: max(_tps(lines) for lines in by_tau[tau].values()) for tau in sorted(by_tau)}
        best = max(swept, key=lambda tau: swept[tau], default=None)
        values = {
            "best times off": None if best is None or not off else swept[best] / _tps(off),
            "best threshold": best,
        }
        curves = series({"offloaded": dict(swept)} | ({"draft stays": dict.fromkeys(swept, _tps(off))} if off else {}))
        drawn = figure(
            "thresholds", "Thresholds", f"{setup}, simulated, the best persistence of each threshold.",
            "share of pages free", [("throughput", "tokens/s", curves)],
        )  # fmt: skip
        return values, [drawn]

    return _read(step, of)


def _tps(lines: Sequence[Line]) -> float:
    return View(lines).mean(OURS, THROUGHPUT)


def _loads(tables: Tables, setup: str) -> Iterator[tuple[str, View]]:
    for name, at in CLASSES.items():
        view = tables.view(setup, *at)
        if OURS in view and PLAIN in view:
            yield name, view


def _times(view: View | None, policy: str, what: str, other: str) -> float | None:
    return None if view is None or policy not in view or other not in view else view.times(policy, what, other)


def _times_best(view: View | None, what: str) -> float | None:
    """Ours over the best of all others."""
    return None if view is None else _times(view, OURS, what, view.best(OTHERS, what))


def _bars(views: dict[str, View]) -> Figure:
    names = [policy for policy in METHODS if any(policy in view for view in views.values())]

    def bars(what: str):
        return series(
            {name: {load: view.mean(name, what) if name in view else None for load, view in views.items()}
             for name in names}
        )  # fmt: skip

    panels = (("throughput", "tokens/s", bars(THROUGHPUT)), ("while busy", "tokens/s", bars(BUSY)),
              ("latency", "s", bars(LATENCY)))  # fmt: skip
    return figure("methods", "Methods by load", "Simulated; no request has a target.", "load", panels, kind="bars")


def _method_table(load: str, view: View) -> Table:
    shown = ((THROUGHPUT, 0), (BUSY, 0), (LATENCY, 2))
    rows = tuple(
        (policy, *(f"{view.mean(policy, what):.{digits}f}" for what, digits in shown))
        for policy in METHODS if policy in view
    )  # fmt: skip
    title = f"{load} load, {view.rate_rps:.2f} requests/s"
    columns = ("policy", "tokens/s", "while busy", "mean latency, s")
    return Table(f"methods-{load}", title, "No request has a target.", columns, rows, frozenset({1, 2, 3}))


def _by_share(tables: Tables, setup: str, key: str, title: str, names: Callable[[View], Iterable[str]]) -> Figure:
    views = {share: tables.view(setup, POISSON, share) for share in tables.shares(setup, POISSON)}
    found = list(dict.fromkeys(name for view in views.values() for name in names(view)))

    def curves(what: str):
        return series(
            {name: {share: view.mean(name, what) if name in view else None for share, view in views.items()}
             for name in found}
        )  # fmt: skip

    panels = (("throughput", "tokens/s", curves(THROUGHPUT)), ("latency", "s", curves(LATENCY)))
    return figure(key, title, f"{setup}, simulated; no request has a target.", "share of the capacity", panels)


def swaps(step: str) -> Read:
    """Read table 6 from benchmarks/nightjar/elastic.py: medians over rounds."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "elastic.json")
        seconds = result["swaps"]["seconds"]

        def middle(*names: str) -> float:
            return median(map(sum, zip(*(seconds[name] for name in names), strict=True)))

        expansion, contraction, dispatch = middle("expand"), middle("move", "contract"), middle("contract")
        values = {
            "expansion over contraction": expansion / contraction,
            "expansion, s": expansion,
            "contraction, s": contraction,
            "dispatch share": dispatch / contraction,
        }
        rows = tuple(
            (name, f"{paper * 1e3:.3g}", f"{ours * 1e3:.3g}")
            for name, paper, ours in (
                ("expansion", EXPANSION_S, expansion), ("contraction", CONTRACTION_S, contraction),
                ("dispatch of the reload", DISPATCH_S, dispatch),
            )
        )  # fmt: skip
        caption = f"{result['params']['target'] / 1e6:.1f}M parameters, {result['dtype']}, {result['device']}."
        shown = Table("swaps", "Operations", caption, ("operation", "paper, ms", "here, ms"), rows, frozenset({1, 2}))
        return Found(values, (shown,), {name: str(result[name]) for name in ("commit", "machine", "device")})

    return read
