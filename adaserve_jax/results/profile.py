"""Profile of a machine and a pair of models: measured times, what follows from them, and where they hold.

`adaserve profile` writes it; an engine starts from it instead of timing, and the simulator takes it as a machine.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, TypeAdapter, ValidationError

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.whole_file import SHARED, write_whole
from adaserve_jax.types import CostSamples, Limits, scaled_samples

KIND, VERSION = "adaserve profile", 1
FREE_LIMITS = ("num_pages", "extension_pages")
"""Limits that times do not depend on."""
LEAST_S = 1e-6
"""Least time of a level of a search; the difference of two times may be noise."""
LEAST_BASE = 0.25
"""Least fitted time without context, as a share of the least measured one: lines are not trusted beyond that."""
Key = TypeVar("Key", bound=Hashable)
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _by_sizes(rows: Any) -> dict[Any, Any]:
    try:
        return {tuple(row[:-1]): row[-1] for row in rows}
    except (IndexError, KeyError, TypeError) as error:  # pydantic would pass them on and name no field
        raise ValueError("a table of times must be rows of sizes and their seconds") from error


def _is_grid(table: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    if len(table) != len({lag for lag, _ in table}) * len({rows for _, rows in table}):
        raise ValueError("switching must have a time for every lag with every number of rows")
    return table


AS_ROWS = (
    BeforeValidator(_by_sizes),
    PlainSerializer(lambda table: [[*key, seconds] for key, seconds in sorted(table.items())]),
)
"""Form of a table of times in the file: rows of sizes and seconds."""
ByRows = Annotated[dict[tuple[int, int, int], Seconds], *AS_ROWS]
ByDepth = Annotated[dict[tuple[int, int, int, int], Seconds], *AS_ROWS]
ByLag = Annotated[dict[tuple[int, int], Seconds], *AS_ROWS, AfterValidator(_is_grid)]
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Overhead = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Timings:
    """Seconds of the programs that warm-up and `adaserve profile` time; every row has `context` committed tokens.

    verify: by (bucket tokens, rows, context). catchup: the same, of the draft. search: by (rows, width, depth,
    context). switching: by (lag, rows), from the start of the context until the draft of each row has caught up that
    lag; empty if not measured. typical_context: context at which lines are anchored. context_rows: rows that read their
    context together.
    """

    typical_context: int
    context_rows: Annotated[int, Field(ge=1)]
    verify: Annotated[ByRows, Field(min_length=1)] = field(default_factory=dict[tuple[int, int, int], float])
    catchup: ByRows = field(default_factory=dict[tuple[int, int, int], float])
    search: ByDepth = field(default_factory=dict[tuple[int, int, int, int], float])
    switching: ByLag = field(default_factory=dict[tuple[int, int], float])

    def samples(self) -> CostSamples:
        """Return the samples that the cost table starts from; catch-up with the most rows that were timed."""
        verify = self._lines(((t, r), min(t, r), c, s) for (t, r, c), s in self.verify.items())
        catchup = self._lines(((t, r), min(t, r), c, s) for (t, r, c), s in self.catchup.items())
        most = dict(sorted(catchup))  # of equal tokens the last one stays, which has the most rows
        levels = self._lines(((r, w), r, c, s) for (r, w, c), s in self._levels().items())
        return CostSamples(
            verify_s={key: at for key, (at, _) in verify.items()},
            catchup_s={tokens: catchup[tokens, rows][0] for tokens, rows in most.items()},
            draft_level_s={key: max(at, LEAST_S) for key, (at, _) in levels.items()},
            context=self.typical_context,
            context_rows=self.context_rows,
            verify_per_context_s={key: slope for key, (_, slope) in verify.items()},
            catchup_per_context_s={tokens: catchup[tokens, rows][1] for tokens, rows in most.items()},
            level_per_context_s={key: slope for key, (_, slope) in levels.items()},
            switch_s=dict(self.switching),
        )

    def load(self, context: int, rows: int) -> float:
        """Return the context load of so many rows with the same context."""
        return float(context * -(-rows // self.context_rows))

    def _levels(self) -> dict[tuple[int, int, int], float]:
        """Return the seconds that one more level costs, by (rows, width, context); the first level is the catch-up's.

        With one depth only, the time of the whole call stands for that of a level.
        """
        depths: dict[tuple[int, int, int], list[tuple[int, float]]] = defaultdict(list)
        for (rows, width, depth, context), seconds in self.search.items():
            depths[rows, width, context].append((depth, seconds))
        levels: dict[tuple[int, int, int], float] = {}
        for key, points in depths.items():
            depths_of, seconds_of = zip(*points, strict=True)
            slope = np.polyfit(depths_of, seconds_of, 1)[0] if len(points) > 1 else seconds_of[0]
            levels[key] = max(LEAST_S, float(slope))
        return levels

    def _lines(self, timed: Iterable[tuple[Key, int, int, float]]) -> dict[Key, tuple[float, float]]:
        """Return by key the seconds at the typical context, and the seconds per token of context load.

        timed: (key, rows, context, seconds).
        """
        points: dict[Key, list[tuple[float, float]]] = defaultdict(list)
        typical: dict[Key, float] = {}
        for key, rows, context, seconds in timed:
            points[key].append((self.load(context, rows), seconds))
            typical[key] = self.load(self.typical_context, rows)
        lines: dict[Key, tuple[float, float]] = {}
        for key, each in points.items():
            base, slope = fit_line(*np.array(each).T)
            lines[key] = base + slope * typical[key], slope
        return lines


def fit_line(load: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Return base and slope of least relative squared error, with limits to both.

    The slope is not below 0, and the base not far below the least measured time. load, seconds: f64[N].
    """
    weight = 1.0 / seconds**2
    mean_load, mean_s = np.average(load, weights=weight), np.average(seconds, weights=weight)
    spread = (weight * (load - mean_load) ** 2).sum()
    slope = 0.0 if spread <= 0 else max(0.0, (weight * (load - mean_load) * (seconds - mean_s)).sum() / spread)
    base = mean_s - slope * mean_load
    least = LEAST_BASE * seconds.min()
    if base >= least:
        return float(base), float(slope)
    return float(least), float((weight * load * (seconds - least)).sum() / (weight * load**2).sum())


@dataclass(frozen=True)
class ServingFactors:
    """Times of steps while serving, over the samples, each of which is the least time of a program alone.

    verify, draft: of all steps. overhead_s: mean seconds of a step outside draft and verification.
    verify_by_size: by (bucket tokens, rows), where steps of that size were served; `verify` holds elsewhere.
    overhead_by_kind_s: by (1 if the step drafts, rows); `overhead_s` holds elsewhere.
    """

    verify: Factor
    draft: Factor
    overhead_s: Overhead = 0.0
    verify_by_size: Annotated[dict[tuple[int, int], Factor], *AS_ROWS] = field(
        default_factory=dict[tuple[int, int], float]
    )
    overhead_by_kind_s: Annotated[dict[tuple[int, int], Overhead], *AS_ROWS] = field(
        default_factory=dict[tuple[int, int], float]
    )

    def served(self, samples: CostSamples) -> CostSamples:
        """Return the samples as they are while serving."""
        scaled = scaled_samples(samples, verify=1.0, draft=self.draft)
        by_size = {
            name: {key: s * self.verify_by_size.get(key, self.verify) for key, s in getattr(samples, name).items()}
            for name in ("verify_s", "verify_per_context_s")
        }
        return replace(scaled, **by_size)


@dataclass(frozen=True)
class Identity:
    """Machine, models and settings for which times hold.

    machine: processor, cores, memory. device: as jax names it, and how many. target, draft: `provenance.model_hash`,
    None without a draft. settings: other settings that decide which programs run.
    """

    machine: str
    device: str
    target: str
    draft: str | None
    limits: Limits
    settings: dict[str, Any]

    def difference(self, other: Identity) -> tuple[str, Any, Any] | None:
        """Return the first difference as (name, ours, theirs); None when times hold for both."""
        ours, theirs = self._flat(), other._flat()
        for name in ours | theirs:
            if ours.get(name) != theirs.get(name):
                return name, ours.get(name), theirs.get(name)
        return None

    def _flat(self) -> dict[str, Any]:
        values = asdict(self)
        limits, settings = values.pop("limits"), values.pop("settings")
        return values | {name: value for name, value in limits.items() if name not in FREE_LIMITS} | settings


@dataclass(frozen=True)
class Profile:
    """Measured times and what follows from them.

    name: name in a simulation. baseline_s: seconds per token of one request alone, through the whole step.
    acceptance: chance that the target takes the draft's first choice; None if not measured. c1, c2: of AdaServe's
    eq. 8 and 9; None if not searched. errors: of the predictions, by kind. proposal: settings that the times suggest.
    serving: None if not measured. computed: what the times were computed from, by name; None: they were measured.
    """

    name: str
    made_at: str
    commit: str
    package_version: str
    jax_version: str
    identity: Identity
    timings: Timings
    baseline_s: Seconds
    acceptance: Annotated[float, Field(gt=0, lt=1)] | None = None
    c1: int | None = None
    c2: int | None = None
    errors: dict[str, Any] | None = None
    proposal: dict[str, Any] | None = None
    serving: ServingFactors | None = None
    computed: dict[str, float] | None = None

    def check(self, identity: Identity, where: str) -> None:
        """Raise ConfigError, which names the difference, unless these times hold for `identity`."""
        found = self.identity.difference(identity)
        if found is not None:
            name, ours, theirs = found
            raise ConfigError(
                f"profile {where} does not hold here: {name} is {ours!r} in it, and {theirs!r} now; measure again "
                "with `adaserve profile`, or start without it"
            )


PROFILE = TypeAdapter(Profile)


def is_profile(values: Any) -> bool:
    """Return whether parsed JSON is a profile of any version."""
    return isinstance(values, dict) and cast("dict[str, Any]", values).get("kind") == KIND


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile so that no reader sees half of it. Raises ConfigError if it cannot be written."""
    values = {"kind": KIND, "version": VERSION} | PROFILE.dump_python(profile)
    try:
        write_whole(path, _json(values) + "\n", mode=SHARED)
    except OSError as error:
        raise ConfigError(f"cannot write profile {path}: {error.strerror}; choose another --out") from error


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises ConfigError, which says what is wrong with the file."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read profile {path}: {error.strerror}; make one with `adaserve profile`") from error
    except ValueError as error:
        raise ConfigError(f"profile {path}: invalid JSON: {error}") from error
    return parse_profile(values, str(path))


def parse_profile(values: Any, where: str) -> Profile:
    """Parse a profile. Raises ConfigError, which names the field that is missing, unknown or wrong."""
    if not is_profile(values):
        raise ConfigError(
            f"{where} is no profile: expected an object of kind {KIND!r}; make one with `adaserve profile`"
        )
    if values.get("version") != VERSION:
        raise ConfigError(
            f"profile {where} has version {values.get('version')!r}, and this program reads version {VERSION}; measure "
            "again with `adaserve profile`"
        )
    given = {name: value for name, value in values.items() if name not in ("kind", "version")}
    try:
        return PROFILE.validate_python(given, extra="forbid")
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        at = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"profile {where}: field {at!r} is wrong: {problem['msg']}") from error


def _json(values: dict[str, Any]) -> str:
    """Return indented JSON with one line for each row of a table."""
    with_tables: dict[str, dict[str, Any]] = {name: values[name] for name in ("timings", "serving") if values[name]}
    text = json.dumps(values | dict.fromkeys(with_tables), indent=1, allow_nan=False)
    for part, tables in with_tables.items():
        lines: list[str] = []
        for name, value in tables.items():
            rows = ",\n   ".join(map(json.dumps, cast("list[Any]", value))) if isinstance(value, list) else ""
            lines.append(f'  "{name}": [\n   {rows}\n  ]' if rows else f'  "{name}": {json.dumps(value)}')
        text = text.replace(f'\n "{part}": null', f'\n "{part}": {{\n' + ",\n".join(lines) + "\n }")
    return text
