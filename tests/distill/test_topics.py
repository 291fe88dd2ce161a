"""Topics: real text of three kinds through the embedded draft's embedding, and the rules on made vectors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from adaserve_jax.distill.routing import MEMORY, MIN_PROMPTS, TENANT_SHARE, Topic, TopicClassifier, read_examples
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import resolve_folder
from tests.distill import topic_prompts

CODE, MATHS = 1, 2
EXAMPLES = 20
NAMES = ("default", "code", "maths")
HASHES = dict.fromkeys(NAMES, "")
"""Of no draft's examples."""


@pytest.fixture(scope="module")
def embedding() -> np.ndarray:
    weights = load_file(resolve_folder("demo", "draft") / "model.safetensors")
    assert weights["model.embed_tokens.weight"].dtype == np.float16  # no type is asked for
    return weights["model.embed_tokens.weight"]


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[list[int]]]:
    tokenizer = Tokenizer.from_file(str(resolve_folder("demo", "draft") / "tokenizer.json"))
    texts = {"code": topic_prompts.code(), "maths": topic_prompts.maths(), "prose": topic_prompts.prose()}
    rng = np.random.default_rng(0)
    return {name: [tokenizer.encode(text).ids for text in rng.permutation(part)[:200]] for name, part in texts.items()}


def taught(embedding: np.ndarray, prompts: dict[str, list[list[int]]], **examples: int) -> TopicClassifier:
    """With EXAMPLES prompts of each named topic, which is the draft of that index."""
    topics = TopicClassifier(len(NAMES), embedding)
    for name, draft in examples.items():
        for token_ids in prompts[name][:EXAMPLES]:
            topics.learn(draft, token_ids)
    return topics


def share(topics: TopicClassifier, prompts: list[list[int]], draft: int) -> float:
    """Of prompts that were no examples, the share that is routed to `draft`."""
    return float(np.mean([topics.route(token_ids) == draft for token_ids in prompts[EXAMPLES:]]))


def test_real_text_finds_its_draft(embedding: np.ndarray, prompts: dict[str, list[list[int]]]):
    assert all(len(part) >= 100 for part in prompts.values())
    topics = taught(embedding, prompts, code=CODE, maths=MATHS, prose=0)
    assert share(topics, prompts["code"], CODE) >= 0.95
    assert share(topics, prompts["maths"], MATHS) >= 0.95
    assert share(topics, prompts["prose"], 0) >= 0.95


def test_a_default_without_examples_has_what_is_far_from_every_topic(
    embedding: np.ndarray, prompts: dict[str, list[list[int]]]
):
    topics = taught(embedding, prompts, code=CODE, maths=MATHS)
    assert share(topics, prompts["code"], CODE) >= 0.85
    assert share(topics, prompts["maths"], MATHS) >= 0.85
    assert share(topics, prompts["prose"], 0) >= 0.85
    one = taught(embedding, prompts, maths=MATHS)
    assert share(one, prompts["maths"], MATHS) >= 0.85
    assert share(one, prompts["prose"] + prompts["code"], 0) >= 0.95


def test_what_a_few_prompts_say_is_no_topic(embedding: np.ndarray, prompts: dict[str, list[list[int]]]):
    topics = TopicClassifier(len(NAMES), embedding)
    for token_ids in prompts["code"][: MIN_PROMPTS - 1]:
        topics.learn(CODE, token_ids)
    assert {topics.route(token_ids) for token_ids in prompts["code"]} == {0}
    only_default = taught(embedding, prompts, code=0)
    assert {only_default.route(token_ids) for token_ids in prompts["code"]} == {0}


def plain(*rows: list[float]) -> TopicClassifier:
    """Two drafts; the rows' mean is 0, so directions are the rows' own."""
    assert np.allclose(np.mean(rows, 0), 0)
    return TopicClassifier(2, np.array(rows, np.float32))


def test_a_prompt_in_the_middle_is_the_defaults():
    topics = plain([1, 0], [-1, 0], [0, 1], [0.02, 1], [-0.02, -2])
    for _ in range(MIN_PROMPTS):
        topics.learn(0, [0])
        topics.learn(1, [1])
    assert topics.route([1]) == 1 and topics.route([0]) == 0
    assert topics.route([2]) == 0  # at right angles to both
    topics = plain([-1, 0], [1, 0], [0, 1], [0.02, 1], [-0.02, -2])
    for _ in range(MIN_PROMPTS):
        topics.learn(0, [0])
        topics.learn(1, [1])
    assert topics.route([3]) == 0  # cosines 0.02 and -0.02: nearer to the topic, by less than the margin


def test_a_direction_counts_each_token_once():
    topics = plain([4, 0], [0, 3], [-4, -3])
    assert np.allclose(topics.direction([0, 0, 0, 1, 0]), [0.8, 0.6])
    assert np.allclose(topics.direction([1] + [0] * 2000), [1, 0])  # the end of a long prompt
    assert topics.direction([0, 1, 2]).tolist() == [0, 0]


def test_ids_beyond_the_drafts_table_are_left_out():
    """A target may be padded further than its draft."""
    topics = plain([4, 0], [0, 3], [-4, -3])
    assert topics.direction([0, 3, 1, 2**31 - 1]).tolist() == topics.direction([0, 1]).tolist()
    for number in range(MIN_PROMPTS):
        topics.learn(0, [0])
        topics.learn(1, [number % 2])  # seen from between the topics, the middle of the table is nearer to this one
    before = topics.to_state(dict.fromkeys(NAMES[:2], ""))
    for nothing in ([], [3, 99]):
        assert topics.direction(nothing).tolist() == [0, 0]
        assert topics.route(nothing) == 0
        topics.learn(1, nothing)
    assert topics.to_state(dict.fromkeys(NAMES[:2], "")) == before


def test_a_topic_reaches_as_far_as_its_own_prompts():
    narrow, wide = plain([1, 0], [1, 1], [-2, -1]), plain([1, 0], [1, 1], [-2, -1])
    for prompt in [[0]] * 10:
        narrow.learn(1, prompt)
    for prompt in [[0], [1]] * 5:
        wide.learn(1, prompt)
    assert (narrow.route([0]), narrow.route([1]), narrow.route([2])) == (1, 0, 0)
    assert (wide.route([0]), wide.route([1]), wide.route([2])) == (1, 1, 0)


def test_topics_at_one_place_do_not_divide_by_nothing():
    topics = plain([1, 0], [1, 0], [-2, 0])
    for draft in (0, 1):
        for _ in range(MIN_PROMPTS):
            topics.learn(draft, [draft])
    assert topics.route([0]) == topics.route([1]) == topics.route([0, 1, 2]) == 0


def test_a_topic_follows_what_comes():
    topics = plain([1, 0], [0, 1], [-1, -1])
    for prompt in [[0]] * 50 + [[1]] * 5 * MEMORY:
        topics.learn(1, prompt)
    assert (topics.route([0]), topics.route([1])) == (0, 1)


def test_shares_are_what_each_client_has_of_the_mean():
    """The mean of axes, one per client, has each one's share as its number there."""
    topics = plain(*np.eye(4).tolist(), *(-np.eye(4)).tolist())
    topic = Topic(np.zeros(4, np.float32))
    rng = np.random.default_rng(0)
    for client in [0] * 6 + [1] * 3 + rng.choice(4, 3 * MEMORY, p=[0.9, 0.06, 0.02, 0.02]).tolist():
        topic.add(topics.direction([client]), None if client == 3 else str(client))
        own = [topic.shares.get(str(client), 0.0) for client in range(3)]
        assert np.allclose(own, topic.mean[:3], atol=2e-4)
        assert topic.count <= MIN_PROMPTS or max(own) <= max(TENANT_SHARE, 6 / topic.count)
    assert topic.count < 2 * MEMORY and 0.4 < own[0] <= TENANT_SHARE


def test_a_client_alone_may_have_a_topic_beside_its_examples():
    topics = plain([1, 0], [0, 1], [-1, -1])
    for prompt, tenant in [([0], None)] * 10 + [([1], "ann")] * 5 * MEMORY:
        topics.learn(1, prompt, tenant)
    assert (topics.route([0]), topics.route([1])) == (0, 1)


def test_a_restart_goes_on_with_the_same_topics(embedding: np.ndarray, prompts: dict[str, list[list[int]]]):
    before = taught(embedding, prompts, code=CODE, maths=MATHS)
    state = json.loads(json.dumps(before.to_state(HASHES)))
    after = TopicClassifier(len(NAMES), embedding)
    after.from_state(HASHES, state)
    every = [token_ids for part in prompts.values() for token_ids in part]
    routed = [[topics.route(token_ids) for token_ids in every] for topics in (before, after)]
    assert routed[0] == routed[1] and set(routed[0]) == {0, CODE, MATHS}
    other = TopicClassifier(2, embedding)
    other.from_state({"default": "", "maths": ""}, state)  # another set of drafts: topics go by name
    assert share(other, prompts["maths"], 1) >= 0.9


def test_a_state_that_does_not_fit_is_told_and_changes_nothing(embedding: np.ndarray):
    topics = TopicClassifier(len(NAMES), embedding)
    state = topics.to_state(HASHES)
    for other in (embedding + np.float16(1), embedding[:-1], embedding[:, :-1]):
        with pytest.raises(CheckpointError, match="of this draft's embedding"):
            TopicClassifier(len(NAMES), other).from_state(HASHES, state)

    def changed(**values: object) -> dict[str, object]:
        return state | {"topics": {"maths": state["topics"]["maths"] | values}}

    for broken, message in (
        ({}, "cannot be read"),
        (state | {"version": 9}, "of version 1 and of this draft's embedding; got version 9"),
        (state | {"embedding": "00"}, "topics are learned anew"),
        (state | {"topics": 3}, "kept topics cannot be read"),
        (changed(mean=[1.0]), "a mean of 128 finite numbers"),
        (changed(mean=[float("nan")] * 128), "finite numbers"),
        (changed(near=float("inf")), "finite numbers"),
        (changed(near=None), "cannot be read"),
        (changed(near=10**400), "cannot be read"),
        (changed(mean=[10**400] * 128), "cannot be read"),
        (changed(count=-1), "a count is an integer of at least 0, got -1"),
        (changed(count=True), "got True"),
        (changed(shares=[1]), "cannot be read"),
        (changed(shares={"ann": 2.0}), "shares are above 0 and at most 1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            topics.from_state(HASHES, broken)
    assert topics.to_state(HASHES) == state


def test_examples_are_the_lines_of_a_file(tmp_path: Path):
    assert read_examples(tmp_path) == []
    file = tmp_path / "topic_examples.txt"
    file.write_text("def f(x):\n\n  \nWie geht es dir?\n", encoding="utf-8")
    assert read_examples(tmp_path) == ["def f(x):", "Wie geht es dir?"]
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"topic_examples\.txt: expected prompts in UTF-8, one a line"):
        read_examples(tmp_path)
