"""The bytes that the ledger is told are those that training takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from adaserve_jax.distill.footprint import state_bytes, training_bytes, workspace_bytes
from adaserve_jax.distill.programs import TrainPrograms
from tests.distill.made import SMALL, made_params, workspace_of

of_both = pytest.mark.parametrize("fixture", ["programs", pytest.param("low_rank_programs", marks=pytest.mark.slow)])


@of_both
@pytest.mark.slow
def test_state_is_what_the_arrays_take(fixture: str, request: pytest.FixtureRequest):
    programs: TrainPrograms = request.getfixturevalue(fixture)
    state, base, sums = programs.run("begin", made_params(SMALL, dtype=programs.dtype))
    good = programs.run("begin", made_params(SMALL, dtype=programs.dtype))[0]
    taken = sum(each.nbytes for each in jax.tree.leaves((state, good, base, sums)) if each.ndim)
    assert state_bytes(SMALL, programs.learn, programs.dtype) == taken


@of_both
def test_what_changes_lies_where_it_lay(fixture: str, request: pytest.FixtureRequest):
    """Nothing that stays is there twice while it is replaced, but for a few numbers that are no arrays."""
    programs: TrainPrograms = request.getfixturevalue(fixture)
    for name in ("accumulate", "apply", "copy", "no_sums"):
        analysis = programs.compiled[(name,)].memory_analysis()  # type: ignore[attr-defined]
        assert analysis.alias_size_in_bytes > 0
        assert analysis.output_size_in_bytes - analysis.alias_size_in_bytes < 1024
    state, _, sums = programs.run("begin", made_params(SMALL, dtype=programs.dtype))
    before = [state, programs.run("begin", made_params(SMALL, dtype=programs.dtype))[0], sums]
    places = {each.unsafe_buffer_pointer() for each in jax.tree.leaves(before) if each.size > 16}
    state, good, sums = before
    good = programs.run("copy", state, good)
    state = programs.run("copy", good, state)
    after = [state, good, programs.run("no_sums", sums)]
    assert {each.unsafe_buffer_pointer() for each in jax.tree.leaves(after) if each.size > 16} == places


@of_both
def test_the_workspace_is_not_less_than_what_the_compiler_says_and_not_many_times_it(
    fixture: str, request: pytest.FixtureRequest
):
    """Results of programs counted, where they are beside what stays."""
    programs: TrainPrograms = request.getfixturevalue(fixture)
    estimate = workspace_bytes(SMALL, programs.learn, programs.dtype, programs.num_tokens)
    assert workspace_of(programs) <= estimate <= 4 * workspace_of(programs)


def test_drafts_share_the_workspace(programs: TrainPrograms):
    one, three = (training_bytes(SMALL, programs.learn, jnp.float32, count) for count in (1, 3))
    assert three - one == 2 * state_bytes(SMALL, programs.learn, jnp.float32)
