"""Begin the constraints of a sequence as the engine does: checked, prepared, added."""

from __future__ import annotations

from adaserve_jax.constraints.constraints import Constraints
from adaserve_jax.types import Sequence


def constrain(constraints: Constraints, sequence: Sequence) -> None:
    shared = constraints.check(sequence.sampling, sequence.prompt_ids)
    constraints.prepare(sequence.sampling, shared, lambda: None)
    constraints.add(sequence, shared)
