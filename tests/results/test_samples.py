"""What is counted in a sample is counted from the point's start; how things are is as they are."""

from adaserve_jax.results.samples import Sample
from adaserve_jax.stats import StepStats


def test_counts_are_from_the_start_and_gauges_as_they_are():
    since = StepStats(
        steps=10, generation_tokens=40, verify_s=1.5, running=3, elastic_moves={"expand": 1}, preemptions=2
    )
    now = StepStats(
        steps=15, spec_steps=4, generation_tokens=52, draft_tokens=20, accepted_tokens=7, preemptions=5, verify_s=2.25,
        elastic_moves={"expand": 2, "contract": 1}, running=2, waiting=6, pages_used=8, pages_total=9, last_depth=3,
        last_width=2, last_verified_tree_tokens=16, draft_resident=True,
    )  # fmt: skip
    made = Sample.of(now, since, run_id="r", point="p", t_s=0.5)
    counted = (made.steps, made.spec_steps, made.generation_tokens, made.draft_tokens, made.accepted_tokens)
    assert counted == (5, 4, 12, 20, 7)
    assert (made.preemptions, made.swaps, made.verify_s, made.plan_s) == (3, 2, 0.75, 0.0)
    assert (made.running, made.waiting, made.pages_used, made.pages_total) == (2, 6, 8, 9)
    assert (made.depth, made.width, made.budget, made.draft_resident) == (3, 2, 16, True)
    assert (made.run_id, made.point, made.t_s) == ("r", "p", 0.5)
