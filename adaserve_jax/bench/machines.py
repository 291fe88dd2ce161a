"""Machines to simulate: what verification and drafting cost there, and how often the target agrees with the draft.

A machine is a JSON file; two are packaged, shaped by the settings that AdaServe published. A measured profile is one
too (`profiled_machine.py`). Imports no jax.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.bench.sim_executor import SwapTimes
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.profile import is_profile
from adaserve_jax.types import CostSamples, Limits

VERSION = 1
PAGE_SIZE = 64


@dataclass(frozen=True)
class Machine:
    """verify_ms: by packed tokens, linear between, whatever the rows. draft_level_ms: of a level, whatever its size.
    token_step: distance of the token edges up to max_batch_tokens. acceptance: of the draft's first choice, by SLO
    class; requests of other classes have the mean of all. swap_ms: expand, contract and load, as of `SwapTimes`, whose
    values stand for those that are missing.
    """

    name: str
    about: str
    verify_ms: dict[int, float]
    draft_level_ms: float
    max_depth: int
    max_width: int
    max_requests: int
    max_tree_tokens: int
    max_batch_tokens: int
    token_step: int
    max_context: int
    acceptance: dict[str, float]
    swap_ms: dict[str, float] = field(default_factory=dict, kw_only=True)

    @property
    def swap_times(self) -> SwapTimes:
        return SwapTimes(**{f"{name}_s": ms / 1e3 for name, ms in self.swap_ms.items()})

    @property
    def baseline_s(self) -> float:
        """Seconds of one token of one request alone."""
        return self.verify_ms[min(self.verify_ms)] / 1e3

    @property
    def offsets(self) -> tuple[int, int]:
        """c1 and c2 of AdaServe's eq. 8 and 9."""
        return 0, 0

    @property
    def overhead_s(self) -> float:
        """Seconds of a step outside draft and verification."""
        return 0.0

    def acceptance_of(self, slo_class: str) -> float:
        return self.acceptance.get(slo_class, sum(self.acceptance.values()) / len(self.acceptance))

    def limits(self, max_requests: int = 0) -> Limits:
        """max_requests: 0 for the machine's own. Pages never run out."""
        requests = max_requests or self.max_requests
        edges = (1, *range(self.token_step, self.max_batch_tokens + 1, self.token_step))
        pages = requests * -(-self.max_context // PAGE_SIZE)
        return Limits(
            max_requests=requests, token_edges=edges, max_tree_tokens=self.max_tree_tokens,
            max_context=self.max_context, page_size=PAGE_SIZE, num_pages=pages, max_depth=self.max_depth,
            max_width=self.max_width,
        )  # fmt: skip

    def samples(self, limits: Limits) -> CostSamples:
        tokens = sorted(self.verify_ms)
        seconds = np.interp(limits.token_edges, tokens, [self.verify_ms[at] / 1e3 for at in tokens])
        verify = {(edge, limits.max_requests): float(s) for edge, s in zip(limits.token_edges, seconds, strict=True)}
        level = self.draft_level_ms / 1e3
        levels = {(limits.max_requests, width): level for width in range(1, self.max_width + 1)}
        return CostSamples(verify, {self.max_batch_tokens: 0.0}, levels)


def packaged_machines() -> list[str]:
    """Their names."""
    return sorted(file.name.removesuffix(".json") for file in _folder().iterdir() if file.name.endswith(".json"))


def load_machine(name: str) -> Machine:
    """A packaged machine by name, or by path a JSON file: a machine, or a profile that `adaserve profile` wrote.

    Raises ConfigError saying what is wrong with it.
    """
    if name in packaged_machines():
        text, where = _folder().joinpath(f"{name}.json").read_text(), name
    else:
        where = str(Path(name))
        try:
            text = Path(name).read_text()
        except OSError as error:
            known = ", ".join(packaged_machines())
            raise ConfigError(f"no machine {name!r}: give {known}, or the path of a JSON file ({error})") from error
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"machine {where}: invalid JSON: {error}") from error
    if is_profile(values):
        from adaserve_jax.bench.profiled_machine import profiled_machine  # which is a Machine

        return profiled_machine(values, where)
    return _machine(values, where)


def _folder() -> Any:
    return files("adaserve_jax.bench").joinpath("data/machines")


def _machine(values: Any, where: str) -> Machine:
    if not isinstance(values, dict) or values.pop("version", None) != VERSION:
        raise ConfigError(f"machine {where}: expected an object of version {VERSION}")
    names = {field.name for field in fields(Machine)}
    wrong = sorted((names ^ set(values)) - {"swap_ms"})
    if wrong:
        raise ConfigError(f"machine {where}: field {wrong[0]!r} is {'missing' if wrong[0] in names else 'unknown'}")
    try:
        values["verify_ms"] = {int(tokens): float(ms) for tokens, ms in values["verify_ms"].items()}
        machine = Machine(**values)
        ok = min(machine.verify_ms.values()) > 0 and len(machine.acceptance) > 0
        ok = ok and all(0 < share < 1 for share in machine.acceptance.values())
        known = [each.name.removesuffix("_s") for each in fields(SwapTimes)]
        swaps_ok = not set(machine.swap_ms) - set(known) and min(astuple(machine.swap_times)) >= 0
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"machine {where}: {error}") from error
    if not ok:
        raise ConfigError(f"machine {where}: times must be above 0, and acceptance between 0 and 1")
    if not swaps_ok:
        raise ConfigError(
            f"machine {where}: swap_ms must have times of at least 0 for some of {', '.join(known)}, got "
            f"{machine.swap_ms}"
        )
    return machine
