"""Tables of docs/results.md from runs of benchmarks/engine/draft_sources.py and draft_sources_load.py.

Imports no jax.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

import numpy as np

from adaserve_jax.results.bootstrap import Ratio, between, distributions
from benchmarks.markdown import head, line, short_commit

REPEATS = ("code edit", "quoting summary")
"""Tasks whose texts repeat."""
WANTED, LEAST_OF_BOTH, LEAST_OPEN = 2.5, 0.98, 0.99
"""Least speeds that were aimed at, over what each is compared with."""
TEXT, MODEL, BOTH = "adaserve@suffix", "adaserve@model", "adaserve@suffix+model"


def sources_table(result: dict[str, Any]) -> str:
    """Return every task's speed by policy over that of the first one, and the aims."""
    tasks: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        tasks.setdefault((row["task"], row["temperature"]), {})[row["policy"]] = row
    policies = list(dict.fromkeys(row["policy"] for row in result["rows"]))
    reference, *others = policies
    columns = ["task", "text", "temperature", f"`{reference}`, tokens/s", *(f"`{name}`" for name in others)]
    lines = [head(*columns, "accepted per step, text", "texts that differ")]
    speeds: dict[tuple[str, float], dict[str, float]] = {}
    for (task, temperature), rows in tasks.items():
        first = rows[reference]
        speeds[task, temperature] = ratios = {name: _speed(rows[name]) / _speed(first) for name in others}
        own, text = first["replayed"], rows.get(TEXT)
        accepted = "-" if text is None else f"{text['accepted'] / text['steps']:.2f}"
        cells = [task, "replayed" if own else "the target's", f"{temperature:g}"]
        cells += [f"{_speed(first):.1f}", *(f"{ratios[name]:.2f}" for name in others)]
        cells += [accepted, str(sum(row["texts_differ"] for row in rows.values()))]
        lines.append(line(*cells))
    about = (
        f"Measured with `{result['command']}`: times the decoding speed of `{reference}`, one request at a time, "
        f"each at the median of {len(result['rows'][0]['seconds'])} rounds. Target {result['target']}, draft "
        f"{result['draft']}. {result['machine']}. Commit {short_commit(result['commit'])}."
    )
    return "\n".join([*lines, "", about, "", *_aims(speeds)])


def _speed(row: dict[str, Any]) -> float:
    """Return tokens per second, each request at the median of its rounds."""
    return row["tokens"] / sum(median(request) for request in zip(*row["seconds"], strict=True))


def _aims(speeds: dict[tuple[str, float], dict[str, float]]) -> list[str]:
    lines = ["| aim | task | wanted | found | |", "|---|---|---|---|---|"]

    def add(aim: str, task: tuple[str, float], wanted: float, found: float) -> None:
        verdict = "met" if found >= wanted else "**missed**"
        lines.append(line(aim, f"{task[0]}, temperature {task[1]:g}", f"{wanted:g}", f"{found:.2f}", verdict))

    for task, ratios in speeds.items():
        if task[0] in REPEATS:
            add("text alone, over plain decoding", task, WANTED, ratios[TEXT])
    for task, ratios in speeds.items():
        if {TEXT, MODEL, BOTH} <= set(ratios):
            add(
                "both, over the better of the two", task, LEAST_OF_BOTH, ratios[BOTH] / max(ratios[TEXT], ratios[MODEL])
            )
    for task, ratios in speeds.items():
        if task[0] == "open text":
            add("text alone, over plain decoding", task, LEAST_OPEN, ratios[TEXT])
            add("both, over the model", task, LEAST_OPEN, ratios[BOTH] / ratios[MODEL])
    return lines


def head_tables(result: dict[str, Any]) -> str:
    """Return tokens per step and speed of every policy of a run with a head, and those of the head over the draft's.

    Intervals are 95 % bootstrap intervals over prompts; ratios are of the same prompts and seeds.
    """
    tasks: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        tasks.setdefault((row["task"], row["temperature"]), {})[row["policy"]] = row
    reference = result["rows"][0]["policy"]
    lines = [head("task", "temperature", "policy", "tokens per step", "times the tokens/s of `ar`")]
    pairs = [head("task", "temperature", "policy", "tokens per step", "tokens/s")]
    for (task, temperature), rows in tasks.items():
        cells = [task, f"{temperature:g}"]
        for name, row in rows.items():
            if name == reference:
                continue
            tokens, steps, seconds = (_by_prompt(row, key) for key in ("request_tokens", "request_steps", "seconds"))
            length, speed = _ratio(tokens, steps), _ratio(_by_prompt(rows[reference], "seconds"), seconds)
            lines.append(line(*cells, f"`{name}`", length, speed))
            draft = rows.get(name.removesuffix("head") + "model") if name.endswith("head") else None
            if draft is not None:
                length = _ratio(_by_prompt(draft, "request_steps"), steps)
                speed = _ratio(_by_prompt(draft, "seconds"), seconds)
                pairs.append(line(*cells, f"`{name}`", length, speed))
    rows = result["rows"]
    about = (
        f"Target {result['target']}. Measured with `{result['command']}`: "
        f"{len(_by_prompt(rows[0], 'seconds'))} prompts of each task, {max(row['seeds'] for row in rows)} seeds of "
        f"each above temperature 0, one request at a time, {len(rows[0]['seconds'])} rounds; 95 % intervals over "
        f"prompts in brackets. {sum(row['texts_differ'] for row in rows)} texts differ from those of `{reference}`. "
        f"{result['machine']}. Commit {short_commit(result['commit'])}."
    )
    return "\n".join([*lines, "", "The head over the draft:", "", *pairs, "", _compared(tasks.values()), "", about])


def _compared(tasks: Iterable[dict[str, dict[str, Any]]]) -> str:
    """Say how fast the head is beside the draft under adaserve, over all rows."""
    ratios = []
    for rows in tasks:
        draft, head = (_by_prompt(rows[f"adaserve@{name}"], "seconds").sum() for name in ("model", "head"))
        ratios.append(draft / head)
    mean = float(np.exp(np.mean(np.log(ratios))))
    return (
        f"Under `adaserve` the head decodes at {mean:.2f} times the draft's speed (geometric mean over the rows), and "
        f"is the faster in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}."
    )


def _by_prompt(row: dict[str, Any], key: str) -> np.ndarray:
    """Return sums over the seeds of each prompt; of seconds, each request at the median of its rounds."""
    found = np.median(row[key], axis=0) if key == "seconds" else np.array(row[key])
    return found.reshape(-1, row["seeds"]).sum(axis=1)


def _ratio(above: np.ndarray, below: np.ndarray) -> str:
    found = between(distributions([Ratio(above, below)], [len(above)])[0])
    return f"{above.sum() / below.sum():.2f} [{found.low:.2f}, {found.high:.2f}]"


def sources_load_table(result: dict[str, Any]) -> str:
    """Return attainment and goodput by rate and policy."""
    targets = list(result["rows"][0]["by_target"])
    columns = ["requests/s", "policy", "attainment", *(f"target {target}" for target in targets)]
    lines = [head(*columns, "goodput, tokens/s", "tokens per step")]
    for row in result["rows"]:
        cells = [f"{row['rate_rps']:g}", f"`{row['policy']}`", f"{row['attainment']:.1%}"]
        cells += [f"{row['by_target'][target]:.0%}" for target in targets]
        cells += [f"{row['goodput_tps']:.1f}", f"{row['tokens_per_step']:.2f}"]
        lines.append(line(*cells))
    about = (
        f"Measured with `{result['command']}`: {result['rows'][0]['requests']} requests at each point behind the "
        f"warm-up, {result['max_requests']} at once at most, a one-token step of {1e3 * result['baseline_s']:.1f} ms. "
        f"Target {result['target']}, draft {result['draft']}. {result['machine']}. "
        f"Commit {short_commit(result['commit'])}."
    )
    return "\n".join([*lines, "", about])
