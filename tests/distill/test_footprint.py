"""The bytes that the ledger is told are those that training takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from adaserve_jax.distill.footprint import state_bytes, training_bytes, workspace_bytes
from adaserve_jax.distill.programs import TrainPrograms
from tests.distill.made import CONFIG, made_params


@pytest.mark.parametrize("fixture", ["programs", "low_rank_programs"])
def test_state_is_what_the_arrays_take(fixture: str, request: pytest.FixtureRequest):
    programs: TrainPrograms = request.getfixturevalue(fixture)
    state, base, sums = programs.run("begin", made_params(dtype=programs.dtype))
    kept = (state, programs.run("copy", state), base, sums)
    taken = sum(each.nbytes for each in jax.tree.leaves(kept) if each.ndim)
    assert state_bytes(CONFIG, programs.learn, programs.dtype) == taken


def test_the_workspace_is_not_less_than_what_the_compiler_says_and_not_many_times_it(programs: TrainPrograms):
    estimate = workspace_bytes(CONFIG, programs.learn, programs.dtype, programs.num_tokens)
    assert programs.workspace_bytes() <= estimate <= 4 * programs.workspace_bytes()


def test_drafts_share_the_workspace(programs: TrainPrograms):
    one, three = (training_bytes(CONFIG, programs.learn, jnp.float32, count) for count in (1, 3))
    assert three - one == 2 * state_bytes(CONFIG, programs.learn, jnp.float32)
