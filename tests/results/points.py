"""Made rows, records and samples of measured points, for tests of what reads run folders."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, get_type_hints

from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.samples import Sample
from adaserve_jax.results.schema import SCHEMA_VERSION, ResultRow

SAMPLES = {str: "x", int: 3, float: 0.5, bool: True}
Kind = TypeVar("Kind", ResultRow, RequestRecord, Sample)


def row(**changes: object) -> ResultRow:
    """A result row with something in every column that needs a value."""
    return _made(ResultRow, {"schema_version": SCHEMA_VERSION} | changes)


def record(**changes: object) -> RequestRecord:
    """Likewise, of a finished request."""
    return _made(RequestRecord, {"status": "finished", "token_offsets_s": (0.0, 0.5)} | changes)


def sample(**changes: object) -> Sample:
    """Likewise."""
    return _made(Sample, changes)


def _made(kind: type[Kind], changes: dict[str, Any]) -> Kind:
    hints = get_type_hints(kind)
    values = {f.name: SAMPLES.get(hints[f.name]) for f in dataclasses.fields(kind)}
    return kind(**(values | changes))
