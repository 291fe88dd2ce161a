"""Tokens of two vocabularies are counterparts if they stand for the same bytes: against a search through both lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.models.vocabulary_map import VocabularyMap, map_vocabulary
from tests.models.checkpoints import (
    ASSISTANT,
    EOS,
    USER,
    byte_tokenizer,
    metaspace_tokenizer,
    with_ids,
    write_tokenizer,
)

SPECIAL = [EOS, USER, ASSISTANT]
LETTERS = "abcdefgh"


def loaded(folder: Path, backend: Backend) -> Tokenizer:
    folder.mkdir()
    write_tokenizer(folder, backend)
    return Tokenizer.from_folder(folder)


def letters(words: list[str]) -> Backend:
    """A vocabulary of special tokens and of these words, whose ids are their places."""
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *words])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return backend


def check(found: VocabularyMap, ours: list[str], theirs: list[str]) -> None:
    """Compare with a search through the list of the draft for every token of the target."""
    for token, word in enumerate(ours):
        assert found.covered[token] == (word in theirs), word
        if word in theirs:
            assert theirs[found.to_draft[token]] == word
            continue
        ends = [other for other in theirs[len(SPECIAL) :] if word.endswith(other)]
        assert theirs[found.to_draft[token]] == max(ends, key=len, default=EOS), word
    assert found.num_tokens == len(ours) and found.num_covered == len(set(ours) & set(theirs))
    assert found.share == pytest.approx(found.num_covered / len(ours))


def test_tokens_are_found_by_their_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = sorted({"".join(rng.choice(list(LETTERS), rng.integers(1, 4))) for _ in range(300)})
    for trial in range(5):
        ours, theirs = (rng.permutation(words)[:150].tolist() for _ in range(2))
        target, draft = (
            loaded(tmp_path / f"{name}{trial}", letters(each)) for name, each in (("t", ours), ("d", theirs))
        )
        found = map_vocabulary(target, draft, 160, 153)
        assert found.kind == "intersection" and found.differs and len(found.covered) == len(found.to_draft) == 160
        check(found, [*SPECIAL, *ours], [*SPECIAL, *theirs])
        assert not found.covered[153:].any() and (found.to_draft < 153).all()


def test_rows_that_a_model_lacks_have_no_counterpart(tmp_path: Path) -> None:
    ours, theirs = ["a", "b", "ab", "c"], ["c", "b", "a"]
    target, draft = loaded(tmp_path / "t", letters(ours)), loaded(tmp_path / "d", letters(theirs))
    check(map_vocabulary(target, draft, 7, 5), [*SPECIAL, *ours], [*SPECIAL, "c", "b"])
    check(map_vocabulary(target, draft, 6, 6), [*SPECIAL, *ours[:3]], [*SPECIAL, *theirs])


def test_ways_to_write_bytes_are_of_no_account(tmp_path: Path) -> None:
    """Byte-level BPE and SentencePiece, in both directions: bytes, words, spaces, and characters beside their bytes."""
    level, piece = loaded(tmp_path / "level", byte_tokenizer()), loaded(tmp_path / "piece", metaspace_tokenizer())
    for target, draft in ((level, piece), (piece, level)):
        found = map_vocabulary(target, draft, target.vocab_size, draft.vocab_size)
        for token in range(target.vocab_size):
            meant = target.spelled(token)
            if found.covered[token]:
                assert draft.spelled(int(found.to_draft[token])) == meant
        covered = np.flatnonzero(found.covered)
        assert len(set(found.to_draft[covered].tolist())) == len(covered), "no two tokens have one counterpart"
        meanings = [{each.spelled(token) for token in range(each.vocab_size)} for each in (target, draft)]
        assert len(meanings[0] & meanings[1]) == found.num_covered > 256
        assert {target.spelled(int(token)) for token in covered} == meanings[0] & meanings[1]
    by_bytes = {level.spelled(token): token for token in range(level.vocab_size)}
    there = map_vocabulary(level, piece, level.vocab_size, piece.vocab_size)
    for meant, written in ((b"t", "t"), (b" a", "▁a"), (b" ", "▁"), ("é".encode()[:1], "<0xC3>")):  # not a char's byte
        assert there.to_draft[by_bytes[meant]] == metaspace_tokenizer().token_to_id(written)
    assert there.covered[by_bytes[b" "]] and not there.covered[by_bytes[b"ing"]]
    assert piece.spelled(int(there.to_draft[by_bytes[b"ing"]])) == b"g", "it is fed as its longest end"


def test_permuted_ids_are_found(tmp_path: Path) -> None:
    for name, make in (("level", byte_tokenizer), ("piece", metaspace_tokenizer)):
        backend = make()
        rows = backend.get_vocab_size()
        new_ids = np.random.default_rng(1).permutation(rows)
        target = loaded(tmp_path / name, backend)
        draft = loaded(tmp_path / f"{name}-permuted", with_ids(backend, new_ids))
        found = map_vocabulary(target, draft, rows, rows)
        np.testing.assert_array_equal(found.to_draft, new_ids)
        assert found.covered.all() and found.share == 1 and found.kind == "intersection"
        assert "intersection" in str(found) and f"100.0% of the target's tokens ({rows} of {rows})" in str(found)


def test_padded_vocabularies_keep_their_ids(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path / "plain", byte_tokenizer())
    named = tokenizer.vocab_size
    same = map_vocabulary(tokenizer, tokenizer, named + 8, named + 8)
    assert same.kind == "same" and not same.differs and same.covered.all() and same.share == 1
    for rows, draft_rows in ((named + 8, named + 20), (named + 20, named + 8), (named, named - 3)):
        found, both = map_vocabulary(tokenizer, tokenizer, rows, draft_rows), min(rows, draft_rows)
        assert found.kind == "padded" and found.share == min(named, both) / named
        np.testing.assert_array_equal(found.covered, np.arange(rows) < both)
        np.testing.assert_array_equal(found.to_draft[:both], np.arange(both))
        assert (found.to_draft < draft_rows).all(), "every token can be fed"


def test_a_draft_that_lacks_added_tokens_is_padded(tmp_path: Path) -> None:
    """As a base model is that drafts for a chat model; a row that neither tokenizer names is padding in both."""
    longer = byte_tokenizer()
    longer.add_special_tokens([AddedToken("<|think|>", special=True)])
    target, draft = loaded(tmp_path / "chat", longer), loaded(tmp_path / "base", byte_tokenizer())
    named = target.vocab_size
    found = map_vocabulary(target, draft, named + 4, named + 4)
    assert found.kind == "padded" and found.num_covered == named - 1
    np.testing.assert_array_equal(np.flatnonzero(~found.covered), [named - 1])
    assert found.to_draft[named - 1] == draft.eos_token_id, "it has no token for unknown ones"


def test_what_ends_a_text_is_found_by_its_role(tmp_path: Path) -> None:
    other = byte_tokenizer().to_str().replace(EOS, "</s>")
    target = loaded(tmp_path / "t", byte_tokenizer())
    folder = tmp_path / "d"
    folder.mkdir()
    write_tokenizer(folder, Backend.from_str(other))
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace(EOS, "</s>"))
    found = map_vocabulary(target, Tokenizer.from_folder(folder), target.vocab_size, target.vocab_size)
    assert found.covered.all() and found.kind == "padded"


def test_a_draft_with_too_few_tokens_is_refused(tmp_path: Path) -> None:
    ours = [a + b for a in LETTERS for b in LETTERS]
    target, draft = loaded(tmp_path / "t", letters(ours)), loaded(tmp_path / "d", letters(["ab", "A", "cd"]))
    with pytest.raises(CheckpointError, match=r"at least 10% .* has 7\.5% of those of .* \(5 of 67, .* or none"):
        map_vocabulary(target, draft, 67, 6)
