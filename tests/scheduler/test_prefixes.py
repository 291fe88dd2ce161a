"""What requests find of each other in the prefix cache: beside a dict of token prefixes, and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.errors import IntegrityError, RequestError
from adaserve_jax.types import SamplingParams, Sequence
from tests.scheduler.harness import VOCAB, Run, expected_text, limits_of

PAGE = 8
POLICIES = ["ar", "spec:4", "adaserve", "nightjar"]


def ask(name: str, prompt, tokens: int = 12, **changes) -> Sequence:
    prompt_ids = np.asarray(prompt, np.int32)
    sampling = SamplingParams(max_tokens=tokens)
    return Sequence(name, prompt_ids, sampling, seed=sum(name.encode()), arrival_s=0.0, **changes)


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def serve_alone(run: Run, request: Sequence) -> tuple[int, int]:
    """Run one request to its end; its cached tokens, and the prompt tokens that were computed: those of prefill chunks
    and the one that was fed as the root of its first tree."""
    computed = 0
    run.add(request)
    while request.sequence_id not in run.last:
        first = request.sequence_id not in run.text
        plan, _ = run.step()
        computed += plan.num_prefill_tokens + plan.num_decode * first
    run.clock.advance(1.0)
    return run.last[request.sequence_id].metrics.cached_tokens, computed


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_computes_only_what_follows_the_pages_that_are_known(policy):
    run = Run.of(limits_of(), policy=policy)
    prompt = tokens_of(0, 30)
    assert serve_alone(run, ask("a", prompt)) == (0, 30)
    assert serve_alone(run, ask("b", prompt)) == (24, 6)  # 3 pages of 8
    assert serve_alone(run, ask("c", prompt[:24])) == (16, 8), "the last token's logits are needed"
    assert serve_alone(run, ask("d", prompt[:25])) == (24, 1)
    assert serve_alone(run, ask("e", [*prompt[:9], 5, *prompt[10:]])) == (8, 22)
    assert serve_alone(run, ask("f", prompt[1:])) == (0, 29), "the same tokens at other positions"
    assert serve_alone(run, ask("h", prompt[8:])) == (0, 22), "the same pages at other positions"
    text = [*prompt, *run.text["a"]]  # the last token of an output is never fed
    assert len(text) == 42
    assert serve_alone(run, ask("g", [*text, 7])) == (40, 3)
    stats = run.scheduler.stats
    assert stats.cache_queried_tokens == 30 + 30 + 24 + 25 + 30 + 29 + 22 + 43
    assert stats.cache_hit_tokens == 24 + 16 + 24 + 8 + 40
    assert stats.pages_cached > 0 == stats.pages_used


@pytest.mark.parametrize("policy", POLICIES)
def test_hits_are_those_of_a_dict_of_token_prefixes(policy):
    """Requests one after another, of few texts that begin alike; so the hits are the same under every policy."""
    run = Run.of(limits_of(num_pages=2000), policy=policy, drafts=("other=folder",))
    rng, known = np.random.default_rng(3), set()
    for index in range(15):
        length = int(rng.integers(1, 60))
        prompt = [*tokens_of(int(rng.integers(0, 3)), length)]
        prompt[int(rng.integers(0, length)) :] = tokens_of(9, length)[: int(rng.integers(0, 20))] or [1]
        salt, draft = "ab"[int(rng.integers(0, 2))], int(rng.random() < 0.3)
        request = ask(f"r{index}", prompt, int(rng.integers(1, 30)), cache_salt=salt, draft=draft)
        whole = range(PAGE, len(prompt), PAGE)
        expected = max((end for end in whole if (salt, draft, *prompt[:end]) in known), default=0)
        assert serve_alone(run, request) == (expected, len(prompt) - expected)
        assert run.text[request.sequence_id] == expected_text(request, 256)[0]
        fed = [*prompt, *run.text[request.sequence_id]][:-1]
        known |= {(salt, draft, *fed[:end]) for end in range(PAGE, len(fed) + 1, PAGE)}


@pytest.mark.parametrize("policy", ["spec:4", "adaserve"])
def test_the_draft_finds_its_pages_too(policy):
    run, prompt = Run.of(limits_of(), policy=policy), tokens_of(1, 50)
    serve_alone(run, ask("a", prompt, 20))
    assert known_to_the_draft(run, ask("b", prompt, 20)) == 48


def known_to_the_draft(run: Run, request: Sequence) -> int:
    """The tokens that the draft has when it is first asked for a request."""
    run.add(request)
    while True:
        plan, _ = run.step()
        if plan.draft is not None:
            return int(plan.draft.draft_ctx[0])


def test_a_draft_that_was_away_is_fed_what_the_target_still_has():
    run, prompt = Run.of(limits_of(), policy="spec:4"), tokens_of(1, 50)
    serve_alone(run, ask("a", prompt))
    run.scheduler.batch.forget_draft()
    run.executor.kv.drop_draft()
    run.add(ask("b", prompt, 30))
    fed = 0
    while "b" not in run.last:
        plan, _ = run.step()
        fed += 0 if plan.draft is None else int(plan.draft.catchup_counts.sum())
    assert run.last["b"].metrics.cached_tokens == 48
    assert fed >= 50
    assert serve_alone(run, ask("c", prompt, 20))[0] == 48
    assert known_to_the_draft(run, ask("d", prompt, 20)) == 48


def test_requests_that_run_together_share_pages():
    run, prompt = Run.of(limits_of(num_pages=16, max_context=64), policy="ar"), tokens_of(2, 40)
    run.add(ask("a", prompt, 20))
    run.step()
    for name in "bcd":
        run.add(ask(name, prompt, 20))
    run.step()
    assert run.scheduler.stats.running == 4, "4 times 5 pages are more than 16"
    assert run.scheduler.stats.pages_used == 4 + 5, "the same four, and one of its own each; the first one grew"
    run.serve([])
    assert [run.last[name].metrics.cached_tokens for name in "abcd"] == [0, 32, 32, 32]
    assert all(run.text[name] == expected_text(ask(name, prompt, 20), 64)[0] for name in "abcd")


@pytest.mark.parametrize("idle", [0, 4, 8])
def test_idle_pages_that_are_taken_are_not_free_for_others(idle):
    """16 pages. One request runs with 6 of them (and may need one more), `idle` of the others are known: a prompt of 9
    pages whose first `idle` are those fits, one of 10 does not."""
    for pages in (9, 10):
        run = Run.of(limits_of(num_pages=16, max_context=128), policy="ar")
        prompt = tokens_of(5, 8 * pages)
        if idle:
            serve_alone(run, ask("gone", prompt[: 8 * idle], 1))
        run.add(ask("runs", tokens_of(6, 45), 60))
        run.step()
        assert run.scheduler.stats.pages_cached == idle
        run.add(ask("asks", prompt, 8))
        run.step()
        assert run.scheduler.stats.running == (2 if pages == 9 else 1)


def test_a_preempted_request_finds_its_own_pages():
    """By one of higher priority, which has the only place until it ends."""
    run, prompt = Run.of(limits_of(max_requests=1), policy="priority", draft=None), tokens_of(4, 30)
    run.add(ask("a", prompt, 40, priority=1))
    while len(run.text.get("a", [])) < 15:
        run.step()
    run.add(ask("b", tokens_of(5, 3), 1))
    while "b" not in run.last:
        run.step()
    plan, _ = run.step()
    assert plan.ctx_len.tolist() == [40]  # of 45 tokens, 44 of them computed before
    assert plan.num_prefill_tokens == 5
    run.serve([])
    assert run.text["a"] == expected_text(ask("a", prompt, 40), 256)[0]
    assert run.last["a"].metrics.cached_tokens == 0, "of the first admission"
    assert run.scheduler.stats.cache_queried_tokens == 30 + 3


def test_off_nothing_is_kept():
    run, prompt = Run.of(limits_of(), policy="spec:2", prefix_cache=False), tokens_of(0, 30)
    assert [serve_alone(run, ask(name, prompt)) for name in "ab"] == [(0, 30), (0, 30)]
    stats = run.scheduler.stats
    assert (stats.cache_queried_tokens, stats.cache_hit_tokens, stats.pages_cached) == (0, 0, 0)
    assert stats.pages_used == 0


def test_a_wrong_hit_is_seen_by_the_simulated_machine():
    """The test's own teeth: a request whose pages hold another text fails at its first step."""
    run, pages = Run.of(limits_of(), policy="ar"), {}
    for name, seed in (("a", 0), ("b", 1)):
        run.add(ask(name, tokens_of(seed, 30)))
        plan, _ = run.step()
        pages[name] = plan.page_table[0, :3].copy()
        run.serve([])
    run.executor.kv.move_pages(pages["b"], pages["a"])
    run.add(ask("c", tokens_of(0, 30)))
    with pytest.raises(IntegrityError, match="not its own"):
        run.step()


def test_the_salt_of_a_request_is_kept_where_its_target_is_given_up():
    request = replace(ask("a", tokens_of(0, 30), cache_salt="x"), tpot_slo_s=1e-9)
    run = Run.of(limits_of(), policy="adaserve")
    serve_alone(run, request)
    assert serve_alone(run, replace(request, sequence_id="b", cache_salt=""))[0] == 0
    assert serve_alone(run, replace(request, sequence_id="c"))[0] == 24


@pytest.mark.parametrize(("cached", "salt", "scored"), [(0, "", False), (1, "", False), (1, "x", False), (1, "", True)])
def test_a_ttft_target_is_judged_by_what_is_not_cached(cached: int, salt: str, scored: bool) -> None:
    """A step of up to 16 tokens takes 16 ms: 160 tokens take ten, and four of them one."""
    run = Run.of(limits_of(), policy="ar", infeasible_slo="refuse")
    prompt = tokens_of(0, 164)
    if cached:
        serve_alone(run, ask("before", prompt))
    asked = ask("a", prompt, tokens=2, ttft_slo_s=0.04, cache_salt=salt)
    asked = replace(asked, sampling=replace(asked.sampling, prompt_logprobs=0 if scored else None))
    if cached and not salt and not scored:
        assert serve_alone(run, asked) == (160, 4)
        assert run.last["a"].metrics.slo_feasible
    else:
        with pytest.raises(RequestError, match=r"slo_ttft_ms must be at least .* ms, which is what"):
            run.add(asked)
