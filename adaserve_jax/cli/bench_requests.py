"""What the options of `adaserve bench` and `adaserve simulate` say about requests: rates, shares, targets, files."""

from __future__ import annotations

import math
from pathlib import Path

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.mixing import as_chat, parse_lengths, with_lengths
from adaserve_jax.workloads.readers import FORMATS
from adaserve_jax.workloads.workload import EXAMPLE, SloTable, Workload, load_workload, parse_slos

TRACE = "trace"
FORMAT_HELP = f"format of the files: {', '.join(FORMATS)}; auto: found out from what they hold"
LENGTHS_HELP = (
    "shorten requests of traces without text: scale=0.05,output=64,context=512, what prompts are multiplied by, most "
    "output tokens, most of both"
)
SLOS_HELP = f"targets by class, ms: {EXAMPLE}, * for requests without any, none for no target"


def read_workload(
    path: Path | None, format: str, slos: str | None, *, max_tokens: int | None = None,
    temperature: float | None = None, lengths: str | None = None, chat: bool = False,
) -> Workload:  # fmt: skip
    """The requests of a bench run; without a path the packaged ones. max_tokens, temperature: of requests that do not
    say. lengths, chat: see their options."""
    workload = load_workload(path, format=format, slos=read_slos(slos), max_tokens=max_tokens, temperature=temperature)
    if lengths is not None:
        workload = with_lengths(workload, parse_lengths(lengths))
    return as_chat(workload) if chat else workload


def read_slos(text: str | None) -> SloTable | None:
    """The table of --slos."""
    return None if text is None else parse_slos(text)


def parse_rate(text: str) -> float | None:
    """A rate in requests per second, or None for "trace"."""
    if text == TRACE:
        return None
    rate = _number(text)
    if not 0 < rate < math.inf:
        raise ConfigError(f"--rates must be numbers above 0 or 'trace', separated by commas, got {text!r}")
    return rate


def parse_share(text: str) -> float:
    """A share from 0 to 1."""
    share = _number(text)
    if not 0 <= share <= 1:
        raise ConfigError(f"--urgent-shares must be numbers from 0 to 1, separated by commas, got {text!r}")
    return share


def parse_slo_scale(text: str) -> float:
    """A multiple of the baseline latency."""
    scale = _number(text)
    if not 0 < scale < math.inf:
        raise ConfigError(f"--slo-scales must be numbers above 0, separated by commas, got {text!r}")
    return scale


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
