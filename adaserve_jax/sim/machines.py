"""Machines to simulate: their costs of verification and drafting, and the acceptance of their draft.

A machine is a JSON file shaped by published settings, or a profile that was measured or computed; both kinds are
packaged.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.profile import Profile, ServingFactors, is_profile, parse_profile
from adaserve_jax.scheduler.cost_model import bucket_of
from adaserve_jax.sim.executor import ElasticTimes
from adaserve_jax.sim.text import CHOICE_DECAY
from adaserve_jax.types import CostSamples, Limits

VERSION = 1
PAGE_SIZE = 64


@dataclass(frozen=True)
class Machine:
    """A machine with times by tokens alone.

    verify_ms: by packed tokens, linear between them, for any number of rows. draft_level_ms: of a level of any size.
    token_step: distance of the token edges up to max_batch_tokens. acceptance: of the draft's first choice, by SLO
    class; requests of other classes have the mean of all. choice_decay: as `decay` of `text.search`. swap_ms: `expand`,
    `contract` and `load` of `ElasticTimes`, which fills in missing ones.
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
    choice_decay: float = field(default=CHOICE_DECAY, kw_only=True)
    swap_ms: dict[str, float] = field(default_factory=dict, kw_only=True)

    @property
    def elastic_times(self) -> ElasticTimes:
        return ElasticTimes(**{f"{name}_s": ms / 1e3 for name, ms in self.swap_ms.items()})

    @property
    def baseline_s(self) -> float:
        """Seconds per token of one request alone."""
        return self.verify_ms[min(self.verify_ms)] / 1e3

    @property
    def offsets(self) -> tuple[int, int]:
        """The offsets c1 and c2 of AdaServe's eq. 8 and 9."""
        return 0, 0

    def overhead_s(self, drafts: bool, rows: int) -> float:
        """Return the seconds of a step outside draft and verification."""
        return 0.0

    def acceptance_of(self, slo_class: str) -> float:
        return self.acceptance.get(slo_class, sum(self.acceptance.values()) / len(self.acceptance))

    def limits(self, max_requests: int = 0) -> Limits:
        """Return limits in which pages never run out. max_requests: 0 takes the machine's own."""
        requests = max_requests or self.max_requests
        edges = tuple(sorted({1, *range(self.token_step, self.max_batch_tokens + 1, self.token_step)}))
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
    """Return the names of the packaged machines."""
    return sorted(file.name.removesuffix(".json") for file in _folder().iterdir() if file.name.endswith(".json"))


def load_machine(name: str) -> Machine:
    """Load a packaged machine by name, or a JSON file by path: a machine, or a profile of `adaserve profile`.

    Raises ConfigError when there is none or the file is not valid.
    """
    if name in packaged_machines():
        text, where = _folder().joinpath(f"{name}.json").read_text(), name
    else:
        where = str(Path(name))
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            known = ", ".join(packaged_machines())
            raise ConfigError(f"no machine {name!r}: give {known}, or the path of a JSON file ({error})") from error
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"machine {where}: invalid JSON: {error}") from error
    if is_profile(values):
        return ProfiledMachine.of(parse_profile(values, where), where)
    return _machine(values, where)


def _folder() -> Any:
    return files("adaserve_jax.sim").joinpath("data/machines")


def _is_size(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _machine(values: Any, where: str) -> Machine:
    if not isinstance(values, dict) or values.pop("version", None) != VERSION:
        raise ConfigError(f"machine {where}: expected an object of version {VERSION}")
    names = {field.name for field in fields(Machine)}
    wrong = sorted((names ^ set(values)) - {"choice_decay", "swap_ms"})
    if wrong:
        raise ConfigError(f"machine {where}: field {wrong[0]!r} is {'missing' if wrong[0] in names else 'unknown'}")
    try:
        values["verify_ms"] = {int(tokens): float(ms) for tokens, ms in values["verify_ms"].items()}
        machine = Machine(**values)
        sizes = ("max_requests", "max_tree_tokens", "max_batch_tokens", "token_step", "max_context")
        wrong = next((each for each in sizes if not _is_size(getattr(machine, each))), None)
        if wrong is not None:
            raise ConfigError(f"machine {where}: {wrong} must be an integer above 0, got {getattr(machine, wrong)!r}")
        wrong = next((each for each in ("max_depth", "max_width") if not _is_size(getattr(machine, each), 0)), None)
        if wrong is not None:
            raise ConfigError(
                f"machine {where}: {wrong} must be an integer, 0 or above, got {getattr(machine, wrong)!r}"
            )
        if machine.max_batch_tokens % machine.token_step:
            raise ConfigError(
                f"machine {where}: max_batch_tokens must be a multiple of token_step, got "
                f"{machine.max_batch_tokens} and {machine.token_step}"
            )
        if max(machine.verify_ms) < machine.max_batch_tokens:
            raise ConfigError(
                f"machine {where}: verify_ms must reach max_batch_tokens, {machine.max_batch_tokens}, got a time of "
                f"{max(machine.verify_ms)} tokens at most"
            )
        ok = min(machine.verify_ms.values()) > 0 and len(machine.acceptance) > 0
        ok = ok and (machine.draft_level_ms > 0 or not machine.max_depth)
        ok = ok and all(0 < share < 1 for share in machine.acceptance.values())
        if not 0 < machine.choice_decay <= 1:
            raise ConfigError(
                f"machine {where}: choice_decay must be above 0 and at most 1, got {machine.choice_decay!r}"
            )
        known = [each.name.removesuffix("_s") for each in fields(ElasticTimes)]
        swaps_ok = not set(machine.swap_ms) - set(known) and min(astuple(machine.elastic_times)) >= 0
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


CLASS = "default"


@dataclass(frozen=True)
class ProfiledMachine(Machine):
    """A measured profile as a machine: its times by tokens, rows and context, and its own limits.

    verify_ms and draft_level_ms are of one row at the typical context, for readers; steps cost what `costs` says.
    """

    measured_limits: Limits
    costs: CostSamples
    measured_baseline_s: float
    searched_offsets: tuple[int, int]
    serving: ServingFactors

    @classmethod
    def of(cls, profile: Profile, where: str) -> ProfiledMachine:
        """Build the machine. Raises ConfigError when a profile with a draft has no acceptance."""
        limits, costs = profile.identity.limits, profile.timings.samples()
        if profile.acceptance is None and limits.max_depth:
            raise ConfigError(
                f"profile {where} has no acceptance, which a simulation draws from; measure it with more seconds of "
                "`adaserve profile --check-seconds`, or give it as `adaserve profile --acceptance`"
            )
        rows = min(rows for _, rows in costs.verify_s)
        levels = [seconds for _, seconds in sorted(costs.draft_level_s.items())]
        return cls(
            name=profile.name,
            about=f"{profile.identity.machine}; {profile.identity.device}, "
            f"{'measured' if profile.computed is None else 'computed, not measured,'} {profile.made_at}",
            verify_ms={tokens: s * 1e3 for (tokens, r), s in costs.verify_s.items() if r == rows},
            draft_level_ms=levels[0] * 1e3 if levels else 0.0,
            max_depth=limits.max_depth,
            max_width=limits.max_width,
            max_requests=limits.max_requests,
            max_tree_tokens=limits.max_tree_tokens,
            max_batch_tokens=limits.max_tokens,
            token_step=0,
            max_context=limits.max_context,
            acceptance={CLASS: profile.acceptance or 0.5},  # without a draft nothing is drawn
            measured_limits=limits,
            costs=costs,
            measured_baseline_s=profile.baseline_s,
            searched_offsets=(profile.c1 or 0, profile.c2 or 0),
            serving=profile.serving or ServingFactors(1.0, 1.0),
        )

    @property
    def baseline_s(self) -> float:
        """The measured baseline latency, of a whole step."""
        return self.measured_baseline_s

    @property
    def offsets(self) -> tuple[int, int]:
        """The offsets of the profile."""
        return self.searched_offsets

    def limits(self, max_requests: int = 0) -> Limits:
        """Return the measured limits. max_requests: 0 takes the machine's own; never more than were measured."""
        own = self.measured_limits
        return replace(own, max_requests=min(max_requests or own.max_requests, own.max_requests))

    def samples(self, limits: Limits) -> CostSamples:
        """Return the measured times, multiplied by what serving adds. limits: of this machine."""
        return self.serving.served(self.costs)

    def overhead_s(self, drafts: bool, rows: int) -> float:
        """Return the seconds of such a step outside both models, measured while serving."""
        by_kind = self.serving.overhead_by_kind_s
        return by_kind.get((int(drafts), self._timed_rows[bucket_of(self._timed_rows, rows)]), self.serving.overhead_s)

    @cached_property
    def _timed_rows(self) -> list[int]:
        return sorted({rows for _, rows in self.costs.verify_s})
