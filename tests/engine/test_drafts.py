"""A draft that pads its vocabulary otherwise than the target speaks of the same tokens, so the text is the target's."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.errors import CheckpointError
from tests.engines import TINY
from tests.models.checkpoints import metaspace_tokenizer, write_checkpoint

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


def test_a_draft_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target")
    draft = write_checkpoint(tmp_path / "draft", tokenizer=metaspace_tokenizer())
    with pytest.raises(CheckpointError, match="must have the same vocabulary, but token 3 is"):
        LLM(target, draft)
