"""Which of several drafts is each row's: said in plans where there are several, and only there."""

from __future__ import annotations

import pytest

from adaserve_jax.errors import RequestError
from tests.scheduler.harness import Run, limits_of, request_of


def test_plans_say_which_draft_is_each_rows() -> None:
    run = Run.of(limits_of(), policy="spec:2", drafts=("code=folder", "maths=folder"))
    chosen = {"a": 2, "b": 0, "c": 1, "d": 2}
    for name, draft in chosen.items():
        run.add(request_of(name, prompt=30 if name == "d" else 5, tokens=9 + len(name) * draft, draft=draft))
    seen = set()
    while run.scheduler.has_work:
        slots = {state.slot: state.sequence.sequence_id for state in run.scheduler.batch.running}
        plan, _ = run.step()
        slots |= {state.slot: state.sequence.sequence_id for state in run.scheduler.batch.running}
        if plan.draft is not None:
            found = plan.draft.drafts.tolist()
            assert found == [chosen[slots[slot]] for slot in plan.slots.tolist()]
            seen.add(tuple(found))
    assert len(seen) > 1


def test_with_one_draft_plans_say_nothing() -> None:
    run = Run.of(limits_of(), policy="spec:2")
    run.add(request_of("a"))
    drafted = 0
    while run.scheduler.has_work:
        plan, _ = run.step()
        assert plan.draft is None or plan.draft.drafts is None
        drafted += plan.draft is not None
    assert drafted


@pytest.mark.parametrize("draft", [-1, 2])
def test_a_draft_that_is_not_loaded_is_refused(draft: int) -> None:
    run = Run.of(limits_of(), policy="spec:2", drafts=("code=folder",))
    with pytest.raises(RequestError, match=f"draft must be from 0 to 1, by index, got {draft}"):
        run.scheduler.add(request_of("a", draft=draft))
