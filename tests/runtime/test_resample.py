"""Drawing again from edited logits: random requests and trees against the definition, node by node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from adaserve_jax.constraints.constraints import Constraints, drop_disallowed, edited_rows
from adaserve_jax.models.placement import Placement
from adaserve_jax.runtime.compile import BucketSet, compile_all
from adaserve_jax.runtime.pools import NO_PAGE, InFlight
from adaserve_jax.runtime.programs import VerifyResult, outcome_sizes
from adaserve_jax.runtime.resample import Resampler, prompt_logprobs, step_logprobs, unpack_report
from adaserve_jax.runtime.step_layout import pack_verify, step_layout
from adaserve_jax.sampling import RowSampling
from adaserve_jax.tree.sampling import DeviceSampling, draw
from adaserve_jax.types import (
    DraftTrees,
    Limits,
    LogitEdits,
    Logprobs,
    SamplingParams,
    ScoredPrompts,
    Sequence,
    StepOutcome,
    StepPlan,
)
from tests.constrained import constrain
from tests.constraints.definition import LETTERS, VOCAB, Letters, edited
from tests.plans import i32, packed_trees, step_plan

PAGE, MAX_PAGES, ROWS, DEPTH, TOKENS, SAMPLED = 4, 8, 4, 3, 48, 16
LIMITS = Limits(ROWS, (TOKENS,), SAMPLED, PAGE * MAX_PAGES, PAGE, 64, DEPTH, 2)
FEW = 6
"""Tokens that texts are made of, so that they come again."""


@dataclass
class Row:
    """A request with its output so far. tokens, parents: of its tree, root first; empty for the end of a prompt."""

    request: Sequence
    output: list[int]
    tokens: list[int]
    parents: list[int]

    @property
    def text(self) -> list[int]:
        return self.request.prompt_ids.tolist() + self.output

    def path(self, node: int) -> list[int]:
        """Output at a node."""
        below = []
        while self.parents[node] >= 0:
            below.append(self.tokens[node])
            node = self.parents[node]
        return self.output + below[::-1]


@pytest.fixture(scope="module")
def target() -> Any:
    """What a `Resampler` needs of the target: no weights."""
    stub = SimpleNamespace(
        role="target", config=SimpleNamespace(vocab_size=VOCAB),
        programs=SimpleNamespace(synthetic=None, layout=lambda bucket: step_layout(bucket, MAX_PAGES)),
        buckets=BucketSet((TOKENS,), (ROWS,), SAMPLED), placement=Placement.on_one(),
    )  # fmt: skip
    stub.compiled = compile_all(Resampler(stub, LIMITS).declare())
    return stub


def random_sampling(rng: np.random.Generator) -> SamplingParams:
    """About half of the parameters of each, on a grid that float32 holds exactly."""
    words = tuple("".join(rng.choice(list(LETTERS[:FEW]), rng.integers(1, 4))) for _ in range(3))
    asked: dict[str, Any] = {
        "presence_penalty": float(rng.integers(-8, 9)) / 4,
        "frequency_penalty": float(rng.integers(-8, 9)) / 4,
        "repetition_penalty": float(rng.choice([0.5, 2.0, 4.0])),
        "logit_bias": {int(t): float(rng.integers(-4, 5)) for t in rng.integers(0, VOCAB, 4)},
        "min_tokens": int(rng.integers(0, 9)),
        "bad_words": words,
        "logprobs": int(rng.integers(0, 21)),
    }
    return SamplingParams(
        max_tokens=20, temperature=0.0, **{name: value for name, value in asked.items() if rng.random() < 0.5}
    )


def random_row(rng: np.random.Generator, index: int, nodes: int) -> Row:
    prompt = rng.integers(2, 2 + FEW, rng.integers(1, 8))
    output = rng.integers(2, 2 + FEW, rng.integers(1 if nodes else 0, 9)).tolist()
    stops = frozenset(rng.integers(0, VOCAB, 3).tolist())
    request = Sequence(f"r{index}", prompt.astype(np.int32), random_sampling(rng), 0, 0.0, stop_token_ids=stops)
    tokens, parents, depth = output[-1:], [-1], [0]
    for node in range(1, nodes):
        parent = int(rng.choice([n for n in range(node) if depth[n] < DEPTH]))
        used = [tokens[n] for n in range(1, node) if parents[n] == parent]
        tokens.append(int(rng.choice([t for t in range(2, 2 + FEW + node) if t not in used])))
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return Row(request, output, tokens, parents if nodes else [])


def step_of(rows: list[Row]) -> tuple[StepPlan, DraftTrees]:
    """Rows with trees first, then prompts: one of them not to its end."""
    decode = [row for row in rows if row.parents]
    prompts = [row for row in rows if not row.parents]
    table = np.arange(len(rows) * MAX_PAGES, dtype=np.int32).reshape(len(rows), MAX_PAGES)
    chunks = [row.text[:2] if row is prompts[-1] and len(row.text) > 2 else row.text for row in prompts]
    return step_plan(
        len(decode), chunks, root_token=i32(row.tokens[0] for row in decode),
        ctx_len=i32(len(row.text) - 1 if row.parents else 0 for row in rows), page_table=table,
        prefill_final=np.array([len(c) == len(r.text) for c, r in zip(chunks, prompts, strict=True)], bool),
        tree_token_cap=SAMPLED,
    ), packed_trees((row.tokens, row.parents) for row in decode)  # fmt: skip


def prepared(target: Any, limits: Limits = LIMITS) -> Resampler:
    resampler = Resampler(target, limits)
    resampler.prepare()
    return resampler


def run(target: Any, plan: StepPlan, trees: DraftTrees, edits: Any, logits: np.ndarray) -> tuple[StepOutcome, InFlight]:
    """The second program on made logits, f32[SAMPLED, V], as the executor calls it."""
    bucket = target.buckets.all()[0]
    step = pack_verify(bucket, MAX_PAGES, plan, trees)
    drawn = jnp.asarray(logits.argmax(axis=1), jnp.int32)
    first = VerifyResult(jnp.zeros(sum(outcome_sizes(bucket, DEPTH)), jnp.int32), drawn, jnp.asarray(logits))
    nothing = jnp.zeros(TOKENS, jnp.int32)
    amend = prepared(target).redraw(step, edits, plan.scored)
    again, in_flight = amend(first, InFlight(nothing, nothing, nothing, nothing))
    parts = np.split(np.asarray(again.outcome), np.cumsum(outcome_sizes(bucket, DEPTH)))
    accepted = parts[2][: trees.num_nodes] != 0
    found = unpack_report(parts[3], bucket.sampled)
    told = step_logprobs(found, plan, trees, accepted, edits, DEPTH)
    tokens, scores = parts[0].reshape(ROWS, DEPTH + 1), prompt_logprobs(found, plan, trees)
    return StepOutcome(tokens, parts[1], accepted, 0.0, 0.0, 0.0, TOKENS, told, prompt_logprobs=scores), in_flight


def scored(rng: np.random.Generator, plan: StepPlan, trees: DraftTrees) -> StepPlan:
    """The plan, scoring as much of its chunks as may be: none of a chunk's ends that are prompts' ends."""
    ends = plan.prefill_counts.cumsum()[plan.prefill_final] - 1
    at = np.setdiff1d(np.arange(plan.num_prefill_tokens), ends)
    at = at[: SAMPLED - trees.num_nodes - len(ends)].astype(np.int32)
    rows = np.repeat(np.arange(len(plan.prefill_counts)), plan.prefill_counts)[at] + plan.num_decode
    counts = np.bincount(rows, minlength=plan.num_rows)
    asked = np.flatnonzero(counts).astype(np.int32)
    token = rng.integers(0, VOCAB, len(at)).astype(np.int32)
    return replace(plan, scored=ScoredPrompts(asked, counts[asked].astype(np.int32), asked * 0 + 20, at, token))


def check_told(logits: np.ndarray, token: int, told: Logprobs) -> None:
    """Check what is told of one token, of logits f32[V]."""
    raw, likeliest = log_softmax(logits.astype(np.float64)), np.argsort(-logits)
    np.testing.assert_allclose(told.own, raw[token], atol=1e-4)
    assert told.rank == 1 + likeliest.tolist().index(token)
    np.testing.assert_array_equal(told.top_ids, likeliest[:20])
    np.testing.assert_allclose(told.top, raw[likeliest[:20]], atol=1e-4)


def test_random_steps_follow_the_definition(target: Any) -> None:
    rng = np.random.default_rng(3)
    walked = told = prompts = 0
    for number in range(80):
        sizes = [*rng.integers(1, 6, 2).tolist(), 0, 0]
        rows = [random_row(rng, index, nodes) for index, nodes in enumerate(sizes)]
        constraints = Constraints(VOCAB, Letters())
        for row in rows:
            constrain(constraints, row.request)
            constraints.push(row.request.sequence_id, row.output)
        plan, trees = step_of(rows)
        if number % 2:
            plan = scored(rng, plan, trees)
        logits = rng.normal(0, 3, (SAMPLED, VOCAB)).astype(np.float32)
        # what a tree proposes is likely, so that walks are long
        for node in range(trees.num_nodes):
            if trees.parent[node] >= 0:
                logits[trees.parent[node], trees.token[node]] += 8
        edits = constraints.edits(plan, trees, [row.request.sequence_id for row in rows])
        if edits is None:
            continue
        outcome, in_flight = run(target, plan, trees, edits, logits)
        assert (outcome.prompt_logprobs is None) == (plan.scored is None)
        if plan.scored is not None and outcome.prompt_logprobs is not None:
            kept, found = logits[trees.num_nodes + np.count_nonzero(plan.prefill_final) :], outcome.prompt_logprobs
            for place, token in enumerate(plan.scored.token.tolist()):
                check_told(kept[place], token, Logprobs(*(part[place] for part in vars(found).values())))
                prompts += 1
        first = np.cumsum([0, *sizes[:2]])
        ends = trees.num_nodes + np.cumsum(plan.prefill_final) - 1
        for index, row in enumerate(rows):
            if not row.parents and not plan.prefill_final[index - 2]:
                assert outcome.counts[index] == 0
                continue
            expected, node, nodes = [], 0, list(range(len(row.parents))) or [0]
            while True:
                at = first[index] + node if row.parents else ends[index - 2]
                output = row.path(node) if row.parents else row.output
                scores = edited(
                    logits[at],
                    row.request.prompt_ids.tolist(),
                    output,
                    row.request.sampling,
                    row.request.stop_token_ids,
                )
                expected.append(int(scores.argmax()))
                assert np.isfinite(scores.max())
                if row.request.sampling.logprobs is not None:
                    assert outcome.logprobs is not None
                    place = index, len(expected) - 1
                    of_place = Logprobs(*(part[place] for part in vars(outcome.logprobs).values()))
                    check_told(logits[at], expected[-1], of_place)
                    told += 1
                found = [n for n in nodes if row.parents and row.parents[n] == node and row.tokens[n] == expected[-1]]
                if not found:
                    break
                node = found[0]
                walked += 1
            assert outcome.tokens[index, : outcome.counts[index]].tolist() == expected, (row, index)
        kept = np.flatnonzero(np.asarray(in_flight.page) < NO_PAGE)
        assert len(kept) == int(outcome.accepted.sum()) + plan.num_prefill_tokens
    assert walked > 40 and told > 40 and prompts > 40


def test_rows_that_ask_for_nothing_keep_what_the_first_program_drew(target: Any) -> None:
    """Even where drawing again would give another token."""
    prompt = np.array([2, 3], np.int32)
    penalised = Sequence("a", prompt, SamplingParams(presence_penalty=1.0, temperature=0.0), 0, 0.0)
    rows = [Row(penalised, [4], [4], [-1]), Row(Sequence("b", prompt, SamplingParams(), 0, 0.0), [5], [5], [-1])]
    constraints = Constraints(VOCAB, Letters())
    constrain(constraints, penalised)
    plan, trees = step_of(rows)
    edits = constraints.edits(plan, trees, ["a", "b"])
    assert edits is not None and edits.changed.tolist() == [True, False]
    assert edited_rows(edits, plan, trees).tolist() == [True, False]
    logits = np.zeros((SAMPLED, VOCAB), np.float32)
    logits[:, 7] = 1.0
    bucket = target.buckets.all()[0]
    step = pack_verify(bucket, MAX_PAGES, plan, trees)
    drawn = jnp.full(SAMPLED, 9, jnp.int32)
    nothing = jnp.zeros(TOKENS, jnp.int32)
    first = VerifyResult(jnp.zeros(sum(outcome_sizes(bucket, DEPTH)), jnp.int32), drawn, jnp.asarray(logits))
    again, _ = prepared(target).redraw(step, edits)(first, InFlight(nothing, nothing, nothing, nothing))
    assert np.asarray(again.outcome)[: 2 * (DEPTH + 1) : DEPTH + 1].tolist() == [7, 9]


def test_with_noise_the_draw_is_that_of_the_edited_logits(target: Any) -> None:
    rng = np.random.default_rng(5)
    bias = {int(token): float(rng.integers(-8, 9)) for token in range(VOCAB)}
    sampling = SamplingParams(temperature=0.7, top_k=9, logit_bias=bias)
    row = Row(Sequence("a", np.array([2], np.int32), sampling, 7, 0.0), [3], [3], [-1])
    constraints = Constraints(VOCAB, Letters())
    constrain(constraints, row.request)
    plan, trees = step_of([row])
    sampler = RowSampling(
        np.array([7], np.uint64), np.zeros(1, np.int32), np.full(1, 0.7, np.float32), np.full(1, 9, np.int32),
        np.ones(1, np.float32), np.zeros(1, np.float32),
    )  # fmt: skip
    plan = replace(plan, sampling=sampler)
    edits = constraints.edits(plan, trees, ["a"])
    one = DeviceSampling(
        np.array([[7, 0]], np.uint32), *(getattr(sampler, name) for name in DeviceSampling._fields[1:])
    )
    drawn = jax.jit(draw)
    for _ in range(20):
        logits = rng.normal(0, 3, (SAMPLED, VOCAB)).astype(np.float32)
        outcome, _ = run(target, plan, trees, edits, logits)
        scores = edited(logits[0], [2], [3], sampling, frozenset()).astype(np.float32)
        assert outcome.tokens[0, 0] == drawn(scores[None], one, np.array([2], np.int32))[0]


def test_a_position_without_a_token_is_cut(target: Any) -> None:
    """The tree goes through `ab`; after it every letter is banned, since all of them are words."""
    words = (*(f"ab{letter}" for letter in LETTERS), "c")
    request = Sequence(
        "a", np.array([2], np.int32), SamplingParams(temperature=0.0, bad_words=words, min_tokens=9, max_tokens=9), 0,
        0.0, stop_token_ids=frozenset({0, 1}),
    )  # fmt: skip
    a, b = Letters().spell("ab")
    row = Row(request, [a], [a, b, b + 5], [-1, 0, 1])
    constraints = Constraints(VOCAB, Letters())
    constrain(constraints, request)
    constraints.push("a", [a])
    plan, trees = step_of([row])
    edits = constraints.edits(plan, trees, ["a"])
    assert edits is not None and edits.allowed is not None
    assert edits.allowed.any(axis=1).tolist() == [True, False, True]
    logits = np.zeros((SAMPLED, VOCAB), np.float32)
    logits[0, b] = logits[1, b + 5] = 5.0
    outcome, _ = run(target, plan, trees, edits, logits)
    assert outcome.counts[0] >= 2
    cut, stuck = drop_disallowed(outcome, edits, plan, trees, ["a"])
    assert (cut.counts[0], stuck) == (1, ["a"])
    assert cut.tokens[0, 0] == b


WIDE = 3000


@pytest.fixture(scope="module")
def wide(target: Any) -> Any:
    """With a vocabulary of which a row has 32 + 1024 tokens at most: tables of 1, 3 and 1 chunks for four rows."""
    stub = SimpleNamespace(**{**target.__dict__, "config": SimpleNamespace(vocab_size=WIDE)})
    stub.compiled = compile_all(Resampler(stub, LIMITS).declare())
    return stub


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entries", "chunks"), [(1, 1), (1024, 1), (1025, 1 + 3), (4096, 1 + 3), (4097, 1 + 3 + 1), (4224, 1 + 3 + 1)]
)
def test_long_lists_go_in_as_few_tables_as_hold_them(wide: Any, entries: int, chunks: int) -> None:
    rng = np.random.default_rng(entries)
    bias = rng.integers(-8, 9, (ROWS, 1056)).astype(np.float32)
    token = np.array([rng.permutation(WIDE)[:1056] for _ in range(ROWS)], np.int32)
    row = np.repeat(np.arange(ROWS, dtype=np.int32), 1056)
    place = rng.permutation(ROWS * 1056)[:entries]
    nothing = np.zeros(entries, np.int32)
    edits = LogitEdits(
        *np.array([[0] * ROWS, [0] * ROWS, [1] * ROWS], np.float32), row[place], token.reshape(-1)[place], nothing,
        nothing > 0, bias.reshape(-1)[place], None, np.ones(ROWS, bool), np.full(ROWS, -1, np.int32),
    )  # fmt: skip
    prompt = np.array([2], np.int32)
    plan, trees = step_of(
        [Row(Sequence(f"{r}", prompt, SamplingParams(), 0, 0.0), [3], [3], [-1]) for r in range(ROWS)]
    )
    logits = rng.normal(0, 3, (SAMPLED, WIDE)).astype(np.float32)
    sent = []

    def spy(*arguments: Any) -> Any:
        sent.extend(arguments[4])
        return program(*arguments)

    ((key, program),) = wide.compiled.items()
    spied = SimpleNamespace(**{**wide.__dict__, "compiled": {key: spy}})
    outcome, _ = run(spied, plan, trees, edits, logits)
    scores = logits[:ROWS].copy()
    np.add.at(scores, (edits.row, edits.token), edits.bias)
    assert outcome.tokens[:, 0].tolist() == scores.argmax(axis=1).tolist()
    assert sum(table.nbytes for table in sent if isinstance(table, np.ndarray)) == 12 * 1024 * chunks
    assert sum(table.nbytes for table in sent) == 12 * 1024 * 5


def test_one_number_of_rows_serves_every_step(target: Any) -> None:
    """A step of one row in a bucket of one is drawn again in that of most rows."""
    several = SimpleNamespace(**{**target.__dict__, "buckets": BucketSet((TOKENS,), (1, ROWS), SAMPLED)})
    small, large = several.buckets.all()
    assert (small.rows, large.rows) == (1, ROWS)
    resampler = Resampler(several, LIMITS)
    assert resampler.bucket(small) == resampler.bucket(large) == large
    assert [program.key for program in resampler.declare()] == list(target.compiled)
