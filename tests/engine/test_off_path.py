"""With speculation off, a real engine runs one program pair a step and waits once, draft or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.engine.thread_engine import LocalEngine


class Watched:
    """A result on the device that notes who fetches it."""

    def __init__(self, array: Any, log: list[str]):
        self._array = array
        self._log = log

    def copy_to_host_async(self) -> None:
        self._log.append("copy")
        self._array.copy_to_host_async()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._log.append("wait")
        return np.asarray(self._array)


def test_a_step_is_one_run_of_the_target_and_one_wait(
    demo_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, log = demo_engine.executor, []
    assert executor.local_drafter is not None
    run = executor.target.run

    def noted(step: Any, amend: Any) -> Any:
        log.append("run")
        assert amend is None
        result = run(step, amend)
        return result._replace(outcome=Watched(result.outcome, log))

    monkeypatch.setattr(executor.target, "run", noted)
    monkeypatch.setattr(executor.local_drafter, "propose", lambda plan: pytest.fail("the draft was called"))
    monkeypatch.setattr(executor.local_drafter.model, "run", lambda step: pytest.fail("the draft ran"))
    demo_engine.set_policy("off")
    try:
        before = demo_engine.stats().scheduler.steps
        params = [SamplingParams(max_tokens=20, temperature=0.8, seed=seed, ignore_eos=True) for seed in range(6)]
        outputs = LLM.over(demo_engine).generate(["def add(a, b):\n" * (seed + 1) for seed in range(6)], params)
        steps = demo_engine.stats().scheduler.steps - before
        assert [len(output.token_ids) for output in outputs] == [20] * 6
        assert steps >= 20 and log == ["run", "copy", "wait"] * steps
        assert demo_engine.stats().scheduler.draft_s == 0
    finally:
        demo_engine.set_policy("adaserve")
