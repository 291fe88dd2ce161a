"""How a checkpoint's makers want tokens drawn, from generation_config.json. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.settings import Settings, read_json
from adaserve_jax.types import SamplingParams


@dataclass(frozen=True)
class GenerationDefaults:
    """Values that stand in where a request gives none; None: the checkpoint does not say. temperature 0 is greedy,
    which is what an explicit `do_sample: false` means; top_k 0 is off."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> GenerationDefaults:
        """Read generation_config.json; without one nothing is set. Raises CheckpointError naming a malformed value."""
        path = Path(folder) / "generation_config.json"
        if not path.exists():
            return cls()
        given = Settings(read_json(path), path)
        if given.get("do_sample") is False:
            return cls(temperature=0.0)
        return cls(
            temperature=_number(given, "temperature", 100.0),
            top_p=_number(given, "top_p", 1.0),
            top_k=_top_k(given),
            min_p=_number(given, "min_p", 1.0),
        )

    def given(self) -> dict[str, Any]:
        """The values that the checkpoint sets, by the names of `SamplingParams`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def sampling_params(self) -> SamplingParams:
        """`SamplingParams` for a request that brings none."""
        return SamplingParams(**self.given())


def _number(given: Settings, name: str, most: float) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= most:
        raise given.wrong(name, value, f"a number from 0 to {most:g}")
    return float(value)


def _top_k(given: Settings) -> int | None:
    value = given.get("top_k")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{given.path}: top_k must be an integer, got {value!r}")
    return max(0, value)
