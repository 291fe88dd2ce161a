"""Tables of docs/results.md about policies: the simulator beside the engine, sweeps, calibration. Imports no jax."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from benchmarks.markdown import head, line, short_commit

REAL = (
    "| requests per second | policy | TPOT and TTFT met, engine | simulated | simulated as served "
    "| goodput, tokens/s, engine | simulated | simulated as served | verification over the profile's |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
MEASURES = (("attainment", "{:.1%}"), ("goodput_tps", "{:.0f}"))
SIDES = ("real", "simulated", "as_served")
STATED = (
    "| start | learns | temperature | outcomes | draft's own | table at the start | learned | honest chances "
    "| accepted per step |\n|---|---|---|---|---|---|---|---|---|"
)
SWEPT = (
    "| machine | targets | sweep | value | `adaserve` | best baseline at the paper's setting | violations, times "
    "| goodput, times | best tuned chain | points above it | points above `adaserve-paper` |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)
FLUCTUATING = (
    "| requests per second | policy | met, mean of the traces | worst trace | points that `adaserve` is above it, mean "
    "| worst trace | best trace |\n|---|---|---|---|---|---|---|"
)
CLOSE = 0.03
KINDS = {"tpot": "TPOT", "joint": "TPOT and TTFT"}


def validation_tables(result: dict[str, Any]) -> str:
    """Return the tables of a run of benchmarks/adaserve/validation.py."""
    rows = []
    for point in result["points"]:
        measured = [form.format(point[side][measure]) for measure, form in MEASURES for side in SIDES]
        factor = f"{fmean(each['verify'] for each in point['factors']):.2f}"
        rows.append(line(f"{point['rate_rps']:g}", f"`{point['policy']}`", *measured, factor))
    errors = result["prediction_errors"]
    predicted = ", ".join(f"{kind} {each['median']:.1%} and {each['p90']:.1%}" for kind, each in errors.items())
    return "\n\n".join(
        [
            f"{result['target']}, first {result['requests']} requests of {result['trace']}, at most "
            f"{result['new_tokens']} output tokens, temperature {result['temperature']:g}, {result['repeats']} rounds, "
            f"{result['simulated_seeds']} simulated seeds:",
            "\n".join([REAL, *rows]),
            f"{_largest(result, 'simulated', 'Simulated on the profile')} {_largest(result, 'as_served', 'As served')}",
            _rounds(result["points"]),
            f"Recorded acceptance of the first choice: {_acceptance(result['acceptance'])}",
            f"Error of predicted times in the profile's own mixed load (median and 90th percentile): {predicted}. "
            f"{result['device']}; jax {result['jax_version']}. Commit {short_commit(result['commit'])}.",
        ]
    )


def _acceptance(found: dict[str, Any]) -> str:
    means = ", ".join(f"{name} {mean:.2f}" for name, mean in found["mean"].items())
    return f"{means}. Each further choice is right {found['choice_decay']:.2f} times as often as the one before."


def _largest(result: dict[str, Any], side: str, name: str) -> str:
    """Return one side's largest differences to the engine, and whether it orders the policies as the engine does."""
    off = result["largest_off"][side]
    orders = [
        f"{rate}/s: {'the same' if each[side]['same'] else 'not the same'}" for rate, each in result["orders"].items()
    ]
    return (
        f"{name}, the largest differences to the engine are {100 * off['attainment']:.1f} points of attainment and "
        f"{off['goodput_tps']:.1%} of goodput. Order of the policies: {'; '.join(orders)}."
    )


def fluctuating_table(result: dict[str, Any]) -> str:
    """Return the table of a run of benchmarks/adaserve/fluctuating.py, the best policy of each rate first."""
    met: dict[float, dict[str, list[float]]] = {}
    for row in result["rows"]:  # by seed
        met.setdefault(row["rate_rps"], {}).setdefault(row["policy"], []).append(row["attainment"])
    rows = []
    for rate, by_policy in sorted(met.items()):
        ours = by_policy["adaserve"]
        for policy, theirs in sorted(by_policy.items(), key=lambda each: -sum(each[1])):
            apart = [100 * (a - b) for a, b in zip(ours, theirs, strict=True)]
            rows.append(line(
                f"{rate:g}", f"`{policy}`", f"{sum(theirs) / len(theirs):.2%}", f"{min(theirs):.2%}",
                *(("-",) * 3 if policy == "adaserve" else (f"{sum(apart) / len(apart):+.2f}", f"{min(apart):+.2f}",
                                                           f"{max(apart):+.2f}")),
            ))  # fmt: skip
    about = f"{result['simulated']}, {result['seeds']} traces of each rate. Commit {short_commit(result['commit'])}."
    return "\n\n".join([f"Simulated with `{result['command']}`:", "\n".join([FLUCTUATING, *rows]), about])


def _rounds(points: list[dict[str, Any]]) -> str:
    """Return how far the engine's rounds are from each other, and how often the simulation lies among them."""
    among, apart = 0, {"attainment": 0.0, "goodput_tps": 0.0}
    for point in points:
        for name in apart:
            each = [one[name] for one in point["real_repeats"]]
            share = point["real"][name] if name == "goodput_tps" else 1.0
            apart[name] = max(apart[name], (max(each) - min(each)) / share)
            if name == "attainment":
                among += min(each) - CLOSE <= point["as_served"][name] <= max(each) + CLOSE
    return (
        "The engine's own rounds, of the same requests under one policy, differ by up to "
        f"{100 * apart['attainment']:.1f} points of attainment and {apart['goodput_tps']:.1%} of goodput. The "
        f"attainment simulated as served lies between the rounds, or within {100 * CLOSE:.0f} points of one, at "
        f"{among} of {len(points)} points."
    )


def calibration_table(result: dict[str, Any]) -> str:
    """Return the table of the second halves of a run of benchmarks/adaserve/calibration.py."""
    rows = [
        line(
            row["start"], "yes" if row["learns"] else "no", f"{row['temperature']:g}", str(row["outcomes"]),
            *(f"{row[name]:.3f}" for name in ("raw", "loaded", "online", "honest")), f"{row['accepted_per_step']:.2f}",
        )
        for row in result["results"] if row["half"] == 2
    ]  # fmt: skip
    texts = f"{result['prompts']} texts, {result['tokens_each']} tokens each"
    about = f"{result['target']} pair, {texts}; aim {result['aim']:g}:"
    return "\n\n".join(
        [about, "\n".join([STATED, *rows]), f"{result['machine']}. Commit {short_commit(result['commit'])}."]
    )


def sweeps_table(result: dict[str, Any]) -> str:
    """Return the verdict of benchmarks/adaserve/sweeps.py, point by point."""
    rows = [
        line(
            point["machine"], KINDS[point["targets"]], point["sweep"], f"{point['value']:g}",
            f"{point['attainment']:.1%}, {point['goodput_tps']:.0f} tokens/s", _baseline(point),
            _times(point["violation_ratio"]), _times(point["goodput_ratio"]), point["tuned_setting"] or "-",
            _points(point["minus_tuned"]), _points(point["minus_paper"]),
        )
        for point in result["points"]
    ]  # fmt: skip
    ratios = [
        point["attainment"] / point["best_baseline_attainment"]
        for point in result["points"]
        if (point["sweep"], point["targets"]) == ("rate", "tpot") and point["best_baseline_attainment"]
    ]
    commits = ", ".join(short_commit(commit) for commit in result["commit"].split(", "))
    about = f"Commit {commits}."
    if ratios:
        about = (
            f"On {result['points'][0]['machine']} with TPOT targets only, over all rates, `adaserve` reaches at most "
            f"{max(ratios):.2f} times the attainment of the best baseline. {about}"
        )
    return "\n\n".join(["\n".join([SWEPT, *rows]), about])


def second_choices_table(result: dict[str, Any]) -> str:
    """Return the attainment of each policy by decay, from a run of benchmarks/adaserve/second_choices.py."""
    decays = list(dict.fromkeys(row["decay"] for row in result["rows"]))
    rows = []
    for policy in dict.fromkeys(row["policy"] for row in result["rows"]):
        cells = []
        for decay in decays:
            met = next(r["attainment"] for r in result["rows"] if (r["policy"], r["decay"]) == (policy, decay))
            worst = min(met, key=met.__getitem__)
            cells.append(f"{fmean(met.values()):.1%}; {met[worst]:.1%} at {worst}")
        rows.append(line(f"`{policy}`", *cells))
    columns = head("policy", *(f"decay {decay:g}" for decay in decays))
    points = len(result["rows"][0]["attainment"])
    about = f"{result['simulated']}, {points} points. Commit {short_commit(result['commit'])}."
    return "\n\n".join([f"Simulated with `{result['command']}`:", "\n".join([columns, *rows]), about])


def constants_table(result: dict[str, Any]) -> str:
    """Return what each constant of `adaserve` is worth, from a run of benchmarks/adaserve/constants.py."""
    rows = []
    for each in sorted(result["constants"], key=lambda each: min(tried["least_change"] for tried in each["tried"])):
        changes = [
            (met - result["as_chosen"][point], tried["value"], point)
            for tried in each["tried"]
            for point, met in tried["attainment"].items()
        ]
        low, high = each["safe"]
        name = f"`Objective.{each['name']}`" if each["field"] else f"`{each['module']}.{each['name']}`"
        tried = ", ".join(f"{value['value']:g}" for value in each["tried"])
        rows.append(line(name, f"{each['chosen']:g}", tried, f"{low:g} to {high:g}", _change(min(changes)),
                         _change(max(changes))))  # fmt: skip
    columns = head("constant", "value", "tried", "safe range", "most lost, points", "most gained, points")
    held = ", ".join(f"{point} {met:.1%}" for point, met in result["as_chosen"].items())
    about = f"Attainment as chosen: {held}. Commit {short_commit(result['commit'])}"
    since: dict[str, list[str]] = {}
    for each in result["constants"]:
        if (commit := each.get("commit", result["commit"])) != result["commit"]:
            since.setdefault(short_commit(commit), []).append(f"`{each['name']}`")
    about += "".join(f"; {', '.join(names)}: {commit}" for commit, names in since.items()) + "."
    return "\n\n".join(["\n".join([columns, *rows]), about])


def fair_tenants_table(result: dict[str, Any]) -> str:
    """Return what a flood costs others with and without fair shares, from a run of
    benchmarks/adaserve/fair_tenants.py."""
    rows = [
        line(
            f"{each['rate_rps']:g}", f"{each['flood']:g}", "on" if each["fair"] else "off",
            f"{each['others']:.1%}", "-" if each["flooding"] is None else f"{each['flooding']:.1%}",
        )
        for each in result["rows"]
    ]  # fmt: skip
    columns = head("requests/s", "first tenant sends, times its share", "fair shares", "others met", "first tenant met")
    about = f"Simulated on {result['settings']['machine']}. Commit {short_commit(result['commit'])}."
    return "\n\n".join(["\n".join([columns, *rows]), about])


def _change(change: tuple[float, float, str]) -> str:
    points, value, where = change
    return f"{100 * points:+.1f} at {value:g}, {where}" if abs(points) >= 0.0005 else "0"


def _baseline(point: dict[str, Any]) -> str:
    return (
        "-" if point["best_baseline"] is None else f"`{point['best_baseline']}` {point['best_baseline_attainment']:.1%}"
    )


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f}"
