"""Synthetic acceptance: drafted tokens are accepted by drawn coins, with a chance by depth, instead of by comparison.

A machine can so be measured at a given acceptance without a draft that has it, as by vLLM's `rejection_sample_method`
"synthetic" and the golden acceptance lengths of InferenceX. Imports no jax.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from adaserve_jax.errors import ConfigError

MOST_RATES = 64
OPTION = "synthetic_acceptance"


def acceptance_rates(text: str, max_depth: int) -> tuple[float, ...]:
    """Return the chance that a token at depth 1, 2, ... is accepted where the one above was; 0 beyond the last.

    Args:
        text: LENGTH, the mean number of accepted draft tokens per verification, or the path of a JSON list of chances.
            LENGTH becomes the schedule that vLLM and SGLang use: that many tokens always, and one more with the
            chance of its fraction. So a chain of every length at or above LENGTH has this mean.
        max_depth: the deepest tree.

    Raises ConfigError: neither a number within the depth nor such a file.
    """
    try:
        length = float(text)
    except ValueError:
        return _read_rates(Path(text))
    if not 0 <= length <= max_depth:  # also not a number
        raise ConfigError(
            f"{OPTION} must be from 0 to {max_depth}, the deepest tree (the bonus token is not counted), or the path "
            f"of a JSON file, got {text!r}"
        )
    whole = math.floor(length)
    return (1.0,) * whole + ((length - whole,) if length > whole else ())


def _read_rates(path: Path) -> tuple[float, ...]:
    try:
        rates = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        message = f"{OPTION} must be a number or the path of a JSON file, got {str(path)!r}: {error}"
        raise ConfigError(message) from error
    numbers = isinstance(rates, list) and all(isinstance(each, int | float) for each in rates)
    if not numbers or not 1 <= len(rates) <= MOST_RATES or not all(0 <= each <= 1 for each in rates):
        raise ConfigError(
            f"{OPTION}: {path} must hold a list of 1 to {MOST_RATES} chances from 0 to 1, each of a depth, given that "
            "the token above was accepted"
        )
    return tuple(float(each) for each in rates)


def rates_text(rates: tuple[float, ...]) -> str:
    """Return the rates as rows and responses name them, e.g. "1,1,0.5"."""
    return ",".join(f"{each:g}" for each in rates) or "0"
