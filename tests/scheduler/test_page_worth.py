"""Whether KV pages would bring more than the draft, by hand."""

import numpy as np
import pytest

from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.elastic import SLACK, WORTH_MARGIN, PageWorth
from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.stats import StepStats
from adaserve_jax.types import Limits
from tests.scheduler.harness import costs_of, limits_of, request_of


def batch_of(limits: Limits, running: int, waiting: int, **request) -> Batch:
    batch = Batch(limits, "arrival")
    for index in range(running + waiting):
        asked = request_of(f"r{index}", **request)
        batch.queue.add(SequenceState(asked, max_total=30, order_key=0.0, number=index))
        if index < running:
            batch.admit(0.0, None)
    return batch


def worth_of(batch: Batch, acceptance: float = 0.1) -> PageWorth:
    """16 ms a step, whatever its tokens; a level of the draft takes 16 ms too."""
    limits = batch.limits
    samples = costs_of(limits, knee=10**6)
    samples.draft_level_s.update(dict.fromkeys(samples.draft_level_s, 0.016))
    table = LearnedAcceptance(limits.max_depth, limits.max_width)
    table.expected = lambda: np.full((limits.max_depth, limits.max_width), acceptance)  # type: ignore[method-assign]
    return PageWorth(batch, ChainCosts(limits, CostTable(samples, limits), table), StepStats())


LIMITS = limits_of(num_pages=40, extension_pages=20)


@pytest.mark.parametrize(
    ("running", "waiting", "pay"),
    [
        (4, 2, True),  # 6 rows for 4, in steps as long
        (4, 0, False),  # nobody would take them
        (1, 5, False),  # half a request more is none
        (7, 3, True),  # the eighth is the last that may run: 8 for 7 are 1.14
        (8, 3, False),
        (0, 3, False),
    ],
)
def test_more_requests_in_steps_as_long_pay_where_there_are_any(running: int, waiting: int, pay: bool) -> None:
    assert worth_of(batch_of(LIMITS, running, waiting)).pages_pay() == pay


def test_prompts_that_come_with_every_token_leave_less_to_win() -> None:
    """6 rows in 16 ms are 2.67 ms a token, 4 rows 4: 1.5 times. With 6 ms of prompts for each token 1.15 times, with
    12 ms 1.09 times, less than WORTH_MARGIN."""
    for prompt_tokens, pay in [(600, True), (1200, False)]:
        worth = worth_of(batch_of(LIMITS, 4, 2), acceptance=0.0)
        worth._chains.prompt_token_s = 0.001
        worth._stats.prompt_tokens, worth._stats.generation_tokens = prompt_tokens, 100
        assert worth.pages_pay() == pay


def test_against_what_the_draft_brings() -> None:
    """Where levels cost a step each, a chain of one brings 1.9 tokens in two steps, one of four 4.6 in five: less than
    plain steps do. Where they are free, 4.6 tokens a step are more than half as many rows again."""
    batch = batch_of(LIMITS, 4, 2)
    assert worth_of(batch, acceptance=0.9).pages_pay()
    free = worth_of(batch, acceptance=0.9)
    free._chains._cost.level_s = lambda rows, context=None: np.zeros(4)  # type: ignore[method-assign]
    assert not free.pages_pay()


def test_not_while_a_target_needs_more_than_plain_steps_can_be_relied_on_for() -> None:
    for tpot_slo_s, pay in [(SLACK * 0.0161, True), (SLACK * 0.0159, False)]:
        assert worth_of(batch_of(LIMITS, 4, 2, tpot_slo_s=tpot_slo_s)).pages_pay() == pay
    assert WORTH_MARGIN > 1
