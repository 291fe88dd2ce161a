"""The workloads that figures are measured on: AdaServe's traces, Azure's, GSM8K, from a folder, or made ones instead.

Made ones have the same names and formats, so that every command takes either.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import make_folder
from adaserve_jax.workloads.readers.length_traces import AZURE_COLUMNS
from adaserve_jax.workloads.reshaping import with_mix, with_slo_scale
from adaserve_jax.workloads.traces import Trace, fluctuating_trace, save_trace
from benchmarks.nightjar.segments import MINUTE_S, poisson_arrivals

RATES = (2.4, 2.8, 3.2, 3.6, 4.0, 4.6)
URGENT = (0.3, 0.6, 0.9)
SCALES = (0.6, 0.8, 1.0, 1.4, 1.6)
PEAK_MIX, PEAK_RATE = 0.6, 4.0
"""Share of urgent requests and rate at which AdaServe's paper holds what it does not vary."""
SPAN_S = 120.0
"""Of a made trace of the sweeps."""
BODIES_RPS = 6.0
"""Rate of the trace whose lengths and targets the made ones have: more requests than any of them."""
MINUTES, MEAN_RPS, SWING = 24, 3.0, 0.8
"""Of the made trace in Azure's format: whole minutes, requests per second, and how far a sinusoid of two periods takes
the rate from its mean."""
LENGTHS = ((6.9, 0.8), (4.9, 0.9))
"""Mean and standard deviation of the logarithm of its prompt and output tokens."""
LONGEST = (4000, 1000)
QUESTIONS = 4000
NAMES = ("Ava", "Ben", "Chloe", "Daniel", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Keiko", "Liam")
THINGS = ("apples", "books", "cards", "eggs", "flowers", "marbles", "pencils", "shells", "stamps", "tickets")
DAYS = ("day", "week", "month")
"""Of made questions: how many, and what their templates name."""


@dataclass(frozen=True)
class Source:
    """What a placeholder of commands stands for. folder: below a folder of data, where it is not there itself. pattern:
    of its files. a_file: whether commands are given the file rather than its folder."""

    folder: str
    pattern: str
    a_file: bool
    what: str
    origin: str


SOURCES = {
    "traces": Source(
        "adaserve-traces", "rate_rps*.jsonl*", False, "AdaServe's traces",
        "the request traces of AdaServe's artifact (github.com/zikun-li/AdaServe-Artifact-Evaluation, Apache-2.0; the "
        "prompts they name have licences of their own), as JSON lines of t_ms, prompt_id, slo_ratio, output_length and "
        "input_length",
    ),
    "azure": Source(
        "azure-2023", "AzureLLMInferenceTrace_conv.csv*", True, "Azure's conversation trace of 2023",
        "AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset (CC BY 4.0), plain or .gz",
    ),
    "gsm8k": Source(
        "gsm8k", "train.jsonl.gz", True, "GSM8K's questions",
        "train.jsonl of github.com/openai/grade-school-math (MIT), compressed by gzip",
    ),
}  # fmt: skip


def find_data(name: str, folder: Path) -> Path:
    """Return what {name} of a command stands for: of `folder`, or of its subfolder. Raises ConfigError saying what it
    is and where it comes from."""
    source = SOURCES[name]
    for place in (folder, folder / source.folder):
        files = sorted(place.glob(source.pattern))
        if files:
            return files[0] if source.a_file else place
    raise ConfigError(
        f"--data: {folder} has no {source.pattern}, nor has its {source.folder}: expected {source.origin}; leave out "
        "--data for a made workload"
    )


def make_data(name: str, folder: Path, *, span_s: float = SPAN_S) -> None:
    """Write made workloads below `folder` where {name} is looked for, unless they are there."""
    place = folder / SOURCES[name].folder
    if place.is_dir():
        return
    scratch = place.with_name(f"{place.name}.new")
    make_folder(scratch)
    if name == "traces":
        for trace_name, trace in made_traces(span_s).items():
            save_trace(trace, scratch / f"{trace_name}.jsonl.gz")
    elif name == "gsm8k":
        write_questions(scratch / SOURCES[name].pattern)
    else:
        _write_azure(scratch / "AzureLLMInferenceTrace_conv.csv")
    scratch.rename(place)


def made_traces(span_s: float, seed: int = 0) -> dict[str, Trace]:
    """By the names that AdaServe's have: Poisson arrivals of made requests over rate, urgent share and SLO scale."""
    bodies = fluctuating_trace(seed=seed, rate_rps=BODIES_RPS)

    def trace(rate_rps: float, urgent: float) -> Trace:
        rest = (1 - urgent) / 2
        mixed = with_mix(bodies, {"code": urgent, "chat": rest, "summarization": rest}, seed)
        return poisson_arrivals(mixed, rate_rps=rate_rps, count=math.ceil(rate_rps * span_s), seed=seed)

    found = {f"rate_rps{rate:g}_ol256": trace(rate, PEAK_MIX) for rate in RATES}
    found |= {f"urgent_prop{share:g}": trace(PEAK_RATE, share) for share in URGENT}
    at_peak = trace(PEAK_RATE, PEAK_MIX)
    return found | {f"scale_slo{scale:.1f}_ol256": with_slo_scale(at_peak, scale) for scale in SCALES}


def _write_azure(path: Path, seed: int = 0) -> None:
    """Write a trace whose rate swings, with lengths drawn as log-normal."""
    rng = np.random.default_rng(seed)
    begin = datetime(2023, 11, 16)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(AZURE_COLUMNS)
        for minute in range(MINUTES):
            rate = MEAN_RPS * (1 + SWING * math.sin(4 * math.pi * minute / MINUTES))
            for at_s in np.sort(rng.uniform(0, MINUTE_S, rng.poisson(rate * MINUTE_S))):
                tokens = (
                    int(np.clip(round(math.exp(mean + spread * rng.standard_normal())), 1, most))
                    for (mean, spread), most in zip(LENGTHS, LONGEST, strict=True)
                )
                at = begin + timedelta(seconds=minute * MINUTE_S + float(at_s))
                writer.writerow([at.strftime("%Y-%m-%d %H:%M:%S.%f"), *tokens])


def write_questions(path: Path, seed: int = 0) -> None:
    """Write maths questions from templates in the format of GSM8K's files, as .gz; the same for the same seed."""
    rng = random.Random(seed)
    found: dict[str, int] = {}
    while len(found) < QUESTIONS:
        question, answer = rng.choice((_bought, _shared, _saved))(rng)
        found[question] = answer
    lines = (json.dumps({"question": q, "answer": f"#### {answer}"}) + "\n" for q, answer in found.items())
    path.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def _bought(rng: random.Random) -> tuple[str, int]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    count, price, paid = rng.randint(2, 20), rng.randint(2, 9), 200
    return (
        f"{name} buys {count} {thing} for ${price} each and pays with ${paid}. How much money does {name} get back?",
        paid - count * price,
    )


def _shared(rng: random.Random) -> tuple[str, int]:
    (name, other), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    each, friends, kept = rng.randint(2, 12), rng.randint(2, 9), rng.randint(1, 30)
    return (
        f"{name} has {each * friends + kept} {thing}. {name} gives {each} of them to each of {friends} friends, one of "
        f"whom is {other}. How many {thing} does {name} have left?",
        kept,
    )


def _saved(rng: random.Random) -> tuple[str, int]:
    name, day = rng.choice(NAMES), rng.choice(DAYS)
    first, more, times = rng.randint(5, 60), rng.randint(2, 15), rng.randint(3, 12)
    return (
        f"{name} has ${first} and saves ${more} every {day}. How many dollars does {name} have after {times} {day}s?",
        first + more * times,
    )
