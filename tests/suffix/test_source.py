"""Trees of text already seen against a scan of every text, and what bounds and separates the texts that are kept."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.suffix.kernels import BINS, DEPTH_CLASSES, KINDS, gumbel
from adaserve_jax.suffix.source import MOST_SALTS, SuffixSource, TextRows, level_widths, prior_chances, source_bytes
from adaserve_jax.tree.sampling import gumbel_noise
from adaserve_jax.types import CandidateTrees
from tests.oracles.suffix import continuations

DEPTH = 8
CERTAIN = np.ones((2, DEPTH_CLASSES, KINDS, BINS), np.float32)
"""A table by which every node is worth proposing."""
small_texts = st.lists(st.integers(1, 4), min_size=2, max_size=60)


def rows_of(
    texts: list[list[int]], salts: list[str] | None = None, *, number: int = 0, depth: int = DEPTH,
    temperature: float = 0.0, width: int = 96,
) -> TextRows:  # fmt: skip
    """Rows in slots 0, 1, ... with these texts."""
    count = len(texts)
    text = np.zeros((4, width), np.int32)
    for slot, tokens in enumerate(texts):
        text[slot, : len(tokens)] = tokens
    return TextRows(
        text, np.arange(count), np.arange(count) + 10 * number, np.array([len(tokens) for tokens in texts]),
        np.full(count, depth), np.arange(count, dtype=np.uint64), np.zeros(count, np.int32),
        np.full(count, temperature, np.float32), salts or [""] * count,
    )  # fmt: skip


def paths(trees: CandidateTrees, row: int = 0) -> set[tuple[int, ...]]:
    """The paths of a row's nodes from the root."""
    found: dict[int, tuple[int, ...]] = {-1: ()}
    for column in np.flatnonzero(trees.log_f[row] > -np.inf).tolist():
        found[column] = (*found[int(trees.parent[row, column])], int(trees.token[row, column]))
        assert len(found[column]) == trees.depth[column]
    return set(found.values()) - {()}


@given(small_texts, st.lists(small_texts, max_size=3))
def test_every_path_followed_the_same_tokens_before(text: list[int], others: list[list[int]]) -> None:
    source = SuffixSource(4, DEPTH, 256)
    for other in others:
        source.keep(np.array(other, np.int32), "")
    found = paths(source.propose(rows_of([text]), CERTAIN))
    seen = continuations(text, others)
    assert all(any(tuple(after[: len(path)]) == path for _, after in seen) for path in found)
    assert bool(found) == bool([after for _, after in seen if after])


@given(small_texts)
def test_what_followed_the_newest_longest_match_is_proposed(text: list[int]) -> None:
    found = paths(SuffixSource(4, DEPTH, 0).propose(rows_of([text]), CERTAIN))
    seen = continuations(text, [])
    if seen:
        best = max(length for length, _ in seen)
        hashed = min(best, 8)  # contexts beyond the longest hashed one are found among the newest of that length
        newest = [after for length, after in seen if length >= hashed][-1]
        assert (newest[0],) in found


@given(st.lists(small_texts, min_size=2, max_size=6))
def test_growing_a_text_step_by_step_equals_starting_with_it(parts: list[list[int]]) -> None:
    grown, text = SuffixSource(4, DEPTH, 0), []
    for part in parts:
        text = (text + part)[:90]
        step = grown.propose(rows_of([text]), CERTAIN)
        anew = SuffixSource(4, DEPTH, 0).propose(rows_of([text]), CERTAIN)
        for name in ("token", "parent", "log_f", "cell"):
            np.testing.assert_array_equal(getattr(step, name), getattr(anew, name))


def test_a_text_with_a_period_goes_on_with_it() -> None:
    trees = SuffixSource(4, DEPTH, 0).propose(rows_of([[7, 8, 9, 7, 8, 9, 7, 8]]), CERTAIN)
    assert (9, 7, 8, 9, 7, 8, 9, 7) in paths(trees)


def test_a_slot_forgets_the_text_of_its_last_sequence() -> None:
    source = SuffixSource(4, DEPTH, 0)
    assert paths(source.propose(rows_of([[1, 2, 3, 1, 2]]), CERTAIN))
    assert not paths(source.propose(rows_of([[5, 6, 1, 2]], number=1), CERTAIN))


def test_texts_are_proposed_within_their_salt_only() -> None:
    """What other salts kept changes nothing, not even the order or the chances."""
    secret, text = [1, 2, 3, 4, 5, 6, 7, 8], [9, 1, 2, 3]
    alone, beside = SuffixSource(4, DEPTH, 64), SuffixSource(4, DEPTH, 64)
    for source in (alone, beside):
        source.keep(np.array([1, 2, 3, 9, 9], np.int32), "mine")
    beside.keep(np.array(secret, np.int32), "theirs")
    for temperature in (0.0, 0.8):
        mine, other = (s.propose(rows_of([text], ["mine"], temperature=temperature), CERTAIN) for s in (alone, beside))
        for name in ("token", "parent", "log_f", "cell", "log_q"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))
    assert (9,) in paths(mine) and (4,) not in paths(other)
    assert (4, 5, 6) in paths(beside.propose(rows_of([text], ["theirs"]), CERTAIN))
    assert not paths(beside.propose(rows_of([text], ["nobody's"]), CERTAIN))


class Salt(str):
    """A salt of which a test sees whether it is remembered."""

    __slots__ = ("__weakref__",)


def test_of_more_salts_than_are_remembered_those_without_a_text_are_dropped() -> None:
    """The store holds 1024 texts of 3 tokens. Each salt reads its own, before and after the others were dropped."""
    source, kept = SuffixSource(4, DEPTH, 4096), []

    def keep(number: int) -> None:
        salt = Salt(f"user {number}")
        kept.append(weakref.ref(salt))
        source.keep(np.array([7, 8, 100 + number], np.int32), salt)

    def remembered() -> list[int]:
        return [number for number, salt in enumerate(kept) if salt() is not None]

    def proposed(number: int) -> set[tuple[int, ...]]:
        return paths(source.propose(rows_of([[7, 8]], [f"user {number}"], number=number), CERTAIN))

    for number in range(MOST_SALTS):
        keep(number)
    assert remembered() == list(range(MOST_SALTS))
    keep(MOST_SALTS)
    assert remembered() == list(range(MOST_SALTS + 1 - 1024, MOST_SALTS + 1))
    keep(MOST_SALTS + 1)
    for number in (MOST_SALTS - 900, MOST_SALTS - 1, MOST_SALTS, MOST_SALTS + 1):
        assert proposed(number) == {(100 + number,)}
    assert not proposed(0) and not proposed(MOST_SALTS + 2)


def test_the_oldest_texts_make_room_and_ends_do_not_run_into_the_next_text() -> None:
    source = SuffixSource(4, DEPTH, 32)
    source.keep(np.array([1, 2, 3], np.int32), "")
    source.keep(np.array([4, 5, 6], np.int32), "")
    assert paths(source.propose(rows_of([[9, 1, 2]]), CERTAIN)) == {(3,)}
    for start in range(100, 128, 4):
        source.keep(np.arange(start, start + 4, dtype=np.int32), "")
        assert source.kept_tokens <= 32
    assert not paths(source.propose(rows_of([[9, 1, 2]], number=1), CERTAIN))
    assert paths(source.propose(rows_of([[9, 124, 125]], number=2), CERTAIN)) == {(126,), (126, 127)}


def test_a_text_longer_than_the_store_keeps_its_end() -> None:
    source = SuffixSource(4, DEPTH, 16)
    source.keep(np.arange(1, 60, dtype=np.int32), "")
    assert (59,) in paths(source.propose(rows_of([[57, 58]]), CERTAIN))
    assert not paths(source.propose(rows_of([[20, 21]], number=1), CERTAIN))


def test_noise_is_that_of_the_target() -> None:
    seed = 0x9ABCDEF012345678
    words = np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32)
    noise = np.asarray(gumbel_noise(words, np.array([3]), np.array([77]), 501))[0]  # type: ignore[arg-type]
    own = [gumbel(np.uint64(seed), np.int32(3), np.int64(77), np.int32(token)) for token in range(501)]
    np.testing.assert_allclose(own, noise, atol=1e-5)


def test_siblings_are_ranked_by_share_and_at_temperatures_above_zero_by_noise_too() -> None:
    text = [5, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2, 3, 8, 1, 2]
    source = SuffixSource(4, DEPTH, 0)
    greedy = source.propose(rows_of([text]), prior_chances())
    assert greedy.token[0, 0] == 3, "twice as often"
    firsts = set()
    for seed in range(40):
        rows = rows_of([text], number=seed, temperature=1.0)
        rows.seed[:] = seed
        trees = source.propose(rows, prior_chances())
        there = [int(trees.token[0, c]) for c in range(4) if trees.log_f[0, c] > -np.inf]
        scores = {t: np.log(share) + gumbel(np.uint64(seed), np.int32(0), np.int64(len(text)), np.int32(t))
                  for t, share in ((3, 2 / 3), (4, 1 / 3))}  # fmt: skip
        if len(there) == 2:
            assert there[0] == max(scores, key=lambda t: scores[t])
        firsts |= set(there[:1])
    assert firsts == {3, 4}


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_no_node_is_deeper_than_its_row_can_use(depth: int) -> None:
    trees = SuffixSource(4, DEPTH, 0).propose(rows_of([[1, 2, 3] * 5], depth=depth), CERTAIN)
    assert max((len(path) for path in paths(trees)), default=0) == depth


def test_memory_is_what_is_said() -> None:
    slots, longest, kept = 4, 96, 256
    source = SuffixSource(slots, DEPTH, kept)
    source.propose(rows_of([[1, 2, 3]], width=longest), CERTAIN)
    held = sum(value.nbytes for value in vars(source).values() if isinstance(value, np.ndarray))
    small = source.widths.nbytes + source.prior.nbytes + 64 * slots + 4 * int(level_widths(DEPTH).sum())
    assert abs(held - source_bytes(slots, longest, kept)) <= small
