"""Nightjar's figures 9 to 16 and tables 4 to 6 (version 2, section 7): what they show, how they are measured here."""

from __future__ import annotations

from benchmarks.nightjar.paper import LATENCY_MS, NAMES, THROUGHPUT_TPS, times
from benchmarks.papers.engine_reading import ENGINE_CLAIMS, OFFLOAD_CLAIMS, engine_offload, engine_points
from benchmarks.papers.entry import Claim, Entry, Form, Step
from benchmarks.papers.nightjar_reading import (
    BASELINES,
    ELASTIC_CLAIMS,
    bandits,
    lengths,
    methods,
    methods_and_longer,
    methods_on_both,
    offload,
    swaps,
    thresholds,
)
from benchmarks.papers.over_time_reading import RATE_CLAIMS, TIME_CLAIMS, over_time, rate_trace

PAPER = "Nightjar"
WORKLOAD = "lengths and swing of Azure's conversation trace, no targets"
CPU_PAIR = "Simulated on a profile of a 110M target on a CPU, which has the crossover that the paper is about."
TABLE_4 = (
    CPU_PAIR + " At the low load every method serves what arrives, and at the high one no draft pays on this machine: "
    "plain decoding cannot be beaten by much in throughput. On the machine of figure 16, with the lengths that are "
    "fitted to it, drafts pay at every load; the last statement is measured there."
)
LARGER = "Simulated on a machine of the shape of AdaServe's published settings for a 32B target on two GPUs."
FIGURE_16 = (
    LARGER + " The bandit tries lengths before it knows the best. The last statement changes the number of requests "
    "alone, to four times as many. The share of the loss that goes away is a cost of trying, which a longer run "
    "spreads over more requests."
)
REAL = "The demo pair, its target grown to {size}; rounds of one length."


def _tables(setup: str, minutes: float, name: str = "", more: tuple[str, ...] = ()) -> Step:
    argv = (
        "python", "-m", "benchmarks.nightjar.tables", "--azure", "{azure}", "--setups", setup, "--seeds", "1",
        "--minutes", "30", *more, "--out", "{here}",
    )  # fmt: skip
    return Step(name or f"nightjar-{setup}", argv, minutes)


SMALL, LARGE = _tables("grown-110M", 6), _tables("qwen-32b", 6)
LONGER = _tables("qwen-32b", 4, "nightjar-qwen-32b-longer", ("--requests", "1920", "--loads", "high"))
ENGINE = Step(
    "nightjar-engine",
    (
        "python", "-m", "benchmarks.nightjar.engine", "--azure", "{azure}", "--rounds", "1", "--span", "8",
        "--policies", "ar,spec:3,dsd,tetris:3,nightjar", "--minutes", "9", "--out", "{here}",
    ),
    10,
)  # fmt: skip
ENGINE_8B = Step(
    "nightjar-engine-8b",
    (
        "python", "-m", "benchmarks.nightjar.engine", "--azure", "{azure}", "--params", "8B", "--rounds", "3",
        "--minutes", "60", "--out", "{here}",
    ),
    60, gpu=True,
)  # fmt: skip
OFFLOAD = Step(
    "nightjar-offload",
    (
        "python", "-m", "benchmarks.nightjar.offload", "--azure", "{azure}", "--rounds", "2", "--minutes", "9", "--out",
        "{here}",
    ),
    10,
)  # fmt: skip
OFFLOAD_8B = Step(
    "nightjar-offload-8b",
    (
        "python", "-m", "benchmarks.nightjar.offload", "--azure", "{azure}", "--params", "8B", "--rounds", "3",
        "--minutes", "40", "--out", "{here}",
    ),
    40, gpu=True,
)  # fmt: skip
OVER_TIME = Step(
    "nightjar-over-time",
    ("python", "-m", "benchmarks.nightjar.over_time", "--azure", "{azure}", "--out", "{here}/over-time.json"), 1,
)  # fmt: skip


def _simulated(step: Step, read, claims: tuple[Claim, ...], differs: str = CPU_PAIR) -> Form:
    return Form((step,), read(step.name), claims, WORKLOAD, "nightjar-lines.json", differs)


def _engine(claims: tuple[Claim, ...]) -> dict[str, Form]:
    return {
        size: Form(
            (step,), engine_points(step.name), claims, WORKLOAD, "nightjar-engine.json", REAL.format(size=params)
        )
        for size, step, params in (("engine", ENGINE, "110M in f32"), ("gpu", ENGINE_8B, "8B in bf16"))
    }


def _offload() -> dict[str, Form]:
    return {
        size: Form(
            (step,), engine_offload(step.name), OFFLOAD_CLAIMS, WORKLOAD, "nightjar-offload.json",
            REAL.format(size=params),
        )
        for size, step, params in (("engine", OFFLOAD, "110M in f32"), ("gpu", OFFLOAD_8B, "8B in bf16"))
    }  # fmt: skip


METHOD_CLAIMS = (
    Claim("low load: throughput while busy over plain decoding's", "low: busy times plain", "at least", 1.0),
    Claim("low load: throughput while busy over the best other method's", "low: busy times best", "at least", 1.0),
    Claim("high load: throughput over plain decoding's", "high: times plain", "at least", 1.0),
    Claim("high load: throughput over that of three drafted tokens", "high: times SD", "at least", 1.0),
)
THROUGHPUT_CLAIMS = tuple(
    Claim(
        f"throughput over {NAMES[policy]}, mean", f"mean throughput over {policy}", "at least", 1.0,
        times(THROUGHPUT_TPS, "Nightjar", NAMES[policy]),
    )
    for policy in BASELINES
)  # fmt: skip
LATENCY_CLAIMS = (
    *(
        Claim(
            f"mean latency over {NAMES[policy]}'s, mean", f"mean latency over {policy}", "at most", 1.0,
            times(LATENCY_MS, "Nightjar", NAMES[policy]),
        )
        for policy in BASELINES
    ),
    Claim(
        "mean latency over plain decoding's, at the best load", "least latency over ar", "at most", 1.0,
        min(ours / plain for ours, plain in zip(LATENCY_MS["Nightjar"], LATENCY_MS[NAMES["ar"]], strict=True)),
    ),
)  # fmt: skip
BANDIT_CLAIMS = (
    Claim("smallest ratio of throughput to any other bandit's, all loads", "least throughput times", "at least",
          1.0),
    Claim("largest ratio of mean latency to any other bandit's, all loads", "most latency times", "at most", 1.0),
)  # fmt: skip
OFFLOADED_CLAIMS = (
    Claim("largest ratio of throughput with the draft offloaded to that with it staying", "most times", "at least", 1.0,
          6315.9 / 5982.6),
    Claim("smallest such ratio over the loads", "least times", "at least", 1.0),
)  # fmt: skip
THRESHOLD_CLAIMS = (
    Claim("throughput at the best threshold over that with the draft staying", "best times off", "at least", 1.0,
          6110 / 5768.12),
    Claim("best threshold: share of free pages", "best threshold", "at most", 0.2, 0.1, "share"),
)  # fmt: skip
LENGTH_CLAIMS = (
    Claim("smallest ratio of throughput to the best fixed length's, all loads", "least times best length",
          "at least", 1.0, 1.01),
    Claim("largest ratio of throughput to the best fixed length's", "most times best length", "at least", 1.0, 1.16),
)  # fmt: skip
LARGER_CLAIMS = (
    Claim("smallest ratio of throughput to the best other method's, three loads", "least times best", "at least", 1.0),
    Claim(
        "high load: share of the loss to the best other method that is left with four times as many requests",
        "high: loss left in a longer run",
        "at most",
        1.0,
    ),
)
MACHINE_CLAIM = Claim(
    "throughput over w/o SD, mean, on the machine of figure 16",
    "larger: mean throughput over ar",
    "at least",
    1.0,
    times(THROUGHPUT_TPS, "Nightjar", NAMES["ar"]),
)

ENTRIES = (
    Entry(
        "nightjar-9", PAPER, "figure 9",
        "Throughput of every method at low and high request rates on the 7B model.",
        "Every method as a policy of one engine, at a quarter and at five quarters of the capacity.",
        {"cpu": _simulated(SMALL, methods, METHOD_CLAIMS), **_engine(ENGINE_CLAIMS)},
    ),
    Entry(
        "nightjar-10", PAPER, "figure 10",
        "The request rate of the segment of Azure's trace that is the dynamic load.",
        "The twenty minutes in which the rate swings most; the paper does not say which it took.",
        {"cpu": Form((OVER_TIME,), rate_trace(OVER_TIME.name), RATE_CLAIMS, WORKLOAD, "over-time.json", CPU_PAIR)},
    ),
    Entry(
        "nightjar-11", PAPER, "figure 11",
        "Throughput over time under the load of figure 10: the best while the load is low, and that of plain decoding "
        "while it is high.",
        "The same figure by half minute, with the load thinned to the machine.",
        {"cpu": Form((OVER_TIME,), over_time(OVER_TIME.name), TIME_CLAIMS, WORKLOAD, "over-time.json", CPU_PAIR)},
    ),
    Entry(
        "nightjar-12", PAPER, "figure 12",
        "Nightjar and other bandits that know the batch size, over request rates.",
        "The same figure at five loads.",
        {"cpu": _simulated(SMALL, bandits, BANDIT_CLAIMS)},
    ),
    Entry(
        "nightjar-13", PAPER, "figure 13",
        "Throughput with the draft's memory given to the KV cache under load, and without, over request rates.",
        "The same figure on a machine with few KV pages.",
        {"cpu": _simulated(SMALL, offload, OFFLOADED_CLAIMS), **_offload()},
    ),
    Entry(
        "nightjar-14", PAPER, "figure 14",
        "Throughput over the share of free KV cache below which the draft is offloaded.",
        "The same figure at five shares, each with its best number of steps before an expansion.",
        {"cpu": _simulated(SMALL, thresholds, THRESHOLD_CLAIMS)},
    ),
    Entry(
        "nightjar-15", PAPER, "figure 15",
        "Nightjar and fixed numbers of drafted tokens, over request rates, on the 13B model.",
        "The same figure at five loads, on the machine of figure 16.",
        {"cpu": _simulated(LARGE, lengths, LENGTH_CLAIMS, LARGER)},
    ),
    Entry(
        "nightjar-16", PAPER, "figure 16",
        "Every method with a 32B target on two GPUs.",
        "Every method at a low, a high and a dynamic load, on a simulated machine of that shape.",
        {
            "cpu": Form(
                (LARGE, LONGER), methods_and_longer(LARGE.name, LONGER.name), LARGER_CLAIMS, WORKLOAD,
                "nightjar-lines.json", FIGURE_16,
            )
        },
    ),
    Entry(
        "nightjar-table-4", PAPER, "table 4",
        "Throughput of every method on three data sets, for two targets.",
        "Mean ratios over a low, a high and a dynamic load of one workload.",
        {
            "cpu": Form(
                (SMALL, LARGE), methods_on_both(SMALL.name, LARGE.name), (*THROUGHPUT_CLAIMS, MACHINE_CLAIM), WORKLOAD,
                "nightjar-lines.json", TABLE_4,
            ),
            **_engine(ENGINE_CLAIMS),
        },
    ),
    Entry(
        "nightjar-table-5", PAPER, "table 5",
        "Mean end-to-end latency of every method on the same data sets.",
        "Mean ratios over the same loads.",
        {"cpu": _simulated(SMALL, methods, LATENCY_CLAIMS), **_engine(ENGINE_CLAIMS)},
    ),
    Entry(
        "nightjar-table-6", PAPER, "table 6",
        "The cost of an expansion (the draft's memory becomes KV pages) and a contraction (the draft returns), with a "
        "32B target on two GPUs.",
        "The same operations of the real engine. A contraction includes moving the pages.",
        {
            "cpu": Form(
                (
                    Step(
                        "elastic-110m",
                        ("python", "-m", "benchmarks.nightjar.elastic", "--out", "{here}/elastic.json"),
                        2,
                    ),
                ),
                swaps("elastic-110m"), ELASTIC_CLAIMS, "pages half in use", "elastic.json",
                "A 110M target in f32 on a CPU, where host and device share one memory.",
            ),
            "gpu": Form(
                (Step("elastic-8b", (
                    "python", "-m", "benchmarks.nightjar.elastic", "--params", "8B", "--dtype", "bf16", "--out",
                    "{here}/elastic.json",
                ), 8, gpu=True),),
                swaps("elastic-8b"), ELASTIC_CLAIMS, "pages half in use", "elastic.json",
                "An 8B target in bf16 on one GPU.",
            ),
        },
    ),
)  # fmt: skip
