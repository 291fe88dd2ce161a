"""The text is the target's whatever vocabulary the draft has: padded otherwise, permuted, or of another tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import CheckpointError
from adaserve_jax.runtime.executor import load_executor
from tests.engines import TINY
from tests.models.checkpoints import (
    ASSISTANT,
    EOS,
    USER,
    byte_tokenizer,
    metaspace_tokenizer,
    write_checkpoint,
    write_with_ids,
)

TARGET_VOCAB = 320
SAMPLING = [SamplingParams(max_tokens=20, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.3, 0.9)]


@pytest.mark.slow
@pytest.mark.parametrize("draft_vocab", [290, 350])
def test_draft_vocabulary_padded_to_another_size(tmp_path: Path, draft_vocab: int) -> None:
    """Both models emit ids of their padding here, as no trained one does."""
    target = write_checkpoint(tmp_path / "target", vocab_size=TARGET_VOCAB)
    draft = write_checkpoint(tmp_path / "draft", seed=1, vocab_size=draft_vocab, num_hidden_layers=1)
    prompts = [[5, TARGET_VOCAB - 1, 9], [7] * 20, [TARGET_VOCAB - 1]]
    with LLM(target, draft, **TINY | {"max_width": 2}) as llm:
        texts = {}
        for policy in ("ar", "spec:2", "adaserve"):
            llm.set_policy(policy)
            texts[policy] = [output.token_ids for output in llm.generate(prompts, SAMPLING)]
        assert texts["ar"] == texts["spec:2"] == texts["adaserve"]
        stats = llm.stats()
    assert stats.compiles_after_ready == 0
    assert any(token >= 290 for tokens in texts["ar"] for token in tokens), "no id of the padding was emitted"


EXACT_TINY = TINY | {"token_edges": (), "row_edges": (), "max_tree_tokens": 0, "max_batch_tokens": 32,
                     "deterministic": True, "max_width": 2}  # fmt: skip
PROMPTS = ["the thing is", "in the end", "é 😀"]


Texts = list[list[int]]


def run(target: Path, draft: Path, policies: tuple[str, ...]) -> tuple[dict[str, Texts], dict[str, float]]:
    """Return the texts under each policy, and which share of the drafted tokens was accepted."""
    texts: dict[str, Texts] = {}
    shares: dict[str, float] = {}
    sampling = [SamplingParams(max_tokens=20, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.8, 0.8)]
    with LLM(target, draft, calibrate=False, **EXACT_TINY) as llm:
        for policy in policies:
            llm.set_policy(policy)
            outputs = llm.generate(PROMPTS, sampling, slo=SLO(tpot_ms=0.1))
            texts[policy] = [output.token_ids for output in outputs]
            drafted = sum(output.metrics.drafted_tokens for output in outputs)
            shares[policy] = sum(output.metrics.accepted_tokens for output in outputs) / max(1, drafted)
            assert (drafted > 0) == (policy != "ar")
        assert llm.stats().compiles_after_ready == 0
    return texts, shares


@pytest.mark.slow
def test_text_is_the_targets_whatever_vocabulary_the_draft_has(tmp_path: Path) -> None:
    """Bytes are shared by both, words are not, and most of the rows of padding have no name in either."""
    target = write_checkpoint(tmp_path / "target")
    draft = write_checkpoint(
        tmp_path / "draft", seed=1, num_hidden_layers=1, vocab_size=300, tokenizer=metaspace_tokenizer()
    )
    texts, shares = run(target, draft, ("ar", "spec:2", "adaserve"))
    assert texts["ar"] == texts["spec:2"] == texts["adaserve"]
    assert shares["spec:2"] < 1, "a draft of other weights proposes other tokens"


@pytest.mark.slow
def test_the_target_with_permuted_ids_is_accepted_like_the_target(tmp_path: Path) -> None:
    """Its map undoes the permutation, and the noise is that of the target's ids: so it draws what the target draws."""
    rows = byte_tokenizer().get_vocab_size()
    target = write_checkpoint(tmp_path / "target", vocab_size=rows)
    new_ids = np.random.default_rng(3).permutation(rows)
    permuted = write_with_ids(tmp_path / "permuted", target, new_ids)
    texts, shares = run(target, target, ("ar", "spec:2"))
    moved_texts, moved_shares = run(target, permuted, ("spec:2",))
    assert texts["ar"] == texts["spec:2"] == moved_texts["spec:2"]
    assert moved_shares["spec:2"] == shares["spec:2"] > 0.9


def test_the_map_is_described(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, in the engine's information and in its ledger; several drafts may differ in different ways."""
    rows = byte_tokenizer().get_vocab_size()
    target = write_checkpoint(tmp_path / "target", vocab_size=rows)
    permuted = write_with_ids(tmp_path / "permuted", target, np.roll(np.arange(rows), 1))
    config = EngineConfig(str(target), str(target), drafts=(f"moved={permuted}",), **TINY)
    with caplog.at_level("INFO"):
        executor = load_executor(config)
    said = f"moved: intersection of vocabularies (tokens of equal bytes): covers 100.0% .* ({rows} of {rows})"
    expected = "default: the target's vocabulary; " + said
    assert re.search(re.escape(expected).replace(re.escape(".*"), ".*"), executor.resolved.draft_vocabulary)
    assert executor.resolved.draft_vocabulary in caplog.text
    parts = {part.name: part.device_bytes for part in executor.ledger.parts()}
    assert parts["draft vocabulary maps"] == 2 * 5 * rows
    moved = executor.draft_embedding(1)
    np.testing.assert_array_equal(moved, executor.draft_embedding(0), "a prompt is routed by the same vectors")
    executor.close()


def test_a_draft_with_next_to_nothing_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    few = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([EOS, USER, ASSISTANT, "a"])}, merges=[]))
    few.decoder = decoders.ByteLevel()
    target = write_checkpoint(tmp_path / "target")
    draft = write_checkpoint(tmp_path / "draft", tokenizer=few)
    with pytest.raises(CheckpointError, match=r"at least 10% of the target's tokens, but .*; use a draft whose"):
        LLM(target, draft)
