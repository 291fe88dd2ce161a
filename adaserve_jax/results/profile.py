"""Profile of a machine and a pair of models: measured times, what follows from them, and where they hold.

`adaserve profile` writes it; an engine starts from it instead of timing, and the simulator takes it as a machine.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.whole_file import SHARED, write_whole
from adaserve_jax.types import CostSamples, Limits

KIND, VERSION = "adaserve profile", 1
FREE_LIMITS = ("num_pages", "extension_pages")
"""Limits that times do not depend on."""
LEAST_S = 1e-6
"""Least time of a level of a search; the difference of two times may be noise."""
LEAST_BASE = 0.25
"""Least fitted time without context, as a share of the least measured one: lines are not trusted beyond that."""
_TIMED = {"verify": 3, "catchup": 3, "search": 4, "switching": 2}
"""Tables of `Timings`, and the number of sizes in a key."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Timings:
    """Seconds of the programs that warm-up and `adaserve profile` time; every row has `context` committed tokens.

    verify: by (bucket tokens, rows, context). catchup: the same, of the draft. search: by (rows, width, depth,
    context). switching: by (lag, rows), from the start of the context until the draft of each row has caught up that
    lag; empty if not measured. typical_context: context at which lines are anchored. context_rows: rows that read their
    context together.
    """

    typical_context: int
    context_rows: int
    verify: dict[tuple[int, int, int], float] = field(default_factory=dict[tuple[int, int, int], float])
    catchup: dict[tuple[int, int, int], float] = field(default_factory=dict[tuple[int, int, int], float])
    search: dict[tuple[int, int, int, int], float] = field(default_factory=dict[tuple[int, int, int, int], float])
    switching: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

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
        place = {"machine": self.machine, "device": self.device, "target": self.target, "draft": self.draft}
        limits = {name: value for name, value in asdict(self.limits).items() if name not in FREE_LIMITS}
        return place | limits | self.settings


@dataclass(frozen=True)
class Profile:
    """Measured times and what follows from them.

    name: name in a simulation. baseline_s: seconds per token of one request alone, through the whole step.
    acceptance: chance that the target takes the draft's first choice; None if not measured. c1, c2: of AdaServe's
    eq. 8 and 9; None if not searched. errors: of the predictions, by kind. proposal: settings that the times suggest.
    serving: factors of verify and draft times while serving, and overhead_s of a step outside them; None if not
    measured.
    """

    name: str
    made_at: str
    commit: str
    package_version: str
    jax_version: str
    identity: Identity
    timings: Timings
    baseline_s: float
    acceptance: float | None = None
    c1: int | None = None
    c2: int | None = None
    errors: dict[str, Any] | None = None
    proposal: dict[str, Any] | None = None
    serving: dict[str, float] | None = None

    def check(self, identity: Identity, where: str) -> None:
        """Raise ConfigError, which names the difference, unless these times hold for `identity`."""
        found = self.identity.difference(identity)
        if found is not None:
            name, ours, theirs = found
            raise ConfigError(
                f"profile {where} does not hold here: {name} is {ours!r} in it, and {theirs!r} now; measure again "
                "with `adaserve profile`, or start without it"
            )


def is_profile(values: Any) -> bool:
    """Return whether parsed JSON is a profile of any version."""
    return isinstance(values, dict) and cast("dict[str, Any]", values).get("kind") == KIND


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile so that no reader sees half of it. Raises ConfigError if it cannot be written."""
    values = {"kind": KIND, "version": VERSION} | asdict(profile)
    values["timings"] = asdict(profile.timings) | {name: _rows(getattr(profile.timings, name)) for name in _TIMED}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
    given: dict[str, Any] = {"serving": None} | values
    del given["kind"], given["version"]
    _check_names(Profile, given, where)
    try:
        _check_names(Identity, given["identity"], where)
        identity, timings = dict(given["identity"]), {"switching": []} | given["timings"]
        _check_names(Timings, timings, where)
        limits = {"extension_pages": 0} | identity["limits"]
        _check_names(Limits, limits, where)
        limits["token_edges"] = tuple(limits["token_edges"])
        identity["limits"] = Limits(**limits)
        for name, size in _TIMED.items():
            timings[name] = _by_key(timings[name], size)
        read = Timings(**timings)
        if len(read.switching) != len({lag for lag, _ in read.switching}) * len({n for _, n in read.switching}):
            raise ValueError("switching must have a time for every lag with every number of rows")
        given |= {"identity": Identity(**identity), "timings": read}
        profile = Profile(**given)
        times = [s for name in _TIMED for s in getattr(read, name).values()]
        if not read.verify or min(times) <= 0 or not profile.baseline_s > 0 or read.context_rows < 1:
            raise ValueError("times must be above 0 seconds, those of verification among them")
        if profile.acceptance is not None and not 0 < profile.acceptance < 1:
            raise ValueError(f"acceptance must be between 0 and 1, got {profile.acceptance!r}")
        if profile.serving is not None and not min(profile.serving[name] for name in ("verify", "draft")) > 0:
            raise ValueError(f"serving must have factors above 0, got {profile.serving!r}")
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"profile {where}: {error}") from error
    return profile


def _rows(table: dict[tuple[int, ...], float]) -> list[list[float]]:
    """Return [*key, seconds] of every entry, in order."""
    return [[*key, seconds] for key, seconds in sorted(table.items())]


def _by_key(rows: list[list[float]], size: int) -> dict[tuple[int, ...], float]:
    if any(len(row) != size + 1 for row in rows):
        raise ValueError(f"a timing must be {size} sizes and its seconds")
    return {tuple(int(each) for each in row[:-1]): float(row[-1]) for row in rows}


def _json(values: dict[str, Any]) -> str:
    """Return indented JSON with one line for each timing."""
    text = json.dumps(values | {"timings": None}, indent=1, allow_nan=False)
    timings = values["timings"]
    lines: list[str] = []
    for name, value in timings.items():
        if name in _TIMED:
            rows = ",\n   ".join(json.dumps(row) for row in value)
            lines.append(f'  "{name}": [\n   {rows}\n  ]' if value else f'  "{name}": []')
        else:
            lines.append(f'  "{name}": {json.dumps(value)}')
    return text.replace('"timings": null', '"timings": {\n' + ",\n".join(lines) + "\n }")


def _check_names(kind: type, values: Any, where: str) -> None:
    names = {field.name for field in fields(kind)}
    if not isinstance(values, dict):
        raise ConfigError(f"profile {where}: expected an object for {kind.__name__}, got {type(values).__name__}")
    wrong = sorted(names ^ set(cast("dict[str, Any]", values)))
    if wrong:
        raise ConfigError(f"profile {where}: field {wrong[0]!r} is {'missing' if wrong[0] in names else 'unknown'}")
