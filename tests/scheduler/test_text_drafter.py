"""Merging of candidate trees against sets of paths, and what the scheduler does with trees of text already seen."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.controllers.base import Load
from adaserve_jax.scheduler.controllers.joint import JointController
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.elastic import ElasticRule
from adaserve_jax.scheduler.objective import Objective
from adaserve_jax.scheduler.policies import ABLATIONS, POLICIES, find_policy, longest_chain, policy_of, sources_of
from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.scheduler.text_drafter import TextDrafter, compile_kernels, merge
from adaserve_jax.suffix import kernels
from adaserve_jax.suffix.source import SuffixSource
from adaserve_jax.types import CandidateTrees, Sequence
from tests.scheduler.harness import Run, costs_of, limits_of, request_of
from tests.slow import slow_after

DEPTH, WIDTH = 3, 2
chances = st.floats(0.05, 1.0)


def trees_of(nodes: dict[tuple[int, ...], float]) -> CandidateTrees:
    """One row of candidates in beam order: the chance of each path's last token given the path before it."""
    columns = DEPTH * WIDTH
    token, parent = np.zeros((1, columns), np.int32), np.full((1, columns), -1, np.int32)
    log_f, place = np.full((1, columns), -np.inf, np.float32), {(): -1}
    f = {(): 0.0}
    for path in sorted(nodes, key=lambda path: (len(path), path)):
        taken = sum(len(other) == len(path) for other in place)
        if path[:-1] not in place or taken == WIDTH:
            continue
        column = place[path] = (len(path) - 1) * WIDTH + taken
        f[path] = f[path[:-1]] + math.log(nodes[path])
        token[0, column], parent[0, column], log_f[0, column] = path[-1], place[path[:-1]], f[path]
    return CandidateTrees(token, parent, log_f, np.repeat(np.arange(1, DEPTH + 1, dtype=np.int32), WIDTH))


def paths_of(trees: CandidateTrees) -> dict[tuple[int, ...], tuple[int, float]]:
    """Column and log f of every path of the first row."""
    found: dict[int, tuple[int, ...]] = {-1: ()}
    for column in np.flatnonzero(trees.log_f[0] > -np.inf).tolist():
        found[column] = (*found[int(trees.parent[0, column])], int(trees.token[0, column]))
    return {path: (column, float(trees.log_f[0, column])) for column, path in found.items() if path}


paths = st.dictionaries(st.lists(st.integers(1, 3), min_size=1, max_size=DEPTH).map(tuple), chances, max_size=12)


@given(paths, paths)
def test_merging_unites_the_paths_and_takes_the_larger_chance(one: dict, other: dict) -> None:
    drafted, proposed = trees_of(one), trees_of(other)
    merged = merge(drafted, proposed)
    mine, theirs, both = paths_of(drafted), paths_of(proposed), paths_of(merged.candidates)
    assert set(both) == set(mine) | set(theirs)
    for path, (column, log_f) in both.items():
        expected = 0.0
        for end in range(1, len(path) + 1):
            known = [side[path[:end]] for side in (mine, theirs) if path[:end] in side]
            before = [side[path[: end - 1]][1] if end > 1 else 0.0 for side in (mine, theirs) if path[:end] in side]
            expected += max(own[1] - above for own, above in zip(known, before, strict=True))
        assert log_f == pytest.approx(expected, abs=1e-4)
        assert merged.candidates.depth[column] == len(path)
        assert (column < merged.num_drafted) == (path in mine)
        assert merged.text_column[0, column] == (theirs[path][0] if path in theirs else -1)


def drafter_of(limits) -> tuple[TextDrafter, Batch]:
    batch = Batch(limits, "arrival")
    source = SuffixSource(limits.max_requests, limits.suffix_depth, kept_tokens=256)
    return TextDrafter(batch, LearnedAcceptance(limits.max_depth, limits.max_width), source), batch


def start(batch: Batch, name: str, prompt: list[int], salt: str = "", tokens: int = 40) -> SequenceState:
    """A running sequence whose prompt is computed."""
    sequence = request_of(name, prompt=len(prompt), tokens=tokens)
    object.__setattr__(sequence, "prompt_ids", np.array(prompt, np.int32))
    object.__setattr__(sequence, "cache_salt", salt)
    state = SequenceState(sequence, max_total=len(prompt) + tokens, order_key=0.0, number=len(batch.running))
    batch.queue.add(state)
    batch.admit(0.0, None)
    state.num_computed = len(prompt) - 1
    return state


def test_a_row_holds_the_pages_of_its_nodes_or_loses_those_that_do_not_fit() -> None:
    prompt = [1, 2, 3, 4] * 4  # two whole pages of 8
    for pages, deepest in ((8, 8), (2, 0)):
        drafter, batch = drafter_of(limits_of(max_depth=0, max_width=0, suffix_depth=8, num_pages=pages))
        state = start(batch, "one", prompt, tokens=pages * 8 - 16 or 1)
        trees = drafter.propose(np.array([state.slot]), np.array([20]))
        found = 0 if trees is None else int(trees.candidates.depth[trees.candidates.log_f[0] > -np.inf].max(initial=0))
        assert found == deepest
        assert state.num_tokens + found <= state.num_pages * 8
        batch.check_integrity()


def test_no_layout_of_a_source_s_arrays_compiles_a_kernel() -> None:
    compile_kernels()
    drafted, before = trees_of({(1,): 0.5, (1, 2): 0.5}), compiled()
    for parent in (np.asfortranarray(drafted.parent), np.broadcast_to(drafted.parent, drafted.parent.shape)):
        merge(drafted, replace(drafted, parent=parent))
    assert compiled() == before


def test_a_row_covered_by_its_text_needs_no_draft() -> None:
    drafter, batch = drafter_of(limits_of(suffix_depth=16))
    certain, unsure = start(batch, "certain", [1, 2, 3, 4, 5, 6, 7, 8] * 6), start(batch, "unsure", [1, 2, 9, 1, 2])
    trees = drafter.propose(np.array([certain.slot, unsure.slot]), np.array([30, 30]))
    assert trees is not None and trees.covered.tolist() == [True, False]


def test_the_choice_counts_what_text_brings_before_it_drafts() -> None:
    """A long certain text is verified without a draft; without candidates of text the draft is searched."""
    limits = limits_of(suffix_depth=16)
    cost = CostTable(costs_of(limits), limits)
    joint = JointController(limits, cost, LearnedAcceptance(4, 4), Objective())
    nothing = joint.decide(Load.of_one())
    assert nothing.depth > 0
    certain = np.full((1, 16), 0.98).cumprod(axis=1)
    load = Load(
        np.zeros(1), np.ones(1, np.int64), np.ones(1, bool), num_prefill=0, prefill_tokens=0, wait_ratio=0.0,
        suffix_f=certain,
    )  # fmt: skip
    decision = joint.decide(load)
    assert decision.depth == 0 and decision.tree_token_cap > 16
    assert joint.weigh(load).choices.value[0].max() > joint.weigh(Load.of_one()).choices.value.max()


def test_sources_are_those_of_the_name_else_the_configuration_else_the_policy() -> None:
    for policy, sources, expected in (
        ("adaserve", "auto", "suffix+model"), ("adaserve", "model", "model"), ("adaserve@none", "suffix", "none"),
        ("spec:2", "auto", "model"), ("spec:2@suffix", "auto", "suffix"), ("nightjar", "suffix+model", "suffix+model"),
    ):  # fmt: skip
        config = EngineConfig(policy=policy, draft_sources=sources)
        assert sources_of(config, find_policy(policy, 4)[0]) == expected
    with pytest.raises(ConfigError, match="drafts from text already seen, but draft_sources is 'model'"):
        sources_of(EngineConfig(policy="spec:2@suffix", draft_sources="model"), find_policy("spec:2", 4)[0])
    assert longest_chain(EngineConfig(policy="spec:4@suffix", draft=None), 0, 16) == EngineConfig.max_depth
    assert longest_chain(EngineConfig(policy="spec:4", draft=None), 0, 16) == 0
    with pytest.raises(ConfigError, match="after the @ of a policy may stand none, model, suffix, suffix"):
        find_policy("adaserve@text", 4)
    assert POLICIES["adaserve"].sources == "suffix+model"


def twice(load: list[Sequence]) -> list[Sequence]:
    """Return the requests, and again a minute later, when their texts are known."""
    again = [replace(each, sequence_id=f"{each.sequence_id}-again", arrival_s=each.arrival_s + 60.0) for each in load]
    return [*load, *again]


@pytest.mark.parametrize("name", slow_after(10, [*POLICIES, *ABLATIONS]))
def test_every_policy_drafts_from_text_where_there_is_no_draft(name: str) -> None:
    limits = limits_of(max_depth=0, max_width=0, suffix_depth=8)
    run = Run.of(limits, policy=f"{name.replace('<k>', '3')}@suffix", draft=None)
    load = twice([request_of(f"{index}", tokens=30, tpot_slo_s=0.014) for index in range(6)])
    run.serve(load)
    assert {request.sequence_id for request in load} == run.last.keys()
    policy, _ = find_policy(name.replace("<k>", "3"), 8)
    assert (run.scheduler.totals.suffix_tokens > 0) == (policy.uses_draft and name != "off")


@pytest.mark.parametrize("name", ["spec:4@suffix", "dspark:4@suffix"])
def test_a_chain_longer_than_text_proposes_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match="needs max_depth and suffix_depth of at least 4, but one is 3"):
        policy_of(EngineConfig(policy=name, suffix_depth=3))
    with pytest.raises(ConfigError, match="needs max_depth and suffix_depth of at least 4, but one is 3"):
        Run.of(limits_of(suffix_depth=3), policy=name)


@pytest.mark.parametrize("named", [{"draft_sources": "model"}, {"synthetic_acceptance": "1.5"}])
def test_sources_that_exclude_each_other_are_refused_before_anything_is_loaded(named: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"texts? already seen"):
        policy_of(EngineConfig(policy="adaserve@suffix", **named))


def test_where_text_is_the_draft_a_draft_that_is_loaded_costs_nothing_and_may_leave() -> None:
    load, found = twice([request_of(f"{index}", tokens=30) for index in range(6)]), []
    for loaded in (True, False):
        depths = {} if loaded else {"max_depth": 0, "max_width": 0}
        run = Run.of(limits_of(suffix_depth=8, **depths), policy="turbospec@suffix", max_depth=4, max_width=4)
        run.serve(load)
        costs = run.scheduler.costs
        assert costs.catchup_s(8) == 0.0 and not costs.level_s(4).any()
        assert costs.overhead_s(drafting=True) == costs.overhead_s(drafting=False)
        found.append((run.text, run.steps, run.scheduler.totals.suffix_tokens))
    assert found[0] == found[1] and found[0][2] > 0


@pytest.mark.parametrize("name", ["nightjar@suffix", "adaserve@suffix", "adaserve@none"])
def test_a_draft_that_is_never_asked_makes_room_for_pages(name: str) -> None:
    limits = limits_of(suffix_depth=8, num_pages=12, extension_pages=24)
    run = Run.of(limits, policy=name, elastic="on", elastic_rule=ElasticRule(persist_steps=1))
    run.serve([request_of(f"{index}", tokens=30) for index in range(8)])
    assert run.scheduler.stats.elastic_moves["expand"] > 0


def test_text_goes_on_standing_for_a_draft_whose_memory_became_pages() -> None:
    load, found = twice([request_of(f"{index}", tokens=30) for index in range(6)]), []
    for pages in ({}, {"num_pages": 12, "extension_pages": 244}):
        run = Run.of(
            limits_of(suffix_depth=8, **pages), policy="nightjar@suffix", elastic="on",
            elastic_rule=ElasticRule(persist_steps=1),
        )  # fmt: skip
        run.serve(load)
        found.append(run.scheduler.totals.suffix_tokens)
    assert run.scheduler.stats.elastic_moves["expand"] > 0 and found[1] > 0.5 * found[0] > 0


@pytest.mark.parametrize("policy", ["adaserve@suffix", "adaserve@none", "nightjar@none", "dsd@none"])
def test_a_loaded_draft_that_the_sources_leave_out_decides_nothing(policy: str) -> None:
    load, found = twice([request_of(f"{index}", tokens=30, tpot_slo_s=0.014) for index in range(6)]), []
    for depths in ({}, {"max_depth": 0, "max_width": 0}):
        run = Run.of(limits_of(suffix_depth=8, **depths), policy=policy)
        run.serve(load)
        metrics = [run.last[request.sequence_id].metrics for request in load]
        found.append([(each.slo_feasible, each.first_token_s, each.last_token_s) for each in metrics if each])
    assert found[0] == found[1]


def compiled() -> dict[str, int]:
    """How often each kernel was compiled, or loaded, in this process."""
    return {name: len(each.signatures) for name, each in vars(kernels).items() if hasattr(each, "signatures")}


def test_no_kernel_is_compiled_by_a_step() -> None:
    code = """
from tests.scheduler.test_text_drafter import compiled, drafter_of, limits_of, np, start
from tests.slow import slow_after

drafter, batch = drafter_of(limits_of())
before = compiled()
assert before["propose_rows"] and before["index_tokens"]
state = start(batch, "a", [5, 6, 7, 5, 6])
for _ in range(2):
    drafter.propose(np.array([state.slot]), np.array([9]))
    drafter.source.keep(np.arange(9, dtype=np.int32), "")
print(before == compiled())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "True", result.stderr
